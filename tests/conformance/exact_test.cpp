// Promise P1: every answer is within the bound of the float64 oracle.
#include <gtest/gtest.h>

#include <random>

#include "conformance/suite.h"

namespace attnfold::check {
namespace {

using cases::kCausal;
using cases::kNone;
using cases::Shape;

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};

class ExactRandom : public ::testing::TestWithParam<int> {};

TEST_P(ExactRandom, MatchesTheOracle) {
  const uint64_t seed = test::seed() + static_cast<uint64_t>(GetParam());
  std::mt19937_64 rng(seed);
  const Call call = generate(random_case(rng), seed);
  EXPECT_EQ(cases::right(call, {seed, nullptr}), "") << "case_call(\"random\", " << seed << ")";
}

INSTANTIATE_TEST_SUITE_P(Seeds, ExactRandom, ::testing::Range(0, 48));

constexpr std::pair<int32_t, int32_t> kDims[] = {
    {8, 8},     {24, 24},   {64, 64},   {72, 72},   {80, 80},   {96, 96},  {112, 112},
    {120, 120}, {128, 128}, {192, 128}, {256, 256}, {320, 256}, {576, 512}};
constexpr int32_t kGroups[] = {1, 2, 3, 5, 8, 12, 16};

/** A decode, a verify step, a prefill and a request with more tokens than keys. */
Call small_batch(Shape shape, DType type, attnfold_mask_kind mask, uint64_t seed) {
  return generate(cases::make_spec(shape, type, 16, mask, {1, 3, 33, 4}, {300, 129, 33, 2}), seed);
}

TEST(Exact, EveryHeadDimOfEveryType) {
  const cases::Context x = test::context();
  size_t turn = 0;
  for (DType type : kTypes) {
    for (const auto& [qk, vo] : kDims) {
      const int32_t group = kGroups[turn++ % std::size(kGroups)];
      const Call call =
          small_batch({2 * group, 2, qk, vo}, type, turn % 3 ? kCausal : kNone, x.seed);
      ATTNFOLD_EXPECT_HOLDS(cases::right(call, x))
          << dtype_name(type) << " " << qk << "/" << vo << " group " << group;
    }
  }
}

TEST(Exact, EveryGroupOfEveryType) {
  const cases::Context x = test::context();
  for (DType type : kTypes) {
    for (int32_t group : kGroups) {
      for (int32_t kv_heads : {1, 3}) {
        const Call call = small_batch({kv_heads * group, kv_heads, 40, 48}, type, kCausal, x.seed);
        ATTNFOLD_EXPECT_HOLDS(cases::right(call, x)) << dtype_name(type) << " group " << group;
      }
    }
  }
}

TEST(Exact, EveryPairOfTypesAndOutputs) {
  const cases::Context x = test::context();
  for (DType q_type : kTypes) {
    for (DType kv_type : kTypes) {
      for (DType o_type : {q_type, DType::f32}) {
        cases::Lengths qo_len = {1, 17}, kv_len = {200, 140};
        Spec spec = cases::make_spec({6, 2, 72, 64}, q_type, 16, kCausal, qo_len, kv_len);
        spec.problem.kv_dtype = static_cast<attnfold_dtype>(kv_type);
        spec.problem.o_dtype = static_cast<attnfold_dtype>(o_type);
        ATTNFOLD_EXPECT_HOLDS(cases::right(generate(spec, x.seed), x))
            << dtype_name(q_type) << " over " << dtype_name(kv_type) << " to "
            << dtype_name(o_type);
      }
    }
  }
}

TEST(Exact, EveryMaskAndWindow) {
  const cases::Context x = test::context();
  for (attnfold_mask_kind mask : {kNone, kCausal}) {
    for (int32_t left : {-1, 0, 1, 15, 128, 300}) {
      for (int32_t right : {-1, 0, 5, 200}) {
        Spec spec =
            cases::make_spec({2, 1, 32, 32}, DType::f32, 5, mask, {1, 20, 9}, {290, 290, 4});
        spec.problem.window_left = left;
        spec.problem.window_right = right;
        ATTNFOLD_EXPECT_HOLDS(cases::right(generate(spec, x.seed), x))
            << "mask " << mask << " left " << left << " right " << right;
      }
    }
  }
}

TEST(Exact, PeakedAndFlatRows) {
  const cases::Context x = test::context();
  for (float range : {0.0f, 0.01f, 30.0f, 1000.0f}) {
    for (DType type : kTypes) {
      Spec spec = cases::make_spec({4, 2, 64, 64}, type, 16, kCausal, {1, 8}, {2500, 400});
      spec.q_range = range;
      ATTNFOLD_EXPECT_HOLDS(cases::right(generate(spec, x.seed), x))
          << dtype_name(type) << " q range " << range;
    }
  }
}

TEST(Exact, ScaleZeroIsThePlainMean) {
  const cases::Context x = test::context();
  Spec spec = cases::make_spec({2, 1, 64, 64}, DType::f32, 16, kNone, {2}, {333});
  spec.problem.sm_scale = 0.0f;
  ATTNFOLD_EXPECT_HOLDS(cases::right(generate(spec, x.seed), x));
}

}  // namespace
}  // namespace attnfold::check
