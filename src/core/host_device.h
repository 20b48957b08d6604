// Marks functions that the host compiler and nvcc both compile.
#pragma once

#if defined(__CUDACC__)
#define ATTNFOLD_HD __host__ __device__        // small: always inlined
#define ATTNFOLD_HD_LARGE __host__ __device__  // not worth it
#else
#define ATTNFOLD_HD __attribute__((always_inline))
#define ATTNFOLD_HD_LARGE
#endif
