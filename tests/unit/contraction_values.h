// Every function of the core that rounds, on one set of inputs; compiled once with contraction off
// and once with it on.
#pragma once

#include <cstddef>

#include "core/fold.h"
#include "core/merge.h"

namespace attnfold::test {

constexpr int kCoreValues = 6;

/** out[0..5] for inputs a, b in [-40, 40] and masses l, k > 0 */
inline void core_values(float a, float b, float l, float k, float* out) {
  const FoldStep step = fold_step(a, b);
  out[0] = exp2_f32(a);
  out[1] = log_f32(l);
  out[2] = fold_value(step, l, k);
  out[3] = lse_of(a, l);
  out[4] = merge_weight(a > b ? a : b, {b, k});
  out[5] = merge_lse(a, l);
}

/** core_values() as a compiler that fuses whatever it may builds it. */
void core_values_contracted(float a, float b, float l, float k, float* out);

}  // namespace attnfold::test
