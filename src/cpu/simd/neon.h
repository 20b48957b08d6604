// Sixteen lanes in four q registers: Advanced SIMD of AArch64.  simd/scalar.h says what each
// operation means. Included inside an ISA's anonymous namespace.

struct Lanes {
  float32x4_t q[4];
};

#define ATTNFOLD_LANE_FN static inline __attribute__((always_inline))
#define ATTNFOLD_EACH_QUARTER _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i)

constexpr int kBlock = 4;  // 32 registers: four accumulators of four
constexpr int kMaxRowBlock = 2;
constexpr int kScoreRows = 2;
constexpr int kMaxChunks = 2;

// Of tile.inl: a block of 16 rows; accumulators as above.
constexpr int kTileVecs = 1;
constexpr int kTileKeys = 2;  // keys of a score block
constexpr int kTileDims = 4;  // elements of o at a time

ATTNFOLD_LANE_FN Lanes splat(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {{v, v, v, v}};
}
ATTNFOLD_LANE_FN Lanes load(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
ATTNFOLD_LANE_FN void store(float* p, Lanes a) {
  ATTNFOLD_EACH_QUARTER vst1q_f32(p + 4 * i, a.q[i]);
}
ATTNFOLD_LANE_FN Lanes fma(Lanes a, Lanes b, Lanes c) {
  ATTNFOLD_EACH_QUARTER c.q[i] = vfmaq_f32(c.q[i], a.q[i], b.q[i]);
  return c;
}
ATTNFOLD_LANE_FN Lanes add(Lanes a, Lanes b) {
  ATTNFOLD_EACH_QUARTER a.q[i] = vaddq_f32(a.q[i], b.q[i]);
  return a;
}
ATTNFOLD_LANE_FN Lanes sub(Lanes a, Lanes b) {
  ATTNFOLD_EACH_QUARTER a.q[i] = vsubq_f32(a.q[i], b.q[i]);
  return a;
}
ATTNFOLD_LANE_FN Lanes mul(Lanes a, Lanes b) {
  ATTNFOLD_EACH_QUARTER a.q[i] = vmulq_f32(a.q[i], b.q[i]);
  return a;
}
ATTNFOLD_LANE_FN Lanes divide(Lanes a, Lanes b) {
  ATTNFOLD_EACH_QUARTER a.q[i] = vdivq_f32(a.q[i], b.q[i]);
  return a;
}
// fmax and fmin would give NaN, fmaxnm and fminnm the number on either side.
ATTNFOLD_LANE_FN Lanes max_keep_nan(Lanes a, Lanes b) {
  ATTNFOLD_EACH_QUARTER b.q[i] = vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]);
  return b;
}
ATTNFOLD_LANE_FN Lanes min_keep_nan(Lanes a, Lanes b) {
  ATTNFOLD_EACH_QUARTER b.q[i] = vbslq_f32(vcltq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]);
  return b;
}
ATTNFOLD_LANE_FN Lanes abs(Lanes a) {
  ATTNFOLD_EACH_QUARTER a.q[i] = vabsq_f32(a.q[i]);
  return a;
}
ATTNFOLD_LANE_FN Lanes copy_sign(Lanes a, Lanes from) {
  const uint32x4_t sign = vdupq_n_u32(0x80000000u);
  ATTNFOLD_EACH_QUARTER a.q[i] = vbslq_f32(sign, from.q[i], a.q[i]);
  return a;
}
ATTNFOLD_LANE_FN Lanes select_below(Lanes x, float limit, Lanes below, Lanes other) {
  const float32x4_t bound = vdupq_n_f32(limit);
  ATTNFOLD_EACH_QUARTER other.q[i] = vbslq_f32(vcltq_f32(x.q[i], bound), below.q[i], other.q[i]);
  return other;
}
ATTNFOLD_LANE_FN Lanes lane_numbers() {
  constexpr float kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(kNumbers);
}
ATTNFOLD_LANE_FN Lanes round_to_even(Lanes a) {
  ATTNFOLD_EACH_QUARTER a.q[i] = vrndnq_f32(a.q[i]);
  return a;
}
ATTNFOLD_LANE_FN Lanes scale_by_power_of_two(Lanes p, Lanes n) {  // a NaN n converts to 0
  ATTNFOLD_EACH_QUARTER {
    const int32x4_t shift = vshlq_n_s32(vcvtq_s32_f32(n.q[i]), 23);
    p.q[i] = vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p.q[i]), shift));
  }
  return p;
}
ATTNFOLD_LANE_FN Lanes zero_below(Lanes x, float limit, Lanes y) {
  return select_below(x, limit, splat(0.0f), y);
}
ATTNFOLD_LANE_FN float reduce_max(Lanes a) {  // of numbers: where it is used, NaN was passed over
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.q[0], a.q[1]), vmaxq_f32(a.q[2], a.q[3])));
}

/** e[0..3] of reduce_add */
ATTNFOLD_LANE_FN float32x4_t quarter_sums(Lanes a) {
  return vaddq_f32(vaddq_f32(a.q[0], a.q[2]), vaddq_f32(a.q[1], a.q[3]));
}
ATTNFOLD_LANE_FN float reduce_add(Lanes a) {
  const float32x4_t e = quarter_sums(a);
  return vpadds_f32(vadd_f32(vget_low_f32(e), vget_high_f32(e)));  // e0 + e2, e1 + e3
}
ATTNFOLD_LANE_FN constexpr int block_slot(int f) { return f; }
ATTNFOLD_LANE_FN void sum_block(const Lanes* v, float* out) {
  const float32x4_t e0 = quarter_sums(v[0]), e1 = quarter_sums(v[1]), e2 = quarter_sums(v[2]),
                    e3 = quarter_sums(v[3]);
  // 0's e02, 1's e02, 0's e13, 1's e13
  const float32x4_t a = vaddq_f32(vzip1q_f32(e0, e1), vzip2q_f32(e0, e1));
  const float32x4_t b = vaddq_f32(vzip1q_f32(e2, e3), vzip2q_f32(e2, e3));
  vst1q_f32(out, vaddq_f32(vcombine_f32(vget_low_f32(a), vget_low_f32(b)),
                           vcombine_f32(vget_high_f32(a), vget_high_f32(b))));
}

struct Pair {
  Lanes a, b;
};

/** 16 halves in order. */
ATTNFOLD_LANE_FN Lanes widen_f16(uint16x8_t first, uint16x8_t last) {
  const float16x8_t x = vreinterpretq_f16_u16(first), y = vreinterpretq_f16_u16(last);
  return {{vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x), vcvt_f32_f16(vget_low_f16(y)),
           vcvt_high_f32_f16(y)}};
}

/** 8 codes of e4m3 as 2^-8 of their values in f16; core/dtype.h. */
ATTNFOLD_LANE_FN uint16x8_t halves_of_e4m3(int16x8_t codes) {
  // Sign-extended and shifted, bit 14 repeats the sign.
  const uint16x8_t fields = vdupq_n_u16(0x3f80);
  const uint16x8_t h = vreinterpretq_u16_s16(vshlq_n_s16(codes, 7));
  const uint16x8_t magnitude = vandq_u16(h, fields);
  const uint16x8_t nan = vandq_u16(vceqq_u16(magnitude, fields), vdupq_n_u16(0x7e00));
  return vorrq_u16(vbslq_u16(vdupq_n_u16(0x8000), h, magnitude), nan);
}

/** 16 codes of 8 bits; core/dtype.h says how the floats among them relate to f16. */
template <DType T>
ATTNFOLD_LANE_FN Lanes load16_bytes(const char* p) {
  if constexpr (T == DType::e5m2) {  // the high bytes of halves
    const uint8x16_t x = vld1q_u8(reinterpret_cast<const uint8_t*>(p)), none = vdupq_n_u8(0);
    return widen_f16(vreinterpretq_u16_u8(vzip1q_u8(none, x)),
                     vreinterpretq_u16_u8(vzip2q_u8(none, x)));
  } else {
    const int8x16_t x = vld1q_s8(reinterpret_cast<const int8_t*>(p));
    const int16x8_t first = vmovl_s8(vget_low_s8(x)), last = vmovl_high_s8(x);
    if constexpr (T == DType::e4m3) {
      return mul(widen_f16(halves_of_e4m3(first), halves_of_e4m3(last)), splat(256.0f));
    } else {
      return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(first))), vcvtq_f32_s32(vmovl_high_s16(first)),
               vcvtq_f32_s32(vmovl_s16(vget_low_s16(last))), vcvtq_f32_s32(vmovl_high_s16(last))}};
    }
  }
}

template <DType T>
ATTNFOLD_LANE_FN Pair load32(const char* p) {
  Pair r;
  if constexpr (T == DType::bf16) {
    const uint32x4_t high = vdupq_n_u32(0xffff0000u);
    ATTNFOLD_EACH_QUARTER {
      const uint32x4_t x =
          vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(p + 16 * i)));
      r.a.q[i] = vreinterpretq_f32_u32(vshlq_n_u32(x, 16));
      r.b.q[i] = vreinterpretq_f32_u32(vandq_u32(x, high));
    }
  } else if constexpr (T == DType::f16) {
    const uint16_t* h = reinterpret_cast<const uint16_t*>(p);
    r.a = widen_f16(vld1q_u16(h), vld1q_u16(h + 8));
    r.b = widen_f16(vld1q_u16(h + 16), vld1q_u16(h + 24));
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
  for (int j = 0; j < 16; j += 4) {  // 4 x 4 words at a time
    for (int i = 0; i < 16; i += 4) {
      const uint32_t* at = from + j * in_stride + i;
      const uint32x4_t r0 = vld1q_u32(at), r1 = vld1q_u32(at + in_stride),
                       r2 = vld1q_u32(at + 2 * in_stride), r3 = vld1q_u32(at + 3 * in_stride);
      const uint64x2_t t0 = vreinterpretq_u64_u32(vtrn1q_u32(r0, r1)),
                       t1 = vreinterpretq_u64_u32(vtrn2q_u32(r0, r1)),
                       t2 = vreinterpretq_u64_u32(vtrn1q_u32(r2, r3)),
                       t3 = vreinterpretq_u64_u32(vtrn2q_u32(r2, r3));
      uint32_t* column = to + i * out_stride + j;
      vst1q_u32(column, vreinterpretq_u32_u64(vtrn1q_u64(t0, t2)));
      vst1q_u32(column + out_stride, vreinterpretq_u32_u64(vtrn1q_u64(t1, t3)));
      vst1q_u32(column + 2 * out_stride, vreinterpretq_u32_u64(vtrn2q_u64(t0, t2)));
      vst1q_u32(column + 3 * out_stride, vreinterpretq_u32_u64(vtrn2q_u64(t1, t3)));
    }
  }
}

ATTNFOLD_LANE_FN void prefetch(const char* p) { __builtin_prefetch(p, 0, 2); }

#undef ATTNFOLD_EACH_QUARTER
