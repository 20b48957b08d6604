// What a warp of the large-row kernels does with its 16 rows of a leaf, whichever instructions
// multiply: what its rows do not see, weights, and values that are not finite.
//
// A thread holds of rows lane / 4 and 8 more, h = 0 and 1, and of each 8 keys two:
//   s[4 j + 2 h + i]  the score of key 8 j + 2 (lane % 4) + i
//   p[j / 2][j % 2 * 2 + h]  the weights of its two keys of 8 j .., as matrix instructions take
//   them
#pragma once

#include <type_traits>

#include "cuda/large_fold.cuh"
#include "cuda/large_tiles.cuh"

namespace attnfold::cuda {

constexpr int kLeafScores = kLeaf / 2;  // of a thread
constexpr int kLeafSteps = kLeaf / 16;  // of 16 keys: what one matrix instruction takes of p
using Scores = float[kLeafScores];
using Weights = uint32_t[kLeafSteps][4];

/** A warp's rows: 16 of a tile, from its row `first` on. */
struct WarpRows {
  int32_t kv_head, row_begin, num_rows, position, kv_len;  // of the tile
  int32_t first;
  int lane;

  __device__ __forceinline__ RequestShape request() const { return {kv_len - position, kv_len}; }
  /** Row `row` of the warp, or the tile's last one: its row of the request. */
  __device__ __forceinline__ int32_t request_row(int row) const {
    const int32_t of_tile = first + row;
    return row_begin + (of_tile < num_rows ? of_tile : num_rows - 1);
  }
  __device__ __forceinline__ int32_t row_of_lane(int h) const {
    return request_row(8 * h + lane / 4);
  }
};

/** Adds ALiBi's term to scores times `scale`, in the log2 domain. */
__device__ __forceinline__ void add_alibi(const AttendArgs& a, const WarpRows& rows,
                                          int32_t first_key, float scale, Scores& s) {
  const int32_t group = a.shape.group_size;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t row = rows.row_of_lane(h);
    const float slope = a.tensors.alibi_slopes[rows.kv_head * group + row % group] * kLog2E;
    const int32_t from = first_key + 2 * (rows.lane % 4) - rows.position - row / group;
#pragma unroll
    for (int i = 0; i < kLeaf / 4; ++i) {
      float& x = s[i / 2 * 4 + 2 * h + i % 2];
      x = lane::fma(slope, static_cast<float>(from + i / 2 * 8 + i % 2), x * scale);
    }
  }
}

/** Scores of keys from end[h] on, of the leaf's own, become -inf; any[h]: there are some before. */
__device__ __forceinline__ void hide_from(const int32_t (&end)[2], int lane, Scores& s,
                                          bool (&any)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    any[h] = end[h] > 0;
    const int32_t mine = end[h] - 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kLeaf / 4; ++i)
      if (i / 2 * 8 + i % 2 >= mine) s[i / 2 * 4 + 2 * h + i % 2] = kEmpty;
  }
}

/** Scores of keys that their row does not see become -inf; any[h]: the row sees some. */
__device__ __forceinline__ void hide_unseen(const AttendArgs& a, const WarpRows& rows,
                                            int32_t first_key, Scores& s, bool (&any)[2]) {
  const VisibleKeys keys[2] = {
      visible_keys(a.problem.mask, rows.request(), rows.row_of_lane(0) / a.shape.group_size),
      visible_keys(a.problem.mask, rows.request(), rows.row_of_lane(1) / a.shape.group_size)};
  const int32_t lane = rows.lane, key = first_key + 2 * (lane % 4);
  if (__all_sync(~0u, keys[0].begin <= first_key && keys[1].begin <= first_key)) {
    const auto end_of = [&](const VisibleKeys& x) {
      return (x.begin < x.end ? x.end : x.sink) - first_key;
    };
    hide_from({end_of(keys[0]), end_of(keys[1])}, lane, s, any);
    return;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    any[h] =
        first_key < keys[h].sink || (first_key < keys[h].end && first_key + kLeaf > keys[h].begin &&
                                     keys[h].begin < keys[h].end);
    const uint32_t width = static_cast<uint32_t>(keys[h].end - keys[h].begin);
#pragma unroll
    for (int i = 0; i < kLeaf / 4; ++i) {
      const int32_t k = key + i / 2 * 8 + i % 2;
      if (k >= keys[h].sink && static_cast<uint32_t>(k - keys[h].begin) >= width)
        s[i / 2 * 4 + 2 * h + i % 2] = kEmpty;
    }
  }
}

/** m of rows whose scores are s, times c in the log2 domain. */
__device__ __forceinline__ void find_maxima(const Scores& s, float c, const bool (&any)[2],
                                            float (&m)[2]) {
  float largest[2][4];  // of each row, in four chains
#pragma unroll
  for (int j = 0; j < kLeaf / 8; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float x = fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]);
      largest[h][j % 4] = j < 4 ? x : fmaxf(largest[h][j % 4], x);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h)
    m[h] = fmaxf(fmaxf(largest[h][0], largest[h][1]), fmaxf(largest[h][2], largest[h][3]));
#pragma unroll
  for (int distance = 1; distance <= 2; ++distance) {
    const float x = __shfl_xor_sync(~0u, m[0], distance), y = __shfl_xor_sync(~0u, m[1], distance);
    m[0] = fmaxf(m[0], x);
    m[1] = fmaxf(m[1], y);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) m[h] = any[h] ? fmaxf(c * fmaxf(m[h], kLowest), kLowest) : kEmpty;
}

/** Makes weights p = 2^(c s - m) in 16 bits, 16 keys at a time, in order, and sums them up. */
struct Weigher {
  float c, minus_m[2];
  float chain[2];  // of 32 keys

  template <class T>
  __device__ __forceinline__ void weigh(int step, const Scores& s, uint32_t (&p)[4],
                                        float (&l)[2]) {
#pragma unroll
    for (int j = 2 * step; j < 2 * step + 2; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = exp2_fast(lane::fma(s[4 * j + 2 * h], c, minus_m[h])),
                    y = exp2_fast(lane::fma(s[4 * j + 2 * h + 1], c, minus_m[h]));
        chain[h] = j % 4 == 0 ? x + y : (chain[h] + x) + y;
        if (j % 4 == 3) l[h] = j == 3 ? chain[h] : l[h] + chain[h];
        p[j % 2 * 2 + h] = pack<T>(x, y);
      }
    }
  }
};

/** l of whole rows, of those of the lanes that share them. */
__device__ __forceinline__ void add_up(float (&l)[2]) {
#pragma unroll
  for (int distance = 1; distance <= 2; ++distance) {
    const float x = __shfl_xor_sync(~0u, l[0], distance), y = __shfl_xor_sync(~0u, l[1], distance);
    l[0] += x;
    l[1] += y;
  }
}

/** Not 0 if one of 8 values is not finite: 0 times that is NaN. */
template <class T>
__device__ __forceinline__ uint32_t odd_of(const uint4& values) {
  uint32_t sum = 0;
  const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (const uint32_t word : words) {
    if constexpr (std::is_same_v<T, __half>) {
      asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(word), "r"(0));
    } else {
      asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(word), "r"(0));
    }
  }
  return sum;
}

/**
 * Folds P V of a leaf where some value is not finite into `o`: token by token, values that the
 * token does not see replaced by 0.  The same products in the same order as without.
 * v_chunk(key, i): the address of 16 bytes of V.
 */
template <class T, int kDim, class Place>
__device__ __forceinline__ void fold_by_token(const AttendArgs& a, const WarpRows& rows,
                                              int32_t first_key, const Weights& p,
                                              const LeafFold& fold, const Place& v_chunk,
                                              float (&o)[kDim / 2]) {
  const int32_t group = a.shape.group_size;
  const int lane = rows.lane, matrix = lane / 8, row = lane % 8;
  const int32_t first = rows.request_row(0) / group, last = rows.request_row(15) / group;
#pragma unroll 1
  for (int32_t token = first; token <= last; ++token) {
    const VisibleKeys keys = visible_keys(a.problem.mask, rows.request(), token);
    const bool mine[2] = {rows.row_of_lane(0) / group == token,
                          rows.row_of_lane(1) / group == token};
    uint32_t seen = 0;  // bit 2 i + e: key 8 i + 2 (lane % 4) + e of the leaf
#pragma unroll
    for (int i = 0; i < kLeaf / 4; ++i) {
      const int32_t key = first_key + i / 2 * 8 + 2 * (lane % 4) + i % 2;
      seen |= sees(keys, key) ? 1u << i : 0u;
    }
#pragma unroll
    for (int j = 0; j < kDim / 8; j += 2) {
      float d[2][4] = {};
#pragma unroll
      for (int step = 0; step < kLeafSteps; ++step) {
        uint32_t v[4];
        load_matrices_transposed(v, v_chunk(step * 16 + 8 * (matrix & 1) + row, j + (matrix >> 1)));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t pair = seen >> (4 * step + 2 * (i & 1));
          v[i] &= (pair & 1) * 0xffffu + (pair >> 1 & 1) * 0xffff0000u;
        }
        multiply_add<T>(d[0], p[step][0], p[step][1], p[step][2], p[step][3], v[0], v[1]);
        multiply_add<T>(d[1], p[step][0], p[step][1], p[step][2], p[step][3], v[2], v[3]);
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int h = e / 2 % 2;
        if (mine[h]) fold.row[h].into_a(o[j * 4 + e], d[e / 4][e % 4]);
      }
    }
  }
}

}  // namespace attnfold::cuda
