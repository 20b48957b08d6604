// Promise P3: one token, one answer, whether decoded, prefilled, prefilled in chunks or verified.
#include <gtest/gtest.h>

#include <random>

#include "conformance/suite.h"

namespace attnfold::check {
namespace {

using cases::kCausal;
using cases::Shape;

/** Tokens [begin, end) of request 0 in a call of their own have the bits of the whole prefill's
 * rows. */
std::string same_tokens(const Call& call, const Answer& whole, int32_t begin, int32_t end,
                        const cases::Context& x, int32_t workers) {
  const Call chunk = chunk_of(call, 0, begin, end);
  Answer part;
  ATTNFOLD_HOLD(cases::run(chunk, cases::execution(x, workers, x.seed + begin), part));
  return cases::same_rows(chunk, part, 0, whole, begin, end - begin,
                          "tokens " + std::to_string(begin) + ".." + std::to_string(end));
}

struct Prefill {
  Shape shape;
  DType type;
  int32_t page_size, qo_len, kv_len, window_left;
};

const Prefill kPrefills[] = {
    {{2, 2, 16, 16}, DType::f32, 16, 150, 150, -1},
    {{2, 1, 64, 64}, DType::bf16, 16, 100, 300, -1},
    {{3, 1, 24, 40}, DType::f16, 3, 90, 600, -1},
    {{4, 1, 128, 128}, DType::bf16, 64, 70, 129, -1},
    {{5, 1, 72, 72}, DType::f16, cases::kRagged, 65, 260, -1},
    {{8, 2, 80, 64}, DType::bf16, 16, 130, 130, 31},
    {{16, 1, 32, 32}, DType::f32, 1, 60, 400, 129},
    {{12, 1, 576, 512}, DType::bf16, 64, 33, 200, -1},
    {{2, 1, 16, 16}, DType::bf16, 16, 40, 8400, -1},
    {{1, 1, 16, 16}, DType::f16, 128, 40, 8400, 8210},
    {{4, 2, 16, 16}, DType::f32, 16, 30, 20, -1},  // more tokens than keys
    {{4, 1, 128, 128}, DType::e4m3, 16, 70, 300, -1},
    {{6, 2, 72, 40}, DType::e5m2, 5, 50, 200, -1},
    {{3, 1, 64, 64}, DType::i8, 16, 60, 2200, -1},
};

class Token : public ::testing::TestWithParam<int> {
 protected:
  const Prefill& prefill() const { return kPrefills[GetParam()]; }
  Call call(uint64_t seed) const {
    const Prefill& p = prefill();
    Spec spec = cases::make_spec(p.shape, p.type, p.page_size, kCausal, {p.qo_len}, {p.kv_len});
    spec.problem.window_left = p.window_left;
    return generate(spec, seed);
  }
};

TEST_P(Token, ChunksCutAnywhere) {
  const cases::Context x = test::context();
  const Call whole_call = call(x.seed);
  Answer whole;
  ATTNFOLD_ASSERT_HOLDS(cases::run(whole_call, cases::execution(x), whole));
  ATTNFOLD_ASSERT_HOLDS(cases::judge_tokens(prefill().window_left < 0 ? whole_call : Call(), whole,
                                            prefill().window_left < 0
                                                ? cases::sample_tokens(whole_call, 5)
                                                : std::vector<cases::TokenRef>()));
  std::mt19937_64 rng(x.seed);
  for (int round = 0; round < 4; ++round) {
    for (int32_t begin = 0; begin < prefill().qo_len;) {
      const int32_t n = 1 + static_cast<int32_t>(rng() % 60);
      const int32_t end = std::min(prefill().qo_len, begin + n);
      ATTNFOLD_ASSERT_HOLDS(same_tokens(whole_call, whole, begin, end, x, 1 + round));
      begin = end;
    }
  }
}

TEST_P(Token, DecodeSteps) {
  const cases::Context x = test::context();
  const Call whole_call = call(x.seed);
  Answer whole;
  ATTNFOLD_ASSERT_HOLDS(cases::run(whole_call, cases::execution(x), whole));
  for (int32_t i = 0; i < prefill().qo_len; i += 3) {
    ATTNFOLD_ASSERT_HOLDS(same_tokens(whole_call, whole, i, i + 1, x, 1 + i % 5));
  }
}

TEST_P(Token, VerifySteps) {
  const cases::Context x = test::context();
  const Call whole_call = call(x.seed);
  Answer whole;
  ATTNFOLD_ASSERT_HOLDS(cases::run(whole_call, cases::execution(x), whole));
  for (int32_t n = 2; n <= 16; ++n) {
    const int32_t begin = prefill().qo_len - n - n % 3;
    ATTNFOLD_ASSERT_HOLDS(same_tokens(whole_call, whole, begin, begin + n, x, 1 + n % 4));
  }
}

INSTANTIATE_TEST_SUITE_P(Prefills, Token,
                         ::testing::Range(0, static_cast<int>(std::size(kPrefills))));

}  // namespace
}  // namespace attnfold::check
