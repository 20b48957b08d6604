#include "explain/heuristics.h"

#include <algorithm>
#include <cstdlib>

namespace attnfold::explain {

namespace vllm {

int64_t captured_threshold(int64_t threshold, const std::vector<int64_t>& capture_sizes) {
  if (capture_sizes.empty()) return threshold;
  return *std::min_element(capture_sizes.begin(), capture_sizes.end(), [&](int64_t a, int64_t b) {
    return std::llabs(a - threshold) < std::llabs(b - threshold);
  });
}

}  // namespace vllm

namespace sglang {

Chunks chunks(const std::vector<int64_t>& kv_len, int64_t sms, int64_t grid, int64_t max_splits) {
  const auto [low, high] = std::minmax_element(kv_len.begin(), kv_len.end());
  const int64_t longest = std::max<int64_t>(*high, 1);
  int64_t shortest = std::max<int64_t>(*low, 1);
  if (longest * 8 < shortest * 10) shortest = longest;
  const int64_t by_length = std::min(ceil_div(longest, shortest), max_splits);
  const int64_t by_sms = std::min(ceil_div(extended_sms(sms, longest), grid), max_splits);
  return {ceil_div(longest, by_length), ceil_div(longest, by_sms)};
}

int64_t latent_max_splits(int64_t flag, int64_t sms, int64_t max_context) {
  const auto next_power = [](int64_t x) {
    return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(x, 1))));
  };
  return std::max(flag, std::min(next_power(sms), next_power(ceil_div(max_context, 32))));
}

}  // namespace sglang

namespace flashinfer {

int64_t cta_tile_q(int64_t packed, int64_t d_qk, int64_t d_vo) {
  if (d_vo >= 512) return packed <= 32 ? 16 : 32;
  if (d_qk >= 512) return 16;
  if (packed > 64 && d_vo < 256) return 128;
  return packed > 16 ? 64 : 16;
}

}  // namespace flashinfer

namespace {

/** Share of the machine's time that `blocks` blocks of equal length use, in float32 as engines do.
 */
float wave_efficiency(int64_t blocks, int64_t sms) {
  const float num_waves = static_cast<float>(blocks) / static_cast<float>(sms);
  return num_waves / std::ceil(num_waves);
}

/** The first of 1..most that is allowed and reaches 85 % of the best efficiency. */
template <class Allowed>
int64_t first_good_split(int64_t blocks, int64_t sms, int64_t most, Allowed&& allowed) {
  float best = 0;
  for (int64_t n = 1; n <= most; ++n) {
    if (allowed(n)) best = std::max(best, wave_efficiency(blocks * n, sms));
  }
  for (int64_t n = 1; n <= most; ++n) {
    if (allowed(n) && static_cast<double>(wave_efficiency(blocks * n, sms)) >= 0.85 * best)
      return n;
  }
  return 1;
}

}  // namespace

namespace fa2 {

int64_t num_splits(int64_t blocks, int64_t sms, int64_t n_blocks, int64_t most) {
  const int64_t slots = 2 * sms;
  if (static_cast<float>(blocks) >= 0.8f * static_cast<float>(slots)) return 1;
  // A count that does not shorten the longest split is passed over.
  const auto allowed = [&](int64_t n) {
    return n == 1 || ceil_div(n_blocks, n) != ceil_div(n_blocks, n - 1);
  };
  return first_good_split(blocks, slots, std::min({most, slots, n_blocks}), allowed);
}

}  // namespace fa2

namespace fa3 {

Tile tile_size(int64_t d_qk, int64_t d_vo, bool causal, bool local, bool paged_without_tma,
               int64_t element_bytes) {
  if (element_bytes == 1) {
    if (d_qk <= 64) return {192, 160};
    if (d_qk <= 96) return {192, 128};
    if (d_qk <= 128) return {128, paged_without_tma ? 160 : 224};
    if (d_qk <= 192) return {128, paged_without_tma && local ? 128 : 160};
    return {128, local ? 64 : 128};
  }
  if (d_qk <= 64) {
    if (d_vo == 512) return {64, 64};
    if (d_vo == 256) return {128, 112};
    return {192, causal ? 128 : local || paged_without_tma ? 160 : 192};
  }
  if (d_qk <= 96) return {192, local || paged_without_tma ? 128 : 144};
  if (d_qk <= 128) return {128, causal || local || paged_without_tma ? 128 : 176};
  if (d_qk <= 192) return {128, paged_without_tma || local ? 96 : d_vo <= 128 ? 128 : 112};
  return {128, local ? 64 : 80};
}

int64_t split_bound(const BoundInput& in) {
  constexpr int64_t kL2Bytes = int64_t{50} << 20, kMost = 128;
  if (static_cast<float>(in.tiles) >= 0.8f * static_cast<float>(in.sms)) {
    const bool many_passes =
        in.kv_head_bytes > kL2Bytes && in.m_blocks >= 2 * in.sms && !in.causal_or_local;
    return many_passes ? std::min(ceil_div(in.kv_head_bytes, kL2Bytes), kMost) : 1;
  }
  if (in.n_blocks <= 4) return 1;
  return first_good_split(in.tiles, in.sms, std::min({kMost, in.sms, in.n_blocks}),
                          [](int64_t) { return true; });
}

int64_t blocks_per_split(int64_t sum_m_times_n, int64_t heads, int64_t sms) {
  const float share = static_cast<float>(sum_m_times_n) * 1.1f * static_cast<float>(heads) /
                      static_cast<float>(sms);
  return std::max<int64_t>(static_cast<int64_t>(std::ceil(share)), 1);
}

}  // namespace fa3

namespace flashmla {

std::vector<Piece> pieces(const std::vector<int64_t>& kv_len, int64_t parts) {
  int64_t total = 0;
  for (const int64_t s : kv_len) total += ceil_div(s, kPage) + kOverheadBlocks;
  const int64_t payload = ceil_div(total, parts) + kOverheadBlocks;
  std::vector<Piece> all;
  int32_t part = 0;
  int64_t room = payload;
  for (size_t r = 0; r < kv_len.size(); ++r) {
    int64_t left = ceil_div(kv_len[r], kPage);
    while (room < left + kOverheadBlocks) {  // the part cannot hold the rest of the request
      const int64_t here = std::max<int64_t>(room - kOverheadBlocks, 0);
      if (here > 0) all.push_back({part, static_cast<int32_t>(r), here});
      left -= here;
      ++part;
      room = payload;
    }
    all.push_back({part, static_cast<int32_t>(r), left});
    room -= left + kOverheadBlocks;
  }
  return all;
}

}  // namespace flashmla

}  // namespace attnfold::explain
