// Step 6: what of the state may be 16 bits wide?  Nothing.
//
// Since step 5: the same pass, with one of m, l and o rounded to binary16 after each key.  Operands
// may be narrow; a running sum or maximum may not.  Each of the three fails in its own way.
#include "ladder.h"

using namespace ladder;

namespace {

enum class Narrow { none, m, l, o };

/** Attention over given logits with values of width 1. */
float one_pass(const std::vector<float>& x, const std::vector<float>& v, Narrow narrow) {
  float m = -std::numeric_limits<float>::infinity(), l = 0, o = 0;
  for (size_t j = 0; j < x.size(); ++j) {
    float m_new = std::max(m, x[j]);
    if (narrow == Narrow::m) m_new = to_half(m_new);
    const float alpha = m == m_new ? 1 : std::exp(m - m_new), p = std::exp(x[j] - m_new);
    l = l * alpha + p;
    o = o * alpha + p * v[j];
    if (narrow == Narrow::l) l = to_half(l);
    if (narrow == Narrow::o) o = to_half(o);
    m = m_new;
  }
  return o / l;
}

double exact_of(const std::vector<float>& x, const std::vector<float>& v) {
  const double m = *std::max_element(x.begin(), x.end());
  double l = 0, o = 0;
  for (size_t j = 0; j < x.size(); ++j) {
    l += std::exp(x[j] - m);
    o += std::exp(x[j] - m) * v[j];
  }
  return o / l;
}

}  // namespace

int main() {
  std::printf("6 half precision in the state\n");
  // All keys alike, 8192 of them, values 1: the answer is 1.
  std::vector<float> x(8192, 0.0f), v(8192, 1.0f);
  claim(std::fabs(one_pass(x, v, Narrow::none) - exact_of(x, v)) < 1e-6, "float32 is right");
  std::printf("  l in binary16: %g where 1 is right\n", one_pass(x, v, Narrow::l));
  claim(one_pass(x, v, Narrow::l) == 4,
        "l stops at 2048, as 2048 + 1 rounds to 2048: four times too large");

  // Values of 16: o reaches 131072 before it is divided.
  v.assign(8192, 16.0f);
  claim(one_pass(x, v, Narrow::none) == 16, "float32 is right at values of 16");
  std::printf("  o in binary16: %g where 16 is right\n", one_pass(x, v, Narrow::o));
  claim(one_pass(x, v, Narrow::o) == 4, "o stops at 32768, where 16 is half a step");
  v.assign(8192, 64.0f);
  claim(std::isinf(one_pass(x, v, Narrow::o)), "and at values of 64 it overflows");

  // Logits of 70000, as of unscaled q.k of trained outliers: the maximum itself is out of range.
  x = {70000, 69999, 3};
  v = {1, 2, 3};
  claim(std::fabs(one_pass(x, v, Narrow::none) - exact_of(x, v)) < 1e-4,
        "float32 is right at 70000");
  claim(std::isnan(one_pass(x, v, Narrow::m)),
        "m in binary16 is infinite, every weight 0, and 0/0 NaN");
  return failures;
}
