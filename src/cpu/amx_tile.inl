// Many rows of one kv head (tile.inl) on AMX tiles.  Included inside the AMX namespace, after
// tile.inl.
//
// Data movement per leaf of 128 keys, for a unit of up to 256 rows in blocks of 32:
//   K      memory -> tiles where 16 keys are equally far apart, else copied to L2 first       A
//   V      memory -> V^T in L2: [o_stride / 16][4][16 elements in lane order][32 keys]      A
//   Q      [blocks, pairs of elements, 32 rows], a block in L1      B
//   S^T    [2][128, 32] f32 in L1, from tiles to lanes
//   P^T    [parts][4][vec][16 pairs of keys][16 rows] bf16 in L1, from lanes to tiles      B
//   O      4 KB of a leaf in L1 at a time, from tiles to lanes
// Here are the pieces, and one block at a time: while tiles multiply V by P, lanes make the weights
// of the next block and fold the elements before.  Tiles and lanes meet in memory alone, and a load
// waits for all stores before it whose addresses are equal in the lower 12 bits: so the loads of
// the next products are issued before the tiles of the last ones are stored.  Meanwhile the next
// leaf's lines are prefetched.  amx_stages.inl has three blocks at a time.

/** 8 elements of 32 keys, from 16 bytes each, to rows of two tiles. */
template <class At>
ATTNFOLD_LANE_FN void transpose_pieces(At at, char* to, __m512i* largest) {
  const auto four = [&](int n) {
    const auto piece = [&](int i) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at(n + 8 * i)));
    };
    __m512i x = _mm512_castsi128_si512(piece(0));
    x = _mm512_inserti32x4(x, piece(1), 1);
    x = _mm512_inserti32x4(x, piece(2), 2);
    return _mm512_inserti32x4(x, piece(3), 3);
  };
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i low[4], high[4];  // elements 0 .. 3, and the others, of pairs w, w + 4, ..
#pragma GCC unroll 4
  for (int w = 0; w < 4; ++w) {
    const __m512i x = four(2 * w), y = four(2 * w + 1);
    *largest = _mm512_max_epu16(
        *largest, _mm512_max_epu16(_mm512_and_si512(x, magnitude), _mm512_and_si512(y, magnitude)));
    low[w] = _mm512_unpacklo_epi16(x, y);
    high[w] = _mm512_unpackhi_epi16(x, y);
  }
  transpose_quarters(low);
  transpose_quarters(high);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // even elements to one tile, odd ones to the next
    _mm512_store_si512(to + i % 2 * 4096 + i / 2 * 64, low[i]);
    _mm512_store_si512(to + i % 2 * 4096 + (2 + i / 2) * 64, high[i]);
  }
}

ATTNFOLD_LANE_FN bool any_special(__m512i largest) {
  return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80)) != 0;
}

/** V^T of keys [begin, end), 0 around them and for Inf and NaN; true if there are any of these. */
inline bool pack_matrix_values(const LeafRows& rows, int64_t head_offset, int begin, int end,
                               int head_dim, char* out) {
  constexpr int kMostDim = 576;
  alignas(64) char keys[32 * kMostDim * 2];
  const int64_t row_bytes = int64_t{padded(head_dim)} * 2;
  bool special = false;
  for (int n = begin / 32 * 32; n < end; n += 32) {
    const auto to = [&](int64_t d) {
      return out + (d / kChunk * 8 + n / 32) * 1024 + d % kChunk / 2 * 64;
    };
    if (n >= begin && n + 32 <= end && head_dim % kChunk == 0) {
      __m512i largest = _mm512_setzero_si512();
      for (int64_t d = 0; d < head_dim; d += 8) {
        const char* const* row = rows.row + n;
        const int64_t offset = head_offset + d * 2;
        transpose_pieces([&](int i) { return row[i] + offset; }, to(d), &largest);
      }
      if (!any_special(largest)) continue;
    }
    for (int i = 0; i < 32; ++i) {
      char* key = keys + i * row_bytes;
      if (n + i < begin || n + i >= end) {
        memset(key, 0, static_cast<size_t>(row_bytes));
        continue;
      }
      for (int d = 0; d < head_dim; d += kChunk) {
        const __m512i x = load_values(rows.row[n + i] + head_offset + d * 2, head_dim - d);
        _mm512_store_si512(key + d * 2, finite(x, &special));
      }
    }
    __m512i largest = _mm512_setzero_si512();
    for (int64_t d = 0; d < row_bytes / 2; d += 8) {
      transpose_pieces([&](int i) { return keys + i * row_bytes + d * 2; }, to(d), &largest);
    }
  }
  return special;
}

/** s[n][r], 32 keys x 32 rows at a time; k of 16 keys each.  stored(n) is called when it will not
 * have to wait for the scores of keys [n, n + 32). */
template <class Stored>
ATTNFOLD_LANE_FN void matrix_tile_scores(const uint32_t* q, const KeyTile* k, int depth, int begin,
                                         int end, float* s, Stored stored) {
  constexpr int64_t kStride = kTileRows * sizeof(float);
  const auto load_step = [&](int n, int d) {
    const KeyTile& a = k[n / 16];
    tile_load_once<4>(a.data + d * 4, a.stride);
    tile_load<6>(q + d * kTileRows, kStride);
    tile_load<7>(q + d * kTileRows + 16, kStride);
    if (n + 16 < end) tile_load_once<5>(k[n / 16 + 1].data + d * 4, k[n / 16 + 1].stride);
  };
  begin &= ~15;
  load_step(begin, 0);
  for (int n = begin; n < end; n += 32) {
    const bool both = n + 16 < end;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int d = 0; d < depth; d += 16) {
      tile_multiply<0, 4, 6>();
      tile_multiply<1, 4, 7>();
      if (both) {
        tile_multiply<2, 5, 6>();
        tile_multiply<3, 5, 7>();
      }
      if (d + 16 < depth) {
        load_step(n, d + 16);
      } else if (n + 32 < end) {
        load_step(n + 32, 0);
      }
    }
    if (n > begin) stored(n - 32);
    tile_store<0>(s + n * kTileRows, kStride);
    tile_store<1>(s + n * kTileRows + 16, kStride);
    if (!both) continue;
    tile_store<2>(s + (n + 16) * kTileRows, kStride);
    tile_store<3>(s + (n + 16) * kTileRows + 16, kStride);
  }
  stored(begin + (end - begin - 1) / 32 * 32);
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

/** The largest scores of a block's rows so far. */
struct BlockMax {
  Lanes of[kTileVecs][2];
  void clear() {
    for (int vec = 0; vec < kTileVecs; ++vec) of[vec][0] = of[vec][1] = splat(kLowest);
  }
};

/** Takes keys [from, to) in. */
template <class S>
ATTNFOLD_LANE_FN void see_scores(const TileWork<S>& tile, const TileKeys& keys, int from, int to,
                                 BlockMax* max) {
  if (from < keys.all_begin || to > keys.all_end || (to - from) % 2 != 0) {
    from = from < keys.begin ? keys.begin : from;
    to = to > keys.end ? keys.end : to;
    for (int vec = 0; vec < kTileVecs; ++vec) {
      for (int n = from; n < to; ++n) {
        const Lanes x = load(tile.s + n * kTileRows + vec * 16);
        const bool all = n >= keys.all_begin && n < keys.all_end;
        max->of[vec][0] =
            max_keep_nan(all ? x : where_seen(tile, vec, n, x, splat(kLowest)), max->of[vec][0]);
      }
    }
    return;
  }
  for (int n = from; n < to; n += 2) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      Lanes& largest = max->of[i % 2][i / 2];
      largest = max_keep_nan(load(tile.s + (n + i / 2) * kTileRows + i % 2 * 16), largest);
    }
  }
}

/** The sum of 16 chains: reduce_add's tree. */
ATTNFOLD_LANE_FN Lanes sum_of_chains(const float (*sum)[16]) {
  const auto quarter = [&](int i) {
    return add(add(load(sum[i]), load(sum[i + 8])), add(load(sum[i + 4]), load(sum[i + 12])));
  };
  return add(add(quarter(0), quarter(2)), add(quarter(1), quarter(3)));
}

/** tile_softmax of a block, to B tiles of P^T, a step at a time; where `s` is also to hold the
 * weights, they go there too. */
template <int kParts, class S>
struct BlockWeights {
  static constexpr int kSteps = kTileVecs * 8;
  const TileWork<S>& tile;
  const TileKeys keys;
  const ScoreMod& mod;
  bool keep;
  Ahead* const ahead;
  char* const out;
  alignas(64) Lanes max[kTileVecs];
  alignas(64) float sums[kTileVecs][16][16];
  bool exact[kTileVecs];
  int done = 0;

  BlockWeights(const TileWork<S>& work, const TileKeys& seen, const ScoreMod& scale,
               const BlockMax& largest, bool keep_weights, Ahead* lines, char* to)
      : tile(work), keys(seen), mod(scale), keep(keep_weights), ahead(lines), out(to) {
    for (int vec = 0; vec < kTileVecs; ++vec) {
      max[vec] = mul(max_keep_nan(largest.of[vec][0], largest.of[vec][1]), splat(mod.scale));
      exact[vec] =
          _mm512_cmp_ps_mask(abs(max[vec]).v, _mm512_set1_ps(kLargeScore), _CMP_LT_OQ) == 0xffff;
    }
  }

  /** As if no step had been: scores are there yet, as they were not kept as weights. */
  void begin_anew(bool keep_weights) {
    done = 0;
    keep = keep_weights;
  }

  /** Weights of each eighth pair of keys of 16 rows. */
  __attribute__((noinline)) void step() {
    const int vec = done / 8, i = done % 8 * 2;
    ++done;
    float* s = tile.s + vec * 16;
    const Lanes scale = splat(mod.scale), scale_low = splat(mod.scale_low);
    const Lanes minus_m = sub(splat(0.0f), max_keep_nan(max[vec], splat(kLowest)));
    const auto exponent = [&](int n) {
      const Lanes x = load(s + n * kTileRows);
      return fma(x, scale, fma(x, scale_low, minus_m));
    };
    const auto weight = [&](int n) { return exp2_of_difference(exponent(n)); };
    const auto edge_weight = [&](int n) {
      if (n < keys.begin || n >= keys.end) return splat(0.0f);
      const Lanes x = load(s + n * kTileRows);
      Lanes y = fma(x, scale, fma(x, scale_low, minus_m));
      if (!exact[vec]) y = select_below(abs(max[vec]), kLargeScore, y, add(mul(x, scale), minus_m));
      const Lanes p = exp2_of_difference(y);
      return n >= keys.all_begin && n < keys.all_end ? p : where_seen(tile, vec, n, p, splat(0.0f));
    };
    const int begin = keys.begin / 32 * 32, end = (keys.end + 31) / 32 * 32;
    Lanes first = splat(0.0f), second = splat(0.0f);
    const auto take = [&](int n, Lanes a, Lanes b) {
      first = add(first, a);
      second = add(second, b);
      store_weights<kParts>(a, b, out + (n / 32 * kTileVecs + vec) * 1024 + (n % 32 + i) / 2 * 64);
    };
    if (__builtin_expect(exact[vec] && !keep && begin >= keys.all_begin && end <= keys.all_end,
                         1)) {
      constexpr int kPairs = 2;
      int n = begin;
      for (; n + kPairs * 16 <= end; n += kPairs * 16) {
        Lanes x[2 * kPairs];
#pragma GCC unroll 16
        for (int j = 0; j < 2 * kPairs; ++j) x[j] = exponent(n + j / 2 * 16 + i + j % 2);
        exp2_of_differences<2 * kPairs>(x);
#pragma GCC unroll 8
        for (int j = 0; j < kPairs; ++j) take(n + j * 16, x[2 * j], x[2 * j + 1]);
      }
      for (; n < end; n += 16) take(n, weight(n + i), weight(n + i + 1));
    } else {
      for (int n = begin; n < end; n += 16) {
        Lanes a, b;
        if (exact[vec] && n >= keys.all_begin && n + 16 <= keys.all_end) {
          a = weight(n + i);
          b = weight(n + i + 1);
        } else {
          a = edge_weight(n + i);
          b = edge_weight(n + i + 1);
        }
        take(n, a, b);
        if (!keep) continue;
        store(s + (n + i) * kTileRows, a);
        store(s + (n + i + 1) * kTileRows, b);
      }
    }
    store(sums[vec][i], first);
    store(sums[vec][i + 1], second);
    ask_ahead(ahead);
    ask_ahead(ahead + 1);
  }

  void finish() {
    while (done < kSteps) step();
    for (int vec = 0; vec < kTileVecs; ++vec) {
      store(tile.leaf.l + vec * 16, sum_of_chains(sums[vec]));
      // Rows that see nothing have -inf there already.
      const Lanes had = load(tile.leaf.m + vec * 16);
      store(tile.leaf.m + vec * 16,
            select_below(had, -1.0f, had, max_keep_nan(max[vec], splat(kLowest))));
    }
  }
};

/** Some elements of o of a block as tiles leave them: 32 of them, or 16 in three parts. */
template <int kParts>
struct ValueTiles {
  static constexpr int kDims = kParts == 1 ? 32 : 16;
  alignas(64) float o[kParts][kDims * kTileRows];

  Lanes joined(int64_t i) const {
    if constexpr (kParts == 1) return load(o[0] + i);
    return add(load(o[0] + i), add(load(o[1] + i), load(o[2] + i)));
  }
  /** What the first step of products takes. */
  ATTNFOLD_LANE_FN void load_first(const char* v, const char* p) {
    tile_load_once<6>(v, 64);
    tile_load<7>(p, 64);
    if constexpr (kParts == 1) {
      tile_load<4>(p + 1024, 64);
      tile_load_once<5>(v + 4096, 64);
    }
  }
  /** On `num` times 32 keys; then the first step of the next, if there are any.  meanwhile(n) is
   * called after each step. */
  template <class Meanwhile>
  ATTNFOLD_LANE_FN void multiply(const char* v, const char* p, int num, const char* next_v,
                                 Meanwhile meanwhile) {
    const char* const first_p = p;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    if constexpr (kParts == 3) {
      tile_zero<4>();
      tile_zero<5>();
    }
    for (int n = 0; n < num; ++n, p += kTileVecs * 1024) {
      const bool more = n + 1 < num;
      if constexpr (kParts == 1) {
        tile_multiply<0, 6, 7>();
        tile_multiply<1, 6, 4>();
        tile_multiply<2, 5, 7>();
        tile_multiply<3, 5, 4>();
        if (more) load_first(v + (n + 1) * 1024, p + kTileVecs * 1024);
      } else {
        tile_multiply<0, 6, 7>();
        tile_load<7>(p + 1024, 64);
        tile_multiply<1, 6, 7>();
        tile_load<7>(p + kWeightBytes, 64);
        tile_multiply<2, 6, 7>();
        tile_load<7>(p + kWeightBytes + 1024, 64);
        tile_multiply<3, 6, 7>();
        tile_load<7>(p + 2 * kWeightBytes, 64);
        tile_multiply<4, 6, 7>();
        tile_load<7>(p + 2 * kWeightBytes + 1024, 64);
        tile_multiply<5, 6, 7>();
        if (more) load_first(v + (n + 1) * 1024, p + kTileVecs * 1024);
      }
      if (!more && next_v != nullptr) load_first(next_v, first_p);
      meanwhile(n);
    }
  }
  ATTNFOLD_LANE_FN void stores(ValueTiles* to) {
    constexpr int64_t kStride = kTileRows * sizeof(float);
    tile_store<0>(to->o[0], kStride);
    tile_store<1>(to->o[0] + 16, kStride);
    if constexpr (kParts == 1) {
      tile_store<2>(to->o[0] + 16 * kTileRows, kStride);
      tile_store<3>(to->o[0] + 16 * kTileRows + 16, kStride);
    } else {
      tile_store<2>(to->o[1], kStride);
      tile_store<3>(to->o[1] + 16, kStride);
      tile_store<4>(to->o[2], kStride);
      tile_store<5>(to->o[2] + 16, kStride);
    }
  }
};

/** o of a block, without what Inf and NaN among the values do: use(d, from, to, tiles) takes
 * stretches of the elements from d on while the next are made, and meanwhile() is called after each
 * step of products.  In small pieces: what waits for a tile fills a core's window otherwise. */
template <int kParts, class Use, class Meanwhile>
ATTNFOLD_LANE_FN void block_values(const char* v, const char* p, const TileKeys& keys,
                                   int64_t o_stride, Use use, Meanwhile meanwhile) {
  using Tiles = ValueTiles<kParts>;
  constexpr int64_t kFloats = Tiles::kDims * kTileRows;
  const int first = keys.begin / 32, num = (keys.end + 31) / 32 - first;
  v += first * 1024;
  p += first * (kTileVecs * 1024);
  const auto at = [&](int64_t d) -> const char* {
    return d < o_stride ? v + d / kChunk * 8192 + d % kChunk / 16 * 4096 : nullptr;
  };
  Tiles tiles;
  Tiles::load_first(v, p);
  Tiles::multiply(v, p, num, at(Tiles::kDims), [&](int) { meanwhile(); });
  Tiles::stores(&tiles);
  const int64_t piece = (4 + num - 1) / num * (kFloats / 4);
  for (int64_t d = 0; d < o_stride; d += Tiles::kDims) {
    const int64_t next = d + Tiles::kDims;
    if (next >= o_stride) {
      use(d, 0, kFloats, tiles);
      break;
    }
    Tiles::multiply(at(next), p, num, at(next + Tiles::kDims), [&](int n) {
      const int64_t from = n * piece, to = from + piece < kFloats ? from + piece : kFloats;
      if (from < to) use(d, from, to, tiles);
      meanwhile();
    });
    Tiles::stores(&tiles);
  }
}

/** o of a block into `o`. */
template <int kParts, class Meanwhile>
__attribute__((noinline)) void put_block_values(const char* v, const char* p, const TileKeys& keys,
                                                int64_t o_stride, float* o, Meanwhile meanwhile) {
  using Tiles = ValueTiles<kParts>;
  block_values<kParts>(
      v, p, keys, o_stride,
      [&](int64_t d, int64_t from, int64_t to, const Tiles& tiles) {
        for (int64_t i = from; i < to; i += 16) store(o + d * kTileRows + i, tiles.joined(i));
      },
      meanwhile);
}

/** m and l of fold_block, and how elements of o fold. */
ATTNFOLD_LANE_FN void begin_fold(const TileStates& a, const TileStates& b, Lanes* scale,
                                 __mmask16* b_leads) {
#pragma GCC unroll 2
  for (int i = 0; i < kTileVecs; ++i) {
    const Lanes m_a = load(a.m + i * 16), m_b = load(b.m + i * 16);
    const FoldLanes lanes = FoldLanes::of(m_a, m_b);
    scale[i] = lanes.scale;
    b_leads[i] = _mm512_cmp_ps_mask(lanes.m_a_less_m_b.v, _mm512_setzero_ps(), _CMP_LT_OQ);
    store(a.m + i * 16, select_below(lanes.m_a_less_m_b, 0.0f, m_b, m_a));
    store(a.l + i * 16, lanes.fold(load(a.l + i * 16), load(b.l + i * 16)));
  }
}

/** fold_block of `a` and the leaf's state, whose o is made meanwhile.  Every row of both has seen a
 * key. */
template <int kParts, class Meanwhile>
__attribute__((noinline)) void fold_block_values(const char* v, const char* p, const TileKeys& keys,
                                                 int64_t o_stride, const TileStates& a,
                                                 const TileStates& b, Meanwhile meanwhile) {
  using Tiles = ValueTiles<kParts>;
  Lanes scale[kTileVecs];
  __mmask16 b_leads[kTileVecs];
  begin_fold(a, b, scale, b_leads);
  block_values<kParts>(
      v, p, keys, o_stride,
      [&](int64_t d, int64_t from, int64_t to, const Tiles& tiles) {
        float* o = a.o + d * kTileRows;
#pragma GCC unroll 4
        for (int64_t i = from; i < to; i += kTileRows) {
#pragma GCC unroll 2
          for (int vec = 0; vec < kTileVecs; ++vec) {
            const __m512 x = load(o + i + vec * 16).v, y = tiles.joined(i + vec * 16).v;
            const __m512 lesser = _mm512_mask_mov_ps(y, b_leads[vec], x);
            const __m512 larger = _mm512_mask_mov_ps(x, b_leads[vec], y);
            store(o + i + vec * 16, {_mm512_fmadd_ps(scale[vec].v, lesser, larger)});
          }
        }
      },
      meanwhile);
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

/** Whether some row of a block has seen nothing before this leaf, or sees nothing of it. */
ATTNFOLD_LANE_FN bool has_empty_rows(const TileStates& a, const TileStates& b) {
  const __m512 none = _mm512_set1_ps(-__builtin_inff());
  __mmask16 any = 0;
  for (int i = 0; i < kTileRows; i += 16) {
    any |= _mm512_cmp_ps_mask(load(a.m + i).v, none, _CMP_EQ_OQ) |
           _mm512_cmp_ps_mask(load(b.m + i).v, none, _CMP_EQ_OQ);
  }
  return any != 0;
}

/** Whether every token of the unit sees all keys of the leaf at hand. */
template <class S>
ATTNFOLD_LANE_FN bool all_see_all(const UnitWork<S>& w) {
  bool all = true;
  for (int t = 0; t < w.unit.num_qo; ++t)
    all = all && w.seen[t].begin == 0 && w.seen[t].end == kLeaf && w.seen[t].sink == 0;
  return all;
}
