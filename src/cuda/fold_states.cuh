// The second kernel of a run: folds the states that cuts left behind, in canonical order, and writes those rows.
//
// One block finishes one row (of one kv head and shared row set) in 128 elements.  Each warp folds the states of up to
// four super-chunks at a time, all of their loads in flight together; then four warps fold the super-chunks, 32 elements
// each.  Bytes: every state once, from L2.
#pragma once

#include "cuda/attend.h"
#include "cuda/ptx.h"
#include "cuda/row_state.h"

namespace attnfold::cuda {

constexpr int kFoldElements = 128;  // of a row, for one block
constexpr int kFoldTasks = 4;       // super-chunks of one warp at a time

/** The states of one super-chunk, one for each of the first lanes. */
struct ChunkStates {
  int32_t count;
  int32_t row;  // of this lane's state, in rows
};

/** A row that several ranges share, and what of it is left to fold. */
struct SharedRow {
  RowSet set;
  int32_t first_range, kv_head, row;
  int32_t whole;      // leaves of the first range's whole super-chunks: its row state, if > 0
  int32_t ordinal;    // of the first super-chunk after those
  int32_t num_chunks;
};

__device__ __forceinline__ SharedRow find_row(const AttendArgs& a, const int32_t* cuts, const SharedSet& shared,
                                              int32_t kv_head, int32_t row) {
  SharedRow r;
  r.set = shared.set;
  r.first_range = shared.first_range;
  r.kv_head = kv_head;
  r.row = row;
  const int32_t end = cuts[shared.first_range + 1] - r.set.start;
  r.whole = chunk_begin(r.set, end);
  r.ordinal = chunk_ordinal(r.set, r.whole);
  r.num_chunks = chunk_ordinal(r.set, r.set.num_leaves - 1) - r.ordinal + 1;
  return r;
}

/** Which states make super-chunk `task` of the row: perhaps a prefix or the whole of it, then single leaves. */
__device__ __forceinline__ ChunkStates find_states(const AttendArgs& a, const int32_t* cuts, const SharedRow& r,
                                                   int32_t task, int lane) {
  const int32_t start = r.set.start, num_ranges = a.shape.num_ranges;
  const int32_t begin = chunk_at(r.set, r.ordinal + task), end = chunk_end(r.set, begin);
  const int32_t leader = range_at(cuts, num_ranges, start + begin);
  const int32_t led = cuts[leader + 1] - start < end ? cuts[leader + 1] - start : end;  // it folded [begin, led)
  const int32_t number = lane == 0 ? begin : led + lane - 1;
  ChunkStates states{1 + end - led, 0};
  if (lane >= states.count) return states;
  const int32_t range = lane == 0 ? leader : range_at(cuts, num_ranges, start + number);
  int32_t slot = prefix_slot(a.shape);
  if (range != r.first_range) slot = slot_of(r.set, cuts[range] - start, number);
  states.row = static_cast<int32_t>(state_row(a, range, r.kv_head, slot, r.row));
  return states;
}

/**
 * How a row folds one state after the other into what came before: worked out for up to 32 states at once, one in each
 * lane, since only their maxima take part.  fold_step() state by state gives the same.
 */
struct FoldSteps {
  float scale;          // of this lane's step
  uint32_t leads, live;  // bit i: state i has the larger maximum; it saw a key
  float m;              // after all of them
};

__device__ __forceinline__ FoldSteps fold_steps(float m, float m_before, int lane) {
  float largest = m;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float left = __shfl_up_sync(~0u, largest, d);
    if (lane >= d) largest = fmaxf(largest, left);
  }
  largest = fmaxf(largest, m_before);
  float before = __shfl_up_sync(~0u, largest, 1);
  if (lane == 0) before = m_before;
  const FoldStep step = fold_step_fast(before, m);
  return {step.scale, __ballot_sync(~0u, step.b_leads), __ballot_sync(~0u, m != kEmpty), __shfl_sync(~0u, largest, 31)};
}

/** Step i of `steps` for one number. */
__device__ __forceinline__ float fold_number(const FoldSteps& steps, float scale, int i, float a, float b) {
  if (!((steps.live >> i) & 1)) return a;
  return fold_value({((steps.leads >> i) & 1) != 0, scale}, a, b);
}

/** Folds the states of a super-chunk: four elements a lane.  All loads are in flight together. */
__device__ __forceinline__ void fold_chunk(const AttendArgs& a, const float* o4, bool inside, const ChunkStates& states,
                                           int lane, float4* chunk_o, float2* chunk_ml) {
  const float2 ml = lane < states.count ? __ldcg(a.state_ml + states.row) : make_float2(kEmpty, 0.0f);
  float4 o[kSuperChunk];
#pragma unroll
  for (int i = 0; i < kSuperChunk; ++i) {
    const int64_t at = static_cast<int64_t>(__shfl_sync(~0u, states.row, i)) * a.problem.head_dim_vo;
    o[i] = make_float4(0, 0, 0, 0);
    if (i < states.count && inside) o[i] = __ldcg(reinterpret_cast<const float4*>(o4 + at));
  }
  const FoldSteps steps = fold_steps(ml.x, kEmpty, lane);
  float4 sum = make_float4(0, 0, 0, 0);
  float l = 0.0f;
#pragma unroll
  for (int i = 0; i < kSuperChunk; ++i) {
    const float scale = __shfl_sync(~0u, steps.scale, i);
    l = fold_number(steps, scale, i, l, __shfl_sync(~0u, ml.y, i));
    sum.x = fold_number(steps, scale, i, sum.x, o[i].x);
    sum.y = fold_number(steps, scale, i, sum.y, o[i].y);
    sum.z = fold_number(steps, scale, i, sum.z, o[i].z);
    sum.w = fold_number(steps, scale, i, sum.w, o[i].w);
  }
  chunk_o[lane] = sum;
  if (lane == 0) *chunk_ml = make_float2(steps.m, l);
}

/** One number of a row: what has been folded of it. */
struct RowSum {
  float m = kEmpty, l = 0.0f, o = 0.0f;
};

/** Folds `count` super-chunks into a row: one element a lane. */
__device__ __forceinline__ void fold_row(RowSum& row, int32_t count, const float2* chunk_ml, const float* o, int lane) {
  for (int32_t base = 0; base < count; base += 32) {
    const float2 ml = base + lane < count ? chunk_ml[base + lane] : make_float2(kEmpty, 0.0f);
    const FoldSteps steps = fold_steps(ml.x, row.m, lane);
    const int32_t n = count - base < 32 ? count - base : 32;
#pragma unroll 4
    for (int i = 0; i < n; ++i) {
      const float scale = __shfl_sync(~0u, steps.scale, i);
      row.l = fold_number(steps, scale, i, row.l, __shfl_sync(~0u, ml.y, i));
      row.o = fold_number(steps, scale, i, row.o, o[(base + i) * kFoldElements]);
    }
    row.m = steps.m;
  }
}

template <class T, int kWarps>
__global__ void __launch_bounds__(kWarps * 32) fold_states(const __grid_constant__ AttendArgs a) {
  constexpr int kBatch = kWarps * kFoldTasks;
  __shared__ float4 chunk_o[kBatch][kFoldElements / 4];
  __shared__ float2 chunk_ml[kBatch];
  extern __shared__ int32_t cuts[];  // [num_ranges + 1]
  let_next_kernel_start();
  // The schedule was complete before the kernel that this one waits for began.
  const SharedSet shared = a.schedule.shared[blockIdx.x];
  const int32_t kv_head = static_cast<int32_t>(blockIdx.y) / a.shape.set_rows;
  const int32_t row = static_cast<int32_t>(blockIdx.y) % a.shape.set_rows;
  for (int i = static_cast<int>(threadIdx.x); i <= a.shape.num_ranges; i += kWarps * 32) cuts[i] = a.schedule.cuts[i];
  if (shared.first_range < 0 || row >= shared.set.num_rows) return;
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const SharedRow r = find_row(a, cuts, shared, kv_head, row);
  const int32_t width = a.problem.head_dim_vo, first = static_cast<int32_t>(blockIdx.z) * kFoldElements;
  const bool inside4 = first + 4 * lane < width;
  const float* o4 = a.state_o + first + 4 * lane;
  const int element = first + 32 * warp + lane;
  const bool mine = warp < kFoldElements / 32 && element < width;
  ChunkStates states[kFoldTasks];
#pragma unroll
  for (int t = 0; t < kFoldTasks; ++t) {
    states[t].count = 0;
    const int32_t task = t * kWarps + warp;
    if (task < r.num_chunks) states[t] = find_states(a, cuts, r, task, lane);
  }
  wait_for_previous_kernels();

  RowSum sum;
  if (r.whole > 0) {
    const int64_t at = state_row(a, r.first_range, kv_head, row_slot(a.shape), row);
    const float2 ml = __ldcg(a.state_ml + at);
    sum = {ml.x, ml.y, mine ? __ldcg(a.state_o + at * width + element) : 0.0f};
  }
  for (int32_t batch = 0; batch < r.num_chunks; batch += kBatch) {
    // Super-chunks of one state: only moved, all loads in flight together.
#pragma unroll
    for (int t = 0; t < kFoldTasks; ++t) {
      const int32_t task = batch + t * kWarps + warp;
      if (batch > 0) {
        states[t].count = 0;
        if (task < r.num_chunks) states[t] = find_states(a, cuts, r, task, lane);
      }
      if (states[t].count != 1) continue;
      const int64_t at = __shfl_sync(~0u, states[t].row, 0);
      if (inside4) chunk_o[task - batch][lane] = __ldcg(reinterpret_cast<const float4*>(o4 + at * width));
      if (lane == 0) chunk_ml[task - batch] = __ldcg(a.state_ml + at);
    }
#pragma unroll 1
    for (int t = 0; t < kFoldTasks; ++t) {
      const int32_t at = t * kWarps + warp;
      ChunkStates some = states[0];
      if (t == 1) some = states[1];
      if (t == 2) some = states[2];
      if (t == 3) some = states[3];
      if (some.count > 1) fold_chunk(a, o4, inside4, some, lane, chunk_o[at], chunk_ml + at);
    }
    __syncthreads();
    const int32_t count = r.num_chunks - batch < kBatch ? r.num_chunks - batch : kBatch;
    if (warp < kFoldElements / 32)
      fold_row(sum, count, chunk_ml, reinterpret_cast<const float*>(chunk_o) + 32 * warp + lane, lane);
    __syncthreads();
  }
  if (warp >= kFoldElements / 32) return;
  const RowPlace at = place_of_row(a, r.set, kv_head, row);
  const RowEnd end = finish_row(a, at.head, sum.m, sum.l);
  if (mine) write_one<T>(a, o_offset(a, at) + element, sum.o * end.factor);
  if (first == 0 && threadIdx.x == 0) write_lse(a, at, end.lse);
}

}  // namespace attnfold::cuda
