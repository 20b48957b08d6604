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

/** How large each tile is. */
struct TileShapes {
  alignas(64) unsigned char config[64] = {1};
  ATTNFOLD_LANE_FN TileShapes all(int rows, int row_bytes) {
    TileShapes shapes;
    for (int t = 0; t < 8; ++t) shapes.set(t, rows, row_bytes);
    return shapes;
  }
  void set(int tile, int rows, int row_bytes) {
    config[16 + 2 * tile] = static_cast<unsigned char>(row_bytes);
    config[48 + tile] = static_cast<unsigned char>(rows);
  }
  void configure() const { tile_configure(config); }
};

/** Tiles of 16 x 64 bytes, at first, while it lives. */
class TileMode {
 public:
  TileMode() { TileShapes::all(16, 64).configure(); }
  ~TileMode() { tile_release(); }
};

/** Weights are the sum of kParts numbers in bf16: all of a float32 in three, rounded in one. */
template <int kParts>
struct MatrixScores : PairQueries {
  static constexpr bool kMatrix = true;
  static constexpr int kWeightParts = kParts;
  static constexpr bool kKeyPairs = false;
  static constexpr LaneOrder kOrder = LaneOrder::halves;
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
    for (const char* end = at + bytes; at < end; at += 64) _mm_prefetch(at, kPrefetchInto);
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

/** Lanes of both, rounded to nearest even. */
ATTNFOLD_LANE_FN __m512i round_to_bf16(Lanes first, Lanes second) {
  return (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v);
}

/** x[i] = exp2_lanes(x[i]), bit for bit, for x <= 127, with fewer instructions.  Step by step for
 * all: a processor that waits for one chain after the other has too few of them at hand. */
template <int kNum>
ATTNFOLD_LANE_FN void exp2_of_differences(Lanes* x) {
  const Lanes shift = splat(0x1.8p23f);
  Lanes n[kNum], p[kNum];
  __mmask16 keep[kNum];
#define ATTNFOLD_FOR_ALL(statement) \
  _Pragma("GCC unroll 16") for (int i = 0; i < kNum; ++i) statement
  ATTNFOLD_FOR_ALL(n[i] = add(x[i], shift));
  ATTNFOLD_FOR_ALL(n[i] = sub(n[i], shift));  // to nearest even; of no matter below -126
  ATTNFOLD_FOR_ALL(keep[i] = _mm512_cmp_ps_mask(x[i].v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ));
  ATTNFOLD_FOR_ALL(x[i] = sub(x[i], n[i]));
  ATTNFOLD_FOR_ALL(p[i] = fma(splat(1.53264627e-4f), x[i], splat(1.33908063e-3f)));
  ATTNFOLD_FOR_ALL(p[i] = fma(p[i], x[i], splat(9.61850584e-3f)));
  ATTNFOLD_FOR_ALL(p[i] = fma(p[i], x[i], splat(5.55035993e-2f)));
  ATTNFOLD_FOR_ALL(p[i] = fma(p[i], x[i], splat(2.40226477e-1f)));
  ATTNFOLD_FOR_ALL(p[i] = fma(p[i], x[i], splat(6.93147182e-1f)));
  ATTNFOLD_FOR_ALL(p[i] = fma(p[i], x[i], splat(1.0f)));
  ATTNFOLD_FOR_ALL(x[i].v = _mm512_maskz_scalef_ps(keep[i], p[i].v, n[i].v));
#undef ATTNFOLD_FOR_ALL
}
ATTNFOLD_LANE_FN Lanes exp2_of_difference(Lanes x) {
  exp2_of_differences<1>(&x);
  return x;
}

/** 4 x 4 words in each 128 bits, transposed. */
ATTNFOLD_LANE_FN void transpose_quarters(__m512i* x) {
  const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
  const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
  x[0] = _mm512_unpacklo_epi64(a, c);
  x[1] = _mm512_unpackhi_epi64(a, c);
  x[2] = _mm512_unpacklo_epi64(b, d);
  x[3] = _mm512_unpackhi_epi64(b, d);
}
