// The core's arithmetic has no product and sum that a compiler could fuse: its bits do not hang on
// -ffp-contract.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "contraction_values.h"
#include "cpu/cpu_features.h"

namespace attnfold::test {
namespace {

TEST(Contraction, CoreHasTheSameBitsWhenTheCompilerMayFuse) {
#if defined(__x86_64__)
  if (!cpu::features().avx2) GTEST_SKIP() << "SKIPPED: this CPU has no fused multiply-add";
#endif
  std::mt19937 rng(20240229);
  std::uniform_real_distribution<float> score(-40.0f, 40.0f), exponent(-20.0f, 20.0f);
  for (int i = 0; i < 200000; ++i) {
    const float a = score(rng), b = score(rng), l = exp2_f32(exponent(rng)),
                k = exp2_f32(exponent(rng));
    float plain[kCoreValues], fused[kCoreValues];
    core_values(a, b, l, k, plain);
    core_values_contracted(a, b, l, k, fused);
    ASSERT_EQ(std::memcmp(plain, fused, sizeof(plain)), 0)
        << "a " << a << " b " << b << " l " << l << " k " << k;
  }
}

}  // namespace
}  // namespace attnfold::test
