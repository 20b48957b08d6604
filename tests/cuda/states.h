// Random states for merges and conversions, in memory of the CPU and of the device.
#pragma once

#include <limits>
#include <random>

#include "attnfold/attnfold.h"
#include "cuda/device_suite.h"
#include "cuda/twin.h"

namespace attnfold::check::device_test {

constexpr float kStateInf = std::numeric_limits<float>::infinity();

struct StateShape {
  int64_t rows;
  int32_t heads, width;
};

/** How a state is written down. */
struct Convention {
  DType o_dtype = DType::bf16;
  bool base2 = false, by_head = false, normalised = true;
  attnfold_empty_kind empty = ATTNFOLD_EMPTY_INF;
  float empty_value = 0.0f;
  int64_t gap_row = 0, gap_head = 0, gap_lse = 0, shift = 0;  // elements
  int64_t num_rows = -1;
};

inline Convention any_convention(std::mt19937_64& rng, const StateShape& shape) {
  Convention c;
  c.o_dtype = static_cast<DType>(rng() % 3);
  c.base2 = rng() % 2;
  c.by_head = rng() % 2;
  c.normalised = rng() % 4 != 0;
  c.gap_row = static_cast<int64_t>(rng() % 2 * (rng() % 9));
  c.gap_head = static_cast<int64_t>(rng() % 2 * (rng() % 9));
  c.gap_lse = static_cast<int64_t>(rng() % 3);
  c.shift = static_cast<int64_t>(rng() % 2 * (rng() % 9));
  c.empty = static_cast<attnfold_empty_kind>(rng() % 3);
  c.empty_value = c.empty == ATTNFOLD_EMPTY_FINITE ? -5e4f : 0.0f;
  if (rng() % 4 == 0)
    c.num_rows = static_cast<int64_t>(rng() % static_cast<uint64_t>(shape.rows + 1));
  return c;
}

/** What the packed kernel takes: one type, nothing between pairs. */
inline Convention plain_convention(std::mt19937_64& rng, const StateShape& shape, DType type) {
  Convention c;
  c.o_dtype = type;
  c.by_head = rng() % 2;
  c.base2 = rng() % 4 == 0;
  c.empty = rng() % 4 ? ATTNFOLD_EMPTY_INF : ATTNFOLD_EMPTY_NAN;
  c.gap_head = rng() % 3 ? 0 : 8;
  if (rng() % 3 == 0)
    c.num_rows = static_cast<int64_t>(rng() % static_cast<uint64_t>(shape.rows + 1));
  return c;
}

/** A state in memory that is noise wherever nothing is written. */
class TwinState {
 public:
  TwinState(std::mt19937_64& rng, const StateShape& shape, const Convention& c) : c_(c) {
    o_head_ = shape.width + c.gap_head;
    o_row_ = shape.heads * o_head_ + c.gap_row;
    lse_row_ = c.by_head ? 1 : shape.heads + c.gap_lse;
    lse_head_ = c.by_head ? shape.rows + c.gap_lse : 1;
    const size_t bytes = static_cast<size_t>(dtype_bytes(c.o_dtype));
    std::vector<char> o((static_cast<size_t>(shape.rows * o_row_ + c.shift) + 16) * bytes);
    for (char& x : o) x = static_cast<char>(rng());
    const size_t num_lse =
        static_cast<size_t>((shape.rows - 1) * lse_row_ + (shape.heads - 1) * lse_head_) + 3;
    std::vector<float> lse(num_lse, 777.0f), l(num_lse, -3.0f);
    const bool wild = rng() % 4 == 0;  // else numbers that a model might have
    for (int64_t row = 0; row < shape.rows; ++row) {
      for (int64_t head = 0; head < shape.heads; ++head) {
        const size_t at = static_cast<size_t>(row * lse_row_ + head * lse_head_) + 1;
        lse[at] = any_lse(rng);
        l[at] = rng() % 16 == 0 ? 0.0f : unit(rng) + 0.25f;
        for (int64_t d = 0; !wild && d < shape.width; ++d) {
          const float x = 8.0f * unit(rng) - 4.0f;
          store_f32(o.data(), c.o_dtype, c.shift + row * o_row_ + head * o_head_ + d, x);
        }
      }
    }
    o_ = Twin<char>(std::move(o));
    lse_ = Twin<float>(std::move(lse));
    l_ = Twin<float>(std::move(l));
  }

  attnfold_state on_host() {
    attnfold_state s = ATTNFOLD_STATE_INIT;
    s.o = o_.host() + c_.shift * dtype_bytes(c_.o_dtype);
    s.o_dtype = static_cast<attnfold_dtype>(c_.o_dtype);
    s.o_stride_row = o_row_;
    s.o_stride_head = o_head_;
    s.lse = lse_.host() + 1;
    s.lse_layout = c_.by_head ? ATTNFOLD_HEADS_ROWS : ATTNFOLD_ROWS_HEADS;
    s.lse_stride_row = lse_row_;
    s.lse_stride_head = lse_head_;
    s.log_base = c_.base2 ? ATTNFOLD_LOG_2 : ATTNFOLD_LOG_E;
    s.empty = c_.empty;
    s.empty_value = c_.empty_value;
    s.normalised = c_.normalised;
    s.l = c_.normalised ? nullptr : l_.host() + 1;
    s.num_rows = c_.num_rows;
    return s;
  }
  attnfold_state on_device() {
    attnfold_state s = on_host();
    s.o = o_.moved(s.o);
    s.lse = lse_.moved(s.lse);
    s.l = l_.moved(s.l);
    return s;
  }
  std::string differs() const {
    std::string wrong = o_.differs(c_.o_dtype, true);
    if (!wrong.empty()) return "o, " + wrong;
    wrong = lse_.differs(DType::f32, true);
    if (!wrong.empty()) return "lse, " + wrong;
    wrong = l_.differs(DType::f32, true);
    return wrong.empty() ? "" : "l, " + wrong;
  }
  void send() {
    o_.send();
    lse_.send();
    l_.send();
  }
  Twin<float>& lse() { return lse_; }

 private:
  static float unit(std::mt19937_64& rng) { return static_cast<float>(rng() >> 40) * 0x1p-24f; }
  float any_lse(std::mt19937_64& rng) const {
    switch (rng() % 12) {
      case 0: return -kStateInf;
      case 1: return kStateInf;
      case 2: return std::numeric_limits<float>::quiet_NaN();
      case 3: return c_.empty_value;
      case 4: return 1800.0f * unit(rng) - 900.0f;
      case 5: return (2.0f * unit(rng) - 1.0f) * 3e38f;
      default: return 20.0f * unit(rng) - 10.0f;
    }
  }

  Convention c_;
  int64_t o_row_, o_head_, lse_row_, lse_head_;
  Twin<char> o_;
  Twin<float> lse_, l_;
};

/** A mask of rows with a stride, or none. */
struct TwinMask {
  Twin<uint8_t> bytes;
  int64_t stride = 0;
  bool is_given = false;

  TwinMask(std::mt19937_64& rng, int64_t rows) {
    if (rng() % 3) return;
    is_given = true;
    stride = static_cast<int64_t>(rng() % 4);
    std::vector<uint8_t> m(static_cast<size_t>((rows - 1) * stride + 1));
    for (uint8_t& x : m) x = static_cast<uint8_t>(rng() % 3);
    bytes = Twin<uint8_t>(std::move(m));
  }
  const uint8_t* on_host() { return is_given ? bytes.host() : nullptr; }
  const uint8_t* on_device() { return is_given ? bytes.device() : nullptr; }
};

}  // namespace attnfold::check::device_test
