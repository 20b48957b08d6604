// The large-row kernel of mma.sync for bf16.
#include "cuda/attend_large_mma.cuh"
#include "cuda/kernels.h"

#define ATTNFOLD_ELEMENT __nv_bfloat16
#define ATTNFOLD_KERNELS large_mma_kernels_bf16
#include "cuda/large_mma_kernels.inl"
