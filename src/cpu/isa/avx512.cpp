// Rows for AVX-512 F, BW, DQ and VL.  Bits are those of the scalar rows.
#if defined(__x86_64__)

// gcc 12 warns about the undefined registers inside its own header.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>
#include <cstring>

#include "cpu/kernel_row.h"
#include "cpu/target_region.h"

ATTNFOLD_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

namespace attnfold::cpu::avx512 {
namespace {
// Into L2.
constexpr _mm_hint kPrefetchInto = _MM_HINT_T1;
#include "cpu/simd/avx512.h"
// clang-format off
#include "core/lane_math.inl"
#include "cpu/scores.inl"
#include "cpu/values.inl"
#include "cpu/attend.inl"
#include "cpu/tile.inl"
#include "cpu/run.inl"
// clang-format on
}  // namespace

KernelRows rows() {
  static constexpr KernelRow kRows[] = {
      {"cpu_avx512/bf16", "avx512", "f32 f16 bf16", DType::bf16, false, false, "cpu-fma-1/bf16",
       run_worker<DType::bf16, FmaScores<DType::bf16>>, merge_shared<DType::bf16>},
      {"cpu_avx512/f16", "avx512", "f32 f16 bf16", DType::f16, false, false, "cpu-fma-1/f16",
       run_worker<DType::f16, FmaScores<DType::f16>>, merge_shared<DType::f16>},
      {"cpu_avx512/f32", "avx512", "f32 f16 bf16", DType::f32, false, false, "cpu-fma-1/f32",
       run_worker<DType::f32, FmaScores<DType::f32>>, merge_shared<DType::f32>},
      {"cpu_avx512/e4m3", "avx512", "f32 f16 bf16", DType::e4m3, false, false, "cpu-fma-1/e4m3",
       run_worker<DType::e4m3, FmaScores<DType::e4m3>>, merge_shared<DType::e4m3>},
      {"cpu_avx512/e5m2", "avx512", "f32 f16 bf16", DType::e5m2, false, false, "cpu-fma-1/e5m2",
       run_worker<DType::e5m2, FmaScores<DType::e5m2>>, merge_shared<DType::e5m2>},
      {"cpu_avx512/i8", "avx512", "f32 f16 bf16", DType::i8, false, false, "cpu-fma-1/i8",
       run_worker<DType::i8, FmaScores<DType::i8>>, merge_shared<DType::i8>},
  };
  return {kRows, 6};
}

}  // namespace attnfold::cpu::avx512

ATTNFOLD_TARGET_END

#endif
