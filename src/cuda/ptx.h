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

__device__ __forceinline__ void store_shared_pair(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ int32_t load_shared_byte(uint32_t address) {
  int32_t x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ uint4 load_shared_quad(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_shared_quad(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
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

/** After it, what was written before somebody's fence and the change that this reads is there. */
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
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

/** Byte offset of 16-byte chunk `chunk` of a row.  Rows' chunks are exchanged so that the same
 * chunk of 8 rows, which ldmatrix reads at once, lies in 8 different banks. */
template <int kPitch>
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
  return static_cast<uint32_t>(row * kPitch + ((chunk ^ (row & 7)) << 4));
}

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

#if defined(ATTNFOLD_EVERY_LANE_ARRIVES)  // for racecheck, which does not know that a lane can
                                          // arrive for its warp
constexpr int kArrivingLanes = 32;
#else
constexpr int kArrivingLanes = 1;
#endif

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

/** Arrives, and lets the phase wait for `bytes` of the copy engine as well. */
__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

/** Makes initialised barriers known to the copy engine. */
__device__ __forceinline__ void fence_barrier_init() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/** Orders this thread's view of shared memory before what the copy engine and the matrix
 * instructions read of it. */
__device__ __forceinline__ void fence_shared_for_engines() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/** Copies a box of a tensor of five dimensions into shared memory; `barrier` counts its bytes. */
__device__ __forceinline__ void copy_box(uint32_t to, const void* map, uint32_t barrier, int32_t c0,
                                         int32_t c1, int32_t c2, int32_t c3, int32_t c4) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3,%4,%5,%6,%7}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
#endif
}

/** Of a tensor of four dimensions. */
__device__ __forceinline__ void copy_box(uint32_t to, const void* map, uint32_t barrier, int32_t c0,
                                         int32_t c1, int32_t c2, int32_t c3) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3,%4,%5,%6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
#endif
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

/** One lane for its warp, after what the warp did before; every lane for racecheck. */
__device__ __forceinline__ void arrive_warp(uint32_t barrier, int lane) {
  __syncwarp();
  if (lane < kArrivingLanes) barrier_arrive(barrier);
}

/** A place in a ring of `kStages` buffers. */
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/** Among `threads` threads of the block; id 0 is __syncthreads. */
template <int kId, int kThreads>
__device__ __forceinline__ void group_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

/** One side of such a barrier arrives, the other waits; kThreads is the sum of both. */
template <int kThreads>
__device__ __forceinline__ void group_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void group_wait(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

/** Waits for all `kThreads` threads; whether `value` is not 0 in some of them. */
template <int kThreads>
__device__ __forceinline__ bool group_any(int id, uint32_t value) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred some, any;\nsetp.ne.u32 some, %1, 0;\n"
      "bar.red.or.pred any, %2, %3, some;\nselp.u32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(value), "r"(id), "n"(kThreads)
      : "memory");
  return any != 0;
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

/** A value that is the same for all lanes, so that the compiler knows, and keeps it in a register
 * of the warp. */
__device__ __forceinline__ uint32_t uniform(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_or_sync(~0u, x);
#else
  return __shfl_sync(~0u, x, 0);
#endif
}

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

/** Stores four matrices; lane i gives the address of row i % 8 of matrix i / 8. */
__device__ __forceinline__ void store_matrices(uint32_t row, uint32_t r0, uint32_t r1, uint32_t r2,
                                               uint32_t r3) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
#endif
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
