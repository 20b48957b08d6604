// The two warpgroups of the large-row kernel that answer 64 rows each: scores, weights, P V and the
// canonical fold.
//
// A leaf's way, for 64 rows R and head dim D, and what a thread holds meanwhile, in registers:
//   S [R, 128] = q K^T   64   begun while the leaf before is folded
//   m, P = 2^(c S - m)   32   in place of S, 16 keys after 16 keys; P V begins after 64 and 128
//   keys O [R, D] = P V       D/2  from nothing, then folded into the super-chunk's D/2
// The two take turns to make weights: one half's exponentials and P V run beside the other's
// scores, fold and search for maxima.  Both at once would wait for the same units in turn.
#pragma once

#include "cuda/large_output.cuh"
#include "cuda/wgmma.h"

namespace attnfold::cuda {

template <class Shape, class T>
class RowGroup {
 public:
  __device__ __forceinline__ RowGroup(const LargeArgs& args_in, uint32_t shared_in, int half_in,
                                      int warp_in, int lane_in)
      : args(args_in),
        a(args_in.attend),
        shared(shared_in),
        half(half_in),
        warp(warp_in),
        lane(lane_in),
        tile(shared_in) {}

  __device__ __forceinline__ void run() {
    if (half == 1) give_turn();
    while (tile.wait(), !tile_word(offsetof(TileNote, is_none))) {
      begin_tile();
      note.bits = tile_word(offsetof(TileNote, set.num_leaves)) ? 0 : LeafFlags::kTileEnds;
      while (find_leaf()) {
        wait_for_queries(tile.number);
        begin_scores();
        wait_for_products<0>();
        end_scores<false>();
        wait_for_values();
        while (true) {
          if (note.plain(half)) {
            fold_leaf<Next::kPlainLeaf>();
            continue;
          }
          if (!note.whole(half) && some_value_is_odd()) {
            fold_by_token();
            break;
          }
          const bool next_tile = !note.next_seen(half);
          if (next_tile && !(note.tile_ends() && next_tile_begins())) {
            fold_leaf<Next::kNothing>();
            break;
          }
          fold_leaf<Next::kLeaf>(next_tile);
        }
      }
      if (!queries_read) {
        wait_for_queries(tile.number);
        free_queries();
      }
      write_rows();
      tile.free(lane);
    }
    if (half == 0) wait_for_turn();  // as often as it was given
  }

 private:
  static constexpr int kElements = Shape::kDim / 2;  // of o, of a thread
  static constexpr int kStepsQ = Shape::kDim / 16, kStepsP = kLeaf / 16;
  static constexpr int kScores = kLeaf / 2;   // of a thread
  static constexpr int kBurst = kStepsP / 2;  // products of 16 keys that begin together

  /** What follows a leaf of this half: a leaf that it sees, both whole and without ALiBi; another,
   * of this tile or the next; nothing of which the scores could begin. */
  enum class Next { kPlainLeaf, kLeaf, kNothing };

  // ---- leaves, one after the other ----

  /** Waits for the rows of q of tile `i`. */
  __device__ __forceinline__ void wait_for_queries(uint32_t i) const {
    barrier_wait(shared + ATTNFOLD_SHARED(full_q) + 8 * half, i % 2);
    fence_shared_for_engines();
  }
  __device__ __forceinline__ void begin_tile() {
    chunk.clear();
    seen_chunks = queries_read = false;
  }
  /** Whether there is a tile after the one at hand whose first leaf this half sees. */
  __device__ __forceinline__ bool next_tile_begins() const {
    tile.wait(1);
    return uniform(tile.word(offsetof(TileNote, begins), 1)) >> half & 1;
  }
  __device__ __forceinline__ void wait_for_keys() const {
    barrier_wait(shared + ATTNFOLD_SHARED(full_k) + 8 * keys.stage, keys.parity);
  }
  __device__ __forceinline__ void wait_for_values() const {
    barrier_wait(shared + ATTNFOLD_SHARED(full_v) + 8 * values.stage, values.parity);
  }
  /** Keys, values and rows of q may leave shared memory. */
  __device__ __forceinline__ void free_keys() {
    arrive_warp(shared + ATTNFOLD_SHARED(empty_k) + 8 * keys.stage, lane);
    keys.next();
  }
  __device__ __forceinline__ void free_values() {
    arrive_warp(shared + ATTNFOLD_SHARED(empty_v) + 8 * values.stage, lane);
    values.next();
  }
  __device__ __forceinline__ void free_queries() {
    arrive_warp(shared + ATTNFOLD_SHARED(empty_q) + 8 * half, lane);
    queries_read = true;
  }
  /** What is said of leaf `leaves`, whose keys are there, or follow in the same tile. */
  __device__ __forceinline__ LeafFlags read_flags() const {
    return {uniform(load_shared_word(note_at() + 4))};
  }
  __device__ __forceinline__ int32_t first_key() const {
    return static_cast<int32_t>(load_shared_word(note_at()));
  }
  __device__ __forceinline__ uint32_t note_at() const {
    return shared + ATTNFOLD_SHARED(notes) +
           leaves % kLeafNotes * static_cast<uint32_t>(sizeof(LeafNote));
  }
  /** Goes to the next leaf that some row of this half sees; false if the tile has none. */
  __device__ __forceinline__ bool find_leaf() {
    while (!note.tile_ends()) {
      wait_for_keys();
      note = read_flags();
      if (note.seen(half)) return true;
      free_keys();
      ++leaves;
      wait_for_values();
      free_values();
      wait_for_turn();
      give_turn();
    }
    return false;
  }

  __device__ __forceinline__ int row_of_half(int h) const { return warp * 16 + 8 * h + lane / 4; }
  __device__ __forceinline__ int32_t tile_word(size_t offset) const { return tile.word(offset); }
  __device__ __forceinline__ RequestShape request() const {
    const int32_t kv_len = tile_word(offsetof(TileNote, set.kv_len));
    return {kv_len - tile_word(offsetof(TileNote, set.position)), kv_len};
  }

  // ---- scores and weights ----

  /** Begins s = q k of the leaf at hand. */
  __device__ __forceinline__ void begin_scores() {
    const uint32_t q = matrix_address(shared + ATTNFOLD_SHARED(q) + half * Shape::kHalfBytesQ, 16),
                   k = matrix_address(shared + ATTNFOLD_SHARED(k) + keys.stage * Shape::kLeafBytes,
                                      16);
    open_products();
#pragma unroll
    for (int step = 0; step < kStepsQ; ++step) {
      const uint64_t q_at =
                         matrix_at<1024>(q + step / 4 * (Shape::kColumnBytesQ / 16) + step % 4 * 2),
                     k_at = matrix_at<Shape::kStep8>(k + step / 4 * (Shape::kColumnStep / 16) +
                                                     step % 4 * 2);
      if (step == 0) {
        multiply_keys<T, true>(s, q_at, k_at);
      } else {
        multiply_keys<T, false>(s, q_at, k_at);
      }
    }
    commit_products();
  }

  /** Of row `row_of_half(h)`, or the tile's last one: its row of the request. */
  __device__ __forceinline__ int32_t request_row(int h) const {
    const int32_t rows = tile_word(offsetof(TileNote, set.num_rows)),
                  row = half * kHalfRows + row_of_half(h);
    return tile_word(offsetof(TileNote, set.row_begin)) + (row < rows ? row : rows - 1);
  }

  /** Adds ALiBi's term, in the log2 domain. */
  __device__ __forceinline__ void add_alibi(const float* slopes, int32_t first_key) {
    const int32_t group = a.shape.group_size;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t row = request_row(h);
      const float slope =
          slopes[tile_word(offsetof(TileNote, kv_head)) * group + row % group] * kLog2E;
      const int32_t from =
          first_key + 2 * (lane % 4) - tile_word(offsetof(TileNote, set.position)) - row / group;
#pragma unroll
      for (int i = 0; i < kLeaf / 4; ++i) {
        float& x = s[i / 2 * 4 + 2 * h + i % 2];
        x = lane::fma(slope, static_cast<float>(from + i / 2 * 8 + i % 2),
                      x * a.problem.score_scale);
      }
    }
  }

  /** Scores of keys that their row does not see become -inf; any[h]: the row sees some. */
  __device__ __forceinline__ void hide_unseen(int32_t first_key, bool (&any)[2]) {
    const VisibleKeys keys[2] = {
        visible_keys(a.problem.mask, request(), request_row(0) / a.shape.group_size),
        visible_keys(a.problem.mask, request(), request_row(1) / a.shape.group_size)};
    const int32_t key = first_key + 2 * (lane % 4);
    if (__all_sync(~0u, keys[0].begin <= first_key && keys[1].begin <= first_key)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int32_t end = (keys[h].begin < keys[h].end ? keys[h].end : keys[h].sink) - key;
        any[h] = end > -2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < kLeaf / 4; ++i)
          if (i / 2 * 8 + i % 2 >= end) s[i / 2 * 4 + 2 * h + i % 2] = kEmpty;
      }
      return;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      any[h] = first_key < keys[h].sink ||
               (first_key < keys[h].end && first_key + kLeaf > keys[h].begin &&
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

  /** Scores are there: keys may leave, unseen ones become -inf, m is found. */
  template <bool kPlain>
  __device__ __forceinline__ void end_scores() {
    settle(s);
    free_keys();
    if (note.tile_last(half)) free_queries();
    const float c = args.exponent_scale;
    bool any[2] = {true, true};
    if constexpr (!kPlain) {
      if (a.tensors.alibi_slopes) add_alibi(a.tensors.alibi_slopes, first_key());
      if (!note.whole(half)) hide_unseen(first_key(), any);
    }
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
      const float x = __shfl_xor_sync(~0u, m[0], distance),
                  y = __shfl_xor_sync(~0u, m[1], distance);
      m[0] = fmaxf(m[0], x);
      m[1] = fmaxf(m[1], y);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      m[h] = any[h] ? fmaxf(c * fmaxf(m[h], kLowest), kLowest) : kEmpty;
    }
  }

  /** p = 2^(c s - m) in 16 bits, and l.  If kMultiply, o = p v begins 16 keys after 16 keys. */
  template <bool kMultiply, bool kPlain>
  __device__ __forceinline__ void make_weights(float (&o)[kElements]) {
    const float c = args.exponent_scale;
    const float minus_m[2] = {!kPlain && m[0] == kEmpty ? 0.0f : -m[0],
                              !kPlain && m[1] == kEmpty ? 0.0f : -m[1]};
    uint32_t v = 0;
    if constexpr (kMultiply)
      v = matrix_address(shared + ATTNFOLD_SHARED(v) + values.stage * Shape::kLeafBytes,
                         Shape::kColumnStep);
    float chain[2];  // of 32 keys
#pragma unroll
    for (int step = 0; step < kStepsP; ++step) {
#pragma unroll
      for (int j = 2 * step; j < 2 * step + 2; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float x = exp2_fast(lane::fma(s[4 * j + 2 * h], c, minus_m[h])),
                      y = exp2_fast(lane::fma(s[4 * j + 2 * h + 1], c, minus_m[h]));
          chain[h] = j % 4 == 0 ? x + y : (chain[h] + x) + y;
          if (j % 4 == 3) l[h] = j == 3 ? chain[h] : l[h] + chain[h];
          p[step][j % 2 * 2 + h] = pack<T>(x, y);
        }
      }
      if constexpr (kMultiply) {
        if (step % kBurst == kBurst - 1) {
          open_products();
#pragma unroll
          for (int i = step - kBurst + 1; i <= step; ++i) {
            const uint64_t v_at = matrix_at<Shape::kStep8>(v + i * (2 * Shape::kStep8 / 16));
            if (i == 0) {
              multiply_values<T, true, Shape::kDim>(o, p[i], v_at);
            } else {
              multiply_values<T, false, Shape::kDim>(o, p[i], v_at);
            }
          }
        }
      }
    }
    if constexpr (kMultiply) commit_products();
  }
  /** l of whole rows. */
  __device__ __forceinline__ void add_up() {
#pragma unroll
    for (int distance = 1; distance <= 2; ++distance) {
      const float x = __shfl_xor_sync(~0u, l[0], distance),
                  y = __shfl_xor_sync(~0u, l[1], distance);
      l[0] += x;
      l[1] += y;
    }
  }

  // ---- values and the fold ----

  /** Turns of the halves to make weights: one for each leaf of the tile, seen or not. */
  __device__ __forceinline__ void wait_for_turn() const {
    group_wait<kTileHalves * kWarpgroup>(kTurnBarrier + half);
  }
  __device__ __forceinline__ void give_turn() const {
    group_arrive<kTileHalves * kWarpgroup>(kTurnBarrier + (half ^ 1));
  }

  /** Folds the leaf at hand, whose scores and values are there.  What follows is at hand then. */
  template <Next kNext>
  __device__ __forceinline__ void fold_leaf(bool next_tile = false) {
    constexpr bool kMore = kNext != Next::kNothing, kPlain = kNext == Next::kPlainLeaf;
    const bool chunk_last = note.chunk_last(half), tile_last = note.tile_last(half);
    ++leaves;
    LeafFlags next{};
    if constexpr (kPlain) next = read_flags();
    float o[kElements];
    wait_for_turn();
    make_weights<true, kPlain>(o);
    give_turn();
    if constexpr (kMore) {
      wait_for_keys();
      if (!kPlain && next_tile) wait_for_queries(tile.number + 1);
      if constexpr (!kPlain) next = read_flags();
    }
    wait_for_products<0>();
    settle(o);
    if constexpr (kMore) begin_scores();
    free_values();
    if constexpr (kMore) note = next;
    if constexpr (kPlain) wait_for_values();
    add_up();
    const LeafFold fold(chunk, m, l);
    fold.apply(chunk.o, o);
    if (__builtin_expect(chunk_last, 0)) fold_chunk(tile_last);
    if constexpr (kMore) {
      if (!kPlain && next_tile) {
        write_rows();
        tile.free(lane);
        begin_tile();
      }
      wait_for_products<0>();
      end_scores<kPlain>();
      if constexpr (!kPlain) wait_for_values();
    }
  }

  /** Folds a whole super-chunk into the rows' totals, which wait in memory while others follow. */
  __device__ __forceinline__ void fold_chunk(bool is_last) {
    float4* const totals = reinterpret_cast<float4*>(args.totals) +
                           static_cast<size_t>(blockIdx.x) * (tile_total_floats(Shape::kDim) / 4) +
                           (half * (Shape::kTotalQuads + 1) * kWarpgroup + warp * 32 + lane);
    if (seen_chunks) {
      float4 total[Shape::kTotalQuads];  // all on their way at once
      const float4 ml = __ldcg(totals + Shape::kTotalQuads * kWarpgroup);
#pragma unroll
      for (int j = 0; j < Shape::kTotalQuads; ++j) total[j] = __ldcg(totals + j * kWarpgroup);
      const RowFold fold[2] = {RowFold(ml.x, chunk.m[0]), RowFold(ml.y, chunk.m[1])};
#pragma unroll
      for (int j = 0; j < Shape::kTotalQuads; ++j) {
        fold[0].into_b(total[j].x, chunk.o[4 * j]);
        fold[0].into_b(total[j].y, chunk.o[4 * j + 1]);
        fold[1].into_b(total[j].z, chunk.o[4 * j + 2]);
        fold[1].into_b(total[j].w, chunk.o[4 * j + 3]);
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
    for (int j = 0; j < Shape::kTotalQuads; ++j) {
      const float* o = &chunk.o[4 * j];
      __stcg(totals + j * kWarpgroup, make_float4(o[0], o[1], o[2], o[3]));
    }
    __stcg(totals + Shape::kTotalQuads * kWarpgroup,
           make_float4(chunk.m[0], chunk.m[1], chunk.l[0], chunk.l[1]));
    chunk.clear();
  }

  /** Address of 16 bytes of V. */
  __device__ __forceinline__ uint32_t v_chunk(int key, int chunk16) const {
    return shared + ATTNFOLD_SHARED(v) + values.stage * Shape::kLeafBytes +
           key / 8 * Shape::kStep8 + chunk16 / 8 * Shape::kColumnStep + key % 8 * 128 +
           ((chunk16 % 8 ^ key % 8) << 4);
  }

  /** Whether some value is not finite of keys of the leaf at hand that not all rows see. */
  __device__ __forceinline__ bool some_value_is_odd() const {
    return uniform(load_shared_word(shared + ATTNFOLD_SHARED(odd_v) + 4 * values.stage)) != 0;
  }

  /**
   * The same for a leaf where some value is not finite: token by token, values that the token does
   * not see replaced by 0.  The same products in the same order.
   */
  __device__ __forceinline__ void fold_by_token() {
    float none[kElements];
    wait_for_turn();
    make_weights<false, false>(none);
    give_turn();
    add_up();
    const LeafFold fold(chunk, m, l);
    const int32_t group = a.shape.group_size, rows = tile_word(offsetof(TileNote, set.num_rows)),
                  row_begin = tile_word(offsetof(TileNote, set.row_begin));
    const auto token_of = [&](int32_t row) {
      return (row_begin + (row < rows ? row : rows - 1)) / group;
    };
    const int32_t base = half * kHalfRows;
    const int32_t first = token_of(base + warp * 16), last = token_of(base + warp * 16 + 15);
    const int matrix = lane / 8, row = lane % 8;
#pragma unroll 1
    for (int32_t token = first; token <= last; ++token) {
      const VisibleKeys keys = visible_keys(a.problem.mask, request(), token);
      const bool mine[2] = {token_of(base + row_of_half(0)) == token,
                            token_of(base + row_of_half(1)) == token};
      const int32_t from = first_key();
      uint32_t seen = 0;  // bit 2 i + e: key 8 i + 2 (lane % 4) + e of the leaf
#pragma unroll
      for (int i = 0; i < kLeaf / 4; ++i) {
        const int32_t key = from + i / 2 * 8 + 2 * (lane % 4) + i % 2;
        seen |= sees(keys, key) ? 1u << i : 0u;
      }
#pragma unroll
      for (int j = 0; j < Shape::kDim / 8; j += 2) {
        float d[2][4] = {};
#pragma unroll
        for (int step = 0; step < kStepsP; ++step) {
          uint32_t v[4];
          load_matrices_transposed(v,
                                   v_chunk(step * 16 + 8 * (matrix & 1) + row, j + (matrix >> 1)));
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
          if (mine[h]) fold.row[h].into_a(chunk.o[j * 4 + e], d[e / 4][e % 4]);
        }
      }
    }
    free_values();
    ++leaves;
    if (note.chunk_last(half)) fold_chunk(note.tile_last(half));
  }

  __device__ __forceinline__ void write_rows() const {
    write_half<T>(a, tile, half, warp, lane, chunk);
  }

  const LargeArgs& args;
  const AttendArgs& a;
  const uint32_t shared;
  const int half, warp, lane;
  TileReader<Shape> tile;        // at the tile at hand
  bool queries_read = false;     // all scores of the tile at hand are made
  LeafFlags note{};              // of the leaf at hand
  uint32_t leaves = 0;           // whose weights were made
  Ring<Shape::kStages> keys;    // of the leaf at hand, or the next once scores are there
  Ring<Shape::kStages> values;  // of the leaf at hand
  bool seen_chunks = false;      // of the tile: a super-chunk has been folded
  float s[kScores];
  uint32_t p[kStepsP][4];
  float m[2], l[2];  // of the leaf at hand
  HalfState<kElements> chunk;
};

}  // namespace attnfold::cuda
