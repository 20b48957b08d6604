#include "cuda/attend_small.cuh"
#include "cuda/fold_runs.cuh"
#include "cuda/fold_states.cuh"
#include "cuda/kernels.h"

#define ATTNFOLD_ELEMENT __nv_bfloat16
#define ATTNFOLD_DTYPE DType::bf16
#define ATTNFOLD_KERNELS kernels_bf16
#include "cuda/small_kernels.inl"
