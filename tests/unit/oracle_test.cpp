// The oracle against cases worked out by hand, against other wordings of the masks, and against
// what other engines answered.
#include "ref/oracle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "check/call_file.h"
#include "check/generate.h"
#include "check/judge.h"

namespace attnfold {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr float kInfF = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kDim = 8;

/** One request of float32, one head unless said, ragged keys, all values 0, scale 1, no mask. */
check::Spec small_spec(int32_t qo_len, int32_t kv_len) {
  check::Spec spec;
  attnfold_problem& p = spec.problem;
  p.head_dim_qk = p.head_dim_vo = kDim;
  p.q_dtype = p.kv_dtype = p.o_dtype = ATTNFOLD_F32;
  p.kv_storage = ATTNFOLD_KV_RAGGED;
  p.mask = ATTNFOLD_MASK_NONE;
  p.sm_scale = 1.0f;
  spec.qo_len = {qo_len};
  spec.kv_len = {kv_len};
  spec.q_range = spec.k_range = spec.v_range = 0.0f;
  return spec;
}

float& at(check::Buffer& buffer, int64_t element) {
  return reinterpret_cast<float*>(buffer.data())[element];
}
float& q_at(check::Call& call, int32_t row, int32_t head, int32_t d) {
  return at(*call.q, call.q_offset + row * call.q_strides.token + head * call.q_strides.head + d);
}
float& k_at(check::Call& call, int32_t j, int32_t head, int32_t d) {
  return at(*call.k, call.kv_element_offset(0, j, call.k_strides, call.k_offset) +
                         head * call.k_strides.head + d);
}
float& v_at(check::Call& call, int32_t j, int32_t head, int32_t d) {
  return at(*call.v, call.kv_element_offset(0, j, call.v_strides, call.v_offset) +
                         head * call.v_strides.head + d);
}

/** One query that scores each key as given. */
check::Call call_with_scores(const std::vector<float>& scores) {
  check::Call call = generate(small_spec(1, static_cast<int32_t>(scores.size())), 1);
  q_at(call, 0, 0, 0) = 1.0f;
  for (size_t j = 0; j < scores.size(); ++j) k_at(call, static_cast<int32_t>(j), 0, 0) = scores[j];
  return call;
}

// ------------------------------------------------ worked out by hand

TEST(Oracle, OneKeyAnswersItsValueAndItsScore) {
  check::Call call = call_with_scores({2.5f});
  for (int32_t d = 0; d < kDim; ++d) v_at(call, 0, 0, d) = static_cast<float>(d) - 3.0f;
  const ref::Truth truth = ref::answer(call);
  for (int32_t d = 0; d < kDim; ++d) EXPECT_EQ(truth.o[d], d - 3.0);
  EXPECT_EQ(truth.lse[0], 2.5);
  EXPECT_EQ(truth.naive_o_err[0], 0.0);
  EXPECT_EQ(truth.naive_lse_err[0], 0.0);
  EXPECT_EQ(truth.max_abs_v[0], 4.0);
}

TEST(Oracle, EqualScoresAverageTheValues) {
  check::Call call = call_with_scores({-1.0f, -1.0f, -1.0f, -1.0f});
  for (int32_t j = 0; j < 4; ++j) v_at(call, j, 0, 5) = static_cast<float>(j);
  const ref::Truth truth = ref::answer(call);
  EXPECT_DOUBLE_EQ(truth.o[5], 1.5);
  EXPECT_DOUBLE_EQ(truth.lse[0], -1.0 + std::log(4.0));
}

TEST(Oracle, TwoScoresWeighAsTheLogisticFunctionSays) {
  check::Call call = call_with_scores({0.0f, 1.25f});
  v_at(call, 0, 0, 0) = 10.0f;
  v_at(call, 1, 0, 0) = 20.0f;
  const ref::Truth truth = ref::answer(call);
  EXPECT_NEAR(truth.o[0], 10.0 + 10.0 / (1.0 + std::exp(-1.25)), 1e-14);
  EXPECT_NEAR(truth.lse[0], std::log(1.0 + std::exp(1.25)), 1e-14);
}

TEST(Oracle, ScoresFarBeyondTheRangeOfExpStayExact) {
  check::Call call = call_with_scores({30000.0f, 30001.0f});
  v_at(call, 1, 0, 0) = 1.0f;
  const ref::Truth truth = ref::answer(call);
  EXPECT_NEAR(truth.o[0], 1.0 / (1.0 + std::exp(-1.0)), 1e-14);
  EXPECT_NEAR(truth.lse[0], 30001.0 + std::log(1.0 + std::exp(-1.0)), 1e-10);
}

TEST(Oracle, ScaleMultipliesTheScoreAndDefaultsToOneOverRootOfTheHeadDim) {
  check::Call call = call_with_scores({3.0f});
  call.problem.sm_scale = 0.5f;
  EXPECT_EQ(ref::answer(call).lse[0], 1.5);
  call.problem.sm_scale = ATTNFOLD_SM_SCALE_DEFAULT;
  EXPECT_NEAR(ref::answer(call).lse[0], 3.0 / std::sqrt(8.0), 1e-7);
  call.problem.sm_scale = 0.0f;
  EXPECT_EQ(ref::answer(call).lse[0], 0.0);
}

TEST(Oracle, QueryHeadsShareKvHeadsInGroups) {
  check::Spec spec = small_spec(1, 1);
  spec.problem.qo_heads = 6;
  spec.problem.kv_heads = 2;
  check::Call call = generate(spec, 1);
  v_at(call, 0, 0, 0) = 100.0f;
  v_at(call, 0, 1, 0) = 200.0f;
  const ref::Truth truth = ref::answer(call);
  for (int32_t head = 0; head < 6; ++head) {
    EXPECT_EQ(truth.o[head * kDim], head < 3 ? 100.0 : 200.0) << "head " << head;
  }
}

TEST(Oracle, NaiveErrorIsThatOfFloat32SumsInOrder) {
  check::Call call = generate(small_spec(1, 1), 1);
  const float terms[] = {1e8f, 1.0f, -1e8f};  // float32 in this order: 0; the truth: 1
  for (int32_t d = 0; d < 3; ++d) {
    q_at(call, 0, 0, d) = terms[d];
    k_at(call, 0, 0, d) = 1.0f;
  }
  const ref::Truth truth = ref::answer(call);
  EXPECT_EQ(truth.lse[0], 1.0);
  EXPECT_EQ(truth.naive_lse_err[0], 1.0);
}

TEST(Oracle, NaiveErrorIsInfiniteWhereFloat32LeavesItsRange) {
  check::Call call = generate(small_spec(1, 2), 1);
  for (int32_t d = 0; d < 2; ++d) {
    q_at(call, 0, 0, d) = d == 0 ? 1e30f : -1e30f;
    k_at(call, 0, 0, d) = 1e30f;
  }
  const ref::Truth truth = ref::answer(call);
  EXPECT_TRUE(std::isfinite(truth.lse[0]));
  EXPECT_EQ(truth.naive_lse_err[0], kInf);
}

// ------------------------------------------------ edges

TEST(Oracle, RowThatSeesNoKeyIsZeroAndMinusInfinity) {
  check::Spec spec = small_spec(5, 2);
  spec.problem.mask = ATTNFOLD_MASK_CAUSAL;
  check::Call call = generate(spec, 1);
  for (int32_t d = 0; d < kDim; ++d) {
    for (int32_t row = 0; row < 5; ++row) q_at(call, row, 0, d) = kNan;
  }
  const ref::Truth truth = ref::answer(call);
  for (int32_t row = 0; row < 5; ++row) {
    const bool sees_none = row < 3;
    EXPECT_EQ(truth.lse[row] == -kInf, sees_none) << "row " << row;
    EXPECT_EQ(truth.o[row * kDim] == 0.0, sees_none) << "row " << row;
    EXPECT_EQ(std::isnan(truth.o[row * kDim]), !sees_none) << "NaN in q reaches row " << row;
  }
}

TEST(Oracle, NanInAVisibleKeyReachesTheRowsThatSeeItAndNoOther) {
  check::Spec spec = small_spec(3, 3);
  spec.problem.mask = ATTNFOLD_MASK_CAUSAL;
  check::Call call = generate(spec, 1);
  k_at(call, 1, 0, 0) = kNan;
  q_at(call, 0, 0, 0) = q_at(call, 1, 0, 0) = q_at(call, 2, 0, 0) = 1.0f;
  const ref::Truth truth = ref::answer(call);
  EXPECT_EQ(truth.lse[0], 0.0);
  for (int32_t row : {1, 2}) {
    EXPECT_TRUE(std::isnan(truth.lse[row]));
    EXPECT_TRUE(std::isnan(truth.o[row * kDim + 7]));
  }
}

TEST(Oracle, NanInAValueReachesItsElementOnly) {
  check::Call call = call_with_scores({0.0f, 1.0f});
  v_at(call, 0, 0, 3) = kNan;
  const ref::Truth truth = ref::answer(call);
  for (int32_t d = 0; d < kDim; ++d) EXPECT_EQ(std::isnan(truth.o[d]), d == 3) << d;
  EXPECT_FALSE(std::isnan(truth.lse[0]));
}

TEST(Oracle, RowWhoseScoresAreAllMinusInfinityIsEmpty) {
  check::Call call = call_with_scores({-kInfF, -kInfF});
  v_at(call, 0, 0, 0) = 7.0f;
  v_at(call, 0, 0, 1) = kInfF;
  v_at(call, 1, 0, 2) = kNan;
  const ref::Truth truth = ref::answer(call);
  EXPECT_EQ(truth.lse[0], -kInf);
  EXPECT_EQ(truth.o[0], 0.0);
  EXPECT_TRUE(std::isnan(truth.o[1])) << "0 * Inf";
  EXPECT_TRUE(std::isnan(truth.o[2])) << "0 * NaN";
  EXPECT_EQ(truth.max_abs_v[0], 7.0) << "of the finite values";
}

TEST(Oracle, MinusInfinityBesideAFiniteScoreWeighsNothing) {
  check::Call call = call_with_scores({-kInfF, 2.0f});
  v_at(call, 0, 0, 0) = 1e30f;
  v_at(call, 1, 0, 0) = 5.0f;
  v_at(call, 0, 0, 1) = kInfF;
  const ref::Truth truth = ref::answer(call);
  EXPECT_EQ(truth.o[0], 5.0);
  EXPECT_TRUE(std::isnan(truth.o[1]));
  EXPECT_EQ(truth.lse[0], 2.0);
}

TEST(Oracle, PlusInfinityScoreIsNan) {
  check::Call call = call_with_scores({kInfF, 2.0f});
  const ref::Truth truth = ref::answer(call);
  EXPECT_TRUE(std::isnan(truth.lse[0]));
  EXPECT_TRUE(std::isnan(truth.o[0]));
}

TEST(Oracle, InfiniteValueOfWeightIsInfinite) {
  check::Call call = call_with_scores({0.0f, 0.0f});
  v_at(call, 0, 0, 0) = -kInfF;
  EXPECT_EQ(ref::answer(call).o[0], -kInf);
}

TEST(Oracle, WeightTooSmallForFloat32CountsAsNone) {
  check::Call call = call_with_scores({0.0f, 200.0f});
  v_at(call, 0, 0, 0) = kInfF;
  EXPECT_TRUE(std::isnan(ref::answer(call).o[0])) << "0 * Inf, though exp(-200) is a double";
}

// ------------------------------------------------ masks

/** The masks in other words: by distance from the end, where the last token and the last key meet.
 */
bool visible_from_the_end(const attnfold_problem& p, int32_t qo_len, int32_t kv_len, int32_t i,
                          int32_t j) {
  const int32_t query_from_end = qo_len - 1 - i;
  const int32_t key_from_end = kv_len - 1 - j;
  const int32_t keys_back = key_from_end - query_from_end;  // 0 is the token's own key
  const int32_t lowest = p.mask == ATTNFOLD_MASK_CAUSAL ? 0
                         : p.window_right >= 0          ? -p.window_right
                                                        : -kv_len - qo_len;
  const int32_t highest = p.window_left >= 0 ? p.window_left : kv_len + qo_len;
  return keys_back >= lowest && keys_back <= highest;
}

TEST(Oracle, MasksAgreeWithTheirWordingFromTheEnd) {
  attnfold_problem p = ATTNFOLD_PROBLEM_INIT;
  for (auto mask : {ATTNFOLD_MASK_NONE, ATTNFOLD_MASK_CAUSAL}) {
    p.mask = mask;
    for (p.window_left = -1; p.window_left < 4; ++p.window_left) {
      for (p.window_right = -1; p.window_right < 4; ++p.window_right) {
        for (int32_t qo_len = 1; qo_len <= 6; ++qo_len) {
          for (int32_t kv_len = 0; kv_len <= 8; ++kv_len) {
            for (int32_t i = 0; i < qo_len; ++i) {
              for (int32_t j = 0; j < kv_len; ++j) {
                ASSERT_EQ(ref::visible(p, qo_len, kv_len, i, j),
                          visible_from_the_end(p, qo_len, kv_len, i, j))
                    << "mask " << mask << " left " << p.window_left << " right " << p.window_right
                    << " qo_len " << qo_len << " kv_len " << kv_len << " i " << i << " j " << j;
              }
              EXPECT_FALSE(ref::visible(p, qo_len, kv_len, i, -1));
              EXPECT_FALSE(ref::visible(p, qo_len, kv_len, i, kv_len));
            }
          }
        }
      }
    }
  }
}

void expect_seen_is_the_union(const attnfold_problem& p) {
  for (int32_t qo_len = 0; qo_len <= 6; ++qo_len) {
    for (int32_t kv_len = 0; kv_len <= 8; ++kv_len) {
      const check::KeyRange range = check::seen_keys(p, qo_len, kv_len);
      for (int32_t j = 0; j < kv_len; ++j) {
        bool seen = false;
        for (int32_t i = 0; i < qo_len; ++i) seen |= ref::visible(p, qo_len, kv_len, i, j);
        ASSERT_EQ(seen, range.meets(j, j + 1))
            << "mask " << p.mask << " left " << p.window_left << " right " << p.window_right
            << " chunk " << p.attention_chunk << " sink " << p.sink_tokens << " qo_len " << qo_len
            << " kv_len " << kv_len << " j " << j;
      }
    }
  }
}

TEST(Oracle, SeenKeysAreTheUnionOverRows) {
  attnfold_problem p = ATTNFOLD_PROBLEM_INIT;
  for (auto mask : {ATTNFOLD_MASK_NONE, ATTNFOLD_MASK_CAUSAL}) {
    p.mask = mask;
    for (p.window_left = -1; p.window_left < 4; ++p.window_left) {
      for (p.window_right = -1; p.window_right < 4; ++p.window_right) {
        for (p.attention_chunk = 0; p.attention_chunk < 4; ++p.attention_chunk) {
          for (p.sink_tokens = 0; p.sink_tokens < 4; ++p.sink_tokens) expect_seen_is_the_union(p);
        }
      }
    }
  }
}

TEST(Oracle, MasksAtTheLargestLengthsDoNotOverflow) {
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  attnfold_problem p = ATTNFOLD_PROBLEM_INIT;
  p.window_left = p.window_right = kMax;
  EXPECT_TRUE(ref::visible(p, 1, kMax, 0, kMax - 1));
  EXPECT_TRUE(ref::visible(p, 1, kMax, 0, 0));
  EXPECT_FALSE(ref::visible(p, kMax, 1, 0, 0));
  EXPECT_EQ(check::seen_keys(p, kMax, kMax).begin, 0);
}

TEST(Oracle, WindowedDecodeAveragesTheWindow) {
  check::Spec spec = small_spec(1, 10);
  spec.problem.mask = ATTNFOLD_MASK_CAUSAL;
  spec.problem.window_left = 2;  // keys 7, 8, 9
  check::Call call = generate(spec, 1);
  for (int32_t j = 0; j < 10; ++j) v_at(call, j, 0, 0) = static_cast<float>(j * j);
  const ref::Truth truth = ref::answer(call);
  EXPECT_DOUBLE_EQ(truth.o[0], (49.0 + 64.0 + 81.0) / 3.0);
  EXPECT_DOUBLE_EQ(truth.lse[0], std::log(3.0));
}

// ------------------------------------------------ storage

TEST(Oracle, StorageLayoutAndPagesDoNotChangeTheAnswer) {
  check::Spec spec;
  spec.problem.qo_heads = 4;
  spec.problem.kv_heads = 2;
  spec.problem.head_dim_qk = 16;
  spec.problem.head_dim_vo = 24;
  spec.problem.window_left = 20;
  spec.qo_len = {1, 0, 7, 3};
  spec.kv_len = {70, 9, 40, 2};
  for (uint64_t seed : {1, 2}) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const ref::Truth expected = ref::answer(generate(spec, seed));
    for (double x : expected.o) ASSERT_TRUE(std::isfinite(x)) << "poison was read";
    for (int32_t page_size : {1, 5, 64}) {
      for (auto layout : {ATTNFOLD_NHD, ATTNFOLD_HND}) {
        for (bool odd : {false, true}) {
          check::Spec other = spec;
          other.problem.page_size = page_size;
          other.problem.kv_layout = layout;
          other.odd_strides = odd;
          other.csr = odd;
          EXPECT_EQ(ref::answer(generate(other, seed)).o, expected.o);
          other.problem.kv_storage = ATTNFOLD_KV_RAGGED;
          EXPECT_EQ(ref::answer(generate(other, seed)).lse, expected.lse);
        }
      }
    }
  }
}

TEST(Oracle, AskedRowsAreAnsweredAsAmongAllAndOthersLeftZero) {
  check::Spec spec;
  spec.problem.qo_heads = 2;
  spec.problem.head_dim_qk = spec.problem.head_dim_vo = 16;
  spec.qo_len = {4, 3};
  spec.kv_len = {30, 3};
  const check::Call call = generate(spec, 3);
  const ref::Truth all = ref::answer(call);
  const ref::Truth some = ref::answer_rows(call, {5, 2, 5});
  for (int32_t row = 0; row < call.num_rows(); ++row) {
    const bool asked = row == 5 || row == 2;
    for (int32_t head = 0; head < 2; ++head) {
      const int32_t index = row * 2 + head;
      EXPECT_EQ(some.lse[index], asked ? all.lse[index] : 0.0);
      // The yardstick is the largest error among the asked rows of the request.
      EXPECT_LE(some.naive_o_err[index], asked ? all.naive_o_err[index] : 0.0);
      EXPECT_EQ(some.naive_o_err[index] > 0, asked);
      EXPECT_EQ(some.max_abs_v[index], asked ? all.max_abs_v[index] : 0.0);
      for (int32_t d = 0; d < 16; ++d) {
        EXPECT_EQ(some.o[index * 16 + d], asked ? all.o[index * 16 + d] : 0.0);
      }
    }
  }
}

// ------------------------------------------------ what engines answered

class RecordedCall : public testing::TestWithParam<const char*> {};

TEST_P(RecordedCall, AgreesWithTheOracleWithinOneRounding) {
  const auto loaded =
      check::load_call(std::string(ATTNFOLD_TEST_DATA_DIR "/") + GetParam() + ".safetensors");
  ASSERT_TRUE(loaded.ok) << loaded.error;
  const check::Call& call = loaded.call;
  ASSERT_NE(call.recorded_o, nullptr);
  const ref::Truth truth = ref::answer(call);
  const float* lse = call.recorded_lse.empty() ? nullptr : call.recorded_lse.data();
  const check::Judgement judgement =
      check::judge(call, truth, call.recorded_o->data(), call.recorded_o_dtype, lse, 1);
  EXPECT_TRUE(judgement.right) << judgement.text;
  EXPECT_GT(judgement.max_o_err, 0.0) << "a 16-bit output cannot be exact";
}

INSTANTIATE_TEST_SUITE_P(Files, RecordedCall,
                         testing::Values("prefill_layer00", "decode_ragged_layer15",
                                         "verify_layer20", "mixed_layer29", "shared_prefix_layer10",
                                         "vllm_mixed_layer17", "mixed_head_major_f16_layer12"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Oracle, NaiveFloat32IsCloseButNotExactOnARealCall) {
  const auto loaded = check::load_call(ATTNFOLD_TEST_DATA_DIR "/decode_ragged_layer15.safetensors");
  ASSERT_TRUE(loaded.ok) << loaded.error;
  const ref::Truth truth = ref::answer(loaded.call);
  const double worst = *std::max_element(truth.naive_o_err.begin(), truth.naive_o_err.end());
  EXPECT_GT(worst, 0.0);
  EXPECT_LT(worst, 1e-4);
}

}  // namespace
}  // namespace attnfold
