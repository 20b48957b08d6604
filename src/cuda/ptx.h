// The instructions that CUDA C++ has no words for, one function each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace attnfold::cuda {

/** Address within the block's shared memory; kept in a register, where the compiler would work it
 * out at each use. */
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  uint32_t address;
  asm volatile("mov.u32 %0, %1;"
               : "=r"(address)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(p))));
  return address;
}

__device__ __forceinline__ float load_shared(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ void store_shared(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

/** A struct of whole 16 bytes, from L2: what an earlier kernel wrote may be read before this one
 * has waited for it. */
template <class T>
__device__ __forceinline__ T load_from_l2(const T* from) {
  static_assert(sizeof(T) % 16 == 0 && alignof(T) == 16);
  union {
    uint4 words[sizeof(T) / 16];
    T value;
  } r;
#pragma unroll
  for (size_t i = 0; i < sizeof(T) / 16; ++i)
    r.words[i] = __ldcg(reinterpret_cast<const uint4*>(from) + i);
  return r.value;
}

/** From L2, or zeros if not `valid`, and then nothing is read.  Never a branch: loads that follow
 * each other are on their way together. */
__device__ __forceinline__ float4 load_or_zeros(const float4* from, bool valid) {
  float4 r = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  asm volatile(
      "{\n.reg .pred valid;\nsetp.ne.u32 valid, %5, 0;\n"
      "@valid ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];\n}"
      : "+f"(r.x), "+f"(r.y), "+f"(r.z), "+f"(r.w)
      : "l"(from), "r"(static_cast<uint32_t>(valid))
      : "memory");
  return r;
}

__device__ __forceinline__ float2 load_or_zeros(const float2* from, bool valid) {
  float2 r = make_float2(0.0f, 0.0f);
  asm volatile(
      "{\n.reg .pred valid;\nsetp.ne.u32 valid, %3, 0;\n@valid ld.global.cg.v2.f32 {%0,%1}, "
      "[%2];\n}"
      : "+f"(r.x), "+f"(r.y)
      : "l"(from), "r"(static_cast<uint32_t>(valid))
      : "memory");
  return r;
}

// ------------------------------------------------------------------------------------------------
// copies into shared memory

/** 16 bytes, around L1. */
__device__ __forceinline__ void copy_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/** The same; zeros if `valid` is false, and then nothing is read. */
__device__ __forceinline__ void copy_16_or_zeros(uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

/** Ends a group of this thread's copies. */
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }

/** Waits until at most `kGroups` of this thread's groups of copies are on their way. */
template <int kGroups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

/** Brings a line from memory to L2. */
__device__ __forceinline__ void prefetch_to_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// ------------------------------------------------------------------------------------------------
// barriers in shared memory

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier)
               : "memory");
}

/** Arrives when this thread's copies have landed. */
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

/** Waits for the phase of the given parity to complete. */
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
#define ATTNFOLD_TRY_WAIT "mbarrier.try_wait.parity.shared.b64"
#else
#define ATTNFOLD_TRY_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif
  asm volatile("{\n.reg .pred done;\nWAIT:\n" ATTNFOLD_TRY_WAIT
               " done, [%0], %1;\n@done bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(barrier),
               "r"(parity)
               : "memory");
#undef ATTNFOLD_TRY_WAIT
}

/** Among `threads` threads of the block; id 0 is __syncthreads. */
template <int kId, int kThreads>
__device__ __forceinline__ void group_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

// ------------------------------------------------------------------------------------------------
// one kernel after another

/** Waits for the kernels before this one in its stream, if it was launched to overlap them. */
__device__ __forceinline__ void wait_for_previous_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/** Lets the next kernel of the stream start; what it reads of this one it must still wait for. */
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ------------------------------------------------------------------------------------------------
// registers

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// ------------------------------------------------------------------------------------------------
// matrices of 8 x 8, 16-bit elements

/** Four matrices; lane i gives the address of row i % 8 of matrix i / 8. */
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

/** d += a b: a [16, 16], b [16, 8], float32 sums. */
template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&d)[4], uint32_t a0, uint32_t a1,
                                                            uint32_t a2, uint32_t a3, uint32_t b0,
                                                            uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply_add<__half>(float (&d)[4], uint32_t a0, uint32_t a1,
                                                     uint32_t a2, uint32_t a3, uint32_t b0,
                                                     uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/** Two floats, each rounded to nearest even; `low` in the low half. */
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

/** 2^x within 2 units in the last place; results below 2^-126 are 0. */
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace attnfold::cuda
