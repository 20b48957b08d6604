// One row and head of a merge: plain data in, weights and sums out.  Nothing is checked here.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>

#include "core/state.h"

namespace attnfold {

class RowMerge {
 public:
  /** `scales` has room for every state. */
  RowMerge(std::span<const StateView> states, const StateView& out, float empty_lse, int64_t width,
           float* scales)
      : states_(states), out_(out), empty_lse_(empty_lse), width_(width), scales_(scales) {}

  void merge(int64_t row, int64_t head) {
    for (size_t i = 0; i < states_.size(); ++i)
      scales_[i] = natural_lse(states_[i], stored_lse(states_[i], row, head));
    const MergedRow merged =
        weigh_sides(Sides{states_, scales_, row, head}, static_cast<int32_t>(states_.size()));
    switch (merged.kind) {
      case MergedRow::kEmpty: return write_empty(row, head);
      case MergedRow::kCopy: return copy(states_[static_cast<size_t>(merged.only)], row, head);
      case MergedRow::kSum: break;
    }
    for (int64_t d = 0; d < width_; d += kBlock)
      sum_block(row, head, d, width_ - d < kBlock ? width_ - d : kBlock, merged.is_bounded);
    write_lse(row, head, rebased_lse(lse_of_sum(merged), false, out_.base2), 1.0f);
  }

 private:
  static constexpr int64_t kBlock = 64;  // elements whose sums wait on the stack

  /** As weigh_sides asks for them. */
  struct Sides {
    std::span<const StateView> states;
    float* scales;
    int64_t row, head;
    float& value(int32_t i) const { return scales[i]; }
    bool normalised(int32_t i) const { return states[static_cast<size_t>(i)].normalised; }
    float mass(int32_t i) const {
      const StateView& s = states[static_cast<size_t>(i)];
      return s.l[s.lse_index(row, head)];
    }
  };

  /** Elements [d, d + n): read from all sides before they are written, so in place is safe. */
  void sum_block(int64_t row, int64_t head, int64_t d, int64_t n, bool is_bounded) {
    float sum[kBlock], low[kBlock], high[kBlock], x[kBlock];
    bool is_first = true;
    for (size_t i = 0; i < states_.size(); ++i) {
      const float scale = scales_[i];
      if (scale == kNoKeys) continue;
      const StateView& s = states_[i];
      load(s.o_at(row, head), s.o_dtype, d, n, x);
      if (is_first) {
        for (int64_t e = 0; e < n; ++e) {
          sum[e] = scale * x[e];
          low[e] = high[e] = x[e];
        }
        is_first = false;
        continue;
      }
      for (int64_t e = 0; e < n; ++e) {
        const float term = scale * x[e];
        sum[e] = sum[e] + term;
        low[e] = x[e] < low[e] ? x[e] : low[e];
        high[e] = x[e] > high[e] ? x[e] : high[e];
      }
    }
    if (is_bounded) {
      for (int64_t e = 0; e < n; ++e) sum[e] = within(sum[e], low[e], high[e]);
    }
    char* const o = out_.o_at(row, head);
    for (int64_t e = 0; e < n; ++e) store_f32(o, out_.o_dtype, d + e, sum[e]);
  }

  static void load(const char* o, DType type, int64_t d, int64_t n, float* x) {
    switch (type) {
      case DType::f32: std::memcpy(x, o + d * 4, static_cast<size_t>(n) * 4); return;
      case DType::f16:
        for (int64_t e = 0; e < n; ++e) x[e] = load_f32(o, DType::f16, d + e);
        return;
      default:
        for (int64_t e = 0; e < n; ++e) x[e] = load_f32(o, DType::bf16, d + e);
        return;
    }
  }

  void copy(const StateView& s, int64_t row, int64_t head) {
    const char* const from = s.o_at(row, head);
    char* const to = out_.o_at(row, head);
    const float stored = stored_lse(s, row, head);
    if (s.o_dtype == out_.o_dtype) {
      if (from != to) std::memcpy(to, from, static_cast<size_t>(width_ * dtype_bytes(s.o_dtype)));
    } else {
      for (int64_t d = 0; d < width_; ++d)
        store_f32(to, out_.o_dtype, d, load_f32(from, s.o_dtype, d));
    }
    write_lse(row, head, rebased_lse(stored, s.base2, out_.base2), 1.0f);
  }

  void write_empty(int64_t row, int64_t head) {
    std::memset(out_.o_at(row, head), 0, static_cast<size_t>(width_ * dtype_bytes(out_.o_dtype)));
    write_lse(row, head, empty_lse_, 0.0f);
  }

  void write_lse(int64_t row, int64_t head, float lse, float mass) {
    const int64_t at = out_.lse_index(row, head);
    out_.lse[at] = lse;
    if (!out_.normalised) out_.l[at] = mass;
  }

  const std::span<const StateView> states_;
  const StateView& out_;
  const float empty_lse_;
  const int64_t width_;
  float* const scales_;
};

}  // namespace attnfold
