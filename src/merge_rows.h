// One row and head of a merge: plain data in, weights and sums out.  Nothing is checked here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>

#include "attnfold/attnfold.h"
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
  attnfold_empty_kind empty;
  float empty_value;
  int64_t num_rows;  // the others are empty

  char* o_at(int64_t row, int64_t head) const {
    return o + (row * o_row + head * o_head) * dtype_bytes(o_dtype);
  }
  int64_t lse_index(int64_t row, int64_t head) const { return row * lse_row + head * lse_head; }
  bool is_empty(float value) const {
    if (std::isinf(value))
      return true;  // both signs: FlashAttention-2 marks an empty row with +inf
    if (empty == ATTNFOLD_EMPTY_NAN) return std::isnan(value);
    return empty == ATTNFOLD_EMPTY_FINITE && value == empty_value;
  }
};

/** A side that saw a key. */
struct LiveSide {
  const StateView* state;
  MergeSide side;
  float raw;    // lse as stored
  float scale;  // of its o
};

class RowMerge {
 public:
  /** `live` has room for every state. */
  RowMerge(std::span<const StateView> states, const StateView& out, float empty_lse, int64_t width,
           LiveSide* live)
      : states_(states), out_(out), empty_lse_(empty_lse), width_(width), live_(live) {}

  void merge(int64_t row, int64_t head) {
    float max = kLowest;
    num_live_ = 0;
    is_bounded_ = true;
    for (const StateView& s : states_) {
      if (row >= s.num_rows) continue;
      const int64_t at = s.lse_index(row, head);
      const float raw = s.lse[at];
      if (s.is_empty(raw)) continue;
      const MergeSide side{rebased_lse(raw, s.base2, false), s.normalised ? 1.0f : s.l[at]};
      live_[num_live_++] = {&s, side, raw, 1.0f};
      is_bounded_ = is_bounded_ && s.normalised;
      max = merge_max(max, side);
    }
    if (num_live_ == 1 && is_bounded_) return copy(live_[0], row, head);
    float total = 0.0f;
    for (LiveSide& s : sides()) {
      s.scale = merge_weight(max, s.side);
      total += s.scale * s.side.mass;
    }
    if (num_live_ == 0 || total == 0.0f) return write_empty(row, head);
    for (LiveSide& s : sides()) s.scale /= total;
    for (int64_t d = 0; d < width_; d += kBlock)
      sum_block(row, head, d, width_ - d < kBlock ? width_ - d : kBlock);
    write_lse(row, head, rebased_lse(merge_lse(max, total), false, out_.base2), 1.0f);
  }

 private:
  static constexpr int64_t kBlock = 64;  // elements whose sums wait on the stack

  std::span<LiveSide> sides() { return {live_, num_live_}; }

  /** Elements [d, d + n): read from all sides before they are written, so in place is safe. */
  void sum_block(int64_t row, int64_t head, int64_t d, int64_t n) {
    float sum[kBlock], low[kBlock], high[kBlock], x[kBlock];
    for (size_t i = 0; i < num_live_; ++i) {
      const StateView& s = *live_[i].state;
      load(s.o_at(row, head), s.o_dtype, d, n, x);
      const float scale = live_[i].scale;
      if (i == 0) {
        for (int64_t e = 0; e < n; ++e) {
          sum[e] = scale * x[e];
          low[e] = high[e] = x[e];
        }
        continue;
      }
      for (int64_t e = 0; e < n; ++e) {
        const float term = scale * x[e];
        sum[e] = sum[e] + term;
        low[e] = x[e] < low[e] ? x[e] : low[e];
        high[e] = x[e] > high[e] ? x[e] : high[e];
      }
    }
    if (is_bounded_) {
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

  void copy(const LiveSide& side, int64_t row, int64_t head) {
    const StateView& s = *side.state;
    const char* const from = s.o_at(row, head);
    char* const to = out_.o_at(row, head);
    if (s.o_dtype == out_.o_dtype) {
      if (from != to) std::memcpy(to, from, static_cast<size_t>(width_ * dtype_bytes(s.o_dtype)));
    } else {
      for (int64_t d = 0; d < width_; ++d)
        store_f32(to, out_.o_dtype, d, load_f32(from, s.o_dtype, d));
    }
    write_lse(row, head, rebased_lse(side.raw, s.base2, out_.base2), 1.0f);
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
  LiveSide* const live_;
  size_t num_live_ = 0;
  bool is_bounded_ =
      true;  // every live side is normalised: its o is one of the values to lie between
};

}  // namespace attnfold
