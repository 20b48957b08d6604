// Step 3: softmax that cannot overflow, at the price of three passes over a row.
//
// Since step 2: the row's maximum is subtracted first, which changes nothing but the size of the
// numbers. Pass 2 needs the result of pass 1, and pass 3 that of pass 2; so the row has to be kept,
// or read again.
#include "ladder.h"

using namespace ladder;

namespace {

/** Attention with one row of scores held at a time. */
std::vector<float> three_pass(const Inputs& in, Traffic& t) {
  std::vector<float> o(static_cast<size_t>(in.rows) * in.width, 0.0f), x(in.keys);
  for (int r = 0; r < in.rows; ++r) {
    for (int j = 0; j < in.keys; ++j) x[j] = score(in, r, j);

    float m = -std::numeric_limits<float>::infinity();
    for (const float value : x) m = std::max(m, value);  // pass 1
    float l = 0;
    for (const float value : x) l += std::exp(value - m);  // pass 2
    for (int j = 0; j < in.keys; ++j) {                    // pass 3
      const float p = std::exp(x[j] - m) / l;
      for (int i = 0; i < in.width; ++i) o[r * in.width + i] += p * in.v[j * in.width + i];
    }
    t.read +=
        in.width + int64_t{in.keys} * in.width * 2 + int64_t{3} * in.keys;  // q, k, v, the row
    t.written += in.keys + in.width;
  }
  t.held = in.keys;
  return o;
}

}  // namespace

int main() {
  std::printf("3 safe softmax: the maximum first, three passes over a row\n");
  Inputs in = draw(64, 2048, 64);
  Traffic t;
  claim(error(three_pass(in, t), exact(in)) < 1e-5, "equals float64 to 1e-5");
  show(t);
  claim(t.held == in.keys, "holds one row, however many rows there are");

  for (float& q : in.q) q *= 100;  // logits of several hundred
  float largest = 0;
  for (int j = 0; j < in.keys; ++j) largest = std::max(largest, score(in, 0, j));
  std::printf("  now the largest logit of row 0 is %.0f\n", largest);
  claim(largest > 89, "the naive form is NaN there, in float32 too");
  claim(error(three_pass(in, t), exact(in)) < 1e-2, "this one is not");
  return failures;
}
