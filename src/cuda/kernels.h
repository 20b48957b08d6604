// The compiled kernels, as the host launches them.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "cuda/attend.h"

namespace attnfold::cuda {

struct PlanArgs;

/** Two instantiations of attend_small. */
struct SmallKernel {
  DType dtype;        // of q, k and v
  int32_t dim;        // head dims up to it
  int32_t row_tiles;  // of 8 rows
  int32_t blocks_per_sm;
  int32_t threads;
  size_t shared_bytes;
  const void *attend, *attend_claiming;  // the second where blocks claim ranges
};

/** The second kernels. */
struct FoldKernel {
  int32_t threads;
  const void *fold_4, *fold_2;  // with as many elements in a lane
  const void* runs;             // fold_runs
};

/** One instantiation of attend_large, or two of attend_large_mma. */
struct LargeKernel {
  int32_t dim;
  int32_t threads;
  size_t shared_bytes;
  const void *attend, *attend_modified;  // the second for scores that are capped, or have a bias
};
struct LargeKernelList {
  const LargeKernel* large;
  int32_t count;
};

/** The kernels of one 16-bit type. */
struct KernelList {
  const SmallKernel* small;
  int32_t num_small;
  FoldKernel fold;
};

KernelList kernels_bf16();
KernelList kernels_f16();
LargeKernelList large_kernels_bf16();
LargeKernelList large_kernels_f16();
LargeKernelList large_mma_kernels_bf16();
LargeKernelList large_mma_kernels_f16();

/** Plans one step: plan/range_schedule.h on one block. */
cudaError_t launch_plan(const PlanArgs& args, cudaStream_t stream);
cudaError_t load_plan_kernel();

}  // namespace attnfold::cuda
