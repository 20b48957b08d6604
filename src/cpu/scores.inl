// Scores of a block of rows on a block of keys.  Included inside an ISA's anonymous namespace,
// after its Lanes.
//
// One score is 16 lane chains over the head dim, summed by the one tree of reduce_add.  A decode's
// single row and a prefill's tile take the same chains, so a token's score has the same bits from
// both.
//
// Per block of R rows x N keys: N key rows read once from memory, R query rows from L1; R x N
// accumulators.

/** Row pointers of one leaf's keys or values: entry n is key leaf * kLeaf + n, kv head 0. */
struct LeafRows {
  const char* row[kLeaf];
};

constexpr int kTileRows = 16 * kTileVecs;  // of a block of tile.inl

template <DType T>
ATTNFOLD_LANE_FN void widen_elements(const void* from, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = load_f32(from, T, i);
}

/** n elements, widened: exact. */
ATTNFOLD_LANE_FN void widen_row(const void* from, DType type, int n, float* out) {
  switch (type) {
    case DType::f16: return widen_elements<DType::f16>(from, n, out);
    case DType::bf16: return widen_elements<DType::bf16>(from, n, out);
    default: return widen_elements<DType::f32>(from, n, out);
  }
}

/** 32 elements past `n` read as 0; nothing past `n` is touched. */
template <DType T>
ATTNFOLD_LANE_FN Pair load32_partial(const char* p, int n) {
  alignas(64) char chunk[kChunk * 4] = {};
  memcpy(chunk, p, static_cast<size_t>(n) * dtype_bytes(T));
  return load32<T>(chunk);
}

/** Where element e of a chunk of 32 stands in [a | b] of load32. */
template <DType T>
ATTNFOLD_LANE_FN constexpr int lane_slot(int e) {
  return T == DType::bf16 ? (e % 2) * 16 + e / 2 : e;
}

/** How 32 elements of o lie in 32 lanes. */
enum class LaneOrder {
  plain,   // one after the other
  halves,  // even ones first, as load32 has bf16
  quads    // 4 of each 8 first, as the words of two rows are interleaved within 128 bits
};
ATTNFOLD_LANE_FN constexpr int lane_of(LaneOrder order, int e) {
  if (order == LaneOrder::quads) return e % 8 / 4 * 16 + e / 8 * 4 + e % 4;
  return order == LaneOrder::halves ? lane_slot<DType::bf16>(e) : e;
}
ATTNFOLD_LANE_FN constexpr LaneOrder order_of(DType type) {
  return type == DType::bf16 ? LaneOrder::halves : LaneOrder::plain;
}

/** Scores by float32 fma on widened keys; q in float32, in lane order. */
template <DType T>
struct FmaScores {
  using Q = float;
  static constexpr DType kKeys = T;
  static constexpr bool kMatrix = false;
  static constexpr bool kKeyPairs = false;
  static int keys_together(int) { return 16; }
  static constexpr LaneOrder kOrder = order_of(T);
  struct Mode {};
  using Chunk = Pair;
  ATTNFOLD_LANE_FN Chunk load_chunk(const char* k) { return load32<T>(k); }
  ATTNFOLD_LANE_FN Chunk load_partial(const char* k, int n) { return load32_partial<T>(k, n); }
  ATTNFOLD_LANE_FN Lanes step(const Q* q, Chunk k, Lanes acc) {
    return fma(load(q + 16), k.b, fma(load(q), k.a, acc));
  }
  static void pack_q(const void* q, DType q_dtype, int head_dim, Q* out) {
    for (int c = 0; c < head_dim; c += kChunk) {
      const int n = head_dim - c < kChunk ? head_dim - c : kChunk;
      float chunk[kChunk] = {};
      widen_row(static_cast<const char*>(q) + c * dtype_bytes(q_dtype), q_dtype, n, chunk);
      for (int e = 0; e < kChunk; ++e) out[c + lane_slot<T>(e)] = chunk[e];
    }
  }

  // In tiles: widened keys, in lane order.
  using TileQ = float;
  static constexpr int kTileStep = kChunk;
  static int tile_depth(int q_stride) { return q_stride; }
  static void pack_keys(const LeafRows& rows, int64_t head_offset, int begin, int end, int head_dim,
                        char* out) {
    const int depth = padded(head_dim);
    for (int n = begin; n < end; ++n) {
      const char* row = rows.row[n] + head_offset;
      float* to = reinterpret_cast<float*>(out) + n * depth;
      for (int d = 0; d < head_dim; d += kChunk) {
        const char* at = row + d * dtype_bytes(T);
        const Pair x = head_dim - d >= kChunk ? load32<T>(at) : load32_partial<T>(at, head_dim - d);
        store(to + d, x.a);
        store(to + d + 16, x.b);
      }
    }
  }
  /** acc[key][vec] += q[at] * k[n + key][at] */
  template <int N>
  ATTNFOLD_LANE_FN void tile_step(const TileQ* q, const char* k, int n, int depth, int at,
                                  Lanes* acc) {
    const float* key = reinterpret_cast<const float*>(k) + n * depth + at;
    Lanes row[kTileVecs];
#pragma GCC unroll 2
    for (int i = 0; i < kTileVecs; ++i) row[i] = load(q + at * kTileRows + i * 16);
#pragma GCC unroll 16
    for (int f = 0; f < N; ++f)
      acc[f] = fma(row[f % kTileVecs], splat(key[f / kTileVecs * depth]), acc[f]);
  }
};

/** Piece `c` of a stretch of memory in pieces of kBytes, once for each line. */
template <int kBytes>
ATTNFOLD_LANE_FN void prefetch_chunk(const char* at, int c) {
  if (kBytes < 64 && c % 2 == 1) return;
#pragma GCC unroll 2
  for (int b = 0; b < kBytes; b += 64) prefetch(at + c * kBytes + b);
}

template <class S, int R, int N>
ATTNFOLD_LANE_FN void score_step(const typename S::Q* q, int q_stride, const typename S::Chunk* k,
                                 Lanes* acc) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      Lanes& a = acc[block_slot(r * N + n)];
      a = S::step(q + r * q_stride, k[n], a);
    }
  }
}

/**
 * s[r * kLeaf + n] = q[r] . k[n] for n < kBlock / R keys.
 *
 * q            R rows of q_stride elements, packed by S::pack_q
 * keys         row pointers; head_offset bytes from them to this kv head
 * ahead        as many rows as keys are prefetched meanwhile, with kAhead
 */
template <class S, int R, int kChunks, bool kAhead>
ATTNFOLD_LANE_FN void score_block(const typename S::Q* q, int q_stride, const char* const* keys,
                                  int64_t head_offset, int head_dim, const char* const* ahead,
                                  float* s) {
  constexpr int N = R == 3 ? kBlock / 4 : kBlock / R;
  constexpr int kElementBytes = dtype_bytes(S::kKeys);
  Lanes acc[kBlock];
#pragma GCC unroll 16
  for (int f = 0; f < kBlock; ++f) acc[f] = splat(0.0f);
  const char* k_row[N];
  for (int n = 0; n < N; ++n) k_row[n] = keys[n] + head_offset;
  const int chunks = kChunks ? kChunks : head_dim / kChunk;
  const auto add_chunk = [&](int c) __attribute__((always_inline)) {
    typename S::Chunk k[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      k[n] = S::load_chunk(k_row[n] + c * kChunk * kElementBytes);
      if (!kAhead) continue;
      if constexpr (kChunks > 0 && N % kChunks == 0) {  // row by row, as they lie
        const char* const* rows = ahead + c * (N / kChunks);
        prefetch_chunk<kChunk * kElementBytes>(rows[n / kChunks], n % kChunks);
      } else if constexpr (kChunks > 0) {
        prefetch_chunk<kChunk * kElementBytes>(ahead[(c * N + n) / kChunks], (c * N + n) % kChunks);
      } else {
        prefetch_chunk<kChunk * kElementBytes>(ahead[n], c);
      }
    }
    score_step<S, R, N>(q + c * kChunk, q_stride, k, acc);
  };
    // In a loop over the chunks each load instruction goes along its own key, line by line: the
    // prefetch of Zen 4, which follows single instructions, then reads from memory 1.3 times as
    // fast.
#pragma GCC unroll 1
  for (int c = 0; c < chunks; ++c) add_chunk(c);
  if (const int tail = kChunks ? 0 : head_dim % kChunk) {
    typename S::Chunk k[N];
    for (int n = 0; n < N; ++n)
      k[n] = S::load_partial(k_row[n] + chunks * kChunk * kElementBytes, tail);
    score_step<S, R, N>(q + chunks * kChunk, q_stride, k, acc);
  }
  alignas(64) float sums[kBlock];
  sum_block(acc, sums);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) memcpy(s + r * kLeaf, sums + r * N, N * sizeof(float));
}

/** Scores of R rows on num_keys keys, a multiple of 16. */
template <class S, int R, int kChunks, bool kAhead>
__attribute__((noinline)) void score_blocks(const typename S::Q* q, int q_stride,
                                            const char* const* keys, int num_keys,
                                            int64_t head_offset, int head_dim,
                                            const char* const* ahead, float* s) {
  constexpr int N = R == 3 ? kBlock / 4 : kBlock / R;
  if (kChunks > 0) q_stride = kChunks * kChunk;  // a constant
#pragma GCC unroll 1
  for (int n = 0; n < num_keys; n += N) {
    score_block<S, R, kChunks, kAhead>(q, q_stride, keys + n, head_offset, head_dim,
                                       kAhead ? ahead + n : nullptr, s + n);
  }
}

/** Scores of up to kScoreRows rows on num_keys keys. */
template <class S, int kChunks, bool kAhead>
ATTNFOLD_LANE_FN void score_rows(const typename S::Q* q, int q_stride, int rows,
                                 const char* const* keys, int num_keys, int64_t head_offset,
                                 int head_dim, const char* const* ahead, float* s) {
  const auto blocks = [&]<int R>() {
    score_blocks<S, R, kChunks, kAhead>(q, q_stride, keys, num_keys, head_offset, head_dim, ahead,
                                        s);
  };
  if (rows == 1) return blocks.template operator()<1>();
  if (kScoreRows == 2 || rows == 2) return blocks.template operator()<2>();
  if constexpr (kScoreRows == 4) {
    if (rows == 3) return blocks.template operator()<3>();
    blocks.template operator()<4>();
  }
}

/** Scores of `rows` rows on num_keys keys, a multiple of score_step(rows); as many are prefetched.
 */
template <class S, int kChunks>
void score_keys(const typename S::Q* q, int q_stride, int rows, const char* const* keys,
                int num_keys, int64_t head_offset, int head_dim, const char* const* ahead,
                float* s) {
  score_rows<S, kChunks, true>(q, q_stride, rows, keys, num_keys, head_offset, head_dim, ahead, s);
  for (int r = kScoreRows; r < rows; r += kScoreRows) {
    score_rows<S, kChunks, false>(q + static_cast<int64_t>(r) * q_stride, q_stride, rows - r, keys,
                                  num_keys, head_offset, head_dim, ahead, s + r * kLeaf);
  }
}

/** The least number of keys for score_keys: 8, or the block of a single row. */
ATTNFOLD_LANE_FN constexpr int score_step(int rows) {
  return rows % kScoreRows == 1 && kBlock > 8 ? kBlock : 8;
}

/** What turns q.k into a score in the log2 domain, for one row. */
struct ScoreMod {
  float scale, scale_low;  // without soft-cap: score = q.k * (scale + scale_low)
  float softcap_scale, softcap_log2;
  bool softcap, alibi;
  float slope_log2;        // ALiBi: slope * log2(e)
  const float* key_scale;  // [kLeaf] scale of each key, where the row sees it; or null
};

/** Scores of 16 keys, the first at `distance` from the query (key position - query position). */
ATTNFOLD_LANE_FN Lanes modified(const ScoreMod& mod, Lanes qk, float distance) {
  Lanes x = mod.softcap
                ? mul(tanh_lanes(mul(qk, splat(mod.softcap_scale))), splat(mod.softcap_log2))
                : mul(qk, splat(mod.scale));
  if (mod.alibi) x = fma(splat(mod.slope_log2), add(splat(distance), lane_numbers()), x);
  return x;
}

/** Sets s to `value` in the lanes of `keys`' groups of 16 that hold no key of it. */
ATTNFOLD_LANE_FN void fill_unseen(float* s, const LeafKeys& keys, int lane_begin, int lane_end,
                                  float value) {
  const bool main = keys.end > keys.begin;
  for (int i = keys.sink > 0 ? keys.sink : lane_begin; i < (main ? keys.begin : lane_end); ++i)
    s[i] = value;
  if (main) {
    for (int i = keys.end; i < lane_end; ++i) s[i] = value;
  }
}

/** Keys that a row sees of a leaf, one bit each. */
struct LeafBits {
  uint64_t word[2];

  bool has(int n) const { return word[n / 64] >> (n % 64) & 1; }
  void set_one(int n) { word[n / 64] |= uint64_t{1} << (n % 64); }
  /** Keys [0, n). */
  static LeafBits below(int n) {
    return {
        {n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1, n <= 64 ? 0 : ~uint64_t{0} >> (128 - n)}};
  }
  static LeafBits between(int begin, int end) { return below(end) - below(begin); }
  LeafBits operator|(const LeafBits& b) const {
    return {{word[0] | b.word[0], word[1] | b.word[1]}};
  }
  LeafBits operator&(const LeafBits& b) const {
    return {{word[0] & b.word[0], word[1] & b.word[1]}};
  }
  LeafBits operator-(const LeafBits& b) const {
    return {{word[0] & ~b.word[0], word[1] & ~b.word[1]}};
  }
  bool empty() const { return !(word[0] | word[1]); }
  /** From the first bit to the last. */
  LeafKeys hull() const {
    if (empty()) return {0, 0, 0};
    return {0, word[0] ? __builtin_ctzll(word[0]) : 64 + __builtin_ctzll(word[1]),
            word[1] ? 128 - __builtin_clzll(word[1]) : 64 - __builtin_clzll(word[0])};
  }
  /** Those of the 16 keys from n on, n a multiple of 16. */
  uint32_t of_16(int n) const { return word[n / 64] >> (n % 64) & 0xffff; }
};

/** fill_unseen, where bits say what is seen between the first key and the last. */
ATTNFOLD_LANE_FN void fill_unseen(float* s, const LeafBits& bits, int lane_begin, int lane_end,
                                  float value) {
  for (int n = lane_begin; n < lane_end; n += 16) {
    const uint32_t seen = bits.of_16(n);
    if (seen == 0) store(s + n, splat(value));
    if (seen == 0 || seen == 0xffff) continue;
    for (int i = 0; i < 16; ++i) s[n + i] = seen >> i & 1 ? s[n + i] : value;
  }
}

// Above this a score in float32 keeps at most 3 bits below the point: then plain rounded scores are
// subtracted, so that the largest is exactly its own maximum.
constexpr float kLargeScore = 0x1p20f;

/** s becomes 2^(x - m); `plain` if scores are not modified yet. */
ATTNFOLD_LANE_FN void row_weights(float* s, const LeafKeys& keys, const LeafBits* bits,
                                  const ScoreMod& mod, bool plain, int lane_begin, int lane_end,
                                  float* m) {
  fill_unseen(s, keys, lane_begin, lane_end, kLowest);
  if (bits) fill_unseen(s, *bits, lane_begin, lane_end, kLowest);
  Lanes largest = splat(kLowest);
  for (int i = lane_begin; i < lane_end; i += 16)
    largest = max_keep_nan(load(s + i), largest);  // passes over NaN
  const float max = plain ? reduce_max(largest) * mod.scale : reduce_max(largest);
  const bool exact = plain && max > -kLargeScore && max < kLargeScore;
  if (plain && !exact) {
    for (int i = lane_begin; i < lane_end; i += 16)
      store(s + i, mul(load(s + i), splat(mod.scale)));
  }
  *m = max > kLowest ? max : kLowest;
  const Lanes scale = splat(mod.scale), scale_low = splat(mod.scale_low), minus_m = splat(-*m);
  for (int i = lane_begin; i < lane_end; i += 16) {
    const Lanes x = load(s + i);
    store(s + i, exp2_lanes(exact ? fma(x, scale, fma(x, scale_low, minus_m)) : add(x, minus_m)));
  }
}

/**
 * s becomes 2^(x - m) for a row whose keys have scales and whose scores are not modified further:
 * the factor of a key is the product of its scale and the row's, again in two floats.
 */
ATTNFOLD_LANE_FN void scaled_weights(float* s, const LeafKeys& keys, const LeafBits* bits,
                                     const ScoreMod& mod, int lane_begin, int lane_end, float* m) {
  const Lanes scale = splat(mod.scale), scale_low = splat(mod.scale_low);
  alignas(64) float rounded[kLeaf];
  for (int i = lane_begin; i < lane_end; i += 16)
    store(rounded + i, mul(load(s + i), mul(load(mod.key_scale + i), scale)));
  fill_unseen(rounded, keys, lane_begin, lane_end, kLowest);
  if (bits) fill_unseen(rounded, *bits, lane_begin, lane_end, kLowest);
  Lanes largest = splat(kLowest);
  for (int i = lane_begin; i < lane_end; i += 16)
    largest = max_keep_nan(load(rounded + i), largest);  // passes over NaN
  *m = reduce_max(largest);
  const bool exact = *m > -kLargeScore && *m < kLargeScore;
  const Lanes minus_m = splat(-*m);
  for (int i = lane_begin; i < lane_end; i += 16) {
    const Lanes qk = load(s + i), key_scale = load(mod.key_scale + i);
    const Lanes high = mul(key_scale, scale);
    const Lanes low = fma(key_scale, scale_low, fma(key_scale, scale, sub(splat(0.0f), high)));
    const Lanes plain = add(load(rounded + i), minus_m);
    const Lanes fine = fma(qk, high, fma(qk, low, minus_m));
    // An infinite q.k times a low part of any sign would be NaN.
    store(s + i, exp2_lanes(exact ? select_below(abs(qk), __builtin_inff(), fine, plain) : plain));
  }
}

/**
 * The state of one row on one leaf, but for o: s becomes p.
 *
 * s            [kLeaf] q.k, and anything where the row does not see the key.  Afterwards
 *              p = 2^(x - m) where it does, 0 elsewhere in the same groups of 16 lanes
 * bits         NULL, or what the row sees of `keys`
 * distance     position of the leaf's first key less the query's
 *
 * Unmodified scores are never rounded: m is the largest, rounded, and
 * x - m = fma(q.k, scale, fma(q.k, scale_low, -m)).
 */
ATTNFOLD_LANE_FN void leaf_softmax(float* s, const LeafKeys& keys, const LeafBits* bits,
                                   const ScoreMod& mod, float distance, float* m, float* l) {
  const int lane_begin = keys.sink > 0 ? 0 : keys.begin & ~15;
  const int lane_end = ((keys.end > keys.begin ? keys.end : keys.sink) + 15) & ~15;
  const bool plain = !mod.softcap && !mod.alibi;
  if (!plain) {
    for (int i = lane_begin; i < lane_end; i += 16) {
      const Lanes qk = mod.key_scale ? mul(load(s + i), load(mod.key_scale + i)) : load(s + i);
      store(s + i, modified(mod, qk, distance + static_cast<float>(i)));
    }
  }
  if (plain && mod.key_scale) {
    scaled_weights(s, keys, bits, mod, lane_begin, lane_end, m);
  } else {
    row_weights(s, keys, bits, mod, plain, lane_begin, lane_end, m);
  }
  fill_unseen(s, keys, lane_begin, lane_end, 0.0f);
  if (bits) fill_unseen(s, *bits, lane_begin, lane_end, 0.0f);
  Lanes sum = splat(0.0f);
  for (int i = lane_begin; i < lane_end; i += 16) sum = add(sum, load(s + i));
  *l = reduce_add(sum);
}
