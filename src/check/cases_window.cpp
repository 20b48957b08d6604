// Named cases: sliding windows, causal alignment.
#include "check/cases_util.h"

namespace attnfold::check::cases {
namespace {

std::string window_counts_self(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Spec spec = make_spec({2, 2, 32, 32}, DType::f32, kRagged, kCausal, {10}, {10});
  spec.problem.window_left = 3;  // four keys with the token's own
  Call call = deep_copy(generate(spec, seed));
  fill_v(call, [](int, int t, int, int e) { return t == e ? 1.0f : 0.0f; });
  Answer answer;
  ATTNFOLD_HOLD(run(call, execution(x), answer));
  ATTNFOLD_HOLD(judge_answer(call, answer));
  for (int32_t i = 0; i < 10; ++i) {
    for (int32_t e = 0; e < 32; ++e) {
      const bool visible = e >= i - 3 && e <= i;
      const float weight = o_at(call, answer, i, 0, e);
      if (visible != (weight != 0.0f)) {
        return "row " + std::to_string(i) + " gives key " + std::to_string(e) + " the weight " +
               text_of(weight);
      }
    }
  }
  return "";
}

std::string window_excludes_current(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (int32_t window : {1, 2, 7, 8, 9}) {
    Spec spec = make_spec({4, 2, 64, 64}, DType::f16, 8, kCausal, {30}, {30});
    spec.problem.window_left = window - 1;
    Call call = zero_call(spec);
    fill_noise(call, seed);
    Answer whole;
    ATTNFOLD_HOLD(run(call, execution(x), whole));
    ATTNFOLD_HOLD(judge_answer(call, whole));
    for (int32_t i = 0; i < 30; ++i) {
      const Call one = token_call(call, 0, i, i + 1);
      Answer single;
      ATTNFOLD_HOLD(run(one, execution(x), single));
      ATTNFOLD_HOLD(same_rows(one, single, 0, whole, i, 1, "window " + std::to_string(window)));
    }
  }
  return "";
}

std::string window_boundary_block_dropped(uint64_t seed, const char* isa) {
  for (const auto& [page_size, window] : {std::pair{128, 1000}, std::pair{16, 20}}) {
    Spec spec =
        make_spec({8, 2, 128, 128}, DType::bf16, page_size, kCausal, {1, 1, 1}, {999, 1000, 1500});
    spec.problem.window_left = window - 1;
    ATTNFOLD_HOLD(in("window " + std::to_string(window),
                     right_under(generate(spec, seed), {seed, isa}, {1, 4})));
  }
  return "";
}

std::string window_block_granular_cpu(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (int32_t page_size : {16, 128}) {
    Spec spec = make_spec({8, 2, 64, 64}, DType::bf16, page_size, kCausal, {1, 1}, {100, 517});
    spec.problem.window_left = 32;
    Call call = zero_call(spec);
    fill_noise(call, seed);
    Answer plain, marked;
    ATTNFOLD_HOLD(run(call, execution(x), plain));
    ATTNFOLD_HOLD(judge_answer(call, plain));
    fill_v(call, [&](int r, int t, int h, int e) {
      return t == spec.kv_len[r] - 34 ? 1000.0f : 1.7f * noise(seed + 2, r, t, h, e);
    });
    ATTNFOLD_HOLD(run(call, execution(x), marked));
    ATTNFOLD_HOLD(same_bytes(call, plain, marked, "V = 1000 in the key before the window"));
  }
  return "";
}

std::string window_minus_one_unsigned(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Spec spec = make_spec({4, 1, 64, 64}, DType::f16, 16, kCausal, {1, 9}, {70, 9});
  Call call = zero_call(spec);
  fill_noise(call, seed);
  Answer full;
  ATTNFOLD_HOLD(run(call, execution(x), full));
  ATTNFOLD_HOLD(judge_answer(call, full));
  for (int32_t window : {0, 1, 100, 2147483647}) {
    Call other = call;
    other.problem.window_left = window;
    Answer answer;
    ATTNFOLD_HOLD(run(other, execution(x), answer));
    ATTNFOLD_HOLD(in("window " + std::to_string(window), judge_answer(other, answer)));
    if (window >= 100)
      ATTNFOLD_HOLD(same_bytes(call, full, answer, "window " + std::to_string(window)));
    if (window != 0) continue;
    for (int32_t e = 0; e < 64; ++e) {
      const int64_t at = call.kv_element_offset(0, 69, call.v_strides, call.v_offset) + e;
      if (o_at(other, answer, 0, 3, e) != load_f32(call.v->data(), DType::f16, at))
        return "window 0 is not the own key alone";
    }
  }
  return "";
}

std::string window_second_chunk(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Spec spec = make_spec({4, 2, 64, 64}, DType::f32, kRagged, kCausal, {16}, {16});
  spec.problem.window_left = 3;
  Call call = zero_call(spec);
  fill_noise(call, seed);
  Answer whole;
  ATTNFOLD_HOLD(run(call, execution(x), whole));
  ATTNFOLD_HOLD(judge_answer(call, whole));
  for (const auto& [begin, end] : {std::pair{0, 6}, std::pair{6, 12}, std::pair{12, 16}}) {
    const Call chunk = chunk_of(call, 0, begin, end);
    Answer part;
    ATTNFOLD_HOLD(run(chunk, execution(x), part));
    ATTNFOLD_HOLD(same_rows(chunk, part, 0, whole, begin, end - begin, "chunk"));
  }
  return "";
}

// 262144 keys in 64 pages of memory: the table names each page many times.
std::string window_sized_scratch(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t heads = is_fast(x) ? 8 : 1, kv_len = 262144, window = 65536;
  Spec spec = make_spec({heads, heads, 128, 128}, DType::f16, 64, kCausal, {1}, {64 * 64});
  spec.problem.window_left = window - 1;
  Call call = zero_call(spec);
  fill_noise(call, seed);
  call.kv_len = {kv_len};
  call.problem.max_kv_len = kv_len;
  call.block_table_stride = kv_len / 64;
  call.block_table.assign(kv_len / 64, -1);  // expired pages mean nothing
  for (int32_t i = (kv_len - window) / 64; i < kv_len / 64; ++i) {
    call.block_table[i] = static_cast<int32_t>(32 + 31.9f * noise(seed, i, 0, 0, 0));
  }
  ATTNFOLD_HOLD(right_under(call, x, {2, 5}));
  attnfold_problem unwindowed = call.problem;
  unwindowed.window_left = -1;
  unwindowed.max_kv_len = 2 * window;
  const Plan plan(call.problem, execution(x)), reference(unwindowed, execution(x));
  if (plan.get() == nullptr || reference.get() == nullptr) return plan.error() + reference.error();
  const size_t bytes = attnfold_plan_workspace_bytes(plan.get());
  const size_t most = attnfold_plan_workspace_bytes(reference.get());
  return bytes <= most ? ""
                       : "workspace of " + std::to_string(bytes) +
                             " bytes is more than two windows need, " + std::to_string(most);
}

std::string short_kv_in_large_page_window(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Spec spec = make_spec({1, 1, 64, 64}, DType::f16, 128, kNone, {1}, {2});
  spec.problem.window_left = 3;
  spec.problem.window_right = 2;
  Call call = zero_call(spec);
  fill_v(call, [](int, int, int, int) { return 1.0f; });
  Answer answer;
  ATTNFOLD_HOLD(run(call, execution(x), answer));
  ATTNFOLD_HOLD(judge_answer(call, answer));
  if (o_at(call, answer, 0, 0, 63) != 1.0f)
    return "expected o 1, got " + text_of(o_at(call, answer, 0, 0, 63));
  const float lse = lse_at(call, answer, 0, 0);
  return std::abs(lse - std::log(2.0)) < 0x1p-20 ? "" : "expected lse ln 2, got " + text_of(lse);
}

std::string decode_path_forgets_window(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Spec spec =
      make_spec({8, 2, 256, 256}, DType::bf16, 32, kCausal, Lengths(4, 1), {512, 513, 600, 2000});
  spec.problem.window_left = 511;
  spec.problem.sm_scale = 1.0f;
  Call call = zero_call(spec);
  fill_q(call, [](int, int, int, int e) { return e == 0 ? 20.0f : 0.0f; });
  fill_k(call, [](int, int t, int, int e) { return e == 0 && t == 0 ? 1.0f : 0.0f; });
  fill_v(call, [&](int r, int t, int h, int e) { return t == 0 ? 7.0f : noise(seed, r, t, h, e); });
  Answer answer;
  ATTNFOLD_HOLD(same_under(call, x, {1, 3}, answer));
  ATTNFOLD_HOLD(judge_answer(call, answer));
  for (int32_t r = 0; r < 4; ++r) {
    const float got = o_at(call, answer, r, 5, 100);
    if (r == 0 ? got < 6.9f : got > 1.0f)
      return "request " + std::to_string(r) + ": o is " + text_of(got);
  }
  return "";
}

std::string causal_short_query_long_kv(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Call call = zero_call(make_spec({1, 1, 128, 128}, DType::f16, kRagged, kCausal, {3}, {128}));
  fill_v(call, [](int, int t, int, int e) { return t == e ? 1.0f : 0.0f; });
  Answer answer;
  ATTNFOLD_HOLD(run(call, execution(x), answer));
  for (int32_t i = 0; i < 3;
       ++i) {  // equal weights on one-hot values: which keys a row sees can be read
    for (int32_t e = 0; e < 128; ++e) {
      if ((o_at(call, answer, i, 0, e) != 0.0f) != (e <= 125 + i)) {
        return "row " + std::to_string(i) + " is wrong about key " + std::to_string(e);
      }
    }
  }
  fill_noise(call, seed);
  return right_under(call, x, {1, 2});
}

constexpr NamedCase kCases[] = {
    {"window_counts_self", "window_left 3 is exactly keys i-3..i", "huggingface/transformers#39408",
     window_counts_self},
    {"window_excludes_current", "each decoded token has the bits of the prefill's row",
     "microsoft/onnxruntime#25927", window_excludes_current},
    {"window_boundary_block_dropped", "all keys of a window count, however its edge lies in a page",
     "vllm-project/vllm-gaudi#1395", window_boundary_block_dropped},
    {"window_block_granular_cpu", "the key just before the window has weight 0",
     "vllm-project/vllm#27650", window_block_granular_cpu},
    {"window_minus_one_unsigned", "-1 is off, 0 the own key alone, very large is full attention",
     "flashinfer-ai/flashinfer#1368", window_minus_one_unsigned},
    {"window_second_chunk", "chunks under a window have the bits of one prefill",
     "pytorch/executorch#21857", window_second_chunk},
    {"window_sized_scratch", "262144 keys run, with scratch bounded by the window",
     "NVIDIA/TensorRT-LLM#1424", window_sized_scratch},
    {"short_kv_in_large_page_window", "two keys in a page of 128: o = 1, lse = ln 2",
     "MinghuasLab/flash-attention-npu#277", short_kv_in_large_page_window},
    {"decode_path_forgets_window", "a heavy key leaves the window as the cache grows",
     "EricLBuehler/mistral.rs#2094", decode_path_forgets_window},
    {"causal_short_query_long_kv", "row i of 3 over 128 keys sees keys 0..125+i",
     "NVIDIA/cutlass#2336", causal_short_query_long_kv},
};

}  // namespace

std::span<const NamedCase> window_cases() { return kCases; }

}  // namespace attnfold::check::cases
