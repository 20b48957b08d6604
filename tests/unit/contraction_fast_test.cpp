// Built with fused multiply-add and leave to use it everywhere: see contraction_test.cpp.
#if defined(__GNUC__) && !defined(__clang__)
#if defined(__x86_64__)
#pragma GCC target("fma")
#endif
#pragma GCC optimize("fp-contract=fast")
#endif

#include "contraction_values.h"

namespace attnfold::test {

void core_values_contracted(float a, float b, float l, float k, float* out) {
  core_values(a, b, l, k, out);
}

}  // namespace attnfold::test
