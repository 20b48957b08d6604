// Merges and conversions on the device: the bytes of the same calls on the CPU, everything around
// them included.
#include "cuda/merges.h"

namespace attnfold::check::device_test {
namespace {

using Merge = DeviceTestWith<int>;

TEST_P(Merge, OfTwoPlainStatesIsTheCpus) {
  const uint64_t seed = test::seed() + 10000 + static_cast<uint64_t>(GetParam());
  std::mt19937_64 rng(seed);
  for (int i = 0; i < 12; ++i)
    ATTNFOLD_ASSERT_HOLDS(plain_merge(rng).compare()) << seed << ", " << i;
}

TEST_P(Merge, OfAnyStatesIsTheCpus) {
  const uint64_t seed = test::seed() + 11000 + static_cast<uint64_t>(GetParam());
  std::mt19937_64 rng(seed);
  for (int i = 0; i < 12; ++i) ATTNFOLD_ASSERT_HOLDS(any_merge(rng).compare()) << seed << ", " << i;
}

TEST_P(Merge, ConversionsAreTheCpus) {
  const uint64_t seed = test::seed() + 12000 + static_cast<uint64_t>(GetParam());
  std::mt19937_64 rng(seed);
  for (int i = 0; i < 12; ++i) {
    const StateShape shape{1 + static_cast<int64_t>(rng() % 30),
                           1 + static_cast<int32_t>(rng() % 9),
                           1 + static_cast<int32_t>(rng() % 300)};
    const Convention source = any_convention(rng, shape);
    Convention target = any_convention(rng, shape);
    target.num_rows = -1;
    TwinState from(rng, shape, source), to(rng, shape, target);
    const attnfold_state host[] = {from.on_host(), to.on_host()},
                         device[] = {from.on_device(), to.on_device()};
    const attnfold_execution e = on_device();
    ASSERT_EQ(
        attnfold_convert_state(shape.rows, shape.heads, shape.width, &host[0], &host[1], nullptr),
        ATTNFOLD_OK)
        << attnfold_last_error();
    ASSERT_EQ(
        attnfold_convert_state(shape.rows, shape.heads, shape.width, &device[0], &device[1], &e),
        ATTNFOLD_OK)
        << attnfold_last_error();
    require_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    ATTNFOLD_ASSERT_HOLDS(to.differs()) << seed << ", " << i;
    ATTNFOLD_ASSERT_HOLDS(from.differs()) << seed << ", " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Merge, ::testing::Range(0, 20));

/** Sums of 16-bit numbers are held between their sides after rounding: every sign, the smallest and
 * largest numbers, zeros of both signs. */
TEST_F(DeviceTest, MergesAtTheEdgesOfTheTypes) {
  static constexpr float kEdges[] = {0.0f,  -0.0f,  1e-45f,    -1e-45f,   9.2e-41f, -9.2e-41f,
                                     6e-8f, -6e-8f, 65504.f,   -65504.f,  3e38f,    -3e38f,
                                     1.0f,  -1.0f,  kStateInf, -kStateInf};
  std::mt19937_64 rng(test::seed());
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    const StateShape shape{64, 4, 128};
    TwinMerge m{shape, {}, -1, TwinMask(rng, 1)};
    m.mask.is_given = false;
    for (int i = 0; i < 3; ++i) {
      Convention c;
      c.o_dtype = type;
      m.states.push_back(std::make_unique<TwinState>(rng, shape, c));
      const attnfold_state s = m.states.back()->on_host();
      for (int64_t e = 0; e < shape.rows * shape.heads * shape.width; ++e)
        store_f32(s.o, type, e, kEdges[rng() % std::size(kEdges)]);
      for (int64_t pair = 0; pair < shape.rows * shape.heads; ++pair)
        s.lse[pair] = static_cast<float>(static_cast<int>(rng() % 300) - 150);
      m.states.back()->send();
    }
    ATTNFOLD_EXPECT_HOLDS(m.compare()) << dtype_name(type);
  }
}

/** A prefix of 3 rows that ends its own array, a suffix of all: nothing behind it is read. */
TEST_F(DeviceTest, RowsThatAStateLacksAreNotRead) {
  const int64_t rows = 40;
  const int32_t heads = 8, width = 128;
  const size_t pair = 128 * 2;
  DeviceBuffer prefix(3 * heads * pair), prefix_lse(3 * heads * 4);
  DeviceBuffer suffix(rows * heads * pair), suffix_lse(rows * heads * 4);
  require_cuda(cudaMemset(prefix.data(), 0, prefix.size()), "cudaMemset");
  require_cuda(cudaMemset(prefix_lse.data(), 0, prefix_lse.size()), "cudaMemset");
  require_cuda(cudaMemset(suffix.data(), 0x3f, suffix.size()), "cudaMemset");
  require_cuda(cudaMemset(suffix_lse.data(), 0, suffix_lse.size()), "cudaMemset");
  attnfold_state states[2] = {ATTNFOLD_STATE_INIT, ATTNFOLD_STATE_INIT};
  states[0].o = prefix.data();
  states[0].lse = reinterpret_cast<float*>(prefix_lse.data());
  states[0].num_rows = 3;
  states[1].o = suffix.data();
  states[1].lse = reinterpret_cast<float*>(suffix_lse.data());
  states[0].o_dtype = states[1].o_dtype = ATTNFOLD_BF16;
  attnfold_state out = states[1];  // in place
  const attnfold_execution e = on_device();
  ASSERT_EQ(attnfold_merge_parallel(rows, heads, width, states, 2, &out, nullptr, 0, &e),
            ATTNFOLD_OK)
      << attnfold_last_error();
  std::vector<uint16_t> o(suffix.size() / 2);
  suffix.read(o.data());
  for (size_t i = 0; i < o.size(); ++i) {
    const bool shared = i < size_t{3} * 8 * 128;
    ASSERT_EQ(o[i], shared ? f32_to_bf16(bf16_to_f32(0x3f3f) * 0.5f) : 0x3f3f) << i;
  }
  EXPECT_TRUE(suffix.canaries_whole() && suffix_lse.canaries_whole());
}

TEST_F(DeviceTest, MoreStatesThanALaunchHoldsAreUnsupported) {
  std::vector<attnfold_state> states(33, ATTNFOLD_STATE_INIT);
  DeviceBuffer o(16 * 4), lse(4), out_o(16 * 4), out_lse(4);
  for (attnfold_state& s : states) {
    s.o = o.data();
    s.lse = reinterpret_cast<float*>(lse.data());
  }
  attnfold_state out = ATTNFOLD_STATE_INIT;
  out.o = out_o.data();
  out.lse = reinterpret_cast<float*>(out_lse.data());
  const attnfold_execution e = on_device();
  EXPECT_EQ(attnfold_merge_parallel(1, 1, 16, states.data(), 33, &out, nullptr, 0, &e),
            ATTNFOLD_UNSUPPORTED);
  EXPECT_EQ(std::string(attnfold_last_error()), "n: expected 0..32 on CUDA, got 33");
  EXPECT_EQ(attnfold_merge_parallel(1, 1, 16, states.data(), 32, &out, nullptr, 0, &e),
            ATTNFOLD_OK);
}

}  // namespace
}  // namespace attnfold::check::device_test
