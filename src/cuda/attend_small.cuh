// Attention of a few rows on many keys: decode steps and speculative verification.  bf16 and fp16, tensor cores of sm_80
// and later.
//
// A worker (one block) takes a range of leaves for one kv head.  Four loader warps bring K and V; four matrix warps make
// the leaf's state and fold it.  Per leaf of 128 keys, for R <= 16 rows and head dim D:
//   K, V   global -> shared   2 * 128 * D * 2 bytes, each byte once; loader warp w brings keys [32 w, 32 w + 32)
//   S      [R, 128] registers matrix warp w makes keys [32 w, 32 w + 32)
//   P      [R, 128] shared    16-bit; every warp needs all of it
//   O      [R, D] registers   matrix warp w makes elements [w D/4, (w+1) D/4): three copies, of the leaf, its super-chunk
//                             and the row, so that no state moves until a range or a row ends
// Splitting keys for S and elements for O needs no exchange of O, and makes the number of warps invisible to the result.
//
// What the bits hang on, besides the canonical fold:
//   1. q.k: k steps of 16, ascending, into an accumulator that starts at 0;
//   2. m = c * max(q.k), p = 2^(fma(q.k, c, -m));
//   3. l: each lane's keys of a warp one after the other, then the warps in order, then lanes 1 and 2 apart;
//   4. o: p rounded to the 16-bit type of V, keys ascending, into an accumulator that starts at 0.
#pragma once

#include "cuda/attend.h"
#include "cuda/ptx.h"
#include "cuda/row_state.h"

namespace attnfold::cuda {

constexpr int kGroupWarps = 4;  // loaders, and matrix warps
constexpr int kGroupThreads = kGroupWarps * 32;
constexpr int kBlockThreads = 2 * kGroupThreads;
constexpr int kWarpKeys = kLeaf / kGroupWarps;
constexpr int kMatrixBarrier = 1;

#if defined(ATTNFOLD_EVERY_LANE_ARRIVES)  // for racecheck, which does not know that a lane can arrive for its warp
constexpr int kArrivingLanes = 32;
#else
constexpr int kArrivingLanes = 1;
#endif

/** Compile-time sizes.  kDim is the head dim in shared memory and registers: the true one, rounded up to 64, 128 or 256. */
template <int kDim_, int kRowTiles_>
struct SmallShape {
  static constexpr int kDim = kDim_;
  static constexpr int kRowTiles = kRowTiles_;  // of 8 rows
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kPitch = kDim * 2;        // bytes of a row of K, V and Q
  static constexpr int kStagesK = kDim == 64 ? 2 : 1;
  static constexpr int kStagesV = 2;
  static constexpr int kStagesQ = kStagesK + 1;  // a loader is at most kStagesK row sets ahead of the slowest matrix warp
  static constexpr int kBlocksPerSm = kDim == 256 ? 1 : 2;
  static constexpr int kTilesO = kDim / kGroupWarps / 8;  // tiles of 8 elements that a matrix warp makes
  static constexpr int kTilesS = kWarpKeys / 8;           // tiles of 8 keys

  struct alignas(128) Shared {
    unsigned char k[kStagesK][kLeaf * kPitch];
    unsigned char v[kStagesV][kLeaf * kPitch];
    unsigned char q[kStagesQ][kRows * kPitch];
    unsigned char p[kRows * kLeaf * 2];
    float warp_max[kGroupWarps][kRows];
    float warp_sum[kGroupWarps][kRows][4];
    uint64_t full_k[kStagesK][kGroupWarps], empty_k[kStagesK][kGroupWarps];  // one for each loader warp's keys
    uint64_t full_v[kStagesV][kGroupWarps], empty_v[kStagesV][kGroupWarps];
    uint64_t full_q[kStagesQ];
  };
};

/** Byte offset of 16-byte chunk `chunk` of a row.  Rows' chunks are exchanged so that the same chunk of 8 rows, which
 * ldmatrix reads at once, lies in 8 different banks. */
template <int kPitch>
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
  return static_cast<uint32_t>(row * kPitch + ((chunk ^ (row & 7)) << 4));
}

/** A place in a ring of `kStages` buffers. */
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/** A worker's way along its range, leaf by leaf. */
struct Walk {
  RowSet set, next_set;
  int32_t set_index, number, left;
  bool new_set;

  __device__ __forceinline__ Walk(const AttendArgs& a, int32_t range) {
    const RangeSchedule& s = a.schedule;
    left = s.cuts[range + 1] - s.cuts[range];
    set_index = s.range_set[range];
    if (left <= 0) return;
    set = s.sets[set_index];
    number = s.cuts[range] - set.start;
    prefetch(a);
    new_set = true;
  }
  __device__ __forceinline__ void step(const AttendArgs& a) {
    new_set = false;
    if (--left == 0 || ++number < set.num_leaves) return;
    set = next_set;
    ++set_index;
    number = 0;
    new_set = true;
    prefetch(a);
  }

 private:
  __device__ __forceinline__ void prefetch(const AttendArgs& a) {
    // A range that goes on has a set to go on to; for the others any readable entry will do.
    if (left > set.num_leaves - number) next_set = a.schedule.sets[set_index + 1];
  }
};

// ------------------------------------------------------------------------------------------------ loaders

/** Where one lane's key is. */
struct KeySource {
  int64_t page;
  int32_t token;
  bool seen;  // by some row: the others are never read
};

/** The key of lane `lane` of loader warp `warp` on the walk's leaf. */
__device__ __forceinline__ KeySource find_key(const AttendArgs& a, const Walk& walk, const VisibleKeys& keys, int warp,
                                              int lane) {
  const int32_t key = leaf_of(walk.set, walk.number) * kLeaf + warp * kWarpKeys + lane;
  KeySource source{0, 0, key < keys.sink || (key >= keys.begin && key < keys.end)};
  if (!source.seen) return source;
  if (a.problem.ragged) {
    source.page = a.lengths.kv_indptr[walk.set.request];  // as tokens, below
    source.token = key;
    return source;
  }
  const int32_t page = key / a.problem.page_size;
  source.token = key - page * a.problem.page_size;
  source.page = pages_of(a.lengths, walk.set.request)[page];
  return source;
}

/** Copies this warp's keys of one leaf of K or V, whole rows of head_dim elements. */
template <class Shape>
__device__ __forceinline__ void copy_keys(const AttendArgs& a, const View<const char>& view, int32_t kv_head,
                                          const KeySource& source, int warp, int lane, unsigned char* stage) {
  constexpr int kLanesPerKey = Shape::kPitch / 16 < 32 ? Shape::kPitch / 16 : 32;
  constexpr int kKeysPerStep = 32 / kLanesPerKey;
  const int chunk = lane % kLanesPerKey, first = lane / kLanesPerKey;
  const int64_t offset = a.problem.ragged ? (source.page + source.token) * view.stride_token
                                          : source.page * view.stride_page + source.token * view.stride_token;
  const int64_t mine = source.seen ? offset * 2 : 0;
  const char* base = view.data + (kv_head * view.stride_head) * 2 + chunk * 16;
  const uint32_t seen = __ballot_sync(~0u, source.seen);
  const uint32_t to = shared_address(stage);
  const bool inside = chunk * 8 < a.problem.head_dim_vo;
#pragma unroll
  for (int i = 0; i < kWarpKeys; i += kKeysPerStep) {
    const int key = i + first;
    const int64_t at = __shfl_sync(~0u, mine, key);
    if (inside) copy_16(to + chunk_offset<Shape::kPitch>(warp * kWarpKeys + key, chunk), base + at, (seen >> key) & 1);
  }
}

/** Copies the rows of q of the walk's row set; rows that it lacks become 0. */
template <class Shape>
__device__ __forceinline__ void copy_queries(const AttendArgs& a, const RowSet& set, int32_t kv_head, int lane,
                                             unsigned char* stage) {
  constexpr int kChunks = Shape::kPitch / 16;
  const uint32_t to = shared_address(stage);
  const View<const char>& q = a.tensors.q;
  for (int i = lane; i < Shape::kRows * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (chunk * 8 >= a.problem.head_dim_qk) continue;
    const bool valid = row < set.num_rows;
    const RowPlace at = place_of_row(a, set, kv_head, valid ? row : 0);
    copy_16(to + chunk_offset<Shape::kPitch>(row, chunk),
            q.data + (at.token * q.stride_token + at.head * q.stride_head) * 2 + chunk * 16, valid);
  }
}

template <class Shape>
__device__ __forceinline__ void load_range(const AttendArgs& a, typename Shape::Shared& shared, int32_t range,
                                           int32_t kv_head, int warp, int lane) {
  Walk walk(a, range);
  if (walk.left <= 0) return;
  Ring<Shape::kStagesK> k;
  Ring<Shape::kStagesV> v;
  Ring<Shape::kStagesQ> q;
  VisibleKeys keys = seen_by_any(a.shape, a.problem.mask, walk.set);
  KeySource source = find_key(a, walk, keys, warp, lane);
  while (walk.left > 0) {
    const KeySource here = source;
    const bool new_set = walk.new_set;
    const RowSet set = walk.set;
    walk.step(a);
    if (walk.left > 0) {  // page ids are asked for a leaf ahead
      if (walk.new_set) keys = seen_by_any(a.shape, a.problem.mask, walk.set);
      source = find_key(a, walk, keys, warp, lane);
    }
    barrier_wait(&shared.empty_k[k.stage][warp], k.parity ^ 1);
    if (new_set && warp == 0) {
      copy_queries<Shape>(a, set, kv_head, lane, shared.q[q.stage]);
      barrier_arrive_after_copies(&shared.full_q[q.stage]);
      q.next();
    }
    copy_keys<Shape>(a, a.tensors.k, kv_head, here, warp, lane, shared.k[k.stage]);
    barrier_arrive_after_copies(&shared.full_k[k.stage][warp]);
    k.next();
    barrier_wait(&shared.empty_v[v.stage][warp], v.parity ^ 1);
    copy_keys<Shape>(a, a.tensors.v, kv_head, here, warp, lane, shared.v[v.stage]);
    barrier_arrive_after_copies(&shared.full_v[v.stage][warp]);
    v.next();
  }
}

/** Rows without a key, dealt to all blocks. */
template <class T>
__device__ __forceinline__ void write_empty_rows(const AttendArgs& a, int thread) {
  const int64_t count = static_cast<int64_t>(a.schedule.counts->empty_sets) * a.problem.kv_heads;
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const RowSet& set = a.schedule.sets[a.schedule.max_sets - 1 - i / a.problem.kv_heads];
    for (int row = 0; row < set.num_rows; ++row) {
      const RowPlace at = place_of_row(a, set, static_cast<int32_t>(i % a.problem.kv_heads), row);
      const int64_t o = o_offset(a, at);
      for (int d = 2 * thread; d < a.problem.head_dim_vo; d += 2 * kGroupThreads) write_pair<T>(a, o + d, 0.0f, 0.0f);
      if (thread == 0) write_lse(a, at, finish_row(a, at.head, kEmpty, 0.0f).lse);
    }
  }
}

// ------------------------------------------------------------------------------------------------ matrix warps

/** One warp's part of the states of its rows: m and l of rows lane / 4 (+ 8), and the elements of o that the warp makes. */
template <class Shape>
struct WarpState {
  float m[Shape::kRowTiles], l[Shape::kRowTiles];
  float o[Shape::kTilesO][2 * Shape::kRowTiles];  // elements 2 * (lane % 4) + {0, 1} of a tile, for each row

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

  /** this = fold(this, b). */
  __device__ __forceinline__ void fold(const WarpState& b) {
#pragma unroll
    for (int h = 0; h < Shape::kRowTiles; ++h) {
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

template <class Shape, class T>
class MatrixWarp {
 public:
  __device__ __forceinline__ MatrixWarp(const AttendArgs& args, typename Shape::Shared& shared_in, int32_t range_in,
                                        int32_t kv_head_in, int warp_in, int lane_in)
      : a(args), shared(shared_in), range(range_in), kv_head(kv_head_in), warp(warp_in), lane(lane_in) {}

  __device__ __forceinline__ void run() {
    Walk walk(a, range);
    if (walk.left <= 0) return;
    int32_t entry = walk.number;  // where the range enters the row set
    total.clear();
    while (walk.left > 0) {
      if (walk.new_set) open_set(walk.set);
      leaf_state(walk.set, walk.number);
      const int32_t number = walk.number, last = walk.left == 1;
      const RowSet& set = walk.set;
      const bool row_ends = number + 1 == set.num_leaves;
      const int32_t begin = chunk_begin(set, number);
      if (begin < entry) {
        write_state(number - entry, leaf);
      } else {
        if (number == begin) chunk.clear();
        chunk.fold(leaf);
        const bool chunk_ends = number + 1 == chunk_end(set, number);
        if (entry > 0) {
          if (chunk_ends || last) write_state(slot_of(set, entry, begin), chunk);
        } else {
          if (chunk_ends) total.fold(chunk);
          if (row_ends) {
            write_rows(set);
          } else if (last) {
            if (!chunk_ends) write_state(prefix_slot(a.shape), chunk);
            if (chunk_ends || begin > 0) write_state(row_slot(a.shape), total);
          }
        }
      }
      walk.step(a);
      if (walk.new_set && walk.left > 0) {
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
    barrier_wait(&shared.full_q[q_ring.stage], q_ring.parity);
    const uint32_t base = shared_address(shared.q[q_ring.stage]);
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
        load_matrices(r, base + chunk_offset<Shape::kPitch>(row + 8 * (matrix & 1), 2 * s + (matrix >> 1)));
#pragma unroll
        for (int i = 0; i < 4; ++i) q[s][i] = r[i];
      }
    }
    q_ring.next();
    const int32_t group = a.shape.group_size;
#pragma unroll
    for (int h = 0; h < kTiles; ++h) {
      const int32_t r_h = row_of_tile(h) < set.num_rows ? row_of_tile(h) : set.num_rows - 1;
      token[h] = (set.row_begin + r_h) / group;
      seen[h] = keys_of_row(a, set, r_h);
    }
    first_token = set.row_begin / group;
    last_token = (set.row_begin + set.num_rows - 1) / group;
    const VisibleKeys first = keys_of_row(a, set, 0), last = keys_of_row(a, set, set.num_rows - 1);
    all_see = {first.sink < last.sink ? first.sink : last.sink, last.begin, first.end};
    num_rows = set.num_rows;
  }

  __device__ __forceinline__ int row_of_tile(int h) const { return 8 * h + lane / 4; }

  /** Element e of an accumulator belongs to row tile e / 2; as a key, it is number 2 * (lane % 4) + e % 2 of its tile. */
  __device__ __forceinline__ int32_t key_of(int32_t first_key, int tile, int e) const {
    return first_key + 8 * tile + 2 * (lane % 4) + (e & 1);
  }

  __device__ __forceinline__ static bool sees(const VisibleKeys& keys, int32_t key) {
    return key < keys.sink || (key >= keys.begin && key < keys.end);
  }

  /** s = q.k for this warp's keys. */
  __device__ __forceinline__ void scores(float (&s)[Shape::kTilesS][4]) {
#pragma unroll
    for (int t = 0; t < Shape::kTilesS; ++t) s[t][0] = s[t][1] = s[t][2] = s[t][3] = 0.0f;
    const uint32_t base = shared_address(shared.k[k_ring.stage]);
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

  /** Soft-cap and ALiBi, in the log2 domain. */
  __device__ __forceinline__ void modify(float (&s)[Shape::kTilesS][4], const RowSet& set, int32_t first_key) {
#pragma unroll
    for (int h = 0; h < kTiles; ++h) {
      const float* slopes = a.tensors.alibi_slopes;
      const int32_t r_h = row_of_tile(h) < num_rows ? row_of_tile(h) : num_rows - 1;
      const float slope = slopes ? slopes[place_of_row(a, set, kv_head, r_h).head] * kLog2E : 0.0f;
      const int32_t position = set.position + token[h];
#pragma unroll
      for (int t = 0; t < Shape::kTilesS; ++t)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          float x = a.problem.softcap != 0.0f ? tanh_f32(s[t][e] * a.problem.softcap_scale) * a.problem.softcap_log2
                                              : s[t][e] * a.problem.score_scale;
          if (slopes) x = lane::fma(slope, static_cast<float>(key_of(first_key, t, e) - position), x);
          s[t][e] = x;
        }
    }
  }

  /** Fills `leaf` with the state of the walk's leaf. */
  __device__ __forceinline__ void leaf_state(const RowSet& set, int32_t number) {
    const int32_t leaf_key = leaf_of(set, number) * kLeaf;
    const int32_t first_key = leaf_key + warp * kWarpKeys;
    float s[Shape::kTilesS][4];
    barrier_wait(&shared.full_k[k_ring.stage][warp], k_ring.parity);
    scores(s);
    __syncwarp();
    if (lane < kArrivingLanes) barrier_arrive(&shared.empty_k[k_ring.stage][warp]);
    k_ring.next();

    float c = a.problem.score_scale;
    if (a.problem.softcap != 0.0f || a.tensors.alibi_slopes) {
      modify(s, set, first_key);
      c = 1.0f;
    }
    const bool whole = leaf_key + kLeaf <= all_see.sink || (leaf_key >= all_see.begin && leaf_key + kLeaf <= all_see.end);
    bool any[kTiles];
    float largest[kTiles];
#pragma unroll
    for (int h = 0; h < kTiles; ++h) {
      const VisibleKeys& keys = seen[h];
      any[h] = whole || leaf_key < keys.sink ||
               (leaf_key < keys.end && leaf_key + kLeaf > keys.begin && keys.begin < keys.end);
      largest[h] = any[h] ? kLowest : kEmpty;
#pragma unroll
      for (int t = 0; t < Shape::kTilesS; ++t)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          if (!whole && !sees(keys, key_of(first_key, t, e))) continue;
          largest[h] = fmaxf(largest[h], s[t][e]);
        }
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
      if (lane % 4 == 0) shared.warp_max[warp][row_of_tile(h)] = largest[h];
    }
    group_sync<kMatrixBarrier, kGroupThreads>();

    const uint32_t p_base = shared_address(shared.p);
#pragma unroll
    for (int h = 0; h < kTiles; ++h) {
      const int row = row_of_tile(h);
      const float qk = fmaxf(fmaxf(shared.warp_max[0][row], shared.warp_max[1][row]),
                             fmaxf(shared.warp_max[2][row], shared.warp_max[3][row]));
      leaf.m[h] = any[h] ? fmaxf(c * qk, kLowest) : kEmpty;
      float sum = 0.0f;
#pragma unroll
      for (int t = 0; t < Shape::kTilesS; ++t) {
        float p[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          p[i] = exp2_fast(lane::fma(s[t][2 * h + i], c, -leaf.m[h]));
          if (!whole && !sees(seen[h], key_of(first_key, t, i))) p[i] = 0.0f;
          sum += p[i];
        }
        const uint32_t at = chunk_offset<kLeaf * 2>(row, warp * (kWarpKeys / 8) + t) + (lane % 4) * 4;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(p_base + at), "r"(pack<T>(p[0], p[1])) : "memory");
      }
      shared.warp_sum[warp][row][lane % 4] = sum;
    }
    group_sync<kMatrixBarrier, kGroupThreads>();
#pragma unroll
    for (int h = 0; h < kTiles; ++h) {
      const int row = row_of_tile(h);
      float sum = ((shared.warp_sum[0][row][lane % 4] + shared.warp_sum[1][row][lane % 4]) +
                   shared.warp_sum[2][row][lane % 4]) +
                  shared.warp_sum[3][row][lane % 4];
      sum += __shfl_xor_sync(~0u, sum, 1);
      leaf.l[h] = sum + __shfl_xor_sync(~0u, sum, 2);
    }
    if (whole || first_token == last_token) {
      values<false>(leaf.o, leaf_key, {});
    } else {
      values_by_token(set, leaf_key);
    }
    __syncwarp();
    if (lane < kGroupWarps * kArrivingLanes) barrier_arrive(&shared.empty_v[v_ring.stage][lane % kGroupWarps]);
    if (kArrivingLanes == 32) {
      for (int w = 1; w < kGroupWarps; ++w) barrier_arrive(&shared.empty_v[v_ring.stage][(lane + w) % kGroupWarps]);
    }
    v_ring.next();
  }

  /** o = p.v over the leaf, for all rows; with kMasked, values of keys outside `keys` count as 0 whatever they are. */
  template <bool kMasked>
  __device__ __forceinline__ void values(float (&o)[Shape::kTilesO][2 * kTiles], int32_t leaf_key, const VisibleKeys& keys) {
    float d[Shape::kTilesO][4];
#pragma unroll
    for (int t = 0; t < Shape::kTilesO; ++t) d[t][0] = d[t][1] = d[t][2] = d[t][3] = 0.0f;
    const uint32_t p_base = shared_address(shared.p), v_base = shared_address(shared.v[v_ring.stage]);
    const int matrix = lane / 8, row = lane % 8;
#pragma unroll
    for (int w = 0; w < kGroupWarps; ++w) barrier_wait(&shared.full_v[v_ring.stage][w], v_ring.parity);
    uint32_t p_pair[4];
#pragma unroll
    for (int step = 0; step < kLeaf / 16; ++step) {
      uint32_t p[4];
      if constexpr (kTiles == 1) {
        if (step % 2 == 0) load_matrices(p_pair, p_base + chunk_offset<kLeaf * 2>(row, 2 * step + matrix));
        p[0] = p_pair[2 * (step % 2)], p[1] = 0, p[2] = p_pair[2 * (step % 2) + 1], p[3] = 0;
      } else {
        load_matrices(p, p_base + chunk_offset<kLeaf * 2>(row + 8 * (matrix & 1), 2 * step + (matrix >> 1)));
      }
#pragma unroll
      for (int t = 0; t < Shape::kTilesO; t += 2) {
        uint32_t v[4];
        load_matrices_transposed(v, v_base + chunk_offset<Shape::kPitch>(step * 16 + 8 * (matrix & 1) + row,
                                                                          warp * Shape::kTilesO + t + (matrix >> 1)));
        if constexpr (kMasked) {
#pragma unroll
          for (int i = 0; i < 4; ++i) v[i] = masked(v[i], leaf_key + step * 16 + 8 * (i & 1) + 2 * (lane % 4), keys);
        }
        multiply_add<T>(d[t], p[0], p[1], p[2], p[3], v[0], v[1]);
        multiply_add<T>(d[t + 1], p[0], p[1], p[2], p[3], v[2], v[3]);
      }
    }
#pragma unroll
    for (int t = 0; t < Shape::kTilesO; ++t)
#pragma unroll
      for (int e = 0; e < 2 * kTiles; ++e) o[t][e] = d[t][e];
  }

  /** Two values, of keys `key` and the next: those outside `keys` replaced by 0. */
  __device__ __forceinline__ static uint32_t masked(uint32_t pair, int32_t key, const VisibleKeys& keys) {
    return (sees(keys, key) ? pair & 0xffffu : 0u) | (sees(keys, key + 1) ? pair & 0xffff0000u : 0u);
  }

  /** The same where rows see different keys: 0 times a NaN that a row may not see would reach it, so each token's rows get
   * a product of their own. */
  __device__ __forceinline__ void values_by_token(const RowSet& set, int32_t leaf_key) {
#pragma unroll 1
    for (int32_t t = first_token; t <= last_token; ++t) {
      float o[Shape::kTilesO][2 * kTiles];
      values<true>(o, leaf_key, visible_keys(a.problem.mask, set.kv_len - set.position, set.kv_len, t));
#pragma unroll
      for (int i = 0; i < Shape::kTilesO; ++i)
#pragma unroll
        for (int e = 0; e < 2 * kTiles; ++e) {
          if (token[e / 2] == t) leaf.o[i][e] = o[i][e];
        }
    }
  }

  /** Element of o of the first of an accumulator's pair. */
  __device__ __forceinline__ int element(int tile) const { return warp * (Shape::kDim / kGroupWarps) + 8 * tile + 2 * (lane % 4); }

  __device__ __forceinline__ void write_state(int32_t slot, const WarpState<Shape>& state) {
#pragma unroll
    for (int h = 0; h < kTiles; ++h) {
      const int row = row_of_tile(h);
      if (row >= num_rows) continue;
      const int64_t at = state_row(a, range, kv_head, slot, row);
      float* o = a.state_o + at * a.problem.head_dim_vo;
#pragma unroll
      for (int t = 0; t < Shape::kTilesO; ++t) {
        if (element(t) < a.problem.head_dim_vo)
          __stcg(reinterpret_cast<float2*>(o + element(t)), make_float2(state.o[t][2 * h], state.o[t][2 * h + 1]));
      }
      if (warp == 0 && lane % 4 == 0) __stcg(a.state_ml + at, make_float2(state.m[h], state.l[h]));
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
          write_pair<T>(a, o + element(t), total.o[t][2 * h] * end.factor, total.o[t][2 * h + 1] * end.factor);
      }
      if (warp == 0 && lane % 4 == 0) write_lse(a, at, end.lse);
    }
  }

  const AttendArgs& a;
  typename Shape::Shared& shared;
  const int32_t range, kv_head;
  const int warp, lane;
  Ring<Shape::kStagesK> k_ring;
  Ring<Shape::kStagesV> v_ring;
  Ring<Shape::kStagesQ> q_ring;
  QFragments q;
  VisibleKeys seen[kTiles], all_see;
  int32_t token[kTiles], first_token, last_token, num_rows;
  WarpState<Shape> leaf, chunk, total;
};

template <class Shape>
__device__ __forceinline__ void init_shared(typename Shape::Shared& shared, int32_t head_dim) {
  if (threadIdx.x == 0) {
    for (int w = 0; w < kGroupWarps; ++w) {
      for (int i = 0; i < Shape::kStagesK; ++i) {
        barrier_init(&shared.full_k[i][w], 32);
        barrier_init(&shared.empty_k[i][w], kArrivingLanes);
      }
      for (int i = 0; i < Shape::kStagesV; ++i) {
        barrier_init(&shared.full_v[i][w], 32);
        barrier_init(&shared.empty_v[i][w], kGroupWarps * kArrivingLanes);
      }
    }
    for (int i = 0; i < Shape::kStagesQ; ++i) barrier_init(&shared.full_q[i], 32);
  }
  if (head_dim < Shape::kDim) {  // elements that no copy fills
    uint4* data = reinterpret_cast<uint4*>(&shared);
    const int n = (sizeof(shared.k) + sizeof(shared.v) + sizeof(shared.q)) / sizeof(uint4);
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kBlockThreads) data[i] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
}

template <class Shape, class T>
__global__ void __launch_bounds__(kBlockThreads, Shape::kBlocksPerSm) attend_small(const __grid_constant__ AttendArgs a) {
  extern __shared__ __align__(128) unsigned char memory[];
  typename Shape::Shared& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
  init_shared<Shape>(shared, a.problem.head_dim_vo);
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int32_t kv_head = static_cast<int32_t>(blockIdx.x % a.problem.kv_heads);
  const int32_t range = static_cast<int32_t>(blockIdx.x / a.problem.kv_heads);
  const int warp = static_cast<int>(threadIdx.x / 32 % kGroupWarps), lane = static_cast<int>(threadIdx.x % 32);
  if (threadIdx.x < kGroupThreads) {
    if constexpr (Shape::kBlocksPerSm == 2) give_registers<64>();
    load_range<Shape>(a, shared, range, kv_head, warp, lane);
    write_empty_rows<T>(a, static_cast<int>(threadIdx.x));
  } else {
    if constexpr (Shape::kBlocksPerSm == 2) take_registers<192>();
    MatrixWarp<Shape, T>(a, shared, range, kv_head, warp, lane).run();
  }
}

}  // namespace attnfold::cuda
