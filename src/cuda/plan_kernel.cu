// The planner on the device: the functions of plan/range_schedule.h, one block, once per step.
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "cuda/kernels.h"
#include "cuda/plan_kernel.h"
#include "cuda/ptx.h"

namespace attnfold::cuda {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kSortEach = kTileSegment / kPlanThreads;

using CountScan = cub::BlockScan<RangeCounts, kPlanThreads>;
using Scan = cub::BlockScan<int32_t, kPlanThreads>;
using Reduce = cub::BlockReduce<TileLoad, kPlanThreads>;
using Sort = cub::BlockRadixSort<uint32_t, kPlanThreads, kSortEach, int32_t>;

/** Shared memory, one step's after the other. */
union Storage {
  CountScan::TempStorage counts;
  Scan::TempStorage scan;
  Reduce::TempStorage reduce;
  Sort::TempStorage sort;
  struct {
    Scan::TempStorage scan;
    int32_t first[kPlanThreads];  // tile of each request of a round
  } tiles;
};
static_assert(sizeof(Storage) <= 47 * 1024);  // a kernel may name 48 KB, on most devices

struct AddCounts {
  __device__ __forceinline__ RangeCounts operator()(const RangeCounts& x,
                                                    const RangeCounts& y) const {
    return {x.sets + y.sets, x.empty_sets + y.empty_sets, x.leaves + y.leaves};
  }
};

/** A request as the planner sees it. */
struct RequestLengths {
  int32_t q_token, qo_len, kv_len;
};

__device__ __forceinline__ RequestLengths lengths_of(const PlanArgs& a, int32_t r) {
  if (r >= a.batch) return {0, 0, 0};
  const int32_t q_token = a.qo_indptr[r];
  const int32_t kv_len = a.kv_len ? a.kv_len[r] : a.kv_indptr[r + 1] - a.kv_indptr[r];
  return {q_token, a.qo_indptr[r + 1] - q_token, kv_len < a.max_kv_len ? kv_len : a.max_kv_len};
}

struct AddLoads {
  __device__ __forceinline__ TileLoad operator()(const TileLoad& x, const TileLoad& y) const {
    return {x.leaves + y.leaves, x.longest > y.longest ? x.longest : y.longest};
  }
};

/** What tiles would cost, to every thread. */
__device__ __forceinline__ TileLoad load_of_tiles(const PlanArgs& a, Storage& storage) {
  __shared__ TileLoad all;
  TileLoad load{};
  for (int32_t r = static_cast<int32_t>(threadIdx.x); r < a.batch; r += kPlanThreads) {
    const RequestLengths n = lengths_of(a, r);
    load = AddLoads{}(load, tile_load(a.shape, a.mask, n.qo_len, n.kv_len));
  }
  load = Reduce(storage.reduce).Reduce(load, AddLoads{});
  if (threadIdx.x == 0) all = load;
  __syncthreads();
  return all;
}

/** Lists all tiles, in the order of their requests, behind where they will stand sorted; returns
 * how many to every thread. */
__device__ __forceinline__ int32_t list_tiles(const PlanArgs& a, int32_t limit, Storage& storage) {
  int32_t* const first = storage.tiles.first;
  int32_t before = 0;
  for (int32_t base = 0; base < a.batch; base += kPlanThreads) {
    const RequestLengths n = lengths_of(a, base + static_cast<int32_t>(threadIdx.x));
    const int32_t count = n.qo_len * a.shape.group_size > limit ? num_tiles(a.shape, n.qo_len) : 0;
    int32_t at, all;
    Scan(storage.tiles.scan).ExclusiveSum(count, at, all);
    first[threadIdx.x] = at;
    __syncthreads();
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < all; i += kPlanThreads) {
      int32_t low = 0,
              high = kPlanThreads - 1;  // the last request whose tiles begin at i or before
      while (low < high) {
        const int32_t middle = (low + high + 1) / 2;
        if (first[middle] <= i) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      const RequestLengths m = lengths_of(a, base + low);
      a.schedule.tiles[a.schedule.max_tiles + before + i] = row_set(
          a.shape, kTileRows, a.mask, base + low, m.q_token, m.qo_len, m.kv_len, i - first[low]);
    }
    before += all;
    __syncthreads();
  }
  return before;
}

/** Sorts them, a segment at a time. */
__device__ __forceinline__ void sort_tiles(const PlanArgs& a, int32_t tiles, Storage& storage) {
  const RowSet* from = a.schedule.tiles + a.schedule.max_tiles;
  for (int32_t base = 0; base < tiles; base += kTileSegment) {
    uint32_t leaves[kSortEach];
    int32_t index[kSortEach];
    for (int i = 0; i < kSortEach; ++i) {
      index[i] = base + static_cast<int32_t>(threadIdx.x) * kSortEach + i;
      // One more than its leaves: what lies beyond the last tile comes last.
      leaves[i] =
          index[i] < tiles ? static_cast<uint32_t>(__ldcg(&from[index[i]].num_leaves)) + 1 : 0;
    }
    Sort(storage.sort).SortDescending(leaves, index);
    for (int i = 0; i < kSortEach; ++i) {
      const int32_t to = base + static_cast<int32_t>(threadIdx.x) * kSortEach + i;
      if (to < tiles) a.schedule.tiles[to] = load_from_l2(from + index[i]);
    }
    __syncthreads();
  }
}

/** Lists all row sets; returns the batch's counts to every thread. */
__device__ __forceinline__ RangeCounts place_sets(const PlanArgs& a, int32_t limit,
                                                  Storage& storage) {
  RangeCounts before{};  // of the requests of earlier rounds
  for (int32_t base = 0; base < a.batch; base += kPlanThreads) {
    const int32_t r = base + static_cast<int32_t>(threadIdx.x);
    const RequestLengths n = lengths_of(a, r);
    const int32_t num_sets =
        n.qo_len * a.shape.group_size > limit ? 0 : num_row_sets(a.shape, n.qo_len);
    RangeCounts counts{};
    for (int32_t i = 0; i < num_sets; ++i) {
      const RowSet s =
          row_set(a.shape, a.shape.set_rows, a.mask, r, n.q_token, n.qo_len, n.kv_len, i);
      ++(s.num_leaves > 0 ? counts.sets : counts.empty_sets);
      counts.leaves += s.num_leaves;
    }
    RangeCounts at, all;
    CountScan(storage.counts).ExclusiveScan(counts, at, RangeCounts{}, AddCounts{}, all);
    at = AddCounts{}(before, at);
    for (int32_t i = 0; i < num_sets; ++i) {
      RowSet s = row_set(a.shape, a.shape.set_rows, a.mask, r, n.q_token, n.qo_len, n.kv_len, i);
      s.start = at.leaves;
      a.schedule.sets[s.num_leaves > 0 ? at.sets++ : a.schedule.max_sets - 1 - at.empty_sets++] = s;
      at.leaves += s.num_leaves;
    }
    before = AddCounts{}(before, all);
    __syncthreads();
  }
  return before;
}

/** The first rule of cuts that keeps ranges even. */
__device__ __forceinline__ CutRule choose_cuts(const PlanArgs& a, const RangeCounts& n,
                                               bool tiles) {
  CutRule rule{};
  for (int index = 0; index < kCutRules; ++index) {
    rule = cut_rule(a.schedule.sets, n, a.shape, tiles, index);
    if (rule.num_ranges == 0) continue;
    const int32_t allowed = largest_share_allowed(rule);
    bool uneven = false;
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < num_owned(a.shape); i += kPlanThreads) {
      uneven = uneven || cut_at(rule, i + 1) - cut_at(rule, i) > allowed;
    }
    if (!__syncthreads_or(uneven)) break;
  }
  return rule;
}

__global__ void __launch_bounds__(kPlanThreads) plan_ranges(const __grid_constant__ PlanArgs a) {
  __shared__ Storage storage;
  __shared__ int32_t shared_rows;
  if (threadIdx.x == 0) shared_rows = 0;
  TileLoad load{};
  if (a.shape.tile_blocks > 0) load = load_of_tiles(a, storage);
  const int32_t limit = tile_limit(a.shape, load);
  int32_t tiles = 0;
  if (a.shape.tile_blocks > 0) {
    tiles = list_tiles(a, limit, storage);
    sort_tiles(a, tiles, storage);
  }
  const RangeCounts n = place_sets(a, limit, storage);
  const CutRule rule = choose_cuts(a, n, tiles > 0);
  const int32_t claimed = claimed_leaves(rule);
  int32_t num_shared = 0, num_states = 0, num_claimed = 0;
  for (int32_t base = 0; base < a.shape.num_ranges; base += kPlanThreads) {
    const int32_t i = base + static_cast<int32_t>(threadIdx.x);
    Range range{};
    RangeStates left{};
    bool first_inside = false;
    int32_t cut = 0;
    if (i < a.shape.num_ranges) {
      cut = range_begin(rule, claimed, i);
      range = make_range(a.schedule.sets, n, cut, range_begin(rule, claimed, i + 1));
      left = count_states(a.schedule.sets, n, range);
      first_inside = i > 0 && is_first_inside(range, range_begin(rule, claimed, i - 1));
    }
    int32_t index, all;
    Scan(storage.scan).ExclusiveSum(first_inside ? 1 : 0, index, all);
    if (first_inside) {
      a.schedule.shared[num_shared + index] = {range.set, i - 1, 0, 0, 0};
      atomicMax(&shared_rows, range.set.num_rows);
    }
    num_shared += all;
    __syncthreads();
    Scan(storage.scan).ExclusiveSum(left.entered + left.begun, index, all);
    if (i < a.shape.num_ranges) {
      range.entered_states = num_states + index;
      range.begun_states = range.entered_states + left.entered;
      a.schedule.ranges[i] = range;
      a.schedule.places[i] = {cut, range.entered_states, range.begun_states, 0};
    }
    num_states += all;
    __syncthreads();
  }
  for (int32_t base = 0; base < num_owned(a.shape) * a.shape.claims; base += kPlanThreads) {
    const int32_t i = base + static_cast<int32_t>(threadIdx.x);
    const Range* range = a.schedule.ranges;
    bool some = false;
    if (i < num_owned(a.shape) * a.shape.claims) {
      range += claimed_range(a.shape, i);
      some = range->num_leaves > 0;
    }
    int32_t index, all;
    Scan(storage.scan).ExclusiveSum(some ? 1 : 0, index, all);
    if (some) a.schedule.claimed[num_claimed + index] = *range;
    num_claimed += all;
    __syncthreads();
  }
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < a.shape.num_ranges; i += kPlanThreads)
    a.schedule.ranges[i].num_claimed = num_claimed;
  for (int32_t i = num_shared + static_cast<int32_t>(threadIdx.x); i < a.shape.num_ranges;
       i += kPlanThreads) {
    a.schedule.shared[i] = {{}, -1, 0, 0, 0};
  }
  if (threadIdx.x == 0) {
    a.schedule.places[a.shape.num_ranges] = {n.leaves, num_states, num_states, 0};
    *a.schedule.counts = n;
    *a.schedule.num_shared = {num_shared, shared_rows};
    if (a.shape.tile_blocks > 0)
      *a.schedule.num_tiles = {tiles, choose_tile_blocks(a.shape, load, tiles, n.leaves)};
  }
  __syncthreads();
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < num_shared; i += kPlanThreads)
    find_states(a.schedule.places, a.shape.num_ranges, a.schedule.shared + i);
  __threadfence();  // the next kernel may read before it has waited for this one
}

}  // namespace

cudaError_t launch_plan(const PlanArgs& args, cudaStream_t stream) {
  plan_ranges<<<1, kPlanThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t load_plan_kernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, plan_ranges);
}

}  // namespace attnfold::cuda
