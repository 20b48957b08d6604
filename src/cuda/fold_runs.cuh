// The second kernel of a run where many rows may have states of many super-chunks: a warp for each
// row and 128 elements of it, four in a lane.
//
// A row's states lie one after the other, and each says whether it begins a super-chunk.  A warp
// walks along them, a few on their way at once, with the super-chunk and the row in registers, as
// the first kernel does.  Bytes: every state once, from L2.
#pragma once

#include "cuda/attend.h"
#include "cuda/fold_states.cuh"
#include "cuda/ptx.h"
#include "cuda/row_state.h"

namespace attnfold::cuda {

constexpr int kRunBatch = 4;  // states of a lane that are on their way together

template <class T>
__device__ __forceinline__ void fold_all_runs(const AttendArgs& a) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int32_t width = a.problem.head_dim_vo, slices = (width + 127) / 128;
  // The schedule was complete before the kernel that this one waits for began.
  const int32_t rows = __ldcg(&a.schedule.num_shared->rows);
  const int32_t of_set = a.problem.kv_heads * rows * slices;
  const int32_t num_tasks = __ldcg(&a.schedule.num_shared->sets) * of_set;
  const int32_t blocks = static_cast<int32_t>(gridDim.x);
  int32_t task = static_cast<int32_t>(threadIdx.x / 32) * blocks + static_cast<int32_t>(blockIdx.x);
  const int64_t pitch = state_pitch(a.problem);
  const int32_t step = static_cast<int32_t>(pitch) * a.problem.kv_heads * a.shape.set_rows;
  using Part = PartState<4>;
  bool live = false;  // the first pass reads and writes nothing: it brings the instructions
#pragma unroll 1
  while (true) {
    int32_t count = 0, element = 4 * lane;
    const float* from = a.states;
    RowPlace at{0, 0};
    if (task < num_tasks) {
      const SharedSet shared = load_from_l2(a.schedule.shared + task / of_set);
      const int32_t of = task % of_set, row = of / slices % rows;
      const int32_t kv_head = of / slices / rows;
      element += of % slices * 128;
      if (row < shared.set.num_rows) {
        count = shared.num_states;
        at = place_of_row(a, shared.set, kv_head, row);
        from += pitch * state_row(a, shared.first_state, kv_head, row);
      }
    }
    const bool inside = element < width;
    const int64_t o = o_offset(a, at);
#pragma unroll 1
    while (true) {  // twice, if not live
      Part total = Part::empty(), chunk = Part::empty();
      const float* next = from;
      int32_t left = live ? count : 0;
#pragma unroll 1
      do {
        float4 x[kRunBatch], ml[kRunBatch];
#pragma unroll
        for (int i = 0; i < kRunBatch; ++i) {
          ml[i] = load_or_zeros(reinterpret_cast<const float4*>(next + width), i < left);
          x[i] = load_or_zeros(reinterpret_cast<const float4*>(next + element), i < left && inside);
          next += step;
        }
#pragma unroll
        for (int i = 0; i < kRunBatch; ++i) {
          if (i > 0 && i >= left) break;
          if (ml[i].z != 0.0f) {
            total.fold(chunk);
            chunk = Part::empty();
          }
          chunk.fold({left > 0 ? ml[i].x : kEmpty, ml[i].y, {x[i].x, x[i].y, x[i].z, x[i].w}});
        }
        left -= kRunBatch;
      } while (left > 0);
      total.fold(chunk);
      const RowEnd end = finish_row(a, at.head, total.m, total.l);
      if (live && count > 0) {
        if (inside) {
          write_pair<T>(a, o + element, total.o[0] * end.factor, total.o[1] * end.factor);
          write_pair<T>(a, o + element + 2, total.o[2] * end.factor, total.o[3] * end.factor);
        }
        if (element == 0) write_lse(a, at, end);
      }
      if (live) break;
      live = true;
      wait_for_states(a);
      if (task >= num_tasks) return;
    }
    task += blocks * (kFoldThreads / 32);
    if (task >= num_tasks) return;
  }
}

template <class T>
__global__ void __launch_bounds__(kFoldThreads, 8)
    fold_runs(const __grid_constant__ FoldArgs args) {
  const AttendArgs& a = args.attend;
  let_next_kernel_start();
  if (has_no_tasks(a)) return;
  fold_all_runs<T>(a);
  wait_for_tiles(a);
}

}  // namespace attnfold::cuda
