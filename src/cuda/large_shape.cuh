// Sizes, shared memory and barriers of the large-row kernel, and a block's way along its tiles.
#pragma once

#include <cstddef>

#include "cuda/large_args.h"
#include "cuda/ptx.h"

namespace attnfold::cuda {

constexpr int kWarpgroup = 128;  // threads
// Barriers at which warps sleep; 0 is __syncthreads, and each buffer of P has one from
// kFullBarrierP on.
constexpr int kValuesBarrier = 1, kQueriesBarrier = 2, kFullBarrierP = 3;
constexpr int kQueryThreads = 64;  // that load queries
constexpr int kHalfRows = 64;      // of a tile: what one matrix instruction multiplies
constexpr int kTileHalves = kTileRows / kHalfRows;
constexpr int kBuffersP = 2;  // one is filled while the other is multiplied
constexpr int kLargeThreads = (kTileHalves + 2) * kWarpgroup;

// Warpgroups, in order: scores of each half of the tile, values, loads.
constexpr int kValuesGroup = kTileHalves, kLoadsGroup = kTileHalves + 1;

// Registers of a thread of each; their mean is what a thread has at launch.
constexpr int kScoresRegisters = 128, kValuesRegisters = 232, kLoadsRegisters = 24;
static_assert(kTileHalves * kScoresRegisters + kValuesRegisters + kLoadsRegisters == 4 * 128);

/** What the loaders say of a leaf. */
struct LeafNote {
  int32_t first_key;
  uint32_t flags;

  // << half: some row sees some key; all see all; some row sees some key of the next leaf; the leaf
  // is the last that they see of its super-chunk; of the tile
  static constexpr uint32_t kSeen = 1, kWhole = 4, kNextSeen = 16, kChunkLast = 64, kTileLast = 256;
  static constexpr uint32_t kTileEnds = 1024;

  __device__ __forceinline__ bool seen(int half) const { return flags >> half & kSeen; }
  __device__ __forceinline__ bool whole(int half) const { return flags >> half & kWhole; }
  __device__ __forceinline__ bool next_seen(int half) const { return flags >> half & kNextSeen; }
  __device__ __forceinline__ bool chunk_last(int half) const { return flags >> half & kChunkLast; }
  __device__ __forceinline__ bool tile_last(int half) const { return flags >> half & kTileLast; }
  __device__ __forceinline__ bool tile_ends() const { return flags & kTileEnds; }
};

/** Notes lie in a ring.  One is written while the leaf before its own waits for a stage, which is
 * at most kStages leaves ahead of who reads. */
constexpr uint32_t kLeafNotes = 8;

/** kDim: the head dim, 64 or 128.  Matrices lie in columns of 64 elements, 128 bytes. */
template <int kDim_>
struct LargeShape {
  static constexpr int kDim = kDim_;
  static constexpr int kColumns = kDim / 64;
  static constexpr int kStages = kDim == 128 ? 2 : 4;
  static constexpr int kLeafBytes = kLeaf * kDim * 2;
  static constexpr uint32_t kColumnStep = 1024;        // of K and V: 8 keys of one column, ..
  static constexpr uint32_t kStep8 = kColumns * 1024;  // .. then 8 keys of the next
  static constexpr int kBoxBytes = kBoxKeys * kDim * 2;
  static constexpr int kPitchQ = kDim * 2;
  static constexpr int kHalfBytesP = kHalfRows * kLeaf * 2, kColumnBytesP = kHalfRows * 128;

  struct Shared {
    unsigned char k[kStages][kLeafBytes];
    unsigned char v[kStages][kLeafBytes];
    unsigned char p[kTileHalves][kBuffersP][kHalfBytesP];
    unsigned char q[kTileRows * kPitchQ];
    float2 ml[kTileHalves][kBuffersP][kHalfRows];  // of the leaf whose P lies beside it
    struct {
      RowSet set;
      int32_t kv_head, ends, unused[2];
    } tile[2];
    LeafNote note_k[kLeafNotes], note_v[kLeafNotes];
    uint64_t full_k[kStages], empty_k[kStages];
    uint64_t full_v[kStages], empty_v[kStages];
    uint64_t empty_p[kTileHalves][kBuffersP];
    uint64_t full_tile[2], empty_tile[2];  // with its rows of q
  };
  static_assert(kStages + 2 <= static_cast<int>(kLeafNotes) && sizeof(Shared) <= 227 * 1024);
};

#define ATTNFOLD_SHARED(member) static_cast<uint32_t>(offsetof(typename Shape::Shared, member))

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
    init(ATTNFOLD_SHARED(empty_v), Shape::kStages, kWarps * kArrivingLanes);
    init(ATTNFOLD_SHARED(empty_p), kTileHalves * kBuffersP, kWarps * kArrivingLanes);
    init(ATTNFOLD_SHARED(full_tile), 2, kQueryThreads + 1);
    init(ATTNFOLD_SHARED(empty_tile), 2, (kTileHalves + 1) * kWarps * kArrivingLanes);
    fence_barrier_init();
  }
  __syncthreads();
}

/** A value that is the same for all lanes, so that the compiler knows, and keeps it in a register
 * of the warp. */
__device__ __forceinline__ uint32_t uniform(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_or_sync(~0u, x);
#else
  return __shfl_sync(~0u, x, 0);
#endif
}

/** One lane for its warp, after what the warp did before; every lane for racecheck. */
__device__ __forceinline__ void arrive_warp(uint32_t barrier, int lane) {
  __syncwarp();
  if (lane < kArrivingLanes) barrier_arrive(barrier);
}

/** Where a half's P of a leaf lies, with its m and l, leaf after leaf, handed from the scores to
 * the values and back. */
template <class Shape>
class BufferP {
 public:
  __device__ __forceinline__ uint32_t p(uint32_t shared, int half) const {
    return shared + ATTNFOLD_SHARED(p) + index(half) * Shape::kHalfBytesP;
  }
  __device__ __forceinline__ uint32_t ml(uint32_t shared, int half, int row) const {
    return shared + ATTNFOLD_SHARED(ml) + (index(half) * kHalfRows + row) * 8;
  }
  __device__ __forceinline__ void fill(int half) {
    group_arrive<2 * kWarpgroup>(kFullBarrierP + index(half));
    ++uses;
  }
  __device__ __forceinline__ void wait_until_full(int half) const {
    group_wait<2 * kWarpgroup>(kFullBarrierP + index(half));
  }
  __device__ __forceinline__ void empty(uint32_t shared, int half, int lane) {
    arrive_warp(empty_barrier(shared, half), lane);
    ++uses;
  }
  __device__ __forceinline__ void wait_until_empty(uint32_t shared, int half) const {
    barrier_wait(empty_barrier(shared, half), uses / kBuffersP % 2 ^ 1);
  }

 private:
  __device__ __forceinline__ uint32_t index(int half) const {
    return half * kBuffersP + uses % kBuffersP;
  }
  __device__ __forceinline__ uint32_t empty_barrier(uint32_t shared, int half) const {
    return shared + ATTNFOLD_SHARED(empty_p) + index(half) * 8;
  }
  uint32_t uses = 0;
};

/** The tiles of one block: (tile, kv head) pairs, longest first, are dealt to the blocks back and
 * forth. */
class TileWalk {
 public:
  __device__ __forceinline__ explicit TileWalk(const AttendArgs& a)
      : pairs(__ldcg(a.schedule.num_tiles) * a.problem.kv_heads) {}

  /** Index of the next pair, or -1. */
  __device__ __forceinline__ int32_t next() {
    const int32_t blocks = static_cast<int32_t>(gridDim.x),
                  block = static_cast<int32_t>(blockIdx.x);
    const int32_t index = begin + (back ? blocks - 1 - block : block);
    begin += blocks;
    back = !back;
    return index < pairs ? index : -1;
  }

 private:
  const int32_t pairs;
  int32_t begin = 0;
  bool back = false;
};

}  // namespace attnfold::cuda
