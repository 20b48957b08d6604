// Named cases: lengths around leaf, page and cut boundaries.
#include "check/cases_util.h"

namespace attnfold::check::cases {
namespace {

std::string splits_cover_appended_keys(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const Call call =
      generate(make_spec({8, 8, 128, 128}, DType::f16, kRagged, kNone, {1}, {256 + 196}), seed);
  ATTNFOLD_HOLD(right_under(call, x, {1, 2}));
  Call cached = zero_call(make_spec({8, 8, 128, 128}, DType::f16, 16, kNone, {1}, {256 + 196}));
  cached.q = call.q;
  cached.q_strides = call.q_strides;
  cached.q_offset = call.q_offset;
  fill_buffer(*cached.k, DType::f16, kNaN);
  fill_buffer(*cached.v, DType::f16, kNaN);
  ATTNFOLD_HOLD(append_keys(call, {0}, {256}, cached));
  ATTNFOLD_HOLD(append_keys(call, {256}, {256 + 196}, cached));
  Answer direct, appended;
  ATTNFOLD_HOLD(same_under(call, x, {1, 2}, direct));
  ATTNFOLD_HOLD(same_under(cached, x, {1, 2}, appended));
  return same_bytes(call, direct, appended, "256 cached keys and 196 appended");
}

std::string varlen_paged_split(uint64_t seed, const char* isa) {
  for (int32_t page_size : {16, 256}) {
    for (const Lengths& qo_len : {Lengths{1, 3, 5, 1}, Lengths{1, 1, 1, 1}}) {
      const Spec spec =
          make_spec({8, 2, 128, 128}, DType::f16, page_size, kCausal, qo_len, {100, 700, 33, 1025});
      ATTNFOLD_HOLD(in("page " + std::to_string(page_size),
                       right_under(generate(spec, seed), {seed, isa}, {1, 2, 4, 7})));
    }
  }
  return "";
}

std::string auto_splits_paged_nan(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t kv_heads = is_fast(x) ? 2 : 1;
  for (int32_t page_size : {256, 16}) {
    const Spec spec = make_spec({2 * kv_heads, kv_heads, 128, 128}, DType::bf16, page_size, kNone,
                                Lengths(8, 1), Lengths(8, 512));
    Call source = zero_call(spec);
    fill_noise(source, seed);
    Call call = deep_copy(source);
    fill_buffer(*call.k, DType::bf16, kNaN);
    fill_buffer(*call.v, DType::bf16, kNaN);
    Lengths before(8, 0);
    Plan automatic(call.problem, execution(x)), single(call.problem, execution(x, 1));
    for (int32_t step = 1; step <= 512; step += is_fast(x) && page_size == 16 ? 1 : 7) {
      call.kv_len.assign(8, step);
      Answer a, b;
      const std::string where =
          "page " + std::to_string(page_size) + ", step " + std::to_string(step);
      ATTNFOLD_HOLD(in(where, append_keys(source, before, call.kv_len, call)));
      before = call.kv_len;
      ATTNFOLD_HOLD(in(where, automatic.update(call)));
      ATTNFOLD_HOLD(in(where, automatic.run(call, a)));
      ATTNFOLD_HOLD(in(where, single.update(call)));
      ATTNFOLD_HOLD(in(where, single.run(call, b)));
      ATTNFOLD_HOLD(in(where, all_finite(call, a)));
      ATTNFOLD_HOLD(same_bytes(call, a, b, where));
      if (step % 127 == 1) ATTNFOLD_HOLD(in(where, judge_answer(call, a)));
    }
  }
  return "";
}

std::string split_count_agreement(uint64_t seed, const char* isa) {
  const Call call =
      generate(make_spec({16, 8, 128, 128}, DType::bf16, kRagged, kNone, {1}, {4096}), seed);
  return right_under(call, {seed, isa}, {1, 2, 3, 5, 16, 32, 64, 128});
}

std::string noncausal_decode_tile_tail(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (int32_t q_len : {1, 3}) {
    for (int32_t kv_len : {16, 64, 255, 256, 257}) {
      Call call = zero_call(make_spec({8, 8, 128, 128}, DType::bf16, 16, kNone, {q_len}, {kv_len}));
      fill_v(call, [&](int r, int t, int h, int e) { return noise(seed, r, t, h, e); });
      ATTNFOLD_HOLD(in(std::to_string(kv_len) + " keys", right_under(call, x, {1, 3})));
    }
  }
  return "";
}

std::string extra_page_in_table(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Call exact =
      zero_call(make_spec({8, 2, 128, 128}, DType::bf16, 16, kNone, {1, 1, 1}, {16, 32, 48}));
  fill_noise(exact, seed);
  Call extra = with_extra_pages(exact, 1, 50.0f);
  const int32_t page = static_cast<int32_t>(extra.problem.num_pages) - 1;
  extra.block_table_stride = exact.block_table_stride + 1;
  extra.block_table.clear();
  for (int32_t r = 0; r < 3; ++r) {
    for (int32_t i = 0; i < extra.block_table_stride; ++i) {
      extra.block_table.push_back(
          i * 16 < exact.kv_len[r] ? exact.block_table[r * exact.block_table_stride + i] : page);
    }
  }
  Answer a, b;
  ATTNFOLD_HOLD(run(exact, execution(x), a));
  ATTNFOLD_HOLD(run(extra, execution(x), b));
  ATTNFOLD_HOLD(judge_answer(exact, a));
  return same_bytes(exact, a, b, "an extra page in the table");
}

std::string cpu_chunked_prefill_partial_mask_block(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t kv_heads = is_fast(x) ? 2 : 1, group = is_fast(x) ? 4 : 1;
  Call call = zero_call(make_spec({group * kv_heads, kv_heads, 64, 64}, DType::f32, kRagged,
                                  kCausal, {1500}, {1500}));
  fill_noise(call, seed);
  Answer whole;
  ATTNFOLD_HOLD(run(call, execution(x), whole));
  ATTNFOLD_HOLD(judge_tokens(call, whole, sample_tokens(call, 16)));
  for (int32_t begin = 0; begin < 1500; begin += 300) {
    const Call chunk = chunk_of(call, 0, begin, begin + 300);
    Answer part;
    ATTNFOLD_HOLD(run(chunk, execution(x), part));
    ATTNFOLD_HOLD(
        same_rows(chunk, part, 0, whole, begin, 300, "chunk at " + std::to_string(begin)));
  }
  return "";
}

std::string cpu_mixed_batch_d96_block96(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const bool fast = is_fast(x);
  const int32_t kv_heads = fast ? 3 : 1, long_q = fast ? 2345 : 345, tail_q = fast ? 134 : 34;
  Call call = zero_call(make_spec({3 * kv_heads, kv_heads, 96, 96}, DType::bf16, 96, kCausal,
                                  {long_q, 5, 3, tail_q}, {long_q, 5, 16, 5131}));
  fill_noise(call, seed);
  return right_on_sample(call, x, 9);
}

std::string sequence_shorter_than_page(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (DType type : {DType::f16, DType::bf16}) {
    for (int32_t page_size : {2, 4, 16}) {
      Call call = zero_call(make_spec({32, 8, 64, 64}, type, page_size, kCausal, {1, 1}, {1, 1}));
      fill_q(call, [&](int, int t, int h, int e) { return noise(seed, 0, t, h, e); });
      fill_k(call, [&](int, int t, int h, int e) { return noise(seed, 1, t, h, e); });
      fill_v(call, [&](int, int t, int h, int e) { return noise(seed, 2, t, h, e); });
      Answer answer;
      ATTNFOLD_HOLD(run(call, execution(x), answer));
      ATTNFOLD_HOLD(judge_answer(call, answer));
      ATTNFOLD_HOLD(same_rows(call, answer, 0, answer, 1, 1, "two equal requests"));
      for (int32_t h = 0; h < 32; ++h) {
        const int64_t at = call.kv_element_offset(0, 0, call.v_strides, call.v_offset) +
                           h / 4 * call.v_strides.head;
        if (o_at(call, answer, 0, h, 63) != load_f32(call.v->data(), type, at + 63))
          return "o is not V of the only key";
      }
    }
  }
  return "";
}

constexpr NamedCase kCases[] = {
    {"splits_cover_appended_keys",
     "two workers attend all 452 keys, also when 196 of them are appended to a cache",
     "Dao-AILab/flash-attention#778", splits_cover_appended_keys},
    {"varlen_paged_split", "any number of workers gives the reference on a ragged paged batch",
     "Dao-AILab/flash-attention#1217", varlen_paged_split},
    {"auto_splits_paged_nan",
     "a decode whose cache grows by append is finite at each step and the same as from one worker",
     "pytorch/torchtitan#3235", auto_splits_paged_nan},
    {"split_count_agreement", "1 to 128 workers: the same bits, all right",
     "Dao-AILab/flash-attention#1647", split_count_agreement},
    {"noncausal_decode_tile_tail", "equal weights give the plain mean at every tail of a tile",
     "flashinfer-ai/flashinfer#3716", noncausal_decode_tile_tail},
    {"extra_page_in_table", "lengths, not the number of table entries, say what is read",
     "pegainfer-project/pegainfer#291", extra_page_in_table},
    {"cpu_chunked_prefill_partial_mask_block", "chunks of 300 give the bits of one prefill",
     "pytorch/executorch#9105", cpu_chunked_prefill_partial_mask_block},
    {"cpu_mixed_batch_d96_block96", "head dim 96 with pages of 96 is right in a mixed batch",
     "vllm-project/vllm#27954", cpu_mixed_batch_d96_block96},
    {"sequence_shorter_than_page", "one key in a larger page: o is its V, in every request",
     "flashinfer-ai/flashinfer#725", sequence_shorter_than_page},
};

}  // namespace

std::span<const NamedCase> bound_cases() { return kCases; }

}  // namespace attnfold::check::cases
