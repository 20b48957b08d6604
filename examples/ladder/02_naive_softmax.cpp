// Step 2: why nobody computes exp(x) / sum(exp(x)) as it stands.
//
// Since step 1: no matrix, only one row of softmax, without the maximum subtracted.  In binary16
// exp(x) is infinite from x = 11.09375 on, the sum too, and infinity over infinity is NaN.  float32
// holds out to 88.7.
#include "ladder.h"

using namespace ladder;

namespace {

/** Softmax of x, every value rounded to binary16. */
std::vector<float> naive_half(const std::vector<float>& x) {
  std::vector<float> y;
  float sum = 0;
  for (const float value : x) {
    y.push_back(to_half(std::exp(to_half(value))));
    sum = to_half(sum + y.back());
  }
  for (float& value : y) value = to_half(value / sum);
  return y;
}

std::vector<float> naive_float(const std::vector<float>& x) {
  std::vector<float> y;
  float sum = 0;
  for (const float value : x) sum += y.emplace_back(std::exp(value));
  for (float& value : y) value /= sum;
  return y;
}

/** What the first of `logits` should be, in float64. */
double exact_first(const std::vector<float>& x) {
  double sum = 0;
  for (const float value : x) sum += std::exp(double{value} - x[0]);
  return 1 / sum;
}

/** The largest binary16 number whose exponential is finite in binary16. */
float last_finite_half() {
  float x = 8;
  while (std::isfinite(to_half(std::exp(x + 0x1p-7f))))
    x += 0x1p-7f;  // numbers of [8, 16) are 2^-7 apart
  return x;
}

}  // namespace

int main() {
  std::printf("2 naive softmax: exp before anything is subtracted\n");
  const std::vector<float> small = {2, 1, 0, -1}, large = {12, 1, 0, -1}, larger = {100, 1, 0, -1};
  claim(std::fabs(naive_half(small)[0] - exact_first(small)) < 1e-3, "logits of 2 come out right");
  std::printf("  the last finite exp in binary16 is exp(%.5f), ln(65504) = %.5f\n",
              last_finite_half(), std::log(65504.0));
  claim(last_finite_half() + 0x1p-7f == 11.09375f, "exp(11.09375) is infinite in binary16");
  claim(std::isnan(naive_half(large)[0]), "a logit of 12 gives NaN");
  claim(naive_half(large)[1] == 0, "and 0 to its neighbours");
  claim(std::fabs(naive_float(large)[0] - exact_first(large)) < 1e-6, "float32 is right at 12");
  claim(std::isnan(naive_float(larger)[0]), "and NaN at 100");
  return failures;
}
