// The large-row kernel for bf16.
#include "cuda/attend_large.cuh"
#include "cuda/kernels.h"

#define ATTNFOLD_ELEMENT __nv_bfloat16
#define ATTNFOLD_KERNELS large_kernels_bf16
#include "cuda/large_kernels.inl"
