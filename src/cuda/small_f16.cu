#include "cuda/attend_small.cuh"
#include "cuda/fold_runs.cuh"
#include "cuda/fold_states.cuh"
#include "cuda/kernels.h"

#define ATTNFOLD_ELEMENT __half
#define ATTNFOLD_DTYPE DType::f16
#define ATTNFOLD_KERNELS kernels_f16
#include "cuda/small_kernels.inl"
