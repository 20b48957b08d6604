// Attention of a few rows on many keys: decode steps and speculative verification.  bf16 and fp16,
// tensor cores of sm_80 and later.
//
// A block takes a range of leaves for one kv head, and then claims more, one after the other, until
// there are none; loaders are a range ahead, so that copies never pause.  Four loader warps bring K
// and V; four matrix warps make the leaf's state and fold it.  Per leaf of 128 keys, R <= 16 rows,
// head dim D:
//   K, V   global -> shared    2 * 128 * D * 2 bytes, each once; loader warp w: keys 32 w ..
//   S      [R, 128] registers  matrix warp w: keys 32 w ..
//   P      [R, 128] shared     16-bit; every warp needs all of it
//   O      [R, D] registers    matrix warp w: elements w D/4 .. of three accumulators, for the
//                              leaf, its super-chunk and the row
// No state moves until a range or a row ends.  Splitting keys for S and elements for O needs no
// exchange of O, and makes the number of warps invisible to the result.
//
// What the bits hang on, besides the canonical fold:
//   1. q.k: k steps of 16, ascending, into an accumulator that starts at 0;
//   2. m = c * max(q.k), p = 2^(fma(q.k, c, -m));
//   3. l: in each lane its keys in order, for each warp; then the warps in order; then the lanes
//      that share a row, by exchanges over 1 and 2;
//   4. o: p rounded to the 16-bit type of V, keys ascending, into an accumulator that starts at 0.
#pragma once

#include "cuda/small_loader.cuh"
#include "cuda/small_matrix.cuh"

namespace attnfold::cuda {

template <class Shape>
__device__ __forceinline__ void init_shared(uint32_t shared, int32_t head_dim) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      for (int w = 0; w < kGroupWarps; ++w) {
        barrier_init(Shape::full(shared, i, w), 32);
        barrier_init(Shape::empty(shared, i, w), kGroupWarps * kArrivingLanes);
      }
    }
    for (int i = 0; i < Shape::kStagesQ; ++i) barrier_init(Shape::full_q(shared, i), kGroupThreads);
    for (int i = 0; Shape::kClaims && i < kClaimStages; ++i)
      barrier_init(Shape::full_claim(shared, i), kArrivingLanes);
  }
  if (head_dim < Shape::kDim) {                                  // elements that no copy fills
    const uint32_t bytes = offsetof(typename Shape::Shared, p);  // of k, v and q
    for (uint32_t at = threadIdx.x * 4; at < bytes; at += kBlockThreads * 4)
      store_shared(shared + at, 0u);
  }
  __syncthreads();
}

// Before CUDA 12.4 the compiler cannot be told a number of registers.
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 4)
#define ATTNFOLD_BOUNDS(Shape) __maxnreg__(Shape::kRegisters)
#else
#define ATTNFOLD_BOUNDS(Shape) __launch_bounds__(kBlockThreads, Shape::kBlocksPerSm)
#endif

template <class Shape, class T>
__global__ void ATTNFOLD_BOUNDS(Shape) attend_small(const __grid_constant__ AttendArgs a) {
  extern __shared__ __align__(128) unsigned char memory[];
  const uint32_t shared = shared_address(memory);
  const int32_t kv_head = static_cast<int32_t>(blockIdx.x);
  const Range* const from = a.schedule.ranges + blockIdx.y * (a.shape.claims + 1);
  if (has_no_work(a, from)) return;
  Range range;
  if constexpr (Shape::kRowTiles == 1) range = load_from_l2(from);  // there are registers for it
  init_shared<Shape>(shared, a.problem.head_dim_vo);
  const int warp = static_cast<int>(threadIdx.x / 32 % kGroupWarps),
            lane = static_cast<int>(threadIdx.x % 32);
  if (threadIdx.x < kGroupThreads) {
    if constexpr (Shape::kBlocksPerSm == 2) give_registers<Shape::kLoaderRegisters>();
    if constexpr (Shape::kRowTiles == 2) range = load_from_l2(from);
    load_range<Shape>(a, shared, range, kv_head, warp, lane);
    write_empty_rows<T>(a, static_cast<int>(threadIdx.x));
    wait_to_end(a);
  } else {
    if constexpr (Shape::kBlocksPerSm == 2) take_registers<Shape::kMatrixRegisters>();
    if constexpr (Shape::kRowTiles == 2) range = load_from_l2(from);
    MatrixWarp<Shape, T>(a, shared, range, kv_head, warp, lane).run();
  }
}

}  // namespace attnfold::cuda
