// Rows for AMX with bf16 tiles: bf16 queries on bf16 keys.  Both products by tdpbf16ps, on weights
// in float32 or rounded to bf16, the rest as the AVX-512 rows.
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

ATTNFOLD_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")

namespace attnfold::cpu::amx_bf16 {
namespace {
// Into L2 and not L1, which keys and values would soon leave again.
constexpr _mm_hint kPrefetchInto = _MM_HINT_T2;
#include "cpu/simd/avx512.h"
#ifdef ATTNFOLD_EMULATE_AMX
#include "cpu/simd/amx_emulated.h"
#else
#include "cpu/simd/amx.h"
#endif
// clang-format off
#include "core/lane_math.inl"
#include "cpu/scores.inl"
#include "cpu/pairs.inl"
#include "cpu/values.inl"
#include "cpu/attend.inl"
#include "cpu/amx.inl"
#include "cpu/amx_rows.inl"
#include "cpu/tile.inl"
#include "cpu/amx_tile.inl"
#include "cpu/amx_stages.inl"
#include "cpu/amx_leaves.inl"
#include "cpu/run.inl"
// clang-format on

}  // namespace

KernelRows rows() {
  static constexpr KernelRow kRows[] = {
      {"cpu_amx_bf16_p16/bf16_bf16", "amx_bf16_p16", "bf16", DType::bf16, true, true,
       "cpu-amx-2/bf16", run_worker<DType::bf16, MatrixScores<1>>, merge_shared<DType::bf16>},
      {"cpu_amx_bf16/bf16_bf16", "amx_bf16", "bf16", DType::bf16, true, false, "cpu-amx-1/bf16",
       run_worker<DType::bf16, MatrixScores<3>>, merge_shared<DType::bf16>},
  };
  return {kRows, 2};
}

}  // namespace attnfold::cpu::amx_bf16

ATTNFOLD_TARGET_END

#endif
