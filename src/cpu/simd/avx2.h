// Sixteen lanes in two ymm registers: AVX2, FMA, F16C.  simd/scalar.h says what each operation
// means. Included inside an ISA's anonymous namespace and target region.

struct Lanes {
  __m256 lo, hi;
};

#define ATTNFOLD_LANE_FN static inline __attribute__((always_inline))

constexpr int kBlock = 4;  // 16 ymm registers: four accumulators of two
constexpr int kMaxRowBlock = 2;
constexpr int kScoreRows = 4;  // of a score block: rows of q as operands in memory
constexpr int kMaxChunks = 2;

// Of tile.inl: a block of 16 rows; accumulators as above.
constexpr int kTileVecs = 1;
constexpr int kTileKeys = 2;  // keys of a score block
constexpr int kTileDims = 4;  // elements of o at a time

ATTNFOLD_LANE_FN Lanes splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
ATTNFOLD_LANE_FN Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
ATTNFOLD_LANE_FN void store(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
ATTNFOLD_LANE_FN Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
ATTNFOLD_LANE_FN Lanes add(Lanes a, Lanes b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
ATTNFOLD_LANE_FN Lanes sub(Lanes a, Lanes b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
ATTNFOLD_LANE_FN Lanes mul(Lanes a, Lanes b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
ATTNFOLD_LANE_FN Lanes divide(Lanes a, Lanes b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
ATTNFOLD_LANE_FN Lanes max_keep_nan(Lanes a, Lanes b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
ATTNFOLD_LANE_FN Lanes min_keep_nan(Lanes a, Lanes b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
ATTNFOLD_LANE_FN Lanes abs(Lanes a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
ATTNFOLD_LANE_FN Lanes copy_sign(Lanes a, Lanes from) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(sign, a.lo), _mm256_and_ps(sign, from.lo)),
          _mm256_or_ps(_mm256_andnot_ps(sign, a.hi), _mm256_and_ps(sign, from.hi))};
}
ATTNFOLD_LANE_FN Lanes select_below(Lanes x, float limit, Lanes below, Lanes other) {
  const __m256 bound = _mm256_set1_ps(limit);
  return {_mm256_blendv_ps(other.lo, below.lo, _mm256_cmp_ps(x.lo, bound, _CMP_LT_OQ)),
          _mm256_blendv_ps(other.hi, below.hi, _mm256_cmp_ps(x.hi, bound, _CMP_LT_OQ))};
}
ATTNFOLD_LANE_FN Lanes lane_numbers() {
  return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15)};
}
ATTNFOLD_LANE_FN Lanes round_to_even(Lanes a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
ATTNFOLD_LANE_FN __m256
scale8(__m256 p, __m256 n) {  // a NaN n converts to 0x80000000, which the shift clears
  const __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), shift));
}
ATTNFOLD_LANE_FN Lanes scale_by_power_of_two(Lanes p, Lanes n) {
  return {scale8(p.lo, n.lo), scale8(p.hi, n.hi)};
}
ATTNFOLD_LANE_FN Lanes zero_below(Lanes x, float limit, Lanes y) {
  const __m256 bound = _mm256_set1_ps(limit);
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.lo, bound, _CMP_LT_OQ), y.lo),
          _mm256_andnot_ps(_mm256_cmp_ps(x.hi, bound, _CMP_LT_OQ), y.hi)};
}
ATTNFOLD_LANE_FN float reduce_max(Lanes a) {
  const __m256 m8 = _mm256_max_ps(a.lo, a.hi);
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(m8), _mm256_extractf128_ps(m8, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

/** e[0..3] of reduce_add */
ATTNFOLD_LANE_FN __m128 quarter_sums(Lanes a) {
  const __m256 t = _mm256_add_ps(a.lo, a.hi);
  return _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
}
ATTNFOLD_LANE_FN float reduce_add(Lanes a) {
  const __m128 e = quarter_sums(a);
  const __m128 s = _mm_add_ps(e, _mm_movehl_ps(e, e));  // e0 + e2, e1 + e3
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
ATTNFOLD_LANE_FN constexpr int block_slot(int f) { return f; }
ATTNFOLD_LANE_FN void sum_block(const Lanes* v, float* out) {
  const __m128 e0 = quarter_sums(v[0]), e1 = quarter_sums(v[1]), e2 = quarter_sums(v[2]),
               e3 = quarter_sums(v[3]);
  const __m128 a = _mm_add_ps(_mm_unpacklo_ps(e0, e1),
                              _mm_unpackhi_ps(e0, e1));  // 0's e02, 1's e02, 0's e13, 1's e13
  const __m128 b = _mm_add_ps(_mm_unpacklo_ps(e2, e3), _mm_unpackhi_ps(e2, e3));
  _mm_storeu_ps(out, _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a)));
}

struct Pair {
  Lanes a, b;
};

/** 16 halves in order. */
ATTNFOLD_LANE_FN Lanes widen_f16(__m256i h) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(h)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}

/** 16 codes of 8 bits; core/dtype.h says how the floats among them relate to f16. */
template <DType T>
ATTNFOLD_LANE_FN Lanes load16_bytes(const char* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  if constexpr (T == DType::e5m2) {
    return widen_f16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(x), 8));
  } else if constexpr (T == DType::e4m3) {
    // Sign-extended and shifted, bit 14 repeats the sign.
    const __m256i h = _mm256_slli_epi16(_mm256_cvtepi8_epi16(x), 7);
    const __m256i fields = _mm256_set1_epi16(0x3f80), magnitude = _mm256_and_si256(h, fields);
    const __m256i nan =
        _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, fields), _mm256_set1_epi16(0x7e00));
    const __m256i sign = _mm256_and_si256(h, _mm256_set1_epi16(-0x8000));
    const __m256i half = _mm256_or_si256(_mm256_or_si256(magnitude, sign), nan);
    return mul(widen_f16(half), splat(256.0f));
  } else {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
  }
}

template <DType T>
ATTNFOLD_LANE_FN Pair load32(const char* p) {
  Pair r;
  if constexpr (T == DType::bf16) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    r.a = {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
           _mm256_castsi256_ps(_mm256_slli_epi32(y, 16))};
    r.b = {_mm256_castsi256_ps(_mm256_and_si256(x, high)),
           _mm256_castsi256_ps(_mm256_and_si256(y, high))};
  } else if constexpr (T == DType::f16) {
    const __m128i* h = reinterpret_cast<const __m128i*>(p);
    r.a = {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
    r.b = {_mm256_cvtph_ps(_mm_loadu_si128(h + 2)), _mm256_cvtph_ps(_mm_loadu_si128(h + 3))};
  } else if constexpr (is_8_bit(T)) {
    r.a = load16_bytes<T>(p);
    r.b = load16_bytes<T>(p + 16);
  } else {
    const float* f = reinterpret_cast<const float*>(p);
    r.a = load(f);
    r.b = load(f + 16);
  }
  return r;
}

ATTNFOLD_LANE_FN void transpose_16(const void* in, int64_t in_stride, void* out,
                                   int64_t out_stride) {
  const uint32_t* from = static_cast<const uint32_t*>(in);
  uint32_t* to = static_cast<uint32_t*>(out);
  for (int j = 0; j < 16; ++j) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) to[i * out_stride + j] = from[j * in_stride + i];
  }
}

ATTNFOLD_LANE_FN void prefetch(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }
