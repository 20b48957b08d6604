// The canonical fold of the large-row kernels: a thread's part of the states of rows.
#pragma once

#include "cuda/row_state.h"

namespace attnfold::cuda {

/** One thread's part of the states of its warp's 16 rows: rows lane / 4 and 8 more, elements
 * 8 j + 2 (lane % 4) + {0, 1}. */
template <int kElements>
struct HalfState {
  float m[2], l[2];
  float o[kElements];  // element e belongs to row e / 2 % 2

  __device__ __forceinline__ void clear() {
    m[0] = m[1] = kEmpty;
    l[0] = l[1] = 0.0f;
#pragma unroll
    for (int e = 0; e < kElements; ++e) o[e] = 0.0f;
  }
};

/** How fold(a, b) goes for one row: its m, and the same step for l and each element of o.  An empty
 * b changes nothing. */
struct RowFold {
  float m, scale;
  uint32_t a_leads, b_leads, keeps;  // one of them is 1

  __device__ __forceinline__ RowFold(float m_a, float m_b) {
    const FoldStep step = fold_step_fast(m_a, m_b);
    keeps = m_b == kEmpty;
    b_leads = !keeps && step.b_leads;
    a_leads = !keeps && !step.b_leads;
    scale = step.scale;
    m = b_leads ? m_b : m_a;
  }
  /** a = fold(a, b). */
  __device__ __forceinline__ void into_a(float& a, float b) const {
    asm("{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\nsetp.ne.u32 q, %4, 0;\n"
        "@p fma.rn.f32 %0, %2, %1, %0;\n@q fma.rn.f32 %0, %2, %0, %1;\n}"
        : "+f"(a)
        : "f"(b), "f"(scale), "r"(a_leads), "r"(b_leads));
  }
  /** b = fold(a, b). */
  __device__ __forceinline__ void into_b(float a, float& b) const {
    asm("{\n.reg .pred p, q, r;\nsetp.ne.u32 p, %3, 0;\nsetp.ne.u32 q, %4, 0;\n"
        "setp.ne.u32 r, %5, 0;\n@p fma.rn.f32 %0, %2, %0, %1;\n@q fma.rn.f32 %0, %2, %1, %0;\n"
        "@r mov.f32 %0, %1;\n}"
        : "+f"(b)
        : "f"(a), "f"(scale), "r"(a_leads), "r"(b_leads), "r"(keeps));
  }
};

/** How a leaf folds into a super-chunk; m and l are folded at once, o when it is there. */
struct LeafFold {
  RowFold row[2];

  template <int kElements>
  __device__ __forceinline__ LeafFold(HalfState<kElements>& to, const float (&m)[2],
                                      const float (&l)[2])
      : row{RowFold(to.m[0], m[0]), RowFold(to.m[1], m[1])} {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row[h].into_a(to.l[h], l[h]);
      to.m[h] = row[h].m;
    }
  }

  /** to = fold(to, o). */
  template <int kElements>
  __device__ __forceinline__ void apply(float (&to)[kElements], const float (&o)[kElements]) const {
#pragma unroll
    for (int e = 0; e < kElements; ++e) row[e / 2 % 2].into_a(to[e], o[e]);
  }
};

/**
 * Folds a whole super-chunk into the rows' totals, which wait in memory while others follow, of a
 * block's threads beside each other: quad j at totals[j kStride], and m and l behind the last one.
 * `seen_chunks`: there are totals.  After the last super-chunk they are in `chunk`, and nowhere
 * else. kAtOnce quads are on their way together.
 */
template <int kAtOnce, int kStride, int kElements>
__device__ __forceinline__ void fold_into_total(float4* totals, HalfState<kElements>& chunk,
                                                bool& seen_chunks, bool is_last) {
  constexpr int kQuads = kElements / 4;
  static_assert(kQuads % kAtOnce == 0);
  if (seen_chunks) {
    float4 total[kAtOnce];
    const float4 ml = __ldcg(totals + kQuads * kStride);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) total[j] = __ldcg(totals + j * kStride);
    const RowFold fold[2] = {RowFold(ml.x, chunk.m[0]), RowFold(ml.y, chunk.m[1])};
#pragma unroll
    for (int from = 0; from < kQuads; from += kAtOnce) {
      if (from > 0) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) total[j] = __ldcg(totals + (from + j) * kStride);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        float* const o = &chunk.o[4 * (from + j)];
        fold[0].into_b(total[j].x, o[0]);
        fold[0].into_b(total[j].y, o[1]);
        fold[1].into_b(total[j].z, o[2]);
        fold[1].into_b(total[j].w, o[3]);
      }
    }
    fold[0].into_b(ml.z, chunk.l[0]);
    fold[1].into_b(ml.w, chunk.l[1]);
    chunk.m[0] = fold[0].m;
    chunk.m[1] = fold[1].m;
  } else {  // into nothing: scale 0 times 0 is added
#pragma unroll
    for (int e = 0; e < kElements; ++e) chunk.o[e] += 0.0f;
  }
  seen_chunks = true;
  if (is_last) return;
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const float* o = &chunk.o[4 * j];
    __stcg(totals + j * kStride, make_float4(o[0], o[1], o[2], o[3]));
  }
  __stcg(totals + kQuads * kStride, make_float4(chunk.m[0], chunk.m[1], chunk.l[0], chunk.l[1]));
  chunk.clear();
}

}  // namespace attnfold::cuda
