// The loading warpgroup of the large-row kernel.  Warp 0 brings keys and warp 1 values, 16 keys a
// copy, by the tensor copy engine; warps 2 and 3 bring queries.
#pragma once

#include "cuda/large_shape.cuh"
#include "cuda/row_state.h"

namespace attnfold::cuda {

/** Pair `index` of the schedule. */
struct TilePair {
  RowSet set;
  int32_t kv_head;
};
__device__ __forceinline__ TilePair pair_at(const AttendArgs& a, int32_t index) {
  return {load_from_l2(a.schedule.tiles + index / a.problem.kv_heads), index % a.problem.kv_heads};
}

/** Keys of a half's rows: those that some row sees, and those that all do. */
struct HalfKeys {
  VisibleKeys any, all;
};
__device__ __forceinline__ HalfKeys keys_of_half(const AttendArgs& a, const RowSet& set, int half) {
  const int32_t begin = half * kHalfRows,
                rows = set.num_rows - begin < kHalfRows ? set.num_rows - begin : kHalfRows;
  if (rows <= 0) return {};
  const int32_t first = (set.row_begin + begin) / a.shape.group_size,
                last = (set.row_begin + begin + rows - 1) / a.shape.group_size;
  const RequestShape request{set.kv_len - set.position, set.kv_len};
  const VisibleKeys x = visible_keys(a.problem.mask, request, first),
                    y = visible_keys(a.problem.mask, request, last);
  return {{x.sink > y.sink ? x.sink : y.sink, x.begin, y.end},
          {x.sink < y.sink ? x.sink : y.sink, y.begin, x.end}};
}

__device__ __forceinline__ bool meets(const VisibleKeys& keys, int32_t begin, int32_t end) {
  return begin < keys.sink || (begin < keys.end && end > keys.begin && keys.begin < keys.end);
}
__device__ __forceinline__ bool covers(const VisibleKeys& keys, int32_t begin, int32_t end) {
  return end <= keys.sink || (begin >= keys.begin && end <= keys.end);
}

/** Where a lane's 16 keys of a leaf lie, leaf after leaf.  A page id is asked for a leaf ahead. */
class BoxWalk {
 public:
  __device__ __forceinline__ BoxWalk(const AttendArgs& a, const KeyPlaces& places_in,
                                     const TilePair& pair, int lane_in)
      : places(places_in),
        keys(seen_by_any(a.shape, a.problem.mask, pair.set)),
        first(places_in.first + pair.kv_head * places_in.head),
        lane(lane_in),
        page_size(a.problem.ragged != 0 ? 1 : a.problem.page_size),
        leaf_pages(kLeaf / page_size),
        leaf_tokens(kLeaf - leaf_pages * page_size),
        ragged(a.problem.ragged != 0) {
    if (ragged) {
      row = __ldcg(a.lengths.kv_indptr + pair.set.request);
    } else {
      table = pages_of(a.lengths, pair.set.request);
    }
  }

  /** Goes to the leaf that begins at `leaf_key`, 128 keys on unless `jumps`. */
  __device__ __forceinline__ void go_to(int32_t leaf_key, bool jumps) {
    const int32_t key = leaf_key + lane * kBoxKeys;
    wanted = lane < kLeaf / kBoxKeys && meets(keys, key, key + kBoxKeys);
    if (ragged) {
      at = row + key;
      return;
    }
    if (jumps) {
      page = key / page_size;
      token = key - page * page_size;
    } else {
      page += leaf_pages;
      token += leaf_tokens;
      if (token >= page_size) {
        token -= page_size;
        ++page;
      }
    }
    if (wanted) at = __ldcg(table + page);
  }

  /** Sends the copies; `to` is where the leaf goes. */
  __device__ __forceinline__ void copy(uint32_t to, uint32_t barrier, uint32_t box_bytes) const {
    if (!wanted) return;
    to += lane * box_bytes;
    if (ragged) {
      copy_box(to, &places.map, barrier, 0, at, 0, first);
      copy_box(to + box_bytes / 2, &places.map, barrier, 0, at + kBoxKeys / 2, 0, first);
    } else {
      copy_box(to, &places.map, barrier, 0, 0, 0, 0,
               first + at * places.page + token / kBoxKeys * places.token);
    }
  }

  bool wanted = false;

 private:
  const KeyPlaces& places;
  const VisibleKeys keys;
  const int32_t first, lane;
  const int32_t page_size, leaf_pages, leaf_tokens;  // a leaf is so many pages and tokens on
  const bool ragged;
  const int32_t* table = nullptr;
  int32_t row = 0, page = 0, token = 0, at = 0;
};

/** Brings the keys or the values of every leaf of every tile, and a note for each leaf: it is there
 * with the leaf before, if that is of the same tile. */
template <class Shape>
__device__ __forceinline__ void load_leaves(const AttendArgs& a, const KeyPlaces& places,
                                            uint32_t ring, uint32_t notes, uint32_t full,
                                            uint32_t empty, int lane) {
  static_assert(kTileHalves == 2);
  constexpr int32_t kChunkKeys = kLeaf * kSuperChunk;
  int stage = 0;
  uint32_t parity = 1, leaves = 0;
  TileWalk walk(a);
  for (int32_t index = walk.next(); index >= 0; index = walk.next()) {
    const TilePair pair = pair_at(a, index);
    const RowSet& set = pair.set;
    if (set.num_leaves == 0) continue;
    const HalfKeys half = keys_of_half(a, set, lane % kTileHalves);
    BoxWalk boxes(a, places, pair, lane);
    int32_t number = 0, key = leaf_of(set, 0) * kLeaf, chunk_edge = chunk_end(set, 0);
    const auto next_of = [&] {
      return number + 1 == set.sink_leaves ? set.leaf_begin * kLeaf : key + kLeaf;
    };
    const auto write_note = [&] {  // of leaf `number`
      const int32_t next = next_of();
      const bool more = number + 1 < set.num_leaves;
      // Of this lane's half; then the other half's beside it.
      uint32_t flags = 0;
      if (meets(half.any, key, key + kLeaf)) {
        flags = LeafNote::kSeen;
        if (covers(half.all, key, key + kLeaf)) flags |= LeafNote::kWhole;
        const bool later = more && meets(half.any, next, INT32_MAX);
        if (!later) flags |= LeafNote::kTileLast;
        if (!(later && number + 1 < chunk_edge &&
              meets(half.any, next, (key / kChunkKeys + 1) * kChunkKeys)))
          flags |= LeafNote::kChunkLast;
      }
      if (more && meets(half.any, next, next + kLeaf)) flags |= LeafNote::kNextSeen;
      flags |= __shfl_down_sync(~0u, flags, 1) << 1;
      if (!more) flags |= LeafNote::kTileEnds;
      if (lane == 0) {
        const uint32_t at = notes + leaves % kLeafNotes * 8;
        store_shared(at, static_cast<uint32_t>(key));
        store_shared(at + 4, flags);
      }
      ++leaves;
    };
    boxes.go_to(key, true);
    write_note();
    for (bool more = true; more;) {
      const uint32_t copies = static_cast<uint32_t>(__popc(__ballot_sync(~0u, boxes.wanted)));
      const bool jumps = number + 1 == set.sink_leaves;
      key = next_of();
      more = ++number < set.num_leaves;
      if (more) {
        if (number == chunk_edge) chunk_edge = chunk_end(set, number);
        write_note();
      }
      const uint32_t barrier = full + 8 * stage;
      barrier_wait(empty + 8 * stage, parity);
      if (lane == 0) barrier_arrive_expecting(barrier, copies * Shape::kBoxBytes);
      __syncwarp();
      boxes.copy(ring + stage * Shape::kLeafBytes, barrier, Shape::kBoxBytes);
      if (more) boxes.go_to(key, jumps);
      if (++stage == Shape::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

/** Brings the rows of q of every tile, and says which tile it is; a tile without rows ends them. */
template <class Shape>
__device__ __forceinline__ void load_tiles(const AttendArgs& a, uint32_t shared, int thread) {
  constexpr int kChunks = Shape::kPitchQ / 16;
  const View<const char>& q = a.tensors.q;
  const uint32_t to = shared + ATTNFOLD_SHARED(q), all_full = shared + ATTNFOLD_SHARED(full_tile);
  TileWalk walk(a);
  for (uint32_t i = 0;; ++i) {
    const int32_t index = walk.next();
    TilePair pair{};
    if (index >= 0) pair = pair_at(a, index);
    if (i > 0) group_wait<kTileHalves * kWarpgroup + kQueryThreads>(kQueriesBarrier);
    barrier_wait(shared + ATTNFOLD_SHARED(empty_tile) + 8 * (i % 2), i / 2 % 2 ^ 1);
    const uint32_t full = all_full + 8 * (i % 2);
    if (thread == 0) {
      const uint32_t tile = shared + ATTNFOLD_SHARED(tile) +
                            i % 2 * static_cast<uint32_t>(sizeof(Shape::Shared::tile[0]));
      const int32_t* words = reinterpret_cast<const int32_t*>(&pair.set);
#pragma unroll
      for (int w = 0; w < static_cast<int>(sizeof(RowSet) / 4); ++w)
        store_shared(tile + 4 * w, static_cast<uint32_t>(words[w]));
      store_shared(tile + sizeof(RowSet), static_cast<uint32_t>(pair.kv_head));
      store_shared(tile + sizeof(RowSet) + 4, index < 0 ? 1u : 0u);
      barrier_arrive(full);
    }
    // Two threads for each row, a chunk of 16 bytes in turn.
    for (int row = thread / 2; index >= 0 && row < kTileRows; row += kQueryThreads / 2) {
      const bool valid = row < pair.set.num_rows;
      const RowPlace at = place_of_row(a, pair.set, pair.kv_head, valid ? row : 0);
      const char* from = q.data + (at.token * q.stride_token + at.head * q.stride_head) * 2;
#pragma unroll
      for (int i = 0; i < kChunks; i += 2) {
        const int chunk = i + thread % 2;
        copy_16_or_zeros(to + chunk_offset<Shape::kPitchQ>(row, chunk), from + chunk * 16, valid);
      }
    }
    barrier_arrive_after_copies(full);
    if (index < 0) return;
  }
}

template <class Shape>
__device__ __forceinline__ void load_large(const LargeArgs& args, uint32_t shared, int warp,
                                           int lane) {
  const AttendArgs& a = args.attend;
  if (warp < 2) {  // one and the same instructions for both
    const bool v = warp == 1;
    load_leaves<Shape>(a, v ? args.v : args.k,
                       shared + (v ? ATTNFOLD_SHARED(v) : ATTNFOLD_SHARED(k)),
                       shared + (v ? ATTNFOLD_SHARED(note_v) : ATTNFOLD_SHARED(note_k)),
                       shared + (v ? ATTNFOLD_SHARED(full_v) : ATTNFOLD_SHARED(full_k)),
                       shared + (v ? ATTNFOLD_SHARED(empty_v) : ATTNFOLD_SHARED(empty_k)), lane);
  } else {
    load_tiles<Shape>(a, shared, (warp - 2) * 32 + lane);
  }
}

}  // namespace attnfold::cuda
