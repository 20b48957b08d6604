// Rows for Advanced SIMD of AArch64, little-endian: every such CPU has it.  Bits are those of the
// scalar rows.
#if defined(__AARCH64EL__)

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "cpu/kernel_row.h"

namespace attnfold::cpu::neon {
namespace {
#include "cpu/simd/neon.h"
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
      {"cpu_neon/bf16", "neon", "f32 f16 bf16", DType::bf16, false, false, "cpu-fma-1/bf16",
       run_worker<DType::bf16, FmaScores<DType::bf16>>, merge_shared<DType::bf16>},
      {"cpu_neon/f16", "neon", "f32 f16 bf16", DType::f16, false, false, "cpu-fma-1/f16",
       run_worker<DType::f16, FmaScores<DType::f16>>, merge_shared<DType::f16>},
      {"cpu_neon/f32", "neon", "f32 f16 bf16", DType::f32, false, false, "cpu-fma-1/f32",
       run_worker<DType::f32, FmaScores<DType::f32>>, merge_shared<DType::f32>},
      {"cpu_neon/e4m3", "neon", "f32 f16 bf16", DType::e4m3, false, false, "cpu-fma-1/e4m3",
       run_worker<DType::e4m3, FmaScores<DType::e4m3>>, merge_shared<DType::e4m3>},
      {"cpu_neon/e5m2", "neon", "f32 f16 bf16", DType::e5m2, false, false, "cpu-fma-1/e5m2",
       run_worker<DType::e5m2, FmaScores<DType::e5m2>>, merge_shared<DType::e5m2>},
      {"cpu_neon/i8", "neon", "f32 f16 bf16", DType::i8, false, false, "cpu-fma-1/i8",
       run_worker<DType::i8, FmaScores<DType::i8>>, merge_shared<DType::i8>},
  };
  return {kRows, 6};
}

}  // namespace attnfold::cpu::neon

#endif
