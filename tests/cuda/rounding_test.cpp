// How far o may be from the truth where P is rounded to 16 bits: P1's bound for these rows holds
// whatever the values are, and is wide for long requests of random values.  There the roundings
// are independent, and a far tighter claim can be made.
#include <cmath>
#include <random>
#include <vector>

#include "core/dtype.h"
#include "cuda/device_suite.h"

namespace attnfold::check::device_test {
namespace {

using cases::kCausal;

/** float64 attention of one decode row over request 0's keys. */
struct TrueRow {
  std::vector<double> w;      // [kv_len], of sum 1
  std::vector<double> o;      // [head_dim]
  std::vector<double> noise;  // [head_dim]: sqrt(sum over keys of (w v)^2)
};

TrueRow true_row(const Call& call, int32_t head, int32_t wrong_key) {
  const attnfold_problem& p = call.problem;
  const DType type = static_cast<DType>(p.kv_dtype);
  const int32_t n = call.kv_len[0], dim = p.head_dim_qk, kv_head = head / (p.qo_heads / p.kv_heads);
  std::vector<double> w(static_cast<size_t>(n));
  double largest = -1e300, sum = 0;
  for (int32_t j = 0; j < n; ++j) {
    const int64_t q = call.q_offset + head * call.q_strides.head;
    const int64_t k =
        call.kv_element_offset(0, j, call.k_strides, call.k_offset) + kv_head * call.k_strides.head;
    double s = 0;
    for (int32_t e = 0; e < dim; ++e)
      s += double{load_f32(call.q->data(), type, q + e)} * load_f32(call.k->data(), type, k + e);
    w[static_cast<size_t>(j)] = s / std::sqrt(static_cast<double>(dim));
    largest = std::max(largest, w[static_cast<size_t>(j)]);
  }
  for (double& x : w) sum += x = std::exp(x - largest);
  for (double& x : w) x /= sum;
  TrueRow row{w, std::vector<double>(static_cast<size_t>(dim)),
              std::vector<double>(static_cast<size_t>(dim))};
  for (int32_t j = 0; j < n; ++j) {
    const int32_t from = j == wrong_key ? (j + 1) % n : j;
    const int64_t v = call.kv_element_offset(0, from, call.v_strides, call.v_offset) +
                      kv_head * call.v_strides.head;
    for (int32_t e = 0; e < dim; ++e) {
      const double x = w[static_cast<size_t>(j)] * load_f32(call.v->data(), type, v + e);
      row.o[static_cast<size_t>(e)] += x;
      row.noise[static_cast<size_t>(e)] += x * x;
    }
  }
  for (double& x : row.noise) x = std::sqrt(x);
  return row;
}

/** Largest |o - truth| of a row in standard deviations of the rounding of P.  Rounding to nearest
 * errs by up to 2^-precision of p, evenly: by that over sqrt(3) in the mean square. */
double worst_error(const Call& call, const Answer& answer, int32_t head, const TrueRow& truth) {
  const double unit = call.problem.kv_dtype == ATTNFOLD_BF16 ? 0x1p-9 : 0x1p-12;
  const float* o = reinterpret_cast<const float*>(answer.o.data());
  double worst = 0;
  for (int32_t e = 0; e < call.problem.head_dim_vo; ++e) {
    const double got = o[head * call.problem.head_dim_vo + e];
    const double truth_e = truth.o[static_cast<size_t>(e)];
    // Sums in float32 add their own: some 2^-24 of the sum of magnitudes, which is 1 at most here.
    const double sigma = unit / std::sqrt(3.0) * truth.noise[static_cast<size_t>(e)] + 0x1p-23;
    worst = std::max(worst, std::abs(got - truth_e) / sigma);
  }
  return worst;
}

using Rounding = DeviceTestWith<int>;

TEST_P(Rounding, LongRowsErrByTheNoiseOfRoundedWeights) {
  const uint64_t seed = test::seed() + 9000 + static_cast<uint64_t>(GetParam());
  std::mt19937_64 rng(seed);
  const DType type = GetParam() % 2 ? DType::f16 : DType::bf16;
  Spec spec = cases::make_spec({8, 2, 64, 64}, type, 16, kCausal, {1},
                               {1000 + static_cast<int32_t>(rng() % 6000)});
  spec.problem.o_dtype = ATTNFOLD_F32;
  const Call call = generate(spec, seed);
  Answer answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, on_device(), answer)) << "seed " << seed;
  for (const int32_t head : {0, 5}) {
    EXPECT_LT(worst_error(call, answer, head, true_row(call, head, -1)), 7.0)
        << "seed " << seed << ", head " << head;
  }
  // The claim is tight enough to see one wrong value row of average weight.
  const TrueRow row = true_row(call, 0, -1);
  int32_t key = static_cast<int32_t>(rng() % static_cast<uint64_t>(call.kv_len[0]));
  while (row.w[static_cast<size_t>(key)] * call.kv_len[0] < 1) key = (key + 1) % call.kv_len[0];
  EXPECT_GT(worst_error(call, answer, 0, true_row(call, 0, key)), 7.0)
      << "seed " << seed << ", key " << key;
}

INSTANTIATE_TEST_SUITE_P(Seeds, Rounding, ::testing::Range(0, 12));

}  // namespace
}  // namespace attnfold::check::device_test
