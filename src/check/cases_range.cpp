// Named cases: finite mask constants, exponent range, half-precision accumulators.
#include "check/cases_util.h"

namespace attnfold::check::cases {
namespace {

// Keys are one-hot at element (key mod 64), so that a query's element j is its logit with keys j, j
// + 64, ..
std::string window_mask_constant_1e4(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (int32_t kv_len : {48, 348}) {  // in the second the first leaf lies outside every window
    Spec spec = make_spec({2, 2, 64, 64}, DType::bf16, 16, kCausal, {16}, {kv_len});
    spec.problem.window_left = 7;
    spec.problem.sm_scale = 1.0f;
    Call call = zero_call(spec);
    fill_k(call, [](int, int t, int, int e) { return t % 64 == e ? 1.0f : 0.0f; });
    fill_v(call, [&](int r, int t, int h, int e) { return noise(seed, r, t, h, e); });
    fill_q(call, [&](int r, int t, int h, int e) {
      const int position = kv_len - 16 + t;
      for (int key = position - 7; key <= position; ++key) {
        if (key % 64 == e)
          return -19968.0f - 128.0f * (noise(seed + 1, r, t, h, e) > 0 ? 1.0f : 0.0f);
      }
      return 0.0f;
    });
    Answer answer;
    ATTNFOLD_HOLD(same_under(call, x, {1, 3}, answer));
    ATTNFOLD_HOLD(judge_answer(call, answer));
    Call other =
        deep_copy(call);  // keys outside a token's window, changed: the last token keeps its bits
    const int32_t begin = kv_len - 8;
    fill_v(other, [&](int r, int t, int h, int e) {
      return t < begin ? 1000.0f : noise(seed, r, t, h, e);
    });
    Answer changed;
    ATTNFOLD_HOLD(run(other, execution(x), changed));
    ATTNFOLD_HOLD(
        same_rows(call, answer, 15, changed, 15, 1, "weights outside the window are not 0"));
  }
  return "";
}

/** Q = 0, so that all weights are equal, and V constant: o is that constant, lse the log of the
 * number of keys. */
std::string equal_weights(const Context& x, int32_t q_len, int32_t kv_len, int32_t page_size,
                          attnfold_mask_kind mask, float value) {
  const int32_t kv_heads = is_fast(x) ? 2 : 1, group = is_fast(x) ? 4 : 1;
  Call call = zero_call(make_spec({group * kv_heads, kv_heads, 128, 128}, DType::f16, page_size,
                                  mask, {q_len}, {kv_len}));
  fill_buffer(*call.v, DType::f16, value);
  Answer answer;
  ATTNFOLD_HOLD(run(call, execution(x), answer));
  ref::Truth truth;
  const size_t rows = static_cast<size_t>(q_len) * call.problem.qo_heads;
  truth.o.assign(rows * 128, value);
  truth.naive_o_err.assign(rows, 0);
  truth.naive_lse_err.assign(rows, 0);
  truth.max_abs_v.assign(rows, value);
  for (int32_t i = 0; i < q_len; ++i) {
    const int32_t seen = mask == kCausal ? kv_len - q_len + i + 1 : kv_len;
    truth.lse.insert(truth.lse.end(), call.problem.qo_heads, std::log(static_cast<double>(seen)));
  }
  const Judgement j = judge(call, truth, answer.o.data(), DType::f16, answer.lse.data(), 1);
  return j.right ? "" : j.text;
}

std::string fp16_unnormalised_accumulator_overflow(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (int32_t page_size : {16, kRagged}) {
    for (attnfold_mask_kind mask : {kNone, kCausal}) {
      for (int32_t q_len : {1, is_fast(x) ? 32 : 2}) {
        if (q_len > 1 && page_size != 16) continue;
        ATTNFOLD_HOLD(in("70000 keys", equal_weights(x, q_len, 70000, page_size, mask, 1.0f)));
      }
      ATTNFOLD_HOLD(in("V = 600", equal_weights(x, 32, 512, page_size, mask, 600.0f)));
    }
  }
  return "";
}

std::string fp16_rescale_underflow(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t kv_heads = is_fast(x) ? 2 : 1, width = is_fast(x) ? 256 : 64;
  Spec spec = make_spec({2 * kv_heads, kv_heads, width, width}, DType::f16, kRagged, kCausal, {1},
                        {100000});
  spec.problem.sm_scale = 1.0f;
  Call call = zero_call(spec);
  fill_q(call, [](int, int, int, int e) { return e == 0 ? 25.0f : 0.0f; });
  fill_k(call, [](int, int t, int, int e) { return e == 0 && t >= 99000 ? 1.0f : 0.0f; });
  fill_v(call, [&](int r, int t, int h, int e) { return noise(seed, r, t, h, e); });
  return right_under(call, x, {1, 3});
}

std::string score_overflow_before_scale(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Call call = zero_call(make_spec({4, 4, 128, 128}, DType::f16, kRagged, kCausal, {8}, {64}));
  fill_q(call, [](int, int, int, int) { return 32.0f; });
  fill_k(call, [](int, int t, int, int) { return t == 0 ? 32.0f : 31.0f; });
  fill_v(call, [&](int r, int t, int h, int e) { return noise(seed, r, t, h, e); });
  Answer answer;
  ATTNFOLD_HOLD(run(call, execution(x), answer));
  ATTNFOLD_HOLD(judge_answer(call, answer));
  for (int32_t row = 0; row < 8; ++row) {
    for (int32_t h = 0; h < 4; ++h) {
      for (int32_t e = 0; e < 128; ++e) {
        const float want = f16_to_f32(f32_to_f16(noise(seed, 0, 0, h, e)));
        if (o_at(call, answer, row, h, e) != want)
          return "row " + std::to_string(row) + ": o is not V of key 0";
      }
    }
  }
  return "";
}

constexpr NamedCase kCases[] = {
    {"window_mask_constant_1e4", "very negative logits inside a window win over any outside it",
     "vllm-project/vllm#4405", window_mask_constant_1e4},
    {"fp16_unnormalised_accumulator_overflow",
     "sums of 70000 ones do not overflow a half-precision accumulator", "ggml-org/llama.cpp#17746",
     fp16_unnormalised_accumulator_overflow},
    {"fp16_rescale_underflow", "a partial 25 below the new maximum decays cleanly",
     "ggml-org/llama.cpp#13991", fp16_rescale_underflow},
    {"score_overflow_before_scale", "q.k beyond the largest half is a finite score",
     "ggml-org/llama.cpp#7805", score_overflow_before_scale},
};

}  // namespace

std::span<const NamedCase> range_cases() { return kCases; }

}  // namespace attnfold::check::cases
