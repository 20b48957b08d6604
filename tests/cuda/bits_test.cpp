// Promises P1 to P5 on a device: answers against the float64 oracle, bits under schedules, batches,
// pages and cuts.
#include <random>

#include "check/call_file.h"
#include "cuda/device_suite.h"

namespace attnfold::check::device_test {
namespace {

using cases::kCausal;
using cases::kNone;
using cases::same_bytes;

using Random = DeviceTestWith<int>;

TEST_P(Random, EveryRowIsRightAndSchedulesDoNotChangeABit) {
  const uint64_t seed = test::seed() + static_cast<uint64_t>(GetParam());
  std::mt19937_64 rng(seed);
  const Call call = generate(random_device_spec(rng), seed);
  Answer first, answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, on_device(), first)) << "seed " << seed;
  ATTNFOLD_EXPECT_HOLDS(right(call, first)) << "seed " << seed;
  for (const int32_t workers : {1, 7, 100, 132, 264, 1000}) {
    for (const uint64_t cut_seed : {uint64_t{0}, seed + static_cast<uint64_t>(workers)}) {
      ATTNFOLD_ASSERT_HOLDS(cases::run(call, on_device(workers, cut_seed), answer))
          << "seed " << seed;
      ATTNFOLD_ASSERT_HOLDS(same_bytes(call, first, answer, std::to_string(workers) + " workers"))
          << "seed " << seed << ", cut_seed " << cut_seed;
    }
  }
}

TEST_P(Random, BatchMatesAndOrder) {
  const uint64_t seed = test::seed() + 1000 + static_cast<uint64_t>(GetParam());
  std::mt19937_64 rng(seed);
  const Call call = generate(random_device_spec(rng), seed);
  Answer whole, answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, on_device(), whole));
  std::vector<int32_t> reversed, twice;
  for (int32_t r = 0; r < call.batch; ++r) {
    reversed.insert(reversed.begin(), r);
    twice.push_back(r);
    twice.push_back(r);
    const Call one = select_requests(call, {r});
    ATTNFOLD_ASSERT_HOLDS(
        cases::run(one, on_device(r % 2 ? 64 : 0, seed + static_cast<uint64_t>(r)), answer));
    ATTNFOLD_ASSERT_HOLDS(
        cases::same_rows(one, answer, 0, whole, call.qo_indptr[r], one.num_rows(), "alone"))
        << "seed " << seed;
  }
  for (const std::vector<int32_t>& pick : {reversed, twice}) {
    const Call other = select_requests(call, pick);
    ATTNFOLD_ASSERT_HOLDS(cases::run(other, on_device(), answer));
    for (size_t i = 0; i < pick.size(); ++i) {
      const int32_t begin = other.qo_indptr[i], n = other.qo_indptr[i + 1] - begin;
      ATTNFOLD_ASSERT_HOLDS(cases::same_rows(other, answer, begin, whole, call.qo_indptr[pick[i]],
                                             n, "in another batch"))
          << "seed " << seed;
    }
  }
}

TEST_P(Random, WhereTheKeysLie) {
  const uint64_t seed = test::seed() + 2000 + static_cast<uint64_t>(GetParam());
  std::mt19937_64 rng(seed);
  const Call call = generate(random_device_spec(rng), seed);
  Answer first, answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, on_device(), first));
  int turn = 0;
  for (const int32_t page_size : {1, 3, 16, 64, 128}) {
    ++turn;
    const Call other = repage(call, page_size, turn % 2 ? ATTNFOLD_HND : ATTNFOLD_NHD,
                              turn % 3 == 0, seed + static_cast<uint64_t>(turn));
    ATTNFOLD_ASSERT_HOLDS(cases::run(other, on_device(), answer)) << "seed " << seed;
    ATTNFOLD_ASSERT_HOLDS(
        same_bytes(call, first, answer, "page size " + std::to_string(page_size)));
  }
  const Call ragged = to_ragged(call);
  ATTNFOLD_ASSERT_HOLDS(cases::run(ragged, on_device(), answer)) << "seed " << seed;
  ATTNFOLD_ASSERT_HOLDS(same_bytes(call, first, answer, "ragged"));
}

INSTANTIATE_TEST_SUITE_P(Seeds, Random, ::testing::Range(0, 40));

using Token = DeviceTestWith<int>;

/** A prefill, the same cut anywhere, and each token as a decode step. */
TEST_P(Token, HasOneAnswer) {
  const uint64_t seed = test::seed() + 3000 + static_cast<uint64_t>(GetParam());
  std::mt19937_64 rng(seed);
  const int32_t group = 1 + static_cast<int32_t>(rng() % 9),
                kv_heads = 1 + static_cast<int32_t>(rng() % 3);
  const int32_t dim = rng() % 2 ? 128 : 64, qo_len = 1 + static_cast<int32_t>(rng() % 60);
  const int32_t kv_len = qo_len + static_cast<int32_t>(rng() % 4000);
  Spec spec =
      cases::make_spec({group * kv_heads, kv_heads, dim, dim}, rng() % 2 ? DType::bf16 : DType::f16,
                       16, kCausal, {qo_len}, {kv_len});
  if (rng() % 3 == 0) spec.problem.window_left = static_cast<int32_t>(rng() % 500);
  if (rng() % 4 == 0) spec.problem.logits_softcap = 20.0f;
  const Call call = generate(spec, seed);
  Answer whole, part;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, on_device(), whole));
  for (int32_t begin = 0; begin < qo_len;) {
    const int32_t end = std::min(qo_len, begin + 1 + static_cast<int32_t>(rng() % 17));
    const Call chunk = chunk_of(call, 0, begin, end);
    ATTNFOLD_ASSERT_HOLDS(cases::run(chunk, on_device(), part));
    ATTNFOLD_ASSERT_HOLDS(cases::same_rows(chunk, part, 0, whole, begin, end - begin, "chunk"))
        << "seed " << seed;
    const Call token = chunk_of(call, 0, begin, begin + 1);
    ATTNFOLD_ASSERT_HOLDS(cases::run(token, on_device(), part));
    ATTNFOLD_ASSERT_HOLDS(cases::same_rows(token, part, 0, whole, begin, 1, "decode step"))
        << "seed " << seed;
    begin = end;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Token, ::testing::Range(0, 24));

/** A value that is not finite, at every place of the edge tile: it reaches the rows that may see
 * it, and no other. */
using Poison = DeviceTestWith<int>;

TEST_P(Poison, NonFiniteValuesStayWithTheRowsThatSeeThem) {
  const int32_t kv_len = 200 + GetParam(), qo_len = 6;
  Spec spec = cases::make_spec({4, 1, 64, 64}, DType::bf16, 16, kCausal, {qo_len}, {kv_len});
  if (GetParam() % 2) spec.problem.window_left = 90;
  Call clean = generate(spec, 5);
  Answer without, with;
  ATTNFOLD_ASSERT_HOLDS(cases::run(clean, on_device(), without));
  for (int32_t back = 0; back < qo_len; ++back) {
    Call call = cases::deep_copy(clean);
    const int32_t key = kv_len - 1 - back;
    const int64_t at = call.kv_element_offset(0, key, call.v_strides, call.v_offset);
    for (int32_t e = 0; e < 64; ++e)
      store_f32(call.v->data(), DType::bf16, at + e, back % 2 ? cases::kNaN : cases::kInf);
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, on_device(), with));
    ATTNFOLD_EXPECT_HOLDS(right(call, with));
    ATTNFOLD_EXPECT_HOLDS(
        cases::same_rows(call, with, 0, without, 0, qo_len - 1 - back, "rows that do not see it"));
  }
}

INSTANTIATE_TEST_SUITE_P(Residues, Poison, ::testing::Range(0, 128, 5));

using Recorded = DeviceTestWith<const char*>;

TEST_P(Recorded, CallsAreRight) {
  const LoadResult loaded =
      load_call(std::string(ATTNFOLD_TEST_DATA_DIR) + "/" + GetParam() + ".safetensors");
  ASSERT_TRUE(loaded.ok) << loaded.error;
  Call call = loaded.call;
  if (call.problem.kv_dtype == ATTNFOLD_F32) GTEST_SKIP() << "float32 keys";
  Answer first, answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, on_device(), first));
  ATTNFOLD_EXPECT_HOLDS(right(call, first));
  for (const int32_t workers : {3, 50, 264}) {
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, on_device(workers, 7), answer));
    ATTNFOLD_EXPECT_HOLDS(same_bytes(call, first, answer, "cut"));
  }
}

INSTANTIATE_TEST_SUITE_P(Files, Recorded,
                         ::testing::Values("decode_page1_layer05", "decode_ragged_layer15",
                                           "mixed_head_major_f16_layer12", "mixed_layer29",
                                           "prefill_layer00", "shared_prefix_layer10",
                                           "verify_layer20", "vllm_mixed_layer17"));

/** Rows long enough that ranges begin and end everywhere in super-chunks. */
TEST_F(DeviceTest, LongRows) {
  const Call call = generate(cases::make_spec({8, 2, 128, 128}, DType::bf16, 16, kCausal,
                                              {1, 1, 4, 1, 0, 1}, {70000, 30, 9000, 0, 40, 2048}),
                             test::seed());
  Answer first, answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, on_device(2), first));
  ATTNFOLD_EXPECT_HOLDS(right(call, first));
  for (int i = 0; i < 60; ++i) {
    const int32_t workers = 2 * (1 + i * 17 % 500);
    ATTNFOLD_ASSERT_HOLDS(
        cases::run(call, on_device(workers, i % 2 ? 0 : test::seed() + i), answer));
    ATTNFOLD_ASSERT_HOLDS(same_bytes(call, first, answer, std::to_string(workers) + " workers"));
  }
}

}  // namespace
}  // namespace attnfold::check::device_test
