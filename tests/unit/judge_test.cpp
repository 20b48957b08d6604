// The judge: what it lets pass and what it does not.  A judge that never condemns proves nothing.
#include "check/judge.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "check/generate.h"

namespace attnfold::check {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kDim = 8;

/** Requests of 2 and 1 new tokens, 2 heads, output of 8 elements a row; what is judged is made up.
 */
Call small_call(attnfold_dtype o_dtype) {
  Spec spec;
  spec.problem.qo_heads = 2;
  spec.problem.head_dim_qk = spec.problem.head_dim_vo = kDim;
  spec.problem.q_dtype = spec.problem.kv_dtype = ATTNFOLD_F16;
  spec.problem.o_dtype = o_dtype;
  spec.qo_len = {2, 1};
  spec.kv_len = {3, 3};
  return generate(spec, 1);
}

/** An answer equal to the truth, to be spoiled. */
struct Trial {
  explicit Trial(DType dtype = DType::f32)
      : type(dtype), call(small_call(static_cast<attnfold_dtype>(dtype))) {
    const size_t rows = 6;
    truth.o.assign(rows * kDim, 0.75);
    truth.lse.assign(rows, 2.0);
    truth.naive_o_err.assign(rows, 0.0);
    truth.naive_lse_err.assign(rows, 0.0);
    truth.max_abs_v.assign(rows, 1.0);
    o = Buffer(rows * kDim * dtype_bytes(type));
    copy_truth();
  }
  void copy_truth() {
    for (size_t i = 0; i < truth.o.size(); ++i) set(i, static_cast<float>(truth.o[i]));
    lse.assign(truth.lse.begin(), truth.lse.end());
  }
  void set(size_t i, float x) { store_f32(o.data(), type, static_cast<int64_t>(i), x); }
  Judgement run(int roundings = 0) const {
    return judge(call, truth, o.data(), type, lse.data(), roundings);
  }

  DType type;
  Call call;
  ref::Truth truth;
  Buffer o;
  std::vector<float> lse;
};

TEST(Judge, TheTruthIsRight) {
  const Judgement judgement = Trial().run();
  EXPECT_TRUE(judgement.right) << judgement.text;
  EXPECT_EQ(judgement.worst_o, 0.0);
  EXPECT_NE(judgement.text.find("6 rows"), std::string::npos) << judgement.text;
}

TEST(Judge, TheFloorIsTwoToTheMinus20OfTheLargestValue) {
  Trial trial;
  trial.set(3, 0.75f + 0x1.fp-21f);
  EXPECT_TRUE(trial.run().right);
  trial.set(3, 0.75f + 0x1.1p-20f);
  EXPECT_FALSE(trial.run().right);
  trial.truth.max_abs_v[0] = 2.0;
  EXPECT_TRUE(trial.run().right);
}

TEST(Judge, TwiceTheNaiveErrorIsAllowed) {
  Trial trial;
  trial.truth.naive_o_err[0] = 0x1p-10;
  trial.set(0, 0.75f + 0x1.ffp-10f);
  EXPECT_TRUE(trial.run().right);
  trial.set(0, 0.75f + 0x1.02p-9f);
  EXPECT_FALSE(trial.run().right);
  trial.copy_truth();
  trial.set(kDim, 0.75f + 0x1p-10f);
  EXPECT_FALSE(trial.run().right) << "the naive error of another row";
}

TEST(Judge, TheBoundOfLseGrowsWithItsSize) {
  Trial trial;
  trial.lse[2] = 2.0f + 0x1.fp-20f;
  EXPECT_TRUE(trial.run().right);
  trial.lse[2] = 2.0f + 0x1.2p-19f;
  EXPECT_FALSE(trial.run().right);
  trial.truth.lse[2] = 0.0;
  trial.lse[2] = 0x1.fp-21f;
  EXPECT_TRUE(trial.run().right) << "at least 1";
  trial.lse[2] = 0x1.1p-20f;
  EXPECT_FALSE(trial.run().right);
}

TEST(Judge, TheFirstWrongRowIsNamed) {
  Trial trial;
  trial.set(5 * kDim + 6, 1.0f);  // row 5 is request 1, token 0 (row 2), head 1
  const Judgement judgement = trial.run();
  EXPECT_FALSE(judgement.right);
  for (const char* part :
       {"request 1", "token 0", "row 2", "head 1", "element 6", "0.75", "got 1"}) {
    EXPECT_NE(judgement.text.find(part), std::string::npos) << part << " in " << judgement.text;
  }
  EXPECT_NEAR(judgement.max_o_err, 0.25, 1e-12);
  EXPECT_GT(judgement.worst_o, 1.0);
  trial.copy_truth();
  trial.lse[1] = 3.0f;
  EXPECT_EQ(trial.run().text.rfind("lse of request 0, token 0 (row 0), head 1", 0), 0u)
      << trial.run().text;
}

TEST(Judge, EmptyRowsAreZeroExactly) {
  Trial trial;
  for (int32_t d = 0; d < kDim; ++d) trial.truth.o[d] = 0;
  trial.truth.lse[0] = -kInf;
  trial.copy_truth();
  EXPECT_TRUE(trial.run().right);
  trial.set(0, 0x1p-140f);
  EXPECT_FALSE(trial.run(1).right) << "not even a rounding";
  trial.copy_truth();
  trial.lse[0] = -1e30f;
  EXPECT_FALSE(trial.run().right);
}

TEST(Judge, NanAndInfinityMustStandWhereTheOracleHasThem) {
  const float inf = static_cast<float>(kInf);
  Trial trial;
  trial.truth.o[0] = std::nan("");
  trial.truth.o[1] = -kInf;
  trial.copy_truth();
  EXPECT_TRUE(trial.run().right);
  const struct {
    size_t element;
    float value;
  } faults[] = {{0, 1.0f}, {0, inf}, {1, inf}, {1, kNan}, {1, -3e38f}, {2, kNan}, {2, inf}};
  for (const auto& fault : faults) {
    trial.copy_truth();
    trial.set(fault.element, fault.value);
    EXPECT_FALSE(trial.run().right) << fault.element << " " << fault.value;
    EXPECT_EQ(trial.run().worst_o, kInf);
  }
  trial.copy_truth();
  trial.lse[3] = kNan;
  EXPECT_FALSE(trial.run().right);
  trial.truth.lse[3] = std::nan("");
  EXPECT_TRUE(trial.run().right);
}

TEST(Judge, ARoundingIsHalfAUnitOfTheStoredType) {
  const struct {
    DType type;
    float unit;  // in the last place of 0.75
  } types[] = {{DType::f16, 0x1p-11f}, {DType::bf16, 0x1p-8f}};
  for (const auto& [type, unit] : types) {
    Trial trial(type);
    trial.truth.o[4] = 0.75 + 0.499 * unit;
    EXPECT_TRUE(trial.run(1).right) << dtype_name(type);
    EXPECT_FALSE(trial.run(0).right) << dtype_name(type);
    trial.truth.o[4] = 0.75 + 0.51 * unit;
    EXPECT_FALSE(trial.run(1).right) << dtype_name(type);
    EXPECT_TRUE(trial.run(2).right) << dtype_name(type);
  }
}

TEST(Judge, RoundingBelowTheNormalRangeIsOfTheSmallestUnit) {
  Trial trial(DType::f16);
  for (double& v : trial.truth.max_abs_v) v = 0.0;
  trial.truth.o[0] = 0x1.8p-24;
  trial.set(0, 0x1p-24f);
  EXPECT_TRUE(trial.run(1).right);
  trial.truth.o[0] = 0x1.9p-24;
  EXPECT_FALSE(trial.run(1).right);
}

TEST(Judge, AValueBeyondTheStoredTypeMayBecomeInfinite) {
  const float inf = static_cast<float>(kInf);
  Trial trial(DType::f16);
  trial.truth.o[0] = 65530.0;
  trial.set(0, inf);
  EXPECT_TRUE(trial.run(1).right);
  trial.set(0, -inf);
  EXPECT_FALSE(trial.run(1).right);
  trial.truth.o[0] = 65000.0;
  trial.set(0, inf);
  EXPECT_FALSE(trial.run(1).right);
}

TEST(Judge, WhereNaiveFloat32LeavesItsRangeNothingIsAsked) {
  Trial trial;
  trial.truth.naive_o_err[0] = trial.truth.naive_lse_err[0] = kInf;
  trial.set(0, kNan);
  trial.lse[0] = kNan;
  EXPECT_TRUE(trial.run().right);
  trial.set(kDim, kNan);
  EXPECT_FALSE(trial.run().right) << "of that row only";
}

TEST(Judge, LseNeedNotBeGiven) {
  const Trial trial;
  const Judgement judgement =
      judge(trial.call, trial.truth, trial.o.data(), trial.type, nullptr, 0);
  EXPECT_TRUE(judgement.right);
  EXPECT_EQ(judgement.text.find("lse"), std::string::npos) << judgement.text;
}

// ------------------------------------------------ weights of 16 bits

/** One token on 1000 keys of nearly equal weight, o in float32. */
Call flat_call(uint64_t seed) {
  Spec spec;
  spec.problem.qo_heads = 1;
  spec.problem.head_dim_qk = spec.problem.head_dim_vo = 64;
  spec.problem.q_dtype = spec.problem.kv_dtype = ATTNFOLD_BF16;
  spec.problem.o_dtype = ATTNFOLD_F32;
  spec.qo_len = {1};
  spec.kv_len = {1000};
  spec.q_range = 0.5f;
  return generate(spec, seed);
}

/** What an engine answers that rounds weights to bf16, leaf by leaf, and reads the value of key
 * `read_for(j)` where it should read that of j. */
template <class Read>
std::vector<float> rounded_answer(const Call& call, Read read_for) {
  const int64_t dim = call.problem.head_dim_vo;
  const double scale = static_cast<float>(1 / std::sqrt(static_cast<double>(dim)));
  std::vector<double> score(call.kv_len[0]), o(dim, 0);
  const auto at = [&](const Buffer& buffer, int64_t row, int64_t d) {
    return static_cast<double>(load_f32(buffer.data(), DType::bf16, row + d));
  };
  for (int32_t j = 0; j < call.kv_len[0]; ++j) {
    const int64_t row = call.kv_element_offset(0, j, call.k_strides, call.k_offset);
    for (int64_t d = 0; d < dim; ++d)
      score[j] += scale * at(*call.q, call.q_offset, d) * at(*call.k, row, d);
  }
  double mass = 0;
  for (int32_t first = 0; first < call.kv_len[0]; first += 128) {
    const int32_t end = std::min(first + 128, call.kv_len[0]);
    const double largest = *std::max_element(score.begin() + first, score.begin() + end);
    for (int32_t j = first; j < end; ++j) {
      const double p = std::exp(score[j] - largest), share = std::exp(largest);
      mass += share * p;
      uint16_t stored;
      store_f32(&stored, DType::bf16, 0, static_cast<float>(p));
      const int64_t row = call.kv_element_offset(0, read_for(j), call.v_strides, call.v_offset);
      for (int64_t d = 0; d < dim; ++d)
        o[d] += share * load_f32(&stored, DType::bf16, 0) * at(*call.v, row, d);
    }
  }
  std::vector<float> answer;
  for (double x : o) answer.push_back(static_cast<float>(x / mass));
  return answer;
}

TEST(Judge, AWrongValueDoesNotHideAmongRoundedWeights) {
  Bound bound, loose;
  bound.weights = Weights::kRounded;
  loose.weights = Weights::kRoundedSomehow;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const Call call = flat_call(seed);
    const ref::Truth truth = ref::answer(call);
    const auto judged = [&](const std::vector<float>& o, const Bound& b) {
      return judge(call, truth, o.data(), DType::f32, nullptr, 0, b);
    };
    const std::vector<float> right = rounded_answer(call, [](int32_t j) { return j; });
    EXPECT_TRUE(judged(right, bound).right) << judged(right, bound).text;
    EXPECT_TRUE(judged(right, loose).right);
    EXPECT_FALSE(judged(right, {}).right) << "weights of float32 are closer";
    const int32_t wrong = static_cast<int32_t>(seed * 47);
    const auto one_off = rounded_answer(call, [&](int32_t j) { return j == wrong ? j + 1 : j; });
    EXPECT_FALSE(judged(one_off, bound).right) << "key " << wrong << " has the next one's value";
  }
}

TEST(Judge, WeightsOfOneAreNotRounded) {
  // Scores that are equal: every weight is 1, and rounding moves nothing.
  Call call = flat_call(1);
  std::memset(call.q->data(), 0, call.q->size());
  const ref::Truth truth = ref::answer(call);
  for (size_t d = 0; d < truth.o.size(); ++d)
    EXPECT_LT(truth.rounding_o[d], 2e-6 * (1 + std::fabs(truth.o[d])));
}

// ------------------------------------------------ bits

Answer answer_of(const Trial& trial) {
  Answer answer;
  answer.o = Buffer(trial.o.size());
  std::copy(trial.o.data(), trial.o.data() + trial.o.size(), answer.o.data());
  answer.lse = trial.lse;
  return answer;
}

TEST(FirstDifference, EqualBytesDoNotDiffer) {
  Trial trial(DType::bf16);
  trial.set(7, kNan);
  EXPECT_EQ(first_difference(trial.call, answer_of(trial), answer_of(trial)), "");
}

TEST(FirstDifference, ASingleBitIsFoundAndNamed) {
  const Trial trial(DType::bf16);
  const Answer a = answer_of(trial);
  for (size_t byte = 0; byte < a.o.size(); ++byte) {
    Answer b = answer_of(trial);
    b.o.data()[byte] ^= std::byte{1};
    EXPECT_NE(first_difference(trial.call, a, b), "") << byte;
  }
  Answer b = answer_of(trial);
  b.lse[4] = std::nextafter(b.lse[4], 9.0f);
  const std::string text = first_difference(trial.call, a, b);
  for (const char* part : {"lse of request 1", "head 0", "0x40000000", "0x40000001"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
}

TEST(FirstDifference, ZerosOfEitherSignDiffer) {
  Trial trial;
  trial.set(9, 0.0f);
  const Answer a = answer_of(trial);
  trial.set(9, -0.0f);
  EXPECT_NE(first_difference(trial.call, a, answer_of(trial)), "");
}

TEST(FirstDifference, AnswersOfAnotherSizeDiffer) {
  const Trial trial;
  EXPECT_NE(first_difference(trial.call, answer_of(trial), Answer{}), "");
}

// ------------------------------------------------ with the engine

Spec long_spec() {
  Spec spec;
  spec.problem.head_dim_qk = spec.problem.head_dim_vo = 16;
  spec.qo_len = {1, 3};
  spec.kv_len = {9000, 700};
  return spec;
}

TEST(DistinctSchedules, AreDistinctAndBeginWithTheDefault) {
  const Call call = generate(long_spec(), 1);
  const auto executions = distinct_schedules(call, 20, 1, nullptr);
  EXPECT_EQ(executions.size(), 20u);
  EXPECT_EQ(executions[0].num_workers, 0);
  EXPECT_EQ(executions[0].cut_seed, 0u);
  std::set<uint64_t> ids;
  for (const attnfold_execution& execution : executions) {
    const RunResult result = run_engine(call, execution);
    ASSERT_EQ(result.status, ATTNFOLD_OK) << result.error;
    EXPECT_TRUE(ids.insert(result.answer.report.schedule_id).second);
  }
}

TEST(DistinctSchedules, AreAllThatExistWhereFewDo) {
  Spec spec = long_spec();
  spec.qo_len = {1};
  spec.kv_len = {5};  // one leaf
  const auto executions = distinct_schedules(generate(spec, 1), 20, 1, nullptr);
  EXPECT_GE(executions.size(), 1u);
  EXPECT_LT(executions.size(), 20u);
}

TEST(DistinctSchedules, OfACallThatCannotBePlannedAreTheDefaultAlone) {
  Call call = generate(long_spec(), 1);
  call.problem.head_dim_qk = -8;
  EXPECT_EQ(distinct_schedules(call, 20, 1, nullptr).size(), 1u);
}

TEST(RunEngine, AnswersWithinTheBound) {
  const Call call = generate(long_spec(), 1);
  const attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
  const RunResult result = run_engine(call, execution);
  ASSERT_EQ(result.status, ATTNFOLD_OK) << result.error;
  EXPECT_FALSE(result.answer.kernel.empty());
  EXPECT_FALSE(result.answer.numerics_id.empty());
  const Judgement judgement =
      judge(call, ref::answer(call), result.answer.o.data(), DType::bf16, result.answer.lse.data(),
            1, bound_of(result.answer.numerics_id));
  EXPECT_TRUE(judgement.right) << judgement.text;
}

TEST(RunEngine, AnswersABatchOfNoRequest) {
  const RunResult result = run_engine(generate(Spec{}, 1), ATTNFOLD_EXECUTION_INIT);
  EXPECT_EQ(result.status, ATTNFOLD_OK) << result.error;
  EXPECT_TRUE(result.answer.lse.empty());
}

TEST(RunEngine, PassesTheEnginesErrorOn) {
  Call call = generate(long_spec(), 1);
  call.kv_len[1] = -3;
  const RunResult result = run_engine(call, ATTNFOLD_EXECUTION_INIT);
  EXPECT_EQ(result.status, ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_NE(result.error.find("kv_len[1]"), std::string::npos) << result.error;
}

}  // namespace
}  // namespace attnfold::check
