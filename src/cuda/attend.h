// What the kernels of one run are given.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "plan/range_schedule.h"

namespace attnfold::cuda {

/** Where a key's row is, in units of `unit_bytes`: page * page's units + token * token's units. */
struct KvSteps {
  uint32_t page, token, unit_bytes;
};

struct AttendArgs {
  Problem problem;
  Lengths lengths;  // only its page tables are read: the rest is in the schedule
  Tensors tensors;
  KvSteps k_steps, v_steps;
  RangeShape shape;
  RangeSchedule schedule;
  int32_t page_shift;    // page_size is 2^page_shift, or it is -1
  float* states;         // [states, kv_heads, set_rows, head_dim_vo + 4]: o, m, l, begins, 0
  uint32_t* claimed;     // (range, kv head) pairs claimed so far, where there may be some
  uint32_t* tiles_done;  // warps of a large-row kernel beside the others that have written all rows
  bool beside_tiles;     // the kernel before the small-row one is a large-row one
};

/** In the second kernel (cuda/fold_states.cuh), 2^log_lanes lanes fold a super-chunk; a task is a
 * block's or a warp's. */
struct FoldArgs {
  AttendArgs attend;
  int32_t log_lanes;
  bool whole_block;
};

/** Floats of one row of a state.  States lie close together: the fewer pages of memory they touch,
 * the sooner the second kernel has them. */
ATTNFOLD_HD inline int32_t state_pitch(const Problem& p) { return p.head_dim_vo + 4; }

/** Index of a row of a state, in rows. */
ATTNFOLD_HD inline int32_t state_row(const AttendArgs& a, int32_t state, int32_t kv_head,
                                     int32_t row) {
  return (state * a.problem.kv_heads + kv_head) * a.shape.set_rows + row;
}

/** r / group, for rows of which most are of the first token. */
ATTNFOLD_HD inline int32_t token_of_row(int32_t r, int32_t group) {
  int32_t token = 0;
  if (r >= group) token = r / group;
  return token;
}

/** Row of q, o and lse, and head, of row `row` of a set. */
struct RowPlace {
  int64_t token;
  int32_t head;
};
ATTNFOLD_HD inline RowPlace place_of_row(const AttendArgs& a, const RowSet& s, int32_t kv_head,
                                         int32_t row) {
  const int32_t r = s.row_begin + row, group = a.shape.group_size;
  const int32_t token = token_of_row(r, group);
  return {static_cast<int64_t>(s.q_token) + token, kv_head * group + r - token * group};
}

}  // namespace attnfold::cuda
