// Step 8: split over keys and merge, and the trap in the empty state.
//
// Since step 7: a decode has one row, so tiles of rows give no parallelism.  Cut the keys instead,
// give each worker a slice, and merge the states (Flash-Decoding, Dao, Haziza, Massa, Sizov 2023).
// A slice can be empty: masked, or past the end.  Then m = -inf, and -inf - -inf is NaN: the
// neutral element must be handled first.
#include "ladder.h"

using namespace ladder;

namespace {

struct State {
  float m = -std::numeric_limits<float>::infinity(), l = 0;
  std::vector<float> o;
};

/** The state of row 0 over keys [begin, end). */
State state_of(const Inputs& in, int begin, int end) {
  State s;
  s.o.assign(in.width, 0.0f);
  for (int j = begin; j < end; ++j) s.m = std::max(s.m, score(in, 0, j));
  for (int j = begin; j < end; ++j) {
    const float p = std::exp(score(in, 0, j) - s.m);
    s.l += p;
    for (int i = 0; i < in.width; ++i) s.o[i] += p * in.v[j * in.width + i];
  }
  return s;
}

State merge(const State& a, const State& b, bool guarded) {
  if (guarded && b.l == 0) return a;  // an empty side changes nothing, not even a bit
  if (guarded && a.l == 0) return b;
  State s = a;
  s.m = std::max(a.m, b.m);
  const float wa = std::exp(a.m - s.m), wb = std::exp(b.m - s.m);
  s.l = a.l * wa + b.l * wb;
  for (size_t i = 0; i < s.o.size(); ++i) s.o[i] = a.o[i] * wa + b.o[i] * wb;
  return s;
}

/** Row 0 over `splits` slices of which the last may have no keys. */
std::vector<float> decode(const Inputs& in, int splits, bool guarded) {
  const int slice =
      (in.keys / splits / 64 + 1) * 64;  // whole tiles: the last slices may start past the end
  State all;
  all.o.assign(in.width, 0.0f);
  for (int s = 0; s < splits; ++s) {
    const int begin = std::min(s * slice, in.keys), end = std::min(begin + slice, in.keys);
    all = merge(all, state_of(in, begin, end), guarded);
  }
  for (float& x : all.o) x /= all.l;
  return all.o;
}

}  // namespace

int main() {
  std::printf("8 split over keys, then merge\n");
  const Inputs in = draw(1, 1000, 64);
  const std::vector<double> want = exact(in);
  double worst = 0;
  for (int splits = 1; splits <= 16; ++splits)
    worst = std::max(worst, error(decode(in, splits, true), want));
  claim(worst < 1e-5, "1 to 16 slices equal float64 to 1e-5, also where the last are empty");

  State empty;
  empty.o.assign(in.width, 0.0f);
  claim(std::isnan(merge(empty, empty, false).l), "two empty sides without a guard are NaN");
  claim(merge(empty, empty, true).l == 0, "with it they stay empty");
  State stale = empty;
  stale.o.assign(in.width, NAN);  // what an engine left where nothing was computed
  const State some = state_of(in, 0, 100);
  claim(std::isnan(merge(some, stale, false).o[0]), "0 times a stale NaN is NaN");
  claim(merge(some, stale, true).o == some.o && merge(stale, some, true).o == some.o,
        "guarded, the other side comes through bit for bit");

  int different = 0;
  const std::vector<float> one = decode(in, 1, true);
  for (int splits = 2; splits <= 16; ++splits) different += decode(in, splits, true) != one ? 1 : 0;
  std::printf("  %d of 15 split counts give other bits than one slice: the next step\n", different);
  claim(different > 0, "bits depend on the number of slices");
  std::printf("  a slice leaves %d numbers behind: %d splits of a row write and read %.1f KB\n",
              in.width + 2, 16, 16 * (in.width + 2) * 8e-3);
  return failures;
}
