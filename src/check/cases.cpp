#include "check/cases.h"

#include <random>
#include <vector>

#include "check/cases_util.h"

namespace attnfold::check {
namespace {

constexpr const char* kSpeed = "a speed limit: see attnfold bench";
constexpr const char* kBias = "additive bias";
constexpr const char* kGpu = "CUDA";

constexpr WaitingCase kWaiting[] = {
    {"one_key_additive_bias", kBias},
    {"bias_row_offset_2_32", kBias},
    {"mla_576_512_small_gpu", kBias},
    {"gqa_ratio_12_perf", kSpeed},
    {"gqa_ratio_3_perf", kSpeed},
    {"causal_alignment_cpu_vs_gpu", kGpu},
    {"cpu_mask_last_dim_one", kBias},
    {"cpu_flash_slower_than_plain", kSpeed},
    {"cpu_bf16_needless_conversion", kSpeed},
    {"quantised_kv_silent_cpu_fallback", "block-quantised KV"},
    {"mixed_batch_disables_split", kSpeed},
    {"over_split_short", kSpeed},
    {"under_split_long", kSpeed},
    {"long_tail_in_batch", kSpeed},
    {"reduction_on_one_block", kSpeed},
    {"page1_bandwidth", kSpeed},
    {"decode_tile_too_tall", kSpeed},
    {"unified_kernel_prefill_slow", kSpeed},
    {"graph_capture_freezes_one_split", kGpu},
    {"window_reads_everything", kSpeed},
    {"window_prefill_quadratic", kSpeed},
    {"batch_size_sensitivity", kSpeed},
    {"head_dim_72_padded_to_128", kSpeed},
};

std::vector<NamedCase> collect() {
  std::vector<NamedCase> all;
  for (std::span<const NamedCase> section :
       {cases::empty_cases(), cases::lse_cases(), cases::range_cases(), cases::bound_cases(),
        cases::overflow_cases(), cases::stale_cases(), cases::shape_cases(), cases::window_cases(),
        cases::zero_cases(), cases::schedule_cases(), cases::rank_cases(), cases::stride_cases(),
        cases::score_cases(), cases::mask_cases(), cases::byte_cases()}) {
    all.insert(all.end(), section.begin(), section.end());
  }
  return all;
}

}  // namespace

std::span<const NamedCase> named_cases() {
  static const std::vector<NamedCase> all = collect();
  return all;
}

const NamedCase* find_case(std::string_view name) {
  for (const NamedCase& c : named_cases()) {
    if (name == c.name) return &c;
  }
  return nullptr;
}

std::span<const WaitingCase> waiting_cases() { return kWaiting; }

std::optional<Call> case_call(std::string_view name, uint64_t seed) {
  if (name == "long_decode_20000") {
    return generate(cases::make_spec({8, 2, 64, 64}, DType::bf16, 16, ATTNFOLD_MASK_CAUSAL,
                                     {1, 1, 1}, {20000, 37, 300}),
                    seed);
  }
  if (name == "random") {
    std::mt19937_64 rng(seed);
    return generate(random_case(rng), seed);
  }
  return std::nullopt;
}

}  // namespace attnfold::check
