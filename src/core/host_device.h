// Marks functions that the host compiler and nvcc both compile.
#pragma once

#if defined(__CUDACC__)
#define ATTNFOLD_HD __host__ __device__ __forceinline__
#else
#define ATTNFOLD_HD __attribute__((always_inline))
#endif
