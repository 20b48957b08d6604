// Named cases: stale or uninitialised buffers, padded batches, garbage in unused KV slots.
#include <cstring>
#include <tuple>

#include "check/cases_util.h"

namespace attnfold::check::cases {
namespace {

std::string padded_rows_must_be_written(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Lengths kv_len(1024, 0);
  kv_len[0] = 500;
  const Call call = generate(
      make_spec({16, 1, 576, 512}, DType::bf16, 64, kNone, Lengths(1024, 1), kv_len), seed);
  Answer answer;
  ATTNFOLD_HOLD(run(call, execution(x), answer));
  for (int32_t row = 1; row < 1024; ++row) ATTNFOLD_HOLD(row_is_empty(call, answer, row));
  const TokenRef real[] = {{0, 0}};
  return judge_tokens(call, answer, real);
}

std::string replay_longer_than_capture(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t kv_heads = is_fast(x) ? 4 : 1;
  Call call = zero_call(make_spec({4 * kv_heads, kv_heads, 128, 128}, DType::bf16, 16, kNone,
                                  {1, 1, 1, 1}, {50000, 3, 0, 900}));
  fill_noise(call, seed);
  Plan plan(call.problem, execution(x));
  Call brief = call;
  brief.kv_len = {1, 1, 0, 1};
  Answer answer;
  ATTNFOLD_HOLD(plan.update(brief));
  ATTNFOLD_HOLD(plan.run(brief, answer));
  ATTNFOLD_HOLD(in("short", judge_answer(brief, answer)));
  ATTNFOLD_HOLD(plan.update(call));
  ATTNFOLD_HOLD(plan.run(call, answer));
  ATTNFOLD_HOLD(in("long", judge_answer(call, answer)));
  Answer fresh;
  ATTNFOLD_HOLD(run(call, execution(x), fresh));
  return same_bytes(call, answer, fresh, "a plan that was short before");
}

std::string padding_tokens_share_trash_slot(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Call real =
      zero_call(make_spec({8, 2, 64, 64}, DType::bf16, 16, kCausal, Lengths(4, 1), {33, 5, 16, 2}));
  fill_noise(real, seed);
  Call padded = with_extra_pages(real, 16 - static_cast<int32_t>(real.problem.num_pages), kNaN);
  padded.batch = 16;
  padded.problem.max_batch = padded.problem.max_qo_rows = 16;
  for (int32_t r = 4; r < 16; ++r) {
    padded.qo_indptr.push_back(r + 1);
    padded.kv_len.push_back(1);
    padded.block_table.insert(padded.block_table.end(),
                              static_cast<size_t>(padded.block_table_stride), 15);
  }
  padded.q = std::make_shared<Buffer>(16 * static_cast<size_t>(real.q_strides.token) * 2);
  fill_buffer(*padded.q, DType::bf16, kNaN);
  std::memcpy(padded.q->data(), real.q->data(), 4 * static_cast<size_t>(real.q_strides.token) * 2);
  Answer a, b;
  ATTNFOLD_HOLD(run(real, execution(x), a));
  ATTNFOLD_HOLD(judge_answer(real, a));
  ATTNFOLD_HOLD(run(padded, execution(x), b));
  ATTNFOLD_HOLD(same_rows(real, a, 0, b, 0, 4, "12 padded rows beside"));
  // The step before: new keys of 4 requests and of 12 that all write to the one slot.
  Call appended = deep_copy(padded);
  fill_page(appended, 15, 0.0f);
  for (int32_t r = 0; r < 4; ++r) {
    for (const auto& [buffer, strides, offset] :
         {std::tuple(appended.k, appended.k_strides, appended.k_offset),
          std::tuple(appended.v, appended.v_strides, appended.v_offset)}) {
      const int64_t last = appended.kv_element_offset(r, appended.kv_len[r] - 1, strides, offset);
      for (int32_t h = 0; h < 2; ++h) {
        for (int32_t e = 0; e < 64; ++e)
          store_f32(buffer->data(), DType::bf16, last + h * strides.head + e, kNaN);
      }
    }
  }
  Lengths begin = appended.kv_len;
  for (int32_t& n : begin) --n;
  ATTNFOLD_HOLD(append_keys(padded, begin, padded.kv_len, appended));
  Answer c;
  ATTNFOLD_HOLD(run(appended, execution(x), c));
  return same_rows(real, a, 0, c, 0, 4, "appended beside 12 padded tokens");
}

std::string zero_len_padding_writes_page0(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Call call = zero_call(
      make_spec({8, 2, 128, 128}, DType::f16, 16, kCausal, Lengths(4, 1), {17, 30, 0, 0}));
  fill_noise(call, seed);
  call = with_extra_pages(call, 1, kNaN);
  const int32_t nan_page = static_cast<int32_t>(call.problem.num_pages) - 1;
  // Page 0 changes places with the new page of NaN; every unused entry is 0.
  for (std::shared_ptr<Buffer>* b : {&call.k, &call.v}) {
    const size_t bytes = static_cast<size_t>(call.k_strides.page) * 2;
    std::memcpy((*b)->data() + nan_page * bytes, (*b)->data(), bytes);
  }
  fill_page(call, 0, kNaN);
  for (int32_t& id : call.block_table) id = id == 0 ? nan_page : id == 0x7ffffff0 ? 0 : id;
  const Call before = deep_copy(call);
  // Requests without keys are padding to append too: their tokens write nothing, also not slot 0.
  ATTNFOLD_HOLD(append_keys(before, {16, 29, 0, 0}, call.kv_len, call));
  Answer answer;
  ATTNFOLD_HOLD(same_under(call, x, {1, 3}, answer));
  ATTNFOLD_HOLD(judge_answer(call, answer));
  for (int32_t row : {2, 3}) ATTNFOLD_HOLD(row_is_empty(call, answer, row));
  const bool kept = std::memcmp(before.k->data(), call.k->data(), call.k->size()) == 0 &&
                    std::memcmp(before.v->data(), call.v->data(), call.v->size()) == 0;
  return kept ? "" : "the pool was written";
}

/** Every slot that holds no key NaN, then 0: finite, and the same bytes. */
std::string unused_slots_do_not_matter(const Spec& spec, const Context& x) {
  Call zero = zero_call(spec);
  fill_noise(zero, x.seed);
  Call poisoned = deep_copy(zero);
  fill_buffer(*poisoned.k, static_cast<DType>(spec.problem.kv_dtype), kNaN);
  fill_buffer(*poisoned.v, static_cast<DType>(spec.problem.kv_dtype), kNaN);
  fill_noise(poisoned, x.seed);
  poisoned = with_extra_pages(poisoned, 1, kNaN);
  Answer a, b;
  ATTNFOLD_HOLD(run(zero, execution(x), a));
  ATTNFOLD_HOLD(run(poisoned, execution(x), b));
  ATTNFOLD_HOLD(judge_answer(zero, a));
  ATTNFOLD_HOLD(all_finite(zero, b));
  return same_bytes(zero, a, b, "NaN in unused slots");
}

std::string nan_last_page_mla(uint64_t seed, const char* isa) {
  return unused_slots_do_not_matter(make_spec({16, 1, 576, 512}, DType::bf16, 4, kNone, {1}, {13}),
                                    {seed, isa});
}

std::string nan_tail_vector_load(uint64_t seed, const char* isa) {
  for (int32_t width : {64, 128}) {
    const Spec spec = make_spec({8, 8, width, width}, DType::f16, 16, kNone, Lengths(8, 1),
                                {30, 31, 32, 33, 15, 16, 17, 1});
    ATTNFOLD_HOLD(
        in("width " + std::to_string(width), unused_slots_do_not_matter(spec, {seed, isa})));
  }
  return "";
}

std::string expired_token_in_first_window_tile(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (int32_t q_len : {1, 16}) {
    Spec spec = make_spec({8, 2, 128, 128}, DType::bf16, 32, kCausal, {q_len}, {4352});
    spec.problem.window_left = 4094;  // 4095 keys with the token's own
    Call clean = zero_call(spec);
    fill_noise(clean, seed);
    const int32_t first_live = 4352 - q_len - 4094;  // 257, 242
    Answer want;
    ATTNFOLD_HOLD(run(clean, execution(x), want));
    ATTNFOLD_HOLD(judge_answer(clean, want));
    for (bool expired_pages_too : {false, true}) {
      Call poisoned = deep_copy(clean);
      const auto poison = [&](int t) {
        return t == first_live - 1 || (expired_pages_too && t < first_live / 32 * 32);
      };
      fill_k(poisoned, [&](int r, int t, int h, int e) {
        return poison(t) ? kNaN : 1.7f * noise(seed + 1, r, t, h, e);
      });
      fill_v(poisoned, [&](int r, int t, int h, int e) {
        return poison(t) ? kNaN : 1.7f * noise(seed + 2, r, t, h, e);
      });
      if (expired_pages_too) {
        for (int32_t i = 0; i < first_live / 32; ++i) poisoned.block_table[i] = -1;
      }
      Answer got;
      ATTNFOLD_HOLD(run(poisoned, execution(x), got));
      ATTNFOLD_HOLD(all_finite(clean, got));
      ATTNFOLD_HOLD(
          same_bytes(clean, want, got, std::to_string(q_len) + " tokens, NaN in expired keys"));
    }
  }
  return "";
}

constexpr NamedCase kCases[] = {
    {"padded_rows_must_be_written",
     "requests without keys get o = 0, lse = -inf over a buffer of NaN", "vllm-project/vllm#37442",
     padded_rows_must_be_written},
    {"replay_longer_than_capture",
     "a plan that ran short lengths answers long ones, on the same workspace",
     "vllm-project/vllm#20301", replay_longer_than_capture},
    {"padding_tokens_share_trash_slot",
     "padded rows that all write and read one slot of NaN leave the real rows their bits",
     "huggingface/transformers#46765", padding_tokens_share_trash_slot},
    {"zero_len_padding_writes_page0", "padding entries that name page 0 neither read nor write it",
     "nod-ai/amd-shark-ai#665", zero_len_padding_writes_page0},
    {"nan_last_page_mla", "NaN behind the last key of a page changes nothing",
     "flashinfer-ai/flashinfer#941", nan_last_page_mla},
    {"nan_tail_vector_load", "NaN in every unwritten slot and the next page changes nothing",
     "vllm-project/vllm#936", nan_tail_vector_load},
    {"expired_token_in_first_window_tile", "NaN in the key just before the window changes nothing",
     "vllm-project/vllm#53628", expired_token_in_first_window_tile},
};

}  // namespace

std::span<const NamedCase> stale_cases() { return kCases; }

}  // namespace attnfold::check::cases
