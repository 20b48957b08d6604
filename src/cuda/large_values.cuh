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
  uint32_t a_leads, b_leads, none;  // one of them is 1

  __device__ __forceinline__ RowFold(float m_a, float m_b) {
    const FoldStep step = fold_step_fast(m_a, m_b);
    none = m_b == kEmpty;
    b_leads = !none && step.b_leads;
    a_leads = !none && !step.b_leads;
    scale = step.scale;
    m = b_leads ? m_b : m_a;
  }
  /** a = fold(a, b): fold_value without a branch. */
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
        : "f"(a), "f"(scale), "r"(a_leads), "r"(b_leads), "r"(none));
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

  /** to = fold(to, o), for some elements of o. */
  template <int kElements>
  __device__ __forceinline__ void apply(float* to, const float (&o)[kElements]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (__all_sync(~0u, row[h].a_leads)) {  // in half the instructions
#pragma unroll
        for (int e = 0; e < kElements; ++e)
          if (e / 2 % 2 == h) to[e] = lane::fma(row[h].scale, o[e], to[e]);
      } else {
#pragma unroll
        for (int e = 0; e < kElements; ++e)
          if (e / 2 % 2 == h) row[h].into_a(to[e], o[e]);
      }
    }
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
      bool has_total = false;
      bool more = uniform(load_shared_word(tile + offsetof(RowSet, num_leaves))) != 0;
      while (more) {
        barrier_wait(shared + ATTNFOLD_SHARED(full_v) + 8 * stage, parity);
        const uint32_t at = shared + ATTNFOLD_SHARED(note_v) + 8 * stage;
        const LeafNote note{static_cast<int32_t>(load_shared_word(at)),
                            uniform(load_shared_word(at + 4))};
        const uint32_t v = uniform(matrix_address(
            shared + ATTNFOLD_SHARED(v) + stage * Shape::kLeafBytes, Shape::kColumnStep));
        bool finite = true;
        if (__builtin_expect(is_edge(note), 0))
          finite = uniform(clear_unseen(note.first_key) ? 1 : 0);
        if (__builtin_expect(finite, 1)) {
#pragma unroll
          for (int half = 0; half < kTileHalves; ++half)
            if (note.seen(half)) fold_leaf(half, v);
        } else {
#pragma unroll
          for (int half = 0; half < kTileHalves; ++half)
            if (note.seen(half)) fold_by_token(half, note.first_key);
        }
        arrive_warp(shared + ATTNFOLD_SHARED(empty_v) + 8 * stage, lane);
        if (++stage == Shape::kStages) {
          stage = 0;
          parity ^= 1;
        }
        more = !note.tile_ends();
        if (note.chunk_ends()) {
#pragma unroll
          for (int half = 0; half < kTileHalves; ++half) fold_chunk(half, has_total, more);
          has_total = true;
        }
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

  /** chunk = fold(chunk, the leaf's state). */
  __device__ __forceinline__ void fold_leaf(int half, uint32_t v) {
    const uint32_t p = p_address(half);
    wait_for_p(half);
    const float4 ml = state_ml(half);
    float o[kElements];
    multiply(p, v, o);
    const LeafFold fold(chunk[half], ml);
    wait_for_products<0>();
    settle(o);
    free_p(half);
    fold.apply(chunk[half].o, o);
  }

  __device__ __forceinline__ void wait_for_p(int half) const {
    barrier_wait(buffer[half].full(shared, half), buffer[half].parity());
    fence_shared_for_engines();
  }
  __device__ __forceinline__ void free_p(int half) {
    arrive_warp(buffer[half].empty(shared, half), lane);
    buffer[half].next();
  }
  __device__ __forceinline__ uint32_t p_address(int half) const {
    return uniform(matrix_address(buffer[half].p(shared, half), 16));
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

  /** m and l of the leaf: of row_of_half(0), then of row_of_half(1). */
  __device__ __forceinline__ float4 state_ml(int half) const {
    const uint32_t at = buffer[half].ml(shared, half, row_of_half(0));
    return make_float4(load_shared(at), load_shared(at + 4), load_shared(at + 64),
                       load_shared(at + 68));
  }

  /** Folds a whole super-chunk into the row's total, which waits in memory while others follow. */
  __device__ __forceinline__ void fold_chunk(int half, bool has_total, bool more) {
    HalfState<kElements>& from = chunk[half];
    float4* at = totals + half * (kTotalQuads * kWarpgroup);
    if (has_total) {
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
    if (!more) return;
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
  __device__ __forceinline__ void fold_by_token(int half, int32_t first_key) {
    HalfState<kElements>& to = chunk[half];
    wait_for_p(half);
    const LeafFold fold(to, state_ml(half));
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
            v[i] = seen_pair(v[i], first_key + step * 16 + 8 * (i & 1) + 2 * (lane % 4), keys);
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
    free_p(half);
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
    const RowPlace place = place_of_row(a, set, tile_word(sizeof(RowSet)), row);
    const RowEnd end = finish_row(a, inside ? place.head : 0, m, l);
    if (inside) write_lse(a, place, end);
    const int64_t to = inside ? o_offset(a, place) : -1;
#pragma unroll
    for (int i = 0; i < 2 * kTileHalves; ++i) {
      const int from = 8 * i + lane / 4;
      const int64_t at = __shfl_sync(~0u, to, from);
      const float factor = __shfl_sync(~0u, end.factor, from);
      if (at >= 0) write_row(chunk[i / 2], i % 2, at + 2 * (lane % 4), factor);
    }
  }

  /** This lane's elements of row h. */
  __device__ __forceinline__ void write_row(const HalfState<kElements>& state, int h, int64_t to,
                                            float factor) const {
    if (a.problem.o_dtype == DType::f32) {
      float* o = reinterpret_cast<float*>(a.tensors.o.data) + to;
#pragma unroll
      for (int j = 0; j < Shape::kDim / 8; ++j) {
        *reinterpret_cast<float2*>(o + 8 * j) =
            make_float2(state.o[4 * j + 2 * h] * factor, state.o[4 * j + 2 * h + 1] * factor);
      }
    } else {
      char* o = a.tensors.o.data + 2 * to;
#pragma unroll
      for (int j = 0; j < Shape::kDim / 8; ++j) {
        *reinterpret_cast<uint32_t*>(o + 16 * j) =
            pack<T>(state.o[4 * j + 2 * h] * factor, state.o[4 * j + 2 * h + 1] * factor);
      }
    }
  }

  const AttendArgs& a;
  const uint32_t shared;
  const int warp, lane;
  float4* const totals;
  uint32_t tile = 0;
  int stage = 0;
  uint32_t parity = 0;
  BufferP<Shape> buffer[kTileHalves];
  HalfState<kElements> chunk[kTileHalves];
};

}  // namespace attnfold::cuda
