// Baseline rows: any CPU.  Slow, and the plainest statement of what every other row computes.
#include <cstdint>
#include <cstring>

#include "cpu/kernel_row.h"

namespace attnfold::cpu::scalar {
namespace {
#include "cpu/simd/scalar.h"
// clang-format off
#include "core/lane_math.inl"
#include "cpu/scores.inl"
#include "cpu/values.inl"
#include "cpu/attend.inl"
// clang-format on
}  // namespace

KernelRows rows() {
  static constexpr KernelRow kRows[] = {
      {"cpu_scalar/bf16", "scalar", "f32 f16 bf16", DType::bf16, false, "cpu-fma-1/bf16",
       run_worker<DType::bf16, FmaScores<DType::bf16>>, merge_shared<DType::bf16>},
      {"cpu_scalar/f16", "scalar", "f32 f16 bf16", DType::f16, false, "cpu-fma-1/f16",
       run_worker<DType::f16, FmaScores<DType::f16>>, merge_shared<DType::f16>},
      {"cpu_scalar/f32", "scalar", "f32 f16 bf16", DType::f32, false, "cpu-fma-1/f32",
       run_worker<DType::f32, FmaScores<DType::f32>>, merge_shared<DType::f32>},
  };
  return {kRows, 3};
}

}  // namespace attnfold::cpu::scalar
