// The loading warpgroup of the large-row kernel.  Warp 0 brings keys and warp 1 values, 16 keys a
// copy, by the tensor copy engine; warps 2 and 3 bring queries, a half of the tile's rows each.
// Warp 2 says ahead of time what the others need to know of a tile.
//
// What the last update left behind is read at once; keys, values and queries after those have
// waited for the kernels before this one who ask for them.  All else waits for these three.
//
// Keys and values of a leaf take a warp some 250 instructions and more of a leaf's time than not:
// what is added here costs at once.
#pragma once

#include "cuda/large_leaf.cuh"
#include "cuda/large_shape.cuh"

namespace attnfold::cuda {

/** Where a lane's 16 keys of a leaf lie, leaf after leaf.  A page id is asked for a leaf ahead. */
class BoxWalk {
 public:
  __device__ __forceinline__ BoxWalk(const AttendArgs& a, const KeyPlaces& places_in, int lane_in)
      : places(places_in),
        lane(lane_in),
        page_shift(a.page_shift),
        page_size(a.problem.ragged != 0 ? 1 : a.problem.page_size),
        leaf_pages(kLeaf / page_size),
        leaf_tokens(kLeaf - leaf_pages * page_size),
        ragged(a.problem.ragged != 0) {}

  template <class Shape>
  __device__ __forceinline__ void begin(const TileReader<Shape>& tile) {
    keys = tile.keys(offsetof(TileNote, keys[kTileHalves].any));
    first = places.first + tile.word(offsetof(TileNote, kv_head)) * places.head;
    row = tile.word(offsetof(TileNote, row));
    table = reinterpret_cast<const int32_t*>(
        static_cast<uint64_t>(static_cast<uint32_t>(tile.word(offsetof(TileNote, table)))) |
        static_cast<uint64_t>(static_cast<uint32_t>(tile.word(offsetof(TileNote, table) + 4)))
            << 32);
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
      page = page_shift >= 0 ? key >> page_shift : key / page_size;
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
  const int32_t lane, page_shift;
  const int32_t page_size, leaf_pages, leaf_tokens;  // a leaf is so many pages and tokens on
  const bool ragged;
  VisibleKeys keys{};
  int32_t first = 0;
  const int32_t* table = nullptr;
  int32_t row = 0, page = 0, token = 0, at = 0;
};

/** Looks at the values of a leaf that not all rows see, once they are there.  Those that no copy
 * brings, and those behind the request's end, become 0: 0 times what lies there may be NaN.  Of the
 * others it says whether one is not finite. */
template <class Shape, class T>
class ValueCheck {
 public:
  __device__ __forceinline__ void begin(uint32_t leaf_in, uint32_t full_in, uint32_t boxes_in,
                                        int32_t first_key_in, int32_t kv_len_in,
                                        const VisibleKeys& all_in) {
    leaf = leaf_in;
    full = full_in;
    boxes = boxes_in;
    first_key = first_key_in;
    kv_len = kv_len_in;
    all = all_in;
    begun = true;
  }

  __device__ __forceinline__ void finish(uint32_t shared, int lane) {
    if (!begun) return;
    begun = false;
    barrier_wait(shared + ATTNFOLD_SHARED(landed_v), parity);
    parity ^= 1;
    uint32_t overflow = 0;
#pragma unroll 1
    for (int key = lane; key < kLeaf; key += 32) {
      if (sees(all, first_key + key)) continue;
      const uint32_t at = leaf + key / 8 * Shape::kStep8 + key % 8 * 128;
      const bool there = first_key + key < kv_len && (boxes >> key / kBoxKeys & 1) != 0;
#pragma unroll 4
      for (int chunk16 = 0; chunk16 < Shape::kDim / 8; ++chunk16) {  // in any order
        const uint32_t to = at + chunk16 / 8 * Shape::kColumnStep + chunk16 % 8 * 16;
        if (there) {
          overflow |= overflow_of<T>(load_shared_quad(to));
        } else {
          store_shared_quad(to, make_uint4(0, 0, 0, 0));
        }
      }
    }
    fence_shared_for_engines();
    const uint32_t odd = uniform(overflow);
    if (lane == 0) {
      const uint32_t stage = (full - shared - ATTNFOLD_SHARED(full_v)) / 8;
      store_shared(shared + ATTNFOLD_SHARED(odd_v) + 4 * stage, odd);
      barrier_arrive(full);
    }
  }

 private:
  bool begun = false;
  uint32_t parity = 0;
  uint32_t leaf = 0, full = 0, boxes = 0;  // its place, its barrier, and what was copied
  int32_t first_key = 0, kv_len = 0;
  VisibleKeys all{};
};

/** Brings the keys, or the values, of every leaf of every tile; with the keys a note for each leaf:
 * it is there with the leaf before, if that is of the same tile. */
template <class Shape, class T, bool kValues>
__device__ __forceinline__ void load_leaves(const AttendArgs& a, const KeyPlaces& places,
                                            uint32_t shared, int lane) {
  constexpr int32_t kChunkKeys = kLeaf * kSuperChunk;
  const uint32_t ring = shared + (kValues ? ATTNFOLD_SHARED(v) : ATTNFOLD_SHARED(k)),
                 full = shared + (kValues ? ATTNFOLD_SHARED(full_v) : ATTNFOLD_SHARED(full_k)),
                 empty = shared + (kValues ? ATTNFOLD_SHARED(empty_v) : ATTNFOLD_SHARED(empty_k));
  Ring<Shape::kStages> place;
  uint32_t leaves = 0;
  ValueCheck<Shape, T> check;
  BoxWalk boxes(a, places, lane);
  TileReader<Shape> tile(shared);
  bool waited = false;  // for the kernels before this one
  for (;; tile.free(lane)) {
    tile.wait();
    if (tile.word(offsetof(TileNote, is_none))) break;
    RowSet set{};
    set.num_leaves = tile.word(offsetof(TileNote, set.num_leaves));
    set.sink_leaves = tile.word(offsetof(TileNote, set.sink_leaves));
    set.leaf_begin = tile.word(offsetof(TileNote, set.leaf_begin));
    set.kv_len = tile.word(offsetof(TileNote, set.kv_len));
    if (set.num_leaves == 0) {
      // Nobody gets past the tile of a leaf that is still to be checked, and so, after some tiles
      // without leaves, to the note that this warp would wait for.
      if constexpr (kValues) check.finish(shared, lane);
      continue;
    }
    boxes.begin(tile);
    boxes.go_to(leaf_of(set, 0) * kLeaf, true);
    if (!waited) wait_for_previous_kernels();
    waited = true;
    const size_t mine = sizeof(RowsKeys) * (kValues ? kTileHalves : lane % kTileHalves);
    const RowsKeys half = {tile.keys(offsetof(TileNote, keys[0].any) + mine),
                           tile.keys(offsetof(TileNote, keys[0].all) + mine)};
    const VisibleKeys& all = half.all;
    int32_t number = 0, key = leaf_of(set, 0) * kLeaf, chunk_edge = chunk_end(set, 0);
    const auto next_of = [&] {
      return number + 1 == set.sink_leaves ? set.leaf_begin * kLeaf : key + kLeaf;
    };
    const auto tell = [&](uint32_t flags) {
      const uint32_t at = shared + ATTNFOLD_SHARED(notes) +
                          leaves % kLeafNotes * static_cast<uint32_t>(sizeof(LeafNote));
      store_shared(at, static_cast<uint32_t>(key));
      store_shared(at + 4, flags);
    };
    // Leaves before this one are whole for all rows, as most are.
    int32_t plain_end = 0;
    if constexpr (!kValues) {
      const VisibleKeys all = tile.keys(offsetof(TileNote, keys[kTileHalves].all));
      if (all.begin <= 0 && set.sink_leaves == 0 && set.leaf_begin == 0 &&
          tile.word(offsetof(TileNote, set.num_rows)) > kHalfRows &&
          a.tensors.alibi_slopes == nullptr)
        plain_end = all.end / kLeaf;
    }
    const auto write_note = [&] {  // of leaf `number`
      const int32_t next = next_of();
      const bool more = number + 1 < set.num_leaves;
      if (number + 1 < plain_end) {
        if (lane == 0)
          tell(LeafFlags::kAllPlain | (number + 1 == chunk_edge ? LeafFlags::kAllChunkLast : 0));
        ++leaves;
        return;
      }
      // Of this lane's half; then the other half's beside it.
      uint32_t flags = 0;
      if (meets(half.any, key, key + kLeaf)) {
        flags = LeafFlags::kSeen;
        if (covers(half.all, key, key + kLeaf)) flags |= LeafFlags::kWhole;
        const bool later = more && meets(half.any, next, INT32_MAX);
        if (!later) flags |= LeafFlags::kTileLast;
        if (!(later && number + 1 < chunk_edge &&
              meets(half.any, next, (key / kChunkKeys + 1) * kChunkKeys)))
          flags |= LeafFlags::kChunkLast;
      }
      if (more && meets(half.any, next, next + kLeaf)) {
        flags |= LeafFlags::kNextSeen;
        if ((flags & LeafFlags::kWhole) != 0 && covers(half.all, next, next + kLeaf) &&
            a.tensors.alibi_slopes == nullptr)
          flags |= LeafFlags::kPlain;
      }
      flags |= __shfl_down_sync(~0u, flags, 1) << 1;
      if (!more) flags |= LeafFlags::kTileEnds;
      if (lane == 0) tell(flags);
      ++leaves;
    };
    if constexpr (!kValues) write_note();
    for (bool more = true; more;) {
      const uint32_t wanted = __ballot_sync(~0u, boxes.wanted),
                     bytes = static_cast<uint32_t>(__popc(wanted)) * Shape::kBoxBytes;
      const bool jumps = number + 1 == set.sink_leaves;
      const int32_t first_key = key;
      key = next_of();
      more = ++number < set.num_leaves;
      if constexpr (!kValues) {
        if (more && number == chunk_edge) chunk_edge = chunk_end(set, number);
        if (more) write_note();
      }
      const uint32_t to = ring + place.stage * Shape::kLeafBytes, is_full = full + 8 * place.stage;
      const bool checked = kValues && !covers(all, first_key, first_key + kLeaf);
      const uint32_t barrier = checked ? shared + ATTNFOLD_SHARED(landed_v) : is_full;
      if constexpr (kValues) check.finish(shared, lane);  // while the next ones have no place yet
      barrier_wait(empty + 8 * place.stage, place.parity ^ 1);
      if (lane == 0) barrier_arrive_expecting(barrier, bytes);
      __syncwarp();
      boxes.copy(to, barrier, Shape::kBoxBytes);
      if constexpr (kValues) {
        if (checked) check.begin(to, is_full, wanted, first_key, set.kv_len, all);
      }
      if (more) boxes.go_to(key, jumps);
      place.next();
    }
  }
  if constexpr (kValues) check.finish(shared, lane);
}

/** Says which tile is pair `index`. */
template <class Shape>
__device__ __forceinline__ void write_tile(const AttendArgs& a, uint32_t shared,
                                           const TileReader<Shape>& tile, int32_t index, int lane) {
  TilePair pair{};
  if (index >= 0) pair = pair_at(a, index);
  const RowSet& set = pair.set;
  const int part = lane < kTileHalves ? lane : kTileHalves;
  const RowsKeys keys = part < kTileHalves ? keys_of_rows(a, set, part * kHalfRows, kHalfRows)
                                           : keys_of_rows(a, set, 0, kTileRows);
  const int32_t key = leaf_of(set, 0) * kLeaf;
  TileNote note{};
  note.begins = __ballot_sync(~0u, set.num_leaves > 0 && meets(keys.any, key, key + kLeaf));
  note.set = set;
  note.kv_head = pair.kv_head;
  note.is_none = index < 0;
  if (index >= 0) {
    if (a.problem.ragged != 0) {
      note.row = __ldcg(a.lengths.kv_indptr + set.request);
    } else {
      note.table = pages_of(a.lengths, set.request);
    }
  }
  const uint32_t at = tile.address();
  barrier_wait(tile.empty(), tile.parity() ^ 1);
  if (lane <= kTileHalves) {
    const int32_t* words = reinterpret_cast<const int32_t*>(&keys);
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(RowsKeys) / 4); ++w)
      store_shared(at + static_cast<uint32_t>(offsetof(TileNote, keys)) +
                       part * static_cast<uint32_t>(sizeof(RowsKeys)) + 4 * w,
                   static_cast<uint32_t>(words[w]));
  }
  if (lane == 0) {
    const int32_t* words = reinterpret_cast<const int32_t*>(&note);
#pragma unroll
    for (int w = 0; w < static_cast<int>(offsetof(TileNote, keys) / 4); ++w)
      store_shared(at + 4 * w, static_cast<uint32_t>(words[w]));
  }
  arrive_warp(tile.full(), lane);
}

/** Brings the rows of q of one half of every tile.  The first half's loader says which tile comes
 * next. */
template <class Shape>
__device__ __forceinline__ void load_rows(const AttendArgs& a, uint32_t shared, int half,
                                          int lane) {
  constexpr int kChunks = Shape::kDim / 8;
  const View<const char>& q = a.tensors.q;
  const uint32_t to = shared + ATTNFOLD_SHARED(q) + half * Shape::kHalfBytesQ,
                 full = shared + ATTNFOLD_SHARED(full_q) + 8 * half;
  TileWalk walk(a);
  TileReader<Shape> tile(shared);
  bool waited = false;
  for (uint32_t i = 0;; ++i) {
    if (half == 0) write_tile(a, shared, tile, walk.next(), lane);
    tile.wait();
    if (tile.word(offsetof(TileNote, is_none))) return;
    RowSet set{};
    set.row_begin = tile.word(offsetof(TileNote, set.row_begin));
    set.num_rows = tile.word(offsetof(TileNote, set.num_rows));
    set.q_token = tile.word(offsetof(TileNote, set.q_token));
    const int32_t kv_head = tile.word(offsetof(TileNote, kv_head));
    if (half == 0) {
      ++tile.number;
    } else {
      tile.free(lane);
    }
    if (!waited) {
      wait_for_previous_kernels();
      if (half == 0) let_next_kernel_start();
    }
    waited = true;
    // Two lanes for each row, a chunk of 16 bytes in turn; first into L2, while the rows of the
    // tile before are in use.
    const auto row_at = [&](int row, bool* valid) {
      const int row_of_tile = half * kHalfRows + row;
      *valid = row_of_tile < set.num_rows;
      const RowPlace at = place_of_row(a, set, kv_head, *valid ? row_of_tile : 0);
      return q.data + (at.token * q.stride_token + at.head * q.stride_head) * 2;
    };
    const char* from[4];
    bool valid[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      from[r] = row_at(lane / 2 + 16 * r, &valid[r]);
      if (valid[r]) prefetch_to_l2(from[r] + lane % 2 * (Shape::kDim > 64 ? 128 : 0));
    }
    barrier_wait(shared + ATTNFOLD_SHARED(empty_q) + 8 * half, i % 2 ^ 1);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int j = 0; j < kChunks; j += 2) {
        const int chunk = j + lane % 2;
        copy_16_or_zeros(
            to + chunk / 8 * Shape::kColumnBytesQ + chunk_offset<128>(lane / 2 + 16 * r, chunk % 8),
            from[r] + chunk * 16, valid[r]);
      }
    }
    barrier_arrive_after_copies(full);
  }
}

template <class Shape, class T>
__device__ __forceinline__ void load_large(const LargeArgs& args, uint32_t shared, int warp,
                                           int lane) {
  const AttendArgs& a = args.attend;
  if (warp == 0) {
    load_leaves<Shape, T, false>(a, args.k, shared, lane);
  } else if (warp == 1) {
    load_leaves<Shape, T, true>(a, args.v, shared, lane);
  } else {
    load_rows<Shape>(a, shared, warp - 2, lane);
  }
}

}  // namespace attnfold::cuda
