#pragma once

#include "attnfold/attnfold.h"
#include "status.h"

namespace attnfold {

// attnfold_merge_parallel and attnfold_convert_state, with their arguments; see attnfold.h.

Status merge_states(int64_t rows, int32_t heads, int32_t head_dim_vo, const attnfold_state* states,
                    int32_t n, const attnfold_state* out, const uint8_t* row_mask,
                    int64_t row_mask_stride, const attnfold_execution* execution);

Status convert_state(int64_t rows, int32_t heads, int32_t head_dim_vo, const attnfold_state* from,
                     const attnfold_state* to, const attnfold_execution* execution);

}  // namespace attnfold
