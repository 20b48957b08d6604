// exp2, log and the fold: accuracy against double, and the identities that the promises rest on.
#include "core/fold.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace attnfold {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(Exp2, IsExactAtZeroAndAtWholeNumbers) {
  for (int n = -126; n <= 127; ++n)
    EXPECT_EQ(exp2_f32(static_cast<float>(n)), std::ldexp(1.0f, n)) << n;
}

TEST(Exp2, IsZeroBelowTheNormalRangeAndAtMinusInfinity) {
  EXPECT_EQ(bits_of(exp2_f32(-kInf)), 0u);
  EXPECT_EQ(bits_of(exp2_f32(std::nextafterf(-126.0f, -127.0f))), 0u);
  EXPECT_EQ(bits_of(exp2_f32(kLowest)), 0u);
}

TEST(Exp2, KeepsNaN) {
  EXPECT_TRUE(std::isnan(exp2_f32(kNaN)));
  EXPECT_TRUE(std::isnan(exp2_f32(float_of(0xffc00001u))));
  EXPECT_TRUE(std::isnan(exp2_f32(float_of(0x7f8001ffu))));
}

TEST(Exp2, IsWithinTheStatedErrorOnEveryFloatOfTheLastOctaves) {
  double worst = 0;
  for (float x = -8.0f; x <= 0.0f; x = std::nextafterf(x, 1.0f) + 0x1p-22f) {
    worst = std::fmax(worst, std::fabs(exp2_f32(x) / std::exp2(static_cast<double>(x)) - 1));
  }
  EXPECT_LE(worst, 6.8e-8);
}

TEST(SinkLog2, IsTheProductWhereThatIsFiniteAndNeverInfinityAbove) {
  for (uint32_t u = 0; u < 0x7f800000u; u += 40503) {
    for (const float logit : {float_of(u), -float_of(u)}) {
      const float product = logit * kLog2E;
      if (product <= -kLowest) {
        ASSERT_EQ(bits_of(sink_log2(logit)), bits_of(product)) << logit;
        ASSERT_FALSE(is_all_sink(logit)) << logit;
      } else {
        ASSERT_EQ(sink_log2(logit), -kLowest) << logit;
        ASSERT_TRUE(is_all_sink(logit)) << logit;
      }
    }
  }
  for (const float logit : {kInf, kNaN}) {
    EXPECT_TRUE(std::isnan(sink_log2(logit)));
    EXPECT_FALSE(is_all_sink(logit));
  }
}

TEST(Tanh, IsWithinTheStatedError) {
  for (uint32_t u = 0x30000000u; u < 0x41900000u; u += 61) {  // 2^-31 .. 18
    const float x = float_of(u);
    const double truth = std::tanh(static_cast<double>(x)), error = std::fabs(tanh_f32(x) - truth);
    ASSERT_LE(error, x < 0.625f ? 1.3 * 0x1p-24 * truth : 1.7 * 0x1p-24) << x;
    ASSERT_EQ(tanh_f32(-x), -tanh_f32(x)) << x;
  }
}

TEST(Tanh, HasTheLimitsOfTheTangent) {
  EXPECT_EQ(bits_of(tanh_f32(0.0f)), 0u);
  EXPECT_EQ(tanh_f32(kInf), 1.0f);
  EXPECT_EQ(tanh_f32(-kInf), -1.0f);
  EXPECT_EQ(tanh_f32(1e30f), 1.0f);
  EXPECT_TRUE(std::isnan(tanh_f32(kNaN)));
}

TEST(Log, IsWithinTheStatedError) {
  std::mt19937 rng(7);
  for (int i = 0; i < 1000000; ++i) {
    const float x = float_of(0x00800000u + rng() % 0x7f000000u);
    const double truth = std::log(static_cast<double>(x));
    ASSERT_LE(std::fabs(log_f32(x) - truth), 1.5 * 0x1p-23 * std::fabs(truth) + 0x1p-24) << x;
  }
}

TEST(Log, HasTheLimitsOfTheLogarithm) {
  EXPECT_EQ(log_f32(1.0f), 0.0f);
  EXPECT_EQ(log_f32(0.0f), -kInf);
  EXPECT_EQ(log_f32(kInf), kInf);
  EXPECT_TRUE(std::isnan(log_f32(kNaN)));
}

TEST(Fold, LeavesTheLeadingSideUntouchedWhenTheOtherVanishes) {
  const FoldStep step = fold_step(10.0f, -300.0f);
  EXPECT_EQ(fold_value(step, 1.25f, 77.0f), 1.25f);
}

TEST(Fold, CommutesBitForBit) {
  std::mt19937 rng(11);
  std::normal_distribution<float> normal(0, 8);
  for (int i = 0; i < 200000; ++i) {
    const float m_a = normal(rng), m_b = i % 7 == 0 ? m_a : normal(rng), a = normal(rng),
                b = normal(rng);
    const uint32_t ab = bits_of(fold_value(fold_step(m_a, m_b), a, b));
    const uint32_t ba = bits_of(fold_value(fold_step(m_b, m_a), b, a));
    ASSERT_EQ(ab, ba) << m_a << " " << m_b << " " << a << " " << b;
  }
}

TEST(Fold, OfEqualMaximaIsThePlainSum) {
  const FoldStep step = fold_step(3.5f, 3.5f);
  EXPECT_EQ(step.scale, 1.0f);
  EXPECT_EQ(fold_value(step, 0.1f, 0.7f), 0.1f + 0.7f);
}

TEST(Fold, NeverLosesANaN) {
  for (const float m : {-5.0f, 0.0f, 5.0f}) {
    EXPECT_TRUE(std::isnan(fold_value(fold_step(m, 0.0f), kNaN, 1.0f)));
    EXPECT_TRUE(std::isnan(fold_value(fold_step(m, 0.0f), 1.0f, kNaN)));
    EXPECT_TRUE(std::isnan(fold_value(fold_step(kLowest, m), kNaN, 1.0f)));
  }
}

TEST(Fold, OfMassZeroHasLseMinusInfinityAndLeavesOZero) {
  EXPECT_EQ(lse_of(kLowest, 0.0f), -kInf);
  EXPECT_EQ(0.0f / divisor_of(0.0f), 0.0f);
}

}  // namespace
}  // namespace attnfold
