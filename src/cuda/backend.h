// The CUDA backend as the C ABI sees it; a build without it has the same functions, which say so.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "attnfold/attnfold.h"
#include "core/problem.h"
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

}  // namespace attnfold::cuda
