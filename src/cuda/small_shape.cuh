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
// Claimed ranges on their way from the loaders to everyone.  Where one is handed on, all matrix
// warps are done with the leaf four before the next one (three stages: three before), so that they
// have read all but the last four; a range has a leaf at least.
constexpr int kClaimStages = 8;

/** Compile-time sizes.  kDim is the head dim in shared memory and registers: the true one, rounded
 * up to 64, 128 or 256.  Without kClaims there is nothing to claim: what claiming adds to the loops
 * costs small problems 2 %. */
template <int kDim_, int kRowTiles_, bool kClaims_>
struct SmallShape {
  static constexpr bool kClaims = kClaims_;
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
  static constexpr int kCopyKeys = kWarpKeys;    // of a leaf, of a loader warp
  static constexpr bool kReadsAgain = false;     // keys, soon

  struct Shared {
    unsigned char kv[kStages][kLeaf * kPitch];
    unsigned char q[kStagesQ][kRows * kPitch];
    unsigned char p[kRows * kLeaf * 2];
    unsigned char claims[kClaimStages][sizeof(Range)];
    float warp_max[kGroupWarps][kRows];
    float warp_sum[kGroupWarps][kRows][4];
    uint64_t full[kStages][kGroupWarps],
        empty[kStages][kGroupWarps];  // one for each loader warp's keys
    uint64_t full_q[kStagesQ];
    uint64_t full_claim[kClaimStages];
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
  __device__ static uint32_t claim(uint32_t base, int stage) {
    return base + offsetof(Shared, claims) + stage * static_cast<int>(sizeof(Range));
  }
  __device__ static uint32_t full_claim(uint32_t base, int stage) {
    return base + offsetof(Shared, full_claim) + stage * 8;
  }
};

/**
 * Waits for the kernels before this one.  A large-row kernel of the same call has waited for them
 * before it let this one start, and runs beside it.
 */
__device__ __forceinline__ void wait_to_begin(const AttendArgs& a) {
  if (!a.beside_tiles) wait_for_previous_kernels();
}

/** Where no second kernel does so: waits, in the last block to begin, for the large-row kernel of
 * the same call.  Who waits for this kernel waits for both. */
__device__ __forceinline__ void wait_to_end(const AttendArgs& a) {
  if (a.beside_tiles && !a.tiles_done && blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1)
    wait_for_previous_kernels();
}

/** Whether a block beside tiles has nothing to do, not even to wait for them. */
__device__ __forceinline__ bool has_no_work(const AttendArgs& a, const Range* range) {
  if (!a.beside_tiles || (blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1)) return false;
  return __ldcg(&range->num_leaves) == 0 && __ldcg(&a.schedule.counts->empty_sets) == 0;
}

/** A worker's way along its range, leaf by leaf. */
struct Walk {
  RowSet set, next_set;
  int32_t set_index, number, left;
  int32_t entered_states, begun_states;
  bool new_set;

  __device__ __forceinline__ Walk(const AttendArgs& a, const Range& range) { enter(a, range); }
  __device__ __forceinline__ void enter(const AttendArgs& a, const Range& range) {
    new_set = true;
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

/** A block's claimed ranges, as they come. */
template <class Shape>
class Claims {
 public:
  __device__ __forceinline__ explicit Claims(const Range& range)
      : taken(Shape::kClaims && range.num_claimed > 0 ? 0 : -1) {}

  /** Whether there may be another one. */
  __device__ __forceinline__ bool more() const { return Shape::kClaims && taken >= 0; }
  /** Where that will be. */
  __device__ __forceinline__ int stage() const { return taken % kClaimStages; }

  /** Waits for the next one and goes over to it; false if there is none left. */
  __device__ __forceinline__ bool enter_next(const AttendArgs& a, uint32_t shared, Walk& walk,
                                             int32_t& kv_head) {
    barrier_wait(Shape::full_claim(shared, stage()), taken / kClaimStages % 2);
    static_assert(sizeof(Range) % 16 == 0);
    union {
      uint4 quads[sizeof(Range) / 16];
      Range range;
    } r;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Range) / 16); ++i)
      r.quads[i] = load_shared_quad(Shape::claim(shared, stage()) + 16 * i);
    ++taken;
    if (r.range.num_leaves == 0) taken = -1;
    if (!more()) return false;
    walk.enter(a, r.range);
    kv_head = r.range.kv_head;
    return true;
  }

 private:
  int32_t taken;  // so far; -1 when there is none left
};

}  // namespace attnfold::cuda
