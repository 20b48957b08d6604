// 200 small calls of every kind: what tests/cuda/sanitize.sh runs under compute-sanitizer.
#include "cuda/merges.h"
#include "cuda/pools.h"

namespace attnfold::check::device_test {
namespace {

using Sanitized = DeviceTestWith<int>;

/** A random batch of what the kernel rows serve, cut short. */
void decode(std::mt19937_64& rng, uint64_t seed) {
  Spec spec = random_device_spec(rng);
  for (int32_t& n : spec.kv_len) n = std::min(n, 900);
  for (int32_t& n : spec.qo_len) n = std::min(n, 20);
  if (rng() % 2) std::fill(spec.qo_len.begin(), spec.qo_len.end(), 1);
  const Call call = generate(spec, seed);
  Answer answer;
  static constexpr int32_t kWorkers[] = {0, 0, 7, 60};
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, on_device(kWorkers[rng() % 4], rng() % 2 * seed), answer))
      << "seed " << seed;
  ATTNFOLD_EXPECT_HOLDS(right(call, answer)) << "seed " << seed;
}

TEST_P(Sanitized, Call) {
  const uint64_t seed = test::seed() + 30000 + static_cast<uint64_t>(GetParam());
  std::mt19937_64 rng(seed);
  switch (GetParam() % 5) {
    case 0: {
      TwinPool pool(rng, static_cast<DType>(rng() % kNumDTypes), rng() % 2);
      TwinRows rows(rng, pool, static_cast<DType>(rng() % 3), below(rng, 20));
      ATTNFOLD_EXPECT_HOLDS(append_both(pool, rows)) << "seed " << seed;
      return;
    }
    case 1: {
      ATTNFOLD_EXPECT_HOLDS((rng() % 2 ? plain_merge(rng) : any_merge(rng)).compare())
          << "seed " << seed;
      return;
    }
    default: decode(rng, seed);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Sanitized, ::testing::Range(0, 200));

}  // namespace
}  // namespace attnfold::check::device_test
