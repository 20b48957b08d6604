// The matrix instructions of sm_90a: a warpgroup multiplies 64 rows, operands in shared memory or
// registers, sums in registers.
//
// Shared memory is read in rows of 128 bytes whose 16-byte chunks are exchanged within each 8 rows
// (the tensor maps' SWIZZLE_128B): chunk c of row r lies at place c ^ (r % 8).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace attnfold::cuda {

/** A place in shared memory as the instruction takes it: the address, and the bytes from each 8
 * rows to the next (`kStep8`). */
template <uint32_t kStep8>
__device__ __forceinline__ uint64_t matrix_at(uint32_t low) {
  return static_cast<uint64_t>(low) | static_cast<uint64_t>((kStep8 >> 4) | 1u << 30) << 32;
}

/** The low word of it: the address, which may be added to in units of 16 bytes, and the bytes from
 * one 128-byte column of the matrix to the next, where rows run along k. */
__device__ __forceinline__ uint32_t matrix_address(uint32_t address, uint32_t column_step) {
  return (address & 0x3ffff) >> 4 | (column_step >> 4) << 16;
}

/** Registers are the warpgroup's own until here. */
__device__ __forceinline__ void open_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kGroups>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

/** Keeps the compiler from moving accesses of an accumulator over a wait. */
template <int kN>
__device__ __forceinline__ void settle(float (&d)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define ATTNFOLD_4(mode, d, i) mode(d[i]), mode(d[i + 1]), mode(d[i + 2]), mode(d[i + 3])
#define ATTNFOLD_16(mode, d, i)                                                   \
  ATTNFOLD_4(mode, d, i), ATTNFOLD_4(mode, d, i + 4), ATTNFOLD_4(mode, d, i + 8), \
      ATTNFOLD_4(mode, d, i + 12)
#define ATTNFOLD_32(mode, d) ATTNFOLD_16(mode, d, 0), ATTNFOLD_16(mode, d, 16)
#define ATTNFOLD_64(mode, d) \
  ATTNFOLD_32(mode, d), ATTNFOLD_16(mode, d, 32), ATTNFOLD_16(mode, d, 48)
#define ATTNFOLD_TEXT_32                                                                           \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
  "%26,%27,%28,%29,%30,%31"
#define ATTNFOLD_TEXT_64                                                                          \
  ATTNFOLD_TEXT_32                                                                                \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54," \
  "%55,%56,%57,%58,%59,%60,%61,%62,%63"
// A sum that begins anew does not read its registers.
#define ATTNFOLD_NEW "=f"
#define ATTNFOLD_OLD "+f"

/** d [64, 128] = or += a b: both in shared memory, 64 and 128 rows along k. */
template <class T, bool kNew>
__device__ __forceinline__ void multiply_keys(float (&d)[64], uint64_t a, uint64_t b);

/** d [64, kN] = or += a b: a in registers, [64, 16]; b in shared memory, 16 rows of kN elements. */
template <class T, bool kNew, int kN>
__device__ __forceinline__ void multiply_values(float (&d)[kN / 2], const uint32_t (&a)[4],
                                                uint64_t b);

#define ATTNFOLD_MULTIPLY_KEYS(Type, type, is_new, mode, sums)                           \
  template <>                                                                            \
  __device__ __forceinline__ void multiply_keys<Type, is_new>(float(&d)[64], uint64_t a, \
                                                              uint64_t b) {              \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type            \
                 " {" ATTNFOLD_TEXT_64 "}, %64, %65, " sums ", 1, 1, 0, 0;"              \
                 : ATTNFOLD_64(mode, d)                                                  \
                 : "l"(a), "l"(b));                                                      \
  }
#define ATTNFOLD_MULTIPLY_VALUES(Type, type, is_new, mode, sums, n, half_n, places, at_a, at_b) \
  template <>                                                                                   \
  __device__ __forceinline__ void multiply_values<Type, is_new, n>(                             \
      float(&d)[half_n], const uint32_t(&a)[4], uint64_t b) {                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                \
                 " {" ATTNFOLD_TEXT_##half_n "}, {" at_a "}, " at_b ", " sums ", 1, 1, 1;"      \
                 : places(mode, d)                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                         \
  }
#define ATTNFOLD_MULTIPLY(Type, type)                                                  \
  ATTNFOLD_MULTIPLY_KEYS(Type, type, true, ATTNFOLD_NEW, "0")                          \
  ATTNFOLD_MULTIPLY_KEYS(Type, type, false, ATTNFOLD_OLD, "1")                         \
  ATTNFOLD_MULTIPLY_VALUES(Type, type, true, ATTNFOLD_NEW, "0", 64, 32, ATTNFOLD_32,   \
                           "%32,%33,%34,%35", "%36")                                   \
  ATTNFOLD_MULTIPLY_VALUES(Type, type, false, ATTNFOLD_OLD, "1", 64, 32, ATTNFOLD_32,  \
                           "%32,%33,%34,%35", "%36")                                   \
  ATTNFOLD_MULTIPLY_VALUES(Type, type, true, ATTNFOLD_NEW, "0", 128, 64, ATTNFOLD_64,  \
                           "%64,%65,%66,%67", "%68")                                   \
  ATTNFOLD_MULTIPLY_VALUES(Type, type, false, ATTNFOLD_OLD, "1", 128, 64, ATTNFOLD_64, \
                           "%64,%65,%66,%67", "%68")

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
ATTNFOLD_MULTIPLY(__nv_bfloat16, "bf16")
ATTNFOLD_MULTIPLY(__half, "f16")
#endif

#undef ATTNFOLD_MULTIPLY
#undef ATTNFOLD_MULTIPLY_VALUES
#undef ATTNFOLD_MULTIPLY_KEYS
#undef ATTNFOLD_OLD
#undef ATTNFOLD_NEW
#undef ATTNFOLD_TEXT_64
#undef ATTNFOLD_TEXT_32
#undef ATTNFOLD_64
#undef ATTNFOLD_32
#undef ATTNFOLD_16
#undef ATTNFOLD_4

}  // namespace attnfold::cuda
