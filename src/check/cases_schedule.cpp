// Named cases: batch invariance, run-to-run determinism, shared prefixes.
#include <algorithm>

#include "check/cases_util.h"

namespace attnfold::check::cases {
namespace {

std::string splits_from_whole_batch(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (const Shape shape : {Shape{16, 2, 128, 128}, Shape{8, 8, 128, 128}}) {
    const Lengths kv_len = {3000, 40, 17, 9000, 9, 1, 64, 65};
    Call batch =
        zero_call(make_spec(shape, DType::bf16, 16, kCausal, {1, 40, 1, 1, 9, 1, 1, 1}, kv_len));
    fill_noise(batch, seed);
    Answer in_batch, alone;
    ATTNFOLD_HOLD(same_under(batch, x, {1, 2, 7}, in_batch));
    const Call first = token_call(batch, 0, 0, 3000);
    ATTNFOLD_HOLD(same_under(first, x, {2, 5}, alone));
    ATTNFOLD_HOLD(judge_answer(first, alone));
    ATTNFOLD_HOLD(
        same_rows(first, alone, 0, in_batch, 0, 1, "request 0 alone and in a batch of 8"));
  }
  return "";
}

// The size of a leaf is part of the numerics and not to be had as an argument; a number of workers
// is, and -1 is refused.
std::string fixed_tile_not_fixed_count(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (int32_t page_size : {1, 16}) {
    Call five = zero_call(
        make_spec({8, 2, 128, 128}, DType::bf16, page_size, kNone, Lengths(5, 1), Lengths(5, 530)));
    fill_noise(five, seed);
    for (int32_t kv_len = 513; kv_len <= 530; kv_len += is_fast(x) ? 1 : 5) {
      five.kv_len = {kv_len, 530, 513, 1, 300};
      const std::string where = std::to_string(kv_len) + " keys";
      Answer batch, alone;
      ATTNFOLD_HOLD(in(where, same_under(five, x, {1, 3}, batch)));
      const Call one = token_call(five, 0, 0, kv_len);
      ATTNFOLD_HOLD(in(where, same_under(one, x, {2, 5}, alone)));
      ATTNFOLD_HOLD(same_rows(one, alone, 0, batch, 0, 1, where));
      if (kv_len % 8 == 1) ATTNFOLD_HOLD(in(where, judge_answer(one, alone)));
    }
    attnfold_plan* plan = nullptr;
    const attnfold_execution e = execution(x, -1);
    if (attnfold_plan_create(&five.problem, &e, &plan) != ATTNFOLD_INVALID_ARGUMENT) {
      attnfold_plan_destroy(plan);
      return "num_workers -1 was taken";
    }
  }
  return "";
}

// A chunk may be cut anywhere: the contract for unaligned cuts is that of aligned ones.
std::string chunk_cut_alignment(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t kv_heads = is_fast(x) ? 2 : 1;
  Call call = zero_call(
      make_spec({4 * kv_heads, kv_heads, 128, 128}, DType::bf16, 16, kCausal, {512}, {512}));
  fill_noise(call, seed);
  Answer whole;
  ATTNFOLD_HOLD(run(call, execution(x), whole));
  ATTNFOLD_HOLD(judge_tokens(call, whole, sample_tokens(call, 9)));
  for (const Lengths& chunks : {Lengths{100, 200, 212}, Lengths{256, 256}}) {
    int32_t begin = 0;
    for (int32_t n : chunks) {
      const Call chunk = chunk_of(call, 0, begin, begin + n);
      Answer part;
      ATTNFOLD_HOLD(run(chunk, execution(x), part));
      ATTNFOLD_HOLD(
          same_rows(chunk, part, 0, whole, begin, n, "chunk at " + std::to_string(begin)));
      begin += n;
    }
  }
  return "";
}

std::string run_to_run_nan_splits_16(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Call call = zero_call(make_spec({16, 1, 576, 512}, DType::bf16, 1, kNone, {1}, {2048}));
  fill_noise(call, seed);
  Answer first;
  ATTNFOLD_HOLD(run(call, execution(x), first));
  ATTNFOLD_HOLD(judge_answer(call, first));
  for (int32_t workers : {1, 2, 3, 8, 16, 32}) {
    Plan plan(call.problem, execution(x, workers));
    ATTNFOLD_HOLD(plan.update(call));
    for (int32_t repeat = 0; repeat < (is_fast(x) ? 20 : 1); ++repeat) {
      Answer again;
      ATTNFOLD_HOLD(plan.run(call, again));
      ATTNFOLD_HOLD(all_finite(call, again));
      ATTNFOLD_HOLD(
          same_bytes(call, first, again,
                     std::to_string(workers) + " workers, repeat " + std::to_string(repeat)));
    }
  }
  return "";
}

/** Makes the first `pages` table entries of requests [begin, end) those of request `begin`. */
void share_pages(Call& call, int32_t begin, int32_t end, int32_t pages) {
  for (int32_t r = begin + 1; r < end; ++r) {
    std::copy_n(call.block_table.begin() + begin * call.block_table_stride, pages,
                call.block_table.begin() + r * call.block_table_stride);
  }
}

/** All rows [row, ..) of `call` as one request over the first kv_len keys of request r, unmasked.
 */
Call prefix_call(const Call& call, int32_t r, int32_t row, int32_t kv_len) {
  Call prefix = token_call(call, r, 0, kv_len);
  prefix.q_offset = call.q_offset + row * call.q_strides.token;
  prefix.qo_indptr = {0, call.num_rows() - row};
  prefix.problem.mask = kNone;
  return prefix;
}

/** Every request without its first kv_len keys, which are whole pages. */
Call suffix_call(const Call& call, int32_t kv_len) {
  Call suffix = call;
  for (int32_t r = 0; r < call.batch; ++r) {
    const auto begin = suffix.block_table.begin() + r * suffix.block_table_stride;
    std::rotate(begin, begin + kv_len / call.problem.page_size, begin + suffix.block_table_stride);
    suffix.kv_len[r] -= kv_len;
  }
  return suffix;
}

std::string prefix_covers_whole_request(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (int32_t q0 : {1, 3}) {
    for (int32_t prefix_len : {32, 16}) {
      Call whole = zero_call(
          make_spec({8, 2, 128, 128}, DType::bf16, 16, kCausal, {q0, 1, 4}, {32, 33, 36}));
      whole.problem.o_dtype = ATTNFOLD_F32;
      share_pages(whole, 0, 3, 2);
      fill_noise(whole, seed);
      ATTNFOLD_HOLD(in("in one call", right_under(whole, x, {1, 2})));
      State sides[2];
      // With three tokens over 32 keys, request 0 may not see the whole prefix: it goes by itself.
      const bool apart = q0 == 3 && prefix_len == 32;
      const Call prefix = prefix_call(whole, 1, apart ? q0 : 0, prefix_len);
      Answer answer;
      if (apart) {
        Call own = token_call(whole, 0, 0, 32);
        own.qo_indptr = {0, q0};
        ATTNFOLD_HOLD(run(own, execution(x), answer));
        sides[0] = state_of(own, answer);
      }
      ATTNFOLD_HOLD(run(prefix, execution(x), answer));
      const State rest = state_of(prefix, answer);
      sides[0].o.insert(sides[0].o.end(), rest.o.begin(), rest.o.end());
      sides[0].lse.insert(sides[0].lse.end(), rest.lse.begin(), rest.lse.end());
      const Call suffix = suffix_call(whole, prefix_len);
      ATTNFOLD_HOLD(run(suffix, execution(x), answer));
      sides[1] = state_of(suffix, answer);
      State merged;
      ATTNFOLD_HOLD(merge(whole.num_rows(), 8, 128, sides, merged));
      ATTNFOLD_HOLD(in("prefix " + std::to_string(prefix_len),
                       judge_state(whole, merged, ref::answer(whole))));
    }
  }
  return "";
}

std::string two_prefix_families(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t kv_heads = is_fast(x) ? 2 : 1;
  for (bool only_a : {false, true}) {
    Lengths kv_len;
    for (int32_t i = 0; i < 50; ++i)
      kv_len.push_back(i < 32 || only_a ? 700 + i % 32 : 500 + i - 32);
    Call call = zero_call(make_spec({4 * kv_heads, kv_heads, 128, 128}, DType::bf16, 16, kCausal,
                                    Lengths(50, 1), kv_len));
    const int32_t a_end = only_a ? 50 : 32;
    share_pages(call, 0, a_end, 700 / 16);
    if (!only_a) share_pages(call, 32, 50, 500 / 16);
    fill_noise(call, seed);
    Answer batch;
    ATTNFOLD_HOLD(same_under(call, x, {2, 5}, batch));
    for (int32_t r = 0; r < 50; ++r) {
      const Call one = token_call(call, r, 0, kv_len[r]);
      Answer alone;
      ATTNFOLD_HOLD(run(one, execution(x), alone));
      if (r % 13 == 0) ATTNFOLD_HOLD(judge_answer(one, alone));
      ATTNFOLD_HOLD(same_rows(one, alone, 0, batch, r, 1, "request " + std::to_string(r)));
    }
  }
  return "";
}

std::string prefix_scheduled_as_one_request(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Lengths kv_len;
  for (int32_t i = 0; i < 7; ++i) kv_len.push_back(512 + 3 + i);
  Call whole =
      zero_call(make_spec({8, 2, 128, 128}, DType::bf16, 16, kCausal, Lengths(7, 1), kv_len));
  whole.problem.o_dtype = ATTNFOLD_F32;
  share_pages(whole, 0, 7, 512 / 16);
  fill_noise(whole, seed);
  const Call prefix = prefix_call(whole, 0, 0, 512), suffix = suffix_call(whole, 512);
  Answer a, b;
  ATTNFOLD_HOLD(run(prefix, execution(x), a));
  ATTNFOLD_HOLD(run(suffix, execution(x), b));
  State sides[2] = {state_of(prefix, a), state_of(suffix, b)}, merged;
  ATTNFOLD_HOLD(merge(7, 8, 128, sides, merged));
  return judge_state(whole, merged, ref::answer(whole));
}

std::string cascade_slower_than_plain(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (const Shape shape : {Shape{8, 1, 128, 128}, Shape{64, 8, 128, 128}}) {
    Call call =
        zero_call(make_spec(shape, DType::bf16, 16, kCausal, Lengths(8, 1), Lengths(8, 4000 + 64)));
    share_pages(call, 0, 8, 4000 / 16);
    fill_noise(call, seed);
    attnfold_execution own = execution(x);
    own.prefix_use = ATTNFOLD_PREFIX_OFF;
    Answer shared_answer, own_answer;
    ATTNFOLD_HOLD(run(call, execution(x), shared_answer));
    ATTNFOLD_HOLD(run(call, own, own_answer));
    ATTNFOLD_HOLD(same_bytes(call, own_answer, shared_answer, "a shared prefix"));
    const attnfold_plan_report &a = shared_answer.report, &b = own_answer.report;
    if (a.kv_bytes + a.partial_bytes >= b.kv_bytes + b.partial_bytes ||
        a.total_cost >= b.total_cost)
      return "the plan moves " + std::to_string(a.kv_bytes + a.partial_bytes) +
             " bytes, without sharing " + std::to_string(b.kv_bytes + b.partial_bytes);
  }
  return "";
}

constexpr NamedCase kCases[] = {
    {"splits_from_whole_batch", "a request's bits do not depend on its batch mates",
     "Dao-AILab/flash-attention#2450", splits_from_whole_batch},
    {"fixed_tile_not_fixed_count", "a growing request keeps its bits under any cut and batch",
     "sgl-project/sglang#10425", fixed_tile_not_fixed_count},
    {"chunk_cut_alignment", "chunks cut anywhere have the bits of one prefill",
     "flashinfer-ai/flashinfer#2270", chunk_cut_alignment},
    {"run_to_run_nan_splits_16", "repeats are finite and equal under any number of workers",
     "ROCm/aiter#4350", run_to_run_nan_splits_16},
    {"prefix_covers_whole_request", "a request wholly inside the prefix equals plain attention",
     "vllm-project/vllm#11635", prefix_covers_whole_request},
    {"two_prefix_families", "requests over shared pages equal themselves alone",
     "vllm-project/vllm#22103", two_prefix_families},
    {"prefix_scheduled_as_one_request",
     "a prefix answered as one request of seven rows merges to plain attention",
     "vllm-project/vllm#17283", prefix_scheduled_as_one_request},
    {"cascade_slower_than_plain", "a shared prefix moves fewer bytes and costs less than plain",
     "flashinfer-ai/flashinfer#595", cascade_slower_than_plain},
};

}  // namespace

std::span<const NamedCase> schedule_cases() { return kCases; }

}  // namespace attnfold::check::cases
