// Sizes and shared memory of the small-row kernel, and a worker's way along its range.
#pragma once

#include <cstddef>

#include "cuda/attend.h"
#include "cuda/ptx.h"

namespace attnfold::cuda {

constexpr int kGroupWarps = 4;  // loaders, and matrix warps
constexpr int kGroupThreads = kGroupWarps * 32;
constexpr int kBlockThreads = 2 * kGroupThreads;
constexpr int kWarpKeys = kLeaf / kGroupWarps;
constexpr int kMatrixBarrier = 1;

/** Compile-time sizes.  kDim is the head dim in shared memory and registers: the true one, rounded
 * up to 64, 128 or 256. */
template <int kDim_, int kRowTiles_>
struct SmallShape {
  static constexpr int kDim = kDim_;
  static constexpr int kRowTiles = kRowTiles_;  // of 8 rows
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kPitch = kDim * 2;  // bytes of a row of K, V and Q
  static constexpr int kStages =
      kDim == 64 ? 6 : 3;  // leaves of K or V in shared memory: K, V, K, V, ..
  static constexpr int kStagesQ = kStages / 2 + 1;  // a loader is at most that many row sets ahead
  static constexpr int kBlocksPerSm = blocks_per_sm(kDim);
  // 112 registers a thread at launch: two blocks leave room on the SM for one of fold_states.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static constexpr int kRegisters = kBlocksPerSm == 2 ? 112 : 255;
#else
  static constexpr int kRegisters = kBlocksPerSm == 2 ? 128 : 255;
#endif
  static constexpr int kLoaderRegisters = 72, kMatrixRegisters = 152;  // their mean is 112
  static constexpr int kTilesO =
      kDim / kGroupWarps / 8;                    // tiles of 8 elements that a matrix warp makes
  static constexpr int kTilesS = kWarpKeys / 8;  // tiles of 8 keys

  struct Shared {
    unsigned char kv[kStages][kLeaf * kPitch];
    unsigned char q[kStagesQ][kRows * kPitch];
    unsigned char p[kRows * kLeaf * 2];
    float warp_max[kGroupWarps][kRows];
    float warp_sum[kGroupWarps][kRows][4];
    uint64_t full[kStages][kGroupWarps],
        empty[kStages][kGroupWarps];  // one for each loader warp's keys
    uint64_t full_q[kStagesQ];
  };

  // Addresses in shared memory, from that of the struct.
  __device__ static uint32_t kv(uint32_t base, int stage) {
    return base + offsetof(Shared, kv) + stage * (kLeaf * kPitch);
  }
  __device__ static uint32_t q(uint32_t base, int stage) {
    return base + offsetof(Shared, q) + stage * (kRows * kPitch);
  }
  __device__ static uint32_t p(uint32_t base) { return base + offsetof(Shared, p); }
  __device__ static uint32_t warp_max(uint32_t base, int warp, int row) {
    return base + offsetof(Shared, warp_max) + (warp * kRows + row) * 4;
  }
  __device__ static uint32_t warp_sum(uint32_t base, int warp, int row, int lane) {
    return base + offsetof(Shared, warp_sum) + ((warp * kRows + row) * 4 + lane) * 4;
  }
  __device__ static uint32_t full(uint32_t base, int stage, int warp) {
    return base + offsetof(Shared, full) + (stage * kGroupWarps + warp) * 8;
  }
  __device__ static uint32_t empty(uint32_t base, int stage, int warp) {
    return base + offsetof(Shared, empty) + (stage * kGroupWarps + warp) * 8;
  }
  __device__ static uint32_t full_q(uint32_t base, int stage) {
    return base + offsetof(Shared, full_q) + stage * 8;
  }
};

/** A place in a ring of `kStages` buffers. */
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/** A worker's way along its range, leaf by leaf. */
struct Walk {
  RowSet set, next_set;
  int32_t set_index, number, left;
  int32_t entered_states, begun_states;
  bool new_set = true;

  __device__ __forceinline__ Walk(const AttendArgs& a, const Range& range) {
    set = range.set;
    set_index = range.set_index;
    number = range.number;
    left = range.num_leaves;
    entered_states = range.entered_states;
    begun_states = range.begun_states;
    prefetch(a);
  }
  __device__ __forceinline__ void step(const AttendArgs& a) {
    new_set = false;
    if (--left == 0 || ++number < set.num_leaves) return;
    set = next_set;
    ++set_index;
    number = 0;
    new_set = true;
    prefetch(a);
  }

 private:
  __device__ __forceinline__ void prefetch(const AttendArgs& a) {
    if (left > set.num_leaves - number) next_set = load_from_l2(a.schedule.sets + set_index + 1);
  }
};

}  // namespace attnfold::cuda
