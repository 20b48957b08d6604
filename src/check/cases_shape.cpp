// Named cases: page sizes, head sizes, ratios of query to kv heads.
#include "check/cases_util.h"

namespace attnfold::check::cases {
namespace {

std::string page_256_long(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t rows = is_fast(x) ? 4 : 1,
                heads = is_fast(x) ? 16 : 2;  // the last ones of the prefill
  for (int32_t kv_len : {4096, 6144, 8192, 8864, 16384}) {
    Call call =
        zero_call(make_spec({heads, 1, 256, 256}, DType::bf16, 128, kCausal, {rows}, {kv_len}));
    fill_noise(call, seed);
    Answer first;
    ATTNFOLD_HOLD(run(call, execution(x), first));
    ATTNFOLD_HOLD(
        in(std::to_string(kv_len) + " keys", judge_tokens(call, first, sample_tokens(call, 1))));
    for (int32_t page_size : {256, 512}) {
      const Call other = repage(call, page_size, ATTNFOLD_NHD, false, seed);
      Answer answer;
      ATTNFOLD_HOLD(run(other, execution(x), answer));
      ATTNFOLD_HOLD(same_bytes(
          call, first, answer,
          "page " + std::to_string(page_size) + ", " + std::to_string(kv_len) + " keys"));
    }
  }
  return "";
}

std::string page_size_any_integer(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Answer first;
  for (int32_t page_size : {1, 2, 3, 5, 16, 19, 48, 64, 100, 256}) {
    const Call call = generate(
        make_spec({8, 2, 128, 128}, DType::bf16, page_size, kCausal, {1, 4, 1}, {1, 50, 130}),
        seed);
    Answer answer;
    ATTNFOLD_HOLD(run(call, execution(x), answer));
    ATTNFOLD_HOLD(in("page " + std::to_string(page_size), judge_answer(call, answer)));
    if (page_size > 1)
      ATTNFOLD_HOLD(same_bytes(call, first, answer, "page " + std::to_string(page_size)));
    if (page_size == 1) first = std::move(answer);
  }
  return "";
}

std::string page16_vs_tile128(uint64_t seed, const char* isa) {
  const Call call =
      generate(make_spec({16, 8, 128, 128}, DType::bf16, 16, kCausal, {1, 17}, {17, 40}), seed);
  return right_under(call, {seed, isa}, {1, 2, 5});
}

std::string head_dim_96(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Spec spec = make_spec({32, 32, 96, 96}, DType::f16, 16, kCausal, {64, 1}, {64, 200});
  ATTNFOLD_HOLD(right(generate(spec, seed), x));
  spec.odd_strides = true;
  return in("odd strides", right(generate(spec, seed), x));
}

std::string head_dim_96_decode_path_only(uint64_t seed, const char* isa) {
  for (int32_t width : {96, 80, 112, 72}) {
    for (int32_t page_size : {kRagged, 16}) {
      for (DType type : {DType::f16, DType::bf16}) {
        const Call call = generate(
            make_spec({16, 2, width, width}, type, page_size, kNone, {1, 1}, {33, 4096}), seed);
        ATTNFOLD_HOLD(in("width " + std::to_string(width), right(call, {seed, isa})));
      }
    }
  }
  return "";
}

std::string head_dim_88(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t heads = is_fast(x) ? 16 : 2;
  Call call =
      zero_call(make_spec({heads, heads, 88, 88}, DType::f16, kRagged, kNone, {577}, {577}));
  fill_noise(call, seed);
  ATTNFOLD_HOLD(right_on_sample(call, x, 8));
  attnfold_problem larger =
      call.problem;  // four times the tokens and keys: sixteen times the products
  larger.max_qo_rows *= 4;
  larger.max_kv_len *= 4;
  const Plan plan(call.problem, execution(x)), large_plan(larger, execution(x));
  if (plan.get() == nullptr || large_plan.get() == nullptr)
    return plan.error() + large_plan.error();
  const size_t bytes = attnfold_plan_workspace_bytes(plan.get());
  const size_t large_bytes = attnfold_plan_workspace_bytes(large_plan.get());
  return large_bytes <= 5 * bytes
             ? ""
             : "workspace grows with q_len x kv_len: " + std::to_string(bytes) + " to " +
                   std::to_string(large_bytes);
}

std::string head_dim_512_ratio_2_16(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (const Shape shape : {Shape{16, 1, 512, 512}, Shape{8, 4, 512, 512}, Shape{8, 1, 512, 512},
                            Shape{4, 1, 512, 512}}) {
    for (int32_t q_len : {1, is_fast(x) ? 64 : 7}) {
      Call call = zero_call(make_spec(shape, DType::f16, 16, kCausal, {q_len, q_len}, {5, 1000}));
      fill_noise(call, seed);
      ATTNFOLD_HOLD(in(std::to_string(shape.qo_heads) + "/" + std::to_string(shape.kv_heads),
                       right_on_sample(call, x, 7)));
    }
  }
  return "";
}

std::string head_dim_320_256(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (int32_t q_len : {1, is_fast(x) ? 512 : 4}) {
    const int32_t heads = q_len == 512 ? 4 : 32;
    Call call =
        zero_call(make_spec({heads, 1, 320, 256}, DType::f16, 16, kCausal, {q_len}, {4096}));
    fill_noise(call, seed);
    ATTNFOLD_HOLD(in(std::to_string(q_len) + " tokens", right_on_sample(call, x, 5)));
  }
  return "";
}

std::string head_dim_not_64(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t n = is_fast(x) ? 2048 : 300;
  Call call =
      zero_call(make_spec({2, 2, 128, 128}, DType::f16, kRagged, kCausal, {n, n, n}, {n, n, n}));
  fill_noise(call, seed);
  fill_q(call, [&](int r, int t, int h, int e) {
    return e < 64 ? 0.0f : 4.0f * noise(seed, r, t, h, e);
  });
  fill_k(call, [&](int r, int t, int h, int e) {
    return e < 64 ? 0.0f : 4.0f * noise(seed + 1, r, t, h, e);
  });
  return right_on_sample(call, x, 7);
}

std::string gqa_ratio_5(uint64_t seed, const char* isa) {
  for (const Shape shape : {Shape{40, 8, 128, 128}, Shape{5, 1, 128, 128}}) {
    const Call call =
        generate(make_spec(shape, DType::bf16, 16, kCausal, {7, 1, 33}, {7, 129, 64}), seed);
    ATTNFOLD_HOLD(right_under(call, {seed, isa}, {1, 3}));
  }
  return "";
}

std::string gqa_ratio_3_6_decode(uint64_t seed, const char* isa) {
  for (DType type : {DType::f32, DType::bf16}) {
    const Call decode =
        generate(make_spec({12, 2, 16, 16}, type, kRagged, kNone, {1}, {4096}), seed);
    ATTNFOLD_HOLD(in("12/2", right_under(decode, {seed, isa}, {1, 3})));
    const Call prefill =
        generate(make_spec({9, 3, 64, 64}, type, kRagged, kCausal, {5}, {5}), seed);
    ATTNFOLD_HOLD(in("9/3", right_under(prefill, {seed, isa}, {1, 3})));
  }
  return "";
}

// There is no flag for packing heads: what remains is that both lengths equal the reference.
std::string packed_heads_flag_mismatch(uint64_t seed, const char* isa) {
  for (int32_t kv_len : {200, 333}) {
    const Call call =
        generate(make_spec({8, 2, 64, 64}, DType::f16, kRagged, kCausal, {200}, {kv_len}), seed);
    ATTNFOLD_HOLD(in(std::to_string(kv_len) + " keys", right_on_sample(call, {seed, isa}, 33)));
  }
  return "";
}

std::string mla_heads_below_16(uint64_t seed, const char* isa) {
  const int32_t long_kv = is_fast({seed, isa}) ? 5000 : 1100;
  for (int32_t heads : {8, 1, 5, 12}) {
    for (int32_t q_len : {1, 2}) {
      Call call = zero_call(make_spec({heads, 1, 576, 512}, DType::bf16, 64, kCausal,
                                      Lengths(4, q_len), {1, 64, 65, long_kv}));
      fill_noise(call, seed);
      // v is the first 512 columns of k, under k's strides.
      call.v = call.k;
      call.v_strides = call.k_strides;
      ATTNFOLD_HOLD(in(std::to_string(heads) + " heads", right(call, {seed, isa})));
    }
  }
  return "";
}

std::string packed_decode_multi_query(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (const Shape shape : {Shape{16, 4, 128, 128}, Shape{8, 2, 128, 128}}) {
    for (int32_t kv_len : {64, 1000}) {
      for (int32_t q_len : {1, 2, 3, 4, 8, 9}) {
        const Call call =
            generate(make_spec(shape, DType::f16, 16, kCausal, {q_len}, {kv_len}), seed);
        Answer whole;
        ATTNFOLD_HOLD(run(call, execution(x), whole));
        ATTNFOLD_HOLD(judge_tokens(call, whole, sample_tokens(call, 3)));
        for (int32_t i = 0; i < q_len; ++i) {
          const Call one = token_call(call, 0, i, kv_len - q_len + i + 1);
          Answer single;
          ATTNFOLD_HOLD(run(one, execution(x), single));
          ATTNFOLD_HOLD(
              same_rows(one, single, 0, whole, i, 1,
                        std::to_string(q_len) + " tokens over " + std::to_string(kv_len)));
        }
      }
    }
  }
  return "";
}

constexpr NamedCase kCases[] = {
    {"page_256_long", "long prefills end alike at pages of 128, 256 and 512",
     "flashinfer-ai/flashinfer#4347", page_256_long},
    {"page_size_any_integer", "every page size gives the reference, and the same bits",
     "Dao-AILab/flash-attention#1627", page_size_any_integer},
    {"page16_vs_tile128", "a leaf spans pages, and bits do not depend on workers",
     "thinking-machines-lab/batch_invariant_ops#1", page16_vs_tile128},
    {"head_dim_96", "96 lanes are right, and no padding is stored", "sgl-project/sglang#1281",
     head_dim_96},
    {"head_dim_96_decode_path_only", "72, 80, 96 and 112 are served in decode as in prefill",
     "pytorch/pytorch#164931", head_dim_96_decode_path_only},
    {"head_dim_88", "88 is right, and scratch does not grow with q_len x kv_len",
     "ggml-org/llama.cpp#20375", head_dim_88},
    {"head_dim_512_ratio_2_16", "512 lanes at every ratio", "ggml-org/llama.cpp#24526",
     head_dim_512_ratio_2_16},
    {"head_dim_320_256", "d_qk 320 with d_vo 256", "ggml-org/llama.cpp#22286", head_dim_320_256},
    {"head_dim_not_64", "lanes 64..127 count", "triton-lang/triton#621", head_dim_not_64},
    {"gqa_ratio_5", "five query heads to a kv head", "vllm-project/vllm#18100", gqa_ratio_5},
    {"gqa_ratio_3_6_decode", "ratios 6 and 3, in decode and prefill", "pytorch/pytorch#151359",
     gqa_ratio_3_6_decode},
    {"packed_heads_flag_mismatch", "query lengths equal to and shorter than the keys' are right",
     "Dao-AILab/flash-attention#2528", packed_heads_flag_mismatch},
    {"mla_heads_below_16", "any number of query heads over one latent kv head, v a view of k",
     "ROCm/ATOM#283", mla_heads_below_16},
    {"packed_decode_multi_query", "N tokens at once have the bits of N single calls",
     "ggml-org/llama.cpp#25618", packed_decode_multi_query},
};

}  // namespace

std::span<const NamedCase> shape_cases() { return kCases; }

}  // namespace attnfold::check::cases
