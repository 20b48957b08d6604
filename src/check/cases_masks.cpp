// Named cases: masks that arrive as bits.
#include "check/cases_util.h"

namespace attnfold::check::cases {
namespace {

bool is_masked_row(int32_t i) { return i < 14 || (i >= 30 && i < 34) || i == 63; }

std::string leading_masked_rows_with_sink(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t heads = is_fast(x) ? 64 : 4;
  Spec spec = make_spec({heads, 1, 512, 512}, DType::f16, kRagged, kNone, {64}, {512});
  for (int32_t h = 0; h < heads; ++h) spec.sink_logits.push_back(3.0f * noise(seed, h, 0, 0, 0));
  Call call = generate(spec, seed);
  set_mask(call, {512}, [](int32_t, int32_t i, int32_t) { return !is_masked_row(i); });
  Answer answer;
  ATTNFOLD_HOLD(same_under(call, x, {1, 3}, answer));
  ATTNFOLD_HOLD(judge_answer(call, answer));
  for (int32_t i = 0; i < 64; ++i) {
    if (!is_masked_row(i)) continue;
    for (int32_t h = 0; h < heads; ++h) {
      if (lse_at(call, answer, i, h) != spec.sink_logits[h] || o_at(call, answer, i, h, 511) != 0)
        return "row " + std::to_string(i) + " is not the sink alone";
    }
  }
  return "";
}

std::string nan_key_bool_masked(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Call call = zero_call(make_spec({1, 1, 8, 8}, DType::f32, kRagged, kNone, {2}, {2}));
  set_mask(call, {2}, [](int32_t, int32_t, int32_t key) { return key == 0; });
  for (float hidden : {1e10f, kNaN, kInf}) {
    fill_noise(call, seed);
    const auto k_of = [&](int r, int t, int h, int e) {
      return t == 1 ? hidden : noise(seed + 1, r, t, h, e);
    };
    const auto v_of = [&](int r, int t, int h, int e) {
      return t == 1 ? hidden : noise(seed + 2, r, t, h, e);
    };
    fill_k(call, k_of);
    fill_v(call, v_of);
    Answer answer;
    ATTNFOLD_HOLD(run(call, execution(x), answer));
    for (int32_t i = 0; i < 2; ++i) {
      for (int32_t e = 0; e < 8; ++e) {
        if (o_at(call, answer, i, 0, e) != v_of(0, 0, 0, e))
          return "row " + std::to_string(i) + " is not V[0] beside " + text_of(hidden);
      }
    }
  }
  return "";
}

// The rows around 2^31 / 46400 of a mask of 46400 x 46400 keys, their bits past 2^31 and 2^33
// bytes.
std::string mask_over_2_31_elements(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Call call = zero_call(make_spec({1, 1, 64, 64}, DType::f16, kRagged, kNone, {9}, {46400}));
  fill_noise(call, seed);
  set_mask(call, {46400},
           [&](int32_t, int32_t i, int32_t key) { return noise(seed + 3, i, key, 0, 0) < -0.75f; });
  Answer near, answer;
  ATTNFOLD_HOLD(same_under(call, x, {1, 3}, near));
  ATTNFOLD_HOLD(judge_answer(call, near));
  for (int64_t offset : {int64_t{46340} * 46400, int64_t{1} << 33}) {
    Plan plan(call.problem, execution(x));
    if (plan.get() == nullptr) return plan.error();
    attnfold_lengths lengths = call.lengths();
    const int64_t indptr[] = {offset, offset + static_cast<int64_t>(call.mask_bits.size())};
    lengths.mask_indptr = indptr;
    lengths.mask_bits = reinterpret_cast<const uint8_t*>(
        reinterpret_cast<uintptr_t>(call.mask_bits.data()) - static_cast<uintptr_t>(offset));
    if (attnfold_plan_update(plan.get(), &lengths, nullptr) != ATTNFOLD_OK)
      return attnfold_last_error();
    ATTNFOLD_HOLD(plan.run(call, answer));
    ATTNFOLD_HOLD(same_bytes(call, near, answer, "bits from byte " + std::to_string(offset)));
  }
  return "";
}

constexpr NamedCase kCases[] = {
    {"leading_masked_rows_with_sink", "rows without a key are the sink alone, wherever they stand",
     "ikawrakow/ik_llama.cpp#2344", leading_masked_rows_with_sink},
    {"nan_key_bool_masked", "what stands in a key that the mask hides does not matter",
     "pytorch/pytorch#101967", nan_key_bool_masked},
    {"mask_over_2_31_elements", "bits past 2^31 and 2^33 bytes are found", "ml-explore/mlx#2894",
     mask_over_2_31_elements},
};

}  // namespace

std::span<const NamedCase> mask_cases() { return kCases; }

}  // namespace attnfold::check::cases
