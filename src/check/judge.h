// Compares answers: with the oracle within P1's bound, and with each other by bytes.
#pragma once

#include <string>
#include <vector>

#include "check/call.h"
#include "ref/oracle.h"

namespace attnfold::check {

/** How a row keeps the weights that multiply v; their sum is of float32 in any case. */
enum class Weights {
  kFloat32,
  kRounded,        // to the type of v, relative to the largest of a leaf: what that does is known
  kRoundedSomehow  // to the type of v, relative to anything: at most half a unit in the last place
};

/** The bound of promise P1, in one place.  docs/numerics.md states it. */
struct Bound {
  double naive_factor = 2.0;
  double floor = 0x1p-20;  // times max|v| for o, times max(1, |lse|) for lse
  Weights weights = Weights::kFloat32;
};

/** The bound of a kernel row's family. */
Bound bound_of(const std::string& numerics_id);

/** The bound of a call's recorded answer: that of the row which gave it, if the file says so. */
Bound bound_of_recorded(const Call& call);

/** What 16-bit weights add to the bound of an element of o. */
double weight_rounding(const ref::Truth& truth, const Bound& bound, int64_t element);

struct Judgement {
  bool right = true;
  std::string text;    // the first wrong row, with request, token, head, both values and the bound;
                       // or a summary
  double worst_o = 0;  // largest error / bound, over rows
  double worst_lse = 0;
  double max_o_err = 0, max_lse_err = 0;
};

/**
 * Row by row: empties exactly, NaN and Inf at the oracle's positions, all else within the bound
 * plus `roundings` roundings (half a unit in the last place each) of o's stored dtype.
 */
Judgement judge(const Call& call, const ref::Truth& truth, const void* o, DType o_dtype,
                const float* lse /* may be NULL */, int roundings, Bound bound = {});

/** "" if the two answers are the same bytes; else the first difference, in words. */
std::string first_difference(const Call& call, const Answer& a, const Answer& b);

/** Executions whose schedules are distinct (by schedule_id), at most `want`; the first is the
 * default one. */
std::vector<attnfold_execution> distinct_schedules(const Call& call, int want, uint64_t seed,
                                                   const char* isa,
                                                   attnfold_backend backend = ATTNFOLD_CPU);

}  // namespace attnfold::check
