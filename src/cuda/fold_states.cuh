// The second kernel of a run: folds the states that cuts left behind, in canonical order, and
// writes those rows.
//
// A block takes few registers and little shared memory, so that it lies on an SM beside two blocks
// of the first kernel: it need not wait for them to leave, nor the next call's blocks for it.
//
// A task is some elements of a row; a warp's, or a block's where rows are few.  Its lanes stand in
// groups of 2^log_lanes:
//   super-chunks   a group for each: its states left to right, kElements elements in each lane
//   row            through shared memory to the first group: super-chunks left to right
// Bytes: every state once, from L2.
#pragma once

#include "cuda/attend.h"
#include "cuda/large_tiles.cuh"
#include "cuda/ptx.h"
#include "cuda/row_state.h"

namespace attnfold::cuda {

constexpr int kFoldThreads = 128;

/** Waits for the first kernel; then nobody claims any more. */
__device__ __forceinline__ void wait_for_states(const AttendArgs& a) {
  wait_for_previous_kernels();
  if (a.claimed && blockIdx.x == 0 && threadIdx.x == 0) *a.claimed = 0;
}

/** Whether this block has nothing to do, not even to wait: one waits for all. */
__device__ __forceinline__ bool has_no_tasks(const AttendArgs& a) {
  return blockIdx.x > 0 && __ldcg(&a.schedule.num_shared->sets) == 0;
}

/** Some elements of a state, and its m and l. */
template <int kElements>
struct PartState {
  float m, l, o[kElements];

  __device__ __forceinline__ static PartState empty() { return {kEmpty, 0.0f, {}}; }

  /** this = fold(this, b).  An empty b has l = o = 0: with scale 0 it changes nothing, and there is
   * no branch for its loads to wait behind. */
  __device__ __forceinline__ void fold(const PartState& b) {
    FoldStep step = fold_step_fast(m, b.m);
    if (b.m == kEmpty) step.scale = 0.0f;
    l = fold_value(step, l, b.l);
#pragma unroll
    for (int i = 0; i < kElements; ++i) o[i] = fold_value(step, o[i], b.o[i]);
    if (step.b_leads) m = b.m;
  }
};

/** The states of one super-chunk, one after the other: a prefix or the whole of it, then single
 * leaves. */
struct ChunkStates {
  int32_t first, count;
};

/** A row set that several ranges share.  What its first range folded into the row is one state; it
 * counts as the super-chunk before those that follow. */
struct SharedRows {
  RowSet set;
  int32_t first_range;
  int32_t whole;       // leaves of that one state
  int32_t ordinal;     // of the first super-chunk after them
  int32_t num_chunks;  // with that one state

  __device__ __forceinline__ void open(const AttendArgs& a, const RangePlace* places,
                                       int32_t index) {
    const SharedSet shared = load_from_l2(a.schedule.shared + index);
    set = shared.set;
    first_range = shared.first_range;
    whole = chunk_begin(set, places[first_range + 1].cut - set.start);
    ordinal = chunk_ordinal(set, whole);
    num_chunks = chunk_ordinal(set, set.num_leaves - 1) - ordinal + 1 + (whole > 0 ? 1 : 0);
  }

  __device__ __forceinline__ ChunkStates states_of(const RangePlace* places, int32_t num_ranges,
                                                   int32_t chunk) const {
    if (chunk >= num_chunks) return {0, 0};
    const int32_t before = whole > 0 ? 1 : 0;
    if (chunk < before) return {places[first_range].begun_states, 1};
    const int32_t begin = chunk_at(set, ordinal + chunk - before), end = chunk_end(set, begin);
    const int32_t leader = range_at(places, num_ranges, set.start + begin);
    const RangePlace place = places[leader];
    const int32_t entry = place.cut - set.start, exit = places[leader + 1].cut - set.start;
    return {entry > 0 ? place.entered_states + entered_state(set, entry, begin)
                      : place.begun_states + before,
            1 + (exit < end ? end - exit : 0)};
  }
};

template <class T, int kElements>
class Folder {
 public:
  using Part = PartState<kElements>;
  // States of a lane that are on their way together: what its registers hold.
  static constexpr int kBatch = kElements == 4 ? 5 : 8;

  __device__ __forceinline__ Folder(const FoldArgs& args, const RangePlace* all_places,
                                    Part* all_parts)
      : a(args.attend),
        places(all_places),
        whole_block(args.whole_block),
        log_lanes(args.log_lanes),
        thread(static_cast<int>(args.whole_block ? threadIdx.x : threadIdx.x % 32)),
        parts(all_parts + (threadIdx.x - static_cast<unsigned>(thread))) {}

  /** The first pass folds nothing and writes nothing: it brings the instructions, so that they are
   * there when the states are. */
  __device__ __forceinline__ void run() {
    const int32_t width = kElements << log_lanes;
    const int32_t slices = (a.problem.head_dim_vo + width - 1) / width;
    const int32_t most_rows = __ldcg(&a.schedule.num_shared->rows);
    const int32_t rows_of_set = a.problem.kv_heads * most_rows;
    const int32_t num_tasks = __ldcg(&a.schedule.num_shared->sets) * rows_of_set * slices;
    const int32_t groups = (whole_block ? kFoldThreads : 32) >> log_lanes;
    const int32_t blocks = static_cast<int32_t>(gridDim.x);
    const int32_t warp = whole_block ? 0 : static_cast<int32_t>(threadIdx.x / 32);
    const int32_t step = whole_block ? blocks : blocks * (kFoldThreads / 32);
    int32_t task = warp * blocks + static_cast<int32_t>(blockIdx.x), chunk = 0;
    ChunkStates states{0, 0};
    Part sum = Part::empty();
    rows.num_chunks = 0;
    for (bool rehearsal = true;; rehearsal = false) {
      const Part part = fold_chunk(states);
      sync();
      parts[thread] = part;
      sync();
      const int32_t left = rows.num_chunks - chunk;
      if (thread < 1 << log_lanes) {
        if (chunk == 0) sum = Part::empty();
        const int32_t count = rehearsal ? 1 : left < groups ? left : groups;
#pragma unroll 4
        for (int32_t i = 0; i < count; ++i) sum.fold(parts[(i << log_lanes) + thread]);
        if (left <= groups) write_row(sum, rows.num_chunks > 0);
      }
      chunk += groups;
      if (left <= groups) {  // the next task
        if (!rehearsal) task += step;
        if (task < num_tasks) {
          rows.open(a, places, task / (rows_of_set * slices));
          const int32_t at = task % (rows_of_set * slices);
          kv_head = at / slices / most_rows;
          row = at / slices % most_rows;
          element = at % slices * width + kElements * (thread & ((1 << log_lanes) - 1));
          chunk = 0;
          if (row >= rows.set.num_rows) rows.num_chunks = 0;
        }
      }
      if (task < num_tasks)
        states = rows.states_of(places, a.shape.num_ranges, chunk + (thread >> log_lanes));
      if (rehearsal) wait_for_states(a);
      if (task >= num_tasks) return;
    }
  }

 private:
  __device__ __forceinline__ void sync() const {
    if (whole_block) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }

  __device__ __forceinline__ void write_row(const Part& sum, bool writes) const {
    const RowPlace at = place_of_row(a, rows.set, kv_head, row);
    const RowEnd end = finish_row(a, at.head, sum.m, sum.l);
    if (writes && element < a.problem.head_dim_vo) {
#pragma unroll
      for (int i = 0; i < kElements; i += 2)
        write_pair<T>(a, o_offset(a, at) + element + i, sum.o[i] * end.factor,
                      sum.o[i + 1] * end.factor);
    }
    if (writes && element == 0) write_lse(a, at, end);
  }

  /** Folds the states of this lane's super-chunk. */
  __device__ __forceinline__ Part fold_chunk(const ChunkStates& states) const {
    const int64_t pitch = state_pitch(a.problem);
    const int64_t step = pitch * a.problem.kv_heads * a.shape.set_rows;
    const float* from = a.states + pitch * state_row(a, states.first, kv_head, row);
    const int32_t to_ml = a.problem.head_dim_vo;
    const bool inside = element < to_ml;
    Part sum = Part::empty();
    int32_t base = 0;
    do {
      Part b[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool some = base + i < states.count;
        const float2 ml = load_or_zeros(reinterpret_cast<const float2*>(from + to_ml), some);
        b[i].m = some ? ml.x : kEmpty;
        b[i].l = ml.y;
        if constexpr (kElements == 4) {
          const float4 o =
              load_or_zeros(reinterpret_cast<const float4*>(from + element), some && inside);
          b[i].o[0] = o.x, b[i].o[1] = o.y, b[i].o[2] = o.z, b[i].o[3] = o.w;
        } else {
          const float2 o =
              load_or_zeros(reinterpret_cast<const float2*>(from + element), some && inside);
          b[i].o[0] = o.x, b[i].o[1] = o.y;
        }
        from += step;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) sum.fold(b[i]);
      base += kBatch;
    } while (base < states.count);
    return sum;
  }

  const AttendArgs& a;
  const RangePlace* places;
  const bool whole_block;
  const int log_lanes, thread;  // of those that share a task
  Part* parts;                  // [threads that share a task]

  // The task.
  SharedRows rows{};
  int32_t kv_head = 0, row = 0, element = 0;
};

template <class T, int kElements>
__global__ void __launch_bounds__(kFoldThreads, 8)
    fold_states(const __grid_constant__ FoldArgs args) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ PartState<kElements> parts[kFoldThreads];
  RangePlace* places = reinterpret_cast<RangePlace*>(memory);  // [num_ranges + 1]
  const AttendArgs& a = args.attend;
  let_next_kernel_start();
  if (has_no_tasks(a)) return;
  // The schedule was complete before the kernel that this one waits for began.
  for (int i = static_cast<int>(threadIdx.x); i <= a.shape.num_ranges; i += kFoldThreads)
    places[i] = load_from_l2(a.schedule.places + i);
  __syncthreads();
  Folder<T, kElements>(args, places, parts).run();
  wait_for_tiles(a);
}

}  // namespace attnfold::cuda
