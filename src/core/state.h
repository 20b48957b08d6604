// Attention results of any engine, and what each side of a merge weighs.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/merge.h"

namespace attnfold {

/** A state with every stride resolved. */
struct StateView {
  char* o;
  DType o_dtype;
  int64_t o_row, o_head;
  float *lse, *l;
  int64_t lse_row, lse_head;
  bool base2, normalised;
  bool nan_is_empty, value_is_empty;  // what marks a row without keys, beside both infinities
  float empty_value;
  int64_t num_rows;  // the others are empty

  ATTNFOLD_HD int64_t o_index(int64_t row, int64_t head) const {
    return row * o_row + head * o_head;
  }
  ATTNFOLD_HD char* o_at(int64_t row, int64_t head) const {
    return o + o_index(row, head) * dtype_bytes(o_dtype);
  }
  ATTNFOLD_HD int64_t lse_index(int64_t row, int64_t head) const {
    return row * lse_row + head * lse_head;
  }
  ATTNFOLD_HD bool is_empty(float value) const {
    if ((bits_of(value) & 0x7fffffffu) == 0x7f800000u)
      return true;  // both signs: FlashAttention-2 marks an empty row with +inf
    if (nan_is_empty) return value != value;
    return value_is_empty && value == empty_value;
  }
};

constexpr float kNoKeys = -__builtin_inff();  // in place of a side's lse or scale: it is empty

/** lse as it is stored; kNoKeys, which marks an empty row in every convention, in rows that the
 * state does not have. */
ATTNFOLD_HD inline float stored_lse(const StateView& s, int64_t row, int64_t head) {
  return row < s.num_rows ? s.lse[s.lse_index(row, head)] : kNoKeys;
}

/** A stored lse as a natural logarithm, or kNoKeys. */
ATTNFOLD_HD inline float natural_lse(const StateView& s, float stored) {
  return s.is_empty(stored) ? kNoKeys : rebased_lse(stored, s.base2, false);
}

/** What a row and head of a merge comes to. */
struct MergedRow {
  enum Kind { kEmpty, kCopy, kSum };
  Kind kind;
  int32_t only;      // kCopy: the side
  bool is_bounded;   // kSum: every live side's o is one of the values that the sum lies between
  float max, total;  // kSum: the largest lse, and the mass of all relative to it
};

/** Natural-log lse of a sum. */
ATTNFOLD_HD inline float lse_of_sum(const MergedRow& merged) {
  return merge_lse(merged.max, merged.total);
}

/**
 * Turns the natural lse of n sides into what multiplies their o in a sum; empty sides keep kNoKeys.
 * Sides: float& value(i), float mass(i) of a live side that is not normalised, bool normalised(i).
 */
template <class Sides>
ATTNFOLD_HD inline MergedRow weigh_sides(const Sides& sides, int32_t n) {
  float max = kLowest;
  int32_t num_live = 0;
  MergedRow merged{MergedRow::kSum, -1, true, 0.0f, 0.0f};
  for (int32_t i = 0; i < n; ++i) {
    const float lse = sides.value(i);
    if (lse == kNoKeys) continue;
    ++num_live;
    merged.only = i;
    merged.is_bounded = merged.is_bounded && sides.normalised(i);
    max = merge_max(max, {lse, 1.0f});
  }
  if (num_live == 1 && merged.is_bounded) {
    merged.kind = MergedRow::kCopy;
    return merged;
  }
  float total = 0.0f;
  for (int32_t i = 0; i < n; ++i) {
    if (sides.value(i) == kNoKeys) continue;
    const MergeSide side{sides.value(i), sides.normalised(i) ? 1.0f : sides.mass(i)};
    const float weight = merge_weight(max, side);
    total += weight * side.mass;
    sides.value(i) = weight;
  }
  if (num_live == 0 || total == 0.0f) {
    merged.kind = MergedRow::kEmpty;
    return merged;
  }
  for (int32_t i = 0; i < n; ++i) {
    if (sides.value(i) != kNoKeys) sides.value(i) = sides.value(i) / total;
  }
  merged.max = max;
  merged.total = total;
  return merged;
}

}  // namespace attnfold
