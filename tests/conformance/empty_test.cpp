// Promise P4: a row that sees no key is o = 0, lse = -inf, always written.
#include <gtest/gtest.h>

#include <random>

#include "conformance/suite.h"

namespace attnfold::check {
namespace {

using cases::kCausal;
using cases::kNone;

/** Whether a sink logit leaves so little to the keys of a row that its lse rounds to the logit: o
 * may then round to 0, in fp16, and the row looks as if it saw no key. */
bool outweighed(const Call& call, int32_t row, int32_t head) {
  if (call.sink_logits.empty()) return false;
  const size_t at = static_cast<size_t>(row) * static_cast<size_t>(call.problem.qo_heads) +
                    static_cast<size_t>(head);
  return static_cast<float>(ref::answer(call).lse[at]) == call.sink_logits[head];
}

/** Rows that the oracle says see nothing are empty to the bit, all others are not; returns how many
 * are empty. */
int32_t count_empty_rows(const Call& call, const Answer& answer) {
  int32_t num_empty = 0;
  for (int32_t r = 0; r < call.batch; ++r) {
    const int32_t qo_len = call.qo_indptr[r + 1] - call.qo_indptr[r];
    for (int32_t i = 0; i < qo_len; ++i) {
      bool any_sees = false;
      for (int32_t head = 0; head < call.problem.qo_heads; ++head) {
        bool sees = false;
        for (int32_t j = 0; j < call.kv_len[r] && !sees; ++j)
          sees = ref::visible(call, r, i, j, head / call.group_size());
        const std::string text = cases::row_is_empty(call, answer, call.qo_indptr[r] + i, head);
        any_sees = any_sees || sees;
        if (text.empty() && sees && outweighed(call, call.qo_indptr[r] + i, head)) continue;
        EXPECT_EQ(text.empty(), !sees) << "request " << r << " token " << i << ": " << text;
      }
      num_empty += !any_sees;
    }
  }
  return num_empty;
}

TEST(Empty, NoKeys) {
  const cases::Context x = test::context();
  for (DType type : {DType::f32, DType::f16, DType::bf16}) {
    const Call call = generate(
        cases::make_spec({6, 2, 64, 72}, type, 16, kCausal, {1, 5, 1, 0, 3}, {0, 0, 40, 0, 700}),
        x.seed);
    Answer answer;
    ATTNFOLD_ASSERT_HOLDS(cases::same_under(call, x, {1, 2, 5}, answer));
    EXPECT_EQ(count_empty_rows(call, answer), 6);
  }
}

TEST(Empty, MoreTokensThanKeys) {
  const cases::Context x = test::context();
  const Call call = generate(
      cases::make_spec({4, 1, 40, 40}, DType::bf16, 5, kCausal, {100, 7, 200}, {30, 6, 199}),
      x.seed);
  Answer answer;
  ATTNFOLD_ASSERT_HOLDS(cases::same_under(call, x, {1, 3}, answer));
  EXPECT_EQ(count_empty_rows(call, answer), 70 + 1 + 1);
}

TEST(Empty, WindowsThatHoldNoKey) {
  const cases::Context x = test::context();
  for (attnfold_mask_kind mask : {kNone, kCausal}) {
    for (int32_t right : {-1, 0, 2}) {
      Spec spec = cases::make_spec({2, 1, 16, 16}, DType::f16, 16, mask, {50, 9}, {20, 3});
      spec.problem.window_left = 4;
      spec.problem.window_right = right;
      const Call call = generate(spec, x.seed);
      Answer answer;
      ATTNFOLD_ASSERT_HOLDS(cases::same_under(call, x, {1, 3}, answer));
      const int32_t num_empty = count_empty_rows(call, answer);
      if (mask == kCausal || right >= 0) {
        EXPECT_GT(num_empty, 20);
      }
    }
  }
}

TEST(Empty, WrittenThroughStrides) {
  const cases::Context x = test::context();
  const Call call = generate(
      cases::make_spec({4, 2, 24, 24}, DType::f32, 16, kCausal, {2, 9, 1}, {0, 4, 50}), x.seed);
  Answer answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run_spaced(call, cases::execution(x), answer));
  EXPECT_EQ(count_empty_rows(call, answer), 2 + 5);
}

TEST(Empty, RandomBatches) {
  for (uint64_t seed = test::seed(); seed < test::seed() + 20; ++seed) {
    std::mt19937_64 rng(seed);
    const Call call = generate(random_case(rng), seed);
    Answer answer;
    ASSERT_EQ(cases::run(call, cases::execution({seed, nullptr}), answer), "") << "seed " << seed;
    count_empty_rows(call, answer);
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

/** A visible key whose score is -inf carries no mass, and is no reason for NaN. */
TEST(Empty, ScoresOfMinusInfinity) {
  const cases::Context x = test::context();
  Call call =
      cases::zero_call(cases::make_spec({2, 1, 16, 16}, DType::f32, 16, kCausal, {3}, {300}));
  cases::fill_noise(call, x.seed);
  cases::fill_q(call, [](int, int, int, int e) { return 1.0f + static_cast<float>(e); });
  cases::fill_k(call, [&](int, int t, int, int e) {
    return e == 0 && t < 290 ? -cases::kInf : cases::noise(x.seed, t, e, 0, 0);
  });
  ATTNFOLD_EXPECT_HOLDS(cases::right_under(call, x, {1, 2}));
}

}  // namespace
}  // namespace attnfold::check
