// The weighted sum of values by vdpbf16ps: weights rounded to bf16, keys in pairs.  Included inside
// the AVX-512 bf16 namespace, after tile.inl.
//
// Pair j of a leaf is keys 2 j and 2 j + 1, and o[r][d] one chain of vdpbf16ps over the pairs,
// ascending, whatever the blocking and whether lanes are elements or rows.  Of a pair that a row
// sees in half the other half is zero for that row, weight and value: no 0 * NaN can arise.
// l is summed before weights are rounded, so lse has the bits of the row with float32 weights.
//
//   P      rounded in place: a row's [kLeaf] f32 become [kLeaf / 2] words, lower half the even key
//   V      words of two rows interleaved within 128 bits: LaneOrder::quads

constexpr int kPairs = kLeaf / 2;

struct ValueWords {
  __m512i low, high;  // first and second half of LaneOrder::quads
};
ATTNFOLD_LANE_FN ValueWords interleave(__m512i even, __m512i odd) {
  return {_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd)};
}

ATTNFOLD_LANE_FN Lanes dot_pairs(Lanes acc, __m512i weight, __m512i value) {
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(weight),
                           reinterpret_cast<__m512bh>(value))};
}

// Without optimisation, or under sanitizers, gcc has a warning for what it does not unroll.
#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define ATTNFOLD_ROLLED _Pragma("GCC unroll 1")
#else
#define ATTNFOLD_ROLLED
#endif

// ------------------------------------------------ lanes are elements

/** p of one row becomes [kPairs] words. */
ATTNFOLD_LANE_FN void round_row_weights(float* p) {
  for (int n = 0; n < kLeaf; n += 32) {
    const __m512bh words = _mm512_cvtne2ps_pbh(load(p + n + 16).v, load(p + n).v);
    _mm512_storeu_si512(p + n / 2, reinterpret_cast<__m512i>(words));
  }
}

/** The state of one row on a leaf of which it sees all keys, but for o: leaf_softmax, and weights
 * rounded.  False, and nothing done, where scores are modified or too large. */
ATTNFOLD_LANE_FN bool round_whole_leaf(float* s, const ScoreMod& mod, float* m, float* l) {
  if (mod.softcap || mod.alibi || mod.key_scale) return false;
  constexpr int kVecs = kLeaf / 16;
  Lanes x[kVecs], largest = splat(kLowest), sum = splat(0.0f);
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) {
    x[i] = load(s + i * 16);
    largest = max_keep_nan(x[i], largest);  // passes over NaN
  }
  const float max = reduce_max(largest) * mod.scale;
  if (!(max > -kLargeScore && max < kLargeScore)) return false;
  const Lanes scale = splat(mod.scale), scale_low = splat(mod.scale_low), minus_m = splat(-max);
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) {
    x[i] = exp2_lanes(fma(x[i], scale, fma(x[i], scale_low, minus_m)));
    sum = add(sum, x[i]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kVecs; i += 2) {
    const __m512bh words = _mm512_cvtne2ps_pbh(x[i + 1].v, x[i].v);
    _mm512_storeu_si512(s + i * 8, reinterpret_cast<__m512i>(words));
  }
  *m = max;
  *l = reduce_add(sum);
  return true;
}

/** o[r] += the pairs of num_keys keys for one part of each row of v, C chunks of 32 from element
 * `begin` on, the last of which may end at `tail`; o[r] = them if `fresh`.  Of the keys those in
 * `seen` count, or all.
 * prefetch_for(j, k), k < 4, is called before pair j + k. */
template <int R, int C, bool kAll, bool kPartial, class Prefetch>
ATTNFOLD_LANE_FN void pair_part(const uint32_t* p, const char* const* values, int num_keys,
                                int64_t head_offset, uint32_t seen, int begin, int tail, bool fresh,
                                float* o, int64_t o_stride, const Prefetch& prefetch_for) {
  // Pairs in a step: a load instruction that goes on by two keys from step to step misleads the
  // prefetch of Zen 4, by eight it does not.
  constexpr int U = 4;
  const __mmask32 whole = kPartial ? (1u << tail) - 1 : ~0u;
  const int64_t offset = head_offset + begin * 2;
  float* o_part = o + begin;
  Lanes acc[R][2 * C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * C; ++i) acc[r][i] = splat(0.0f);
  }
  if (!fresh) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < 2 * C; ++i) acc[r][i] = load(o_part + r * o_stride + i * 16);
    }
  }
  ATTNFOLD_ROLLED
  for (int j = 0; j < num_keys / 2; j += U) {
#pragma GCC unroll 4
    for (int k = 0; k < U; ++k) {
      const char *a = values[2 * (j + k)] + offset, *b = values[2 * (j + k) + 1] + offset;
      prefetch_for(j, k);
      __m512i even[C], odd[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        if constexpr (kAll && !kPartial) {
          even[c] = _mm512_loadu_si512(a + c * 64);
          odd[c] = _mm512_loadu_si512(b + c * 64);
        } else {
          const uint32_t pair = kAll ? 3 : seen >> (2 * (j + k));
          even[c] = _mm512_maskz_loadu_epi16(pair & 1 ? whole : 0, a + c * 64);
          odd[c] = _mm512_maskz_loadu_epi16(pair & 2 ? whole : 0, b + c * 64);
        }
      }
      ValueWords x[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) x[c] = interleave(even[c], odd[c]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512i weight = _mm512_set1_epi32(static_cast<int>(p[r * kLeaf + j + k]));
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
          acc[r][2 * c] = dot_pairs(acc[r][2 * c], weight, x[c].low);
          acc[r][2 * c + 1] = dot_pairs(acc[r][2 * c + 1], weight, x[c].high);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * C; ++i) store(o_part + r * o_stride + i * 16, acc[r][i]);
  }
}

/** The same over whole rows of v, of kDim elements, all keys; as many rows ahead are prefetched as
 * keys are at hand, with kAhead.  What is asked for that fast does not always come: values are
 * asked for once more shortly before, 16 keys ahead, which Zen 4 reads from memory 1.03 to 1.09
 * times as fast. */
template <int R, int kDim, bool kAhead>
__attribute__((noinline)) void all_pairs_block(const uint32_t* p, const char* const* values,
                                               int num_keys, bool fresh, int64_t head_offset,
                                               const char* const* ahead, float* o) {
  constexpr int kMost = R <= 2 ? 4 : R <= 4 ? 2 : 1;
  constexpr int C = kMost < kDim / kChunk ? kMost : kDim / kChunk;
  constexpr int kAgain = 16;
  const char* row = nullptr;
  int begin = 0;
  // Inlined early, or gcc drops a call that only prefetches.
  const auto prefetch_for = [&](int j, int k) __attribute__((always_inline)) {
    if (!kAhead) return;
#pragma GCC unroll 8
    for (int i = 0; i < 2 * C; ++i) {
      const int line = (k * 2 * C + i) % (kDim / kChunk);
      if (line == 0) row = *ahead++;
      prefetch(row + line * 64);
    }
    if (R > 4 || 2 * j + kAgain >= num_keys) return;
#pragma GCC unroll 8
    for (int i = 0; i < 2 * C; ++i) {
      const char* soon = values[2 * (j + k) + kAgain + i / C] + head_offset;
      prefetch(soon + begin * 2 + i % C * 64);
    }
  };
#pragma GCC unroll 1
  for (; begin < kDim; begin += C * kChunk) {
    // Else weights stay in registers between parts, and spill.
    __asm__ volatile("" : "+r"(p));
    pair_part<R, C, true, false>(p, values, num_keys, head_offset, 0, begin, 0, fresh, o, kDim,
                                 prefetch_for);
  }
}

/** The same for any head_dim, and for the keys in `seen` if not all count; the same part of each
 * row ahead is prefetched. */
template <int R, bool kAll>
__attribute__((noinline)) void pair_block(const uint32_t* p, const char* const* values,
                                          int num_keys, bool fresh, int64_t head_offset,
                                          uint32_t seen, int head_dim, const char* const* ahead,
                                          float* o, int64_t o_stride) {
  const auto add = [&]<int C, bool kPartial>(int begin) {
    __asm__ volatile("" : "+r"(p));
    const auto prefetch_for = [&](int j, int k) __attribute__((always_inline)) {
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        prefetch(ahead[2 * (j + k)] + begin * 2 + c * 64);
        prefetch(ahead[2 * (j + k) + 1] + begin * 2 + c * 64);
      }
    };
    pair_part<R, C, kAll, kPartial>(p, values, num_keys, head_offset, seen, begin, head_dim - begin,
                                    fresh, o, o_stride, prefetch_for);
  };
  int begin = 0;
#pragma GCC unroll 1
  for (; begin + 2 * kChunk <= head_dim; begin += 2 * kChunk)
    add.template operator()<2, false>(begin);
  if (begin + kChunk <= head_dim) {
    add.template operator()<1, false>(begin);
    begin += kChunk;
  }
  if (begin < head_dim) add.template operator()<1, true>(begin);
}

/** o of rows [row, row + rows) on the 16 keys from n on: rows that see the same of them together.
 */
template <class S>
void pair_values(const UnitWork<S>& w, int row, int rows, int n, int64_t head_offset,
                 const char* const* ahead) {
  const auto keys_of = [&](int r) {
    const int token = r % w.head_rows / w.p.group_size;
    return (w.by_bits ? w.bits[token] : bits_in(w.seen[token])).of_16(n);
  };
  uint32_t seen = keys_of(row);
  for (int end = row + rows; row < end;) {
    const uint32_t keys = seen;
    int count = 1;
    while (row + count < end && (seen = keys_of(row + count)) == keys) ++count;
    const uint32_t* p = reinterpret_cast<const uint32_t*>(w.s + row * kLeaf) + n / 2;
    float* o = w.leaf.o + row * w.leaf.o_stride;
    const auto add = [&]<int R>() {
      const auto block = keys == 0xffff ? pair_block<R, true> : pair_block<R, false>;
      block(p, w.v->row + n, 16, false, head_offset, keys, w.p.head_dim_vo, ahead, o,
            w.leaf.o_stride);
    };
    if (keys != 0) {
      if (count == 1) add.template operator()<1>();
      if (count == 2) add.template operator()<2>();
      if (count == 3) add.template operator()<3>();
      if (count == 4) add.template operator()<4>();
    }
    row += count;
  }
}

/** o of the rows of one kv head from `row` on, on num_keys keys from n on, all of which they see.
 */
template <class S>
void all_pair_values(const UnitWork<S>& w, int row, int n, int num_keys, bool fresh,
                     int64_t head_offset, const char* const* ahead) {
  const char* const* values = w.v->row + n;
  const int head_dim = w.p.head_dim_vo;
  const auto add = [&]<int R, bool kAhead>(int r) {
    const uint32_t* p = reinterpret_cast<const uint32_t*>(w.s + (row + r) * kLeaf) + n / 2;
    float* o = w.leaf.o + (row + r) * w.leaf.o_stride;
    if (head_dim == 128) {
      all_pairs_block<R, 128, kAhead>(p, values, num_keys, fresh, head_offset, ahead, o);
    } else if (head_dim == 64) {
      all_pairs_block<R, 64, kAhead>(p, values, num_keys, fresh, head_offset, ahead, o);
    } else {
      pair_block<R, true>(p, values, num_keys, fresh, head_offset, 0, head_dim,
                          kAhead ? ahead : values, o, w.leaf.o_stride);
    }
  };
  const auto add_rows = [&]<bool kAhead>(int r, int rows) {
    if (rows == 1) add.template operator()<1, kAhead>(r);
    if (rows == 2) add.template operator()<2, kAhead>(r);
    if (rows == 3) add.template operator()<3, kAhead>(r);
    if (rows >= 4) add.template operator()<4, kAhead>(r);
  };
  int r = 0;
  if (w.head_rows >= 8 && head_dim == 128) {
    add.template operator()<8, true>(0);
    for (r = 8; r + 8 <= w.head_rows; r += 8) add.template operator()<8, false>(r);
  }
  if (r == 0) {
    add_rows.template operator()<true>(0, w.head_rows);
    r = kMaxRowBlock;
  }
  for (; r < w.head_rows; r += kMaxRowBlock)
    add_rows.template operator()<false>(r, w.head_rows - r);
}

// ------------------------------------------------ lanes are rows

/** Keys [begin, end), multiples of 16, of v under one head: [d / 16 in lane order][kPairs][16]
 * words. */
void pack_value_pairs(const LeafRows& rows, int64_t head_offset, int begin, int end, int head_dim,
                      float* out) {
  uint32_t* words = reinterpret_cast<uint32_t*>(out);
  for (int n = begin; n < end; n += 2) {
    const char *a = rows.row[n] + head_offset, *b = rows.row[n + 1] + head_offset;
    for (int d = 0; d < head_dim; d += kChunk) {
      const __mmask32 some = head_dim - d < kChunk ? (1u << (head_dim - d)) - 1 : ~0u;
      const ValueWords x = interleave(_mm512_maskz_loadu_epi16(some, a + d * 2),
                                      _mm512_maskz_loadu_epi16(some, b + d * 2));
      _mm512_storeu_si512(words + (d / 16 * kPairs + n / 2) * 16, x.low);
      _mm512_storeu_si512(words + ((d / 16 + 1) * kPairs + n / 2) * 16, x.high);
    }
  }
}

/** p of a block, [kLeaf][kTileRows], becomes words [kPairs][kTileRows]; keys outside [begin, end)
 * get no weight. */
ATTNFOLD_LANE_FN void round_tile_weights(float* p, int begin, int end) {
  const __m512i by_row =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                       21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int j = begin / 2; j < (end + 1) / 2; ++j) {
    for (int i = 0; i < kTileRows; i += 16) {
      const float* at = p + 2 * j * kTileRows + i;
      const Lanes even = 2 * j >= begin ? load(at) : splat(0.0f);
      const Lanes odd = 2 * j + 1 < end ? load(at + kTileRows) : splat(0.0f);
      const __m512bh words = _mm512_cvtne2ps_pbh(odd.v, even.v);
      _mm512_storeu_si512(p + j * kTileRows + i,
                          _mm512_permutexvar_epi16(by_row, reinterpret_cast<__m512i>(words)));
    }
  }
}

/** kTileDims elements of o on pairs [begin, end), which every row sees whole. */
ATTNFOLD_LANE_FN void pair_dims(const uint32_t* v, const uint32_t* p, int begin, int end,
                                Lanes* acc) {
#pragma GCC unroll 2
  for (int j = begin; j < end; ++j) {
    __m512i weight[kTileVecs];
#pragma GCC unroll 2
    for (int i = 0; i < kTileVecs; ++i) weight[i] = _mm512_loadu_si512(p + j * kTileRows + i * 16);
#pragma GCC unroll 8
    for (int d = 0; d < kTileDims; ++d) {
      const __m512i x = _mm512_set1_epi32(static_cast<int>(v[j * 16 + d]));
#pragma GCC unroll 2
      for (int i = 0; i < kTileVecs; ++i)
        acc[d * kTileVecs + i] = dot_pairs(acc[d * kTileVecs + i], weight[i], x);
    }
  }
}

/** Lanes whose row sees key n. */
template <class S>
ATTNFOLD_LANE_FN __mmask16 seeing(const TileWork<S>& tile, int vec, int n) {
  return _mm512_cmp_ps_mask(where_seen(tile, vec, n, splat(1.0f), splat(0.0f)).v,
                            _mm512_setzero_ps(), _CMP_NEQ_UQ);
}

/** The same where some rows see half of a pair, or none. */
template <class S>
void pair_edge_dims(const TileWork<S>& tile, const uint32_t* v, const uint32_t* p, int begin,
                    int end, Lanes* acc) {
  for (int j = begin; j < end; ++j) {
    for (int i = 0; i < kTileVecs; ++i) {
      const __mmask16 even = seeing(tile, i, 2 * j), odd = seeing(tile, i, 2 * j + 1);
      const __m512i weight = _mm512_loadu_si512(p + j * kTileRows + i * 16);
      for (int d = 0; d < kTileDims; ++d) {
        const uint32_t word = v[j * 16 + d];
        const auto add = [&](uint32_t value) {
          return dot_pairs(acc[d * kTileVecs + i], weight,
                           _mm512_set1_epi32(static_cast<int>(value)));
        };
        const Lanes both = add(word), of_even = add(word & 0xffffu),
                    of_odd = add(word & 0xffff0000u);
        __m512& a = acc[d * kTileVecs + i].v;
        a = _mm512_mask_mov_ps(a, even & odd, both.v);
        a = _mm512_mask_mov_ps(a, even & ~odd, of_even.v);
        a = _mm512_mask_mov_ps(a, ~even & odd, of_odd.v);
      }
    }
  }
}

template <class S>
__attribute__((noinline)) void pair_tile_values(const TileWork<S>& tile, const TileKeys& keys,
                                                int64_t o_stride) {
  round_tile_weights(tile.s, keys.begin, keys.end);
  const uint32_t* p = reinterpret_cast<const uint32_t*>(tile.s);
  const int begin = keys.begin / 2, end = (keys.end + 1) / 2;
  int all_begin = (keys.all_begin + 1) / 2, all_end = keys.all_end / 2;
  if (all_begin >= all_end) all_begin = all_end = end;
  for (int64_t d = 0; d < o_stride; d += kTileDims) {
    const uint32_t* v = reinterpret_cast<const uint32_t*>(tile.v) + d / 16 * (kPairs * 16) + d % 16;
    float* o = tile.leaf.o + d * kTileRows;
    Lanes acc[kTileDims * kTileVecs];
#pragma GCC unroll 16
    for (int i = 0; i < kTileDims * kTileVecs; ++i) acc[i] = splat(0.0f);
    if (begin == all_begin && all_end == end) {  // then acc stays in registers
      pair_dims(v, p, begin, end, acc);
#pragma GCC unroll 16
      for (int i = 0; i < kTileDims * kTileVecs; ++i) store(o + i * 16, acc[i]);
      continue;
    }
    Lanes edges[kTileDims * kTileVecs];
    for (int i = 0; i < kTileDims * kTileVecs; ++i) edges[i] = splat(0.0f);
    if (begin < all_begin) pair_edge_dims(tile, v, p, begin, all_begin, edges);
    pair_dims(v, p, all_begin, all_end, edges);
    if (all_end < end) pair_edge_dims(tile, v, p, all_end, end, edges);
    for (int i = 0; i < kTileDims * kTileVecs; ++i) store(o + i * 16, edges[i]);
  }
}

#undef ATTNFOLD_ROLLED
