// Attention of many rows of one kv head: lanes are rows.  Included inside an ISA's anonymous
// namespace, after attend.inl.
//
// Bits are those of the other kernel: a score is the same 16 chains and the same tree, l the same
// 16 sums over keys and the tree, o[r][d] one chain over the keys.  Here each lane has a row of its
// own, so no sum crosses lanes and softmax costs a fraction.
//
// Data movement per leaf of 128 keys, for a unit of up to 256 rows in blocks of B = 16 or 32:
//   K, V   memory -> float32 in L2, once per leaf: [128, head_dim_qk], [head_dim_vo / 16, 128, 16]
//   Q      [blocks, head_dim_qk, B] transposed once per item, a block in L1
//   S, P   [128, B] in L1, block by block        O leaf  [head_dim_vo, B] in L1
//   O      super-chunk and row [blocks, head_dim_vo, B] in L2

constexpr int kLeastTileRows = 17;  // below them too many lanes would idle

/** Leaf 0 of the tree of 16 lanes first, so that neighbours are summed: reduce_add's order. */
constexpr int kTreeOrder[8] = {0, 4, 2, 6, 1, 5, 3, 7};

/** Folds the sums of 16 chains, which come in kTreeOrder as those of two already: entry `k` meets
 * those before it where reduce_add lets them meet. */
template <int N>
ATTNFOLD_LANE_FN void climb_tree(int k, Lanes* sum, Lanes (*waiting)[N]) {
  for (int level = 0; level < 3; ++level) {
    if (!(k >> level & 1)) {
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) waiting[level][i] = sum[i];
      return;
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) sum[i] = add(waiting[level][i], sum[i]);
  }
}

/** m, l and o of the rows of a unit: o[block][head_dim_vo in lane order][kTileRows]. */
struct TileStates {
  float *m, *l, *o;
  bool empty;  // no row has seen a key
};

/** What a unit's tiles need besides UnitWork. */
template <class S>
struct TileWork {
  int num_blocks;
  int64_t block_q;                // elements of q of a block
  typename S::TileQ* q;           // [block][S::tile_depth][kTileRows]
  char* k;                        // S::pack_keys' layout
  float* v;                       // [o_stride / 16][kLeaf][16], or as pair_values.inl says
  float* s;                       // [kLeaf][kTileRows]
  float *begin, *end, *sink;      // [kTileRows] of the block at hand: what its rows see of the leaf
  TileStates leaf, chunk, total;  // leaf: one block
};

/** Keys of a leaf as rows of a block see them. */
struct TileKeys {
  int begin, end;          // from the first that some row sees to the last
  int all_begin, all_end;  // that all rows see; empty if begin == end
};

template <class S>
ATTNFOLD_LANE_FN TileKeys see_block(const UnitWork<S>& w, const TileWork<S>& tile, int block,
                                    float* m) {
  TileKeys keys{kLeaf, 0, 0, kLeaf};
  const int first = block * kTileRows,
            last = w.rows - first < kTileRows ? w.rows : first + kTileRows;
  for (int r = 0; r < kTileRows; ++r) {
    LeafKeys seen{0, 0, 0};
    if (first + r < last) seen = w.seen[(first + r) / w.p.group_size];
    const bool none = seen.sink == 0 && seen.begin == seen.end;
    tile.sink[r] = static_cast<float>(seen.sink);
    tile.begin[r] = static_cast<float>(seen.begin);
    tile.end[r] = static_cast<float>(seen.end);
    m[r] = none && first + r < last ? -__builtin_inff() : 0.0f;
    if (first + r >= last) continue;
    if (none) {
      keys.all_end = 0;
      continue;
    }
    const int begin = seen.sink > 0 ? 0 : seen.begin;
    const int end = seen.end > seen.begin ? seen.end : seen.sink;
    keys.begin = begin < keys.begin ? begin : keys.begin;
    keys.end = end > keys.end ? end : keys.end;
    // Of [0, sink) and [begin, end) the second counts, or the first if it stands alone.
    const int all_begin = seen.end > seen.begin ? seen.begin : 0;
    keys.all_begin = all_begin > keys.all_begin ? all_begin : keys.all_begin;
    keys.all_end = end < keys.all_end ? end : keys.all_end;
  }
  if (keys.all_begin >= keys.all_end) keys.all_begin = keys.all_end = keys.end;
  if (keys.begin >= keys.end) keys = {0, 0, 0, 0};
  return keys;
}

/** x in the lanes whose row sees key n, `other` elsewhere. */
template <class S>
ATTNFOLD_LANE_FN Lanes where_seen(const TileWork<S>& tile, int vec, int n, Lanes x, Lanes other) {
  const Lanes key = splat(static_cast<float>(n));
  const Lanes past_sink = sub(key, load(tile.sink + vec * 16));
  const Lanes into = sub(key, load(tile.begin + vec * 16));
  const Lanes left = sub(load(tile.end + vec * 16), key);
  const Lanes of_sink = select_below(past_sink, -0.5f, x, other);
  return select_below(left, 0.5f, of_sink, select_below(into, -0.5f, of_sink, x));
}

/** s[n][r] for n in [begin, end), both multiples of kTileKeys; depth is kDepth where that is not 0.
 */
template <class S, int kDepth>
__attribute__((noinline)) void tile_scores(const typename S::TileQ* q, const char* k, int depth,
                                           int begin, int end, float* s) {
  constexpr int N = kTileKeys * kTileVecs;
  if (kDepth > 0) depth = kDepth;
  for (int n = begin; n < end; n += kTileKeys) {
    Lanes waiting[3][N];
#pragma GCC unroll 1
    for (int i = 0; i < 8; ++i) {
      Lanes low[N], high[N];
#pragma GCC unroll 16
      for (int f = 0; f < N; ++f) low[f] = high[f] = splat(0.0f);
      const auto add_step = [&](int at) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int part = 0; part < S::kTileStep / 16; ++part) {
          S::template tile_step<N>(q, k, n, depth, at + part * 16, low);
          S::template tile_step<N>(q, k, n, depth, at + part * 16 + 8, high);
        }
      };
      if constexpr (kDepth > 0) {
#pragma GCC unroll 4
        for (int at = 0; at < kDepth; at += S::kTileStep) add_step(kTreeOrder[i] + at);
      } else {
#pragma GCC unroll 2
        for (int at = kTreeOrder[i]; at < depth; at += S::kTileStep) add_step(at);
      }
#pragma GCC unroll 16
      for (int f = 0; f < N; ++f) low[f] = add(low[f], high[f]);
      climb_tree<N>(i, low, waiting);
      if (i < 7) continue;
#pragma GCC unroll 16
      for (int f = 0; f < N; ++f) store(s + n * kTileRows + f * 16, low[f]);
    }
  }
}

/** s of rows [16 vec, 16 vec + 16) becomes p; leaf_softmax, lane by lane. */
template <class S>
__attribute__((noinline)) void tile_softmax(const TileWork<S>& tile, int vec, const TileKeys& keys,
                                            const ScoreMod& mod) {
  float* s = tile.s + vec * 16;
  const auto is_edge = [&](int n) { return n < keys.all_begin || n >= keys.all_end; };
  Lanes largest = splat(kLowest);
  for (int n = keys.begin; n < keys.end; ++n) {
    Lanes x = load(s + n * kTileRows);
    if (is_edge(n)) x = where_seen(tile, vec, n, x, splat(kLowest));
    largest = max_keep_nan(x, largest);
  }
  const Lanes scale = splat(mod.scale), scale_low = splat(mod.scale_low);
  const Lanes max = mul(largest, scale);
  const Lanes m = max_keep_nan(max, splat(kLowest)), minus_m = sub(splat(0.0f), m);
  alignas(64) float all[16];
  store(all, abs(max));
  bool exact = true;
  for (int i = 0; i < 16; ++i) exact = exact && all[i] < kLargeScore;
  for (int n = keys.begin; n < keys.end; ++n) {
    const Lanes x = load(s + n * kTileRows);
    Lanes y = fma(x, scale, fma(x, scale_low, minus_m));
    if (!exact) y = select_below(abs(max), kLargeScore, y, add(mul(x, scale), minus_m));
    Lanes p = exp2_lanes(y);
    if (is_edge(n)) p = where_seen(tile, vec, n, p, splat(0.0f));
    store(s + n * kTileRows, p);
  }
  Lanes waiting[3][1], sum[1], high;
  for (int i = 0; i < 8; ++i) {
    sum[0] = high = splat(0.0f);
    for (int n = kTreeOrder[i]; n < kLeaf; n += 16) {
      if (n >= keys.begin && n < keys.end) sum[0] = add(sum[0], load(s + n * kTileRows));
      if (n + 8 >= keys.begin && n + 8 < keys.end) high = add(high, load(s + (n + 8) * kTileRows));
    }
    sum[0] = add(sum[0], high);
    climb_tree<1>(i, sum, waiting);
  }
  store(tile.leaf.l + vec * 16, sum[0]);
  // Rows that see nothing have -inf there already.
  const Lanes had = load(tile.leaf.m + vec * 16);
  store(tile.leaf.m + vec * 16, select_below(had, -1.0f, had, m));
}

/** kTileDims elements of o on keys [begin, end), which every row sees. */
ATTNFOLD_LANE_FN void tile_dims(const float* v, const float* p, int begin, int end, Lanes* acc) {
#pragma GCC unroll 2
  for (int n = begin; n < end; ++n) {
    Lanes weight[kTileVecs];
#pragma GCC unroll 2
    for (int i = 0; i < kTileVecs; ++i) weight[i] = load(p + n * kTileRows + i * 16);
#pragma GCC unroll 8
    for (int d = 0; d < kTileDims; ++d) {
      const Lanes x = splat(v[n * 16 + d]);
#pragma GCC unroll 2
      for (int i = 0; i < kTileVecs; ++i)
        acc[d * kTileVecs + i] = fma(weight[i], x, acc[d * kTileVecs + i]);
    }
  }
}

/** The same where some rows do not see a key. */
template <class S>
void tile_edge_dims(const TileWork<S>& tile, const float* v, int begin, int end, Lanes* acc) {
  for (int n = begin; n < end; ++n) {
    for (int d = 0; d < kTileDims; ++d) {
      for (int i = 0; i < kTileVecs; ++i) {
        Lanes& a = acc[d * kTileVecs + i];
        const Lanes sum = fma(load(tile.s + n * kTileRows + i * 16), splat(v[n * 16 + d]), a);
        a = where_seen(tile, i, n, sum, a);
      }
    }
  }
}

template <class S>
__attribute__((noinline)) void tile_values(const TileWork<S>& tile, const TileKeys& keys,
                                           int64_t o_stride) {
  for (int64_t d = 0; d < o_stride; d += kTileDims) {
    const float* v = tile.v + d / 16 * (kLeaf * 16) + d % 16;
    Lanes acc[kTileDims * kTileVecs];
#pragma GCC unroll 16
    for (int i = 0; i < kTileDims * kTileVecs; ++i) acc[i] = splat(0.0f);
    if (keys.begin < keys.all_begin) tile_edge_dims(tile, v, keys.begin, keys.all_begin, acc);
    tile_dims(v, tile.s, keys.all_begin, keys.all_end, acc);
    if (keys.all_end < keys.end) tile_edge_dims(tile, v, keys.all_end, keys.end, acc);
#pragma GCC unroll 16
    for (int i = 0; i < kTileDims * kTileVecs; ++i)
      store(tile.leaf.o + d * kTileRows + i * 16, acc[i]);
  }
}

/** Which of two states of a lane leads; as lanes, fold_step and fold_value. */
struct FoldLanes {
  Lanes m_a_less_m_b, scale;
  ATTNFOLD_LANE_FN FoldLanes of(Lanes m_a, Lanes m_b) {
    const Lanes less = sub(m_a, m_b);
    return {less, exp2_lanes(select_below(less, 0.0f, less, sub(m_b, m_a)))};
  }
  Lanes fold(Lanes a, Lanes b) const {
    return fma(scale, select_below(m_a_less_m_b, 0.0f, a, b),
               select_below(m_a_less_m_b, 0.0f, b, a));
  }
};

/** fold_block where some rows have seen nothing yet, or see nothing of b. */
void fold_rows(const TileStates& a, const TileStates& b, int64_t o_stride) {
  const float none = -__builtin_inff();
  for (int r = 0; r < kTileRows; ++r) {
    if (b.m[r] == none) continue;
    const bool alone = a.m[r] == none;
    const FoldStep step = alone ? FoldStep{true, 0.0f} : fold_step(a.m[r], b.m[r]);
    a.l[r] = alone ? b.l[r] : fold_value(step, a.l[r], b.l[r]);
    if (step.b_leads) a.m[r] = b.m[r];
    for (int64_t d = 0; d < o_stride; ++d) {
      float& o = a.o[d * kTileRows + r];
      o = alone ? b.o[d * kTileRows + r] : fold_value(step, o, b.o[d * kTileRows + r]);
    }
  }
}

/** a = fold(a, b) for one block: core/fold.h, lane by lane. */
void fold_block(const TileStates& a, const TileStates& b, int64_t o_stride) {
  Lanes least = splat(0.0f);  // of -m
  for (int i = 0; i < kTileRows; i += 16) {
    least = max_keep_nan(sub(splat(0.0f), load(a.m + i)), least);
    least = max_keep_nan(sub(splat(0.0f), load(b.m + i)), least);
  }
  if (reduce_max(least) == __builtin_inff()) return fold_rows(a, b, o_stride);
  for (int i = 0; i < kTileRows; i += 16) {
    const Lanes m_a = load(a.m + i), m_b = load(b.m + i);
    const FoldLanes lanes = FoldLanes::of(m_a, m_b);
    store(a.m + i, select_below(lanes.m_a_less_m_b, 0.0f, m_b, m_a));
    store(a.l + i, lanes.fold(load(a.l + i), load(b.l + i)));
    for (int64_t d = 0; d < o_stride; ++d) {
      float* o = a.o + d * kTileRows + i;
      store(o, lanes.fold(load(o), load(b.o + d * kTileRows + i)));
    }
  }
}

ATTNFOLD_LANE_FN TileStates block_of(const TileStates& s, int block, int64_t o_stride) {
  return {s.m + block * kTileRows, s.l + block * kTileRows, s.o + block * o_stride * kTileRows,
          s.empty};
}

/** a = fold(a, b) for all blocks; b's place holds anything afterwards. */
void fold_tiles(TileStates* a, TileStates* b, int num_blocks, int64_t o_stride) {
  if (b->empty) return;
  if (a->empty) {
    const TileStates was = *a;
    *a = *b;
    *b = was;
    return;
  }
  for (int i = 0; i < num_blocks; ++i)
    fold_block(block_of(*a, i, o_stride), block_of(*b, i, o_stride), o_stride);
}

/** Keys [begin, end) of v under one head, widened: [d / 16][key][16]. */
template <DType T>
void pack_values(const LeafRows& rows, int64_t head_offset, int begin, int end, int head_dim,
                 float* out) {
  for (int n = begin; n < end; ++n) {
    const char* row = rows.row[n] + head_offset;
    for (int d = 0; d < head_dim; d += kChunk) {
      const char* at = row + d * dtype_bytes(T);
      const Pair x = head_dim - d >= kChunk ? load32<T>(at) : load32_partial<T>(at, head_dim - d);
      store(out + (d / 16 * kLeaf + n) * 16, x.a);
      store(out + ((d / 16 + 1) * kLeaf + n) * 16, x.b);
    }
  }
}

template <class S>
ATTNFOLD_LANE_FN void tile_block_values(const TileWork<S>& tile, const TileKeys& keys,
                                        int64_t o_stride) {
  if constexpr (S::kKeyPairs) {
    pair_tile_values(tile, keys, o_stride);
  } else {
    tile_values(tile, keys, o_stride);
  }
}

/** Prefetches keys and values [begin, end) of the leaf that w.k and w.v point at.  Inlined early,
 * or gcc drops a call that only prefetches. */
template <DType T, class S>
ATTNFOLD_LANE_FN void prefetch_rows(const UnitWork<S>& w, int begin, int end) {
  const Tensors& t = w.args.tensors;
  const int64_t bytes = dtype_bytes(T), head = w.unit.kv_head_begin;
  for (int n = begin; n < end; ++n) {
    const char* k = w.k->row[n] + head * t.k.stride_head * bytes;
    const char* v = w.v->row[n] + head * t.v.stride_head * bytes;
    for (int64_t b = 0; b < w.p.head_dim_qk * bytes; b += 64) prefetch(k + b);
    for (int64_t b = 0; b < w.p.head_dim_vo * bytes; b += 64) prefetch(v + b);
  }
}

/** Folds one leaf of all rows into `chunk`; `next` is the leaf after, or -1. */
template <DType T, class S>
__attribute__((noinline)) void tile_leaf(UnitWork<S>& w, TileWork<S>& tile, int leaf, int next) {
  const Lengths& lengths = *w.args.lengths;
  const Tensors& t = w.args.tensors;
  const UnitLeaf keys = unit_leaf(w, leaf);
  const int64_t bytes = dtype_bytes(T), head = w.unit.kv_head_begin;
  point_rows(w.p, lengths, t.k, bytes, w.unit.request, leaf, keys, w.k);
  point_rows(w.p, lengths, t.v, bytes, w.unit.request, leaf, keys, w.v);
  see_leaf(w, leaf, keys);
  const int begin = keys.keys.sink > 0 ? 0 : keys.keys.begin & ~15;
  const int end = ((keys.keys.end > keys.keys.begin ? keys.keys.end : keys.keys.sink) + 15) & ~15;
  S::pack_keys(*w.k, head * t.k.stride_head * bytes, begin, end, w.p.head_dim_qk, tile.k);
  const int64_t v_offset = head * t.v.stride_head * bytes;
  if constexpr (S::kKeyPairs) {
    pack_value_pairs(*w.v, v_offset, begin, end, w.p.head_dim_vo, tile.v);
  } else {
    pack_values<T>(*w.v, v_offset, begin, end, w.p.head_dim_vo, tile.v);
  }
  const int64_t o_stride = w.leaf.o_stride;
  LeafKeys ahead{};
  if (S::kKeyPairs && next >= 0) {  // elsewhere not measured
    const UnitLeaf next_keys = unit_leaf(w, next);
    point_rows(w.p, lengths, t.k, bytes, w.unit.request, next, next_keys, w.k);
    point_rows(w.p, lengths, t.v, bytes, w.unit.request, next, next_keys, w.v);
    ahead = next_keys.keys;
  }
  [[maybe_unused]] const int share =
      (ahead.end - ahead.begin + tile.num_blocks - 1) / tile.num_blocks;
  const ScoreMod mod = score_mod(w, 0);
  constexpr int kUsualDepth = S::kKeyPairs ? 64 : 0;  // of head dim 128 in pairs
  const int depth = S::tile_depth(w.q_stride);
  for (int block = 0; block < tile.num_blocks; ++block) {
    if constexpr (S::kKeyPairs) {
      const int share_end = ahead.begin + share < ahead.end ? ahead.begin + share : ahead.end;
      prefetch_rows<T>(w, ahead.begin, share_end);
      ahead.begin = share_end;
    }
    const TileKeys seen = see_block(w, tile, block, tile.leaf.m);
    if (seen.begin == seen.end) {
      if (tile.chunk.empty) {
        for (int r = 0; r < kTileRows; ++r) tile.chunk.m[block * kTileRows + r] = tile.leaf.m[r];
      }
      continue;
    }
    const auto scores = depth == kUsualDepth ? tile_scores<S, kUsualDepth> : tile_scores<S, 0>;
    scores(tile.q + block * tile.block_q, tile.k, depth, seen.begin / kTileKeys * kTileKeys,
           (seen.end + kTileKeys - 1) / kTileKeys * kTileKeys, tile.s);
    for (int vec = 0; vec < kTileVecs; ++vec) tile_softmax(tile, vec, seen, mod);
    const TileStates chunk = block_of(tile.chunk, block, o_stride);
    if (tile.chunk.empty) {
      memcpy(chunk.m, tile.leaf.m, kTileRows * sizeof(float));
      memcpy(chunk.l, tile.leaf.l, kTileRows * sizeof(float));
      float* leaf_o = tile.leaf.o;
      tile.leaf.o = chunk.o;
      tile_block_values(tile, seen, o_stride);
      tile.leaf.o = leaf_o;
    } else {
      tile_block_values(tile, seen, o_stride);
      fold_block(chunk, tile.leaf, o_stride);
    }
  }
  tile.chunk.empty = false;
}

/** Rows [16 group, 16 group + rows) of a state, row by row, into `out`; o in lane order. */
ATTNFOLD_LANE_FN void rows_of(const TileStates& s, int group, int rows, int64_t o_stride,
                              const States& out) {
  const float* o = s.o + group / kTileVecs * o_stride * kTileRows + group % kTileVecs * 16;
  memcpy(out.m, s.m + group * 16, static_cast<size_t>(rows) * sizeof(float));
  memcpy(out.l, s.l + group * 16, static_cast<size_t>(rows) * sizeof(float));
  alignas(64) float square[16 * 16];
  for (int64_t d = 0; d < o_stride; d += 16) {
    float* to = rows == 16 ? out.o + d : square;
    transpose_16(o + d * kTileRows, kTileRows, to, rows == 16 ? o_stride : 16);
    if (rows == 16) continue;
    for (int r = 0; r < rows; ++r) memcpy(out.o + r * o_stride + d, square + r * 16, 64);
  }
}

template <class S>
TileWork<S> open_tiles(const UnitWork<S>& w) {
  char* at = w.tiles;
  const int64_t o_stride = w.leaf.o_stride;
  TileWork<S> tile{};
  tile.num_blocks = (w.rows + kTileRows - 1) / kTileRows;
  tile.block_q = int64_t{S::tile_depth(w.q_stride)} * kTileRows;
  const size_t rows = static_cast<size_t>(tile.num_blocks) * kTileRows;
  tile.q = take<typename S::TileQ>(at, tile.block_q * tile.num_blocks);
  tile.k = take<char>(at, static_cast<size_t>(kLeaf) * w.q_stride * sizeof(float));
  tile.v = take<float>(at, kLeaf * o_stride);
  tile.s = take<float>(at, kLeaf * kTileRows);
  tile.begin = take<float>(at, kTileRows);
  tile.end = take<float>(at, kTileRows);
  tile.sink = take<float>(at, kTileRows);
  TileStates* const states[] = {&tile.leaf, &tile.chunk, &tile.total};
  for (TileStates* s : states) {
    const size_t n = s == &tile.leaf ? kTileRows : rows;
    s->m = take<float>(at, n);
    s->l = take<float>(at, n);
    s->o = take<float>(at, n * o_stride);
    s->empty = true;
  }
  return tile;
}

/** Whether lanes are rows for a unit. */
template <class S>
bool is_tiled(const UnitWork<S>& w) {
  const Tensors& t = w.args.tensors;
  return w.unit.num_kv_heads == 1 && w.rows >= kLeastTileRows && w.p.softcap == 0.0f &&
         t.alibi_slopes == nullptr && w.p.blocks.block_size == 0 &&
         (w.args.lengths->mask_width == nullptr || w.unit.num_members > 0 ||
          w.args.lengths->mask_width[w.unit.request] == 0) &&
         t.k_scale.data == nullptr && t.v_scale.data == nullptr;
}

template <class S>
void transpose_queries(const UnitWork<S>& w, const TileWork<S>& tile) {
  using Q = typename S::TileQ;
  const int depth = S::tile_depth(w.q_stride);
  const Q* from = reinterpret_cast<const Q*>(w.q);
  alignas(64) Q square[16 * 16];
  for (int group = 0; group < tile.num_blocks * kTileVecs; ++group) {
    Q* to = tile.q + group / kTileVecs * tile.block_q + group % kTileVecs * 16;
    const int left = w.rows - group * 16, rows = left < 0 ? 0 : left < 16 ? left : 16;
    const Q* row = from + static_cast<int64_t>(group) * 16 * depth;
    for (int d = 0; d < depth; d += 16) {
      if (rows == 16) {
        transpose_16(row + d, depth, to + d * kTileRows, kTileRows);
        continue;
      }
      memset(square, 0, sizeof(square));
      for (int r = 0; r < rows; ++r) memcpy(square + r * 16, row + int64_t{r} * depth + d, 64);
      transpose_16(square, 16, to + d * kTileRows, kTileRows);
    }
  }
}

/** One item, span by span; attend_item's loop. */
template <DType T, class S>
__attribute__((noinline)) void attend_tiles(UnitWork<S>& w, const Item& item) {
  TileWork<S> tile = open_tiles(w);
  const int64_t o_stride = w.leaf.o_stride;
  float* slot = item.state_offset < 0 ? nullptr : w.args.states + item.state_offset;
  if (item.leaf_begin < item.leaf_end) transpose_queries(w, tile);
  const int groups = (w.rows + 15) / 16;
  for (int at = item.leaf_begin; at < item.leaf_end;) {
    const Span span = span_at(w.unit, item, at);
    tile.total.empty = true;
    while (at < span.leaf_end) {
      const int edge = chunk_end(w.unit, at);
      const int end = edge < span.leaf_end ? edge : span.leaf_end;
      tile.chunk.empty = true;
      if constexpr (S::kMatrix) {
        matrix_tile_leaves(w, tile, at, end, item.leaf_end);
        at = end;
      } else {
        for (; at < end; ++at) {
          tile_leaf<T>(w, tile, leaf_at(w.unit, at),
                       at + 1 < item.leaf_end ? leaf_at(w.unit, at + 1) : -1);
        }
      }
      if (span.kind == SpanKind::row)
        fold_tiles(&tile.total, &tile.chunk, tile.num_blocks, o_stride);
    }
    const TileStates& done = span.kind == SpanKind::row ? tile.total : tile.chunk;
    if (slot == nullptr) continue;
    const States out = states_at(slot, w.rows, o_stride);
    for (int g = 0; g < groups; ++g) {
      rows_of(done, g, w.rows - g * 16 < 16 ? w.rows - g * 16 : 16, o_stride,
              from_row(out, g * 16));
    }
    slot += static_cast<int64_t>(w.rows) * state_row_floats(w.p);
  }
  if (item.state_offset >= 0) return;
  for (int g = 0; g < groups; ++g) {
    const int rows = w.rows - g * 16 < 16 ? w.rows - g * 16 : 16;
    if (tile.total.empty) {
      clear_states(w.leaf, rows);
    } else {
      rows_of(tile.total, g, rows, o_stride, w.leaf);
    }
    States total = w.leaf;
    total.m -= g * 16;
    total.l -= g * 16;
    total.o -= g * 16 * o_stride;
    finish_rows(w.args, w.unit, total, S::kOrder, g * 16, g * 16 + rows);
  }
}
