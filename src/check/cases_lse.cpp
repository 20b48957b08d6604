// Named cases: sign, base and layout of lse.
#include <algorithm>

#include "check/cases_util.h"

namespace attnfold::check::cases {
namespace {

std::string lse_base_decode_mla(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const Call call =
      generate(make_spec({1, 1, 576, 512}, DType::bf16, 1, kNone, {1, 1}, {1600, 1600}), seed);
  return right_under(call, x,
                     {1, 4});  // the oracle's lse is a natural log: a factor of ln 2 cannot pass
}

/** A causal call over prefix + suffix keys, and its two parts: all rows over the prefix, and the
 * rest causally. */
struct PrefixSplit {
  Call whole, prefix, suffix;
};

PrefixSplit split_prefix(const Spec& spec, const Lengths& prefix_len, uint64_t seed) {
  PrefixSplit s;
  s.whole = zero_call(spec);
  fill_noise(s.whole, seed);
  s.whole.problem.o_dtype = ATTNFOLD_F32;
  s.prefix = s.whole;
  s.prefix.problem.mask = kNone;
  s.prefix.kv_len = prefix_len;
  Lengths rest;
  for (int32_t r = 0; r < s.whole.batch; ++r) rest.push_back(s.whole.kv_len[r] - prefix_len[r]);
  if (spec.problem.kv_storage == ATTNFOLD_KV_RAGGED) {
    s.suffix = skip_keys(s.whole, prefix_len, rest);
    return s;
  }
  s.suffix = s.whole;
  s.suffix.kv_len = rest;
  for (int32_t r = 0; r < s.whole.batch; ++r) {  // the suffix starts at a page
    const auto begin = s.suffix.block_table.begin() + r * s.suffix.block_table_stride;
    std::rotate(begin, begin + prefix_len[r] / spec.problem.page_size,
                begin + s.suffix.block_table_stride);
  }
  return s;
}

std::string lse_base_merge_prefix_suffix(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t heads = is_fast(x) ? 16 : 2;
  const Spec spec =
      make_spec({heads, heads, 192, 128}, DType::bf16, 64, kCausal, {64}, {3072 + 64});
  const PrefixSplit s = split_prefix(spec, {3072}, seed);
  Answer prefix, suffix;
  ATTNFOLD_HOLD(run(s.prefix, execution(x), prefix));
  ATTNFOLD_HOLD(run(s.suffix, execution(x), suffix));
  State sides[2] = {state_of(s.prefix, prefix), state_of(s.suffix, suffix)};
  State merged;
  ATTNFOLD_HOLD(merge(64, heads, 128, sides, merged));
  Answer as_answer;
  as_answer.o = Buffer(merged.o.size() * sizeof(float));
  std::copy(merged.o.begin(), merged.o.end(), reinterpret_cast<float*>(as_answer.o.data()));
  as_answer.lse = merged.lse;
  ATTNFOLD_HOLD(
      judge_tokens(s.whole, as_answer, sample_tokens(s.whole, 4), bound_of_merged(merged)));
  double weight = 0;  // of the suffix in the last token, whose 64 keys of 3136 weigh about 2 %
  for (int32_t h = 0; h < heads; ++h) {
    weight += std::exp(sides[1].lse[63 * heads + h] - merged.lse[63 * heads + h]) / heads;
  }
  return weight > 0.01 && weight < 0.04
             ? ""
             : "the suffix weighs " + text_of(weight) + ", expected about 0.02";
}

std::string lse_base_cp_reduce(uint64_t, const char*) {
  State sides[2];  // partition functions 2 and 8
  sides[0].o = {1.0f};
  sides[1].o = {0.0f};
  sides[0].lse = {std::log(2.0f)};
  sides[1].lse = {std::log(8.0f)};
  State both[2] = {sides[0], sides[1]}, swapped[2] = {sides[1], sides[0]};
  for (State* order : {both, swapped}) {
    State merged;
    ATTNFOLD_HOLD(merge(1, 1, 1, std::span<State>(order, 2), merged));
    if (std::abs(merged.o[0] - 0.2) > 0.2 * 0x1p-22)
      return "expected o 0.2, got " + text_of(merged.o[0]);
    if (std::abs(merged.lse[0] - std::log(10.0)) > 0x1p-21)
      return "expected lse ln 10, got " + text_of(merged.lse[0]);
  }
  return "";
}

std::string lse_varlen_packed_layout(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t heads = is_fast(x) ? 8 : 2;
  const Lengths lengths = {825, 700, 523};
  const Call call = generate(
      make_spec({heads, heads, 64, 64}, DType::bf16, kRagged, kCausal, lengths, lengths), seed);
  return right_on_sample(call, x, 9);
}

std::string lse_head_token_transpose(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const Spec spec =
      make_spec({6, 6, 192, 128}, DType::bf16, kRagged, kCausal, {4, 4, 4}, {12, 4, 9});
  const PrefixSplit s = split_prefix(spec, {8, 0, 5}, seed);
  const Call paged =
      repage(s.prefix, 16, ATTNFOLD_NHD, false, seed);  // the same prefix keys, in pages
  Answer prefix, suffix;
  ATTNFOLD_HOLD(run(paged, execution(x), prefix));
  ATTNFOLD_HOLD(run(s.suffix, execution(x), suffix));
  State sides[2] = {state_of(paged, prefix), state_of(s.suffix, suffix)};
  State merged;
  ATTNFOLD_HOLD(merge(12, 6, 128, sides, merged));
  return judge_state(s.whole, merged, ref::answer(s.whole));
}

std::string lse_unsplit_tile_noncausal(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t heads = is_fast(x) ? 4 : 1, q_len = is_fast(x) ? 200 : 20;
  Spec spec = make_spec({heads, heads, 192, 128}, DType::bf16, kRagged, kNone, {5, 64, q_len},
                        {30, 500, 9000});
  Call call = zero_call(spec);
  fill_noise(call, seed);
  Answer answer;
  ATTNFOLD_HOLD(same_under(call, x, {2, 7}, answer));
  ATTNFOLD_HOLD(judge_tokens(call, answer, sample_tokens(call, 3)));
  const PrefixSplit s = [&] {  // the same with the last 30, 100 and 1000 keys apart
    PrefixSplit split = split_prefix(spec, {1, 400, 8000}, seed);
    split.suffix.problem.mask = split.whole.problem.mask = kNone;
    return split;
  }();
  Answer prefix, suffix;
  ATTNFOLD_HOLD(run(s.prefix, execution(x), prefix));
  ATTNFOLD_HOLD(run(s.suffix, execution(x), suffix));
  State sides[2] = {state_of(s.prefix, prefix), state_of(s.suffix, suffix)};
  State merged;
  ATTNFOLD_HOLD(merge(69 + q_len, heads, 128, sides, merged));
  Answer as_answer;
  as_answer.o = Buffer(merged.o.size() * sizeof(float));
  std::copy(merged.o.begin(), merged.o.end(), reinterpret_cast<float*>(as_answer.o.data()));
  as_answer.lse = merged.lse;
  return in("merged",
            judge_tokens(s.whole, as_answer, sample_tokens(s.whole, 3), bound_of_merged(merged)));
}

std::string lse_split_batch_decode(uint64_t seed, const char* isa) {
  const Call call =
      generate(make_spec({8, 2, 128, 128}, DType::f16, 16, kNone, {1, 1}, {100, 8192}), seed);
  return right_under(call, {seed, isa}, {1, 2, 16});
}

constexpr NamedCase kCases[] = {
    {"lse_base_decode_mla", "lse is the natural log", "flashinfer-ai/flashinfer#2113",
     lse_base_decode_mla},
    {"lse_base_merge_prefix_suffix",
     "prefix and suffix merge to one pass; the suffix weighs its share", "sgl-project/sglang#40903",
     lse_base_merge_prefix_suffix},
    {"lse_base_cp_reduce",
     "partition functions 2 and 8 merge to o = 0.2, lse = ln 10, in either order",
     "sgl-project/sglang#33064", lse_base_cp_reduce},
    {"lse_varlen_packed_layout",
     "lse of a ragged batch lies with its o, whatever the longest request",
     "pytorch/pytorch#187872", lse_varlen_packed_layout},
    {"lse_head_token_transpose", "lse is [rows, heads]: chunk and new tokens merge to one pass",
     "vllm-project/vllm-xpu-kernels#479", lse_head_token_transpose},
    {"lse_unsplit_tile_noncausal",
     "lse is right in rows that one worker folds and in rows that many share", "ROCm/aiter#3606",
     lse_unsplit_tile_noncausal},
    {"lse_split_batch_decode", "lse does not depend on the number of workers",
     "flashinfer-ai/flashinfer#58", lse_split_batch_decode},
};

}  // namespace

std::span<const NamedCase> lse_cases() { return kCases; }

}  // namespace attnfold::check::cases
