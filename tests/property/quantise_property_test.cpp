// What attnfold_append stores in pools of 8 bits, against a search among all codes.
#include <gtest/gtest.h>

#include <cfloat>
#include <limits>
#include <string>

#include "property/cache_pool.h"

namespace attnfold::property {
namespace {

double decoded(DType t, int code) {
  const uint8_t bytes[4] = {static_cast<uint8_t>(code)};  // as wide as the widest load
  return load_f32(bytes, t, 0);
}

/** The finite code nearest to x, by search; of two equally near ones the even.  NaN for a NaN. */
double nearest(DType t, double x) {
  if (std::isnan(x)) return x;
  x = std::clamp(x, -1e6, 1e6);  // beyond all numbers of the types
  double best = 0, best_error = std::numeric_limits<double>::infinity();
  bool best_is_even = true;
  for (int code = 0; code < 256; ++code) {
    const double value = decoded(t, code), error = std::abs(value - x);
    if (!std::isfinite(value)) continue;
    if (error < best_error || (error == best_error && !best_is_even)) {
      best = value;
      best_error = error;
      best_is_even = code % 2 == 0;
    }
  }
  return best;
}

float largest_of(DType t) {
  return t == DType::e4m3 ? 448.0f : t == DType::e5m2 ? 57344.0f : 127.0f;
}

/** A pool of 8 bits with packed scales of one kind for k; v like k. */
struct ScaledPool {
  TestPool pool;
  attnfold_scale_kind kind;
  std::vector<float> k_scale, v_scale;  // between canaries

  attnfold_kv_pool view() {
    attnfold_kv_pool p = pool.view();
    p.kv_dtype = static_cast<attnfold_dtype>(pool.dtype);
    p.k_scale_kind = p.v_scale_kind = kind;
    p.k_scale = k_scale.data() + 1;
    p.v_scale = v_scale.data() + 1;
    return p;
  }
  size_t scale_index(int64_t page, int64_t token, int64_t head) const {
    if (kind == ATTNFOLD_SCALE_PER_TENSOR) return 1;
    if (kind == ATTNFOLD_SCALE_PER_HEAD) return 1 + static_cast<size_t>(head);
    return 1 + static_cast<size_t>((page * pool.page_size + token) * pool.kv_heads + head);
  }
};

float any_number() {
  return std::ldexp(static_cast<float>(*rc::gen::inRange(-4095, 4096)), *rc::gen::inRange(-20, 4));
}

ScaledPool any_scaled_pool() {
  ScaledPool s;
  s.pool = any_pool();
  s.pool.dtype = *rc::gen::element(DType::e4m3, DType::e5m2, DType::i8);
  lay_out(&s.pool);
  s.kind = *rc::gen::element(ATTNFOLD_SCALE_PER_TENSOR, ATTNFOLD_SCALE_PER_HEAD,
                             ATTNFOLD_SCALE_PER_TOKEN);
  const size_t n = static_cast<size_t>(s.pool.num_pages * s.pool.page_size * s.pool.kv_heads) + 2;
  for (std::vector<float>* scales : {&s.k_scale, &s.v_scale}) {
    for (size_t i = 0; i < n; ++i)
      scales->push_back(std::ldexp(1.0f + static_cast<float>(*rc::gen::inRange(0, 128)) / 128.0f,
                                   *rc::gen::inRange(-8, 3)));
  }
  return s;
}

/** [num_tokens, kv_heads, width] in f32; a few zero rows, NaN and Inf. */
std::vector<float> any_rows(const ScaledPool& s, int64_t num_tokens, int32_t width) {
  std::vector<float> rows;
  const bool with_nan = s.pool.dtype != DType::i8 || s.kind == ATTNFOLD_SCALE_PER_TOKEN;
  for (int64_t i = 0; i < num_tokens * s.pool.kv_heads; ++i) {
    const int what = *rc::gen::inRange(0, 12);
    for (int32_t e = 0; e < width; ++e) rows.push_back(what == 0 ? 0.0f : any_number());
    float& one = rows[rows.size() - static_cast<size_t>(*rc::gen::inRange(1, width + 1))];
    if (what == 1 && with_nan) one = std::numeric_limits<float>::quiet_NaN();
    if (what == 2) one = -std::numeric_limits<float>::infinity();
    if (what == 3) one = FLT_MAX;
    if (what == 4) std::fill(rows.end() - width, rows.end(), 1e-44f);
  }
  return rows;
}

/** The scale that a row asks for, in words of its own. */
float expected_scale(DType t, const float* row, int32_t width) {
  double largest = 0;
  for (int32_t e = 0; e < width; ++e) {
    if (std::isinf(row[e]) || (std::isnan(row[e]) && t == DType::i8))
      return std::numeric_limits<float>::quiet_NaN();
    if (!std::isnan(row[e])) largest = std::max(largest, std::abs(double{row[e]}));
  }
  if (largest == 0) return 1.0f;
  return std::max(static_cast<float>(largest) / largest_of(t), FLT_MIN);
}

bool same_number(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

/** "" or what is wrong with one tensor after tokens went to distinct slots. */
std::string differs(ScaledPool& s, const Place& place, const std::vector<float>& scales,
                    const std::vector<float>& rows, int32_t width,
                    const std::vector<int64_t>& slots) {
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < 0) continue;
    const int64_t page = slots[i] / s.pool.page_size, token = slots[i] % s.pool.page_size;
    for (int32_t h = 0; h < s.pool.kv_heads; ++h) {
      const float* row = &rows[(i * static_cast<size_t>(s.pool.kv_heads) + h) * width];
      const float scale = scales[s.scale_index(page, token, h)];
      if (s.kind == ATTNFOLD_SCALE_PER_TOKEN &&
          !same_number(scale, expected_scale(s.pool.dtype, row, width)))
        return "scale " + std::to_string(scale);
      if (std::isnan(scale)) continue;  // whatever is stored counts as NaN
      for (int32_t e = 0; e < width; ++e) {
        const double got = load_f32(s.pool.element(place, page, token, h, e), s.pool.dtype, 0);
        const double want = nearest(s.pool.dtype, static_cast<double>(row[e] / scale));
        if (!same_number(got, want))
          return std::to_string(row[e]) + " over " + std::to_string(scale) + ": expected " +
                 std::to_string(want) + ", got " + std::to_string(got);
      }
    }
  }
  return "";
}

TEST(QuantiseProperty, EveryCodeIsTheNearestToTheScaledNumber) {
  EXPECT_TRUE(rc::check("8-bit pools hold x / scale, rounded to nearest even, and the scales", [] {
    ScaledPool s = any_scaled_pool();
    const int64_t num_slots = s.pool.num_pages * s.pool.page_size,
                  num_tokens = std::min<int64_t>(num_slots, *rc::gen::inRange(0, 12));
    const std::vector<float> k = any_rows(s, num_tokens, s.pool.width_k),
                             v = any_rows(s, num_tokens, s.pool.width_v);
    std::vector<int64_t> slots;
    for (int64_t i = 0; i < num_tokens; ++i)
      slots.push_back(*rc::gen::inRange(0, 6) == 0 ? -1 : num_slots - 1 - i);
    const ScaledPool before = s;
    const attnfold_kv_pool pool = s.view();
    attnfold_kv_rows rows = ATTNFOLD_KV_ROWS_INIT;
    rows.num_tokens = num_tokens;
    rows.k = k.data();
    rows.v = v.data();
    rows.dtype = ATTNFOLD_F32;
    rows.slots = slots.data();
    const attnfold_execution e = any_execution();
    if (attnfold_append(&pool, &rows, &e) != ATTNFOLD_OK) RC_FAIL(attnfold_last_error());
    std::string wrong = differs(s, s.pool.k, s.k_scale, k, s.pool.width_k, slots);
    if (wrong.empty() && s.pool.has_v)
      wrong = differs(s, s.pool.v, s.v_scale, v, s.pool.width_v, slots);
    if (!wrong.empty()) RC_FAIL(wrong);
    for (size_t i = 0; i < s.k_scale.size(); ++i) {  // of other slots, and around them
      bool is_written = false;
      for (const int64_t slot : slots)
        is_written |= slot >= 0 && s.kind == ATTNFOLD_SCALE_PER_TOKEN && i >= 1 &&
                      static_cast<int64_t>(i - 1) / s.pool.kv_heads == slot;
      RC_ASSERT(is_written || s.k_scale[i] == before.k_scale[i]);
      RC_ASSERT((is_written && s.pool.has_v) || s.v_scale[i] == before.v_scale[i]);
    }
  }));
}

TEST(QuantiseProperty, ScalesMoveWithTheirPages) {
  EXPECT_TRUE(rc::check("copies of pages copy the scales of their tokens", [] {
    ScaledPool s = any_scaled_pool();
    s.kind = ATTNFOLD_SCALE_PER_TOKEN;
    const int32_t from = *rc::gen::inRange(0, static_cast<int>(s.pool.num_pages)),
                  to = *rc::gen::inRange(0, static_cast<int>(s.pool.num_pages));
    const ScaledPool before = s;
    const attnfold_kv_pool pool = s.view();
    const int32_t pair[] = {from, to};
    if (attnfold_copy_pages(&pool, &pool, pair, 1, nullptr) != ATTNFOLD_OK)
      RC_FAIL(attnfold_last_error());
    for (int64_t page = 0; page < s.pool.num_pages; ++page) {
      for (int64_t token = 0; token < s.pool.page_size; ++token) {
        for (int64_t head = 0; head < s.pool.kv_heads; ++head) {
          const size_t at = s.scale_index(page, token, head),
                       source = s.scale_index(page == to ? from : page, token, head);
          RC_ASSERT(s.k_scale[at] == before.k_scale[source]);
          RC_ASSERT(s.v_scale[at] == before.v_scale[s.pool.has_v ? source : at]);
        }
      }
    }
    RC_ASSERT(s.k_scale.front() == before.k_scale.front());
    RC_ASSERT(s.k_scale.back() == before.k_scale.back());
  }));
}

}  // namespace
}  // namespace attnfold::property
