// Rows for AVX2, FMA and F16C.  Bits are those of the scalar rows.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/kernel_row.h"
#include "cpu/target_region.h"

ATTNFOLD_TARGET_BEGIN("avx2,fma,f16c")

namespace attnfold::cpu::avx2 {
namespace {
#include "cpu/simd/avx2.h"
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
      {"cpu_avx2/bf16", "avx2", "f32 f16 bf16", DType::bf16, false, false, "cpu-fma-1/bf16",
       run_worker<DType::bf16, FmaScores<DType::bf16>>, merge_shared<DType::bf16>},
      {"cpu_avx2/f16", "avx2", "f32 f16 bf16", DType::f16, false, false, "cpu-fma-1/f16",
       run_worker<DType::f16, FmaScores<DType::f16>>, merge_shared<DType::f16>},
      {"cpu_avx2/f32", "avx2", "f32 f16 bf16", DType::f32, false, false, "cpu-fma-1/f32",
       run_worker<DType::f32, FmaScores<DType::f32>>, merge_shared<DType::f32>},
      {"cpu_avx2/e4m3", "avx2", "f32 f16 bf16", DType::e4m3, false, false, "cpu-fma-1/e4m3",
       run_worker<DType::e4m3, FmaScores<DType::e4m3>>, merge_shared<DType::e4m3>},
      {"cpu_avx2/e5m2", "avx2", "f32 f16 bf16", DType::e5m2, false, false, "cpu-fma-1/e5m2",
       run_worker<DType::e5m2, FmaScores<DType::e5m2>>, merge_shared<DType::e5m2>},
      {"cpu_avx2/i8", "avx2", "f32 f16 bf16", DType::i8, false, false, "cpu-fma-1/i8",
       run_worker<DType::i8, FmaScores<DType::i8>>, merge_shared<DType::i8>},
  };
  return {kRows, 6};
}

}  // namespace attnfold::cpu::avx2

ATTNFOLD_TARGET_END

#endif
