// Step 1: attention as the formula says, in three passes over matrices that stand in memory.
//
//   S = q k^T / sqrt(width)     P = softmax(S)     o = P v
//
// S and P are [rows, keys]: quadratic in a prompt's length, and nothing in them is wanted
// afterwards.
#include "ladder.h"

using namespace ladder;

namespace {

std::vector<float> textbook(const Inputs& in, Traffic& t) {
  const int rows = in.rows, keys = in.keys, width = in.width;
  const int64_t square = int64_t{rows} * keys;
  std::vector<float> s(square), p(square), o(static_cast<size_t>(rows) * width, 0.0f);

  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < keys; ++j) s[int64_t{r} * keys + j] = score(in, r, j);
  }
  t.read += int64_t{rows + keys} * width;
  t.written += square;

  for (int r = 0; r < rows; ++r) {
    const float* x = &s[int64_t{r} * keys];
    const float m = *std::max_element(x, x + keys);
    float l = 0;
    for (int j = 0; j < keys; ++j) l += std::exp(x[j] - m);
    for (int j = 0; j < keys; ++j) p[int64_t{r} * keys + j] = std::exp(x[j] - m) / l;
  }
  t.read += square;
  t.written += square;

  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < keys; ++j) {
      for (int i = 0; i < width; ++i) {
        o[r * width + i] += p[int64_t{r} * keys + j] * in.v[j * width + i];
      }
    }
  }
  t.read += square + int64_t{keys} * width;
  t.written += int64_t{rows} * width;
  t.held = 2 * square;
  return o;
}

}  // namespace

int main() {
  std::printf("1 textbook: S and P in memory\n");
  const Inputs in = draw(512, 512, 64);
  Traffic t;
  const std::vector<float> o = textbook(in, t);
  show(t);
  const int64_t needed = 4 * int64_t{512} * 64, all = t.read + t.written;
  std::printf("  of %.2f MB only %.2f MB are q, k, v and o\n", all * 4e-6, needed * 4e-6);
  claim(error(o, exact(in)) < 1e-5, "equals float64 to 1e-5");
  claim(all == 4 * int64_t{512} * 512 + needed, "S and P cross four times, q, k, v and o once");
  return failures;
}
