// Learned sink logits of any size: finite ones give finite answers, +inf gives what a score of +inf
// does.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <limits>

#include "conformance/suite.h"

namespace attnfold::check {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

/** Decodes, a prefill and a request without keys. */
Call call_of(const cases::Context& x, DType type, float sink) {
  Spec spec = cases::make_spec({8, 2, 64, 64}, type, 16, cases::kCausal, {1, 40, 1, 1},
                               {300, 130, 0, 2500});
  if (!std::isnan(sink)) spec.sink_logits.assign(8, sink);
  return generate(spec, x.seed);
}

constexpr int32_t kEmptyRow = 41, kNumRows = 43;

TEST(Sink, AFiniteLogitThatTheLog2DomainHasNoNumberForTakesAllWeight) {
  const cases::Context x = test::context();
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    for (const float sink : {2.36e38f, 3e38f, FLT_MAX}) {
      const Call call = call_of(x, type, sink);
      ATTNFOLD_ASSERT_HOLDS(cases::right_under(call, x, {1, 2, 5}));
      Answer answer;
      ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), answer));
      for (int32_t row = 0; row < kNumRows; ++row) {
        for (int32_t head = 0; head < 8; ++head) {
          ASSERT_EQ(cases::lse_at(call, answer, row, head), sink) << row;
          for (int32_t d = 0; d < 64; ++d) ASSERT_EQ(cases::o_at(call, answer, row, head, d), 0);
        }
      }
    }
  }
}

TEST(Sink, ALogitFarBelowAllScoresChangesNoBit) {
  const cases::Context x = test::context();
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    const Call without = call_of(x, type, std::nanf(""));
    Answer plain, with;
    ATTNFOLD_ASSERT_HOLDS(cases::run(without, cases::execution(x), plain));
    for (const float sink : {-1e30f, -2.4e38f, -FLT_MAX}) {
      const Call call = call_of(x, type, sink);
      ATTNFOLD_ASSERT_HOLDS(cases::same_under(call, x, {1, 2, 5}, with));
      for (int32_t row = 0; row < kNumRows; ++row) {
        for (int32_t head = 0; head < 8; ++head) {
          ASSERT_EQ(cases::lse_at(call, with, row, head),
                    row == kEmptyRow ? sink : cases::lse_at(without, plain, row, head));
          for (int32_t d = 0; d < 64; ++d)
            ASSERT_EQ(cases::o_at(call, with, row, head, d),
                      cases::o_at(without, plain, row, head, d));
        }
      }
    }
  }
}

TEST(Sink, InfinityMakesEveryRowWithAKeyNaN) {
  const cases::Context x = test::context();
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    const Call call = call_of(x, type, kInf);
    ATTNFOLD_ASSERT_HOLDS(cases::right_under(call, x, {1, 2, 5}));
    Answer answer;
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), answer));
    for (int32_t row = 0; row < kNumRows; ++row) {
      for (int32_t head = 0; head < 8; ++head) {
        const float lse = cases::lse_at(call, answer, row, head);
        const auto o = static_cast<float>(cases::o_at(call, answer, row, head, 63));
        if (row == kEmptyRow) {
          ASSERT_EQ(lse, kInf);
          ASSERT_EQ(o, 0);
        } else {
          ASSERT_TRUE(std::isnan(lse) && std::isnan(o)) << "row " << row << ": " << lse << " " << o;
        }
      }
    }
  }
}

}  // namespace
}  // namespace attnfold::check
