// Step 4: maximum and sum in one pass.
//
// Since step 3: passes 1 and 2 are one.  Running maximum m and sum l relative to it; when m grows,
// what was summed so far is too large by exp(m_new - m_old), and one multiplication puts it right.
// Milakov and Gimelshein 2018, arXiv:1805.02867.
#include "ladder.h"

using namespace ladder;

namespace {

struct State {
  double m = -std::numeric_limits<double>::infinity(), l = 0;
};

/** The factor that makes sums relative to `from` relative to `to`. */
double rescale(double from, double to) { return from == to ? 1 : std::exp(from - to); }

State absorb(State state, const double* block, int n) {
  const double m = std::max(state.m, *std::max_element(block, block + n));
  double l = state.l * rescale(state.m, m);
  for (int i = 0; i < n; ++i) l += std::exp(block[i] - m);
  return {m, l};
}

}  // namespace

int main() {
  std::printf("4 online softmax: eight logits in four blocks of two\n");
  const double x[] = {1, 3, 2, 0, 8, 4, 5, 7};
  std::printf("  block   logits   m   alpha       l\n");
  State state;
  double alphas[4];
  for (int b = 0; b < 4; ++b) {
    const State next = absorb(state, x + 2 * b, 2);
    alphas[b] = state.l > 0 ? rescale(state.m, next.m) : 0;
    std::printf("  %d       %g %g      %g   %.7f   %.7f\n", b + 1, x[2 * b], x[2 * b + 1], next.m,
                alphas[b], next.l);
    state = next;
  }
  double l = 0;
  for (const double value : x) l += std::exp(value - 8);
  claim(state.m == 8, "the maximum goes to 3, then to 8");
  claim(std::fabs(alphas[2] - std::exp(-5.0)) < 1e-15,
        "at 8 the sum so far shrinks by exp(5) = 148");
  claim(std::fabs(state.l - l) < 1e-15, "the sum is that of two passes");

  // Any cut into blocks gives the same sum, up to rounding.
  const Inputs in = draw(1, 4096, 32);
  std::vector<double> row(in.keys);
  for (int j = 0; j < in.keys; ++j) row[j] = score(in, 0, j);
  const State whole = absorb({}, row.data(), in.keys);
  double worst = 0;
  for (const int block : {1, 3, 64, 1000}) {
    State s;
    for (int j = 0; j < in.keys; j += block) s = absorb(s, &row[j], std::min(block, in.keys - j));
    worst = std::max(worst, std::fabs(s.l / whole.l - 1));
  }
  claim(worst < 1e-13, "blocks of 1, 3, 64 and 1000 keys agree to 1e-13");
  return failures;
}
