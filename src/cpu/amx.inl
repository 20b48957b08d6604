// The two products on AMX tiles, for both kernels.  Included inside the AMX namespace, after
// attend.inl and before tile.inl.
//
// tdpbf16ps on tiles A [16, 32] and B [32, 16] sums even and odd elements in a chain of fma each
// from zero, adds the two, and adds that to C; subnormals are zero.  So the order of a sum is that
// of the steps of 32, and rows and columns of a tile do not meet: bits do not depend on what shares
// a tile.
//
//   S^T = K Q^T     A: 16 keys as they lie in memory.  B: up to 16 rows of q
//   O   = P V       P, in float32, is the sum of three bf16 exactly (8 bits each): three products,
//                   o = high + (middle + low).  Few rows: A is P, the three parts of 5 rows in a
//                   tile; B is V in pairs of keys.  Many rows: A is V^T, B is P^T
//
// V that is Inf or NaN is taken as 0, and what it does to the rows that see it is put in
// afterwards: a row that does not see it has p = 0 there, and 0 * Inf would not be 0.

constexpr int kPackedHeads = 8;              // whose values are packed at a time
constexpr int kHalfDims = 64;                // elements of them that are multiplied at a time
constexpr int kPartRows = 5;                 // rows whose three parts share a tile
constexpr int64_t kColumnBytes = 4096 + 64;  // four tiles; not a power of two, for the caches' sake

template <int kTile>
ATTNFOLD_LANE_FN void tile_load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                   :
                   : "r"(from), "r"(stride), "i"(kTile)
                   : "memory");
}
template <int kTile>
ATTNFOLD_LANE_FN void tile_store(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                   :
                   : "r"(to), "r"(stride), "i"(kTile)
                   : "memory");
}
template <int kTile>
ATTNFOLD_LANE_FN void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
/** C += A B */
template <int kC, int kA, int kB>
ATTNFOLD_LANE_FN void tile_multiply() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

/** Tiles of 16 x 64 bytes while it lives. */
class TileMode {
 public:
  TileMode() {
    alignas(64) unsigned char config[64] = {1};
    for (int t = 0; t < 8; ++t) {
      config[16 + 2 * t] = 64;  // bytes of a row
      config[48 + t] = 16;      // rows
    }
    __asm__ volatile("ldtilecfg (%0)" : : "r"(config) : "memory");
  }
  ~TileMode() { __asm__ volatile("tilerelease"); }
};

struct MatrixScores : PairQueries {
  static constexpr bool kMatrix = true;
  using Mode = TileMode;
};

/** Lines that will be read next, in the order in which they lie in memory: asked for evenly between
 * blocks of arithmetic, so that the hardware's own prefetch sees a stream too. */
struct Ahead {
  const char* const* rows;  // null: nothing is left to ask for
  int num_rows, row;
  int64_t offset, row_bytes, at;  // of the stretch of each row, and the next byte of it
  int heads;                      // stretches still to come, head_bytes apart
  int64_t head_bytes;
  int64_t share;  // bytes to ask for at a time
};

/** Rows [0, num_rows) under num_heads heads from head_begin on, asked for in `num_shares` times. */
ATTNFOLD_LANE_FN Ahead look_ahead(const char* const* rows, int num_rows, int64_t head_begin,
                                  int num_heads, int64_t head_bytes, int64_t row_bytes,
                                  int num_shares) {
  const bool side_by_side = head_bytes == row_bytes;
  const int64_t lines = (num_rows * num_heads * row_bytes + 63) / 64;
  return {num_rows > 0 ? rows : nullptr,
          num_rows,
          0,
          head_begin * head_bytes,
          side_by_side ? num_heads * row_bytes : row_bytes,
          0,
          side_by_side ? 1 : num_heads,
          head_bytes,
          (lines + num_shares - 1) / num_shares * 64};
}

ATTNFOLD_LANE_FN void ask_ahead(Ahead* a) {
  for (int64_t left = a->share; left > 0 && a->rows != nullptr;) {
    const char* at = a->rows[a->row] + a->offset + a->at;
    const int64_t here = a->row_bytes - a->at, bytes = here < left ? here : left;
    for (const char* end = at + bytes; at < end; at += 64) prefetch(at);
    left -= bytes;
    a->at += bytes;
    if (a->at < a->row_bytes) continue;
    a->at = 0;
    if (++a->row < a->num_rows) continue;
    a->row = 0;
    a->offset += a->head_bytes;
    if (--a->heads == 0) a->rows = nullptr;
  }
}

/** Two keys of v, 32 elements: `low` has pairs of elements 8 i .. 8 i + 3, `high` of the others. */
struct KeyPair {
  __m512i low, high;
};

/** Inf and NaN as 0; sets *special if there are any. */
ATTNFOLD_LANE_FN __m512i finite(__m512i x, bool* special) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  const __mmask32 bad = _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
  if (__builtin_expect(bad == 0, 1)) return x;
  *special = true;
  return _mm512_maskz_mov_epi16(~bad, x);
}

ATTNFOLD_LANE_FN __m512i load_values(const char* at, int n) {
  return n >= kChunk ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi16((1u << n) - 1, at);
}

/** Keys n and n + 1 of those in [begin, end), elements [d, d + 32) of head_dim. */
ATTNFOLD_LANE_FN KeyPair key_pair(const LeafRows& rows, int64_t head_offset, int n, int begin,
                                  int end, int d, int head_dim, bool* special) {
  const int64_t offset = head_offset + d * 2;
  __m512i x = _mm512_setzero_si512(), y = x;
  if (n >= begin && n < end) x = finite(load_values(rows.row[n] + offset, head_dim - d), special);
  if (n + 1 >= begin && n + 1 < end)
    y = finite(load_values(rows.row[n + 1] + offset, head_dim - d), special);
  return {_mm512_unpacklo_epi16(x, y), _mm512_unpackhi_epi16(x, y)};
}

/** What Inf and NaN among the values do to the o of one row: those elements are plain sums.
 * sees(n) says whether the row sees key n of [begin, end), p(n) its weight. */
template <class Sees, class Weight>
__attribute__((noinline)) void add_special(const LeafRows& rows, int64_t head_offset, int begin,
                                           int end, int head_dim, Sees sees, Weight p, float* o,
                                           int64_t o_step) {
  for (int d = 0; d < head_dim; ++d) {
    bool special = false;
    float sum = 0.0f;
    for (int n = begin; n < end; ++n) {
      if (!sees(n)) continue;
      uint16_t code;
      memcpy(&code, rows.row[n] + head_offset + d * 2, sizeof(code));
      special = special || (code & 0x7f80) == 0x7f80;
      sum = __builtin_fmaf(p(n), bf16_to_f32(code), sum);
    }
    if (special) o[(d - d % kChunk + lane_slot<DType::bf16>(d % kChunk)) * o_step] = sum;
  }
}

/** The upper halves of 32 words. */
ATTNFOLD_LANE_FN __m512i upper_halves(__m512 a, __m512 b) {
  alignas(64) static const uint16_t kOdd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(_mm512_castps_si512(a), _mm512_load_si512(kOdd),
                                   _mm512_castps_si512(b));
}
/** x less its upper half: exact. */
ATTNFOLD_LANE_FN __m512 rest(__m512 x) {
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), mask)));
}

// Many rows of one head (tile.inl).

/** tile_scores: s[n][r], 32 keys x 32 rows at a time. */
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

/** V^T of keys [begin, end): [o_stride / 16][4][16 elements in lane order][32 keys]; true if some
 * are not finite. */
inline bool pack_matrix_values(const LeafRows& rows, int64_t head_offset, int begin, int end,
                               int head_dim, char* out) {
  bool special = false;
  alignas(64) uint32_t low[16 * 16], high[16 * 16];
  for (int n = begin / 32 * 32; n < end; n += 32) {
    for (int d = 0; d < head_dim; d += kChunk) {
      for (int i = 0; i < 16; ++i) {
        const KeyPair pair =
            key_pair(rows, head_offset, n + 2 * i, begin, end, d, head_dim, &special);
        _mm512_store_si512(low + i * 16, pair.low);
        _mm512_store_si512(high + i * 16, pair.high);
      }
      transpose_16(low, 16, low, 16);
      transpose_16(high, 16, high, 16);
      for (int i = 0; i < kChunk; ++i) {  // element d + i
        const uint32_t* from = (i % 8 < 4 ? low : high) + (i / 8 * 4 + i % 4) * 16;
        char* to = out + ((d / 16 + i % 2) * 4 + n / 32) * 1024 + i / 2 * 64;
        memcpy(to, from, 64);
      }
    }
  }
  return special;
}

/** B tiles of the parts of P^T: [part][4][vec][16 pairs of keys][16 rows]. */
ATTNFOLD_LANE_FN void pack_tile_weights(const float* s, int begin, int end, char* out) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int n = begin / 32 * 32; n < (end + 31) / 32 * 32; n += 2) {
    for (int vec = 0; vec < kTileVecs; ++vec) {
      const float* p = s + n * kTileRows + vec * 16;
      __m512 a = _mm512_setzero_ps(), b = a;
      if (n >= begin && n < end) a = _mm512_load_ps(p);
      if (n + 1 >= begin && n + 1 < end) b = _mm512_load_ps(p + kTileRows);
      char* to = out + (n / 32 * kTileVecs + vec) * 1024 + n % 32 / 2 * 64;
      for (int part = 0; part < 3; ++part) {
        const __m512i first = _mm512_srli_epi32(_mm512_castps_si512(a), 16);
        const __m512i second = _mm512_and_si512(_mm512_castps_si512(b), upper);
        _mm512_store_si512(to + part * (4 * kTileVecs * 1024), _mm512_or_si512(first, second));
        a = rest(a);
        b = rest(b);
      }
    }
  }
}
