// The merge of finished results of one row: how much each side weighs, and what becomes of an lse.
//
// Weights are scaled before they meet the outputs: they are non-negative and sum to 1 but for
// rounding, and a sum of sides is bounded by its smallest and largest, so the result stays within
// the range of its inputs and nothing overflows.  Products and sums are rounded one by one, so two
// sides commute bit for bit.  Source: Ye et al. 2025 (FlashInfer), section 2.2.
#pragma once

#include "core/fold.h"

namespace attnfold {

/** One side of a merge, as far as its weight goes: natural-log reference and the mass relative to
 * it. */
struct MergeSide {
  float lse;
  float mass;  // 1 if normalised, else l
};

/** The larger reference; a NaN is passed over. */
ATTNFOLD_HD inline float merge_max(float m, MergeSide side) {
  return lane::max_keep_nan(side.lse, m);
}

/** e^(lse - max): what multiplies o; times the mass, what it adds to the total. */
ATTNFOLD_HD inline float merge_weight(float max, MergeSide side) {
  return exp2_f32((side.lse - max) * kLog2E);
}

ATTNFOLD_HD inline float merge_lse(float max, float total) { return max + log_f32(total); }

/** x within [low, high]; a NaN stays one. */
ATTNFOLD_HD inline float within(float x, float low, float high) {
  return x < low ? low : x > high ? high : x;
}

/** An lse in another base.  What leaves the range of a float stays its largest number: an infinity
 * would say that the row saw no key. */
ATTNFOLD_HD inline float rebased_lse(float lse, bool from_base2, bool to_base2) {
  if (from_base2 == to_base2) return lse;
  return within(lse * (from_base2 ? kLn2 : kLog2E), kLowest, -kLowest);
}

}  // namespace attnfold
