// Step 9: one bracketing for every schedule, and so the same bits for every number of workers.
//
// Since step 8: floating-point merges are not associative, so the result depends on the cuts.  Fix
// the bracketing instead of the cuts: a state per leaf of keys at absolute positions, folded from
// left to right.  A worker that holds a row from its first key folds as it goes; any other hands
// over its leaves, and whoever finishes folds them in the same order.  Cuts then decide where work
// runs, never what is computed.
#include <cstring>
#include <set>
#include <string>

#include "ladder.h"

using namespace ladder;

namespace {

constexpr int kLeaf = 64;

struct State {
  float m = -std::numeric_limits<float>::infinity(), l = 0;
  std::vector<float> o;
};

State state_of(const Inputs& in, int begin, int end) {
  State s;
  s.o.assign(in.width, 0.0f);
  for (int j = begin; j < end; ++j) s.m = std::max(s.m, score(in, 0, j));
  for (int j = begin; j < end; ++j) {
    const float p = std::exp(score(in, 0, j) - s.m);
    s.l += p;
    for (int i = 0; i < in.width; ++i) s.o[i] = std::fma(p, in.v[j * in.width + i], s.o[i]);
  }
  return s;
}

/** The side with the larger maximum stays as it is, the other is scaled and added. */
State fold(const State& a, const State& b) {
  if (a.l == 0) return b;
  if (b.l == 0) return a;
  const bool b_leads = b.m > a.m;
  State s = b_leads ? b : a;
  const State& other = b_leads ? a : b;
  const float w = std::exp(other.m - s.m);
  s.l = std::fma(other.l, w, s.l);
  for (size_t i = 0; i < s.o.size(); ++i) s.o[i] = std::fma(other.o[i], w, s.o[i]);
  return s;
}

/** Ordinary split: each of `workers` one state over its equal share of the keys. */
State ordinary(const Inputs& in, int workers) {
  State all;
  for (int w = 0; w < workers; ++w) {
    all = fold(all, state_of(in, in.keys * w / workers, in.keys * (w + 1) / workers));
  }
  return all;
}

/** The same shares, snapped to leaves, each handing over the states of its leaves. */
State canonical(const Inputs& in, int workers) {
  const int leaves = (in.keys + kLeaf - 1) / kLeaf;
  std::vector<State> handed_over;  // in the order of the keys
  State all;
  for (int w = 0; w < workers; ++w) {
    for (int leaf = leaves * w / workers; leaf < leaves * (w + 1) / workers; ++leaf) {
      State s = state_of(in, leaf * kLeaf, std::min((leaf + 1) * kLeaf, in.keys));
      if (w == 0) {
        all = fold(all, s);  // this worker has the row from its first key
      } else {
        handed_over.push_back(std::move(s));
      }
    }
  }
  for (const State& s : handed_over) all = fold(all, s);
  return all;
}

std::string bits_of(const State& s) {
  std::string bytes(s.o.size() * sizeof(float), '\0');
  std::memcpy(bytes.data(), s.o.data(), bytes.size());
  return bytes;
}

}  // namespace

int main() {
  std::printf("9 canonical fold: cuts do not reach the bits\n");
  const Inputs in = draw(1, 5000, 64);
  const std::vector<double> want = exact(in);
  std::set<std::string> ordinary_bits, canonical_bits;
  double worst = 0;
  for (int workers = 1; workers <= 27; ++workers) {
    ordinary_bits.insert(bits_of(ordinary(in, workers)));
    State s = canonical(in, workers);
    canonical_bits.insert(bits_of(s));
    for (float& x : s.o) x /= s.l;
    worst = std::max(worst, error(s.o, want));
  }
  std::printf("  1 to 27 workers: %zu answers from ordinary splits, %zu from the fold\n",
              ordinary_bits.size(), canonical_bits.size());
  claim(worst < 1e-5, "equals float64 to 1e-5");
  claim(ordinary_bits.size() > 1, "ordinary splits give several answers");
  claim(canonical_bits.size() == 1, "the fold gives one");
  return failures;
}
