// States in the conventions of other engines, merges at the edge of the range, states of a part of
// the rows.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "attnfold/attnfold.h"
#include "core/dtype.h"

namespace attnfold::property {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/** A convention: how an engine writes what a row came to. */
struct Convention {
  DType o_dtype = DType::f32;
  bool base2 = false, by_head = false, normalised = true;
  attnfold_empty_kind kind = ATTNFOLD_EMPTY_INF;
  float empty_lse = -kInf;  // what it writes in an empty row
  int64_t gap = 0;          // between rows of o, and of lse
};

Convention any_convention() {
  Convention c;
  c.o_dtype = *rc::gen::element(DType::f32, DType::f16, DType::bf16);
  c.base2 = *rc::gen::arbitrary<bool>();
  c.by_head = *rc::gen::arbitrary<bool>();
  c.normalised = *rc::gen::inRange(0, 4) != 0;
  c.gap = *rc::gen::element(0, 0, 3);
  switch (*rc::gen::inRange(0, 4)) {
    case 0: break;
    case 1: c.empty_lse = kInf; break;
    case 2: c.kind = ATTNFOLD_EMPTY_NAN, c.empty_lse = kNaN; break;
    default:
      c.kind = ATTNFOLD_EMPTY_FINITE;
      c.empty_lse = *rc::gen::element(-5e4f, -1e30f, -FLT_MAX);
  }
  return c;
}

/** Rows and heads in one convention, in memory of its own. */
struct Stored {
  Convention convention;
  int64_t rows, heads, width, o_row, lse_row, lse_head;
  std::vector<char> o;
  std::vector<float> lse, l;

  Stored(const Convention& c, int64_t r, int64_t h, int64_t w)
      : convention(c), rows(r), heads(h), width(w), o_row(h * w + c.gap) {
    lse_row = c.by_head ? 1 : h + c.gap;
    lse_head = c.by_head ? r + c.gap : 1;
    o.assign(static_cast<size_t>(r * o_row * 4 + 16), '\x5a');
    lse.assign(static_cast<size_t>(r * lse_row + h * lse_head + 4), 777.0f);
    l = lse;
  }
  size_t lse_at(int64_t row, int64_t head) const {
    return static_cast<size_t>(row * lse_row + head * lse_head);
  }
  float o_at(int64_t row, int64_t head, int64_t d) const {
    return load_f32(o.data(), convention.o_dtype, row * o_row + head * width + d);
  }
  void set_o(int64_t row, int64_t head, int64_t d, float x) {
    store_f32(o.data(), convention.o_dtype, row * o_row + head * width + d, x);
  }
  attnfold_state view() {
    attnfold_state s = ATTNFOLD_STATE_INIT;
    s.o = o.data();
    s.o_dtype = static_cast<attnfold_dtype>(convention.o_dtype);
    s.o_stride_row = o_row;
    s.o_stride_head = width;
    s.lse = lse.data();
    s.lse_layout = convention.by_head ? ATTNFOLD_HEADS_ROWS : ATTNFOLD_ROWS_HEADS;
    s.lse_stride_row = lse_row;
    s.lse_stride_head = lse_head;
    s.log_base = convention.base2 ? ATTNFOLD_LOG_2 : ATTNFOLD_LOG_E;
    s.empty = convention.kind;
    s.empty_value = convention.empty_lse;
    s.normalised = convention.normalised;
    s.l = convention.normalised ? nullptr : l.data();
    return s;
  }
};

constexpr double kLn2Exact = 0.693147180559945309417;

/** What a row and head holds: its natural lse and its mean, or nothing. */
struct Cell {
  bool is_empty;
  double lse;
  std::vector<float> o;
};

struct Truth {
  int64_t rows, heads, width;
  std::vector<Cell> cells;
  Cell& at(int64_t row, int64_t head) { return cells[static_cast<size_t>(row * heads + head)]; }
};

Truth any_truth() {
  Truth t{*rc::gen::inRange<int64_t>(1, 6),
          *rc::gen::inRange<int64_t>(1, 5),
          *rc::gen::inRange<int64_t>(1, 130),
          {}};
  for (int64_t i = 0; i < t.rows * t.heads; ++i) {
    Cell cell{*rc::gen::inRange(0, 4) == 0, *rc::gen::inRange(-40000, 40000) / 1000.0, {}};
    for (int64_t d = 0; d < t.width; ++d)
      cell.o.push_back(static_cast<float>(*rc::gen::inRange(-64, 65)) / 8.0f);  // exact in 16 bits
    t.cells.push_back(cell);
  }
  return t;
}

/** As the engine would have written it: garbage in the o of empty rows, sums if not normalised. */
Stored written(Truth& truth, const Convention& c) {
  Stored s(c, truth.rows, truth.heads, truth.width);
  for (int64_t row = 0; row < truth.rows; ++row) {
    for (int64_t head = 0; head < truth.heads; ++head) {
      const Cell& cell = truth.at(row, head);
      const size_t at = s.lse_at(row, head);
      const float l = c.normalised ? 1.0f : 0.5f;  // the reference lies log 2 above lse
      const double reference = cell.lse - std::log(double{l});
      s.lse[at] =
          cell.is_empty ? c.empty_lse : static_cast<float>(reference / (c.base2 ? kLn2Exact : 1.0));
      if (!c.normalised) s.l[at] = cell.is_empty ? kNaN : l;
      for (int64_t d = 0; d < truth.width; ++d)
        s.set_o(row, head, d, cell.is_empty ? kNaN : cell.o[static_cast<size_t>(d)] * l);
    }
  }
  return s;
}

/** "" or where the state does not say what the truth is. */
std::string differs(const Stored& s, Truth& truth) {
  const Convention& c = s.convention;
  for (int64_t row = 0; row < truth.rows; ++row) {
    for (int64_t head = 0; head < truth.heads; ++head) {
      const Cell& cell = truth.at(row, head);
      const std::string where = std::to_string(row) + ", " + std::to_string(head);
      const float lse = s.lse[s.lse_at(row, head)];
      if (cell.is_empty) {
        const float mark = c.kind == ATTNFOLD_EMPTY_INF ? -kInf : c.empty_lse;
        if (!(lse == mark || (std::isnan(lse) && std::isnan(mark)))) return "mark at " + where;
        if (!c.normalised && s.l[s.lse_at(row, head)] != 0.0f) return "l at " + where;
      } else {
        const double natural = lse * (c.base2 ? kLn2Exact : 1.0);
        if (!(std::abs(natural - cell.lse) <= 0x1p-22 * std::max(1.0, std::abs(cell.lse))))
          return "lse at " + where + ": " + std::to_string(natural);
        if (!c.normalised && s.l[s.lse_at(row, head)] != 1.0f) return "l at " + where;
      }
      for (int64_t d = 0; d < truth.width; ++d) {
        const float want = cell.is_empty ? 0.0f : cell.o[static_cast<size_t>(d)];
        if (s.o_at(row, head, d) != want) return "o at " + where;
      }
    }
  }
  return "";
}

TEST(ConvertProperty, AnyConventionToAnyOther) {
  EXPECT_TRUE(rc::check("a state says the same in every convention", [] {
    Truth truth = any_truth();
    Stored from = written(truth, any_convention());
    Stored to(any_convention(), truth.rows, truth.heads, truth.width);
    const Stored before = to;
    const attnfold_state source = from.view(), target = to.view();
    if (attnfold_convert_state(truth.rows, static_cast<int32_t>(truth.heads),
                               static_cast<int32_t>(truth.width), &source, &target,
                               nullptr) != ATTNFOLD_OK)
      RC_FAIL(attnfold_last_error());
    if (const std::string wrong = differs(to, truth); !wrong.empty()) RC_FAIL(wrong);
    for (int64_t row = 0; row < truth.rows; ++row) {  // gaps between rows of o
      const size_t bytes = static_cast<size_t>(dtype_bytes(to.convention.o_dtype));
      const size_t end = static_cast<size_t>(row * to.o_row + truth.heads * truth.width) * bytes;
      RC_ASSERT(std::memcmp(&to.o[end], &before.o[end],
                            static_cast<size_t>(to.convention.gap) * bytes) == 0);
    }
  }));
}

TEST(ConvertProperty, InPlace) {
  EXPECT_TRUE(rc::check("over its own memory, where strides and type are equal", [] {
    Truth truth = any_truth();
    Convention c = any_convention(), other = any_convention();
    other.o_dtype = c.o_dtype;
    other.by_head = c.by_head;
    other.gap = c.gap;
    Stored s = written(truth, c);
    const attnfold_state source = s.view();
    s.convention = other;
    const attnfold_state target = s.view();
    if (attnfold_convert_state(truth.rows, static_cast<int32_t>(truth.heads),
                               static_cast<int32_t>(truth.width), &source, &target,
                               nullptr) != ATTNFOLD_OK)
      RC_FAIL(attnfold_last_error());
    if (const std::string wrong = differs(s, truth); !wrong.empty()) RC_FAIL(wrong);
  }));
}

TEST(ConvertProperty, AMergeOfForeignStatesIsThatOfConvertedOnes) {
  EXPECT_TRUE(rc::check("merge reads every convention as convert does", [] {
    Truth truth = any_truth();
    Convention c = any_convention();
    c.normalised = true;
    Stored from = written(truth, c), own(Convention{}, truth.rows, truth.heads, truth.width),
           a(Convention{}, truth.rows, truth.heads, truth.width), b = a;
    attnfold_state source = from.view(), typed = own.view();
    const int32_t heads = static_cast<int32_t>(truth.heads),
                  width = static_cast<int32_t>(truth.width);
    RC_ASSERT(attnfold_convert_state(truth.rows, heads, width, &source, &typed, nullptr) ==
              ATTNFOLD_OK);
    const attnfold_state foreign[2] = {source, typed}, converted[2] = {typed, typed};
    const attnfold_state to_a = a.view(), to_b = b.view();
    RC_ASSERT(attnfold_merge(truth.rows, heads, width, foreign, 2, &to_a, nullptr, 0) ==
              ATTNFOLD_OK);
    RC_ASSERT(attnfold_merge(truth.rows, heads, width, converted, 2, &to_b, nullptr, 0) ==
              ATTNFOLD_OK);
    RC_ASSERT(std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * 4) == 0);
    RC_ASSERT(a.o == b.o);
  }));
}

/** Floats of all magnitudes, the largest ones often. */
float any_finite() {
  switch (*rc::gen::inRange(0, 5)) {
    case 0: return *rc::gen::element(FLT_MAX, -FLT_MAX, 0.0f, -0.0f, FLT_MIN, 1e-45f);
    case 1: return FLT_MAX * (1.0f - static_cast<float>(*rc::gen::inRange(0, 100)) * 0x1p-24f);
    default:
      return std::ldexp(static_cast<float>(*rc::gen::inRange(-999999, 1000000)),
                        *rc::gen::inRange(-120, 108));
  }
}

float any_lse() {
  switch (*rc::gen::inRange(0, 6)) {
    case 0: return *rc::gen::element(-kInf, kInf);
    case 1: return *rc::gen::element(FLT_MAX, -FLT_MAX, 1e30f, -1e30f, 0.0f);
    default: return static_cast<float>(*rc::gen::inRange(-200000, 200000)) / 1000.0f;
  }
}

TEST(MergeProperty, LiesBetweenItsInputsAtAnyMagnitude) {
  EXPECT_TRUE(rc::check("min <= o <= max over the live sides, exactly; lse is finite", [] {
    const int32_t n = *rc::gen::inRange(1, 40), width = *rc::gen::inRange(1, 80);
    const bool is_even = *rc::gen::arbitrary<bool>();  // equal values: then exactly that value
    std::vector<std::vector<float>> o(static_cast<size_t>(n)), lse(o.size());
    std::vector<attnfold_state> states;
    const float value = any_finite();
    for (size_t i = 0; i < o.size(); ++i) {
      lse[i] = {any_lse()};
      for (int32_t d = 0; d < width; ++d) o[i].push_back(is_even ? value : any_finite());
      attnfold_state s = ATTNFOLD_STATE_INIT;
      s.o = o[i].data();
      s.lse = lse[i].data();
      states.push_back(s);
    }
    std::vector<float> out_o(static_cast<size_t>(width), kNaN), out_lse(1, kNaN);
    attnfold_state out = ATTNFOLD_STATE_INIT;
    out.o = out_o.data();
    out.lse = out_lse.data();
    RC_ASSERT(attnfold_merge(1, 1, width, states.data(), n, &out, nullptr, 0) == ATTNFOLD_OK);
    bool any = false;
    for (const auto& x : lse) any = any || std::isfinite(x[0]);
    RC_ASSERT(any == std::isfinite(out_lse[0]));
    for (int32_t d = 0; d < width; ++d) {
      float low = any ? kInf : 0.0f, high = any ? -kInf : 0.0f;
      for (size_t i = 0; i < o.size(); ++i) {
        if (!std::isfinite(lse[i][0])) continue;
        low = std::min(low, o[i][d]);
        high = std::max(high, o[i][d]);
      }
      RC_ASSERT(out_o[d] >= low && out_o[d] <= high);
    }
  }));
}

TEST(MergeProperty, AStateOfSomeRowsIsEmptyInTheOthers) {
  EXPECT_TRUE(rc::check("num_rows: the rest is copied from the other side, and not read", [] {
    const int64_t rows = *rc::gen::inRange<int64_t>(1, 200), heads = 2, width = 5,
                  some = *rc::gen::inRange<int64_t>(0, rows + 1);
    Convention c;
    c.by_head = *rc::gen::arbitrary<bool>();
    Stored prefix(c, some, heads, width), suffix(c, rows, heads, width), got(c, rows, heads, width),
        padded(c, rows, heads, width), want = got;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t head = 0; head < heads; ++head) {
        suffix.lse[suffix.lse_at(row, head)] = any_lse();
        const float lse = row < some ? any_lse() : -kInf;
        padded.lse[padded.lse_at(row, head)] = lse;
        if (row < some) prefix.lse[prefix.lse_at(row, head)] = lse;
        for (int64_t d = 0; d < width; ++d) {
          suffix.set_o(row, head, d, any_finite());
          padded.set_o(row, head, d, any_finite());
          if (row < some) prefix.set_o(row, head, d, padded.o_at(row, head, d));
        }
      }
    }
    attnfold_state short_state = prefix.view();
    short_state.num_rows = some;
    if (some == 0) short_state.o = short_state.lse = nullptr;
    const attnfold_state parts[2] = {short_state, suffix.view()},
                         whole[2] = {padded.view(), suffix.view()};
    const attnfold_state to_got = got.view(), to_want = want.view();
    attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
    e.num_threads = *rc::gen::inRange(1, 8);
    if (attnfold_merge_parallel(rows, heads, width, parts, 2, &to_got, nullptr, 0, &e) !=
        ATTNFOLD_OK)
      RC_FAIL(attnfold_last_error());
    RC_ASSERT(attnfold_merge(rows, heads, width, whole, 2, &to_want, nullptr, 0) == ATTNFOLD_OK);
    RC_ASSERT(std::memcmp(got.lse.data(), want.lse.data(), got.lse.size() * 4) == 0);
    RC_ASSERT(got.o == want.o);
  }));
}

}  // namespace
}  // namespace attnfold::property
