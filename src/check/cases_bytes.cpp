// Named cases: keys and values of 8 bits, their scales.
#include <algorithm>
#include <random>

#include "check/cases_util.h"

namespace attnfold::check::cases {
namespace {

/** An 8-bit spec whose queries and o are bf16, with scales of one kind. */
Spec byte_spec(Shape shape, DType type, attnfold_scale_kind kind, int32_t page_size,
               attnfold_mask_kind mask, Lengths qo_len, Lengths kv_len) {
  Spec spec = make_spec(shape, type, page_size, mask, std::move(qo_len), std::move(kv_len));
  spec.problem.k_scale_kind = spec.problem.v_scale_kind = kind;
  return spec;
}

/** The call of the same draws, not quantised. */
Call unquantised(Spec spec, uint64_t seed) {
  spec.problem.kv_dtype = ATTNFOLD_F32;
  spec.problem.k_scale_kind = spec.problem.v_scale_kind = ATTNFOLD_SCALE_NONE;
  return generate(spec, seed);
}

/** Sets a scale per tensor. */
void set_scale(Scales& scales, float value) {
  scales.values = std::make_shared<Buffer>(sizeof(float));
  scales.strides = {};
  scales.offset = 0;
  store_f32(scales.values->data(), DType::f32, 0, value);
}

/** sqrt(sum (o - truth)^2 / sum truth^2) over the whole answer. */
double relative_error(const Call& call, const Answer& answer, const ref::Truth& truth) {
  double error = 0, all = 0;
  for (size_t i = 0; i < truth.o.size(); ++i) {
    const double o = load_f32(answer.o.data(), static_cast<DType>(call.problem.o_dtype),
                              static_cast<int64_t>(i));
    error += (o - truth.o[i]) * (o - truth.o[i]);
    all += truth.o[i] * truth.o[i];
  }
  return std::sqrt(error / all);
}

std::string replay_stale_tile_schedule(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const Lengths longest = {64, 2000, 64, 513, 64, 64, 4096, 128};
  Spec spec = byte_spec({is_fast(x) ? 16 : 2, 1, 576, 512}, DType::e4m3, ATTNFOLD_SCALE_PER_TENSOR,
                        64, kNone, Lengths(8, 1), longest);
  spec.problem.v_in_k = 1;
  Call call = generate(spec, seed);
  Plan plan(call.problem, execution(x, 5));
  call.kv_len = Lengths(8, 64);
  Answer answer, eager;
  ATTNFOLD_HOLD(plan.update(call));
  ATTNFOLD_HOLD(plan.run(call, answer));
  std::mt19937_64 rng(seed);
  for (int32_t replay = 0; replay < 5; ++replay) {
    call.kv_len = replay == 0 ? Lengths{64, 2000, 1, 513, 0, 7, 4096, 128} : longest;
    for (int32_t& n : call.kv_len) {
      if (replay > 0) n = static_cast<int32_t>(rng() % (static_cast<uint64_t>(n) + 1));
    }
    const std::string where = "replay " + std::to_string(replay);
    ATTNFOLD_HOLD(in(where, plan.update(call)));
    ATTNFOLD_HOLD(in(where, plan.run(call, answer)));
    ATTNFOLD_HOLD(in(where, run(call, execution(x), eager)));
    ATTNFOLD_HOLD(same_bytes(call, eager, answer, where));
    if (replay < 2) ATTNFOLD_HOLD(in(where, judge_answer(call, answer)));
  }
  return "";
}

std::string page_2848_multi_query(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t kv_heads = is_fast(x) ? 2 : 1, repeats = is_fast(x) ? 50 : 3;
  for (int32_t page_size : {1600, 2848}) {
    const Spec spec =
        byte_spec({6 * kv_heads, kv_heads, 256, 256}, DType::e4m3, ATTNFOLD_SCALE_PER_HEAD,
                  page_size, kCausal, Lengths(4, 4), {2847, 2848, 2849, 6000});
    const Call call = generate(spec, seed);
    const std::string where = "pages of " + std::to_string(page_size);
    Answer whole, again;
    ATTNFOLD_HOLD(in(where, run(call, execution(x), whole)));
    ATTNFOLD_HOLD(in(where, judge_tokens(call, whole, sample_tokens(call, 1))));
    for (int32_t r = 0; r < 4; ++r) {
      for (int32_t i = 0; i < 4; ++i) {
        const Call one = token_call(call, r, i, call.kv_len[r] - 3 + i);
        Answer part;
        ATTNFOLD_HOLD(in(where, run(one, execution(x, 1 + i), part)));
        ATTNFOLD_HOLD(same_rows(one, part, 0, whole, 4 * r + i, 1, where));
      }
    }
    for (int32_t repeat = 0; repeat < repeats; ++repeat) {
      ATTNFOLD_HOLD(run(call, execution(x, 1 + repeat % 7), again));
      ATTNFOLD_HOLD(same_bytes(call, whole, again, where + ", repeated"));
    }
  }
  return "";
}

std::string int8_decode_head_dim_256(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t group = is_fast(x) ? 8 : 2;
  for (int32_t head_dim : {64, 128, 256}) {
    const int32_t kv_len = is_fast(x) && head_dim == 256 ? 32768 : 16384;
    const Spec spec = byte_spec({2 * group, 2, head_dim, head_dim}, DType::i8,
                                ATTNFOLD_SCALE_PER_TOKEN, 16, kNone, {1}, {kv_len});
    const Call call = generate(spec, seed);
    const std::string where = "head dim " + std::to_string(head_dim);
    Answer answer;
    ATTNFOLD_HOLD(in(where, run(call, execution(x, 8), answer)));
    ATTNFOLD_HOLD(in(where, judge_answer(call, answer)));
    const double error = relative_error(call, answer, ref::answer(unquantised(spec, seed)));
    if (error > 0.02) return where + ": relative error " + text_of(error) + " of quantising";
  }
  return "";
}

std::string window_verify_q8_mixed_dtype(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t kv_heads = is_fast(x) ? 4 : 1;
  for (int32_t qo_len : {8, 1, 2, 4}) {
    for (int32_t kv_len : {1000, 1022, 1023, 1024, 1025, 1031, 1032, 1033, 1280, 1400}) {
      Spec spec = byte_spec({2 * kv_heads, kv_heads, 256, 256}, DType::e4m3,
                            ATTNFOLD_SCALE_PER_TENSOR, 16, kCausal, {qo_len}, {kv_len});
      spec.problem.window_left = 1023;
      spec.problem.sm_scale = 1.0f;
      spec.q_range = 1.0f / 16;
      const Call call = generate(spec, seed + static_cast<uint64_t>(kv_len));
      ATTNFOLD_HOLD(in(std::to_string(qo_len) + " on " + std::to_string(kv_len),
                       right_under(call, x, {1, 3})));
    }
  }
  return "";
}

std::string sink_on_quantised_kv(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t kv_heads = is_fast(x) ? 8 : 2;
  for (DType type : {DType::e4m3, DType::e5m2, DType::i8}) {
    for (attnfold_scale_kind kind : {ATTNFOLD_SCALE_PER_TENSOR, ATTNFOLD_SCALE_PER_TOKEN}) {
      Spec spec =
          byte_spec({8 * kv_heads, kv_heads, 64, 64}, type, kind, 16, kNone, {1, 1}, {40, 3000});
      spec.sink_logits.assign(static_cast<size_t>(8 * kv_heads), 4.0f);
      ATTNFOLD_HOLD(in(dtype_name(type), right_under(generate(spec, seed), x, {1, 4})));
    }
  }
  return "";
}

std::string ragged_ignores_kv_scales(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (DType type : {DType::e4m3, DType::e5m2}) {
    const Spec spec = byte_spec({8, 2, 128, 128}, type, ATTNFOLD_SCALE_PER_TENSOR, 16, kCausal,
                                {40, 7}, {40, 90});
    Call paged = generate(spec, seed);
    Answer answers[2];
    for (int32_t swapped : {0, 1}) {
      set_scale(paged.k_scale, swapped ? 0.5f : 0.25f);
      set_scale(paged.v_scale, swapped ? 0.25f : 0.5f);
      Answer ragged;
      ATTNFOLD_HOLD(run(paged, execution(x), answers[swapped]));
      ATTNFOLD_HOLD(in(dtype_name(type), judge_answer(paged, answers[swapped])));
      ATTNFOLD_HOLD(run(to_ragged(paged), execution(x, 3), ragged));
      ATTNFOLD_HOLD(same_bytes(paged, answers[swapped], ragged, "ragged"));
    }
    if (first_difference(paged, answers[0], answers[1]).empty())
      return "swapping the scales of k and v changes nothing";
  }
  return "";
}

std::string paged_scales_lost_positional(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t kv_heads = is_fast(x) ? 8 : 2;
  for (int32_t qo_len : {1, 16}) {
    Spec spec =
        byte_spec({4 * kv_heads, kv_heads, 128, 128}, DType::e4m3, ATTNFOLD_SCALE_PER_TENSOR, 16,
                  kCausal, Lengths(4, qo_len), {128, 1, 63, 64});
    const Call wide = unquantised(spec, seed);
    Call call = generate(spec, seed);
    set_scale(call.k_scale, 0.0109f);
    set_scale(call.v_scale, 0.0109f);
    const auto over_scale = [](const Call& from, const Buffer& buffer, const Strides& s,
                               int64_t offset, int r, int j, int h, int e) {
      const int64_t at = from.kv_element_offset(r, j, s, offset) + h * s.head + e;
      return load_f32(buffer.data(), DType::f32, at) / 0.0109f;
    };
    fill_k(call, [&](int r, int j, int h, int e) {
      return over_scale(wide, *wide.k, wide.k_strides, wide.k_offset, r, j, h, e);
    });
    fill_v(call, [&](int r, int j, int h, int e) {
      return over_scale(wide, *wide.v, wide.v_strides, wide.v_offset, r, j, h, e);
    });
    const ref::Truth truth = ref::answer(wide);
    Answer first;
    for (int32_t page_size : {1, 16}) {
      const Call paged = repage(call, page_size, ATTNFOLD_NHD, false, seed);
      const std::string where =
          std::to_string(qo_len) + " tokens, pages of " + std::to_string(page_size);
      Answer answer;
      ATTNFOLD_HOLD(in(where, run(paged, execution(x), answer)));
      ATTNFOLD_HOLD(in(where, judge_answer(paged, answer)));
      if (const double error = relative_error(paged, answer, truth); error > 0.04)
        return where + ": relative error " + text_of(error) + " of quantising";
      for (size_t i = 0; i < truth.lse.size(); ++i) {
        if (std::isfinite(truth.lse[i]) && std::fabs(answer.lse[i] - truth.lse[i]) > 0.2)
          return where + ": lse " + text_of(answer.lse[i]) + ", not " + text_of(truth.lse[i]);
      }
      if (page_size == 1) first = std::move(answer);
      if (page_size == 16) ATTNFOLD_HOLD(same_bytes(paged, first, answer, where));
    }
  }
  return "";
}

/** "" if the call is refused with a text that begins with `argument`. */
std::string refused(const Call& call, const Context& x, const std::string& argument) {
  const RunResult result = run_engine(call, execution(x));
  if (result.status != ATTNFOLD_INVALID_ARGUMENT) return argument + ": the engine took it";
  return result.error.rfind(argument + ": expected ", 0) == 0 ? "" : "said: " + result.error;
}

std::string scale_type_handling(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const Spec spec =
      byte_spec({4, 1, 64, 64}, DType::e4m3, ATTNFOLD_SCALE_PER_TENSOR, 16, kNone, {1}, {10});
  const Call call = generate(spec, seed);
  Answer scalar, vector;
  ATTNFOLD_HOLD(run(call, execution(x), scalar));
  ATTNFOLD_HOLD(judge_answer(call, scalar));
  Call per_head = call;  // one kv head: the same numbers
  per_head.problem.k_scale_kind = per_head.problem.v_scale_kind = ATTNFOLD_SCALE_PER_HEAD;
  per_head.k_scale.strides.head = per_head.v_scale.strides.head = 1;
  ATTNFOLD_HOLD(run(per_head, execution(x), vector));
  ATTNFOLD_HOLD(same_bytes(call, scalar, vector, "a vector of one scale"));
  Call absent = call;  // said neither by a kind nor by a pointer
  absent.k_scale.values.reset();
  ATTNFOLD_HOLD(refused(absent, x, "k_scale"));
  absent.problem.k_scale_kind = ATTNFOLD_SCALE_NONE;
  ATTNFOLD_HOLD(refused(absent, x, "k_scale_kind"));
  absent = call;
  absent.v_scale.values.reset();
  ATTNFOLD_HOLD(refused(absent, x, "v_scale"));
  Call unasked = generate(make_spec({4, 1, 64, 64}, DType::bf16, 16, kNone, {1}, {10}), seed);
  set_scale(unasked.k_scale, 2.0f);  // one that no kind announces
  return refused(unasked, x, "k_scale");
}

std::string fp8_probabilities_subnormal(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t kv_heads = is_fast(x) ? 8 : 2;
  Spec spec = byte_spec({4 * kv_heads, kv_heads, 128, 128}, DType::e4m3, ATTNFOLD_SCALE_PER_TENSOR,
                        16, kCausal, Lengths(4, 1), {128, 256, 2048, 2048});
  spec.q_range = 0.01f;
  const Call call = generate(spec, seed);
  Answer answer;
  ATTNFOLD_HOLD(same_under(call, x, {1, 4}, answer));
  ATTNFOLD_HOLD(judge_answer(call, answer));
  const double error = relative_error(call, answer, ref::answer(call));
  return error < 0.03 ? "" : "relative error " + text_of(error) + " against the dequantised cache";
}

std::string cpu_avx2_int8_kv(uint64_t seed, const char*) {
  for (int32_t head_dim : {64, 80, 96, 128}) {
    for (attnfold_scale_kind kind : {ATTNFOLD_SCALE_PER_TENSOR, ATTNFOLD_SCALE_PER_TOKEN}) {
      Spec spec =
          byte_spec({8, 2, head_dim, head_dim}, DType::i8, kind, 32, kCausal, {1, 9}, {100, 9});
      spec.problem.q_dtype = spec.problem.o_dtype = ATTNFOLD_F32;
      const Call call = generate(spec, seed);
      Answer first;
      for (int32_t i = 0; i < attnfold_num_kernels(); ++i) {
        attnfold_kernel_info info{};
        info.struct_size = sizeof(info);
        if (attnfold_get_kernel(i, &info) != ATTNFOLD_OK) return attnfold_last_error();
        if (!info.available || attnfold_kernel_serves(i, &call.problem) != ATTNFOLD_OK) continue;
        Answer answer;
        ATTNFOLD_HOLD(in(info.name, run(call, execution({seed, info.isa}), answer)));
        ATTNFOLD_HOLD(in(info.name, judge_answer(call, answer)));
        if (first.lse.empty())
          first = std::move(answer);
        else
          ATTNFOLD_HOLD(same_bytes(call, first, answer, info.name));
      }
      if (first.lse.empty()) return "no kernel row serves the call";
    }
  }
  return "";
}

constexpr NamedCase kCases[] = {
    {"replay_stale_tile_schedule",
     "a plan over an 8-bit latent cache follows its lengths, replay after replay",
     "vllm-project/vllm#36611", replay_stale_tile_schedule},
    {"page_2848_multi_query",
     "four tokens over huge 8-bit pages have the bits of four decodes, every time",
     "flashinfer-ai/flashinfer#4731", page_2848_multi_query},
    {"int8_decode_head_dim_256", "int8 decodes are exact, and within 2 % of the unquantised",
     "gittensor-ai-lab/sparkinfer#425", int8_decode_head_dim_256},
    {"window_verify_q8_mixed_dtype",
     "a window that ends about the verified tokens is right in every row of an 8-bit cache",
     "flashinfer-ai/flashinfer#3864", window_verify_q8_mixed_dtype},
    {"sink_on_quantised_kv", "a sink logit counts over 8-bit keys as over any", "kekzl/imp#1345",
     sink_on_quantised_kv},
    {"ragged_ignores_kv_scales", "ragged and paged read the same scales, k's and v's apart",
     "flashinfer-ai/flashinfer#4979", ragged_ignores_kv_scales},
    {"paged_scales_lost_positional", "scales reach o and lse in decode and in prefill",
     "flashinfer-ai/flashinfer#1023", paged_scales_lost_positional},
    {"scale_type_handling", "each form of a scale has one meaning, and absence is an error",
     "sgl-project/sglang#20705", scale_type_handling},
    {"fp8_probabilities_subnormal", "thousands of nearly equal weights over 8-bit values are exact",
     "ROCm/aiter#5642", fp8_probabilities_subnormal},
    {"cpu_avx2_int8_kv", "every instruction set gives the same bits over int8",
     "openvinotoolkit/openvino#29100", cpu_avx2_int8_kv},
};

}  // namespace

std::span<const NamedCase> byte_cases() { return kCases; }

}  // namespace attnfold::check::cases
