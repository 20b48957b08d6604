// The state of a row and the canonical fold.
//
// A row's state over a set of keys is (m, l, o): m the largest score in the log2 domain, l = sum
// 2^(x - m), o = sum 2^(x - m) * v.  m = -inf says that the row saw no key, and nothing else does:
// a leaf in which a row sees a key has m >= -FLT_MAX, whatever the scores are.  The states with
// merge are a commutative monoid; floating point needs one bracketing, and it is this:
//   1. a leaf is kLeaf keys at absolute positions; its state is computed from nothing;
//   2. leaves are folded left to right into their super-chunk, kSuperChunk leaves at absolute
//   places;
//   3. super-chunks are folded into the row left to right;
//   4. a state with m = -inf is skipped.
// Who computes which leaf is free; this is not.
//
// Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax".
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace attnfold {

constexpr int kLeaf = 128;       // keys
constexpr int kSuperChunk = 16;  // leaves
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.693147180559945309417f;
constexpr float kLowest =
    -3.402823466e+38f;  // -FLT_MAX: where the maximum of visible scores starts

/** A learned sink logit in the log2 domain: finite if it is, or -inf; NaN for +inf, as a score of
 * +inf gives. */
ATTNFOLD_HD inline float sink_log2(float logit) {
  const float x = logit * kLog2E;
  if (x <= -kLowest) return x;
  return logit <= -kLowest ? -kLowest : float_of(0x7fc00000u);
}

/** A finite sink logit that the log2 domain has no number for: beside it no score counts. */
ATTNFOLD_HD inline bool is_all_sink(float logit) {
  return logit <= -kLowest && logit * kLog2E > -kLowest;
}

namespace lane {  // one lane: float

using Lanes = float;
#define ATTNFOLD_LANE_FN ATTNFOLD_HD inline

ATTNFOLD_LANE_FN float splat(float x) { return x; }
ATTNFOLD_LANE_FN float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
ATTNFOLD_LANE_FN float add(float a, float b) { return a + b; }
ATTNFOLD_LANE_FN float sub(float a, float b) { return a - b; }
ATTNFOLD_LANE_FN float mul(float a, float b) { return a * b; }
ATTNFOLD_LANE_FN float divide(float a, float b) { return a / b; }
ATTNFOLD_LANE_FN float max_keep_nan(float a, float b) { return a > b ? a : b; }
ATTNFOLD_LANE_FN float min_keep_nan(float a, float b) { return a < b ? a : b; }
ATTNFOLD_LANE_FN float abs(float x) { return float_of(bits_of(x) & 0x7fffffffu); }
ATTNFOLD_LANE_FN float copy_sign(float x, float sign) {
  return float_of((bits_of(x) & 0x7fffffffu) | (bits_of(sign) & 0x80000000u));
}
ATTNFOLD_LANE_FN float round_to_even(float x) {  // |x| < 2^22, round-to-nearest mode
  const float magic = 12582912.0f;               // 1.5 x 2^23
  return (x + magic) - magic;
}
/** p * 2^n for p in [1/2, 2], integral n in [-127, 127] */
ATTNFOLD_LANE_FN float scale_by_power_of_two(float p, float n) {
  if (!(n == n)) return n;
  return float_of(bits_of(p) + (static_cast<uint32_t>(static_cast<int32_t>(n)) << 23));
}
ATTNFOLD_LANE_FN float zero_below(float x, float limit, float y) { return x < limit ? 0.0f : y; }
ATTNFOLD_LANE_FN float select_below(float x, float limit, float below, float other) {
  return x < limit ? below : other;
}

#include "core/lane_math.inl"

#undef ATTNFOLD_LANE_FN
}  // namespace lane

ATTNFOLD_HD inline float exp2_f32(float x) { return lane::exp2_lanes(x); }
ATTNFOLD_HD inline float tanh_f32(float x) { return lane::tanh_lanes(x); }

/**
 * Natural logarithm of a positive normal number, within 1.5 units in the last place plus 2^-24.
 * log(0) = -inf, log(inf) = inf, log(NaN) = NaN.
 */
ATTNFOLD_HD inline float log_f32(float x) {
  if (!(x > 0.0f)) return x == 0.0f ? float_of(0xff800000u) : float_of(0x7fc00000u);
  if (x > 3.402823466e+38f) return x;
  // x = 2^e * f, f in [sqrt(1/2), sqrt(2))
  const uint32_t u = bits_of(x) - 0x3f3504f3u;
  const int32_t e = static_cast<int32_t>(u) >> 23;
  const float f = float_of((u & 0x007fffffu) + 0x3f3504f3u);
  // log f = 2 atanh(s), s = (f - 1) / (f + 1), |s| <= 0.172
  const float s = (f - 1.0f) / (f + 1.0f);
  const float z = s * s;
  float p = 2.0f / 11.0f;
  p = lane::fma(p, z, 2.0f / 9.0f);
  p = lane::fma(p, z, 2.0f / 7.0f);
  p = lane::fma(p, z, 2.0f / 5.0f);
  p = lane::fma(p, z, 2.0f / 3.0f);
  const float sz = s * z;
  const float log_f = lane::fma(sz, p, s + s);
  return lane::fma(static_cast<float>(e), kLn2, log_f);
}

/** How two non-empty states fold: the side with the larger maximum stays as it is, the other is
 * scaled and added. */
struct FoldStep {
  bool b_leads;  // else a leads, also when the maxima are equal: the scale is then exactly 1 and
                 // the sum symmetric
  float scale;   // of the side that does not lead
};

ATTNFOLD_HD inline FoldStep fold_step(float m_a, float m_b) {
  const bool b_leads = m_b > m_a;
  return {b_leads, exp2_f32(b_leads ? m_a - m_b : m_b - m_a)};
}

/** One number of the fold, l or an element of o, with one rounding. */
ATTNFOLD_HD inline float fold_value(FoldStep step, float a, float b) {
  return step.b_leads ? lane::fma(step.scale, a, b) : lane::fma(step.scale, b, a);
}

/** lse of a state, natural log: -inf for the empty state and where all mass is 0. */
ATTNFOLD_HD inline float lse_of(float m, float l) {
  const float log_l = log_f32(l);
  return log_l == float_of(0xff800000u) ? log_l : lane::fma(m, kLn2, log_l);
}

/** Divisor of o: l, or 1 where all mass is 0, so that o stays 0 there. */
ATTNFOLD_HD inline float divisor_of(float l) { return l == 0.0f ? 1.0f : l; }

}  // namespace attnfold
