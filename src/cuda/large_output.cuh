// How the large-row kernels write the rows of a finished tile.
#pragma once

#include "cuda/large_fold.cuh"

namespace attnfold::cuda {

/** This lane's elements of row h, the first `width`, multiplied by `factor`; none where `to` is
 * negative.  Two lanes exchange half of what they have, so that each writes four neighbours: whole
 * 32 bytes of memory by the four lanes that share a row. */
template <class T, int kElements>
__device__ __forceinline__ void write_row(const AttendArgs& a, int lane,
                                          const float (&o)[kElements], int h, int64_t to,
                                          float factor, int32_t width) {
  const bool odd = lane % 2 != 0;
  const int64_t first = to + (odd ? 8 : 0) + lane % 4 / 2 * 4;
  // Even lanes write elements 8 j to 8 j + 7 of their row, odd ones the 8 after them.
  const auto inside = [&](int j) { return to >= 0 && 8 * j + (odd ? 8 : 0) < width; };
  if (a.problem.o_dtype == DType::f32) {
    float* at = reinterpret_cast<float*>(a.tensors.o.data) + first;
#pragma unroll
    for (int j = 0; j < kElements / 4; j += 2) {
      const float* e = &o[j * 4 + 2 * h];
      const float2 low = make_float2(e[0] * factor, e[1] * factor),
                   high = make_float2(e[4] * factor, e[5] * factor);
      const float x = __shfl_xor_sync(~0u, odd ? low.x : high.x, 1),
                  y = __shfl_xor_sync(~0u, odd ? low.y : high.y, 1);
      if (inside(j))
        *reinterpret_cast<float4*>(at + 8 * j) =
            odd ? make_float4(x, y, high.x, high.y) : make_float4(low.x, low.y, x, y);
    }
  } else {
    char* at = a.tensors.o.data + 2 * first;
#pragma unroll
    for (int j = 0; j < kElements / 4; j += 2) {
      const float* e = &o[j * 4 + 2 * h];
      const uint32_t low = pack<T>(e[0] * factor, e[1] * factor),
                     high = pack<T>(e[4] * factor, e[5] * factor);
      const uint32_t got = __shfl_xor_sync(~0u, odd ? low : high, 1);
      if (inside(j))
        *reinterpret_cast<uint2*>(at + 16 * j) = odd ? make_uint2(got, high) : make_uint2(low, got);
    }
  }
}

/** Writes a warp's 16 rows; `place` is that of row lane % 16, which is not written unless `inside`.
 * Lanes finish one each: the instructions of this are fetched once for all. */
template <class T, int kElements>
__device__ __forceinline__ void write_warp_rows(const AttendArgs& a, const RowPlace& place,
                                                bool inside, int lane,
                                                const HalfState<kElements>& chunk, int32_t width) {
  float row_m = kEmpty, row_l = 0.0f;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float m_h = __shfl_sync(~0u, chunk.m[h], lane % 8 * 4),
                l_h = __shfl_sync(~0u, chunk.l[h], lane % 8 * 4);
    if (lane / 8 % 2 == h) row_m = m_h, row_l = l_h;
  }
  const RowEnd end = finish_row(a, place.head, row_m, row_l);
  if (inside && lane < 16) write_lse(a, place, end);
  const int64_t to = inside ? o_offset(a, place) : -1;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int from = 8 * h + lane / 4;
    write_row<T>(a, lane, chunk.o, h, __shfl_sync(~0u, to, from),
                 __shfl_sync(~0u, end.factor, from), width);
  }
}

}  // namespace attnfold::cuda
