// Rows for AVX-512 with the bf16 dot product: bf16 queries on bf16 keys.  Scores by vdpbf16ps, in
// one row also the weighted sum of values, the rest as the AVX-512 rows.
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

namespace attnfold::cpu::avx512_bf16 {
namespace {
#define ATTNFOLD_PREFETCH_HERE
#include "cpu/simd/avx512.h"
// Into L1 where that is faster from memory: by 10 % on Zen 5; on Zen 4 into L2 is, by 30 %.
bool prefetch_into_l1 = false;
ATTNFOLD_LANE_FN void prefetch(const char* p) {
  if (prefetch_into_l1) {
    _mm_prefetch(p, _MM_HINT_T0);
  } else {
    _mm_prefetch(p, _MM_HINT_T1);
  }
}
// clang-format off
#include "core/lane_math.inl"
#include "cpu/scores.inl"
#include "cpu/pairs.inl"
#include "cpu/values.inl"
#include "cpu/attend.inl"
#include "cpu/tile.inl"
#include "cpu/pair_values.inl"
#include "cpu/run.inl"
// clang-format on

/** Scores by bf16 dot: lane i of the chain takes elements 2i and 2i + 1 of each chunk. */
struct DotScores : PairQueries {
  static constexpr bool kMatrix = false;
  static constexpr bool kKeyPairs = false;
  static int keys_together(int) { return 16; }
  static constexpr LaneOrder kOrder = LaneOrder::halves;
  struct Mode {};
  using Chunk = __m512i;
  ATTNFOLD_LANE_FN Chunk load_chunk(const char* k) { return _mm512_loadu_si512(k); }
  ATTNFOLD_LANE_FN Chunk load_partial(const char* k, int n) {
    return _mm512_maskz_loadu_epi16((1u << n) - 1, k);
  }
  ATTNFOLD_LANE_FN Lanes step(const Q* q, Chunk k, Lanes acc) {
    return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(_mm512_loadu_si512(q)),
                             reinterpret_cast<__m512bh>(k))};
  }

  static constexpr int kTileStep = 16;
  template <int N>
  ATTNFOLD_LANE_FN void tile_step(const TileQ* q, const char* k, int n, int depth, int at,
                                  Lanes* acc) {
    const int* key = reinterpret_cast<const int*>(k) + n * depth + at;
    __m512bh row[kTileVecs];
#pragma GCC unroll 2
    for (int i = 0; i < kTileVecs; ++i)
      row[i] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(q + at * kTileRows + i * 16));
#pragma GCC unroll 16
    for (int f = 0; f < N; ++f) {
      const __m512i x = _mm512_set1_epi32(key[f / kTileVecs * depth]);
      acc[f].v = _mm512_dpbf16_ps(acc[f].v, row[f % kTileVecs], reinterpret_cast<__m512bh>(x));
    }
  }
};

/** The same scores, and weights rounded to bf16. */
struct DotPairs : DotScores {
  static constexpr bool kKeyPairs = true;
  // So that accumulators are seldom loaded and stored; but those at hand and as many ahead have to
  // fit into a part of L2: at most 128 KB each.
  static int keys_together(int token_bytes) {
    if (prefetch_into_l1 || token_bytes > 4096) return 16;
    return token_bytes > 2048 ? 32 : 64;
  }
  static void round_weights(float* p) { round_row_weights(p); }
  static bool whole_leaf_weights(float* s, const ScoreMod& mod, float* m, float* l) {
    return round_whole_leaf(s, mod, m, l);
  }
  static constexpr LaneOrder kOrder = LaneOrder::quads;
};
}  // namespace

KernelRows rows(bool into_l1) {
  prefetch_into_l1 = into_l1;
  static constexpr KernelRow kRows[] = {
      {"cpu_avx512_bf16_p16/bf16_bf16", "avx512_bf16_p16", "bf16", DType::bf16, true, true,
       "cpu-dpbf16-2/bf16", run_worker<DType::bf16, DotPairs>, merge_states<DotPairs::kOrder>},
      {"cpu_avx512_bf16/bf16_bf16", "avx512_bf16", "bf16", DType::bf16, true, false,
       "cpu-dpbf16-1/bf16", run_worker<DType::bf16, DotScores>, merge_shared<DType::bf16>},
  };
  return {kRows, 2};
}

}  // namespace attnfold::cpu::avx512_bf16

ATTNFOLD_TARGET_END

#endif
