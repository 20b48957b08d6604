// The large-row kernel of mma.sync for f16.
#include "cuda/attend_large_mma.cuh"
#include "cuda/kernels.h"

#define ATTNFOLD_ELEMENT __half
#define ATTNFOLD_KERNELS large_mma_kernels_f16
#include "cuda/large_mma_kernels.inl"
