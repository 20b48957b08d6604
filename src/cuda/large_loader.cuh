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

/** Brings the keys, or the values, of every leaf of every tile; with the keys a note for each leaf:
 * it is there with the leaf before, if that is of the same tile. */
template <class Shape, bool kValues>
__device__ __forceinline__ void load_leaves(const AttendArgs& a, const KeyPlaces& places,
                                            uint32_t shared, int lane) {
  constexpr int32_t kChunkKeys = kLeaf * kSuperChunk;
  const uint32_t ring = shared + (kValues ? ATTNFOLD_SHARED(v) : ATTNFOLD_SHARED(k)),
                 full = shared + (kValues ? ATTNFOLD_SHARED(full_v) : ATTNFOLD_SHARED(full_k)),
                 empty = shared + (kValues ? ATTNFOLD_SHARED(empty_v) : ATTNFOLD_SHARED(empty_k));
  if constexpr (kValues) {
    // What no copy brings is multiplied by 0, and should not be NaN from the start.
#pragma unroll 8
    for (int at = 16 * lane; at < Shape::kStages * Shape::kLeafBytes; at += 16 * 32)
      store_shared_quad(ring + at, make_uint4(0, 0, 0, 0));
    fence_shared_for_engines();
    __syncwarp();
  }
  Ring<Shape::kStages> place;
  uint32_t leaves = 0;
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
    if (set.num_leaves == 0) continue;
    boxes.begin(tile);
    boxes.go_to(leaf_of(set, 0) * kLeaf, true);
    if (!waited) wait_for_previous_kernels();
    waited = true;
    const size_t mine = sizeof(RowsKeys) * (lane % kTileHalves);
    const RowsKeys half = {tile.keys(offsetof(TileNote, keys[0].any) + mine),
                           tile.keys(offsetof(TileNote, keys[0].all) + mine)};
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
      key = next_of();
      more = ++number < set.num_leaves;
      if constexpr (!kValues) {
        if (more && number == chunk_edge) chunk_edge = chunk_end(set, number);
        if (more) write_note();
      }
      const uint32_t to = ring + place.stage * Shape::kLeafBytes, is_there = full + 8 * place.stage;
      barrier_wait(empty + 8 * place.stage, place.parity ^ 1);
      if (lane == 0) barrier_arrive_expecting(is_there, bytes);
      __syncwarp();
      boxes.copy(to, is_there, Shape::kBoxBytes);
      if (more) boxes.go_to(key, jumps);
      place.next();
    }
  }
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
  // Tokens of four rows of the tile a lane; rows behind the last one count as that.
  const int32_t group = a.shape.group_size;
  note.first_token = token_of_row(set.row_begin, group);
  note.first_end =
      a.problem.mask.causal ? set.position + note.first_token + 1 : INT32_MAX - kTileRows;
  const int32_t last = token_of_row(set.row_begin + set.num_rows - 1, group) - note.first_token;
  int32_t row = set.row_begin + 4 * lane, token = token_of_row(row, group),
          next = (token + 1) * group;
  uint32_t tokens = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i, ++row) {
    if (row == next) ++token, next += group;
    tokens |= static_cast<uint32_t>(min(token - note.first_token, last)) << 8 * i;
  }
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
  store_shared(at + static_cast<uint32_t>(offsetof(TileNote, tokens)) + 4 * lane, tokens);
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
  constexpr int kRowsAtOnce = 32 / Shape::kChunks;  // a chunk of 16 bytes of a row is a lane's
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
    if (!waited) {
      wait_for_previous_kernels();
      if (half == 0) let_next_kernel_start();
    }
    waited = true;
    // Rows lane and 32 more; those behind the last one are read as zeros.
    const int32_t num_rows = tile.word(offsetof(TileNote, set.num_rows));
    const char* from[2];
    uint32_t valid[2];  // bit i: of lane i
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = half * kHalfRows + 32 * r + lane;
      const RowPlace at = tile.place(row, a.shape.group_size);
      valid[r] = __ballot_sync(~0u, row < num_rows);
      from[r] =
          q.data + (row < num_rows ? (at.token * q.stride_token + at.head * q.stride_head) * 2 : 0);
    }
    if (half == 0) {
      ++tile.number;
    } else {
      tile.free(lane);
    }
    // First into L2, while the rows of the tile before are in use.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int column = 0; column < Shape::kColumns; ++column)
        prefetch_to_l2(from[r] + 128 * column);
    }
    barrier_wait(shared + ATTNFOLD_SHARED(empty_q) + 8 * half, i % 2 ^ 1);
    const int chunk16 = lane % Shape::kChunks;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll 4
      for (int rows = 0; rows < 32; rows += kRowsAtOnce) {
        const int row = rows + lane / Shape::kChunks;
        const uint64_t row_from = __shfl_sync(~0u, reinterpret_cast<uint64_t>(from[r]), row);
        copy_16_or_zeros(
            to + chunk16 / 8 * Shape::kColumnBytesQ + chunk_offset<128>(32 * r + row, chunk16 % 8),
            reinterpret_cast<const char*>(row_from) + chunk16 * 16, (valid[r] >> row & 1) != 0);
      }
    }
    barrier_arrive_after_copies(full);
  }
}

template <class Shape>
__device__ __forceinline__ void load_large(const LargeArgs& args, uint32_t shared, int warp,
                                           int lane) {
  const AttendArgs& a = args.attend;
  if (warp == 0) {
    load_leaves<Shape, false>(a, args.k, shared, lane);
  } else if (warp == 1) {
    load_leaves<Shape, true>(a, args.v, shared, lane);
  } else {
    load_rows<Shape>(a, shared, warp - 2, lane);
  }
}

}  // namespace attnfold::cuda
