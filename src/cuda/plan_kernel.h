// What the planner's kernel is given.
#pragma once

#include <cstdint>

#include "plan/range_schedule.h"

namespace attnfold::cuda {

struct PlanArgs {
  RangeShape shape;
  Mask mask;
  int32_t batch, max_kv_len;
  const int32_t* qo_indptr;  // [batch + 1]
  const int32_t* kv_len;     // [batch], or null: the difference of kv_indptr's entries
  const int32_t* kv_indptr;
  RangeSchedule schedule;
};

}  // namespace attnfold::cuda
