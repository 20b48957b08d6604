// The large-row kernel for fp16.
#include "cuda/attend_large.cuh"
#include "cuda/kernels.h"

#define ATTNFOLD_ELEMENT __half
#define ATTNFOLD_KERNELS large_kernels_f16
#include "cuda/large_kernels.inl"
