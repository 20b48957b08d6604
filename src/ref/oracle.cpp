// The float64 oracle: attention as a textbook states it, for every problem that the engine takes.
//
//   score(j) = sm_scale * sum_d q[d] * k[j][d]              over the keys j that the row sees
//              then c * tanh(score / c) with a soft-cap c
//              then + slope * (j - position) with ALiBi
//   lse      = log(sum_j exp(score(j)))
//   o[d]     = sum_j exp(score(j) - lse) * v[j][d]
//   A learned sink logit counts in lse as one more score, and in o as a v of 0.
//   k and v are stored values times their scales; a scale that is not a finite number is NaN.
//   Where v lies in k, its row is the beginning of k's.
//
// The only code shared with the engine is the exact decoding of stored values in core/dtype.h.
//
// What happens at the edges:
//   a row that sees no key                     o = 0, lse = -inf, or the sink logit
//   a row whose visible scores are all -inf    every weight is 0: lse = -inf, o = 0, or NaN where
//                                              a visible v is not finite
//   a visible score that is NaN or +inf        o and lse are NaN
//   weight 0 times a v that is not finite      NaN, as in any IEEE arithmetic; a weight too small
//                                              for float32 counts as 0, so that this does not hang
//                                              on float64's longer reach
//
// Beside the truth stands its yardstick: the same formula in plain float32 without fma, a scaled
// value rounded once, each sum in order of its index, and once more in the opposite order.  The
// largest error of the two, over all rows of a request, counts for each of its rows: a single sum
// is now and then right by luck.
//
// Weights of 16 bits move o by a sum that is known, but for weights so near the middle of two such
// numbers that float32 scores may round them to the other one: `rounding_of_weights`.
#include "ref/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

namespace attnfold::ref {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// ------------------------------------------------ masks
// `position` is the query's place among its request's keys: the last query stands at the last key.

/** Causal, aligned bottom-right: a token sees itself and what came before. */
bool causal_allows(int64_t position, int64_t key) { return key <= position; }

/** A left window of r: of what came before, only the r nearest. */
bool left_window_allows(int64_t position, int64_t key, int64_t r) { return position - key <= r; }

/** A right window of r: of what comes after, only the r nearest. */
bool right_window_allows(int64_t position, int64_t key, int64_t r) { return key - position <= r; }

/** Chunks of n positions: what lies before the token's own chunk is left of it, what lies after is
 * right of it. */
bool left_of_chunk(int64_t position, int64_t key, int64_t n) {
  return key / n < std::max<int64_t>(position, 0) / n;
}
bool right_of_chunk(int64_t position, int64_t key, int64_t n) {
  return key / n > std::max<int64_t>(position, 0) / n;
}

}  // namespace

bool visible(const attnfold_problem& problem, int32_t qo_len, int32_t kv_len, int32_t i,
             int32_t j) {
  const int64_t position = int64_t{kv_len} - qo_len + i;
  if (j < 0 || j >= kv_len) return false;
  if (problem.mask == ATTNFOLD_MASK_CAUSAL && !causal_allows(position, j)) return false;
  const int64_t chunk = problem.attention_chunk;
  const bool is_sink = j < problem.sink_tokens;  // seen however far to the left
  if (problem.window_left >= 0 && !is_sink && !left_window_allows(position, j, problem.window_left))
    return false;
  if (chunk > 0 && !is_sink && left_of_chunk(position, j, chunk)) return false;
  if (chunk > 0 && right_of_chunk(position, j, chunk)) return false;
  if (problem.window_right >= 0 && !right_window_allows(position, j, problem.window_right))
    return false;
  return true;
}

namespace {

/** Block-sparse: the key's block is near the query's own, or one of those that all queries see. */
bool block_allows(const check::Call& call, int32_t r, int64_t position, int32_t j,
                  int32_t kv_head) {
  const attnfold_problem& p = call.problem;
  const int64_t block = j / p.sparse_block_size;
  if (p.sparse_local_blocks == 0 && p.sparse_vertical_stride == 0) {
    const int32_t* offset = call.block_indptr.data() + r * p.kv_heads + kv_head;
    const auto list = call.block_indices.begin();
    return std::find(list + offset[0], list + offset[1], block) != list + offset[1];
  }
  const int64_t blocks_back = std::max<int64_t>(position, 0) / p.sparse_block_size - block;
  if (p.sparse_local_blocks > 0 && blocks_back < p.sparse_local_blocks) return true;
  const int64_t moved = block + 1 + int64_t{kv_head} * p.sparse_head_step;
  return p.sparse_vertical_stride > 0 && moved % p.sparse_vertical_stride == 0;
}

}  // namespace

bool visible(const check::Call& call, int32_t r, int32_t i, int32_t j, int32_t kv_head) {
  const int32_t kv_len = call.kv_len[r], qo_len = call.qo_indptr[r + 1] - call.qo_indptr[r];
  if (j < 0 || j >= kv_len) return false;
  if (call.problem.sparse_block_size > 0 &&
      !block_allows(call, r, int64_t{kv_len} - qo_len + i, j, kv_head))
    return false;
  // A request's own bits know best about the keys that they cover.
  const int64_t width = call.mask_width.empty() ? 0 : call.mask_width[r];
  const int64_t keys_to_end = int64_t{kv_len} - j;  // 1 for the last key
  if (keys_to_end <= width) {
    const int64_t column = width - keys_to_end, bytes_per_query = (width + 7) / 8;
    const int64_t byte = call.mask_indptr[r] + i * bytes_per_query + column / 8;
    return (call.mask_bits[byte] & (1 << (column % 8))) != 0;
  }
  // The visible prefix is open to everyone.
  if (!call.visible_prefix.empty() && j < call.visible_prefix[r]) return true;
  return visible(call.problem, qo_len, kv_len, i, j);
}

namespace {

// ------------------------------------------------ one request's keys

/** The keys of one request that some asked row sees, and their k and v under one kv head, decoded.
 */
struct Keys {
  std::vector<int32_t> positions;  // [n] rising
  std::vector<double> k64;         // [head_dim_qk, n]
  std::vector<double> v64;         // [n, head_dim_vo]
  std::vector<float> k32, v32;     // the same values, rounded to float32 if they have a scale
  std::vector<double> k_norm;      // [n]
  std::vector<double> v_scale;     // [n]
  size_t n() const { return positions.size(); }
};

/** Queries `tokens` of request r; keys that none of them sees are never touched, nor are their
 * table entries. */
std::vector<int32_t> seen_positions(const check::Call& call, int32_t r, int32_t kv_head,
                                    const std::vector<int32_t>& tokens) {
  std::vector<int32_t> seen;
  for (int32_t j = 0; j < call.kv_len[r]; ++j) {
    const auto sees_j = [&](int32_t i) { return visible(call, r, i, j, kv_head); };
    if (std::any_of(tokens.begin(), tokens.end(), sees_j)) seen.push_back(j);
  }
  return seen;
}

/** The scale of one key or value; nothing that is not finite can stand for a number. */
double scale_of(const check::Call& call, const check::Scales& scales, int32_t r, int32_t key,
                int32_t kv_head) {
  const double scale = call.scale_at(scales, r, key, kv_head);
  return std::isfinite(scale) ? scale : std::numeric_limits<double>::quiet_NaN();
}

void decode_keys(const check::Call& call, int32_t r, int32_t kv_head, Keys* keys) {
  const DType type = static_cast<DType>(call.problem.kv_dtype);
  const size_t n = keys->n(), head_dim_qk = call.problem.head_dim_qk,
               head_dim_vo = call.problem.head_dim_vo;
  keys->k64.resize(head_dim_qk * n);
  keys->k32.resize(head_dim_qk * n);
  keys->v64.resize(n * head_dim_vo);
  keys->v32.resize(n * head_dim_vo);
  keys->k_norm.assign(n, 0);
  keys->v_scale.resize(n);
  for (size_t x = 0; x < n; ++x) {
    const int32_t j = keys->positions[x];
    const int64_t k_at =
        call.kv_element_offset(r, j, call.k_strides, call.k_offset) + kv_head * call.k_strides.head;
    const int64_t v_at = call.problem.v_in_k
                             ? k_at
                             : call.kv_element_offset(r, j, call.v_strides, call.v_offset) +
                                   kv_head * call.v_strides.head;
    const check::Buffer& v = call.problem.v_in_k ? *call.k : *call.v;
    const double k_scale = scale_of(call, call.k_scale, r, j, kv_head);
    const double v_scale = keys->v_scale[x] = scale_of(call, call.v_scale, r, j, kv_head);
    for (size_t d = 0; d < head_dim_qk; ++d) {
      keys->k64[d * n + x] =
          load_f32(call.k->data(), type, k_at + static_cast<int64_t>(d)) * k_scale;
      keys->k32[d * n + x] = static_cast<float>(keys->k64[d * n + x]);
      keys->k_norm[x] += keys->k64[d * n + x] * keys->k64[d * n + x];
    }
    keys->k_norm[x] = std::sqrt(keys->k_norm[x]);
    for (size_t d = 0; d < head_dim_vo; ++d) {
      keys->v64[x * head_dim_vo + d] =
          load_f32(v.data(), type, v_at + static_cast<int64_t>(d)) * v_scale;
      keys->v32[x * head_dim_vo + d] = static_cast<float>(keys->v64[x * head_dim_vo + d]);
    }
  }
}

// ------------------------------------------------ one row

/** One row's answer in arithmetic of type T. */
template <typename T>
struct RowAnswer {
  std::vector<T> o;  // [head_dim_vo]
  T lse;
  std::vector<T> score;  // of keys from the first to the last that the row sees
};

/** What is done to a row's scores. */
struct Scoring {
  float sm_scale;
  float softcap;              // 0 = off
  float slope;                // ALiBi; 0 = off
  int64_t position;           // of the query
  std::optional<float> sink;  // learned logit
};

/**
 * q                  [head_dim_qk]
 * k                  [head_dim_qk, n]
 * v                  [n, head_dim_vo]
 * positions          [n] of the keys
 * seen               indices into n, rising or falling: the keys that the row sees
 *
 * Every sum runs over dims and over keys in one direction: that of `seen`.
 */
template <typename T>
RowAnswer<T> attend(const std::vector<T>& q, const std::vector<T>& k, const std::vector<T>& v,
                    const std::vector<int32_t>& positions, const std::vector<size_t>& seen,
                    const Scoring& scoring, size_t head_dim_vo) {
  constexpr T inf = std::numeric_limits<T>::infinity();
  const size_t n = positions.size();
  RowAnswer<T> row{std::vector<T>(head_dim_vo, T{0}), -inf, {}};
  if (seen.empty()) {
    if (scoring.sink) row.lse = *scoring.sink;
    return row;
  }

  // Scores of the keys from the first to the last that the row sees; those between that it does not
  // see are not used.
  const bool falling = seen.front() > seen.back();
  const size_t begin = falling ? seen.back() : seen.front();
  const size_t end = (falling ? seen.front() : seen.back()) + 1;
  std::vector<T>& score = row.score;
  score.assign(end - begin, T{0});
  for (size_t step = 0; step < q.size(); ++step) {
    const size_t d = falling ? q.size() - 1 - step : step;
    const T* k_d = k.data() + d * n + begin;
    for (size_t x = 0; x < score.size(); ++x) score[x] += q[d] * k_d[x];
  }
  for (size_t x = 0; x < score.size(); ++x) {
    T& s = score[x];
    s *= T{scoring.sm_scale};
    if (scoring.softcap != 0) s = T{scoring.softcap} * std::tanh(s / T{scoring.softcap});
    if (scoring.slope != 0) {
      s += T{scoring.slope} * static_cast<T>(positions[begin + x] - scoring.position);
    }
  }

  T largest = scoring.sink ? T{*scoring.sink} : -inf;
  bool any_nan = false;
  for (size_t x : seen) {
    any_nan |= std::isnan(score[x - begin]);
    largest = std::max(largest, score[x - begin]);
  }
  if (any_nan || largest == inf) {
    row.lse = std::numeric_limits<T>::quiet_NaN();
    std::fill(row.o.begin(), row.o.end(), row.lse);
    return row;
  }

  T denominator = scoring.sink && largest != -inf ? std::exp(T{*scoring.sink} - largest) : T{0};
  for (size_t x : seen) {
    T weight = largest == -inf ? T{0} : std::exp(score[x - begin] - largest);
    if (weight < T{std::numeric_limits<float>::denorm_min()}) weight = T{0};
    denominator += weight;
    for (size_t d = 0; d < head_dim_vo; ++d) row.o[d] += weight * v[x * head_dim_vo + d];
  }
  if (largest == -inf) return row;
  for (T& x : row.o) x /= denominator;
  row.lse = largest + std::log(denominator);
  return row;
}

/** How far plain float32 is from the truth.  Where the truth is not finite there is no distance: 0.
 */
double distance(double truth, float naive) {
  if (!std::isfinite(truth)) return 0;
  return std::isfinite(naive) ? std::fabs(static_cast<double>(naive) - truth) : kInf;
}

double largest_finite_v(const Keys& keys, const std::vector<size_t>& seen, size_t head_dim_vo) {
  double largest = 0;
  for (size_t x : seen) {
    for (size_t d = 0; d < head_dim_vo; ++d) {
      const double a = std::fabs(keys.v64[x * head_dim_vo + d]);
      if (std::isfinite(a)) largest = std::max(largest, a);
    }
  }
  return largest;
}

// ------------------------------------------------ weights of 16 bits

/** Significant bits of a type and the exponent of its smallest normal value. */
struct Format {
  int bits, min_exponent;
};

double unit_of(double x, Format format) {
  return std::ldexp(1.0, std::max(std::ilogb(x), format.min_exponent) - format.bits + 1);
}

/** Of an x below this a conversion to the type makes 0; one to f16 has subnormals. */
double smallest(Format format) { return format.min_exponent == -126 ? 0x1p-126 : 0; }

/** To nearest even, x not negative. */
double rounded(double x, Format format) {
  if (x <= smallest(format)) return 0;
  const double unit = unit_of(x, format);
  return std::nearbyint(x / unit) * unit;
}

/** What the row's weights are, and how far float32 scores may be from them. */
struct RoundedRow {
  const RowAnswer<double>& exact;
  double largest_error;  // of a naive float32 score
  double q_norm;         // times sm_scale
};

/**
 * What multiplies a stored v is p, a weight relative to the largest of its leaf and times v's
 * scale. Of it and its neighbours p (1 - slack) and p (1 + slack), which float32 may have in its
 * place: what rounding adds to p, and how much further it may be rounded.
 */
void rounding_of_weights(const Keys& keys, const std::vector<size_t>& seen, const RoundedRow& row,
                         Format format, size_t head_dim_vo, double* moved, double* limit) {
  constexpr int kLeaf = 128;
  std::vector<double> shift(head_dim_vo, 0), doubt(head_dim_vo, 0);
  double largest_slack = 0;
  const auto score = [&](size_t x) { return row.exact.score[x - seen.front()]; };
  for (size_t from = 0, to; from < seen.size(); from = to) {
    const int32_t leaf = keys.positions[seen[from]] / kLeaf;
    double largest = -kInf;
    for (to = from; to < seen.size() && keys.positions[seen[to]] / kLeaf == leaf; ++to)
      largest = std::max(largest, score(seen[to]));
    if (largest == -kInf) continue;
    const double share = std::exp(largest - row.exact.lse);  // of the leaf's largest weight, in all
    for (size_t i = from; i < to; ++i) {
      const double s = score(seen[i]), v_scale = std::fabs(keys.v_scale[seen[i]]);
      const double p = std::exp(s - largest) * v_scale;
      if (p == 0 || std::isnan(p)) continue;
      const double scale = 1 + row.q_norm * keys.k_norm[seen[i]] + std::fabs(s);
      const double slack = std::min(1.0, 4 * row.largest_error + 0x1p-20 * scale);
      largest_slack = std::max(largest_slack, slack);
      const double r = rounded(p, format);
      const double further =
          std::max(rounded(p * (1 + slack), format) - r, r - rounded(p * (1 - slack), format));
      // Relative to something else p may be anywhere between two powers of two.
      const double most =
          std::max(std::ldexp(p, -format.bits), std::ldexp(1.0, format.min_exponent - format.bits));
      const double unit = share / v_scale;  // of what a stored v is multiplied by, in o
      const double* v = keys.v64.data() + seen[i] * head_dim_vo;
      for (size_t d = 0; d < head_dim_vo; ++d) {
        shift[d] += unit * (r - p) * v[d];
        limit[d] += unit * most * std::fabs(v[d]);
      }
      if (further == 0) continue;
      for (size_t d = 0; d < head_dim_vo; ++d) doubt[d] += unit * further * std::fabs(v[d]);
    }
  }
  // What float32 makes of a weight moves the sum of weights, but not one that is rounded as before.
  for (size_t d = 0; d < head_dim_vo; ++d)
    moved[d] = std::fabs(shift[d]) + doubt[d] + largest_slack * std::fabs(row.exact.o[d]);
}

/** The scale that the problem means.  It is a float, also where it is the default. */
float sm_scale_of(const attnfold_problem& problem) {
  if (problem.sm_scale != ATTNFOLD_SM_SCALE_DEFAULT) return problem.sm_scale;
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(problem.head_dim_qk)));
}

/** Query head `head` of query `i` of request r: fills one row of the truth. */
void answer_row(const check::Call& call, int32_t r, int32_t i, int32_t head, const Keys& keys,
                const std::vector<size_t>& seen, Truth* truth) {
  const attnfold_problem& problem = call.problem;
  const size_t head_dim_vo = problem.head_dim_vo;
  const int64_t row = call.qo_indptr[r] + i;
  const int64_t q_at = call.q_offset + row * call.q_strides.token + head * call.q_strides.head;
  std::vector<float> q32(problem.head_dim_qk);
  for (int32_t d = 0; d < problem.head_dim_qk; ++d) {
    q32[d] = load_f32(call.q->data(), static_cast<DType>(problem.q_dtype), q_at + d);
  }
  const std::vector<double> q64(q32.begin(), q32.end());
  const int32_t qo_len = call.qo_indptr[r + 1] - call.qo_indptr[r];
  Scoring scoring{sm_scale_of(problem), problem.logits_softcap, 0,
                  int64_t{call.kv_len[r]} - qo_len + i, std::nullopt};
  if (!call.alibi_slopes.empty()) scoring.slope = call.alibi_slopes[head];
  if (!call.sink_logits.empty()) scoring.sink = call.sink_logits[head];

  const auto exact =
      attend<double>(q64, keys.k64, keys.v64, keys.positions, seen, scoring, head_dim_vo);

  const size_t at = row * problem.qo_heads + head;
  std::copy(exact.o.begin(), exact.o.end(), truth->o.begin() + at * head_dim_vo);
  truth->lse[at] = exact.lse;
  double largest_error = 0;
  const std::vector<size_t> falling(seen.rbegin(), seen.rend());
  for (const std::vector<size_t>* order : {&seen, &falling}) {
    const auto naive =
        attend<float>(q32, keys.k32, keys.v32, keys.positions, *order, scoring, head_dim_vo);
    for (size_t d = 0; d < head_dim_vo; ++d) {
      truth->naive_o_err[at] = std::max(truth->naive_o_err[at], distance(exact.o[d], naive.o[d]));
    }
    truth->naive_lse_err[at] = std::max(truth->naive_lse_err[at], distance(exact.lse, naive.lse));
    for (size_t x : seen) {
      const size_t i = x - seen.front();
      largest_error = std::max(largest_error, distance(exact.score[i], naive.score[i]));
    }
  }
  truth->max_abs_v[at] = largest_finite_v(keys, seen, head_dim_vo);
  if (truth->rounding_o.empty() || !std::isfinite(exact.lse)) return;
  const double q_norm = std::sqrt(std::inner_product(q64.begin(), q64.end(), q64.begin(), 0.0));
  rounding_of_weights(keys, seen, {exact, largest_error, std::fabs(scoring.sm_scale) * q_norm},
                      problem.kv_dtype == ATTNFOLD_F16 ? Format{11, -14} : Format{8, -126},
                      head_dim_vo, truth->rounding_o.data() + at * head_dim_vo,
                      truth->rounding_limit_o.data() + at * head_dim_vo);
}

/** Gives each of the rows the largest error among them. */
void share_largest(const std::vector<size_t>& rows, std::vector<double>* errors) {
  double largest = 0;
  for (size_t at : rows) largest = std::max(largest, (*errors)[at]);
  for (size_t at : rows) (*errors)[at] = largest;
}

/** Queries `tokens` of request r, all heads. */
void answer_request(const check::Call& call, int32_t r, const std::vector<int32_t>& tokens,
                    Truth* truth) {
  Keys keys;
  for (int32_t kv_head = 0; kv_head < call.problem.kv_heads; ++kv_head) {
    keys.positions = seen_positions(call, r, kv_head, tokens);
    decode_keys(call, r, kv_head, &keys);
    for (int32_t i : tokens) {
      std::vector<size_t> seen;
      for (size_t x = 0; x < keys.n(); ++x) {
        if (visible(call, r, i, keys.positions[x], kv_head)) seen.push_back(x);
      }
      for (int32_t g = 0; g < call.group_size(); ++g) {
        answer_row(call, r, i, kv_head * call.group_size() + g, keys, seen, truth);
      }
    }
  }
  std::vector<size_t> rows;
  for (int32_t i : tokens) {
    const size_t first = static_cast<size_t>(call.qo_indptr[r] + i) * call.problem.qo_heads;
    for (int32_t head = 0; head < call.problem.qo_heads; ++head) rows.push_back(first + head);
  }
  share_largest(rows, &truth->naive_o_err);
  share_largest(rows, &truth->naive_lse_err);
}

}  // namespace

Truth answer_rows(const check::Call& call, const std::vector<int32_t>& rows) {
  const size_t num_rows = static_cast<size_t>(call.num_rows()) * call.problem.qo_heads;
  Truth truth;
  truth.o.assign(num_rows * call.problem.head_dim_vo, 0);
  truth.lse.assign(num_rows, 0);
  truth.naive_o_err.assign(num_rows, 0);
  truth.naive_lse_err.assign(num_rows, 0);
  truth.max_abs_v.assign(num_rows, 0);
  if (call.problem.kv_dtype == ATTNFOLD_BF16 || call.problem.kv_dtype == ATTNFOLD_F16) {
    truth.rounding_o.assign(truth.o.size(), 0);
    truth.rounding_limit_o.assign(truth.o.size(), 0);
  }

  std::vector<int32_t> sorted = rows;
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  for (int32_t r = 0; r < call.batch; ++r) {
    std::vector<int32_t> tokens;
    for (int32_t row : sorted) {
      if (row >= call.qo_indptr[r] && row < call.qo_indptr[r + 1])
        tokens.push_back(row - call.qo_indptr[r]);
    }
    if (!tokens.empty()) answer_request(call, r, tokens, &truth);
  }
  return truth;
}

Truth answer(const check::Call& call) {
  std::vector<int32_t> rows(call.num_rows());
  std::iota(rows.begin(), rows.end(), 0);
  return answer_rows(call, rows);
}

}  // namespace attnfold::ref
