// What the named cases share: drawing and filling calls, running plans, judging answers.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "attnfold/cache.h"
#include "check/call.h"
#include "check/cases.h"
#include "check/generate.h"
#include "check/judge.h"
#include "ref/oracle.h"

/** Returns from the enclosing function with the text of what is wrong, if anything is. */
#define ATTNFOLD_HOLD(expression)                                       \
  do {                                                                  \
    if (std::string wrong = (expression); !wrong.empty()) return wrong; \
  } while (false)

namespace attnfold::check::cases {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr attnfold_mask_kind kNone = ATTNFOLD_MASK_NONE;
constexpr attnfold_mask_kind kCausal = ATTNFOLD_MASK_CAUSAL;
constexpr int32_t kRagged = 0;  // as a page size: no pages

/** What a case runs under. */
struct Context {
  uint64_t seed;
  const char* isa;
};

/** False for the scalar row, unoptimised and sanitizer builds: wide cases then keep their lengths
 * and shed heads. */
bool is_fast(const Context& context);

struct Shape {
  int32_t qo_heads, kv_heads, head_dim_qk, head_dim_vo;
};

using Lengths = std::vector<int32_t>;

Spec make_spec(Shape shape, DType dtype, int32_t page_size, attnfold_mask_kind mask, Lengths qo_len,
               Lengths kv_len);

/** `generate`, without the random draw: zeros, pages in order.  For calls whose values the case
 * sets itself. */
Call zero_call(const Spec& spec);

/** Uniform noise in (-1, 1), a pure function of its arguments. */
float noise(uint64_t seed, int64_t a, int64_t b, int64_t c, int64_t d);

/** Sets q, k or v from value(request, token, head, element), at every token of every request. */
template <typename Value>
void fill_q(Call& call, Value value) {
  for (int32_t r = 0; r < call.batch; ++r) {
    for (int32_t row = call.qo_indptr[r]; row < call.qo_indptr[r + 1]; ++row) {
      for (int32_t h = 0; h < call.problem.qo_heads; ++h) {
        const int64_t at = call.q_offset + row * call.q_strides.token + h * call.q_strides.head;
        for (int32_t e = 0; e < call.problem.head_dim_qk; ++e) {
          store_f32(call.q->data(), static_cast<DType>(call.problem.q_dtype), at + e,
                    value(r, row - call.qo_indptr[r], h, e));
        }
      }
    }
  }
}

template <typename Value>
void fill_kv_tensor(Call& call, Buffer& buffer, const Strides& strides, int64_t offset,
                    int32_t width, Value value) {
  for (int32_t r = 0; r < call.batch; ++r) {
    for (int32_t token = 0; token < call.kv_len[r]; ++token) {
      const int64_t base = call.kv_element_offset(r, token, strides, offset);
      for (int32_t h = 0; h < call.problem.kv_heads; ++h) {
        for (int32_t e = 0; e < width; ++e) {
          store_f32(buffer.data(), static_cast<DType>(call.problem.kv_dtype),
                    base + h * strides.head + e, value(r, token, h, e));
        }
      }
    }
  }
}

template <typename Value>
void fill_k(Call& call, Value value) {
  fill_kv_tensor(call, *call.k, call.k_strides, call.k_offset, call.problem.head_dim_qk, value);
}

template <typename Value>
void fill_v(Call& call, Value value) {
  fill_kv_tensor(call, *call.v, call.v_strides, call.v_offset, call.problem.head_dim_vo, value);
}

/** Gives request r bits over its last width[r] keys, packed: bit(request, query, key's position).
 */
template <typename Bit>
void set_mask(Call& call, const Lengths& width, Bit bit) {
  call.mask_width = width;
  call.mask_indptr.assign(1, 0);
  call.mask_bits.clear();
  for (int32_t r = 0; r < call.batch; ++r) {
    for (int32_t i = 0; i < call.qo_indptr[r + 1] - call.qo_indptr[r]; ++i) {
      for (int32_t b = 0; b < width[r]; ++b) {
        if (b % 8 == 0) call.mask_bits.push_back(0);
        if (bit(r, i, call.kv_len[r] - width[r] + b))
          call.mask_bits.back() = static_cast<uint8_t>(call.mask_bits.back() | 1 << (b % 8));
      }
    }
    call.mask_indptr.push_back(static_cast<int64_t>(call.mask_bits.size()));
  }
}

/** Sets every element of the buffer, slots and gaps included. */
void fill_buffer(Buffer& buffer, DType dtype, float value);

/** Noise in q, k and v, for calls from zero_call. */
void fill_noise(Call& call, uint64_t seed);

/** Sets all elements of one physical page of k and v. */
void fill_page(Call& call, int32_t page, float value);

/** A copy whose packed pool has `extra` more pages at its end, filled with `value`; the call's own
 * pages stay. */
Call with_extra_pages(const Call& call, int32_t extra, float value);

/** Copies with buffers of their own. */
Call deep_copy(const Call& call);

/**
 * Writes keys [begin[r], end[r]) of each request of `from` into the paged pool of `to`, as an
 * engine does: slots from the block table of `to`, then append, with two padded tokens of NaN
 * behind.
 */
std::string append_keys(const Call& from, const Lengths& begin, const Lengths& end, Call& to);

/** The pool of k and v that a paged call reads. */
attnfold_kv_pool pool_of(Call& call);

/** Token i of request r as a decode over the request's first kv_len keys, sharing the call's
 * buffers; for requests without mask bits. */
Call token_call(const Call& call, int32_t r, int32_t i, int32_t kv_len);

/** A ragged call in which request r starts `skip[r]` keys later, and has kv_len[r] keys from there.
 */
Call skip_keys(const Call& call, const Lengths& skip, const Lengths& kv_len);

attnfold_execution execution(const Context& context, int32_t num_workers = 0, uint64_t cut_seed = 0,
                             int32_t num_threads = 0);

/** "" or the status and text of a failed run; the answer in `out`. */
std::string run(const Call& call, const attnfold_execution& execution, Answer& out);

/** The answer against the whole oracle. */
std::string judge_answer(const Call& call, const Answer& answer);

struct TokenRef {
  int32_t request, token;
};

/** Only these tokens against the oracle; the mask must be causal, or none without a window_right.
 */
std::string judge_tokens(const Call& call, const Answer& answer, std::span<const TokenRef> tokens);
std::string judge_tokens(const Call& call, const Answer& answer, std::span<const TokenRef> tokens,
                         Bound bound);

/** About `per_request` tokens of every request: the first, the last, and evenly between. */
std::vector<TokenRef> sample_tokens(const Call& call, int32_t per_request);

/** Runs by default and judges every row. */
std::string right(const Call& call, const Context& context);

/** Runs, judges some tokens. */
std::string right_on_sample(const Call& call, const Context& context, int32_t per_request);

/** Runs with each number of workers and as many seeds of random cuts: the same bytes.  The first
 * answer goes to `out`. */
std::string same_under(const Call& call, const Context& context,
                       std::initializer_list<int32_t> workers, Answer& out);

/** The two above: every row right, the same under every number of workers. */
std::string right_under(const Call& call, const Context& context,
                        std::initializer_list<int32_t> workers);

std::string same_bytes(const Call& call, const Answer& a, const Answer& b, const std::string& what);

/** The rows [row, row + n) of `part` are rows [whole_row, ..) of `whole`, byte for byte. */
std::string same_rows(const Call& part_call, const Answer& part, int32_t part_row,
                      const Answer& whole, int32_t whole_row, int32_t n, const std::string& what);

/** Element (row, head, e) of an answer; its lse. */
float o_at(const Call& call, const Answer& answer, int32_t row, int32_t head, int32_t e);
float lse_at(const Call& call, const Answer& answer, int32_t row, int32_t head);

/** The row is o = 0 (positive or negative zero), lse = -inf or the sink logit, for every head
 * or one. */
std::string row_is_empty(const Call& call, const Answer& answer, int32_t row, int32_t head = -1);

/** Every element and lse of the answer is finite. */
std::string all_finite(const Call& call, const Answer& answer);

/** `text` with a heading in front, or "". */
std::string in(const std::string& heading, const std::string& text);

/** A plan that stays while its lengths change. */
class Plan {
 public:
  Plan(const attnfold_problem& problem, const attnfold_execution& execution);
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  std::string update(const Call& call);
  std::string run(
      const Call& call,
      Answer& out);  // on the lengths of the last update, with a workspace of the first size
  attnfold_plan* get() const { return plan_; }
  const std::string& error() const { return error_; }

 private:
  attnfold_plan* plan_ = nullptr;
  std::string error_;
  std::vector<float> workspace_;
};

/** Runs into o and lse that have gaps between heads and rows, and canaries in them and around; the
 * answer is packed.
 *  "" or what failed, or which canary did not survive. */
std::string run_spaced(const Call& call, const attnfold_execution& execution, Answer& out);

/** Outputs of attention in float32, by row and head, to be merged. */
struct State {
  std::vector<float> o, lse;  // [rows, heads, head_dim_vo], [rows, heads]
  bool rounds_weights = false;
};
State state_of(const Call& call, const Answer& answer);
attnfold_state view(State& state);
/** Leaves of a part need not be leaves of the whole. */
Bound bound_of_merged(const State& state);

/** Merges into a fresh State; "" or the status and text. */
std::string merge(int64_t rows, int32_t heads, int32_t width, std::span<State> states, State& out);

/** A merged state against the oracle's answer to the whole call, in float32. */
std::string judge_state(const Call& call, const State& state, const ref::Truth& truth);

std::string text_of(double value);

/** The sections of the registry. */
std::span<const NamedCase> empty_cases();
std::span<const NamedCase> lse_cases();
std::span<const NamedCase> range_cases();
std::span<const NamedCase> bound_cases();
std::span<const NamedCase> overflow_cases();
std::span<const NamedCase> stale_cases();
std::span<const NamedCase> shape_cases();
std::span<const NamedCase> window_cases();
std::span<const NamedCase> zero_cases();
std::span<const NamedCase> schedule_cases();
std::span<const NamedCase> rank_cases();
std::span<const NamedCase> stride_cases();
std::span<const NamedCase> score_cases();
std::span<const NamedCase> mask_cases();
std::span<const NamedCase> byte_cases();

}  // namespace attnfold::check::cases
