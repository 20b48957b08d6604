// What every merge must be, over random states.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "attnfold/attnfold.h"
#include "check/cases_util.h"

namespace attnfold::property {
namespace {

using check::cases::State;

constexpr float kInf = std::numeric_limits<float>::infinity();

/** A float in [low, high) of a thousandth's grain. */
rc::Gen<float> number(int low, int high) {
  return rc::gen::map(rc::gen::inRange(low * 1000, high * 1000),
                      [](int x) { return static_cast<float>(x) / 1000.0f; });
}

struct Shape {
  int64_t rows;
  int32_t heads, width;
  size_t pairs() const { return static_cast<size_t>(rows) * heads; }
};

Shape any_shape() {
  return {*rc::gen::inRange<int64_t>(1, 5), *rc::gen::inRange(1, 4), *rc::gen::inRange(1, 20)};
}

std::vector<State> any_states(const Shape& shape, int low, int high) {
  std::vector<State> states(static_cast<size_t>(*rc::gen::inRange(low, high)));
  for (State& s : states) {
    s.o = *rc::gen::container<std::vector<float>>(shape.pairs() * shape.width, number(-30, 30));
    s.lse = *rc::gen::container<std::vector<float>>(
        shape.pairs(), rc::gen::weightedOneOf<float>({{6, number(-20, 20)},
                                                      {1, rc::gen::just(-kInf)},
                                                      {1, rc::gen::just(kInf)},
                                                      {1, number(-900, 900)}}));
  }
  return states;
}

State merge(const Shape& shape, std::vector<State> states) {
  State out;
  const std::string wrong = check::cases::merge(shape.rows, shape.heads, shape.width, states, out);
  if (!wrong.empty()) RC_FAIL(wrong);
  return out;
}

bool same(const State& a, const State& b) {
  return a.o.size() == b.o.size() && std::memcmp(a.o.data(), b.o.data(), a.o.size() * 4) == 0 &&
         std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * 4) == 0;
}

TEST(MergeProperty, EmptyIsTheIdentity) {
  EXPECT_TRUE(rc::check("one state among empties comes back bit for bit", [] {
    const Shape shape = any_shape();
    State a = any_states(shape, 1, 2).front(), nothing = a;
    for (float& x : a.lse) x = x == kInf ? -kInf : x;
    for (size_t i = 0; i < a.lse.size(); ++i) {
      if (a.lse[i] == -kInf)
        std::fill_n(a.o.begin() + static_cast<int64_t>(i) * shape.width, shape.width, 0.0f);
    }
    for (float& x : nothing.lse) x = *rc::gen::element(kInf, -kInf);
    std::fill(nothing.o.begin(), nothing.o.end(), std::numeric_limits<float>::quiet_NaN());
    RC_ASSERT(same(merge(shape, {a, nothing}), a));
    RC_ASSERT(same(merge(shape, {nothing, nothing, a, nothing}), a));
  }));
}

TEST(MergeProperty, TwoSidesCommute) {
  EXPECT_TRUE(rc::check("merge(a, b) and merge(b, a) are the same bytes", [] {
    const Shape shape = any_shape();
    const std::vector<State> sides = any_states(shape, 2, 3);
    RC_ASSERT(same(merge(shape, {sides[0], sides[1]}), merge(shape, {sides[1], sides[0]})));
  }));
}

TEST(MergeProperty, ManySidesAgainstFloat64AndTheirRange) {
  EXPECT_TRUE(
      rc::check("n-way merge is the softmax-weighted mean, within the range of its inputs", [] {
        const Shape shape = any_shape();
        const std::vector<State> sides = any_states(shape, 1, 9);
        const State out = merge(shape, sides);
        for (size_t pair = 0; pair < shape.pairs(); ++pair) {
          double max = -kInf, total = 0;
          for (const State& s : sides) {
            if (std::isfinite(s.lse[pair])) max = std::max(max, double{s.lse[pair]});
          }
          if (max == -kInf) {
            RC_ASSERT(out.lse[pair] == -kInf);
            continue;
          }
          for (const State& s : sides)
            total += std::isfinite(s.lse[pair]) ? std::exp(s.lse[pair] - max) : 0;
          const double lse = max + std::log(total);
          RC_ASSERT(std::abs(out.lse[pair] - lse) <= 0x1p-22 * std::max(1.0, std::abs(lse)));
          for (int32_t d = 0; d < shape.width; ++d) {
            const size_t at = pair * shape.width + d;
            double mean = 0;
            float low = kInf, high = -kInf, largest = 0;
            for (const State& s : sides) {
              if (!std::isfinite(s.lse[pair])) continue;
              mean += std::exp(s.lse[pair] - lse) * s.o[at];
              low = std::min(low, s.o[at]);
              high = std::max(high, s.o[at]);
              largest = std::max(largest, std::abs(s.o[at]));
            }
            RC_ASSERT(std::abs(out.o[at] - mean) <= 0x1p-20 * largest);
            RC_ASSERT(out.o[at] >= low - 0x1p-22f * largest &&
                      out.o[at] <= high + 0x1p-22f * largest);
          }
        }
      }));
}

TEST(MergeProperty, InPlaceIsTheSame) {
  EXPECT_TRUE(rc::check("merging over a side gives the bytes of merging apart", [] {
    const Shape shape = any_shape();
    const std::vector<State> sides = any_states(shape, 1, 5);
    const State want = merge(shape, sides);
    const size_t target = *rc::gen::inRange<size_t>(0, sides.size());
    std::vector<State> copies = sides;
    std::vector<attnfold_state> views;
    for (State& s : copies) views.push_back(check::cases::view(s));
    RC_ASSERT(attnfold_merge(shape.rows, shape.heads, shape.width, views.data(),
                             static_cast<int32_t>(views.size()), &views[target], nullptr,
                             0) == ATTNFOLD_OK);
    RC_ASSERT(same(copies[target], want));
  }));
}

/** The keys of a call in two or three calls, merged, are the whole call's answer. */
TEST(MergeProperty, KeysOfACallInParts) {
  EXPECT_TRUE(rc::check("attention over parts of the keys merges to attention over all", [] {
    namespace cases = check::cases;
    const uint64_t seed = *rc::gen::arbitrary<uint32_t>();
    const int32_t kv_len = *rc::gen::inRange(1, 600), qo_len = *rc::gen::inRange(1, 6);
    const DType type = *rc::gen::element(DType::f32, DType::f16, DType::bf16);
    const int32_t cut = *rc::gen::inRange(0, kv_len + 1);
    check::Call whole = cases::zero_call(
        cases::make_spec({4, 2, 16, 24}, type, cases::kRagged, cases::kNone, {qo_len}, {kv_len}));
    cases::fill_noise(whole, seed);
    whole.problem.o_dtype = ATTNFOLD_F32;
    const check::Call parts[2] = {cases::skip_keys(whole, {0}, {cut}),
                                  cases::skip_keys(whole, {cut}, {kv_len - cut})};
    std::vector<State> sides;
    for (const check::Call& part : parts) {
      check::Answer answer;
      const std::string wrong =
          cases::run(part, cases::execution({seed, nullptr}, 2, seed, 1), answer);
      if (!wrong.empty()) RC_FAIL(wrong);
      sides.push_back(cases::state_of(part, answer));
    }
    const State merged = merge({qo_len, 4, 24}, sides);
    const std::string wrong = cases::judge_state(whole, merged, ref::answer(whole));
    if (!wrong.empty()) RC_FAIL(wrong);
  }));
}

}  // namespace
}  // namespace attnfold::property
