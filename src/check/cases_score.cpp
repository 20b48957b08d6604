// Named cases: soft-cap, sink logits.
#include "check/cases_util.h"

namespace attnfold::check::cases {
namespace {

/** q and k such that the score of key j, with sm_scale 1, is value(j): q is 1 in its first element.
 */
template <typename Value>
void fill_scores(Call& call, Value value) {
  fill_q(call, [](int, int, int, int e) { return e == 0 ? 1.0f : 0.0f; });
  fill_k(call, [&](int, int j, int, int e) { return e == 0 ? value(j) : 0.0f; });
}

std::string softcap_large_logits(uint64_t seed, const char* isa) {
  constexpr float kLogits[] = {1000, 3000, 5000, 10000, -10000, 4400};
  for (DType dtype : {DType::bf16, DType::f32}) {
    Spec spec = make_spec({1, 1, 64, 64}, dtype, 16, kNone, {1}, {6});
    spec.problem.sm_scale = 1.0f;
    spec.problem.logits_softcap = 50.0f;
    Call call = zero_call(spec);
    fill_noise(call, seed);
    fill_scores(call, [&](int j) { return kLogits[j]; });
    const Context x{seed, isa};
    Answer answer;
    ATTNFOLD_HOLD(run(call, execution(x), answer));
    ATTNFOLD_HOLD(all_finite(call, answer));
    ATTNFOLD_HOLD(judge_answer(call, answer));
    const float lse = lse_at(call, answer, 0, 0);
    const float expected = 50.0f + std::log(5.0f);  // five keys at +50, one at -50
    if (std::fabs(lse - expected) > 1e-4f) return "lse is " + text_of(lse) + ", not 50 + log 5";
  }
  return "";
}

std::string softcap_parameter_dropped(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Spec spec = make_spec({8, 4, 256, 256}, DType::f16, 16, kCausal, {1, 20}, {50, 20});
  spec.q_range = 12.0f;  // logits up to some 200 / sqrt(256) * 16
  Answer off;
  ATTNFOLD_HOLD(run(generate(spec, seed), execution(x), off));
  for (float cap : {50.0f, 5.0f}) {
    spec.problem.logits_softcap = cap;
    const Call call = generate(spec, seed);
    ATTNFOLD_HOLD(in("cap " + text_of(cap), right_under(call, x, {1, 4})));
    Answer capped;
    ATTNFOLD_HOLD(run(call, execution(x), capped));
    if (first_difference(call, off, capped).empty()) return "the cap changes nothing";
  }
  return "";
}

std::string softcap_one_scratch_path(uint64_t seed, const char* isa) {
  for (int32_t dim : {64, 128, 256}) {
    Spec spec = make_spec({8, 4, dim, dim}, DType::f16, kRagged, kCausal, {64}, {64});
    spec.problem.logits_softcap = 50.0f;
    spec.q_range = 8.0f;
    ATTNFOLD_HOLD(in("head dim " + std::to_string(dim),
                     right_under(generate(spec, seed), {seed, isa}, {1, 2, 8})));
  }
  return "";
}

std::string sink_counted_once_across_splits(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (float softcap : {0.0f, 30.0f}) {
    for (float sink : {-5.0f, 0.0f, 3.0f, 10.0f}) {
      Spec spec = make_spec({8, 2, 64, 64}, DType::bf16, 16, kCausal, {1, 1, 1}, {4096, 130, 0});
      spec.problem.window_left = 127;
      spec.problem.logits_softcap = softcap;
      spec.sink_logits.assign(8, sink);
      const Call call = generate(spec, seed);
      const std::string heading = "sink " + text_of(sink) + ", cap " + text_of(softcap);
      ATTNFOLD_HOLD(in(heading, right_under(call, x, {1, 2, 8, 32})));
      Answer answer;
      ATTNFOLD_HOLD(run(call, execution(x), answer));
      for (int32_t head = 0; head < 8; ++head) {  // no key: all mass is on the sink
        if (lse_at(call, answer, 2, head) != sink) return heading + ": lse of an empty row differs";
        if (o_at(call, answer, 2, head, 0) != 0) return heading + ": o of an empty row is not 0";
      }
      spec.problem.window_left = -1;  // all 4096 keys, over two super-chunks
      ATTNFOLD_HOLD(
          in(heading + ", no window", right_under(generate(spec, seed), x, {1, 2, 8, 32})));
    }
  }
  return "";
}

constexpr NamedCase kCases[] = {
    {"softcap_large_logits", "logits of thousands are capped smoothly, without NaN",
     "vllm-project/vllm#56578", softcap_large_logits},
    {"softcap_parameter_dropped", "the cap acts in decode and in prefill",
     "vllm-project/vllm-metal#665", softcap_parameter_dropped},
    {"softcap_one_scratch_path", "the cap means the same at every head dim and schedule",
     "kekzl/imp#688", softcap_one_scratch_path},
    {"sink_counted_once_across_splits", "a sink logit counts once a row, whatever the cuts",
     "ROCm/rocm-libraries#12227", sink_counted_once_across_splits},
};

}  // namespace

std::span<const NamedCase> score_cases() { return kCases; }

}  // namespace attnfold::check::cases
