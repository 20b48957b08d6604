// Checks of what can be checked without reading the device's memory; contents are the caller's
// word.
#pragma once

#include "attnfold/attnfold.h"
#include "core/problem.h"
#include "plan/validate.h"
#include "status.h"

namespace attnfold::cuda {

Status validate_device_lengths(const attnfold_problem& p, const attnfold_lengths& lengths);

/** Fills `out` with every stride resolved.  `num_kv_rows` is of ragged k and v, `workspace` what a
 * run writes of it. */
Status validate_device_tensors(const attnfold_problem& p, int64_t num_kv_rows,
                               const Extent& workspace, const attnfold_tensors* given,
                               Tensors* out);

}  // namespace attnfold::cuda
