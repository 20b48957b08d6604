// attnfold_merge: results of any engine, described by type, folded into one.
#include "core/merge.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "merge.h"
#include "plan/validate.h"

namespace attnfold {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

/** A state with every stride resolved. */
struct Side {
  char* o;
  DType o_dtype;
  int64_t o_row, o_head;
  float *lse, *l;
  int64_t lse_row, lse_head;
  bool base2, normalised;
  attnfold_empty_kind empty;
  float empty_value;
};

Status check_enum(const std::string& name, int value, int high) {
  if (value < 0 || value > high) return invalid(name, "0.." + std::to_string(high), value);
  return {};
}

Status resolve(const std::string& name, bool is_output, const attnfold_state* given, int64_t rows,
               int64_t heads, int64_t width, Side* out, bool* sink_included) {
  const attnfold_state defaults = ATTNFOLD_STATE_INIT;
  attnfold_state s;
  ATTNFOLD_RETURN_IF_ERROR(read_struct(name.c_str(), given, defaults, &s));
  ATTNFOLD_RETURN_IF_ERROR(check_enum(name + ".o_dtype", s.o_dtype, kNumDTypes - 1));
  ATTNFOLD_RETURN_IF_ERROR(check_enum(name + ".lse_layout", s.lse_layout, ATTNFOLD_HEADS_ROWS));
  ATTNFOLD_RETURN_IF_ERROR(check_enum(name + ".log_base", s.log_base, ATTNFOLD_LOG_2));
  ATTNFOLD_RETURN_IF_ERROR(check_enum(name + ".empty", s.empty, ATTNFOLD_EMPTY_FINITE));
  ATTNFOLD_RETURN_IF_ERROR(check_enum(name + ".sink_included", s.sink_included, 1));
  ATTNFOLD_RETURN_IF_ERROR(check_enum(name + ".normalised", s.normalised, 1));
  if (is_output && !s.normalised) return invalid(name + ".normalised", "1", 0);
  if (rows * heads > 0) {
    if (!s.o) return invalid(name + ".o", "a pointer", "NULL");
    if (!s.lse) return invalid(name + ".lse", "a pointer", "NULL");
    if (!s.normalised && !s.l) return invalid(name + ".l", "a pointer (normalised is 0)", "NULL");
  }
  const bool by_head = s.lse_layout == ATTNFOLD_HEADS_ROWS;
  *out = {static_cast<char*>(s.o),
          static_cast<DType>(s.o_dtype),
          s.o_stride_row ? s.o_stride_row : heads * width,
          s.o_stride_head ? s.o_stride_head : width,
          s.lse,
          s.l,
          s.lse_stride_row ? s.lse_stride_row : (by_head ? 1 : heads),
          s.lse_stride_head ? s.lse_stride_head : (by_head ? rows : 1),
          s.log_base == ATTNFOLD_LOG_2,
          s.normalised != 0,
          s.empty,
          s.empty_value};
  *sink_included = s.sink_included != 0;
  return {};
}

/** One array of a state: o, lse or l. */
struct Array {
  std::string name;
  const char* data;
  int64_t bytes;             // of an element
  int64_t row, head, width;  // strides and elements per (row, head)

  bool same_as(const Array& a) const {
    return data == a.data && bytes == a.bytes && row == a.row && head == a.head && width == a.width;
  }
};

std::vector<Array> arrays_of(const std::string& name, const Side& s, int64_t width) {
  std::vector<Array> arrays;
  arrays.push_back({name + ".o", s.o, dtype_bytes(s.o_dtype), s.o_row, s.o_head, width});
  const char* const lse = reinterpret_cast<const char*>(s.lse);
  arrays.push_back({name + ".lse", lse, sizeof(float), s.lse_row, s.lse_head, 1});
  if (!s.normalised) {
    const char* const l = reinterpret_cast<const char*>(s.l);
    arrays.push_back({name + ".l", l, sizeof(float), s.lse_row, s.lse_head, 1});
  }
  return arrays;
}

Status extent_of_array(const Array& a, int64_t rows, int64_t heads, Extent* out) {
  return extent_of(a.name.c_str(), a.data, {1, rows, heads}, {0, a.row, a.head}, a.width,
                   static_cast<int>(a.bytes), out);
}

/** In place is element for element; any other overlap would read what was already written. */
Status check_alias(const Side& out, const Side& in, const std::string& name, int64_t rows,
                   int64_t heads, int64_t width) {
  const std::vector<Array> written = arrays_of("out", out, width),
                           read = arrays_of(name, in, width);
  for (size_t r = 0; r < read.size(); ++r) {
    Extent source, target;
    ATTNFOLD_RETURN_IF_ERROR(extent_of_array(read[r], rows, heads, &source));
    for (size_t w = 0; w < written.size(); ++w) {
      ATTNFOLD_RETURN_IF_ERROR(extent_of_array(written[w], rows, heads, &target));
      if (!overlap(target, source) || (w == r && written[w].same_as(read[r]))) continue;
      return invalid(written[w].name,
                     "memory apart from " + read[r].name +
                         ", or the same address, type and strides as its own",
                     "memory that overlaps it");
    }
  }
  return {};
}

bool is_empty(const Side& s, float lse) {
  if (std::isinf(lse)) return true;  // both signs: FlashAttention-2 marks an empty row with +inf
  if (s.empty == ATTNFOLD_EMPTY_NAN) return std::isnan(lse);
  return s.empty == ATTNFOLD_EMPTY_FINITE && lse == s.empty_value;
}

/** One (row, head): the weights of all sides, then every element. */
class RowMerge {
 public:
  RowMerge(const std::vector<Side>& sides, const Side& out, int64_t width)
      : sides_(sides), out_(out), width_(width), scale_(sides.size()), live_(sides.size()) {}

  void merge(int64_t row, int64_t head) {
    size_t num_live = 0;
    float max = kLowest;
    for (size_t i = 0; i < sides_.size(); ++i) {
      const Side& s = sides_[i];
      const float raw = s.lse[row * s.lse_row + head * s.lse_head];
      if (is_empty(s, raw)) continue;
      const float l = s.normalised ? 1.0f : s.l[row * s.lse_row + head * s.lse_head];
      live_[num_live++] = {i, {s.base2 ? raw * kLn2 : raw, l}, raw};
      max = merge_max(max, live_[num_live - 1].side);
    }
    if (num_live == 1 && sides_[live_[0].index].normalised)
      return copy(live_[0].index, live_[0].raw, row, head);
    float total = 0.0f;
    for (size_t i = 0; i < num_live; ++i) {
      scale_[i] = merge_weight(max, live_[i].side);
      total += scale_[i] * live_[i].side.mass;
    }
    if (num_live == 0 || total == 0.0f) return write_empty(row, head);
    for (size_t i = 0; i < num_live; ++i) scale_[i] /= total;
    char* o = row_of(out_, row, head);
    for (int64_t d = 0; d < width_; ++d) {
      float sum = 0.0f;
      for (size_t i = 0; i < num_live; ++i) {
        const Side& s = sides_[live_[i].index];
        const float term = scale_[i] * load_f32(row_of(s, row, head), s.o_dtype, d);
        sum = i == 0 ? term : sum + term;
      }
      store_f32(o, out_.o_dtype, d, sum);
    }
    const float lse = merge_lse(max, total);
    lse_of_out(row, head) = out_.base2 ? lse * kLog2E : lse;
  }

 private:
  struct Live {
    size_t index;
    MergeSide side;
    float raw;  // lse as stored
  };

  static char* row_of(const Side& s, int64_t row, int64_t head) {
    return s.o + (row * s.o_row + head * s.o_head) * dtype_bytes(s.o_dtype);
  }
  float& lse_of_out(int64_t row, int64_t head) {
    return out_.lse[row * out_.lse_row + head * out_.lse_head];
  }

  void copy(size_t index, float raw, int64_t row, int64_t head) {
    const Side& s = sides_[index];
    for (int64_t d = 0; d < width_; ++d) {
      store_f32(row_of(out_, row, head), out_.o_dtype, d,
                load_f32(row_of(s, row, head), s.o_dtype, d));
    }
    lse_of_out(row, head) = s.base2 == out_.base2 ? raw : raw * (s.base2 ? kLn2 : kLog2E);
  }
  void write_empty(int64_t row, int64_t head) {
    for (int64_t d = 0; d < width_; ++d) store_f32(row_of(out_, row, head), out_.o_dtype, d, 0.0f);
    lse_of_out(row, head) = -kInf;
  }

  const std::vector<Side>& sides_;
  const Side& out_;
  const int64_t width_;
  std::vector<float> scale_;
  std::vector<Live> live_;
};

}  // namespace

Status merge_states(int64_t rows, int32_t heads, int32_t width, const attnfold_state* states,
                    int32_t n, const attnfold_state* out, const uint8_t* row_mask,
                    int64_t row_mask_stride) {
  if (rows < 0 || rows > INT32_MAX) return invalid("rows", "0.." + std::to_string(INT32_MAX), rows);
  if (heads < 0 || heads > 1 << 16) return invalid("heads", "0.." + std::to_string(1 << 16), heads);
  if (width < 1 || width > 1 << 16)
    return invalid("head_dim_vo", "1.." + std::to_string(1 << 16), width);
  if (n < 0 || n > 1 << 20) return invalid("n", "0.." + std::to_string(1 << 20), n);
  if (n > 0 && !states) return invalid("states", "[n] states", "NULL");
  Side target;
  bool sink = false, any_sink = false;
  ATTNFOLD_RETURN_IF_ERROR(resolve("out", true, out, rows, heads, width, &target, &sink));
  if (rows * heads > 0) {
    for (const Array& a : arrays_of("out", target, width)) {
      Extent extent;
      ATTNFOLD_RETURN_IF_ERROR(extent_of_array(a, rows, heads, &extent));
    }
    ATTNFOLD_RETURN_IF_ERROR(
        check_output_strides("out.o", rows, target.o_row, heads, target.o_head, width));
    ATTNFOLD_RETURN_IF_ERROR(
        check_output_strides("out.lse", rows, target.lse_row, heads, target.lse_head, 1));
  }
  std::vector<Side> sides(static_cast<size_t>(n));
  for (int32_t i = 0; i < n; ++i) {
    const std::string name = indexed("states", i);
    ATTNFOLD_RETURN_IF_ERROR(
        resolve(name, false, states + i, rows, heads, width, &sides[i], &sink));
    if (sink && any_sink)
      return invalid(name + ".sink_included", "0 (another side counts the sink already)", 1);
    any_sink = any_sink || sink;
    if (rows * heads > 0)
      ATTNFOLD_RETURN_IF_ERROR(check_alias(target, sides[i], name, rows, heads, width));
  }
  RowMerge merge(sides, target, width);
  for (int64_t row = 0; row < rows; ++row) {
    if (row_mask && !row_mask[row * row_mask_stride]) continue;
    for (int32_t head = 0; head < heads; ++head) merge.merge(row, head);
  }
  return {};
}

}  // namespace attnfold
