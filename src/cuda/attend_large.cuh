// Attention of many rows: prefill and chunked prefill.  bf16 and fp16, tensor cores of sm_90a.
//
// A block takes tiles of 128 rows of one request and kv head, one after the other, and all leaves
// that they see.  Three warpgroups, for rows R = 64, half a tile, and head dim D:
//   loads     K, V   global -> shared    2 * 128 * D * 2 bytes a leaf, by the copy engine, 3 leaves
//             q      global -> shared    128 * D * 2 bytes a tile
//   rows x 2  S      [64, 128] registers S = Q K^T, P = 2^(c S - m) in its place, m and l
//             O      [64, D] registers   P V from nothing, then folded: leaf into super-chunk
//             total  [64, D] in memory   super-chunks folded, once in 16 leaves
// The two halves take turns, so that one's exponentials run beside the other's scores and fold.
//
// The bits are those of the small-row kernel (cuda/attend_small.cuh): the same k order, maximum,
// exponent, row sum and rounding of P, and one matrix instruction or another is the same to the
// last bit.
#pragma once

#include "cuda/large_loader.cuh"
#include "cuda/large_rows.cuh"

namespace attnfold::cuda {

template <class Shape, class T>
__global__ void __launch_bounds__(kLargeThreads, 1)
    attend_large(const __grid_constant__ LargeArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if (!has_tiles(args.attend)) return;
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = uniform(shared_address(memory));
  init_large<Shape>(shared);
  const int group = static_cast<int>(uniform(threadIdx.x / kWarpgroup)),
            warp = static_cast<int>(uniform(threadIdx.x / 32 % 4)),
            lane = static_cast<int>(threadIdx.x % 32);
  if (group == kLoadsGroup) {
    give_registers<kLoadsRegisters>();
    load_large<Shape>(args, shared, warp, lane);
  } else {
    take_registers<kRowsRegisters>();
    RowGroup<Shape, T>(args, shared, group, warp, lane).run();
  }
#endif
}

}  // namespace attnfold::cuda
