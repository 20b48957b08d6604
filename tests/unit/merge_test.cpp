#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "attnfold/attnfold.h"
#include "core/dtype.h"

namespace attnfold {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kRows = 3, kHeads = 2, kWidth = 5;
constexpr size_t kPairs = kRows * kHeads;

/** o and lse of kRows x kHeads in float32. */
struct State {
  std::vector<float> o = std::vector<float>(kPairs * kWidth, kNaN);
  std::vector<float> lse = std::vector<float>(kPairs, kNaN);

  attnfold_state view() {
    attnfold_state s = ATTNFOLD_STATE_INIT;
    s.o = o.data();
    s.lse = lse.data();
    return s;
  }
  bool operator==(const State& other) const {
    return std::memcmp(o.data(), other.o.data(), o.size() * 4) == 0 &&
           std::memcmp(lse.data(), other.lse.data(), lse.size() * 4) == 0;
  }
};

State filled(float o, float lse) {
  State s;
  for (size_t i = 0; i < s.o.size(); ++i) s.o[i] = o + 0.37f * static_cast<float>(i);
  for (size_t i = 0; i < s.lse.size(); ++i) s.lse[i] = lse - 0.21f * static_cast<float>(i);
  return s;
}

State empty(float lse = -kInf, float o = kNaN) {
  State s;
  s.o.assign(s.o.size(), o);
  s.lse.assign(s.lse.size(), lse);
  return s;
}

State merged(std::vector<attnfold_state> sides, const uint8_t* mask = nullptr) {
  State out;
  const attnfold_state to = out.view();
  EXPECT_EQ(attnfold_merge(kRows, kHeads, kWidth, sides.data(), static_cast<int32_t>(sides.size()),
                           &to, mask, 1),
            ATTNFOLD_OK)
      << attnfold_last_error();
  return out;
}

void expect_empty(const State& s) {
  for (float x : s.o) EXPECT_EQ(bits_of(x), 0u);
  for (float x : s.lse) EXPECT_EQ(x, -kInf);
}

TEST(Merge, NoSidesGiveEmptyRows) { expect_empty(merged({})); }

TEST(Merge, EmptySidesGiveEmptyRows) {
  State a = empty(), b = empty(kInf), c = empty(-kInf, 3.0f);
  expect_empty(merged({a.view()}));
  expect_empty(merged({a.view(), b.view(), c.view()}));
}

TEST(Merge, IdentityIsExact) {
  State a = filled(-1.3f, 0.4f);
  a.o[3] = -0.0f;
  a.o[4] = 1e-42f;
  for (float lse : {-kInf, kInf}) {
    State nothing = empty(lse);
    EXPECT_TRUE(merged({a.view(), nothing.view()}) == a);
    EXPECT_TRUE(merged({nothing.view(), a.view()}) == a);
    EXPECT_TRUE(merged({nothing.view(), a.view(), nothing.view(), nothing.view()}) == a);
  }
  EXPECT_TRUE(merged({a.view()}) == a);
}

TEST(Merge, CommutesBitForBit) {
  State a = filled(-1.3f, 0.4f), b = filled(2.9f, 0.11f);
  EXPECT_TRUE(merged({a.view(), b.view()}) == merged({b.view(), a.view()}));
}

TEST(Merge, MatchesTheFormula) {
  State a = filled(-1.3f, 0.4f), b = filled(2.9f, 1.5f);
  const State out = merged({a.view(), b.view()});
  for (size_t pair = 0; pair < kPairs; ++pair) {
    const double wa = std::exp(double{a.lse[pair]}), wb = std::exp(double{b.lse[pair]});
    EXPECT_NEAR(out.lse[pair], std::log(wa + wb), 1e-6);
    for (size_t d = pair * kWidth; d < (pair + 1) * kWidth; ++d) {
      EXPECT_NEAR(out.o[d], (wa * a.o[d] + wb * b.o[d]) / (wa + wb), 2e-6);
    }
  }
}

TEST(Merge, WorksInPlaceOverAnySide) {
  State a = filled(-1.3f, 0.4f), b = filled(2.9f, 1.5f), c = empty();
  const State want = merged({a.view(), b.view(), c.view()});
  State sides[3] = {a, b, c};
  for (int target = 0; target < 3; ++target) {
    State copies[3] = {a, b, c};
    const attnfold_state views[3] = {copies[0].view(), copies[1].view(), copies[2].view()};
    ASSERT_EQ(attnfold_merge(kRows, kHeads, kWidth, views, 3, &views[target], nullptr, 0),
              ATTNFOLD_OK)
        << attnfold_last_error();
    EXPECT_TRUE(copies[target] == want) << target;
    for (int i = 0; i < 3; ++i) {
      if (i == target) continue;
      EXPECT_TRUE(copies[i] == sides[i]) << i;
    }
  }
}

TEST(Merge, RowMaskLeavesRowsAlone) {
  State a = filled(-1.3f, 0.4f), b = filled(2.9f, 1.5f);
  const State all = merged({a.view(), b.view()});
  const uint8_t mask[kRows] = {0, 1, 0};
  const State some = merged({a.view(), b.view()}, mask);
  for (size_t i = 0; i < some.o.size(); ++i) {
    const bool is_merged = mask[i / (kHeads * kWidth)] != 0;
    EXPECT_EQ(bits_of(some.o[i]), is_merged ? bits_of(all.o[i]) : bits_of(kNaN));
  }
}

TEST(Merge, NaNIsAResultUnlessSaidToBeEmpty) {
  State a = filled(-1.3f, 0.4f), b = filled(1.0f, 0.0f);
  b.lse.assign(kPairs, kNaN);
  const State poisoned = merged({a.view(), b.view()});
  for (float x : poisoned.lse) EXPECT_TRUE(std::isnan(x));
  for (float x : poisoned.o) EXPECT_TRUE(std::isnan(x));
  attnfold_state side = b.view();
  side.empty = ATTNFOLD_EMPTY_NAN;
  EXPECT_TRUE(merged({a.view(), side}) == a);
  expect_empty(merged({side, side}));
}

TEST(Merge, FiniteSentinelsAreComparedExactly) {
  State a = filled(-1.3f, 0.4f), b = empty(-1e30f, 7.0f);
  attnfold_state side = b.view();
  EXPECT_EQ(merged({side}).lse[0], -1e30f);  // a result, as long as nobody says otherwise
  side.empty = ATTNFOLD_EMPTY_FINITE;
  side.empty_value = -1e30f;
  EXPECT_TRUE(merged({a.view(), side}) == a);
  expect_empty(merged({side}));
  side.empty_value = -1e29f;
  EXPECT_EQ(merged({side}).lse[0], -1e30f);
}

TEST(Merge, BaseTwoInAndOut) {
  State a = filled(-1.3f, 0.4f), b = filled(2.9f, 1.5f), b2 = b;
  for (float& x : b2.lse) x = static_cast<float>(x / std::log(2.0));
  attnfold_state side = b2.view();
  side.log_base = ATTNFOLD_LOG_2;
  const State want = merged({a.view(), b.view()}), got = merged({a.view(), side});
  for (size_t i = 0; i < want.o.size(); ++i) EXPECT_NEAR(got.o[i], want.o[i], 2e-6);
  for (size_t i = 0; i < kPairs; ++i) EXPECT_NEAR(got.lse[i], want.lse[i], 1e-6);
  State out;
  attnfold_state to = out.view();
  to.log_base = ATTNFOLD_LOG_2;
  const attnfold_state sides[2] = {a.view(), side};
  ASSERT_EQ(attnfold_merge(kRows, kHeads, kWidth, sides, 2, &to, nullptr, 0), ATTNFOLD_OK);
  for (size_t i = 0; i < kPairs; ++i) EXPECT_NEAR(out.lse[i] * std::log(2.0), want.lse[i], 1e-6);
  EXPECT_EQ(std::memcmp(out.o.data(), got.o.data(), out.o.size() * 4), 0)
      << "the base of lse does not touch o";
}

TEST(Merge, HeadsRowsLayoutAndStrides) {
  State a = filled(-1.3f, 0.4f), b = filled(2.9f, 1.5f);
  const State want = merged({a.view(), b.view()});
  std::vector<float> transposed(kPairs), spaced_lse(kPairs * 4, 77.0f),
      spaced_o(kPairs * (kWidth + 3), 77.0f);
  for (size_t row = 0; row < kRows; ++row) {
    for (size_t h = 0; h < kHeads; ++h) {
      transposed[h * kRows + row] = a.lse[row * kHeads + h];
      spaced_lse[row * 3 + h * kRows * 4] = b.lse[row * kHeads + h];
      std::memcpy(&spaced_o[(h * kRows + row) * (kWidth + 3)], &b.o[(row * kHeads + h) * kWidth],
                  kWidth * 4);
    }
  }
  attnfold_state first = a.view(), second = b.view();
  first.lse = transposed.data();
  first.lse_layout = ATTNFOLD_HEADS_ROWS;
  second.lse = spaced_lse.data();
  second.lse_stride_row = 3;
  second.lse_stride_head = kRows * 4;
  second.o = spaced_o.data();
  second.o_stride_row = kWidth + 3;
  second.o_stride_head = kRows * (kWidth + 3);
  EXPECT_TRUE(merged({first, second}) == want);
  State out;
  attnfold_state to = out.view();
  to.lse_layout = ATTNFOLD_HEADS_ROWS;
  const attnfold_state sides[2] = {first, second};
  ASSERT_EQ(attnfold_merge(kRows, kHeads, kWidth, sides, 2, &to, nullptr, 0), ATTNFOLD_OK);
  for (size_t row = 0; row < kRows; ++row) {
    for (size_t h = 0; h < kHeads; ++h)
      EXPECT_EQ(out.lse[h * kRows + row], want.lse[row * kHeads + h]);
  }
}

TEST(Merge, UnnormalisedSidesFoldWithTheirMass) {
  State a = filled(-1.3f, 0.4f), b = filled(2.9f, 1.5f), raw = b;
  std::vector<float> l(kPairs);
  for (size_t pair = 0; pair < kPairs;
       ++pair) {  // the same result, relative to a reference 2 below
    l[pair] = std::exp(2.0f);
    raw.lse[pair] = b.lse[pair] - 2.0f;
    for (size_t d = 0; d < kWidth; ++d) raw.o[pair * kWidth + d] = b.o[pair * kWidth + d] * l[pair];
  }
  attnfold_state side = raw.view();
  side.normalised = 0;
  side.l = l.data();
  for (bool alone : {false, true}) {
    const State want = alone ? b : merged({a.view(), b.view()});
    const State got = alone ? merged({side}) : merged({a.view(), side});
    for (size_t i = 0; i < want.o.size(); ++i) EXPECT_NEAR(got.o[i], want.o[i], 1e-5);
    for (size_t i = 0; i < kPairs; ++i) EXPECT_NEAR(got.lse[i], want.lse[i], 2e-6);
  }
}

TEST(Merge, TypesOfEachSideAndOfTheOutput) {
  for (attnfold_dtype in : {ATTNFOLD_F32, ATTNFOLD_F16, ATTNFOLD_BF16}) {
    for (attnfold_dtype to_type : {ATTNFOLD_F32, ATTNFOLD_F16, ATTNFOLD_BF16}) {
      State a = filled(-1.0f, 0.4f), out;
      State b = filled(0.0f, 1.0f);
      std::vector<float> typed(b.o.size()), out_o(b.o.size());
      for (size_t i = 0; i < b.o.size(); ++i) {
        store_f32(typed.data(), static_cast<DType>(in), static_cast<int64_t>(i), b.o[i]);
        b.o[i] = load_f32(typed.data(), static_cast<DType>(in), static_cast<int64_t>(i));
      }
      attnfold_state side = b.view(), to = out.view();
      side.o = typed.data();
      side.o_dtype = in;
      to.o = out_o.data();
      to.o_dtype = to_type;
      const State want = merged({a.view(), b.view()});
      const attnfold_state sides[2] = {a.view(), side};
      ASSERT_EQ(attnfold_merge(kRows, kHeads, kWidth, sides, 2, &to, nullptr, 0), ATTNFOLD_OK);
      for (size_t i = 0; i < out_o.size(); ++i) {
        float rounded = 0;
        store_f32(&rounded, static_cast<DType>(to_type), 0, want.o[i]);
        EXPECT_EQ(load_f32(out_o.data(), static_cast<DType>(to_type), static_cast<int64_t>(i)),
                  load_f32(&rounded, static_cast<DType>(to_type), 0));
      }
    }
  }
}

TEST(Merge, ExtremeReferencesNeitherOverflowNorVanish) {
  for (float lse : {-3e38f, -1e4f, 0.0f, 1e4f, 3e38f}) {
    State a = empty(lse, 2.0f), b = empty(lse, 4.0f);
    const State out = merged({a.view(), b.view()});
    for (float x : out.o) EXPECT_EQ(x, 3.0f) << lse;
    for (float x : out.lse) EXPECT_TRUE(std::isfinite(x)) << lse;
  }
  State far = empty(-3e38f, 1e30f), near = empty(3e38f, 1.0f);
  for (float x : merged({far.view(), near.view()}).o) EXPECT_EQ(x, 1.0f);
}

TEST(Merge, LargeOutputsDoNotOverflowOnTheWay) {
  State a = empty(0.0f, 3.4e38f), b = empty(0.0f, 3.4e38f), c = empty(0.1f, 3.4e38f);
  for (float x : merged({a.view(), b.view(), c.view()}).o) {
    EXPECT_TRUE(std::isfinite(x));
    EXPECT_LE(x, 3.4e38f * (1.0f + 1e-6f));
  }
}

TEST(Merge, NothingToDo) {
  const attnfold_state none = ATTNFOLD_STATE_INIT;
  EXPECT_EQ(attnfold_merge(0, 4, 8, &none, 1, &none, nullptr, 0), ATTNFOLD_OK);
  EXPECT_EQ(attnfold_merge(4, 0, 8, &none, 1, &none, nullptr, 0), ATTNFOLD_OK);
}

}  // namespace
}  // namespace attnfold
