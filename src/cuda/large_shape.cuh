// Sizes, shared memory and barriers of the large-row kernel of sm_90a.
#pragma once

#include <cstddef>

#include "cuda/large_args.h"
#include "cuda/large_tiles.cuh"
#include "cuda/ptx.h"

namespace attnfold::cuda {

constexpr int kWarpgroup = 128;  // threads
constexpr int kHalfRows = 64;    // of a tile: what one matrix instruction multiplies
constexpr int kTileHalves = kTileRows / kHalfRows;
constexpr int kLargeThreads = (kTileHalves + 1) * kWarpgroup;
// Each of one half, and the next of the other; 0 is __syncthreads.
constexpr int kTurnBarrier = 1, kOddBarrier = 3;

// Warpgroups, in order: one for each half of the tile's rows, loads.
constexpr int kLoadsGroup = kTileHalves;

// Registers of a thread of each; their mean is what a thread has at launch.
constexpr int kRowsRegisters = 232, kLoadsRegisters = 40;
static_assert(kTileHalves * kRowsRegisters + kLoadsRegisters == 3 * 168);

/** What the loader of keys says of a leaf. */
struct LeafFlags {
  uint32_t bits;

  // << half: some row sees some key; all see all; some row sees some key of the next leaf; this
  // leaf and the next are whole, without ALiBi; the leaf is the last that they see of its
  // super-chunk; of the tile
  static constexpr uint32_t kSeen = 1, kWhole = 4, kNextSeen = 16, kPlain = 64, kChunkLast = 256,
                            kTileLast = 1024;
  static constexpr uint32_t kTileEnds = 4096;
  static constexpr uint32_t kAllPlain = (kSeen | kWhole | kNextSeen | kPlain) * 3,
                            kAllChunkLast = kChunkLast * 3;

  __device__ __forceinline__ bool seen(int half) const { return bits >> half & kSeen; }
  __device__ __forceinline__ bool whole(int half) const { return bits >> half & kWhole; }
  __device__ __forceinline__ bool next_seen(int half) const { return bits >> half & kNextSeen; }
  __device__ __forceinline__ bool plain(int half) const { return bits >> half & kPlain; }
  __device__ __forceinline__ bool chunk_last(int half) const { return bits >> half & kChunkLast; }
  __device__ __forceinline__ bool tile_last(int half) const { return bits >> half & kTileLast; }
  __device__ __forceinline__ bool tile_ends() const { return bits & kTileEnds; }
};

struct LeafNote {
  int32_t first_key;
  LeafFlags flags;
};

/** Notes lie in a ring.  One is written while the leaf before its own waits for a stage, which is
 * at most kStages leaves ahead of who reads. */
constexpr uint32_t kLeafNotes = 8;

/** What the loader of queries says of a tile. */
struct alignas(16) TileNote {
  RowSet set;
  int32_t kv_head, is_none;        // is_none: there are no more tiles
  uint32_t begins;                 // bit h: half h sees the first leaf
  int32_t first_token;             // of the request, that of the tile's first row
  int32_t first_end;               // where the keys end that this row sees before kv_len cuts them
  int32_t row;                     // of ragged keys: the request's first one
  const int32_t* table;            // of others: its page ids
  RowsKeys keys[kTileHalves + 1];  // of the halves, and of the tile
  uint8_t tokens[kTileRows];       // of each row, from first_token on
};
constexpr uint32_t kTileNotes = 4;  // in a ring

/** kDim: the head dim, 64 or 128.  Matrices lie in columns of 64 elements, 128 bytes. */
template <int kDim_>
struct LargeShape {
  static constexpr int kDim = kDim_;
  static constexpr int kColumns = kDim / 64;
  static constexpr int kChunks = kDim / 8;  // of 16 bytes, of a row
  static constexpr int kStages = kDim == 128 ? 3 : 4;
  static constexpr int kLeafBytes = kLeaf * kDim * 2;
  static constexpr uint32_t kColumnStep = 1024;        // of K and V: 8 keys of one column, ..
  static constexpr uint32_t kStep8 = kColumns * 1024;  // .. then 8 keys of the next
  static constexpr int kBoxBytes = kBoxKeys * kDim * 2;
  static constexpr int kHalfBytesQ = kHalfRows * kDim * 2, kColumnBytesQ = kHalfRows * 128;
  static constexpr int kTotalQuads = kDim / 8;  // of a thread's part of a row pair, 4 floats each

  struct Shared {
    unsigned char k[kStages][kLeafBytes];
    unsigned char v[kStages][kLeafBytes];
    unsigned char q[kTileHalves][kHalfBytesQ];
    TileNote tiles[kTileNotes];
    LeafNote notes[kLeafNotes];
    uint64_t full_k[kStages], empty_k[kStages];
    uint64_t full_v[kStages], empty_v[kStages];
    uint64_t full_tile[kTileNotes], empty_tile[kTileNotes];
    uint64_t full_q[kTileHalves], empty_q[kTileHalves];
  };
  static_assert(kStages + 2 <= static_cast<int>(kLeafNotes) && sizeof(Shared) <= 227 * 1024);
};

/** Somebody's way along what is said of the tiles. */
template <class Shape>
class TileReader {
 public:
  __device__ __forceinline__ explicit TileReader(uint32_t shared_in) : shared(shared_in) {}

  /** Waits for what is said of this tile, or the one `ahead`. */
  __device__ __forceinline__ void wait(uint32_t ahead = 0) const {
    barrier_wait(full(ahead), parity(ahead));
  }
  /** The warp has read all that it needs of this tile; goes to the next one. */
  __device__ __forceinline__ void free(int lane) {
    arrive_warp(empty(), lane);
    ++number;
  }

  __device__ __forceinline__ int32_t word(size_t offset, uint32_t ahead = 0) const {
    return static_cast<int32_t>(load_shared_word(address(ahead) + static_cast<uint32_t>(offset)));
  }
  __device__ __forceinline__ VisibleKeys keys(size_t offset) const {
    return {word(offset), word(offset + 4), word(offset + 8)};
  }
  /** Token of a row of the tile, from its first token on. */
  __device__ __forceinline__ int32_t token(int row) const {
    return load_shared_byte(address() + static_cast<uint32_t>(offsetof(TileNote, tokens)) + row);
  }
  /** Where a row of the tile is, that is not behind its last one. */
  __device__ __forceinline__ RowPlace place(int row, int32_t group) const {
    const int32_t token_of_request = word(offsetof(TileNote, first_token)) + token(row);
    return {static_cast<int64_t>(word(offsetof(TileNote, set.q_token))) + token_of_request,
            word(offsetof(TileNote, kv_head)) * group + word(offsetof(TileNote, set.row_begin)) +
                row - token_of_request * group};
  }

  __device__ __forceinline__ uint32_t address(uint32_t ahead = 0) const {
    return shared + ATTNFOLD_SHARED(tiles) +
           (number + ahead) % kTileNotes * static_cast<uint32_t>(sizeof(TileNote));
  }
  __device__ __forceinline__ uint32_t full(uint32_t ahead = 0) const {
    return shared + ATTNFOLD_SHARED(full_tile) + 8 * ((number + ahead) % kTileNotes);
  }
  __device__ __forceinline__ uint32_t empty() const {
    return shared + ATTNFOLD_SHARED(empty_tile) + 8 * (number % kTileNotes);
  }
  __device__ __forceinline__ uint32_t parity(uint32_t ahead = 0) const {
    return (number + ahead) / kTileNotes % 2;
  }

  uint32_t number = 0;

 private:
  const uint32_t shared;
};

template <class Shape>
__device__ __forceinline__ void init_large(uint32_t shared) {
  if (threadIdx.x == 0) {
    const auto init = [&](uint32_t offset, int n, uint32_t arrivals) {
      for (int i = 0; i < n; ++i) barrier_init(shared + offset + 8 * i, arrivals);
    };
    constexpr uint32_t kWarps = 4;  // one lane of each arrives
    init(ATTNFOLD_SHARED(full_k), Shape::kStages, 1);
    init(ATTNFOLD_SHARED(empty_k), Shape::kStages, kTileHalves * kWarps * kArrivingLanes);
    init(ATTNFOLD_SHARED(full_v), Shape::kStages, 1);
    init(ATTNFOLD_SHARED(empty_v), Shape::kStages, kTileHalves * kWarps * kArrivingLanes);
    init(ATTNFOLD_SHARED(full_tile), kTileNotes, kArrivingLanes);
    init(ATTNFOLD_SHARED(empty_tile), kTileNotes, (3 + kTileHalves * kWarps) * kArrivingLanes);
    init(ATTNFOLD_SHARED(full_q), kTileHalves, 32);
    init(ATTNFOLD_SHARED(empty_q), kTileHalves, kWarps * kArrivingLanes);
    fence_barrier_init();
  }
  __syncthreads();
}

}  // namespace attnfold::cuda
