// A block's way along its tiles, and what their rows see.
#pragma once

#include <cstddef>

#include "cuda/attend.h"
#include "cuda/ptx.h"

// Offset of a member of Shape::Shared.
#define ATTNFOLD_SHARED(member) static_cast<uint32_t>(offsetof(typename Shape::Shared, member))

namespace attnfold::cuda {

/** Pair `index` of the schedule. */
struct TilePair {
  RowSet set;
  int32_t kv_head;
};
__device__ __forceinline__ TilePair pair_at(const AttendArgs& a, int32_t index) {
  return {load_from_l2(a.schedule.tiles + index / a.problem.kv_heads), index % a.problem.kv_heads};
}

/** The tiles of one block: (tile, kv head) pairs, longest first, are dealt to the blocks back and
 * forth. */
class TileWalk {
 public:
  __device__ __forceinline__ explicit TileWalk(const AttendArgs& a)
      : pairs(__ldcg(&a.schedule.num_tiles->tiles) * a.problem.kv_heads),
        blocks(__ldcg(&a.schedule.num_tiles->blocks)) {}

  /** Index of the next pair, or -1. */
  __device__ __forceinline__ int32_t next() {
    const int32_t block = static_cast<int32_t>(blockIdx.x);
    if (block >= blocks) return -1;
    const int32_t index = begin + (back ? blocks - 1 - block : block);
    begin += blocks;
    back = !back;
    return index < pairs ? index : -1;
  }

 private:
  const int32_t pairs, blocks;
  int32_t begin = 0;
  bool back = false;
};

/** Blocks that take tiles in this step. */
__device__ __forceinline__ int32_t busy_tile_blocks(const AttendArgs& a) {
  const int32_t tiles = __ldcg(&a.schedule.num_tiles->tiles),
                blocks = __ldcg(&a.schedule.num_tiles->blocks);
  const int64_t pairs = static_cast<int64_t>(tiles) * a.problem.kv_heads;
  return pairs < blocks ? static_cast<int32_t>(pairs) : blocks;
}

/** A warp has written all its rows. */
__device__ __forceinline__ void report_rows(const AttendArgs& a, int lane) {
  __syncwarp();
  if (!a.tiles_done || lane > 0) return;
  __threadfence();
  atomicAdd(a.tiles_done, 1u);
}

/** Waits, in one thread, until all rows of tiles are written, and sets their counter back. */
__device__ __forceinline__ void wait_for_tiles(const AttendArgs& a) {
  if (!a.tiles_done || blockIdx.x > 0 || threadIdx.x > 0) return;
  constexpr uint32_t kRowsOfWarp = 16;
  const uint32_t warps = static_cast<uint32_t>(busy_tile_blocks(a)) * (kTileRows / kRowsOfWarp);
  while (load_acquire(a.tiles_done) < warps) {
  }
  *a.tiles_done = 0;
}

/** Whether this block takes tiles.  One that does not has waited for the kernels before this one,
 * as the others will: the next kernel starts when all blocks have, and relies on it. */
__device__ __forceinline__ bool has_tiles(const AttendArgs& a) {
  if (static_cast<int32_t>(blockIdx.x) < busy_tile_blocks(a)) return true;
  wait_for_previous_kernels();
  return false;
}

/** Keys of some rows: those that some row sees, and those that all do. */
struct RowsKeys {
  VisibleKeys any, all;
};

/** Of rows [begin, begin + max_rows) of a tile. */
__device__ __forceinline__ RowsKeys keys_of_rows(const AttendArgs& a, const RowSet& set,
                                                 int32_t begin, int32_t max_rows) {
  const int32_t rows = set.num_rows - begin < max_rows ? set.num_rows - begin : max_rows;
  if (rows <= 0) return {};
  const int32_t first = (set.row_begin + begin) / a.shape.group_size,
                last = (set.row_begin + begin + rows - 1) / a.shape.group_size;
  const RequestShape request{set.kv_len - set.position, set.kv_len};
  const VisibleKeys x = visible_keys(a.problem.mask, request, first),
                    y = visible_keys(a.problem.mask, request, last);
  return {{x.sink > y.sink ? x.sink : y.sink, x.begin, y.end},
          {x.sink < y.sink ? x.sink : y.sink, y.begin, x.end}};
}

__device__ __forceinline__ bool meets(const VisibleKeys& keys, int32_t begin, int32_t end) {
  return begin < keys.sink || (begin < keys.end && end > keys.begin && keys.begin < keys.end);
}
__device__ __forceinline__ bool covers(const VisibleKeys& keys, int32_t begin, int32_t end) {
  return end <= keys.sink || (begin >= keys.begin && end <= keys.end);
}

}  // namespace attnfold::cuda
