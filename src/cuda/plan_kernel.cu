// The planner on the device: the functions of plan/range_schedule.h, one block, once per step.
#include <cub/block/block_scan.cuh>

#include "cuda/kernels.h"
#include "cuda/plan_kernel.h"

namespace attnfold::cuda {
namespace {

constexpr int kPlanThreads = 1024;

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

/** Lists all row sets; returns the batch's counts to every thread. */
__device__ __forceinline__ RangeCounts place_sets(const PlanArgs& a) {
  using Scan = cub::BlockScan<RangeCounts, kPlanThreads>;
  __shared__ typename Scan::TempStorage storage;
  RangeCounts before{};  // of the requests of earlier rounds
  for (int32_t base = 0; base < a.batch; base += kPlanThreads) {
    const int32_t r = base + static_cast<int32_t>(threadIdx.x);
    const RequestLengths n = lengths_of(a, r);
    const int32_t num_sets = num_row_sets(a.shape, n.qo_len);
    RangeCounts counts{};
    for (int32_t i = 0; i < num_sets; ++i) {
      const RowSet s = row_set(a.shape, a.mask, r, n.q_token, n.qo_len, n.kv_len, i);
      ++(s.num_leaves > 0 ? counts.sets : counts.empty_sets);
      counts.leaves += s.num_leaves;
    }
    RangeCounts at, all;
    Scan(storage).ExclusiveScan(counts, at, RangeCounts{}, AddCounts{}, all);
    at = AddCounts{}(before, at);
    for (int32_t i = 0; i < num_sets; ++i) {
      RowSet s = row_set(a.shape, a.mask, r, n.q_token, n.qo_len, n.kv_len, i);
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
__device__ __forceinline__ CutRule choose_cuts(const PlanArgs& a, const RangeCounts& n) {
  CutRule rule{};
  for (int index = 0; index < kCutRules; ++index) {
    rule = cut_rule(a.schedule.sets, n, a.shape, index);
    if (rule.num_ranges == 0) continue;
    const int32_t allowed = largest_share_allowed(rule);
    bool uneven = false;
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < a.shape.num_ranges; i += kPlanThreads) {
      uneven = uneven || cut_at(rule, i + 1) - cut_at(rule, i) > allowed;
    }
    if (!__syncthreads_or(uneven)) break;
  }
  return rule;
}

__global__ void __launch_bounds__(kPlanThreads) plan_ranges(const __grid_constant__ PlanArgs a) {
  using Scan = cub::BlockScan<int32_t, kPlanThreads>;
  __shared__ typename Scan::TempStorage storage;
  const RangeCounts n = place_sets(a);
  const CutRule rule = choose_cuts(a, n);
  int32_t num_shared = 0, num_states = 0;
  for (int32_t base = 0; base < a.shape.num_ranges; base += kPlanThreads) {
    const int32_t i = base + static_cast<int32_t>(threadIdx.x);
    Range range{};
    RangeStates left{};
    bool first_inside = false;
    const int32_t cut = cut_at(rule, i);
    if (i < a.shape.num_ranges) {
      range = make_range(a.schedule.sets, n, cut, cut_at(rule, i + 1));
      left = count_states(a.schedule.sets, n, range);
      first_inside = i > 0 && is_first_inside(range, cut_at(rule, i - 1));
    }
    int32_t index, all;
    Scan(storage).ExclusiveSum(first_inside ? 1 : 0, index, all);
    if (first_inside) a.schedule.shared[num_shared + index] = {range.set, i - 1, {}};
    num_shared += all;
    __syncthreads();
    Scan(storage).ExclusiveSum(left.entered + left.begun, index, all);
    if (i < a.shape.num_ranges) {
      range.entered_states = num_states + index;
      range.begun_states = range.entered_states + left.entered;
      a.schedule.ranges[i] = range;
      a.schedule.places[i] = {cut, range.entered_states, range.begun_states, 0};
    }
    num_states += all;
    __syncthreads();
  }
  for (int32_t i = num_shared + static_cast<int32_t>(threadIdx.x); i < a.shape.num_ranges;
       i += kPlanThreads) {
    a.schedule.shared[i] = {{}, -1, {}};
  }
  if (threadIdx.x == 0) {
    a.schedule.places[a.shape.num_ranges] = {n.leaves, num_states, num_states, 0};
    *a.schedule.counts = n;
    *a.schedule.num_shared = num_shared;
  }
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
