// The score warpgroups of the large-row kernel: S and P of 64 rows, leaf by leaf, and each row's m
// and l.
#pragma once

#include "cuda/large_shape.cuh"
#include "cuda/row_state.h"
#include "cuda/wgmma.h"

namespace attnfold::cuda {

template <class Shape, class T>
class ScoreGroup {
 public:
  __device__ __forceinline__ ScoreGroup(const LargeArgs& args_in, uint32_t shared_in, int half_in,
                                        int warp_in, int lane_in)
      : args(args_in),
        a(args_in.attend),
        shared(shared_in),
        half(half_in),
        warp(warp_in),
        lane(lane_in) {}

  __device__ __forceinline__ void run() {
    for (uint32_t i = 0;; ++i) {
      barrier_wait(shared + ATTNFOLD_SHARED(full_tile) + 8 * (i % 2), i / 2 % 2);
      tile = shared + ATTNFOLD_SHARED(tile) +
             i % 2 * static_cast<uint32_t>(sizeof(Shape::Shared::tile[0]));
      if (uniform(load_shared_word(tile + sizeof(RowSet) + 4))) return;
      load_queries();
      group_arrive<kTileHalves * kWarpgroup + kQueryThreads>(kQueriesBarrier);
      note.flags = uniform(load_shared_word(tile + offsetof(RowSet, num_leaves))) == 0
                       ? LeafNote::kTileEnds
                       : 0;
      while (find_leaf()) {
        const uint32_t k = k_address();
        multiply(0, k);
        multiply(1, k);
        find_first_largest();
        while (note.next_seen(half)) leaf<true>();
        leaf<false>();
      }
      arrive_warp(shared + ATTNFOLD_SHARED(empty_tile) + 8 * (i % 2), lane);
    }
  }

 private:
  static constexpr int kSteps = Shape::kDim / 16;
  static constexpr int kParts = 2, kPartKeys = kLeaf / kParts;  // products that begin apart

  __device__ __forceinline__ void next_stage() {
    if (++stage == Shape::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  __device__ __forceinline__ void wait_for_keys() const {
    barrier_wait(shared + ATTNFOLD_SHARED(full_k) + 8 * stage, parity);
  }
  /** Reads what is said of the leaf whose keys are there. */
  __device__ __forceinline__ void read_note() {
    const uint32_t at = shared + ATTNFOLD_SHARED(note_k) + leaves % kLeafNotes * 8;
    note = {static_cast<int32_t>(load_shared_word(at)), uniform(load_shared_word(at + 4))};
  }
  /** The leaf at hand may leave shared memory. */
  __device__ __forceinline__ void free_leaf() {
    arrive_warp(shared + ATTNFOLD_SHARED(empty_k) + 8 * stage, lane);
    ++leaves;
    next_stage();
  }
  /** Goes to the next leaf that some row of this half sees; false if the tile has none. */
  __device__ __forceinline__ bool find_leaf() {
    while (!note.tile_ends()) {
      wait_for_keys();
      read_note();
      if (note.seen(half)) return true;
      free_leaf();
    }
    return false;
  }
  __device__ __forceinline__ uint32_t k_address() const {
    return uniform(matrix_address(shared + ATTNFOLD_SHARED(k) + stage * Shape::kLeafBytes, 16));
  }

  __device__ __forceinline__ void load_queries() {
    const uint32_t base = shared + ATTNFOLD_SHARED(q);
    const int matrix = lane / 8, row = half * kHalfRows + warp * 16 + 8 * (matrix & 1) + lane % 8;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t r[4];
      load_matrices(r, base + chunk_offset<Shape::kPitchQ>(row, 2 * step + (matrix >> 1)));
#pragma unroll
      for (int i = 0; i < 4; ++i) q[step][i] = r[i];
    }
  }

  /** Begins s = q.k for one half of the keys of the leaf at hand. */
  __device__ __forceinline__ void multiply(int part, uint32_t k) {
    open_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t at =
          matrix_at<Shape::kStep8>(k + part * (kPartKeys / 8 * Shape::kStep8 / 16) +
                                   step / 4 * (Shape::kColumnStep / 16) + step % 4 * 2);
      if (step == 0) {
        multiply_rows<T, true>(s[part], q[step], at);
      } else {
        multiply_rows<T, false>(s[part], q[step], at);
      }
    }
    commit_products();
  }

  __device__ __forceinline__ int row_of_half(int h) const { return warp * 16 + 8 * h + lane / 4; }

  __device__ __forceinline__ int32_t tile_word(size_t offset) const {
    return static_cast<int32_t>(load_shared_word(tile + static_cast<uint32_t>(offset)));
  }

  /** Of row `row_of_half(h)`, or the tile's last one: its row of the request. */
  __device__ __forceinline__ int32_t request_row(int h) const {
    const int32_t rows = tile_word(offsetof(RowSet, num_rows)),
                  row = half * kHalfRows + row_of_half(h);
    return tile_word(offsetof(RowSet, row_begin)) + (row < rows ? row : rows - 1);
  }

  /** Adds ALiBi's term, in the log2 domain. */
  __device__ __forceinline__ void add_alibi(const float* slopes, int32_t first_key) {
    const int32_t group = a.shape.group_size;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t row = request_row(h);
      const float slope = slopes[tile_word(sizeof(RowSet)) * group + row % group] * kLog2E;
      const int32_t from =
          first_key + 2 * (lane % 4) - tile_word(offsetof(RowSet, position)) - row / group;
#pragma unroll
      for (int i = 0; i < kLeaf / 4; ++i) {
        float& x = at(i / 2, 2 * h + i % 2);
        x = lane::fma(slope, static_cast<float>(from + i / 2 * 8 + i % 2),
                      x * a.problem.score_scale);
      }
    }
  }

  /** Scores of keys that their row does not see become -inf; any[h]: the row sees some. */
  __device__ __forceinline__ void hide_unseen(int32_t first_key, bool (&any)[2]) {
    const int32_t kv_len = tile_word(offsetof(RowSet, kv_len));
    const RequestShape request{kv_len - tile_word(offsetof(RowSet, position)), kv_len};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const VisibleKeys keys =
          visible_keys(a.problem.mask, request, request_row(h) / a.shape.group_size);
      any[h] = first_key < keys.sink ||
               (first_key < keys.end && first_key + kLeaf > keys.begin && keys.begin < keys.end);
      const int32_t key = first_key + 2 * (lane % 4);
      const uint32_t width = static_cast<uint32_t>(keys.end - keys.begin);
#pragma unroll
      for (int i = 0; i < kLeaf / 4; ++i) {
        const int32_t k = key + i / 2 * 8 + i % 2;
        if (k >= keys.sink && static_cast<uint32_t>(k - keys.begin) >= width)
          at(i / 2, 2 * h + i % 2) = kEmpty;
      }
    }
  }

  /** Looks for each row's largest score among one part of its keys, and those before. */
  template <int kPart>
  __device__ __forceinline__ void find_largest() {
#pragma unroll
    for (int j = 0; j < kPartKeys / 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = fmaxf(s[kPart][4 * j + 2 * h], s[kPart][4 * j + 2 * h + 1]);
        largest[h][j % 4] = kPart == 0 && j < 4 ? x : fmaxf(largest[h][j % 4], x);
      }
    }
  }

  /** The same for the first part as soon as it is there; the second is on its way. */
  __device__ __forceinline__ void find_first_largest() {
    wait_for_products<1>();
    settle(s[0]);
    find_largest<0>();
  }

  /** P of the leaf at hand, its m and l; the next leaf's products begin as soon as registers are
   * free. */
  template <bool kMore>
  __device__ __forceinline__ void leaf() {
    wait_for_products<0>();
    settle(s[1]);
    free_leaf();
    uint32_t k = 0;
    if constexpr (kMore) k = k_address();
    const float c = args.exponent_scale;
    bool any[2] = {true, true};
    if (__builtin_expect(!note.whole(half) || a.tensors.alibi_slopes != nullptr, 0)) {
      if (a.tensors.alibi_slopes) add_alibi(a.tensors.alibi_slopes, note.first_key);
      if (!note.whole(half)) hide_unseen(note.first_key, any);
      find_largest<0>();
    }
    find_largest<1>();
    float m[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      m[h] = fmaxf(fmaxf(largest[h][0], largest[h][1]), fmaxf(largest[h][2], largest[h][3]));
#pragma unroll
    for (int distance = 1; distance <= 2; ++distance) {
      const float x = __shfl_xor_sync(~0u, m[0], distance),
                  y = __shfl_xor_sync(~0u, m[1], distance);
      m[0] = fmaxf(m[0], x);
      m[1] = fmaxf(m[1], y);
    }
    float minus_m[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      m[h] = any[h] ? fmaxf(c * fmaxf(m[h], kLowest), kLowest) : kEmpty;
      minus_m[h] = any[h] ? -m[h] : 0.0f;
    }
    buffer.wait_until_empty(shared, half);
    const uint32_t ml = buffer.ml(shared, half, row_of_half(0));
    // Chunk j + matrix / 2 of the row lies at place (j + matrix / 2) ^ (row % 8), j even.
    const int matrix = lane / 8, row = warp * 16 + 8 * (matrix & 1) + lane % 8;
    const uint32_t p = buffer.p(shared, half) + row * 128 + (((matrix >> 1) ^ (row & 7)) << 4);
    float l[2], chain[2];  // of 32 keys
#pragma unroll
    for (int j = 0; j < kLeaf / 8; j += 2) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // two keys of tile j + i / 2, row half i % 2
        const int tile_of_keys = j + i / 2, h = i % 2;
        const float x = exp2_fast(lane::fma(at(tile_of_keys, 2 * h), c, minus_m[h])),
                    y = exp2_fast(lane::fma(at(tile_of_keys, 2 * h + 1), c, minus_m[h]));
        chain[h] = tile_of_keys % 4 == 0 ? x + y : (chain[h] + x) + y;
        if (tile_of_keys % 4 == 3) l[h] = tile_of_keys == 3 ? chain[h] : l[h] + chain[h];
        packed[i] = pack<T>(x, y);
      }
      store_matrices((p ^ j % 8 << 4) + j / 8 * Shape::kColumnBytesP, packed[0], packed[1],
                     packed[2], packed[3]);
      if constexpr (kMore) {
        if (j + 2 == kPartKeys / 8) {
          wait_for_keys();
          multiply(0, k);
        }
        if (j + 2 == kLeaf / 8) multiply(1, k);
      }
    }
    if constexpr (kMore) read_note();
#pragma unroll
    for (int distance = 1; distance <= 2; ++distance) {
      const float x = __shfl_xor_sync(~0u, l[0], distance),
                  y = __shfl_xor_sync(~0u, l[1], distance);
      l[0] += x;
      l[1] += y;
    }
    if (lane % 4 == 0) {
      store_shared_pair(ml, m[0], l[0]);
      store_shared_pair(ml + 64, m[1], l[1]);
    }
    buffer.fill(half);
    if constexpr (kMore) find_first_largest();
  }

  /** Element e of tile `tile_of_keys` of 8 keys: e / 2 says which of the lane's two rows. */
  __device__ __forceinline__ float& at(int tile_of_keys, int e) {
    return s[tile_of_keys / (kPartKeys / 8)][tile_of_keys % (kPartKeys / 8) * 4 + e];
  }

  const LargeArgs& args;
  const AttendArgs& a;
  const uint32_t shared;
  const int half, warp, lane;
  uint32_t tile = 0;
  LeafNote note{};  // of the leaf at hand
  int stage = 0;
  uint32_t parity = 0, leaves = 0;
  BufferP<Shape> buffer;
  uint32_t q[kSteps][4];
  float s[kParts][kPartKeys / 2];
  float largest[2][4];  // of each row, in four chains
};

}  // namespace attnfold::cuda
