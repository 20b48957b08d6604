// Few rows of several heads (attend.inl) on AMX tiles.  Included inside the AMX namespace, after
// amx.inl.

constexpr int kValueColumns = 4;               // tiles of elements multiplied at a time
constexpr int kColumnBytes = 4096;             // of one of them: B tiles of 128 keys
constexpr int kHalfDims = kValueColumns * 16;  // elements
constexpr int kHalfBytes = kValueColumns * kColumnBytes;

/** Rows of a unit that share a tile of weights. */
template <int kParts>
constexpr int kPartRows = 16 / kParts;

/** Scratch of a unit in w.tiles. */
struct MatrixScratch {
  uint32_t* q;  // [head][group of 16 rows][q_stride / 32][16 pairs][columns]
  char* v;      // [2][kValueColumns][4][16 pairs of keys][64 bytes]
  char* p;      // [head][block of kPartRows rows][4][16 parts of rows][64 bytes]
  int columns;  // of a B tile of q
};

/** Rows of q fill as many columns of a tile, and of its place in L1. */
template <class S>
ATTNFOLD_LANE_FN int score_columns(const UnitWork<S>& w) {
  return w.head_rows <= 4 ? 4 : 16;
}

template <class S>
ATTNFOLD_LANE_FN MatrixScratch matrix_scratch(const UnitWork<S>& w) {
  char* at = w.tiles;
  const int64_t row_groups = (w.head_rows + 15) / 16;
  MatrixScratch m;
  m.columns = score_columns(w);
  m.q = take<uint32_t>(
      at, static_cast<size_t>(w.unit.num_kv_heads * row_groups * w.q_stride / 2) * m.columns);
  m.v = take<char>(at, 2 * kHalfBytes);
  m.p = at;
  return m;
}

/** Tiles of scores: S^T = K Q^T with as many columns as there are rows of q. */
ATTNFOLD_LANE_FN void score_shapes(int columns) {
  TileShapes shapes;
  for (int t = 0; t < 8; ++t) shapes.set(t, 16, t == 4 || t == 6 ? 64 : columns * 4);
  shapes.configure();
}
/** Tiles of values: O = P V with as many rows as P has. */
ATTNFOLD_LANE_FN void value_shapes(int rows) {
  TileShapes shapes;
  for (int t = 0; t < 8; ++t) shapes.set(t, t < 5 ? rows : 16, 64);
  shapes.configure();
}

/** B tiles of q. */
template <class S>
void pack_matrix_queries(const UnitWork<S>& w) {
  const MatrixScratch m = matrix_scratch(w);
  const int depth = w.q_stride / 2;
  uint32_t* to = m.q;
  for (int h = 0; h < w.unit.num_kv_heads; ++h) {
    for (int r = 0; r < w.head_rows; r += 16) {
      const int rows = w.head_rows - r < 16 ? w.head_rows - r : 16;
      const uint32_t* from = reinterpret_cast<const uint32_t*>(w.q) +
                             (static_cast<int64_t>(h) * w.head_rows + r) * depth;
      for (int d = 0; d < depth; ++d, to += m.columns) {
        for (int i = 0; i < m.columns; ++i) to[i] = i < rows ? from[int64_t{i} * depth + d] : 0;
      }
    }
  }
}

/** 16 keys as the rows of a tile. */
struct KeyTile {
  const char* data;
  int64_t stride;
};

/** How far apart the 16 keys from `rows` on are, or 0 where they are not equally far, or their ends
 * are not those of chunks. */
ATTNFOLD_LANE_FN int64_t even_stride(const char* const* rows, int head_dim) {
  const int64_t stride = rows[1] - rows[0];
  bool even = head_dim % kChunk == 0;
  for (int i = 2; i < 16; ++i) even = even && rows[i] - rows[i - 1] == stride;
  return even ? stride : 0;
}

/** In place if they are equally far apart, else copied. */
ATTNFOLD_LANE_FN KeyTile key_tile(const char* const* rows, int64_t stride, int64_t head_offset,
                                  int head_dim, int64_t row_bytes, char* copy) {
  if (stride != 0) return {rows[0] + head_offset, stride};
  const size_t bytes = static_cast<size_t>(head_dim) * 2;
  for (int i = 0; i < 16; ++i) {
    memcpy(copy + i * row_bytes, rows[i] + head_offset, bytes);
    memset(copy + i * row_bytes + bytes, 0, static_cast<size_t>(row_bytes) - bytes);
  }
  return {copy, row_bytes};
}

/** s[r][n .. n + 16) = scores[.. ][r] for r < rows, which are columns of scores. */
ATTNFOLD_LANE_FN void turn_scores(const float* scores, int columns, int rows, float* s) {
  if (columns == 4) {
    alignas(64) static const int kTurned[16] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                2, 6, 10, 14, 3, 7, 11, 15};
    __m512i x[4];  // keys 4 j .. 4 j + 3
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) x[j] = _mm512_load_si512(scores + j * 16);
    transpose_quarters(x);  // of row r: keys 4 j + i in word j of quarter i
    const __m512i turned = _mm512_load_si512(kTurned);
    for (int r = 0; r < rows; ++r)
      _mm512_storeu_si512(s + r * kLeaf, _mm512_permutexvar_epi32(turned, x[r]));
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
ATTNFOLD_LANE_FN void score_heads(const KeyTile* k, const uint32_t* const* q, int columns,
                                  int q_stride, Ahead* ahead, float (*scores)[16 * 16]) {
  const int64_t q_row = columns * 4, q_tile = columns * 16;
  tile_zero<0>();
  if constexpr (kHeads > 1) tile_zero<1>();
  if constexpr (kHeads > 2) tile_zero<2>();
  if constexpr (kHeads > 3) tile_zero<3>();
  for (int c = 0; c < q_stride / kChunk; ++c) {
    tile_load<4>(k[0].data + c * 64, k[0].stride);
    tile_load<5>(q[0] + c * q_tile, q_row);
    tile_multiply<0, 4, 5>();
    ask_ahead(ahead);
    if constexpr (kHeads > 1) {
      tile_load<6>(k[1].data + c * 64, k[1].stride);
      tile_load<7>(q[1] + c * q_tile, q_row);
      tile_multiply<1, 6, 7>();
      ask_ahead(ahead);
    }
    if constexpr (kHeads > 2) {
      tile_load<4>(k[2].data + c * 64, k[2].stride);
      tile_load<5>(q[2] + c * q_tile, q_row);
      tile_multiply<2, 4, 5>();
      ask_ahead(ahead);
    }
    if constexpr (kHeads > 3) {
      tile_load<6>(k[3].data + c * 64, k[3].stride);
      tile_load<7>(q[3] + c * q_tile, q_row);
      tile_multiply<3, 6, 7>();
      ask_ahead(ahead);
    }
  }
  tile_store<0>(scores[0], q_row);
  if constexpr (kHeads > 1) tile_store<1>(scores[1], q_row);
  if constexpr (kHeads > 2) tile_store<2>(scores[2], q_row);
  if constexpr (kHeads > 3) tile_store<3>(scores[3], q_row);
}

/** Scores of some heads on 16 keys, as tiles. */
struct ScoreTiles {
  alignas(64) float scores[4][16 * 16];
  float* s[4];  // where they go
  int rows, heads, columns;
};

ATTNFOLD_LANE_FN void turn_tiles(const ScoreTiles& tiles) {
  for (int i = 0; i < tiles.heads; ++i)
    turn_scores(tiles.scores[i], tiles.columns, tiles.rows, tiles.s[i]);
}

/** leaf_scores on tiles: four heads at a time, and turned a step later, when they are stored.
 * Meanwhile the 16 keys that come next are prefetched, or else the first 16 values. */
template <class S>
__attribute__((noinline)) void matrix_scores(const UnitWork<S>& w, const UnitLeaf& keys) {
  constexpr int kHeads = 4, kMostDim = 576;
  const MatrixScratch m = matrix_scratch(w);
  const int64_t head_bytes = w.args.tensors.k.stride_head * 2, row_bytes = int64_t{w.q_stride} * 2;
  const int row_groups = (w.head_rows + 15) / 16;
  const int64_t q_floats = int64_t{w.q_stride} / 2 * m.columns;
  ScoreTiles tiles[2];
  int now = 0;
  tiles[1].heads = 0;
  alignas(64) char copy[kHeads][16 * kMostDim * 2];
  score_shapes(m.columns);
  const int shares = w.unit.num_kv_heads * row_groups * (w.q_stride / kChunk);
  const int first = next_group(keys, 0);
  for (int n = first, next; n < kLeaf; n = next) {
    next = next_group(keys, n + 16);
    Ahead ahead =
        next < kLeaf
            ? look_at(w, *w.k, {next, next + 16}, w.args.tensors.k, w.p.head_dim_qk, shares)
            : look_at(w, *w.v, {first, first + 16}, w.args.tensors.v, w.p.head_dim_vo, shares);
    const int64_t stride = even_stride(w.k->row + n, w.p.head_dim_qk);
    for (int h = 0; h < w.unit.num_kv_heads; h += kHeads) {
      const int heads = w.unit.num_kv_heads - h < kHeads ? w.unit.num_kv_heads - h : kHeads;
      KeyTile k[kHeads];
      for (int i = 0; i < heads; ++i) {
        k[i] = key_tile(w.k->row + n, stride, (w.unit.kv_head_begin + h + i) * head_bytes,
                        w.p.head_dim_qk, row_bytes, copy[i]);
      }
      for (int g = 0; g < row_groups; ++g, now = 1 - now) {
        ScoreTiles& to = tiles[now];
        const uint32_t* q[kHeads];
        for (int i = 0; i < heads; ++i) {
          q[i] = m.q + (static_cast<int64_t>(h + i) * row_groups + g) * q_floats;
          to.s[i] = w.s + (static_cast<int64_t>(h + i) * w.head_rows + g * 16) * kLeaf + n;
        }
        to.heads = heads;
        to.rows = w.head_rows - g * 16 < 16 ? w.head_rows - g * 16 : 16;
        to.columns = m.columns;
        switch (heads) {
          case 1: score_heads<1>(k, q, m.columns, w.q_stride, &ahead, to.scores); break;
          case 2: score_heads<2>(k, q, m.columns, w.q_stride, &ahead, to.scores); break;
          case 3: score_heads<3>(k, q, m.columns, w.q_stride, &ahead, to.scores); break;
          default: score_heads<4>(k, q, m.columns, w.q_stride, &ahead, to.scores); break;
        }
        turn_tiles(tiles[1 - now]);
      }
    }
  }
  turn_tiles(tiles[1 - now]);
}

/** A tiles of p: the parts of each of up to kPartRows rows; 0 where a row does not see a key. */
template <int kParts, class S>
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
      char* to = out + (n / 32 * 16 + kParts * r) * 64;
      if constexpr (kParts == 1) {
        _mm512_store_si512(to, round_to_bf16({a}, {b}));
        continue;
      }
      for (int part = 0; part < kParts; ++part) {
        _mm512_store_si512(to + part * 64, upper_halves(a, b));
        a = rest(a);
        b = rest(b);
      }
    }
  }
}

/** o of up to kPartRows rows, in lane order, joined from their parts: high + (middle + low).  True
 * if some are not finite. */
template <int kParts>
ATTNFOLD_LANE_FN bool join_parts(const float* parts, int rows, int64_t dims, float* o,
                                 int64_t o_stride) {
  alignas(64) static const int kEven[16] = {0, 2,  16, 18, 4,  6,  20, 22,
                                            8, 10, 24, 26, 12, 14, 28, 30};
  constexpr int kNotFinite = 0x99;
  const __m512i even = _mm512_load_si512(kEven), odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  __mmask16 special = 0;
  for (int r = 0; r < rows; ++r) {
    const float* high = parts + kParts * r * kHalfDims;
    const auto sum = [&](int64_t i) {
      __m512 x = _mm512_load_ps(high + i);
      if constexpr (kParts == 3) {
        x = _mm512_add_ps(x, _mm512_add_ps(_mm512_load_ps(high + kHalfDims + i),
                                           _mm512_load_ps(high + 2 * kHalfDims + i)));
      }
      special |= _mm512_fpclass_ps_mask(x, kNotFinite);
      return x;
    };
    for (int64_t d = 0; d < dims; d += kChunk) {
      const __m512 a = sum(d), b = sum(d + 16);
      _mm512_storeu_ps(o + r * o_stride + d, _mm512_permutex2var_ps(a, even, b));
      _mm512_storeu_ps(o + r * o_stride + d + 16, _mm512_permutex2var_ps(a, odd, b));
    }
  }
  return special != 0;
}

/** Parts of o on keys [32 begin, 32 end): four columns of tiles at a time, or two. */
template <int kColumns>
ATTNFOLD_LANE_FN void value_columns(const char* p, const char* v, int begin, int end, float* o,
                                    Ahead* ahead) {
  constexpr int64_t kStride = kHalfDims * sizeof(float);
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
  tile_store<0>(o, kStride);
  tile_store<1>(o + 16, kStride);
  if constexpr (kColumns > 2) {
    tile_store<2>(o + 32, kStride);
    tile_store<3>(o + 48, kStride);
  }
}

/** B tiles of kColumns / 2 chunks of V from element d on, keys [begin, end) and 0 around them. */
template <int kColumns>
ATTNFOLD_LANE_FN void pack_pairs(const LeafRows& rows, int64_t offset, int begin, int end,
                                 char* out) {
  for (int n = begin / 32 * 32; n < (end + 31) / 32 * 32; n += 2) {
    char* to = out + n / 2 * 64;
    if (n < begin || n >= end) {  // both: they are multiples of 16
      for (int c = 0; c < kColumns; ++c)
        _mm512_store_si512(to + c * kColumnBytes, _mm512_setzero_si512());
      continue;
    }
    const char *a = rows.row[n] + offset, *b = rows.row[n + 1] + offset;
#pragma GCC unroll 2
    for (int c = 0; c < kColumns; c += 2) {
      const __m512i x = _mm512_loadu_si512(a + c * 32), y = _mm512_loadu_si512(b + c * 32);
      _mm512_store_si512(to + c * kColumnBytes, _mm512_unpacklo_epi16(x, y));
      _mm512_store_si512(to + (c + 1) * kColumnBytes, _mm512_unpackhi_epi16(x, y));
    }
  }
}

/** The same where a row may end inside a chunk, or values may be Inf or NaN; true if some are. */
inline bool pack_pairs_carefully(const LeafRows& rows, int64_t head_offset, int begin, int end,
                                 int d, int head_dim, char* out) {
  bool special = false;
  for (int n = begin / 32 * 32; n < (end + 31) / 32 * 32; n += 2) {
    for (int c = 0; c < kValueColumns && d + c * 16 < head_dim; c += 2) {
      const KeyPair pair =
          key_pair(rows, head_offset, n, begin, end, d + c * 16, head_dim, &special);
      char* to = out + c * kColumnBytes + n / 2 * 64;
      _mm512_store_si512(to, pair.low);
      _mm512_store_si512(to + kColumnBytes, pair.high);
    }
  }
  return special;
}

/** A stretch of kHalfDims elements of one head, or what is left of the head. */
struct ValueHalf {
  int head, d;
};

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

/** leaf_values on tiles.  Half a head at a time: packed while the half before is multiplied, and
 * joined while the one after is.  Inf and NaN among the values show in o, as 0 * Inf is NaN: only
 * then are they looked for. */
template <class S>
__attribute__((noinline)) void matrix_values(const UnitWork<S>& w, int begin, int end,
                                             Ahead* ahead) {
  constexpr int kParts = S::kWeightParts, kRows = kPartRows<kParts>;
  const MatrixScratch m = matrix_scratch(w);
  const int blocks = (w.head_rows + kRows - 1) / kRows;
  const int64_t o_stride = w.leaf.o_stride, head_bytes = w.args.tensors.v.stride_head * 2;
  const int head_dim = w.p.head_dim_vo;
  for (int h = 0; h < w.unit.num_kv_heads; ++h) {
    for (int b = 0; b < blocks; ++b) {
      const int left = w.head_rows - b * kRows;
      pack_weights<kParts>(w, h * w.head_rows + b * kRows, left < kRows ? left : kRows,
                           m.p + (h * blocks + b) * int64_t{4096});
    }
  }
  value_shapes(blocks == 1 ? w.head_rows * kParts : kRows * kParts);
  const int first = begin / 32, last = (end + 31) / 32;
  alignas(64) float parts[2][16 * kHalfDims];
  struct Join {
    int head, block;
    int64_t d;
  } waiting{-1, 0, 0};
  int now = 0;
  uint64_t special_heads[kMostUnitRows / 64] = {};
  const auto mark = [&](int h) { special_heads[h / 64] |= uint64_t{1} << h % 64; };
  const auto join = [&](int of) {
    if (waiting.head < 0) return;
    const int row = waiting.head * w.head_rows + waiting.block * kRows;
    const int left = w.head_rows - waiting.block * kRows, rows = left < kRows ? left : kRows;
    const int64_t dims =
        o_stride - waiting.d < kHalfDims ? o_stride - waiting.d : int64_t{kHalfDims};
    if (join_parts<kParts>(parts[of], rows, dims, w.leaf.o + row * o_stride + waiting.d, o_stride))
      mark(waiting.head);
  };
  const auto pack = [&](int h, int64_t d, char* to) {
    const int64_t offset = (w.unit.kv_head_begin + h) * head_bytes;
    if (head_dim - d >= kHalfDims) {
      pack_pairs<kValueColumns>(*w.v, offset + d * 2, begin, end, to);
    } else if (head_dim - d == kChunk) {
      pack_pairs<2>(*w.v, offset + d * 2, begin, end, to);
    } else if (pack_pairs_carefully(*w.v, offset, begin, end, static_cast<int>(d), head_dim, to)) {
      mark(h);
    }
  };
  const auto multiply = [&](int h, int64_t d, const char* v) {
    for (int b = 0; b < blocks; ++b, now = 1 - now) {
      const char* p = m.p + (h * blocks + b) * int64_t{4096};
      if (o_stride - d >= kHalfDims) {
        value_columns<kValueColumns>(p, v, first, last, parts[now], ahead);
      } else {
        value_columns<2>(p, v, first, last, parts[now], ahead);
      }
      join(1 - now);
      waiting = {h, b, d};
    }
  };
  int packed = 0;
  pack(0, 0, m.v);
  for (int h = 0; h < w.unit.num_kv_heads; ++h) {
    for (int64_t d = 0; d < o_stride; d += kHalfDims, packed = 1 - packed) {
      if (d + kHalfDims < o_stride) {
        pack(h, d + kHalfDims, m.v + (1 - packed) * kHalfBytes);
      } else if (h + 1 < w.unit.num_kv_heads) {
        pack(h + 1, 0, m.v + (1 - packed) * kHalfBytes);
      }
      multiply(h, d, m.v + packed * kHalfBytes);
    }
  }
  join(1 - now);
  uint64_t found[kMostUnitRows / 64];
  memcpy(found, special_heads, sizeof(found));
  for (int h = 0; h < w.unit.num_kv_heads; ++h) {
    if (!(found[h / 64] >> h % 64 & 1)) continue;
    Ahead none{};
    ahead = &none;
    waiting.head = -1;
    bool special = false;
    for (int64_t d = 0; d < o_stride; d += kHalfDims) {
      special |= pack_pairs_carefully(*w.v, (w.unit.kv_head_begin + h) * head_bytes, begin, end,
                                      static_cast<int>(d), head_dim, m.v);
      multiply(h, d, m.v);
    }
    join(1 - now);
    if (special) add_head_special(w, h, begin, end);
  }
}

/** Fills w.leaf; next_keys of the leaf after, if there is one. */
template <class S>
void matrix_leaf(const UnitWork<S>& w, int leaf, const UnitLeaf& keys, const UnitLeaf& next_keys) {
  const LeafHull hull = hull_of(keys);
  LeafHull next_hull = hull_of(next_keys);
  matrix_scores(w, keys);
  leaf_weights(w, leaf, keys);
  constexpr int kRows = kPartRows<S::kWeightParts>;
  if (next_hull.end > next_hull.begin + 64) next_hull.end = next_hull.begin + 64;
  Ahead ahead =
      look_at(w, *w.next_k, next_hull, w.args.tensors.k, w.p.head_dim_qk,
              w.unit.num_kv_heads * static_cast<int>(w.leaf.o_stride / kChunk) *
                  ((w.head_rows + kRows - 1) / kRows) * ((hull.end + 31) / 32 - hull.begin / 32));
  matrix_values(w, hull.begin, hull.end, &ahead);
}
