// Step 5: attention in one pass, with nothing kept of the row.
//
// Since step 4: the output rides along.  It is a sum weighted by exp(x - m), so it takes the same
// correction as l, and the division by l can wait for the end, because it is linear.  No score is
// ever stored.
#include "ladder.h"

using namespace ladder;

namespace {

std::vector<float> one_pass(const Inputs& in, Traffic& t) {
  std::vector<float> result(static_cast<size_t>(in.rows) * in.width), o(in.width);
  for (int r = 0; r < in.rows; ++r) {
    float m = -std::numeric_limits<float>::infinity(), l = 0;
    std::fill(o.begin(), o.end(), 0.0f);
    for (int j = 0; j < in.keys; ++j) {
      const float x = score(in, r, j), m_new = std::max(m, x);
      const float alpha = m == m_new ? 1 : std::exp(m - m_new), p = std::exp(x - m_new);
      l = l * alpha + p;
      for (int i = 0; i < in.width; ++i) o[i] = o[i] * alpha + p * in.v[j * in.width + i];
      m = m_new;
    }
    for (int i = 0; i < in.width; ++i) result[r * in.width + i] = o[i] / l;
    t.read += in.width + int64_t{in.keys} * in.width * 2;
    t.written += in.width;
  }
  t.held = in.width + 2;
  return result;
}

}  // namespace

int main() {
  std::printf("5 one pass: (m, l, o) and nothing else\n");
  Inputs in = draw(64, 2048, 64);
  Traffic t;
  claim(error(one_pass(in, t), exact(in)) < 1e-5, "equals float64 to 1e-5");
  show(t);
  claim(t.held == in.width + 2, "holds one state of width + 2 numbers, whatever the keys");
  claim(t.read == 64 * (64 + 2 * int64_t{2048} * 64),
        "but every row reads all keys and values again");

  for (float& q : in.q) q *= 100;
  claim(error(one_pass(in, t), exact(in)) < 1e-2, "logits of several hundred are fine");
  return failures;
}
