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
  int64_t row;  // of this lane's state, in rows
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
  states.row = state_row(a, range, r.kv_head, slot, r.row);
  return states;
}

/** m, l and some elements of a row's state. */
template <class Elements>
struct Accumulator {
  float m = kEmpty, l = 0.0f;
  Elements o{};

  __device__ __forceinline__ void fold(float m_b, float l_b, const Elements& b) {
    if (m_b == kEmpty) return;
    const FoldStep step = fold_step_fast(m, m_b);
    l = fold_value(step, l, l_b);
    fold_elements(step, b);
    if (step.b_leads) m = m_b;
  }

 private:
  __device__ __forceinline__ void fold_elements(FoldStep step, float b) { o = fold_value(step, o, b); }
  __device__ __forceinline__ void fold_elements(FoldStep step, const float4& b) {
    o.x = fold_value(step, o.x, b.x);
    o.y = fold_value(step, o.y, b.y);
    o.z = fold_value(step, o.z, b.z);
    o.w = fold_value(step, o.w, b.w);
  }
};

/** Folds the further states of a super-chunk into its first.  A call: its instructions are many, and used by few. */
static __device__ __noinline__ void fold_chunk(const float* o4, int32_t width, bool inside, ChunkStates states, float2 ml,
                                        int lane, float4* chunk_o, float2* chunk_ml) {
  Accumulator<float4> chunk;
  float4 o[kSuperChunk];
#pragma unroll
  for (int i = 1; i < kSuperChunk; ++i) {
    const int64_t at = __shfl_sync(~0u, states.row, i);
    if (i < states.count && inside) o[i] = __ldcg(reinterpret_cast<const float4*>(o4 + at * width));
  }
  __syncwarp();
  chunk.fold(__shfl_sync(~0u, ml.x, 0), __shfl_sync(~0u, ml.y, 0), chunk_o[lane]);
#pragma unroll
  for (int i = 1; i < kSuperChunk; ++i) {
    const float m = __shfl_sync(~0u, ml.x, i), l = __shfl_sync(~0u, ml.y, i);
    if (i < states.count) chunk.fold(m, l, inside ? o[i] : make_float4(0, 0, 0, 0));
  }
  chunk_o[lane] = chunk.o;
  if (lane == 0) *chunk_ml = make_float2(chunk.m, chunk.l);
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
    const int32_t task = t * kWarps + warp;
    if (task < r.num_chunks) states[t] = find_states(a, cuts, r, task, lane);
  }
  wait_for_previous_kernels();

  Accumulator<float> total;
  if (r.whole > 0) {
    const int64_t at = state_row(a, r.first_range, kv_head, row_slot(a.shape), row);
    const float2 ml = __ldcg(a.state_ml + at);
    total.fold(ml.x, ml.y, mine ? __ldcg(a.state_o + at * width + element) : 0.0f);
  }
  for (int32_t batch = 0; batch < r.num_chunks; batch += kBatch) {
    // The first state of each super-chunk, often the only one: all loads in flight together.
    float2 ml[kFoldTasks];
#pragma unroll
    for (int t = 0; t < kFoldTasks; ++t) {
      const int32_t task = batch + t * kWarps + warp;
      if (task >= r.num_chunks) break;
      if (batch > 0) states[t] = find_states(a, cuts, r, task, lane);
      ml[t] = lane < states[t].count ? __ldcg(a.state_ml + states[t].row) : make_float2(kEmpty, 0.0f);
      const int64_t at = __shfl_sync(~0u, states[t].row, 0);
      chunk_o[task - batch][lane] = inside4 ? __ldcg(reinterpret_cast<const float4*>(o4 + at * width)) : make_float4(0, 0, 0, 0);
      if (lane == 0) chunk_ml[task - batch] = ml[t];
    }
#pragma unroll
    for (int t = 0; t < kFoldTasks; ++t) {
      const int32_t task = batch + t * kWarps + warp;
      if (task >= r.num_chunks) break;
      if (states[t].count > 1) fold_chunk(o4, width, inside4, states[t], ml[t], lane, chunk_o[task - batch], chunk_ml + task - batch);
    }
    __syncthreads();
    if (warp < kFoldElements / 32) {
      const int32_t count = r.num_chunks - batch < kBatch ? r.num_chunks - batch : kBatch;
#pragma unroll 8
      for (int i = 0; i < count; ++i) {
        total.fold(chunk_ml[i].x, chunk_ml[i].y, reinterpret_cast<const float*>(chunk_o[i])[32 * warp + lane]);
      }
    }
    __syncthreads();
  }
  if (warp >= kFoldElements / 32) return;
  const RowPlace at = place_of_row(a, r.set, kv_head, row);
  const RowEnd end = finish_row(a, at.head, total.m, total.l);
  if (mine) write_one<T>(a, o_offset(a, at) + element, total.o * end.factor);
  if (first == 0 && threadIdx.x == 0) write_lse(a, at, end.lse);
}

}  // namespace attnfold::cuda
