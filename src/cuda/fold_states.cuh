// The second kernel of a run: folds the states that cuts left behind, in canonical order, and
// writes those rows.
//
// A warp folds the states of a super-chunk of one row (of one kv head and shared row set), four
// elements of o in each lane, all of their loads in flight together.  The warps of a row share its
// super-chunks; then the first of them folds those. Bytes: every state once, from L2.
#pragma once

#include "cuda/attend.h"
#include "cuda/ptx.h"
#include "cuda/row_state.h"

namespace attnfold::cuda {

constexpr int kFoldWarps = 8;  // of a block
constexpr int kFoldTasks = 4;  // super-chunks of one warp at a time
constexpr int kPerLane = 4;    // elements of o

/** The states of one super-chunk, one for each of the first lanes. */
struct ChunkStates {
  int32_t count;
  int32_t row;  // of this lane's state, in rows
};

/** A row that several ranges share, and what of it is left to fold. */
struct SharedRow {
  RowSet set;
  int32_t first_range, kv_head, row;
  int32_t whole;    // leaves of the first range's whole super-chunks: its row state, if > 0
  int32_t ordinal;  // of the first super-chunk after those
  int32_t num_chunks;
};

__device__ __forceinline__ SharedRow find_row(const RangePlace* places, const SharedSet& shared,
                                              int32_t kv_head, int32_t row) {
  SharedRow r;
  r.set = shared.set;
  r.first_range = shared.first_range;
  r.kv_head = kv_head;
  r.row = row;
  const int32_t end = places[shared.first_range + 1].cut - r.set.start;
  r.whole = chunk_begin(r.set, end);
  r.ordinal = chunk_ordinal(r.set, r.whole);
  r.num_chunks = chunk_ordinal(r.set, r.set.num_leaves - 1) - r.ordinal + 1;
  return r;
}

/** Which states make super-chunk `task` of the row: perhaps a prefix or the whole of it, then
 * single leaves. */
__device__ __forceinline__ ChunkStates find_states(const AttendArgs& a, const RangePlace* places,
                                                   const SharedRow& r, int32_t task, int lane) {
  const int32_t start = r.set.start, num_ranges = a.shape.num_ranges;
  const int32_t begin = chunk_at(r.set, r.ordinal + task), end = chunk_end(r.set, begin);
  const int32_t leader = range_at(places, num_ranges, start + begin);
  const int32_t led = places[leader + 1].cut - start < end ? places[leader + 1].cut - start
                                                           : end;  // it folded [begin, led)
  const int32_t number = lane == 0 ? begin : led + lane - 1;
  ChunkStates states{1 + end - led, 0};
  if (lane >= states.count) return states;
  const RangePlace place =
      places[lane == 0 ? leader : range_at(places, num_ranges, start + number)];
  const int32_t entry = place.cut - start;
  const int32_t state = entry > 0 ? place.entered_states + entered_state(r.set, entry, number)
                                  : place.begun_states + (r.whole > 0 ? 1 : 0);
  states.row = state_row(a, state, r.kv_head, r.row);
  return states;
}

/**
 * How a row folds one state after the other into what came before: worked out for up to 32 states
 * at once, one in each lane, since only their maxima take part.  fold_step() state by state gives
 * the same.
 */
struct FoldSteps {
  float scale;     // of this lane's step; 0 for a state without keys, which changes nothing
  uint32_t leads;  // bit i: state i has the larger maximum
  float m;         // after all of them
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
  return {m == kEmpty ? 0.0f : step.scale, __ballot_sync(~0u, step.b_leads),
          __shfl_sync(~0u, largest, 31)};
}

/** Four neighbouring elements of o. */
struct Elements {
  float x[kPerLane] = {};

  __device__ __forceinline__ static Elements load(const float* from) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(from));
    return {{v.x, v.y, v.z, v.w}};
  }
  __device__ __forceinline__ void fold(FoldStep step, const Elements& b) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = fold_value(step, x[i], b.x[i]);
  }
};

/** States as one lane of a row's warps reads them. */
struct StateReader {
  const float* states;   // the lane's first element of row 0
  int32_t pitch, to_ml;  // floats between rows; from `states` to m and l of row 0
  bool inside;           // the head dim

  __device__ __forceinline__ float2 ml(int32_t row) const {
    return __ldcg(
        reinterpret_cast<const float2*>(states + to_ml + static_cast<int64_t>(row) * pitch));
  }
  __device__ __forceinline__ Elements o(int32_t row) const {
    return inside ? Elements::load(states + static_cast<int64_t>(row) * pitch) : Elements{};
  }
};

/** Folds the states of a super-chunk. */
__device__ __forceinline__ void fold_chunk(const StateReader& reader, const ChunkStates& states,
                                           int lane, Elements* chunk_o, float2* chunk_ml) {
  const float2 ml = lane < states.count ? reader.ml(states.row) : make_float2(kEmpty, 0.0f);
  Elements values[kSuperChunk];
#pragma unroll
  for (int i = 0; i < kSuperChunk; ++i) {
    const int32_t row = __shfl_sync(~0u, states.row, i);
    if (i < states.count) values[i] = reader.o(row);
  }
  const FoldSteps steps = fold_steps(ml.x, kEmpty, lane);
  Elements sum;
  float l = 0.0f;
#pragma unroll
  for (int i = 0; i < kSuperChunk; ++i) {
    const FoldStep step{((steps.leads >> i) & 1) != 0, __shfl_sync(~0u, steps.scale, i)};
    l = fold_value(step, l, __shfl_sync(~0u, ml.y, i));
    sum.fold(step, values[i]);
  }
  chunk_o[lane] = sum;
  if (lane == 0) *chunk_ml = make_float2(steps.m, l);
}

/** What has been folded of a row: this lane's elements of o. */
struct RowSum {
  float m = kEmpty, l = 0.0f;
  Elements o;
};

/** Folds `count` super-chunks into a row. */
__device__ __forceinline__ void fold_row(RowSum& row, int32_t count, const float2* chunk_ml,
                                         const Elements (*chunk_o)[32], int lane) {
  for (int32_t base = 0; base < count; base += 32) {
    const float2 ml = base + lane < count ? chunk_ml[base + lane] : make_float2(kEmpty, 0.0f);
    const FoldSteps steps = fold_steps(ml.x, row.m, lane);
    const int32_t n = count - base < 32 ? count - base : 32;
#pragma unroll 4
    for (int i = 0; i < n; ++i) {
      const FoldStep step{((steps.leads >> i) & 1) != 0, __shfl_sync(~0u, steps.scale, i)};
      row.l = fold_value(step, row.l, __shfl_sync(~0u, ml.y, i));
      row.o.fold(step, chunk_o[base + i][lane]);
    }
    row.m = steps.m;
  }
}

template <class T>
__global__ void __launch_bounds__(kFoldWarps * 32, 2)
    fold_states(const __grid_constant__ FoldArgs args) {
  const AttendArgs& a = args.attend;
  __shared__ Elements chunk_o[kFoldWarps * kFoldTasks][32];
  __shared__ float2 chunk_ml[kFoldWarps * kFoldTasks];
  extern __shared__ __align__(128) unsigned char memory[];
  RangePlace* places = reinterpret_cast<RangePlace*>(memory);  // [num_ranges + 1]
  let_next_kernel_start();
  // The schedule was complete before the kernel that this one waits for began.
  const SharedSet shared = load_from_l2(a.schedule.shared + blockIdx.x);
  for (int i = static_cast<int>(threadIdx.x); i <= a.shape.num_ranges; i += kFoldWarps * 32)
    places[i] = load_from_l2(a.schedule.places + i);
  if (shared.first_range < 0) return;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int rows_per_block = kFoldWarps / args.warps_per_row, part = warp % args.warps_per_row;
  const int row_groups = (a.shape.set_rows + rows_per_block - 1) / rows_per_block;
  const int32_t kv_head = static_cast<int32_t>(blockIdx.y) / row_groups;
  const int32_t row =
      static_cast<int32_t>(blockIdx.y) % row_groups * rows_per_block + warp / args.warps_per_row;
  const bool live = row < shared.set.num_rows;
  __syncthreads();
  const SharedRow r = find_row(places, shared, kv_head, row);
  const int32_t element = (static_cast<int32_t>(blockIdx.z) * 32 + lane) * kPerLane;
  const StateReader reader{a.states + element, state_pitch(a.problem),
                           a.problem.head_dim_vo - element, element < a.problem.head_dim_vo};
  const int batch_size = args.warps_per_row * kFoldTasks,
            first_slot = warp / args.warps_per_row * batch_size;
  ChunkStates states[kFoldTasks];
#pragma unroll
  for (int t = 0; t < kFoldTasks; ++t) {
    states[t].count = 0;
    const int32_t task = t * args.warps_per_row + part;
    if (live && task < r.num_chunks) states[t] = find_states(a, places, r, task, lane);
  }
  wait_for_previous_kernels();

  RowSum sum;
  if (r.whole > 0 && part == 0 && live) {
    const int32_t at = state_row(a, places[r.first_range].begun_states, kv_head, row);
    const float2 ml = reader.ml(at);
    sum = {ml.x, ml.y, reader.o(at)};
  }
  for (int32_t batch = 0; batch < r.num_chunks; batch += batch_size) {
    // Super-chunks of one state are only moved, all loads in flight together.
#pragma unroll
    for (int t = 0; t < kFoldTasks; ++t) {
      const int32_t task = t * args.warps_per_row + part;
      if (batch > 0) {
        states[t].count = 0;
        if (live && batch + task < r.num_chunks)
          states[t] = find_states(a, places, r, batch + task, lane);
      }
      if (states[t].count != 1) continue;
      const int32_t at = __shfl_sync(~0u, states[t].row, 0);
      chunk_o[first_slot + task][lane] = reader.o(at);
      if (lane == 0) chunk_ml[first_slot + task] = reader.ml(at);
    }
#pragma unroll 1
    for (int t = 0; t < kFoldTasks; ++t) {
      const int slot = first_slot + t * args.warps_per_row + part;
      const ChunkStates some = t == 0   ? states[0]
                               : t == 1 ? states[1]
                               : t == 2 ? states[2]
                                        : states[3];
      if (some.count > 1) fold_chunk(reader, some, lane, chunk_o[slot], chunk_ml + slot);
    }
    __syncthreads();
    const int32_t count = r.num_chunks - batch < batch_size ? r.num_chunks - batch : batch_size;
    if (part == 0 && live) fold_row(sum, count, chunk_ml + first_slot, chunk_o + first_slot, lane);
    __syncthreads();
  }
  if (part > 0 || !live) return;
  const RowPlace at = place_of_row(a, r.set, kv_head, row);
  const RowEnd end = finish_row(a, at.head, sum.m, sum.l);
  if (reader.inside) {
#pragma unroll
    for (int i = 0; i < kPerLane; i += 2)
      write_pair<T>(a, o_offset(a, at) + element + i, sum.o.x[i] * end.factor,
                    sum.o.x[i + 1] * end.factor);
  }
  if (element == 0) write_lse(a, at, end.lse);
}

}  // namespace attnfold::cuda
