// The loader warps of the small-row kernel: keys and values of one range, in the order in which
// they are needed.
#pragma once

#include "cuda/row_state.h"
#include "cuda/small_shape.cuh"

namespace attnfold::cuda {

/** Where one lane's key is.  `page` is not touched before it is used, a leaf later: it may still be
 * on its way. */
struct KeySource {
  int32_t page;  // ragged: the request's first row
  int32_t token;
  bool seen;  // by some row: the others are never read
};

__device__ __forceinline__ int32_t page_of(const AttendArgs& a, int32_t key) {
  return a.page_shift >= 0 ? key >> a.page_shift : key / a.problem.page_size;
}

/** Where key `key` of the request of `set` is. */
__device__ __forceinline__ KeySource find_key(const AttendArgs& a, const RowSet& set, int32_t key) {
  const VisibleKeys keys = seen_by_any(a.problem.mask, set);
  KeySource source{0, 0, key < keys.sink || (key >= keys.begin && key < keys.end)};
  if (!source.seen) return source;
  if (a.problem.ragged) {
    source.page = __ldcg(a.lengths.kv_indptr + set.request);
    source.token = key;
    return source;
  }
  const int32_t page = page_of(a, key);
  source.token = key - page * a.problem.page_size;
  source.page = __ldcg(pages_of(a.lengths, set.request) + page);
  return source;
}

/** The key of lane `lane` of loader warp `warp` on the walk's leaf. */
__device__ __forceinline__ KeySource find_key(const AttendArgs& a, const Walk& walk, int warp,
                                              int lane) {
  return find_key(a, walk.set, leaf_of(walk.set, walk.number) * kLeaf + warp * kWarpKeys + lane);
}

/** Brings to L2 the page ids that are asked for after those of the walk's leaf. */
__device__ __forceinline__ void prefetch_page_ids(const AttendArgs& a, const Walk& walk, int warp,
                                                  int lane) {
  if (a.problem.ragged || lane > 0 || walk.left < 2) return;
  const bool same_set = walk.number + 1 < walk.set.num_leaves;
  const int32_t request = same_set ? walk.set.request : walk.next_set.request;
  const int32_t leaf = same_set ? leaf_of(walk.set, walk.number + 1) : leaf_of(walk.next_set, 0);
  prefetch_to_l2(pages_of(a.lengths, request) + page_of(a, leaf * kLeaf + warp * kWarpKeys));
}

/** A pointer that the compiler keeps as it is, where it would add its parts up anew at each use. */
__device__ __forceinline__ const char* kept(const char* p) {
  asm volatile("mov.u64 %0, %0;" : "+l"(p));
  return p;
}

/** 16 bytes, around L1, that nobody reads again soon: they are the first to leave L2, where states,
 * queries and page ids stay instead. */
__device__ __forceinline__ void copy_16_once(uint32_t to, const void* from) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "l"(policy)
               : "memory");
}

/**
 * Copies one warp's keys of a leaf of K or V, whole rows of head_dim elements.
 *
 * Lanes stand in groups, as many as share a row's chunks; group g takes keys [g n, (g+1) n), one at
 * each step, so that the step alone says which lane knows the key's place: lane i knows that of key
 * i / kLanesOfKey.  Three instructions for each 16 bytes of a lane.
 */
template <class Shape>
class KeyCopier {
 public:
  static constexpr int kLanesOfKey = 32 / Shape::kCopyKeys;

  __device__ __forceinline__ KeyCopier(const AttendArgs& a, int32_t kv_head, int warp, int lane)
      : chunk(lane % kGroupLanes),
        first_row(warp * Shape::kCopyKeys + lane / kGroupLanes * kSteps),
        inside(chunk * 8 < a.problem.head_dim_vo),
        full_width(a.problem.head_dim_vo == Shape::kDim) {
    go_to(a, kv_head);
    first = chunk_offset<Shape::kPitch>(first_row, chunk);
  }

  __device__ __forceinline__ void go_to(const AttendArgs& a, int32_t kv_head) {
    k = kept(a.tensors.k.data + kv_head * a.tensors.k.stride_head * 2 + chunk * 16);
    v = kept(a.tensors.v.data + kv_head * a.tensors.v.stride_head * 2 + chunk * 16);
  }

  __device__ __forceinline__ void copy_k(const AttendArgs& a, const KeySource& source,
                                         uint32_t stage) const {
    copy(k, a.k_steps, source, stage);
  }
  __device__ __forceinline__ void copy_v(const AttendArgs& a, const KeySource& source,
                                         uint32_t stage) const {
    copy(v, a.v_steps, source, stage);
  }

 private:
  static constexpr int kGroupLanes = Shape::kPitch / 16 < 32 ? Shape::kPitch / 16 : 32;
  static constexpr int kSteps = Shape::kCopyKeys / (32 / kGroupLanes);
  static_assert(kSteps * kLanesOfKey == kGroupLanes);
  // What first_row adds to the exchange of chunks stays the same from step to step.
  static_assert(kSteps % 8 == 0 || 8 % kSteps == 0);

  __device__ __forceinline__ void copy(const char* base, const KvSteps& steps,
                                       const KeySource& source, uint32_t stage) const {
    // Keys stand in lanes in order; step i of group g needs the place of key g * kSteps + i.
    const uint32_t place = static_cast<uint32_t>(source.page) * steps.page +
                           static_cast<uint32_t>(source.token) * steps.token;
    const uint32_t seen = __ballot_sync(~0u, source.seen);
    if (seen == ~0u && full_width) {
      const uint32_t to = stage + first;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {  // chunk_offset(first_row + i, chunk): stages are aligned
        const uint32_t at = __shfl_sync(~0u, place, i * kLanesOfKey, kGroupLanes);
        const uint32_t to_i = (to ^ (i % 8 << 4)) + i * Shape::kPitch;
        const char* const from = base + static_cast<uint64_t>(at) * steps.unit_bytes;
        if constexpr (Shape::kReadsAgain) {
          copy_16(to_i, from);
        } else {
          copy_16_once(to_i, from);
        }
      }
      return;
    }
#pragma unroll 2
    for (int i = 0; i < kSteps; ++i) {
      const uint32_t at = __shfl_sync(~0u, source.seen ? place : 0, i * kLanesOfKey, kGroupLanes);
      const int knows = threadIdx.x % 32 / kGroupLanes * kGroupLanes + i * kLanesOfKey;
      const bool valid = (seen >> knows) & 1;
      if (inside)
        copy_16_or_zeros(stage + chunk_offset<Shape::kPitch>(first_row + i, chunk),
                         base + static_cast<uint64_t>(at) * steps.unit_bytes, valid);
    }
  }

  const int chunk, first_row;
  const bool inside, full_width;  // this lane's chunk lies in the head dim; all lanes' do
  const char *k, *v;
  uint32_t first;  // offset of the lane's first 16 bytes
};

/** Copies thread `thread`'s share of the rows of q of a row set, kRows from `first` on; rows that
 * it lacks become 0. */
template <class Shape, int kRows, int kThreads>
__device__ __forceinline__ void copy_queries(const AttendArgs& a, const RowSet& set,
                                             int32_t kv_head, int first, int thread, uint32_t to) {
  constexpr int kChunks = Shape::kPitch / 16;
  const View<const char>& q = a.tensors.q;
#pragma unroll 1
  for (int i = thread; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (chunk * 8 >= a.problem.head_dim_qk) continue;
    const bool valid = first + row < set.num_rows;
    const RowPlace at = place_of_row(a, set, kv_head, valid ? first + row : 0);
    copy_16_or_zeros(
        to + chunk_offset<Shape::kPitch>(row, chunk),
        q.data + (at.token * q.stride_token + at.head * q.stride_head) * 2 + chunk * 16, valid);
  }
}

/** Asks for the lane's row of keys or values: it comes to L2. */
template <class Tensor>
__device__ __forceinline__ void prefetch_row(const AttendArgs& a, const Tensor& tensor,
                                             const KvSteps& steps, const KeySource& source,
                                             int32_t kv_head) {
  const uint32_t place = static_cast<uint32_t>(source.page) * steps.page +
                         static_cast<uint32_t>(source.token) * steps.token;
  const char* const row = tensor.data + kv_head * tensor.stride_head * 2 +
                          static_cast<uint64_t>(place) * steps.unit_bytes;
#pragma unroll 2
  for (int32_t at = 0; at < 2 * a.problem.head_dim_vo; at += 128) prefetch_to_l2(row + at);
}

/** Loader warp 0 hands the range that lane 0 claimed as number `pair` to all warps. */
template <class Shape>
__device__ __forceinline__ void publish_claim(const AttendArgs& a, uint32_t shared, int stage,
                                              uint32_t pair, int lane) {
  constexpr int kWords = sizeof(Range) / 4, kHead = offsetof(Range, kv_head) / 4;
  static_assert(kWords <= 32);
  pair = __shfl_sync(~0u, pair, 0);
  const uint32_t heads = gridDim.x, index = pair / heads;
  const bool some = index < static_cast<uint32_t>(__ldcg(&a.schedule.ranges->num_claimed));
  uint32_t word = 0;  // no leaves
  if (some && lane < kWords)
    word = __ldcg(reinterpret_cast<const uint32_t*>(a.schedule.claimed + index) + lane);
  if (lane == kHead) word = pair - index * heads;
  if (lane < kWords) store_shared(Shape::claim(shared, stage) + 4 * lane, word);
  __syncwarp();
  if (lane < kArrivingLanes) barrier_arrive(Shape::full_claim(shared, stage));
}

/** Everything that the loaders do of a range, and of those claimed after it.  Called before the
 * kernel waits for those before it: what the last update left behind is read at once, tensors only
 * after the wait. */
template <class Shape>
__device__ __forceinline__ void load_range(const AttendArgs& a, uint32_t shared, const Range& range,
                                           int32_t kv_head, int warp, int lane) {
  Walk walk(a, range);
  KeySource source{};
  if (walk.left > 0) source = find_key(a, walk, warp, lane);
  KeyCopier<Shape> copier(a, kv_head, warp, lane);
  Ring<Shape::kStages> ring;
  Ring<Shape::kStagesQ> q;
  // In a long range there is time before the wait: its first leaf comes to L2 while other kernels
  // end.  What they write to it then is not lost: L2 has one copy.
  constexpr int32_t kLongRange = 24;  // leaves
  if (Shape::kRowTiles == 1 && walk.left >= kLongRange && source.seen) {
    prefetch_row(a, a.tensors.k, a.k_steps, source, kv_head);
    prefetch_row(a, a.tensors.v, a.v_steps, source, kv_head);
  }
  // A range is claimed when the last leaf of the one before is next to be copied, handed on before
  // that is, and entered after its keys: each step has a wait for room to take place in.
  Claims<Shape> claims(range);
  uint32_t pair = 0;  // lane 0's of warp 0
  wait_to_begin(a);
  let_next_kernel_start();
  if (claims.more() && walk.left == 1 && threadIdx.x == 0) pair = atomicAdd(a.claimed, 1u);
  while (walk.left > 0) {
    const KeySource here = source;
    const bool last = claims.more() && walk.left == 1;
    if (last && warp == 0) publish_claim<Shape>(a, shared, claims.stage(), pair, lane);
    barrier_wait(Shape::empty(shared, ring.stage, warp), ring.parity ^ 1);
    copier.copy_k(a, here, Shape::kv(shared, ring.stage));
    barrier_arrive_after_copies(Shape::full(shared, ring.stage, warp));
    if (walk.new_set) {
      // The matrix warps are done with this stage: they have freed a leaf that came after its rows.
      copy_queries<Shape, Shape::kRows, kGroupThreads>(a, walk.set, kv_head, 0, warp * 32 + lane,
                                                       Shape::q(shared, q.stage));
      barrier_arrive_after_copies(Shape::full_q(shared, q.stage));
      q.next();
    }
    ring.next();
    walk.step(a);
    if (last) claims.enter_next(a, shared, walk, kv_head);
    if (walk.left > 0) {  // page ids are asked for a leaf ahead
      if (claims.more() && walk.left == 1 && threadIdx.x == 0) pair = atomicAdd(a.claimed, 1u);
      source = find_key(a, walk, warp, lane);
    }
    barrier_wait(Shape::empty(shared, ring.stage, warp), ring.parity ^ 1);
    copier.copy_v(a, here, Shape::kv(shared, ring.stage));
    barrier_arrive_after_copies(Shape::full(shared, ring.stage, warp));
    ring.next();
    if (last) copier.go_to(a, kv_head);
    prefetch_page_ids(a, walk, warp, lane);
  }
}

/** Rows without a key, dealt to all blocks. */
template <class T>
__device__ __forceinline__ void write_empty_rows(const AttendArgs& a, int thread) {
  const int64_t count = static_cast<int64_t>(a.schedule.counts->empty_sets) * a.problem.kv_heads;
  const int64_t blocks = int64_t{gridDim.x} * gridDim.y;
  for (int64_t i = int64_t{blockIdx.y} * gridDim.x + blockIdx.x; i < count; i += blocks) {
    const RowSet& set = a.schedule.sets[a.schedule.max_sets - 1 - i / a.problem.kv_heads];
    for (int row = 0; row < set.num_rows; ++row) {
      const RowPlace at = place_of_row(a, set, static_cast<int32_t>(i % a.problem.kv_heads), row);
      const int64_t o = o_offset(a, at);
      for (int d = 2 * thread; d < a.problem.head_dim_vo; d += 2 * kGroupThreads)
        write_pair<T>(a, o + d, 0.0f, 0.0f);
      if (thread == 0) write_lse(a, at, finish_row(a, at.head, kEmpty, 0.0f));
    }
  }
}

}  // namespace attnfold::cuda
