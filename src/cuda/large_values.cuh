// The value warpgroup of the large-row kernel: P.V of both halves of a tile, and the canonical
// fold.
#pragma once

#include "cuda/large_shape.cuh"
#include "cuda/row_state.h"
#include "cuda/wgmma.h"

namespace attnfold::cuda {

/** One thread's part of the states of 64 rows: rows lane / 4 and 8 more of its warp's 16, elements
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
  __device__ __forceinline__ LeafFold(HalfState<kElements>& to, float4 ml)
      : row{RowFold(to.m[0], ml.x), RowFold(to.m[1], ml.z)} {
    row[0].into_a(to.l[0], ml.y);
    row[1].into_a(to.l[1], ml.w);
    to.m[0] = row[0].m;
    to.m[1] = row[1].m;
  }

  /** 0, made of the factors: who needs it needs them. */
  __device__ __forceinline__ uint32_t zero() const {
    return (__float_as_uint(row[0].scale) | __float_as_uint(row[1].scale)) >> 31;
  }

  /** to = fold(to, o). */
  template <int kElements>
  __device__ __forceinline__ void apply(float (&to)[kElements], const float (&o)[kElements]) const {
#pragma unroll
    for (int e = 0; e < kElements; ++e) row[e / 2 % 2].into_a(to[e], o[e]);
  }
};

template <class Shape, class T>
class ValueGroup {
 public:
  __device__ __forceinline__ ValueGroup(const LargeArgs& args, uint32_t shared_in, int warp_in,
                                        int lane_in)
      : a(args.attend),
        shared(shared_in),
        warp(warp_in),
        lane(lane_in),
        totals(reinterpret_cast<float4*>(args.totals) +
               static_cast<size_t>(blockIdx.x) * (tile_total_floats(Shape::kDim) / 4) +
               (warp_in * 32 + lane_in)) {}

  __device__ __forceinline__ void run() {
    for (uint32_t i = 0;; ++i) {
      barrier_wait(shared + ATTNFOLD_SHARED(full_tile) + 8 * (i % 2), i / 2 % 2);
      tile = shared + ATTNFOLD_SHARED(tile) +
             i % 2 * static_cast<uint32_t>(sizeof(Shape::Shared::tile[0]));
      if (uniform(load_shared_word(tile + sizeof(RowSet) + 4))) return;
#pragma unroll
      for (int half = 0; half < kTileHalves; ++half) chunk[half].clear();
      seen_chunks = 0;
      if (uniform(load_shared_word(tile + offsetof(RowSet, num_leaves))) != 0) {
        wait_for_values();
        read_note();
        while (fold_leaf()) wait_for_values();
      }
      write_rows();
      arrive_warp(shared + ATTNFOLD_SHARED(empty_tile) + 8 * (i % 2), lane);
    }
  }

 private:
  static constexpr int kElements = Shape::kDim / 2;
  static constexpr int kTotalQuads = kElements / 4 + 1;
  static constexpr int kSteps = kLeaf / 16;
  static_assert(kTileHalves * kTotalQuads * kWarpgroup * 4 == tile_total_floats(Shape::kDim));

  /** Some row that sees keys of the leaf does not see all of them. */
  __device__ __forceinline__ static bool is_edge(const LeafNote& note) {
    bool edge = false;
#pragma unroll
    for (int half = 0; half < kTileHalves; ++half)
      edge = edge || (note.seen(half) && !note.whole(half));
    return edge;
  }

  __device__ __forceinline__ int32_t tile_word(size_t offset) const {
    return static_cast<int32_t>(load_shared_word(tile + static_cast<uint32_t>(offset)));
  }
  __device__ __forceinline__ int row_of_half(int h) const { return warp * 16 + 8 * h + lane / 4; }
  __device__ __forceinline__ RequestShape request() const {
    const int32_t kv_len = tile_word(offsetof(RowSet, kv_len));
    return {kv_len - tile_word(offsetof(RowSet, position)), kv_len};
  }

  /** Address of 16 bytes of V. */
  __device__ __forceinline__ uint32_t v_chunk(int key, int chunk16) const {
    return shared + ATTNFOLD_SHARED(v) + stage * Shape::kLeafBytes + key / 8 * Shape::kStep8 +
           chunk16 / 8 * Shape::kColumnStep + key % 8 * 128 + ((chunk16 % 8 ^ key % 8) << 4);
  }

  /** Values of keys that no row of the tile sees become 0, as 0 times what lies there may be NaN.
   * Whether all others are finite. */
  __device__ __forceinline__ bool clear_unseen(int32_t first_key) {
    const int key = warp * 32 + lane;
    const int32_t rows = tile_word(offsetof(RowSet, num_rows)),
                  row_begin = tile_word(offsetof(RowSet, row_begin));
    const int32_t first = row_begin / a.shape.group_size,
                  last = (row_begin + rows - 1) / a.shape.group_size;
    const VisibleKeys x = visible_keys(a.problem.mask, request(), first),
                      y = visible_keys(a.problem.mask, request(), last);
    const int32_t k = first_key + key;
    const bool seen = k < x.sink || k < y.sink || (k >= x.begin && k < y.end);
    constexpr uint32_t kExponents = std::is_same_v<T, __half> ? 0x7c007c00u : 0x7f807f80u,
                       kOne = std::is_same_v<T, __half> ? 0x04000400u : 0x00800080u;
    uint32_t overflow = 0;
#pragma unroll 4
    for (int chunk16 = 0; chunk16 < Shape::kDim / 8; ++chunk16) {
      const uint32_t at = v_chunk(key, chunk16);
      if (seen) {
        const uint4 w = load_shared_quad(at);
        overflow |= ((w.x & kExponents) + kOne) | ((w.y & kExponents) + kOne) |
                    ((w.z & kExponents) + kOne) | ((w.w & kExponents) + kOne);
      } else {
        store_shared_quad(at, make_uint4(0, 0, 0, 0));
      }
    }
    fence_shared_for_engines();
    return !group_any<kValuesBarrier, kWarpgroup>(overflow & 0x80008000u);
  }

  __device__ __forceinline__ void wait_for_values() const {
    barrier_wait(shared + ATTNFOLD_SHARED(full_v) + 8 * stage, parity);
  }
  /** Reads what is said of the leaf at hand. */
  __device__ __forceinline__ void read_note() {
    const uint32_t at = shared + ATTNFOLD_SHARED(note_v) + leaves % kLeafNotes * 8;
    note = {static_cast<int32_t>(load_shared_word(at)), uniform(load_shared_word(at + 4))};
    v = uniform(matrix_address(shared + ATTNFOLD_SHARED(v) + stage * Shape::kLeafBytes,
                               Shape::kColumnStep));
  }
  /** Goes to the next leaf, if the tile has one.  `zero`, which is 0, is worked out before. */
  __device__ __forceinline__ void look_ahead(uint32_t zero = 0) {
    leaves += 1 + zero;
    next_stage();
    read_note();
  }
  __device__ __forceinline__ void free_values(int at) const {
    arrive_warp(shared + ATTNFOLD_SHARED(empty_v) + 8 * at, lane);
  }

  /** Folds the leaf at hand, for both halves; then the next leaf is at hand.  Whether the tile has
   * one. */
  __device__ __forceinline__ bool fold_leaf() {
    const LeafNote leaf = note;
    const int at = stage;
    if (__builtin_expect(is_edge(leaf), 0) && uniform(clear_unseen(leaf.first_key) ? 0 : 1)) {
#pragma unroll
      for (int half = 0; half < kTileHalves; ++half)
        if (leaf.seen(half)) fold_by_token(half, leaf);
      free_values(at);
      look_ahead();
    } else {
      if (leaf.seen(0)) {
        float o[kElements];
        const LeafFold fold = begin_fold(0, o);
        end_fold(0, fold, o);
        if (__builtin_expect(leaf.chunk_last(0), 0)) fold_chunk(0, leaf);
      }
      if (leaf.seen(1)) {
        float o[kElements];
        const LeafFold fold = begin_fold(1, o);
        look_ahead(fold.zero());  // while the product is on its way
        end_fold(1, fold, o, at);
        if (__builtin_expect(leaf.chunk_last(1), 0)) fold_chunk(1, leaf);
      } else {
        free_values(at);
        look_ahead();
      }
    }
    return !leaf.tile_ends();
  }

  __device__ __forceinline__ void next_stage() {
    if (++stage == Shape::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  /** Begins o = p.v of a half, and folds m and l meanwhile. */
  __device__ __forceinline__ LeafFold begin_fold(int half, float (&o)[kElements]) {
    const uint32_t p = uniform(matrix_address(buffer[half].p(shared, half), 16));
    wait_for_p(half);
    multiply(p, v, o);
    return LeafFold(chunk[half], read_ml(half));
  }
  __device__ __forceinline__ void wait_for_p(int half) const {
    buffer[half].wait_until_full(half);
    fence_shared_for_engines();
  }
  /** m and l of the leaf: of row_of_half(0), then of row_of_half(1). */
  __device__ __forceinline__ float4 read_ml(int half) const {
    const uint32_t at = buffer[half].ml(shared, half, row_of_half(0));
    return make_float4(load_shared(at), load_shared(at + 4), load_shared(at + 64),
                       load_shared(at + 68));
  }
  /** chunk = fold(chunk, o); the values may leave shared memory if their stage is named. */
  __device__ __forceinline__ void end_fold(int half, const LeafFold& fold, float (&o)[kElements],
                                           int stage_done = -1) {
    wait_for_products<0>();
    settle(o);
    buffer[half].empty(shared, half, lane);
    if (stage_done >= 0) free_values(stage_done);
    fold.apply(chunk[half].o, o);
  }

  /** Begins o = p.v. */
  __device__ __forceinline__ static void multiply(uint32_t p, uint32_t v, float (&o)[kElements]) {
    open_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t p_at =
          matrix_at<1024>(p + step / 4 * (Shape::kColumnBytesP / 16) + step % 4 * 2);
      const uint64_t v_at = matrix_at<Shape::kStep8>(v + step * (2 * Shape::kStep8 / 16));
      if (step == 0) {
        multiply_columns<T, true, Shape::kDim>(o, p_at, v_at);
      } else {
        multiply_columns<T, false, Shape::kDim>(o, p_at, v_at);
      }
    }
    commit_products();
  }

  /** Folds a whole super-chunk into the rows' totals, which wait in memory while others follow. */
  __device__ __forceinline__ void fold_chunk(int half, const LeafNote& leaf) {
    HalfState<kElements>& from = chunk[half];
    float4* at = totals + half * (kTotalQuads * kWarpgroup);
    if (seen_chunks >> half & 1) {
      const float4 ml = __ldcg(at + kElements / 4 * kWarpgroup);
      float4 total[kElements / 4];  // where o of a leaf lies otherwise; all on their way at once
#pragma unroll
      for (int j = 0; j < kElements / 4; ++j) total[j] = __ldcg(at + j * kWarpgroup);
      const RowFold fold[2] = {RowFold(ml.x, from.m[0]), RowFold(ml.y, from.m[1])};
#pragma unroll
      for (int j = 0; j < kElements / 4; ++j) {
        fold[0].into_b(total[j].x, from.o[4 * j]);
        fold[0].into_b(total[j].y, from.o[4 * j + 1]);
        fold[1].into_b(total[j].z, from.o[4 * j + 2]);
        fold[1].into_b(total[j].w, from.o[4 * j + 3]);
      }
      fold[0].into_b(ml.z, from.l[0]);
      fold[1].into_b(ml.w, from.l[1]);
      from.m[0] = fold[0].m;
      from.m[1] = fold[1].m;
    } else {  // into nothing: scale 0 times 0 is added
#pragma unroll
      for (int e = 0; e < kElements; ++e) from.o[e] += 0.0f;
    }
    seen_chunks |= 1u << half;
    if (leaf.tile_last(half)) return;
#pragma unroll
    for (int j = 0; j < kElements / 4; ++j) {
      __stcg(at + j * kWarpgroup,
             make_float4(from.o[4 * j], from.o[4 * j + 1], from.o[4 * j + 2], from.o[4 * j + 3]));
    }
    __stcg(at + kElements / 4 * kWarpgroup,
           make_float4(from.m[0], from.m[1], from.l[0], from.l[1]));
    from.clear();
  }

  /**
   * The same for a leaf where some value is not finite: token by token, values that the token does
   * not see replaced by 0.  The same products in the same order.
   */
  __device__ __forceinline__ void fold_by_token(int half, const LeafNote& leaf) {
    HalfState<kElements>& to = chunk[half];
    wait_for_p(half);
    const LeafFold fold(to, read_ml(half));
    const int32_t group = a.shape.group_size, rows = tile_word(offsetof(RowSet, num_rows)),
                  row_begin = tile_word(offsetof(RowSet, row_begin));
    const auto token_of = [&](int32_t row) {
      return (row_begin + (row < rows ? row : rows - 1)) / group;
    };
    const int32_t base = half * kHalfRows;
    const int32_t first = token_of(base + warp * 16), last = token_of(base + warp * 16 + 15);
    const int matrix = lane / 8, row = lane % 8;
    const uint32_t p_row =
        buffer[half].p(shared, half) + (warp * 16 + 8 * (matrix & 1) + row) * 128;
#pragma unroll 1
    for (int32_t token = first; token <= last; ++token) {
      const VisibleKeys keys = visible_keys(a.problem.mask, request(), token);
      const bool mine[2] = {token_of(base + row_of_half(0)) == token,
                            token_of(base + row_of_half(1)) == token};
#pragma unroll
      for (int j = 0; j < Shape::kDim / 8; j += 2) {
        float d[2][4] = {};
#pragma unroll 1
        for (int step = 0; step < kSteps; ++step) {
          uint32_t p[4], v[4];
          const int chunk16 = 2 * step + (matrix >> 1);
          load_matrices(p, p_row + chunk16 / 8 * Shape::kColumnBytesP + ((chunk16 % 8 ^ row) << 4));
          load_matrices_transposed(v,
                                   v_chunk(step * 16 + 8 * (matrix & 1) + row, j + (matrix >> 1)));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            v[i] = seen_pair(v[i], leaf.first_key + step * 16 + 8 * (i & 1) + 2 * (lane % 4), keys);
          }
          multiply_add<T>(d[0], p[0], p[1], p[2], p[3], v[0], v[1]);
          multiply_add<T>(d[1], p[0], p[1], p[2], p[3], v[2], v[3]);
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int h = e / 2 % 2;
          if (mine[h]) fold.row[h].into_a(to.o[4 * j + e], d[e / 4][e % 4]);
        }
      }
    }
    buffer[half].empty(shared, half, lane);
    if (leaf.chunk_last(half)) fold_chunk(half, leaf);
  }

  /** Writes the tile's rows.  Each lane finishes one of the warp's 32, row lane % 16 of half
   * lane / 16: the instructions of this are fetched once for all. */
  __device__ __forceinline__ void write_rows() const {
    float m = kEmpty, l = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kTileHalves; ++i) {
      const float m_i = __shfl_sync(~0u, chunk[i / 2].m[i % 2], lane % 8 * 4),
                  l_i = __shfl_sync(~0u, chunk[i / 2].l[i % 2], lane % 8 * 4);
      if (lane / 8 == i) m = m_i, l = l_i;
    }
    RowSet set{};
    set.row_begin = tile_word(offsetof(RowSet, row_begin));
    set.q_token = tile_word(offsetof(RowSet, q_token));
    const int row = lane / 16 * kHalfRows + warp * 16 + lane % 16;
    const bool inside = row < tile_word(offsetof(RowSet, num_rows));
    const RowPlace place = place_of_row(a, set, tile_word(sizeof(RowSet)), inside ? row : 0);
    const RowEnd end = finish_row(a, place.head, m, l);
    if (inside) write_lse(a, place, end);
    const int64_t to = inside ? o_offset(a, place) : -1;
#pragma unroll
    for (int i = 0; i < 2 * kTileHalves; ++i) {
      const int from = 8 * i + lane / 4;
      const int64_t at = __shfl_sync(~0u, to, from);
      const float factor = __shfl_sync(~0u, end.factor, from);
      write_row(chunk[i / 2].o, i % 2, at, factor);
    }
  }

  /** This lane's elements of row h, multiplied by `factor`; none where `to` is negative.  Two lanes
   * exchange half of what they have, so that each writes four neighbours: whole 32 bytes of memory
   * by the four lanes that share a row. */
  __device__ __forceinline__ void write_row(const float (&row)[kElements], int h, int64_t to,
                                            float factor) const {
    const bool odd = lane % 2 != 0;
    const int64_t first = to + (odd ? 8 : 0) + lane % 4 / 2 * 4;
    // Even lanes write elements 8 j to 8 j + 7 of their row, odd ones the 8 after them.
    if (a.problem.o_dtype == DType::f32) {
      float* at = reinterpret_cast<float*>(a.tensors.o.data) + first;
#pragma unroll
      for (int j = 0; j < Shape::kDim / 8; j += 2) {
        const float* e = row + 4 * j + 2 * h;
        const float2 low = make_float2(e[0] * factor, e[1] * factor),
                     high = make_float2(e[4] * factor, e[5] * factor);
        const float x = __shfl_xor_sync(~0u, odd ? low.x : high.x, 1),
                    y = __shfl_xor_sync(~0u, odd ? low.y : high.y, 1);
        if (to >= 0)
          *reinterpret_cast<float4*>(at + 8 * j) =
              odd ? make_float4(x, y, high.x, high.y) : make_float4(low.x, low.y, x, y);
      }
    } else {
      char* at = a.tensors.o.data + 2 * first;
#pragma unroll
      for (int j = 0; j < Shape::kDim / 8; j += 2) {
        const float* e = row + 4 * j + 2 * h;
        const uint32_t low = pack<T>(e[0] * factor, e[1] * factor),
                       high = pack<T>(e[4] * factor, e[5] * factor);
        const uint32_t got = __shfl_xor_sync(~0u, odd ? low : high, 1);
        if (to >= 0)
          *reinterpret_cast<uint2*>(at + 16 * j) =
              odd ? make_uint2(got, high) : make_uint2(low, got);
      }
    }
  }

  const AttendArgs& a;
  const uint32_t shared;
  const int warp, lane;
  float4* const totals;
  uint32_t tile = 0;
  LeafNote note{};           // of the leaf at hand
  uint32_t seen_chunks = 0;  // of the tile, a bit for each half: a super-chunk has been folded
  uint32_t v = 0;            // where its values are
  int stage = 0;
  uint32_t parity = 0, leaves = 0;
  BufferP<Shape> buffer[kTileHalves];
  HalfState<kElements> chunk[kTileHalves];
};

}  // namespace attnfold::cuda
