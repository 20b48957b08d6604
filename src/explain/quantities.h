// What attention costs, as small functions of its shape: bytes, FLOPs, seconds.  One layer of one
// step unless a name says otherwise.
//
// Letters are those of the literature: h query heads, h_kv key/value heads, d width of a head
// (d_qk of q and k, d_vo of v and o), q query tokens, s keys, b bytes of an element.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace attnfold::explain {

inline constexpr int64_t kFloatBytes = 4;
inline constexpr int64_t kTableEntryBytes = 4;  // a page id

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline double ratio(int64_t a, int64_t b) {
  return static_cast<double>(a) / static_cast<double>(b);
}
inline double percent(int64_t part, int64_t whole) { return 100 * ratio(part, whole); }

// ------------------------------------------------------------------------------------- the call

inline int64_t group_size(int64_t h, int64_t h_kv) { return h / h_kv; }
inline int64_t per_rank(int64_t heads, int64_t tp) { return heads / tp; }
inline double softmax_scale(int64_t d) { return 1 / std::sqrt(static_cast<double>(d)); }

/** Scores, or probabilities, in memory: [h, q, s]. */
inline int64_t score_bytes(int64_t h, int64_t q, int64_t s, int64_t b) { return h * q * s * b; }
/** Queries or outputs, [h, q, d]; keys or values, [h_kv, s, d]. */
inline int64_t tensor_bytes(int64_t heads, int64_t tokens, int64_t d, int64_t b) {
  return heads * tokens * d * b;
}
/** Keys and values. */
inline int64_t kv_bytes(int64_t h_kv, int64_t s, int64_t d_qk, int64_t d_vo, int64_t b) {
  return tensor_bytes(h_kv, s, d_qk, b) + tensor_bytes(h_kv, s, d_vo, b);
}

/** One of the two products over `pairs` (query, key) pairs of each head; a multiply-add counts 2.
 */
inline int64_t product_flop(int64_t h, int64_t pairs, int64_t d) { return 2 * h * pairs * d; }
inline int64_t attention_flop(int64_t h, int64_t pairs, int64_t d_qk, int64_t d_vo) {
  return product_flop(h, pairs, d_qk) + product_flop(h, pairs, d_vo);
}

// ------------------------------------------------------------------- attention in three kernels

/** Bytes that each of the three kernels of textbook attention reads and writes. */
struct Materialised {
  int64_t scores;   // reads q and k, writes S
  int64_t softmax;  // reads S, writes P
  int64_t values;   // reads P and v, writes o
  int64_t total() const { return scores + softmax + values; }
  /** Of these, what S and P alone cause. */
  int64_t intermediate;
};
inline Materialised materialised(int64_t h, int64_t h_kv, int64_t q, int64_t s, int64_t d_qk,
                                 int64_t d_vo, int64_t b) {
  const int64_t square = score_bytes(h, q, s, b);
  return {tensor_bytes(h, q, d_qk, b) + tensor_bytes(h_kv, s, d_qk, b) + square, 2 * square,
          square + tensor_bytes(h_kv, s, d_vo, b) + tensor_bytes(h, q, d_vo, b), 4 * square};
}

/** Each distinct byte once: q, k, v in, o out. */
inline int64_t compulsory_bytes(int64_t h, int64_t h_kv, int64_t q, int64_t s, int64_t d_qk,
                                int64_t d_vo, int64_t b) {
  return tensor_bytes(h, q, d_qk, b) + tensor_bytes(h, q, d_vo, b) +
         kv_bytes(h_kv, s, d_qk, d_vo, b);
}

// ------------------------------------------------------------------------------------- roofline

inline double intensity(int64_t flop, int64_t bytes) { return ratio(flop, bytes); }
/** FLOP per byte from which on arithmetic is the limit. */
inline double ridge(double peak_flop_per_s, double bytes_per_s) {
  return peak_flop_per_s / bytes_per_s;
}
inline double move_seconds(int64_t bytes, double bytes_per_s) {
  return static_cast<double>(bytes) / bytes_per_s;
}
inline double compute_seconds(int64_t flop, double peak_flop_per_s) {
  return static_cast<double>(flop) / peak_flop_per_s;
}
/** No schedule is faster. */
inline double floor_seconds(int64_t flop, int64_t bytes, double peak_flop_per_s,
                            double bytes_per_s) {
  return std::max(move_seconds(bytes, bytes_per_s), compute_seconds(flop, peak_flop_per_s));
}

/** FLOP per byte of K and V when each request has one query token: of neither length nor batch. */
inline double decode_intensity(int64_t h, int64_t h_kv, int64_t b) {
  return ratio(2 * h, b * h_kv);
}

// ---------------------------------------------------------------------------- blocks on a machine

inline int64_t waves(int64_t blocks, int64_t sms) { return ceil_div(blocks, sms); }
inline int64_t busy_sms(int64_t blocks, int64_t sms) { return std::min(blocks, sms); }
inline int64_t idle_sms(int64_t blocks, int64_t sms) { return std::max<int64_t>(0, sms - blocks); }
/** The fewest splits with which `blocks` unsplit blocks reach every SM. */
inline int64_t filling_splits(int64_t blocks, int64_t sms) { return ceil_div(sms, blocks); }

// --------------------------------------------------------------------------------- split and merge

/** The unnormalised output of one row and its maximum and mass, in fp32. */
inline int64_t state_bytes(int64_t d_vo) { return (d_vo + 2) * kFloatBytes; }
/** A normalised output and its lse, in fp32. */
inline int64_t lse_state_bytes(int64_t d_vo) { return (d_vo + 1) * kFloatBytes; }

/** Merging two results of one (token, head): elements of 16 bytes loads, FLOPs and bytes. */
inline int64_t merge_pack_elements(int64_t load_bits, int64_t b) { return load_bits / (8 * b); }
inline int64_t merge_bytes(int64_t d_vo, int64_t b, bool lse_written) {
  return 3 * d_vo * b + (lse_written ? 3 : 2) * kFloatBytes;
}
inline int64_t merge_flop(int64_t d_vo, int64_t scalar_flop) { return 3 * d_vo + scalar_flop; }

// ------------------------------------------------------------------------------------ online
// softmax

/** What the state so far is multiplied with when the maximum moves. */
inline double rescale(double old_max, double new_max) { return std::exp(old_max - new_max); }
/** Rescaling multiplies of a block of `block` keys, over the multiply-adds of P*V of that block. */
inline double rescale_share(int64_t block, int64_t d_vo, bool with_mass) {
  return ratio(d_vo + (with_mass ? 1 : 0), d_vo * block);
}

/** Largest finite value of a binary format with `mantissa` stored bits. */
inline double largest_float(int mantissa, int max_exponent) {
  return (2 - std::ldexp(1.0, -mantissa)) * std::ldexp(1.0, max_exponent);
}
/** exp(x) reaches `value` here. */
inline double exp_reaches(double value) { return std::log(value); }
/** Asymptotic expectation of the largest of n standard normal values. */
inline double expected_normal_max(double n) {
  const double t = std::sqrt(2 * std::log(n)), four_pi = 16 * std::atan(1.0);
  return t - (std::log(std::log(n)) + std::log(four_pi)) / (2 * t);
}

// ------------------------------------------------------------------------------------------ paging

inline int64_t table_entries(int64_t s, int64_t page) { return ceil_div(s, page); }
inline int64_t table_bytes(int64_t s, int64_t page) {
  return kTableEntryBytes * table_entries(s, page);
}

}  // namespace attnfold::explain
