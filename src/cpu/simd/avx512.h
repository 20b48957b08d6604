// Sixteen lanes in one zmm register: AVX-512 F, BW, DQ, VL.  simd/scalar.h says what each operation
// means. Included inside an ISA's anonymous namespace and target region.

struct Lanes {
  __m512 v;
};

#define ATTNFOLD_LANE_FN static inline __attribute__((always_inline))

constexpr int kBlock = 16;
constexpr int kMaxRowBlock = 4;
constexpr int kScoreRows = 4;
constexpr int kMaxChunks = 4;

// Of tile.inl: a block of 32 rows; 16 accumulators.
constexpr int kTileVecs = 2;
constexpr int kTileKeys = 4;  // keys of a score block, two chains each
constexpr int kTileDims = 8;  // elements of o at a time

ATTNFOLD_LANE_FN Lanes splat(float x) { return {_mm512_set1_ps(x)}; }
ATTNFOLD_LANE_FN Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
ATTNFOLD_LANE_FN void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
ATTNFOLD_LANE_FN Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
ATTNFOLD_LANE_FN Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
ATTNFOLD_LANE_FN Lanes sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
ATTNFOLD_LANE_FN Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
ATTNFOLD_LANE_FN Lanes divide(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
ATTNFOLD_LANE_FN Lanes max_keep_nan(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
ATTNFOLD_LANE_FN Lanes min_keep_nan(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
ATTNFOLD_LANE_FN Lanes abs(Lanes a) { return {_mm512_abs_ps(a.v)}; }
ATTNFOLD_LANE_FN Lanes copy_sign(Lanes a, Lanes from) {
  const __m512 sign = _mm512_set1_ps(-0.0f);
  return {_mm512_or_ps(_mm512_andnot_ps(sign, a.v), _mm512_and_ps(sign, from.v))};
}
ATTNFOLD_LANE_FN Lanes select_below(Lanes x, float limit, Lanes below, Lanes other) {
  return {_mm512_mask_mov_ps(other.v, _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_LT_OQ),
                             below.v)};
}
ATTNFOLD_LANE_FN Lanes lane_numbers() {
  return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}
ATTNFOLD_LANE_FN Lanes round_to_even(Lanes a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
ATTNFOLD_LANE_FN Lanes
scale_by_power_of_two(Lanes p, Lanes n) {  // a NaN n converts to 0x80000000, which the shift clears
  const __m512i shift = _mm512_slli_epi32(_mm512_cvtps_epi32(n.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p.v), shift))};
}
ATTNFOLD_LANE_FN Lanes zero_below(Lanes x, float limit, Lanes y) {
  const __mmask16 keep = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ);
  return {_mm512_maskz_mov_ps(keep, y.v)};
}
ATTNFOLD_LANE_FN float reduce_max(Lanes a) { return _mm512_reduce_max_ps(a.v); }

/** Lanes 4i..4i+3: e[0..3] of x_i */
ATTNFOLD_LANE_FN __m512 quarter_sums(__m512 x0, __m512 x1, __m512 x2, __m512 x3) {
  const __m512 t0 =
      _mm512_add_ps(_mm512_shuffle_f32x4(x0, x1, 0x44), _mm512_shuffle_f32x4(x0, x1, 0xee));
  const __m512 t1 =
      _mm512_add_ps(_mm512_shuffle_f32x4(x2, x3, 0x44), _mm512_shuffle_f32x4(x2, x3, 0xee));
  return _mm512_add_ps(_mm512_shuffle_f32x4(t0, t1, 0x88), _mm512_shuffle_f32x4(t0, t1, 0xdd));
}
ATTNFOLD_LANE_FN float reduce_add(Lanes a) {
  const __m256 t = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 e = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  const __m128 s = _mm_add_ps(e, _mm_movehl_ps(e, e));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
ATTNFOLD_LANE_FN constexpr int block_slot(int f) {
  return 4 * (f % 4) + f / 4;
}  // so that the sums come out in order
ATTNFOLD_LANE_FN void sum_block(const Lanes* v, float* out) {
  const __m512 g0 = quarter_sums(v[0].v, v[1].v, v[2].v, v[3].v);
  const __m512 g1 = quarter_sums(v[4].v, v[5].v, v[6].v, v[7].v);
  const __m512 g2 = quarter_sums(v[8].v, v[9].v, v[10].v, v[11].v);
  const __m512 g3 = quarter_sums(v[12].v, v[13].v, v[14].v, v[15].v);
  // lane 4j + i of the result: all of v[4i + j].  Transpose each 4 x 4 of (g, e) and add e0 + e2,
  // e1 + e3, both.
  const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(g0, g1),
                                 _mm512_unpackhi_ps(g0, g1));  // g0 e02, g1 e02, g0 e13, g1 e13
  const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(g2, g3), _mm512_unpackhi_ps(g2, g3));
  const __m512 e02 = _mm512_shuffle_ps(a, b, 0x44), e13 = _mm512_shuffle_ps(a, b, 0xee);
  _mm512_storeu_ps(out, _mm512_add_ps(e02, e13));
}

struct Pair {
  Lanes a, b;
};

/** 32 halves in order. */
ATTNFOLD_LANE_FN Pair widen_f16(__m512i h) {
  return {{_mm512_cvtph_ps(_mm512_castsi512_si256(h))},
          {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(h, 1))}};
}

/** 32 codes of 8 bits; core/dtype.h says how the floats among them relate to f16. */
template <DType T>
ATTNFOLD_LANE_FN Pair load32_bytes(const char* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  if constexpr (T == DType::e5m2) {
    return widen_f16(_mm512_slli_epi16(_mm512_cvtepu8_epi16(x), 8));
  } else if constexpr (T == DType::e4m3) {
    // Sign-extended and shifted, bit 14 repeats the sign.
    const __m512i h = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(x), 7),
                                       _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
    const __m256i sign = _mm256_set1_epi8(-128);
    const __mmask32 nan = _mm256_cmpeq_epi8_mask(_mm256_or_si256(x, sign), _mm256_set1_epi8(-1));
    const Pair r = widen_f16(_mm512_or_si512(h, _mm512_maskz_set1_epi16(nan, 0x7e00)));
    const Lanes unit = splat(256.0f);
    return {mul(r.a, unit), mul(r.b, unit)};
  } else {
    return {{_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(x)))},
            {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(x, 1)))}};
  }
}

template <DType T>
ATTNFOLD_LANE_FN Pair load32(const char* p) {
  if constexpr (T == DType::bf16) {
    const __m512i x = _mm512_loadu_si512(p);
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(x, 16))},
            {_mm512_castsi512_ps(
                _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))}};
  } else if constexpr (T == DType::f16) {
    const __m256i* h = reinterpret_cast<const __m256i*>(p);
    return {{_mm512_cvtph_ps(_mm256_loadu_si256(h))}, {_mm512_cvtph_ps(_mm256_loadu_si256(h + 1))}};
  } else if constexpr (is_8_bit(T)) {
    return load32_bytes<T>(p);
  } else {
    const float* f = reinterpret_cast<const float*>(p);
    return {load(f), load(f + 16)};
  }
}

#define ATTNFOLD_STORES_BF16
/** Each rounded to bf16 in the upper half of its lane, as f32_to_bf16 does it. */
ATTNFOLD_LANE_FN __m512i upper_bf16(Lanes x) {
  const __m512i u = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, nan, u, _mm512_set1_epi32(0x400000));
}
/** 32 elements, the even ones and the odd ones. */
ATTNFOLD_LANE_FN void store_bf16(Lanes even, Lanes odd, char* out) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512i low = _mm512_srli_epi32(upper_bf16(even), 16);
  _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_and_si512(upper_bf16(odd), upper)));
}

ATTNFOLD_LANE_FN void transpose_16(const void* in, int64_t in_stride, void* out,
                                   int64_t out_stride) {
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    r[i] = _mm512_loadu_si512(static_cast<const uint32_t*>(in) + i * in_stride);
    // Within 128 bits: 4 x 4 words of rows 4 i .. 4 i + 3.
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // Then 4 x 4 such blocks: column 4 q + c of the rows is quarter q of r[4 b + c], b = 0..3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x44);
    const __m512i b = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x44);
    const __m512i d = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xee);
    const __m512i e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xee);
    t[c] = _mm512_shuffle_i32x4(a, b, 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(a, b, 0xdd);
    t[8 + c] = _mm512_shuffle_i32x4(d, e, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(d, e, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    _mm512_storeu_si512(static_cast<uint32_t*>(out) + i * out_stride, t[i]);
}

#ifndef ATTNFOLD_PREFETCH_HERE  // by the file that includes this
ATTNFOLD_LANE_FN void prefetch(const char* p) { _mm_prefetch(p, kPrefetchInto); }
#endif
