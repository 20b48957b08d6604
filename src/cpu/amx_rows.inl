// Few rows of several heads (attend.inl) on AMX tiles.  Included inside the AMX namespace, after
// amx.inl.

/** Scratch of a unit in w.tiles. */
struct MatrixScratch {
  uint32_t* q;  // [head][group of 16 rows][q_stride / 32][16 pairs][16 rows]
  char* v;      // [kPackedHeads][o_stride / 16][4][16 pairs of keys][64 bytes]
  char* p;      // [head][block of kPartRows rows][4][16 parts of rows][64 bytes]
};

template <class S>
ATTNFOLD_LANE_FN MatrixScratch matrix_scratch(const UnitWork<S>& w) {
  char* at = w.tiles;
  const int64_t row_groups = (w.head_rows + 15) / 16;
  MatrixScratch m;
  m.q = take<uint32_t>(at, static_cast<size_t>(w.unit.num_kv_heads * row_groups * w.q_stride * 8));
  m.v = take<char>(at, static_cast<size_t>(kPackedHeads * w.leaf.o_stride / 16 * kColumnBytes));
  const int part_blocks = w.unit.num_kv_heads * ((w.head_rows + kPartRows - 1) / kPartRows);
  m.p = take<char>(at, static_cast<size_t>(part_blocks) * 4096);
  return m;
}

/** B tiles of q. */
template <class S>
void pack_matrix_queries(const UnitWork<S>& w) {
  const MatrixScratch m = matrix_scratch(w);
  const int depth = w.q_stride / 2;
  alignas(64) uint32_t square[16 * 16];
  uint32_t* to = m.q;
  for (int h = 0; h < w.unit.num_kv_heads; ++h) {
    for (int r = 0; r < w.head_rows; r += 16) {
      const int rows = w.head_rows - r < 16 ? w.head_rows - r : 16;
      const uint32_t* from = reinterpret_cast<const uint32_t*>(w.q) +
                             (static_cast<int64_t>(h) * w.head_rows + r) * depth;
      for (int d = 0; d < depth; d += 16, to += 16 * 16) {
        memset(square, 0, sizeof(square));
        for (int i = 0; i < rows; ++i) memcpy(square + i * 16, from + int64_t{i} * depth + d, 64);
        transpose_16(square, 16, to, 16);
      }
    }
  }
}

/** The 16 keys from n on as the rows of a tile. */
struct KeyTile {
  const char* data;
  int64_t stride;
};

/** In place if they are equally far apart, else copied. */
template <class S>
ATTNFOLD_LANE_FN KeyTile key_tile(const UnitWork<S>& w, int n, int64_t head_offset, char* copy) {
  const char* const* rows = w.k->row + n;
  const int64_t stride = rows[1] - rows[0], row_bytes = int64_t{w.q_stride} * 2;
  bool even = w.p.head_dim_qk % kChunk == 0;
  for (int i = 2; i < 16; ++i) even = even && rows[i] - rows[i - 1] == stride;
  if (even) return {rows[0] + head_offset, stride};
  const size_t bytes = static_cast<size_t>(w.p.head_dim_qk) * 2;
  for (int i = 0; i < 16; ++i) {
    memcpy(copy + i * row_bytes, rows[i] + head_offset, bytes);
    memset(copy + i * row_bytes + bytes, 0, static_cast<size_t>(row_bytes) - bytes);
  }
  return {copy, row_bytes};
}

/** s[r][n .. n + 16) = scores[.. ][r] for r < rows <= 16. */
ATTNFOLD_LANE_FN void turn_scores(const float* scores, int rows, float* s) {
  if (rows <= 4) {
    __m512 x[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {  // keys j, j + 4, j + 8, j + 12
      x[j] = _mm512_castps128_ps512(_mm_load_ps(scores + j * 16));
      x[j] = _mm512_insertf32x4(x[j], _mm_load_ps(scores + (j + 4) * 16), 1);
      x[j] = _mm512_insertf32x4(x[j], _mm_load_ps(scores + (j + 8) * 16), 2);
      x[j] = _mm512_insertf32x4(x[j], _mm_load_ps(scores + (j + 12) * 16), 3);
    }
    const __m512 a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpacklo_ps(x[2], x[3]);
    const __m512 c = _mm512_unpackhi_ps(x[0], x[1]), d = _mm512_unpackhi_ps(x[2], x[3]);
    const __m512 row[4] = {_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee),
                           _mm512_shuffle_ps(c, d, 0x44), _mm512_shuffle_ps(c, d, 0xee)};
    for (int r = 0; r < rows; ++r) _mm512_storeu_ps(s + r * kLeaf, row[r]);
    return;
  }
  alignas(64) float turned[16 * 16];
  transpose_16(scores, 16, turned, 16);
  for (int r = 0; r < rows; ++r) memcpy(s + r * kLeaf, turned + r * 16, 64);
}

/** From the first group of 16 keys that is wanted to the last. */
struct LeafHull {
  int begin, end;
};

ATTNFOLD_LANE_FN LeafHull hull_of(const UnitLeaf& leaf) {
  LeafHull hull{0, 0};
  for (int n = next_group(leaf, 0); n < kLeaf; n = next_group(leaf, n + 16)) {
    if (hull.end == 0) hull.begin = n;
    hull.end = n + 16;
  }
  return hull;
}

/** Looks ahead to a leaf's rows of k or v. */
template <class S>
ATTNFOLD_LANE_FN Ahead look_at(const UnitWork<S>& w, const LeafRows& rows, LeafHull hull,
                               const View<const char>& view, int head_dim, int num_shares) {
  const int64_t bytes = dtype_bytes(w.p.kv_dtype);
  return look_ahead(rows.row + hull.begin, hull.end - hull.begin, w.unit.kv_head_begin,
                    w.unit.num_kv_heads, view.stride_head * bytes, head_dim * bytes, num_shares);
}

/** Scores of four heads, or fewer, on 16 keys: chains of tile products side by side. */
template <int kHeads>
ATTNFOLD_LANE_FN void score_heads(const KeyTile* k, const uint32_t* const* q, int q_stride,
                                  Ahead* ahead, float (*scores)[16 * 16]) {
  tile_zero<0>();
  if constexpr (kHeads > 1) tile_zero<1>();
  if constexpr (kHeads > 2) tile_zero<2>();
  if constexpr (kHeads > 3) tile_zero<3>();
  for (int c = 0; c < q_stride / kChunk; ++c) {
    tile_load<4>(k[0].data + c * 64, k[0].stride);
    tile_load<5>(q[0] + c * 256, 64);
    tile_multiply<0, 4, 5>();
    ask_ahead(ahead);
    if constexpr (kHeads > 1) {
      tile_load<6>(k[1].data + c * 64, k[1].stride);
      tile_load<7>(q[1] + c * 256, 64);
      tile_multiply<1, 6, 7>();
      ask_ahead(ahead);
    }
    if constexpr (kHeads > 2) {
      tile_load<4>(k[2].data + c * 64, k[2].stride);
      tile_load<5>(q[2] + c * 256, 64);
      tile_multiply<2, 4, 5>();
      ask_ahead(ahead);
    }
    if constexpr (kHeads > 3) {
      tile_load<6>(k[3].data + c * 64, k[3].stride);
      tile_load<7>(q[3] + c * 256, 64);
      tile_multiply<3, 6, 7>();
      ask_ahead(ahead);
    }
  }
  tile_store<0>(scores[0], 64);
  if constexpr (kHeads > 1) tile_store<1>(scores[1], 64);
  if constexpr (kHeads > 2) tile_store<2>(scores[2], 64);
  if constexpr (kHeads > 3) tile_store<3>(scores[3], 64);
}

/** Scores of some heads on 16 keys, as tiles. */
struct ScoreTiles {
  alignas(64) float scores[4][16 * 16];
  float* s[4];  // where they go
  int rows, heads;
};

ATTNFOLD_LANE_FN void turn_tiles(const ScoreTiles& tiles) {
  for (int i = 0; i < tiles.heads; ++i) turn_scores(tiles.scores[i], tiles.rows, tiles.s[i]);
}

/** leaf_scores on tiles: four heads at a time, and turned a step later, when they are stored. */
template <class S>
__attribute__((noinline)) void matrix_scores(const UnitWork<S>& w, const UnitLeaf& keys) {
  Ahead* ahead;
  constexpr int kHeads = 4, kMostDim = 576;
  const MatrixScratch m = matrix_scratch(w);
  const int64_t head_bytes = w.args.tensors.k.stride_head * 2;
  const int row_groups = (w.head_rows + 15) / 16;
  ScoreTiles tiles[2];
  int now = 0;
  tiles[1].heads = 0;
  alignas(64) char copy[kHeads][16 * kMostDim * 2];
  const int first = next_group(keys, 0),
            shares = w.unit.num_kv_heads * row_groups * (w.q_stride / kChunk);
  for (int n = first, next; n < kLeaf; n = next) {
    next = next_group(keys, n + 16);
    Ahead now_ahead =
        next < kLeaf
            ? look_at(w, *w.k, {next, next + 16}, w.args.tensors.k, w.p.head_dim_qk, shares)
            : look_at(w, *w.v, {first, first + 16}, w.args.tensors.v, w.p.head_dim_vo, shares);
    ahead = &now_ahead;
    for (int h = 0; h < w.unit.num_kv_heads; h += kHeads) {
      const int heads = w.unit.num_kv_heads - h < kHeads ? w.unit.num_kv_heads - h : kHeads;
      KeyTile k[kHeads];
      for (int i = 0; i < heads; ++i)
        k[i] = key_tile(w, n, (w.unit.kv_head_begin + h + i) * head_bytes, copy[i]);
      for (int g = 0; g < row_groups; ++g, now = 1 - now) {
        ScoreTiles& to = tiles[now];
        const uint32_t* q[kHeads];
        for (int i = 0; i < heads; ++i) {
          q[i] = m.q + (static_cast<int64_t>(h + i) * row_groups + g) * w.q_stride * 8;
          to.s[i] = w.s + (static_cast<int64_t>(h + i) * w.head_rows + g * 16) * kLeaf + n;
        }
        to.heads = heads;
        to.rows = w.head_rows - g * 16 < 16 ? w.head_rows - g * 16 : 16;
        switch (heads) {
          case 1: score_heads<1>(k, q, w.q_stride, ahead, to.scores); break;
          case 2: score_heads<2>(k, q, w.q_stride, ahead, to.scores); break;
          case 3: score_heads<3>(k, q, w.q_stride, ahead, to.scores); break;
          default: score_heads<4>(k, q, w.q_stride, ahead, to.scores); break;
        }
        turn_tiles(tiles[1 - now]);
      }
    }
  }
  turn_tiles(tiles[1 - now]);
}

/** A tiles of p: three parts of each of up to kPartRows rows; 0 where a row does not see a key. */
template <class S>
ATTNFOLD_LANE_FN void pack_weights(const UnitWork<S>& w, int row, int rows, char* out) {
  for (int r = 0; r < rows; ++r) {
    const LeafKeys& seen = w.seen[(row + r) % w.head_rows / w.p.group_size];
    const int begin = seen.sink > 0 ? 0 : seen.begin & ~15;
    const int end = ((seen.end > seen.begin ? seen.end : seen.sink) + 15) & ~15;
    const float* p = w.s + static_cast<int64_t>(row + r) * kLeaf;
    for (int n = 0; n < kLeaf; n += 32) {
      __m512 a = _mm512_setzero_ps(), b = a;
      if (n >= begin && n < end) a = _mm512_loadu_ps(p + n);
      if (n + 16 >= begin && n + 16 < end) b = _mm512_loadu_ps(p + n + 16);
      char* to = out + (n / 32 * 16 + 3 * r) * 64;
      for (int part = 0; part < 3; ++part) {
        _mm512_store_si512(to + part * 64, upper_halves(a, b));
        a = rest(a);
        b = rest(b);
      }
    }
  }
}

/** o = high + (middle + low) of up to kPartRows rows, in lane order. */
ATTNFOLD_LANE_FN void join_parts(const float* parts, int rows, int64_t dims, float* o,
                                 int64_t o_stride) {
  alignas(64) static const int kEven[16] = {0, 2,  16, 18, 4,  6,  20, 22,
                                            8, 10, 24, 26, 12, 14, 28, 30};
  const __m512i even = _mm512_load_si512(kEven), odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  for (int r = 0; r < rows; ++r) {
    const float* high = parts + 3 * r * kHalfDims;
    const auto sum = [&](int64_t i) {
      return _mm512_add_ps(_mm512_load_ps(high + i),
                           _mm512_add_ps(_mm512_load_ps(high + kHalfDims + i),
                                         _mm512_load_ps(high + 2 * kHalfDims + i)));
    };
    for (int64_t d = 0; d < dims; d += kChunk) {
      const __m512 a = sum(d), b = sum(d + 16);
      _mm512_storeu_ps(o + r * o_stride + d, _mm512_permutex2var_ps(a, even, b));
      _mm512_storeu_ps(o + r * o_stride + d + 16, _mm512_permutex2var_ps(a, odd, b));
    }
  }
}

/** parts of o on keys [32 begin, 32 end): four columns of tiles at a time, or two. */
template <int kColumns>
ATTNFOLD_LANE_FN void value_columns(const char* p, const char* v, int begin, int end, float* o,
                                    int64_t o_stride, Ahead* ahead) {
  tile_zero<0>();
  tile_zero<1>();
  if constexpr (kColumns > 2) {
    tile_zero<2>();
    tile_zero<3>();
  }
  for (int n = begin; n < end; ++n) {
    tile_load<4>(p + n * 1024, 64);
    tile_load<5>(v + n * 1024, 64);
    tile_multiply<0, 4, 5>();
    tile_load<6>(v + kColumnBytes + n * 1024, 64);
    tile_multiply<1, 4, 6>();
    ask_ahead(ahead);
    if constexpr (kColumns > 2) {
      tile_load<7>(v + 2 * kColumnBytes + n * 1024, 64);
      tile_multiply<2, 4, 7>();
      tile_load<5>(v + 3 * kColumnBytes + n * 1024, 64);
      tile_multiply<3, 4, 5>();
      ask_ahead(ahead);
    }
  }
  tile_store<0>(o, o_stride * 4);
  tile_store<1>(o + 16, o_stride * 4);
  if constexpr (kColumns > 2) {
    tile_store<2>(o + 32, o_stride * 4);
    tile_store<3>(o + 48, o_stride * 4);
  }
}

/** B tiles of V of heads [head, head + num_heads) of the unit, in the order in which they lie in
 * memory; true if some values are not finite. */
template <class S>
__attribute__((noinline)) bool pack_pairs(const UnitWork<S>& w, int head, int num_heads, int begin,
                                          int end, char* out) {
  const int64_t head_bytes = w.args.tensors.v.stride_head * 2;
  const int64_t head_tiles = w.leaf.o_stride / 16 * kColumnBytes;
  const int head_dim = w.p.head_dim_vo;
  const LeafRows& rows = *w.v;
  bool special = false;
  const auto pack_keys = [&](int n, int h) {
    char* to = out + h * head_tiles + n / 2 * 64;
    for (int d = 0; d < head_dim; d += kChunk, to += 2 * kColumnBytes) {
      const KeyPair pair = key_pair(rows, (w.unit.kv_head_begin + head + h) * head_bytes, n, begin,
                                    end, d, head_dim, &special);
      _mm512_store_si512(to, pair.low);
      _mm512_store_si512(to + kColumnBytes, pair.high);
    }
  };
  __m512i largest = _mm512_setzero_si512();  // magnitudes: 0x7f80 and above are not finite
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  const bool whole = head_dim % kChunk == 0;
  const int last = (end + 31) / 32 * 32;
  for (int n = begin / 32 * 32; n < last; n += 2) {
    for (int h = 0; h < num_heads; ++h) {
      if (!whole || n < begin || n + 1 >= end) {
        pack_keys(n, h);
        continue;
      }
      const int64_t offset = (w.unit.kv_head_begin + head + h) * head_bytes;
      const char *a = rows.row[n] + offset, *b = rows.row[n + 1] + offset;
      char* to = out + h * head_tiles + n / 2 * 64;
      for (int d = 0; d < head_dim; d += kChunk, to += 2 * kColumnBytes) {
        const __m512i x = _mm512_loadu_si512(a + d * 2), y = _mm512_loadu_si512(b + d * 2);
        largest = _mm512_max_epu16(largest, _mm512_and_si512(x, magnitude));
        largest = _mm512_max_epu16(largest, _mm512_and_si512(y, magnitude));
        _mm512_store_si512(to, _mm512_unpacklo_epi16(x, y));
        _mm512_store_si512(to + kColumnBytes, _mm512_unpackhi_epi16(x, y));
      }
    }
  }
  if (_mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80)) != 0) {
    for (int n = begin / 32 * 32; n < last; n += 2) {
      for (int h = 0; h < num_heads; ++h) pack_keys(n, h);
    }
  }
  return special;
}

/** o of the unit's head h, from its B tiles. */
template <class S>
__attribute__((noinline)) void multiply_values(const UnitWork<S>& w, const char* p, const char* v,
                                               int h, int begin, int end, Ahead* ahead) {
  const int64_t o_stride = w.leaf.o_stride;
  for (int r = 0; r < w.head_rows; r += kPartRows, p += 4096) {
    const int rows = w.head_rows - r < kPartRows ? w.head_rows - r : kPartRows;
    float* o = w.leaf.o + (static_cast<int64_t>(h) * w.head_rows + r) * o_stride;
    const char* column = v;
    for (int64_t d = 0; d < o_stride; d += kHalfDims, column += 4 * kColumnBytes) {
      alignas(64) float parts[16 * kHalfDims];
      const int64_t dims = o_stride - d < kHalfDims ? o_stride - d : kHalfDims;
      if (dims == kHalfDims) {
        value_columns<4>(p, column, begin / 32, (end + 31) / 32, parts, kHalfDims, ahead);
      } else {
        value_columns<2>(p, column, begin / 32, (end + 31) / 32, parts, kHalfDims, ahead);
      }
      join_parts(parts, rows, dims, o + d, o_stride);
    }
  }
}

/** What Inf and NaN do to the rows of the unit's head h. */
template <class S>
__attribute__((noinline)) void add_head_special(const UnitWork<S>& w, int h, int begin, int end) {
  const int64_t head_bytes = w.args.tensors.v.stride_head * 2;
  for (int i = h * w.head_rows; i < (h + 1) * w.head_rows; ++i) {
    const int token = i % w.head_rows / w.p.group_size;
    const LeafKeys& seen = w.seen[token];
    const auto sees = [&](int n) {
      if (w.by_bits) return w.bits[token].has(n);
      return n < seen.sink || (n >= seen.begin && n < seen.end);
    };
    const float* weights = w.s + static_cast<int64_t>(i) * kLeaf;
    add_special(
        *w.v, (w.unit.kv_head_begin + h) * head_bytes, begin, end, w.p.head_dim_vo, sees,
        [&](int n) { return weights[n]; }, w.leaf.o + i * w.leaf.o_stride, 1);
  }
}

/** leaf_values on tiles. */
template <class S>
__attribute__((noinline)) void matrix_values(const UnitWork<S>& w, int begin, int end,
                                             Ahead* ahead) {
  const MatrixScratch m = matrix_scratch(w);
  char* p = m.p;
  for (int h = 0; h < w.unit.num_kv_heads; ++h) {
    for (int r = 0; r < w.head_rows; r += kPartRows, p += 4096) {
      const int rows = w.head_rows - r < kPartRows ? w.head_rows - r : kPartRows;
      pack_weights(w, h * w.head_rows + r, rows, p);
    }
  }
  const int64_t head_parts = (w.head_rows + kPartRows - 1) / kPartRows * int64_t{4096};
  const int64_t head_tiles = w.leaf.o_stride / 16 * kColumnBytes;
  for (int h = 0; h < w.unit.num_kv_heads; h += kPackedHeads) {
    const int left = w.unit.num_kv_heads - h, heads = left < kPackedHeads ? left : kPackedHeads;
    const bool special = pack_pairs(w, h, heads, begin, end, m.v);
    for (int i = 0; i < heads; ++i) {
      multiply_values(w, m.p + (h + i) * head_parts, m.v + i * head_tiles, h + i, begin, end,
                      ahead);
      if (special) add_head_special(w, h + i, begin, end);
    }
  }
}

/** Fills w.leaf; next_keys of the leaf after, if there is one. */
template <class S>
void matrix_leaf(const UnitWork<S>& w, int leaf, const UnitLeaf& keys, const UnitLeaf& next_keys) {
  const LeafHull hull = hull_of(keys), next_hull = hull_of(next_keys);
  matrix_scores(w, keys);
  leaf_weights(w, leaf, keys);
  LeafHull half = next_hull;
  if (half.end > half.begin + 64) half.end = half.begin + 64;
  Ahead ahead = look_at(w, *w.next_k, half, w.args.tensors.k, w.p.head_dim_qk,
                        w.unit.num_kv_heads * static_cast<int>(w.leaf.o_stride / kChunk) *
                            ((w.head_rows + kPartRows - 1) / kPartRows) *
                            ((hull.end + 31) / 32 - hull.begin / 32));
  matrix_values(w, hull.begin, hull.end, &ahead);
}
