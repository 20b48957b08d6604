// The CUDA backend as the C ABI sees it; a build without it has the same functions, which say so.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "attnfold/attnfold.h"
#include "core/cache.h"
#include "core/problem.h"
#include "core/state.h"
#include "plan/any_plan.h"

namespace attnfold::cuda {

struct KernelRow {
  const char* name;  // "cuda/bf16"
  DType dtype;       // of q, k and v
  const char* numerics_id;
};
constexpr int kNumKernelRows = 2;
const KernelRow& kernel_row(int index);

/** "" if the row serves the validated problem, else the field that it does not serve, in words. */
std::string why_row_rejects(const KernelRow& row, const attnfold_problem& problem);

/** "" if this build and machine can run the rows. */
std::string why_not_here();

Status create_plan(const attnfold_problem* problem, const attnfold_execution& execution,
                   std::unique_ptr<AnyPlan>* out);

/** States of rows x heads pairs, checked, and where their merge goes. */
struct MergeWork {
  std::span<const StateView> states;
  StateView out;
  int64_t rows;
  int32_t heads, width;
  float empty_lse;
  const uint8_t* row_mask;  // or null
  int64_t row_mask_stride;
};

// What follows launches on `execution`'s stream and returns; arrays are device memory, and what
// they hold is the caller's word.  Slots and pages that a pool does not have are passed over.

Status merge(const MergeWork& work, const attnfold_execution& execution);
Status append(const AppendWork& work, const attnfold_execution& execution);
Status copy_pages(const CopyWork& work, const attnfold_execution& execution);
Status map_slots(const SlotWork& work, const attnfold_execution& execution);

}  // namespace attnfold::cuda
