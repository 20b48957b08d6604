// How public engines cut attention for decoding, as pure functions of what each of them looks at.
// Each namespace names the files that it restates; engines.cpp applies them to a batch.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "explain/quantities.h"

namespace attnfold::explain {

// vLLM, v1/attention/ops/triton_unified_attention.py and backends/triton_attn.py, flash_attn.py.
namespace vllm {

inline constexpr int64_t kMinGrid2d = 128, kSegments = 16, kCascadePrefix = 256,
                         kCascadeRequests = 8;

/** Rows of a tile: query tokens times the heads of a group. */
inline int64_t block_m(int64_t group) {
  return group <= 16 ? 16 : static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(group)));
}
inline int64_t block_q(int64_t block_m, int64_t group) { return block_m / group; }
inline int64_t q_blocks(int64_t tokens, int64_t requests, int64_t block_q) {
  return tokens / block_q + requests;
}
inline int64_t grid_2d(int64_t tokens, int64_t requests, int64_t h_kv, int64_t block_q) {
  return q_blocks(tokens, requests, block_q) * h_kv;
}
/** Keys of a tile while decoding. */
inline int64_t decode_tile(int64_t q_element_bytes, int64_t window, int64_t d) {
  if (window == 1024 && (d == 128 || d == 256)) return 32;
  return q_element_bytes >= 2 ? 16 : 32;
}
/** The most requests that are still split. */
inline int64_t threshold_3d(int64_t h_kv, int64_t min_grid) { return min_grid / h_kv; }
/** With full CUDA graphs: the captured batch size next to the threshold, the first of two. */
int64_t captured_threshold(int64_t threshold, const std::vector<int64_t>& capture_sizes);

inline int64_t segment_tiles(int64_t s, int64_t tile, int64_t segments) {
  return ceil_div(s, tile * segments);
}
inline int64_t segment_keys(int64_t s, int64_t tile, int64_t segments) {
  return tile * segment_tiles(s, tile, segments);
}
/** Segments that hold keys; the others return at once. */
inline int64_t active_segments(int64_t s, int64_t tile, int64_t segments) {
  return s == 0 ? 0 : ceil_div(s, segment_keys(s, tile, segments));
}

/** Whether cascade attention pays once it is allowed. */
struct CascadeCost {
  int64_t cascade, flash_decoding;  // waves times tiles of 128 keys
  bool pays() const { return cascade < flash_decoding; }
};
inline CascadeCost cascade_cost(int64_t requests, int64_t h, int64_t h_kv, int64_t prefix,
                                int64_t sms) {
  const int64_t kv_tiles = ceil_div(prefix, 128);
  return {ceil_div(h * ceil_div(requests, 128), sms) * kv_tiles,
          ceil_div(requests * h_kv * ceil_div(h / h_kv, 128) * kv_tiles, sms)};
}

}  // namespace vllm

// SGLang, kernels/ops/attention/metadata.py (get_num_kv_splits_triton) and decode_attention.py.
namespace sglang {

inline constexpr int64_t kBlockH = 16, kMaxSplits = 8, kDeterministicTile = 256;

/** Query heads of a block. */
inline int64_t block_h(int64_t h, int64_t h_kv, int64_t most) { return std::min(most, h / h_kv); }
inline int64_t head_tiles(int64_t h, int64_t h_kv, int64_t most) {
  return h == h_kv ? h : ceil_div(h, block_h(h, h_kv, most));
}
inline int64_t token_grid(int64_t requests, int64_t h, int64_t h_kv, int64_t most) {
  return requests * head_tiles(h, h_kv, most);
}
/** The SMs that a batch is cut for: more, the longer its longest request. */
inline int64_t extended_sms(int64_t sms, int64_t longest) {
  return static_cast<int64_t>(static_cast<double>(sms) *
                              std::max(std::log2(static_cast<double>(longest) / 64), 1.0));
}

/** The two chunk lengths from which every request's split count follows. */
struct Chunks {
  int64_t by_length, by_sms;
};
Chunks chunks(const std::vector<int64_t>& kv_len, int64_t sms, int64_t grid, int64_t max_splits);
inline int64_t splits(int64_t s, const Chunks& c) {
  return std::max(ceil_div(s, c.by_length), ceil_div(s, c.by_sms));
}
/** Keys of a split: a multiple of 32. */
inline int64_t split_keys(int64_t s, int64_t splits) {
  return ceil_div(ceil_div(s, splits), 32) * 32;
}
/** Cap of the split count for latent attention. */
int64_t latent_max_splits(int64_t flag, int64_t sms, int64_t max_context);

}  // namespace sglang

// FlashInfer, include/flashinfer/attention/scheduler.cuh and utils.cuh.
namespace flashinfer {

/** Rows of a tile; `packed` is the mean (graph: largest) number of rows of a request and kv head.
 */
int64_t cta_tile_q(int64_t packed, int64_t d_qk, int64_t d_vo);

/** The smallest chunk in [low, high] pages with which `blocks(chunk)` is at most `limit`; else
 * `high`. */
template <class Blocks>
int64_t smallest_chunk(int64_t low, int64_t high, int64_t limit, Blocks&& blocks) {
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (blocks(middle) > limit) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}
inline int64_t smallest_pages(int64_t page) { return std::max<int64_t>(128 / page, 1); }

}  // namespace flashinfer

// FlashAttention 2, csrc/flash_attn/flash_api.cpp.
namespace fa2 {

inline int64_t block_n(int64_t d) { return d <= 64 ? 256 : d <= 128 ? 128 : 64; }
int64_t num_splits(int64_t blocks, int64_t sms, int64_t n_blocks, int64_t most);

}  // namespace fa2

// FlashAttention 3, hopper/heuristics.h, tile_size.h, flash_api.cpp and flash_prepare_scheduler.cu.
namespace fa3 {

struct Tile {
  int64_t m, n;  // rows, keys
};
Tile tile_size(int64_t d_qk, int64_t d_vo, bool causal, bool local, bool paged_without_tma,
               int64_t element_bytes);

struct BoundInput {
  int64_t tiles;          // row tiles of all heads, and of all requests unless lengths vary
  int64_t m_blocks;       // of one kv head
  int64_t n_blocks;       // of the longest request
  int64_t kv_head_bytes;  // of it
  int64_t sms;
  bool causal_or_local;
};
/** The most splits that any request gets. */
int64_t split_bound(const BoundInput& in);

/** Blocks of keys that one split of a request takes, from the work of the whole batch. */
int64_t blocks_per_split(int64_t sum_m_times_n, int64_t heads, int64_t sms);
inline int64_t dynamic_splits(int64_t n_blocks, int64_t per_split, int64_t bound) {
  return std::max<int64_t>(std::min(ceil_div(n_blocks, per_split), bound), 1);
}
inline constexpr int64_t kLargestDynamicBatch = 992;

}  // namespace fa3

// FlashMLA, csrc/smxx/decode/get_decoding_sched_meta and csrc/api/dense_decode.h.
namespace flashmla {

inline constexpr int64_t kPage = 64, kOverheadBlocks = 5;

inline int64_t parts(int64_t sms, int64_t rows_per_kv_head, int64_t h_kv) {
  return std::max<int64_t>(sms / h_kv / ceil_div(rows_per_kv_head, 64), 1);
}
/** What a part takes of a request, in pages of keys. */
struct Piece {
  int32_t part, request;
  int64_t pages;
};
/** Parts filled one after the other, each up to an equal share of all pages. */
std::vector<Piece> pieces(const std::vector<int64_t>& kv_len, int64_t parts);

}  // namespace flashmla

// PagedAttention, vLLM before July 2026, csrc/attention/paged_attention_v2.cu; ROCm's,
// csrc/rocm/attention.cu.
namespace paged {

inline constexpr int64_t kPartition = 512, kRocmPartition = 256;
inline int64_t partitions(int64_t s, int64_t partition) { return ceil_div(s, partition); }

}  // namespace paged

}  // namespace attnfold::explain
