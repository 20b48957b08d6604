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

#include "cuda/large_leaf.cuh"
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
    report_rows(a, lane);
  }

 private:
  static constexpr int kElements = Shape::kDim / 2;  // of o, of a thread
  static constexpr int kStepsQ = Shape::kDim / 16, kStepsP = kLeafSteps;
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

  __device__ __forceinline__ int32_t tile_word(size_t offset) const { return tile.word(offset); }
  __device__ __forceinline__ WarpRows rows() const {
    return {tile_word(offsetof(TileNote, kv_head)),
            tile_word(offsetof(TileNote, set.row_begin)),
            tile_word(offsetof(TileNote, set.num_rows)),
            tile_word(offsetof(TileNote, set.position)),
            tile_word(offsetof(TileNote, set.kv_len)),
            half * kHalfRows + warp * 16,
            lane};
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

  /** Scores are there: keys may leave, unseen ones become -inf, m is found. */
  template <bool kPlain>
  __device__ __forceinline__ void end_scores() {
    settle(s);
    free_keys();
    if (note.tile_last(half)) free_queries();
    const float c = args.exponent_scale;
    bool any[2] = {true, true};
    if constexpr (!kPlain) {
      if (a.tensors.alibi_slopes) add_alibi(a, rows(), first_key(), a.problem.score_scale, s);
      if (!note.whole(half)) hide_unseen_keys(any);
    }
    find_maxima(s, c, any, m);
  }

  /** Scores of unseen keys of the leaf at hand become -inf. */
  __device__ __forceinline__ void hide_unseen_keys(bool (&any)[2]) {
    if (__builtin_expect(!args.sees_prefixes, 0)) {
      hide_unseen(a, rows(), first_key(), s, any);
      return;
    }
    const int32_t key = first_key(), kv_len = tile_word(offsetof(TileNote, set.kv_len)) - key,
                  first_end = tile_word(offsetof(TileNote, first_end)) - key;
    const int row = half * kHalfRows + warp * 16 + lane / 4;
    hide_from(
        {min(first_end + tile.token(row), kv_len), min(first_end + tile.token(row + 8), kv_len)},
        lane, s, any);
  }

  /** p = 2^(c s - m) in 16 bits, and l.  If kMultiply, o = p v begins 16 keys after 16 keys. */
  template <bool kMultiply, bool kPlain>
  __device__ __forceinline__ void make_weights(float (&o)[kElements]) {
    const float c = args.exponent_scale;
    Weigher weigher{
        c,
        {!kPlain && m[0] == kEmpty ? 0.0f : -m[0], !kPlain && m[1] == kEmpty ? 0.0f : -m[1]},
        {}};
    uint32_t v = 0;
    if constexpr (kMultiply)
      v = matrix_address(shared + ATTNFOLD_SHARED(v) + values.stage * Shape::kLeafBytes,
                         Shape::kColumnStep);
#pragma unroll
    for (int step = 0; step < kStepsP; ++step) {
      weigher.template weigh<T>(step, s, p[step], l);
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
    add_up(l);
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
    fold_into_total<Shape::kTotalQuads, kWarpgroup>(totals, chunk, seen_chunks, is_last);
  }

  /** Address of 16 bytes of V. */
  __device__ __forceinline__ uint32_t v_chunk(int key, int chunk16) const {
    return shared + ATTNFOLD_SHARED(v) + values.stage * Shape::kLeafBytes +
           key / 8 * Shape::kStep8 + chunk16 / 8 * Shape::kColumnStep + key % 8 * 128 +
           ((chunk16 % 8 ^ key % 8) << 4);
  }

  /** Whether some value of the leaf at hand is not finite: 0 times that is NaN.  A warp looks at 32
   * keys. */
  __device__ __forceinline__ bool some_value_is_odd() const {
    constexpr int kKeysAtOnce = 32 / Shape::kChunks;  // a chunk of 16 bytes of a key is a lane's
    const int chunk16 = lane % Shape::kChunks;
    const uint32_t at = shared + ATTNFOLD_SHARED(v) + values.stage * Shape::kLeafBytes +
                        4 * warp * Shape::kStep8 + lane / Shape::kChunks * 128 +
                        chunk16 / 8 * Shape::kColumnStep + chunk16 % 8 * 16;  // in any order
    uint32_t odd = 0;
#pragma unroll 4
    for (int key = 0; key < 32; key += kKeysAtOnce)
      odd |= odd_of<T>(load_shared_quad(at + key / 8 * Shape::kStep8 + key % 8 * 128));
    return uniform(group_any<kWarpgroup>(kOddBarrier + half, odd != 0)) != 0;
  }

  /** The same for a leaf where some value is not finite. */
  __device__ __forceinline__ void fold_by_token() {
    float none[kElements];
    wait_for_turn();
    make_weights<false, false>(none);
    give_turn();
    add_up(l);
    const LeafFold fold(chunk, m, l);
    attnfold::cuda::fold_by_token<T, Shape::kDim>(
        a, rows(), first_key(), p, fold, [&](int key, int i) { return v_chunk(key, i); }, chunk.o);
    free_values();
    ++leaves;
    if (note.chunk_last(half)) fold_chunk(note.tile_last(half));
  }

  __device__ __forceinline__ void write_rows() const {
    const int row = half * kHalfRows + warp * 16 + lane % 16;
    const bool inside = row < tile_word(offsetof(TileNote, set.num_rows));
    write_warp_rows<T>(a, tile.place(inside ? row : 0, a.shape.group_size), inside, lane, chunk,
                       Shape::kDim);
  }

  const LargeArgs& args;
  const AttendArgs& a;
  const uint32_t shared;
  const int half, warp, lane;
  TileReader<Shape> tile;       // at the tile at hand
  bool queries_read = false;    // all scores of the tile at hand are made
  LeafFlags note{};             // of the leaf at hand
  uint32_t leaves = 0;          // whose weights were made
  Ring<Shape::kStages> keys;    // of the leaf at hand, or the next once scores are there
  Ring<Shape::kStages> values;  // of the leaf at hand
  bool seen_chunks = false;     // of the tile: a super-chunk has been folded
  Scores s;
  Weights p;
  float m[2], l[2];  // of the leaf at hand
  HalfState<kElements> chunk;
};

}  // namespace attnfold::cuda
