// Attention of many rows where attend_large does not serve: devices without wgmma, head dims that
// are not 64 or 128, pages that are no multiple of 16, soft-cap.  bf16 and fp16, tensor cores of
// sm_80 and later.
//
// A block takes tiles of 128 rows of one request and kv head, one after the other, and all leaves
// that they see.  Eight warps, 16 rows each, do everything.  Per leaf of 128 keys, head dim D:
//   K, V   global -> shared   2 * 128 * D * 2 bytes, 16 keys by each warp, kStages leaves ahead
//   S      [16, 128] registers   shared memory is read once by each warp: 128 * D * 2 bytes, which
//                                takes as long as the products
//   P      [16, 128] registers, in place of S
//   O      [16, D] registers, folded 32 elements at a time; the super-chunks' total in memory
// A warp's rows of q are its own: it brings the next tile's when its last scores are made.  Warps
// wait for each other at K and V alone, and may be a leaf apart.
//
// The bits are those of the small-row kernel (cuda/attend_small.cuh).
#pragma once

#include "cuda/large_args.h"
#include "cuda/large_leaf.cuh"
#include "cuda/large_output.cuh"
#include "cuda/small_loader.cuh"

namespace attnfold::cuda {

constexpr int kMmaWarps = 8, kMmaThreads = kMmaWarps * 32, kMmaRows = kTileRows / kMmaWarps;

/** What a warp notes of a tile, for itself. */
struct alignas(16) MmaTile {
  RowSet set;
  int32_t kv_head;
  RowsKeys mine, tile;  // keys of the warp's rows, and of all
};

/** kDim: the head dim rounded up to 64, 128 or 256.  kStages: leaves of K and of V. */
template <int kDim_, int kStages_>
struct MmaShape {
  static constexpr int kDim = kDim_, kStages = kStages_;
  static constexpr int kPitch = kDim * 2;  // bytes of a row of K, V and Q
  static constexpr int kLeafBytes = kLeaf * kPitch;
  static constexpr int kCopyKeys = kLeaf / kMmaWarps;  // of a leaf, of a warp
  static constexpr bool kReadsAgain = true;            // keys, soon
  static constexpr int kSlice = 32;                    // elements of o that are made together
  static constexpr int kMaxTotals = kDim / 8 < 16 ? kDim / 8 : 16;  // quads on their way together

  // Keys are asked for kStages leaves ahead, and page ids one more, so in as many tiles at most.
  static constexpr int kTiles = kStages + 2;

  struct Shared {
    unsigned char k[kStages][kLeafBytes], v[kStages][kLeafBytes];
    unsigned char q[kMmaWarps][kMmaRows * kPitch];
    MmaTile tiles[kMmaWarps][kTiles];
    uint32_t odd_leaf[kStages];  // a leaf of V in this place that has a value which is not finite
    uint64_t full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages], checked_v;
    uint64_t full_q[kMmaWarps];
  };
};

/** Soft-cap, in the log2 domain. */
__device__ __forceinline__ void cap_scores(Scores& s, float scale, float log2_cap) {
#pragma unroll
  for (int i = 0; i < kLeafScores; ++i) s[i] = tanh_f32(s[i] * scale) * log2_cap;
}

// What follows is called, not inlined: once a tile, so that it does not lie between what every leaf
// runs.

__device__ __forceinline__ int32_t word_of_tile(uint32_t at, size_t offset) {
  return static_cast<int32_t>(load_shared_word(at + static_cast<uint32_t>(offset)));
}

/** Notes pair `index` at `to` in shared memory; returns its leaves. */
static __device__ __noinline__ int32_t note_mma_tile(const AttendArgs& a, int32_t index,
                                                     uint32_t to, int warp, int lane) {
  const TilePair pair = pair_at(a, index);
  const MmaTile note{pair.set, pair.kv_head, keys_of_rows(a, pair.set, warp * kMmaRows, kMmaRows),
                     keys_of_rows(a, pair.set, 0, kTileRows)};
  const int32_t* words = reinterpret_cast<const int32_t*>(&note);
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(MmaTile) / 4); ++w)
      store_shared(to + 4 * w, static_cast<uint32_t>(words[w]));
  }
  __syncwarp();
  return pair.set.num_leaves;
}

template <class T, int kElements>
__device__ __forceinline__ void write_mma_rows(const AttendArgs& a, const RowSet& set,
                                               int32_t kv_head, int warp, int lane,
                                               const HalfState<kElements>& chunk) {
  const int32_t row = warp * kMmaRows + lane % kMmaRows;
  const bool inside = row < set.num_rows;
  write_warp_rows<T>(a, place_of_row(a, set, kv_head, inside ? row : 0), inside, lane, chunk,
                     a.problem.head_dim_vo);
}

/** Writes the warp's rows of a tile that sees no keys. */
template <class T, int kDim>
static __device__ __noinline__ void write_empty_tile(const AttendArgs& a, int32_t index, int warp,
                                                     int lane) {
  const TilePair pair = pair_at(a, index);
  if (warp * kMmaRows >= pair.set.num_rows) return;
  HalfState<kDim / 2> nothing;
  nothing.clear();
  write_mma_rows<T>(a, pair.set, pair.kv_head, warp, lane, nothing);
}

/** Copies the warp's rows of q of the tile that is noted at `note`. */
template <class Shape>
static __device__ __noinline__ void copy_mma_queries(const AttendArgs& a, uint32_t note, int warp,
                                                     int lane, uint32_t to) {
  RowSet set{};
  set.row_begin = word_of_tile(note, offsetof(MmaTile, set.row_begin));
  set.num_rows = word_of_tile(note, offsetof(MmaTile, set.num_rows));
  set.q_token = word_of_tile(note, offsetof(MmaTile, set.q_token));
  copy_queries<Shape, kMmaRows, 32>(a, set, word_of_tile(note, offsetof(MmaTile, kv_head)),
                                    warp * kMmaRows, lane, to);
}

/** fold_by_token() of the leaf whose values are at `v`. */
template <class Shape, class T>
static __device__ __noinline__ void fold_mma_by_token(const AttendArgs& a, WarpRows rows,
                                                      int32_t first_key, const Weights& p,
                                                      LeafFold fold, uint32_t v,
                                                      float (&o)[Shape::kDim / 2]) {
  fold_by_token<T, Shape::kDim>(
      a, rows, first_key, p, fold,
      [&](int key, int chunk16) { return v + chunk_offset<Shape::kPitch>(key, chunk16); }, o);
}

template <class Shape>
__device__ __forceinline__ void init_mma(uint32_t shared, int32_t head_dim) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(shared + ATTNFOLD_SHARED(full_k) + 8 * i, kMmaThreads);
      barrier_init(shared + ATTNFOLD_SHARED(full_v) + 8 * i, kMmaThreads);
      barrier_init(shared + ATTNFOLD_SHARED(empty_k) + 8 * i, kMmaWarps * kArrivingLanes);
      barrier_init(shared + ATTNFOLD_SHARED(empty_v) + 8 * i, kMmaWarps * kArrivingLanes);
      store_shared(shared + ATTNFOLD_SHARED(odd_leaf) + 4 * i, 0u);
    }
    barrier_init(shared + ATTNFOLD_SHARED(checked_v), kMmaWarps * kArrivingLanes);
    for (int w = 0; w < kMmaWarps; ++w) barrier_init(shared + ATTNFOLD_SHARED(full_q) + 8 * w, 32);
  }
  if (head_dim < Shape::kDim) {  // elements that no copy fills
    for (uint32_t at = threadIdx.x * 4; at < ATTNFOLD_SHARED(tiles); at += kMmaThreads * 4)
      store_shared(shared + at, 0u);
  }
  __syncthreads();
}

/** kModified: scores may be capped, or have a bias. */
template <class Shape, class T, bool kModified>
class MmaWarp {
 public:
  __device__ __forceinline__ MmaWarp(const LargeArgs& args_in, uint32_t shared_in, int warp_in,
                                     int lane_in)
      : args(args_in),
        a(args_in.attend),
        shared(shared_in),
        warp(warp_in),
        lane(lane_in),
        walk(args_in.attend),
        copier(args_in.attend, 0, warp_in, lane_in) {}

  __device__ __forceinline__ void run() {
    enter_tile();
    if (entered > 0) ask_queries(0);
#pragma unroll 1
    for (int i = 0; i < Shape::kStages; ++i) {
      ask_keys();
      ask_values();
    }
#pragma unroll 1
    for (; tile < entered; ++tile) answer_tile();
    report_rows(a, lane);
  }

 private:
  static constexpr int kElements = Shape::kDim / 2;  // of o, of a thread

  // ---- what is on its way ----

  __device__ __forceinline__ uint32_t tile_at(int32_t number) const {
    return shared + ATTNFOLD_SHARED(tiles) +
           (warp * Shape::kTiles + number % Shape::kTiles) * static_cast<uint32_t>(sizeof(MmaTile));
  }
  __device__ __forceinline__ int32_t word_of(int32_t of, size_t offset) const {
    return word_of_tile(tile_at(of), offset);
  }
  __device__ __forceinline__ int32_t tile_word(size_t offset) const {
    return word_of(tile, offset);
  }
  __device__ __forceinline__ VisibleKeys tile_keys(size_t offset) const {
    return {tile_word(offset), tile_word(offset + 4), tile_word(offset + 8)};
  }

  /** Goes to the block's next tile with leaves, and notes it; rows of those without are written. */
  __device__ __forceinline__ void enter_tile() {
    next_leaves = 0;
    for (int32_t index = walk.next(); index >= 0; index = walk.next()) {
      next_leaves = note_mma_tile(a, index, tile_at(entered), warp, lane);
      if (next_leaves > 0) {
        ++entered;
        number = 0;
        find_next();
        return;
      }
      write_empty_tile<T, Shape::kDim>(a, index, warp, lane);
    }
  }

  /** Where this lane's key of the next leaf is. */
  __device__ __forceinline__ void find_next() {
    const int32_t of = entered - 1;
    RowSet set{};
    set.request = word_of(of, offsetof(MmaTile, set.request));
    set.num_leaves = next_leaves;
    set.sink_leaves = word_of(of, offsetof(MmaTile, set.sink_leaves));
    set.leaf_begin = word_of(of, offsetof(MmaTile, set.leaf_begin));
    set.seen_begin = word_of(of, offsetof(MmaTile, set.seen_begin));
    set.seen_end = word_of(of, offsetof(MmaTile, set.seen_end));
    source = find_key(a, set,
                      leaf_of(set, number) * kLeaf + warp * Shape::kCopyKeys +
                          lane / KeyCopier<Shape>::kLanesOfKey);
  }

  /** Asks for this warp's keys of the next leaf, if there is one. */
  __device__ __forceinline__ void ask_keys() {
    wants_values = next_leaves > 0;
    if (!wants_values) return;
    values_source = source;
    values_head = word_of(entered - 1, offsetof(MmaTile, kv_head));
    barrier_wait(shared + ATTNFOLD_SHARED(empty_k) + 8 * asked_k.stage, asked_k.parity ^ 1);
    copier.go_to(a, values_head);
    copier.copy_k(a, source, shared + ATTNFOLD_SHARED(k) + asked_k.stage * Shape::kLeafBytes);
    barrier_arrive_after_copies(shared + ATTNFOLD_SHARED(full_k) + 8 * asked_k.stage);
    asked_k.next();
    if (++number < next_leaves) {
      find_next();
    } else {
      enter_tile();
    }
  }
  /** Asks for the values of those keys. */
  __device__ __forceinline__ void ask_values() {
    if (!wants_values) return;
    wants_values = false;
    barrier_wait(shared + ATTNFOLD_SHARED(empty_v) + 8 * asked_v.stage, asked_v.parity ^ 1);
    copier.go_to(a, values_head);
    copier.copy_v(a, values_source,
                  shared + ATTNFOLD_SHARED(v) + asked_v.stage * Shape::kLeafBytes);
    barrier_arrive_after_copies(shared + ATTNFOLD_SHARED(full_v) + 8 * asked_v.stage);
    asked_v.next();
  }
  /** Asks for this warp's rows of q of tile `of`. */
  __device__ __forceinline__ void ask_queries(int32_t of) const {
    copy_mma_queries<Shape>(a, tile_at(of), warp, lane, q_at());
    barrier_arrive_after_copies(shared + ATTNFOLD_SHARED(full_q) + 8 * warp);
  }
  __device__ __forceinline__ uint32_t q_at() const {
    return shared + ATTNFOLD_SHARED(q) + warp * (kMmaRows * Shape::kPitch);
  }

  // ---- one tile ----

  __device__ __forceinline__ WarpRows rows() const {
    return {tile_word(offsetof(MmaTile, kv_head)),
            tile_word(offsetof(MmaTile, set.row_begin)),
            tile_word(offsetof(MmaTile, set.num_rows)),
            tile_word(offsetof(MmaTile, set.position)),
            tile_word(offsetof(MmaTile, set.kv_len)),
            warp * kMmaRows,
            lane};
  }

  __device__ __forceinline__ void answer_tile() {
    RowSet set{};
    set.num_leaves = tile_word(offsetof(MmaTile, set.num_leaves));
    set.sink_leaves = tile_word(offsetof(MmaTile, set.sink_leaves));
    set.leaf_begin = tile_word(offsetof(MmaTile, set.leaf_begin));
    chunk.clear();
    bool seen_chunks = false;
    barrier_wait(shared + ATTNFOLD_SHARED(full_q) + 8 * warp, static_cast<uint32_t>(tile) % 2);
    int32_t edge = chunk_end(set, 0);
#pragma unroll 1
    for (int32_t i = 0; i < set.num_leaves; ++i) {
      const bool last = i + 1 == set.num_leaves;
      answer_leaf(leaf_of(set, i) * kLeaf, last);
      if (i + 1 < edge) continue;
      fold_into_total<Shape::kMaxTotals, kMmaThreads / 2>(totals(), chunk, seen_chunks, last);
      if (!last) edge = chunk_end(set, i + 1);
    }
    set.row_begin = tile_word(offsetof(MmaTile, set.row_begin));
    set.num_rows = tile_word(offsetof(MmaTile, set.num_rows));
    set.q_token = tile_word(offsetof(MmaTile, set.q_token));
    if (warp * kMmaRows < set.num_rows)
      write_mma_rows<T>(a, set, tile_word(offsetof(MmaTile, kv_head)), warp, lane, chunk);
  }
  /** Where this thread's part of its rows' totals waits: each half of the block has its own quads.
   */
  __device__ __forceinline__ float4* totals() const {
    constexpr int kHalf = kMmaThreads / 2;
    return reinterpret_cast<float4*>(args.totals) +
           static_cast<size_t>(blockIdx.x) * (tile_total_floats(Shape::kDim) / 4) +
           threadIdx.x / kHalf * ((kElements / 4 + 1) * kHalf) + threadIdx.x % kHalf;
  }

  /** Folds the leaf whose first key is `first_key` into the super-chunk. */
  __device__ __forceinline__ void answer_leaf(int32_t first_key, bool is_last) {
    const VisibleKeys any = tile_keys(offsetof(MmaTile, mine.any)),
                      all = tile_keys(offsetof(MmaTile, mine.all));
    const bool seen = meets(any, first_key, first_key + kLeaf),
               whole = covers(all, first_key, first_key + kLeaf);
    Scores s;
    barrier_wait(shared + ATTNFOLD_SHARED(full_k) + 8 * keys.stage, keys.parity);
    if (seen) make_scores(s);
    arrive_warp(shared + ATTNFOLD_SHARED(empty_k) + 8 * keys.stage, lane);
    keys.next();
    if (is_last && tile + 1 < entered) ask_queries(tile + 1);
    ask_values();
    float m[2], l[2];
    Weights p;
    if (seen) make_weights(first_key, whole, s, m, l, p);
    ask_keys();
    barrier_wait(shared + ATTNFOLD_SHARED(full_v) + 8 * values.stage, values.parity);
    ++leaves;
    const VisibleKeys tile_all = tile_keys(offsetof(MmaTile, tile.all));
    bool odd = false;
    if (!covers(tile_all, first_key, first_key + kLeaf))
      odd = some_value_is_odd(first_key, tile_all);
    if (seen) {
      add_up(l);
      const LeafFold fold(chunk, m, l);
      if (whole || !odd) {
        fold_values(p, fold);
      } else {
        float o[kElements];  // so that only this path has them in memory
        memcpy(o, chunk.o, sizeof(o));
        Weights p_copy;
        memcpy(p_copy, p, sizeof(p));
        fold_mma_by_token<Shape, T>(a, rows(), first_key, p_copy, fold, v_chunk(0, 0), o);
        memcpy(chunk.o, o, sizeof(o));
      }
    }
    arrive_warp(shared + ATTNFOLD_SHARED(empty_v) + 8 * values.stage, lane);
    values.next();
  }

  /** s = q k. */
  __device__ __forceinline__ void make_scores(Scores& s) const {
#pragma unroll
    for (int i = 0; i < kLeafScores; ++i) s[i] = 0.0f;
    // chunk_offset(), with what does not change from step to step taken out.
    const int matrix = lane / 8, row = lane % 8;
    const uint32_t q_rows = q_at() + (row + 8 * (matrix & 1)) * Shape::kPitch,
                   k_rows = shared + ATTNFOLD_SHARED(k) + keys.stage * Shape::kLeafBytes +
                            (row + 8 * (matrix >> 1)) * Shape::kPitch;
#pragma unroll
    for (int step = 0; step < Shape::kDim / 16; ++step) {
      uint32_t q[4];
      load_matrices(q, q_rows + (((2 * step + (matrix >> 1)) ^ row) << 4));
      const uint32_t k_at = k_rows + (((2 * step + (matrix & 1)) ^ row) << 4);
#pragma unroll
      for (int t = 0; t < kLeaf / 8; t += 2) {
        uint32_t k[4];
        load_matrices(k, k_at + 8 * t * Shape::kPitch);
        multiply_add<T>(quad(s, t), q[0], q[1], q[2], q[3], k[0], k[1]);
        multiply_add<T>(quad(s, t + 1), q[0], q[1], q[2], q[3], k[2], k[3]);
      }
    }
  }
  template <int kN>
  __device__ __forceinline__ static float (&quad(float (&x)[kN], int i))[4] {
    return reinterpret_cast<float(&)[4]>(x[4 * i]);
  }

  /** m, p and l (of this lane's keys) of scores s. */
  __device__ __forceinline__ void make_weights(int32_t first_key, bool whole, Scores& s,
                                               float (&m)[2], float (&l)[2], Weights& p) const {
    float c = a.problem.score_scale;
    if constexpr (kModified) {
      if (a.problem.softcap != 0.0f) {
        cap_scores(s, a.problem.softcap_scale, a.problem.softcap_log2);
        c = 1.0f;
      }
      if (a.tensors.alibi_slopes) add_alibi(a, rows(), first_key, c, s);
      c = 1.0f;
    }
    bool any[2] = {true, true};
    if (!whole) hide_unseen(a, rows(), first_key, s, any);
    find_maxima(s, c, any, m);
    Weigher weigher{c, {m[0] == kEmpty ? 0.0f : -m[0], m[1] == kEmpty ? 0.0f : -m[1]}, {}};
#pragma unroll
    for (int step = 0; step < kLeafSteps; ++step) weigher.template weigh<T>(step, s, p[step], l);
  }

  __device__ __forceinline__ uint32_t v_chunk(int key, int chunk16) const {
    return shared + ATTNFOLD_SHARED(v) + values.stage * Shape::kLeafBytes +
           chunk_offset<Shape::kPitch>(key, chunk16);
  }

  /** Whether some value of the leaf is not finite that not all rows see.  Each warp looks at the
   * keys that it brought. */
  __device__ __forceinline__ bool some_value_is_odd(int32_t first_key, const VisibleKeys& all) {
    constexpr int kChunks = Shape::kDim / 8;
    uint32_t odd = 0;
#pragma unroll 1
    for (int i = lane; i < Shape::kCopyKeys * kChunks; i += 32) {
      const int key = warp * Shape::kCopyKeys + i / kChunks;
      if (!sees(all, first_key + key))
        odd |= odd_of<T>(load_shared_quad(v_chunk(key, i % kChunks)));
    }
    const uint32_t at = shared + ATTNFOLD_SHARED(odd_leaf) + 4 * values.stage;
    if (uniform(odd) != 0) store_shared(at, leaves);
    arrive_warp(shared + ATTNFOLD_SHARED(checked_v), lane);
    barrier_wait(shared + ATTNFOLD_SHARED(checked_v), checked);
    checked ^= 1;
    return load_shared_word(at) == leaves;
  }

  /** Folds p v of a leaf, some elements of o after the other. */
  __device__ __forceinline__ void fold_values(const Weights& p, const LeafFold& fold) {
    const int matrix = lane / 8, row = lane % 8;
    const uint32_t v_rows = v_chunk(0, 0) + (row + 8 * (matrix & 1)) * Shape::kPitch;
#pragma unroll
    for (int from = 0; from < Shape::kDim; from += Shape::kSlice) {
      float d[Shape::kSlice / 8][4] = {};
      uint32_t v_at[Shape::kSlice / 16];
#pragma unroll
      for (int t = 0; t < Shape::kSlice / 16; ++t)
        v_at[t] = v_rows + (((from / 8 + 2 * t + (matrix >> 1)) ^ row) << 4);
#pragma unroll
      for (int step = 0; step < kLeafSteps; ++step) {
#pragma unroll
        for (int t = 0; t < Shape::kSlice / 8; t += 2) {
          uint32_t v[4];
          load_matrices_transposed(v, v_at[t / 2] + step * 16 * Shape::kPitch);
          multiply_add<T>(d[t], p[step][0], p[step][1], p[step][2], p[step][3], v[0], v[1]);
          multiply_add<T>(d[t + 1], p[step][0], p[step][1], p[step][2], p[step][3], v[2], v[3]);
        }
      }
#pragma unroll
      for (int e = 0; e < Shape::kSlice / 2; ++e)
        fold.row[e / 2 % 2].into_a(chunk.o[from / 2 + e], d[e / 4][e % 4]);
    }
  }

  const LargeArgs& args;
  const AttendArgs& a;
  const uint32_t shared;
  const int warp, lane;

  // What is asked for next.
  TileWalk walk;
  KeyCopier<Shape> copier;
  int32_t entered = 0;                  // tiles with leaves
  int32_t next_leaves = 0, number = 0;  // of the last of them, or 0 when all is asked for
  KeySource source{}, values_source{};
  int32_t values_head = 0;
  bool wants_values = false;
  Ring<Shape::kStages> asked_k, asked_v;

  // What is at hand.
  int32_t tile = 0;
  Ring<Shape::kStages> keys, values;
  uint32_t leaves = 0, checked = 0;
  HalfState<kElements> chunk;
};

template <class Shape, class T, bool kModified>
__global__ void __launch_bounds__(kMmaThreads, 1)
    attend_large_mma(const __grid_constant__ LargeArgs args) {
  if (!has_tiles(args.attend)) return;
  extern __shared__ __align__(128) unsigned char memory[];
  const uint32_t shared = shared_address(memory);
  init_mma<Shape>(shared, args.attend.problem.head_dim_vo);
  wait_for_previous_kernels();
  let_next_kernel_start();
  MmaWarp<Shape, T, kModified>(args, shared, static_cast<int>(uniform(threadIdx.x / 32)),
                               static_cast<int>(threadIdx.x % 32))
      .run();
}

}  // namespace attnfold::cuda
