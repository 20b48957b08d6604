// Many rows of one kv head (tile.inl) on AMX tiles.  Included inside the AMX namespace, after
// tile.inl.
//
// Data movement per leaf of 128 keys, for a unit of up to 128 rows in blocks of 32:
//   K      memory -> copied, keys one after another, in L2      A: 16 keys
//   V      memory -> V^T in L2: [o_stride / 16][4][16 elements in lane order][32 keys]      A
//   Q      [blocks, pairs of elements, 32 rows], a block in L1      B
//   S^T    [128, 32] f32 in L1, from tiles to lanes
//   P^T    [parts][4][vec][16 pairs of keys][16 rows] bf16 in L1, from lanes to tiles      B
//   O leaf [head_dim_vo, 32] in L1, folded 32 elements at a time while tiles multiply the next
// Tiles and lanes meet in memory alone, and what a tile stores cannot be forwarded to a load: so
// nothing is loaded right after it was stored.  Meanwhile the next leaf's lines are prefetched.

/** 16 bytes each from four places `stride` apart. */
ATTNFOLD_LANE_FN __m512i four_pieces(const char* at, int64_t stride) {
  const auto piece = [&](int i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + i * stride));
  };
  __m512i x = _mm512_castsi128_si512(piece(0));
  x = _mm512_inserti32x4(x, piece(1), 1);
  x = _mm512_inserti32x4(x, piece(2), 2);
  return _mm512_inserti32x4(x, piece(3), 3);
}

/** A row of bf16 copied and padded with zeros to chunks of 32; the largest magnitudes so far. */
ATTNFOLD_LANE_FN __m512i copy_row(const char* from, int head_dim, char* to, __m512i largest) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  for (int d = 0; d < head_dim; d += kChunk) {
    const __m512i x = load_values(from + d * 2, head_dim - d);
    _mm512_storeu_si512(to + d * 2, x);
    largest = _mm512_max_epu16(largest, _mm512_and_si512(x, magnitude));
  }
  return largest;
}

/** Keys [begin, end), one after another. */
ATTNFOLD_LANE_FN void copy_keys(const LeafRows& rows, int64_t head_offset, int begin, int end,
                                int head_dim, char* out) {
  const int64_t row_bytes = int64_t{padded(head_dim)} * 2;
  for (int n = begin; n < end; ++n)
    copy_row(rows.row[n] + head_offset, head_dim, out + n * row_bytes, _mm512_setzero_si512());
}

/** V^T of keys [begin, end), 0 around them and for Inf and NaN; true if there are any of these. */
inline bool pack_matrix_values(const LeafRows& rows, int64_t head_offset, int begin, int end,
                               int head_dim, char* out) {
  constexpr int kMostDim = 576;
  alignas(64) char keys[32 * kMostDim * 2];
  const int64_t row_bytes = int64_t{padded(head_dim)} * 2;
  bool special = false;
  for (int n = begin / 32 * 32; n < end; n += 32) {
    __m512i largest = _mm512_setzero_si512();
    for (int i = 0; i < 32; ++i) {
      if (n + i >= begin && n + i < end) {
        largest = copy_row(rows.row[n + i] + head_offset, head_dim, keys + i * row_bytes, largest);
      } else {
        memset(keys + i * row_bytes, 0, static_cast<size_t>(row_bytes));
      }
    }
    if (_mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80)) != 0) {
      for (int64_t i = 0; i < 32 * row_bytes; i += 64) {
        _mm512_store_si512(keys + i, finite(_mm512_load_si512(keys + i), &special));
      }
    }
    for (int64_t d = 0; d < row_bytes / 2; d += 8) {
      __m512i low[4], high[4];  // elements d .. d + 3, and the others, of pairs w, w + 4, ..
#pragma GCC unroll 4
      for (int w = 0; w < 4; ++w) {
        const char* at = keys + 2 * w * row_bytes + d * 2;
        const __m512i x = four_pieces(at, 8 * row_bytes);
        const __m512i y = four_pieces(at + row_bytes, 8 * row_bytes);
        low[w] = _mm512_unpacklo_epi16(x, y);
        high[w] = _mm512_unpackhi_epi16(x, y);
      }
      transpose_quarters(low);
      transpose_quarters(high);
      char* to = out + (d / kChunk * 8 + n / 32) * 1024 + d % kChunk / 2 * 64;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {  // even elements to one tile, odd ones to the next
        _mm512_store_si512(to + i % 2 * 4096 + i / 2 * 64, low[i]);
        _mm512_store_si512(to + i % 2 * 4096 + (2 + i / 2) * 64, high[i]);
      }
    }
  }
  return special;
}

/** s[n][r], 32 keys x 32 rows at a time. */
ATTNFOLD_LANE_FN void matrix_tile_scores(const uint32_t* q, const char* k, int depth, int begin,
                                         int end, float* s) {
  const int64_t row_bytes = int64_t{depth} * 4;
  constexpr int64_t kStride = kTileRows * sizeof(float);
  for (int n = begin & ~15; n < end; n += 32) {
    const bool both = n + 16 < end;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int d = 0; d < depth; d += 16) {
      tile_load<4>(k + n * row_bytes + d * 4, row_bytes);
      tile_load<6>(q + d * kTileRows, kStride);
      tile_load<7>(q + d * kTileRows + 16, kStride);
      tile_multiply<0, 4, 6>();
      tile_multiply<1, 4, 7>();
      if (!both) continue;
      tile_load<5>(k + (n + 16) * row_bytes + d * 4, row_bytes);
      tile_multiply<2, 5, 6>();
      tile_multiply<3, 5, 7>();
    }
    tile_store<0>(s + n * kTileRows, kStride);
    tile_store<1>(s + n * kTileRows + 16, kStride);
    if (!both) continue;
    tile_store<2>(s + (n + 16) * kTileRows, kStride);
    tile_store<3>(s + (n + 16) * kTileRows + 16, kStride);
  }
}

constexpr int kWeightBytes = 4 * kTileVecs * 1024;  // of a part of P^T

/** Weights of keys n and n + 1 of 16 rows, to a row of a B tile for each part. */
template <int kParts>
ATTNFOLD_LANE_FN void store_weights(Lanes first, Lanes second, char* to) {
  if constexpr (kParts == 1) {
    alignas(64) static const uint16_t kPairs[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                    21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                    11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    _mm512_store_si512(
        to, _mm512_permutexvar_epi16(_mm512_load_si512(kPairs), round_to_bf16(first, second)));
  } else {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    __m512 a = first.v, b = second.v;
#pragma GCC unroll 3
    for (int part = 0; part < kParts; ++part) {
      const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(a), 16);
      const __m512i high = _mm512_and_si512(_mm512_castps_si512(b), upper);
      _mm512_store_si512(to + part * kWeightBytes, _mm512_or_si512(low, high));
      a = rest(a);
      b = rest(b);
    }
  }
}

/** tile_softmax, to B tiles of P^T; where `s` is also to hold the weights, they go there too. */
template <int kParts, class S>
__attribute__((noinline)) void matrix_tile_softmax(const TileWork<S>& tile, int vec,
                                                   const TileKeys& keys, const ScoreMod& mod,
                                                   bool keep, Ahead* ahead, char* out) {
  float* s = tile.s + vec * 16;
  Lanes largest[4] = {splat(kLowest), splat(kLowest), splat(kLowest), splat(kLowest)};
  const auto see_edge = [&](int from, int to) {
    for (int n = from; n < to; ++n) {
      const Lanes x = where_seen(tile, vec, n, load(s + n * kTileRows), splat(kLowest));
      largest[0] = max_keep_nan(x, largest[0]);
    }
  };
  see_edge(keys.begin, keys.all_begin);
  int at = keys.all_begin;
  for (; at + 4 <= keys.all_end; at += 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      largest[i] = max_keep_nan(load(s + (at + i) * kTileRows), largest[i]);
  }
  for (; at < keys.all_end; ++at) largest[0] = max_keep_nan(load(s + at * kTileRows), largest[0]);
  see_edge(keys.all_end, keys.end);
  const Lanes scale = splat(mod.scale), scale_low = splat(mod.scale_low);
  const Lanes max =
      mul(max_keep_nan(max_keep_nan(largest[0], largest[1]), max_keep_nan(largest[2], largest[3])),
          scale);
  const Lanes m = max_keep_nan(max, splat(kLowest)), minus_m = sub(splat(0.0f), m);
  const bool exact =
      _mm512_cmp_ps_mask(abs(max).v, _mm512_set1_ps(kLargeScore), _CMP_LT_OQ) == 0xffff;
  const auto weight = [&](int n) {
    const Lanes x = load(s + n * kTileRows);
    Lanes y = fma(x, scale, fma(x, scale_low, minus_m));
    if (!exact) y = select_below(abs(max), kLargeScore, y, add(mul(x, scale), minus_m));
    return exp2_of_difference(y);
  };
  const auto edge_weight = [&](int n) {
    if (n < keys.begin || n >= keys.end) return splat(0.0f);
    return where_seen(tile, vec, n, weight(n), splat(0.0f));
  };
  const int begin = keys.begin / 32 * 32, end = (keys.end + 31) / 32 * 32;
  alignas(64) float sums[16][16];
#pragma GCC unroll 1
  for (int i = 0; i < 16; i += 2) {
    Lanes first = splat(0.0f), second = splat(0.0f);
#pragma GCC unroll 1
    for (int n = begin; n < end; n += 16) {
      Lanes a, b;
      if (__builtin_expect(n >= keys.all_begin && n + 16 <= keys.all_end, 1)) {
        a = weight(n + i);
        b = weight(n + i + 1);
      } else {
        a = edge_weight(n + i);
        b = edge_weight(n + i + 1);
      }
      first = add(first, a);
      second = add(second, b);
      store_weights<kParts>(a, b, out + (n / 32 * kTileVecs + vec) * 1024 + (n % 32 + i) / 2 * 64);
      if (__builtin_expect(keep, 0)) {
        store(s + (n + i) * kTileRows, a);
        store(s + (n + i + 1) * kTileRows, b);
      }
    }
    store(sums[i], first);
    store(sums[i + 1], second);
    ask_ahead(ahead);
    ask_ahead(ahead + 1);
  }
  const auto quarter = [&](int i) {
    return add(add(load(sums[i]), load(sums[i + 8])), add(load(sums[i + 4]), load(sums[i + 12])));
  };
  store(tile.leaf.l + vec * 16, add(add(quarter(0), quarter(2)), add(quarter(1), quarter(3))));
  // Rows that see nothing have -inf there already.
  const Lanes had = load(tile.leaf.m + vec * 16);
  store(tile.leaf.m + vec * 16, select_below(had, -1.0f, had, m));
}

/** o of 32 elements on keys [32 first, 32 last): [element in lane order][kTileRows]. */
ATTNFOLD_LANE_FN void value_part_tiles(const char* v, const char* p, int first, int last,
                                       float* o) {
  constexpr int64_t kStride = kTileRows * sizeof(float);
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  for (int n = first; n < last; ++n) {
    tile_load<4>(v + n * 1024, 64);
    tile_load<6>(p + n * (kTileVecs * 1024), 64);
    tile_multiply<0, 4, 6>();
    tile_load<7>(p + (n * kTileVecs + 1) * 1024, 64);
    tile_multiply<1, 4, 7>();
    tile_load<5>(v + (4 + n) * 1024, 64);
    tile_multiply<2, 5, 6>();
    tile_multiply<3, 5, 7>();
  }
  tile_store<0>(o, kStride);
  tile_store<1>(o + 16, kStride);
  tile_store<2>(o + 16 * kTileRows, kStride);
  tile_store<3>(o + 16 * kTileRows + 16, kStride);
}

/** The parts' o, to be joined. */
struct PartValues {
  alignas(64) float o[2][kChunk * kTileRows];  // middle and low
};

template <int kParts>
ATTNFOLD_LANE_FN void value_tiles(const char* v, const char* p, int first, int last,
                                  [[maybe_unused]] PartValues* parts, float* o) {
  value_part_tiles(v, p, first, last, o);
  if constexpr (kParts == 3) {
    value_part_tiles(v, p + kWeightBytes, first, last, parts->o[0]);
    value_part_tiles(v, p + 2 * kWeightBytes, first, last, parts->o[1]);
  }
}

template <int kParts>
ATTNFOLD_LANE_FN void join_tiles([[maybe_unused]] const PartValues& parts,
                                 [[maybe_unused]] float* o) {
  if constexpr (kParts == 3) {
    for (int i = 0; i < kChunk * kTileRows; i += 16)
      store(o + i, add(load(o + i), add(load(parts.o[0] + i), load(parts.o[1] + i))));
  }
}

/** o of a block, without what Inf and NaN among the values do. */
template <int kParts, class S>
__attribute__((noinline)) void block_values(const TileWork<S>& tile, const TileKeys& keys,
                                            const char* p, int64_t o_stride, float* o) {
  const int first = keys.begin / 32, last = (keys.end + 31) / 32;
  const char* v = reinterpret_cast<const char*>(tile.v);
  PartValues parts;
  for (int64_t d = 0; d < o_stride; d += kChunk) {
    value_tiles<kParts>(v + d / kChunk * 8192, p, first, last, &parts, o + d * kTileRows);
    join_tiles<kParts>(parts, o + d * kTileRows);
  }
}

/** The same, folded into `a`: fold_block with the leaf's o made meanwhile.  Every row of both has
 * seen a key. */
template <int kParts, class S>
__attribute__((noinline)) void fold_block_values(const TileWork<S>& tile, const TileKeys& keys,
                                                 const char* p, int64_t o_stride,
                                                 const TileStates& a) {
  const int first = keys.begin / 32, last = (keys.end + 31) / 32;
  const char* v = reinterpret_cast<const char*>(tile.v);
  const TileStates& b = tile.leaf;
  PartValues parts[2];
  value_tiles<kParts>(v, p, first, last, parts, b.o);
  Lanes scale[kTileVecs];
  __mmask16 b_leads[kTileVecs];
#pragma GCC unroll 2
  for (int i = 0; i < kTileVecs; ++i) {
    const Lanes m_a = load(a.m + i * 16), m_b = load(b.m + i * 16);
    const FoldLanes lanes = FoldLanes::of(m_a, m_b);
    scale[i] = lanes.scale;
    b_leads[i] = _mm512_cmp_ps_mask(lanes.m_a_less_m_b.v, _mm512_setzero_ps(), _CMP_LT_OQ);
    store(a.m + i * 16, select_below(lanes.m_a_less_m_b, 0.0f, m_b, m_a));
    store(a.l + i * 16, lanes.fold(load(a.l + i * 16), load(b.l + i * 16)));
  }
  for (int64_t d = 0; d < o_stride; d += kChunk) {
    if (d + kChunk < o_stride) {
      const int64_t next = d + kChunk;
      value_tiles<kParts>(v + next / kChunk * 8192, p, first, last, parts + next / kChunk % 2,
                          b.o + next * kTileRows);
    }
    join_tiles<kParts>(parts[d / kChunk % 2], b.o + d * kTileRows);
#pragma GCC unroll 4
    for (int64_t i = d * kTileRows; i < (d + kChunk) * kTileRows; i += kTileRows) {
#pragma GCC unroll 2
      for (int vec = 0; vec < kTileVecs; ++vec) {
        const __m512 x = load(a.o + i + vec * 16).v, y = load(b.o + i + vec * 16).v;
        const __m512 lesser = _mm512_mask_mov_ps(y, b_leads[vec], x);
        const __m512 larger = _mm512_mask_mov_ps(x, b_leads[vec], y);
        store(a.o + i + vec * 16, {_mm512_fmadd_ps(scale[vec].v, lesser, larger)});
      }
    }
  }
}

/** What Inf and NaN among the values do to the o of a block, whose weights are in tile.s. */
template <class S>
__attribute__((noinline)) void add_block_special(const UnitWork<S>& w, const TileWork<S>& tile,
                                                 const TileKeys& keys, int64_t head_offset,
                                                 int block, float* o) {
  for (int r = 0; r < kTileRows && block * kTileRows + r < w.rows; ++r) {
    const LeafKeys& seen = w.seen[(block * kTileRows + r) / w.p.group_size];
    add_special(
        *w.v, head_offset, keys.begin, keys.end, w.p.head_dim_vo,
        [&](int n) { return n < seen.sink || (n >= seen.begin && n < seen.end); },
        [&](int n) { return tile.s[n * kTileRows + r]; }, o + r, kTileRows);
  }
}

/** Whether some row of the block at hand has seen nothing before this leaf, or sees nothing of it.
 */
ATTNFOLD_LANE_FN bool has_empty_rows(const TileStates& a, const TileStates& b) {
  bool any = false;
  for (int i = 0; i < kTileRows; ++i)
    any = any || a.m[i] == -__builtin_inff() || b.m[i] == -__builtin_inff();
  return any;
}

/** tile_leaf; meanwhile the lines of leaf `next` are prefetched, or of none if it is -1. */
template <class S>
__attribute__((noinline)) void matrix_tile_leaf(UnitWork<S>& w, TileWork<S>& tile, int leaf,
                                                int next) {
  constexpr int kParts = S::kWeightParts;
  TileShapes::all(16, 64).configure();
  const Lengths& lengths = *w.args.lengths;
  const Tensors& t = w.args.tensors;
  const UnitLeaf keys = unit_leaf(w, leaf);
  const int64_t bytes = dtype_bytes(S::kKeys), head = w.unit.kv_head_begin;
  point_rows(w.p, lengths, t.k, bytes, w.unit.request, leaf, keys, w.k);
  point_rows(w.p, lengths, t.v, bytes, w.unit.request, leaf, keys, w.v);
  see_leaf(w, leaf, keys);
  Ahead ahead[2]{};
  if (next >= 0) {
    LeafRows *next_k = w.next_k, *next_v = w.k_scale_rows;  // there are no scales here
    const UnitLeaf next_keys = unit_leaf(w, next);
    const LeafHull hull = hull_of(next_keys);
    point_rows(w.p, lengths, t.k, bytes, w.unit.request, next, next_keys, next_k);
    point_rows(w.p, lengths, t.v, bytes, w.unit.request, next, next_keys, next_v);
    const int shares = tile.num_blocks * kTileVecs * 8;
    ahead[0] = look_at(w, *next_k, hull, t.k, w.p.head_dim_qk, shares);
    ahead[1] = look_at(w, *next_v, hull, t.v, w.p.head_dim_vo, shares);
  }
  const LeafHull hull = hull_of(keys);
  copy_keys(*w.k, head * t.k.stride_head * bytes, hull.begin, hull.end, w.p.head_dim_qk, tile.k);
  const int64_t v_offset = head * t.v.stride_head * bytes;
  tile.special = pack_matrix_values(*w.v, v_offset, hull.begin, hull.end, w.p.head_dim_vo,
                                    reinterpret_cast<char*>(tile.v));
  const int64_t o_stride = w.leaf.o_stride;
  const ScoreMod mod = score_mod(w, 0);
  alignas(64) char p[kParts * kWeightBytes];
  for (int block = 0; block < tile.num_blocks; ++block) {
    const TileKeys seen = see_block(w, tile, block, tile.leaf.m);
    const TileStates chunk = block_of(tile.chunk, block, o_stride);
    if (seen.begin == seen.end) {
      if (tile.chunk.empty) memcpy(chunk.m, tile.leaf.m, kTileRows * sizeof(float));
      continue;
    }
    matrix_tile_scores(tile.q + block * tile.block_q, tile.k, S::tile_depth(w.q_stride), seen.begin,
                       seen.end, tile.s);
    for (int vec = 0; vec < kTileVecs; ++vec)
      matrix_tile_softmax<kParts>(tile, vec, seen, mod, tile.special, ahead, p);
    if (tile.chunk.empty) {
      memcpy(chunk.m, tile.leaf.m, kTileRows * sizeof(float));
      memcpy(chunk.l, tile.leaf.l, kTileRows * sizeof(float));
      block_values<kParts>(tile, seen, p, o_stride, chunk.o);
      if (tile.special) add_block_special(w, tile, seen, v_offset, block, chunk.o);
    } else if (tile.special || has_empty_rows(chunk, tile.leaf)) {
      block_values<kParts>(tile, seen, p, o_stride, tile.leaf.o);
      if (tile.special) add_block_special(w, tile, seen, v_offset, block, tile.leaf.o);
      fold_block(chunk, tile.leaf, o_stride);
    } else {
      fold_block_values<kParts>(tile, seen, p, o_stride, chunk);
    }
  }
  tile.chunk.empty = false;
}
