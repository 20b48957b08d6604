// The matrix warps of the small-row kernel: a leaf's state, and the canonical fold in registers.
#pragma once

#include "cuda/row_state.h"
#include "cuda/small_shape.cuh"

namespace attnfold::cuda {

/** One warp's part of the states of its rows: m and l of rows lane / 4 (+ 8), and the elements of o
 * that the warp makes. */
template <class Shape>
struct WarpState {
  float m[Shape::kRowTiles], l[Shape::kRowTiles];
  float o[Shape::kTilesO]
         [2 * Shape::kRowTiles];  // elements 2 * (lane % 4) + {0, 1} of a tile, for each row

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < Shape::kRowTiles; ++h) {
      m[h] = kEmpty;
      l[h] = 0.0f;
    }
#pragma unroll
    for (int t = 0; t < Shape::kTilesO; ++t)
#pragma unroll
      for (int e = 0; e < 2 * Shape::kRowTiles; ++e) o[t][e] = 0.0f;
  }

  /** a or b, by value: a reference to either would put both into memory. */
  __device__ __forceinline__ static WarpState choose(bool first, const WarpState& a,
                                                     const WarpState& b) {
    WarpState r;
#pragma unroll
    for (int h = 0; h < Shape::kRowTiles; ++h) {
      r.m[h] = first ? a.m[h] : b.m[h];
      r.l[h] = first ? a.l[h] : b.l[h];
    }
#pragma unroll
    for (int t = 0; t < Shape::kTilesO; ++t)
#pragma unroll
      for (int e = 0; e < 2 * Shape::kRowTiles; ++e) r.o[t][e] = first ? a.o[t][e] : b.o[t][e];
    return r;
  }

  /** this = fold(this, b), in the first `tiles` row tiles. */
  __device__ __forceinline__ void fold(const WarpState& b, int tiles) {
#pragma unroll
    for (int h = 0; h < Shape::kRowTiles; ++h) {
      if (h == tiles) break;
      if (b.m[h] == kEmpty) continue;
      const FoldStep step = fold_step_fast(m[h], b.m[h]);
      l[h] = fold_value(step, l[h], b.l[h]);
#pragma unroll
      for (int t = 0; t < Shape::kTilesO; ++t)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) o[t][e] = fold_value(step, o[t][e], b.o[t][e]);
      if (step.b_leads) m[h] = b.m[h];
    }
  }
};

/** Element e of an accumulator of scores belongs to row tile e / 2; its key, from the warp's first
 * on. */
__device__ __forceinline__ int32_t key_in_tile(int lane, int tile, int e) {
  return 8 * tile + 2 * (lane % 4) + (e & 1);
}

// What follows is called, not inlined, so that rare instructions do not lie between the many that
// every leaf runs: the instruction cache is filled anew by each kernel.

static __device__ __noinline__ VisibleKeys keys_of_token(const AttendArgs& a, int32_t position,
                                                         int32_t kv_len, int32_t token) {
  return visible_keys(a.problem.mask, RequestShape{kv_len - position, kv_len}, token);
}

/** Soft-cap and ALiBi, in the log2 domain.  s [tiles of keys, 4] */
template <class Shape>
static __device__ __noinline__ void modify_scores(const AttendArgs& a, float* s, int lane,
                                                  int32_t num_rows, int32_t row_begin,
                                                  int32_t kv_head, int32_t position,
                                                  int32_t first_key) {
  const float* slopes = a.tensors.alibi_slopes;
  const int32_t group = a.shape.group_size;
#pragma unroll 1
  for (int i = 0; i < Shape::kTilesS * 2 * Shape::kRowTiles; ++i) {
    const int tile = i / (2 * Shape::kRowTiles), e = i % (2 * Shape::kRowTiles);
    float x = s[4 * tile + e];
    x = a.problem.softcap != 0.0f ? tanh_f32(x * a.problem.softcap_scale) * a.problem.softcap_log2
                                  : x * a.problem.score_scale;
    if (slopes) {
      const int32_t in_tile = 8 * (e / 2) + lane / 4,
                    row = row_begin + (in_tile < num_rows ? in_tile : num_rows - 1);
      const float slope = slopes[kv_head * group + row % group] * kLog2E;
      x = lane::fma(
          slope,
          static_cast<float>(first_key + key_in_tile(lane, tile, e) - position - row / group), x);
    }
    s[4 * tile + e] = x;
  }
}

/**
 * p.v of all rows over a leaf, where values of keys outside `keys` count as 0 whatever they are: 0
 * times a NaN that a row may not see would reach it.  The same products in the same order as
 * MatrixWarp::values.
 */
template <class Shape, class T>
static __device__ __noinline__ void values_of_token(uint32_t p_base, uint32_t v_base, int warp,
                                                    int lane, int32_t leaf_key, VisibleKeys keys,
                                                    float* o) {
  const int matrix = lane / 8, row = lane % 8,
            p_row = Shape::kRowTiles == 1 ? row : row + 8 * (matrix & 1);
#pragma unroll 1
  for (int tile = 0; tile < Shape::kTilesO; tile += 2) {
    float d[2][4] = {};
#pragma unroll 1
    for (int step = 0; step < kLeaf / 16; ++step) {
      uint32_t p[4], v[4];
      load_matrices(p, p_base + chunk_offset<kLeaf * 2>(p_row, 2 * step + (matrix >> 1)));
      if constexpr (Shape::kRowTiles == 1) p[1] = p[3] = 0;
      load_matrices_transposed(
          v, v_base + chunk_offset<Shape::kPitch>(step * 16 + 8 * (matrix & 1) + row,
                                                  warp * Shape::kTilesO + tile + (matrix >> 1)));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        v[i] = seen_pair(v[i], leaf_key + step * 16 + 8 * (i & 1) + 2 * (lane % 4), keys);
      multiply_add<T>(d[0], p[0], p[1], p[2], p[3], v[0], v[1]);
      multiply_add<T>(d[1], p[0], p[1], p[2], p[3], v[2], v[3]);
    }
    for (int i = 0; i < 2; ++i)
      for (int e = 0; e < 2 * Shape::kRowTiles; ++e)
        o[(tile + i) * 2 * Shape::kRowTiles + e] = d[i][e];
  }
}

template <class Shape, class T>
class MatrixWarp {
 public:
  __device__ __forceinline__ MatrixWarp(const AttendArgs& args, uint32_t shared_in,
                                        const Range& range_in, int32_t kv_head_in, int warp_in,
                                        int lane_in)
      : a(args),
        shared(shared_in),
        range(range_in),
        kv_head(kv_head_in),
        warp(warp_in),
        lane(lane_in) {}

  /**
   * The leaves of the range, one after the other, and those of claimed ranges.  In the row set that
   * the range begins, they fold through their super-chunk into the row; in one that it enters later
   * than at its first leaf, the row is not its to fold, and single leaves and super-chunks are left
   * behind as states (plan/range_schedule.h says which).
   */
  __device__ __forceinline__ void run() {
    Walk walk(a, range);
    wait_to_begin(a);  // before it writes a state that others may still read
    let_next_kernel_start();
    if (walk.left <= 0) return;
    Claims<Shape> claims(range);
    int32_t entry = walk.number;  // where the range enters the row set
    leaf.clear();                 // what row tiles without rows keep
    total.clear();
    while (walk.left > 0) {
      if (walk.new_set) open_set(walk.set);
      leaf_state(walk.set, walk.number);
      const RowSet& set = walk.set;
      const int32_t number = walk.number, begin = chunk_begin(set, number);
      const bool last = walk.left == 1, row_ends = number + 1 == set.num_leaves;
      const bool single = begin < entry;  // its super-chunk began in another range
      bool chunk_ends = false;
      int32_t state = walk.entered_states + number - entry;
      if (!single) {
        if (number == begin) chunk.clear();
        chunk.fold(leaf, tiles);
        chunk_ends = number + 1 == chunk_end(set, number);
        state = entry > 0 ? walk.entered_states + entered_state(set, entry, begin)
                          : walk.begun_states + (begin > 0 ? 1 : 0);
        if (entry == 0 && chunk_ends) total.fold(chunk, tiles);
      }
      if (single || (entry > 0 ? chunk_ends || last : last && !chunk_ends)) {
        write_state(state, WarpState<Shape>::choose(single, leaf, chunk), !single);
      }
      if (entry == 0) {
        if (row_ends) {
          write_rows(set);
        } else if (last && (chunk_ends || begin > 0)) {
          write_state(walk.begun_states, total, true);
        }
      }
      walk.step(a);
      if (walk.left == 0) {
        if (!claims.more() || !claims.enter_next(a, shared, walk, kv_head)) return;
        entry = walk.number;
        total.clear();
      } else if (walk.new_set) {
        entry = 0;
        total.clear();
      }
    }
  }

 private:
  static constexpr int kTiles = Shape::kRowTiles, kSteps = Shape::kDim / 16;
  using QFragments = uint32_t[kSteps][2 * kTiles];

  /** Loads the row set's queries, and notes what its rows see. */
  __device__ __forceinline__ void open_set(const RowSet& set) {
    barrier_wait(Shape::full_q(shared, q_ring.stage), q_ring.parity);
    const uint32_t base = Shape::q(shared, q_ring.stage);
    const int matrix = lane / 8, row = lane % 8;
    uint32_t r[4];
    if constexpr (kTiles == 1) {
#pragma unroll
      for (int s = 0; s < kSteps; s += 2) {
        load_matrices(r, base + chunk_offset<Shape::kPitch>(row, 2 * s + matrix));
        q[s][0] = r[0], q[s][1] = r[1], q[s + 1][0] = r[2], q[s + 1][1] = r[3];
      }
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        load_matrices(
            r, base + chunk_offset<Shape::kPitch>(row + 8 * (matrix & 1), 2 * s + (matrix >> 1)));
#pragma unroll
        for (int i = 0; i < 4; ++i) q[s][i] = r[i];
      }
    }
    q_ring.next();
    const int32_t group = a.shape.group_size;
    first_token = token_of_row(set.row_begin, group);
    last_token = token_of_row(set.row_begin + set.num_rows - 1, group);
    all_see = seen_by_any(a.problem.mask, set);
#pragma unroll
    for (int h = 0; h < kTiles; ++h) {
      token[h] = first_token;
      seen[h] = all_see;
    }
    if (first_token < last_token) {
      const VisibleKeys first = keys_of_token(a, set.position, set.kv_len, first_token);
#pragma unroll
      for (int h = 0; h < kTiles; ++h) {
        const int32_t r_h = row_of_tile(h) < set.num_rows ? row_of_tile(h) : set.num_rows - 1;
        token[h] = (set.row_begin + r_h) / group;
        seen[h] = keys_of_token(a, set.position, set.kv_len, token[h]);
      }
      const VisibleKeys last = keys_of_token(a, set.position, set.kv_len, last_token);
      all_see = {first.sink < last.sink ? first.sink : last.sink, last.begin, first.end};
    }
    num_rows = set.num_rows;
    if constexpr (kTiles > 1) tiles = num_rows > 8 ? kTiles : 1;
  }

  __device__ __forceinline__ int row_of_tile(int h) const { return 8 * h + lane / 4; }

  /** Which of this lane's keys are in `keys`. */
  __device__ __forceinline__ uint32_t keys_seen(const VisibleKeys& keys, int32_t first_key) const {
    uint32_t bits = 0;
#pragma unroll 1
    for (int i = 0; i < 2 * Shape::kTilesS; ++i)
      bits |= static_cast<uint32_t>(sees(keys, first_key + key_in_tile(lane, i / 2, i))) << i;
    return bits;
  }

  /** s = q.k for this warp's keys. */
  __device__ __forceinline__ void scores(float (&s)[Shape::kTilesS][4]) {
#pragma unroll
    for (int t = 0; t < Shape::kTilesS; ++t) s[t][0] = s[t][1] = s[t][2] = s[t][3] = 0.0f;
    const uint32_t base = Shape::kv(shared, ring.stage);
    const int matrix = lane / 8;
    const int row = warp * kWarpKeys + 8 * (matrix >> 1) + lane % 8;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int t = 0; t < Shape::kTilesS; t += 2) {
        uint32_t k[4];
        load_matrices(k, base + chunk_offset<Shape::kPitch>(row + 8 * t, 2 * step + (matrix & 1)));
        if constexpr (kTiles == 1) {
          multiply_add<T>(s[t], q[step][0], 0, q[step][1], 0, k[0], k[1]);
          multiply_add<T>(s[t + 1], q[step][0], 0, q[step][1], 0, k[2], k[3]);
        } else {
          multiply_add<T>(s[t], q[step][0], q[step][1], q[step][2], q[step][3], k[0], k[1]);
          multiply_add<T>(s[t + 1], q[step][0], q[step][1], q[step][2], q[step][3], k[2], k[3]);
        }
      }
    }
  }

  /** Fills `leaf` with the state of the walk's leaf. */
  __device__ __forceinline__ void leaf_state(const RowSet& set, int32_t number) {
    const int32_t leaf_key = leaf_of(set, number) * kLeaf;
    const int32_t first_key = leaf_key + warp * kWarpKeys;
    float s[Shape::kTilesS][4];
    barrier_wait(Shape::full(shared, ring.stage, warp), ring.parity);
    scores(s);
    __syncwarp();
    // Four arrivals, as many as for values: nobody else reads these keys.
    if (lane < kGroupWarps * kArrivingLanes) barrier_arrive(Shape::empty(shared, ring.stage, warp));
    for (int i = 1; kArrivingLanes == 32 && i < kGroupWarps; ++i)
      barrier_arrive(Shape::empty(shared, ring.stage, warp));
    ring.next();

    float c = a.problem.score_scale;
    if (a.problem.softcap != 0.0f || a.tensors.alibi_slopes) {
      float modified[Shape::kTilesS][4];
      memcpy(modified, s, sizeof(s));
      modify_scores<Shape>(a, modified[0], lane, num_rows, set.row_begin, kv_head, set.position,
                           first_key);
      memcpy(s, modified, sizeof(s));
      c = 1.0f;
    }
    const bool whole = leaf_key + kLeaf <= all_see.sink ||
                       (leaf_key >= all_see.begin && leaf_key + kLeaf <= all_see.end);
    bool any[kTiles];
    uint32_t visible[kTiles];  // bit 2 * tile + i: this lane's keys
    float largest[kTiles];
#pragma unroll
    for (int h = 0; h < kTiles; ++h) {
      if (h == tiles) break;
      const VisibleKeys& keys = seen[h];
      any[h] = whole || leaf_key < keys.sink ||
               (leaf_key < keys.end && leaf_key + kLeaf > keys.begin && keys.begin < keys.end);
      visible[h] = whole ? ~0u : keys_seen(keys, first_key);
      largest[h] = any[h] ? kLowest : kEmpty;
#pragma unroll
      for (int i = 0; i < 2 * Shape::kTilesS; ++i) {
        largest[h] = fmaxf(largest[h], (visible[h] >> i) & 1 ? s[i / 2][2 * h + i % 2] : kEmpty);
      }
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
      if (lane % 4 == 0) store_shared(Shape::warp_max(shared, warp, row_of_tile(h)), largest[h]);
    }
    group_sync<kMatrixBarrier, kGroupThreads>();

#pragma unroll
    for (int h = 0; h < kTiles; ++h) {
      if (h == tiles) break;
      const int row = row_of_tile(h);
      float qk[kGroupWarps];
#pragma unroll
      for (int w = 0; w < kGroupWarps; ++w) qk[w] = load_shared(Shape::warp_max(shared, w, row));
      leaf.m[h] =
          any[h] ? fmaxf(c * fmaxf(fmaxf(qk[0], qk[1]), fmaxf(qk[2], qk[3])), kLowest) : kEmpty;
      float sum = 0.0f;
#pragma unroll
      for (int t = 0; t < Shape::kTilesS; ++t) {
        float p[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          p[i] = exp2_fast(lane::fma(s[t][2 * h + i], c, -leaf.m[h]));
          if (!((visible[h] >> (2 * t + i)) & 1)) p[i] = 0.0f;
          sum += p[i];
        }
        const uint32_t at =
            chunk_offset<kLeaf * 2>(row, warp * (kWarpKeys / 8) + t) + (lane % 4) * 4;
        store_shared(Shape::p(shared) + at, pack<T>(p[0], p[1]));
      }
      store_shared(Shape::warp_sum(shared, warp, row, lane % 4), sum);
    }
#pragma unroll
    for (int w = 0; w < kGroupWarps; ++w)
      barrier_wait(Shape::full(shared, ring.stage, w), ring.parity);
    group_sync<kMatrixBarrier, kGroupThreads>();
#pragma unroll
    for (int h = 0; h < kTiles; ++h) {
      if (h == tiles) break;
      const int row = row_of_tile(h);
      float l[kGroupWarps];
#pragma unroll
      for (int w = 0; w < kGroupWarps; ++w)
        l[w] = load_shared(Shape::warp_sum(shared, w, row, lane % 4));
      float sum = ((l[0] + l[1]) + l[2]) + l[3];
      sum += __shfl_xor_sync(~0u, sum, 1);
      leaf.l[h] = sum + __shfl_xor_sync(~0u, sum, 2);
    }
    values();
    if (!whole && first_token != last_token) {
      float o[Shape::kTilesO][2 * kTiles];
      for (int32_t t = first_token; t <= last_token; ++t) {
        values_of_token<Shape, T>(Shape::p(shared), Shape::kv(shared, ring.stage), warp, lane,
                                  leaf_key, keys_of_token(a, set.position, set.kv_len, t), o[0]);
#pragma unroll
        for (int i = 0; i < Shape::kTilesO; ++i)
#pragma unroll
          for (int e = 0; e < 2 * kTiles; ++e) {
            if (token[e / 2] == t) leaf.o[i][e] = o[i][e];
          }
      }
    }
    __syncwarp();
    if (lane < kGroupWarps * kArrivingLanes)
      barrier_arrive(Shape::empty(shared, ring.stage, lane % kGroupWarps));
    for (int i = 1; kArrivingLanes == 32 && i < kGroupWarps; ++i)
      barrier_arrive(Shape::empty(shared, ring.stage, (lane + i) % kGroupWarps));
    ring.next();
  }

  /** o = p.v over the leaf. */
  __device__ __forceinline__ void values() {
    float d[Shape::kTilesO][4];
#pragma unroll
    for (int t = 0; t < Shape::kTilesO; ++t) d[t][0] = d[t][1] = d[t][2] = d[t][3] = 0.0f;
    const uint32_t p_base = Shape::p(shared), v_base = Shape::kv(shared, ring.stage);
    const int matrix = lane / 8, row = lane % 8;
    uint32_t p_pair[4];
#pragma unroll
    for (int step = 0; step < kLeaf / 16; ++step) {
      uint32_t p[4];
      if constexpr (kTiles == 1) {
        if (step % 2 == 0)
          load_matrices(p_pair, p_base + chunk_offset<kLeaf * 2>(row, 2 * step + matrix));
        p[0] = p_pair[2 * (step % 2)], p[1] = 0, p[2] = p_pair[2 * (step % 2) + 1], p[3] = 0;
      } else {
        load_matrices(
            p, p_base + chunk_offset<kLeaf * 2>(row + 8 * (matrix & 1), 2 * step + (matrix >> 1)));
      }
#pragma unroll
      for (int t = 0; t < Shape::kTilesO; t += 2) {
        uint32_t v[4];
        load_matrices_transposed(
            v, v_base + chunk_offset<Shape::kPitch>(step * 16 + 8 * (matrix & 1) + row,
                                                    warp * Shape::kTilesO + t + (matrix >> 1)));
        multiply_add<T>(d[t], p[0], p[1], p[2], p[3], v[0], v[1]);
        multiply_add<T>(d[t + 1], p[0], p[1], p[2], p[3], v[2], v[3]);
      }
    }
#pragma unroll
    for (int t = 0; t < Shape::kTilesO; ++t)
#pragma unroll
      for (int e = 0; e < 2 * kTiles; ++e) leaf.o[t][e] = d[t][e];
  }

  /** Element of o of the first of an accumulator's pair. */
  __device__ __forceinline__ int element(int tile) const {
    return warp * (Shape::kDim / kGroupWarps) + 8 * tile + 2 * (lane % 4);
  }

  /** `begins`: no state before it is of the same super-chunk. */
  __device__ __forceinline__ void write_state(int32_t index, const WarpState<Shape>& state,
                                              bool begins) {
    const int32_t width = a.problem.head_dim_vo;
#pragma unroll
    for (int h = 0; h < kTiles; ++h) {
      const int row = row_of_tile(h);
      if (row >= num_rows) continue;
      float* o = a.states +
                 static_cast<int64_t>(state_row(a, index, kv_head, row)) * state_pitch(a.problem);
#pragma unroll
      for (int t = 0; t < Shape::kTilesO; ++t) {
        if (element(t) < width)
          __stcg(reinterpret_cast<float2*>(o + element(t)),
                 make_float2(state.o[t][2 * h], state.o[t][2 * h + 1]));
      }
      if (warp == 0 && lane % 4 == 0)
        __stcg(reinterpret_cast<float4*>(o + width),
               make_float4(state.m[h], state.l[h], kTiles == 1 && begins ? 1.0f : 0.0f, 0.0f));
    }
  }

  __device__ __forceinline__ void write_rows(const RowSet& set) {
#pragma unroll
    for (int h = 0; h < kTiles; ++h) {
      const int row = row_of_tile(h);
      if (row >= num_rows) continue;
      const RowPlace at = place_of_row(a, set, kv_head, row);
      const RowEnd end = finish_row(a, at.head, total.m[h], total.l[h]);
      const int64_t o = o_offset(a, at);
#pragma unroll
      for (int t = 0; t < Shape::kTilesO; ++t) {
        if (element(t) < a.problem.head_dim_vo)
          write_pair<T>(a, o + element(t), total.o[t][2 * h] * end.factor,
                        total.o[t][2 * h + 1] * end.factor);
      }
      if (warp == 0 && lane % 4 == 0) write_lse(a, at, end);
    }
  }

  const AttendArgs& a;
  const uint32_t shared;
  const Range& range;
  int32_t kv_head;
  const int warp, lane;
  Ring<Shape::kStages> ring;
  Ring<Shape::kStagesQ> q_ring;
  QFragments q;
  VisibleKeys seen[kTiles], all_see;
  int32_t token[kTiles], first_token, last_token, num_rows;
  int tiles = kTiles;  // row tiles that have rows: the others take part in products alone
  WarpState<Shape> leaf, chunk, total;
};

}  // namespace attnfold::cuda
