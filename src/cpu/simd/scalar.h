// Sixteen lanes as an array: the meaning of every operation that simd/avx2.h and simd/avx512.h do
// in registers. Included inside an ISA's anonymous namespace.

struct Lanes {
  float v[16];
};

#define ATTNFOLD_LANE_FN static inline __attribute__((always_inline))
#define ATTNFOLD_EACH_LANE for (int i = 0; i < 16; ++i)

constexpr int kBlock = 4;        // accumulators of a score block
constexpr int kMaxRowBlock = 2;  // rows of one
constexpr int kScoreRows = 2;   // of a score block
constexpr int kMaxChunks = 2;    // chunks of V that one row accumulates at once
constexpr int kTileVecs = 1;     // tile.inl: a block has 16 * kTileVecs rows,
constexpr int kTileKeys = 2;     // its scores are taken kTileKeys keys at a time,
constexpr int kTileDims = 4;     // its o kTileDims elements

ATTNFOLD_LANE_FN Lanes splat(float x) {
  Lanes r;
  ATTNFOLD_EACH_LANE r.v[i] = x;
  return r;
}
ATTNFOLD_LANE_FN Lanes load(const float* p) {
  Lanes r;
  ATTNFOLD_EACH_LANE r.v[i] = p[i];
  return r;
}
ATTNFOLD_LANE_FN void store(float* p, Lanes a) { ATTNFOLD_EACH_LANE p[i] = a.v[i]; }
ATTNFOLD_LANE_FN Lanes fma(Lanes a, Lanes b, Lanes c) {
  ATTNFOLD_EACH_LANE c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return c;
}
ATTNFOLD_LANE_FN Lanes add(Lanes a, Lanes b) {
  ATTNFOLD_EACH_LANE a.v[i] += b.v[i];
  return a;
}
ATTNFOLD_LANE_FN Lanes sub(Lanes a, Lanes b) {
  ATTNFOLD_EACH_LANE a.v[i] -= b.v[i];
  return a;
}
ATTNFOLD_LANE_FN Lanes mul(Lanes a, Lanes b) {
  ATTNFOLD_EACH_LANE a.v[i] *= b.v[i];
  return a;
}
ATTNFOLD_LANE_FN Lanes divide(Lanes a, Lanes b) {
  ATTNFOLD_EACH_LANE a.v[i] /= b.v[i];
  return a;
}
/** The larger; b where either is NaN. */
ATTNFOLD_LANE_FN Lanes max_keep_nan(Lanes a, Lanes b) {
  ATTNFOLD_EACH_LANE a.v[i] = lane::max_keep_nan(a.v[i], b.v[i]);
  return a;
}
/** The smaller; b where either is NaN. */
ATTNFOLD_LANE_FN Lanes min_keep_nan(Lanes a, Lanes b) {
  ATTNFOLD_EACH_LANE a.v[i] = lane::min_keep_nan(a.v[i], b.v[i]);
  return a;
}
ATTNFOLD_LANE_FN Lanes abs(Lanes a) {
  ATTNFOLD_EACH_LANE a.v[i] = lane::abs(a.v[i]);
  return a;
}
ATTNFOLD_LANE_FN Lanes copy_sign(Lanes a, Lanes sign) {
  ATTNFOLD_EACH_LANE a.v[i] = lane::copy_sign(a.v[i], sign.v[i]);
  return a;
}
/** below where x < limit, else other; other where x is NaN */
ATTNFOLD_LANE_FN Lanes select_below(Lanes x, float limit, Lanes below, Lanes other) {
  ATTNFOLD_EACH_LANE other.v[i] = lane::select_below(x.v[i], limit, below.v[i], other.v[i]);
  return other;
}
/** 0, 1, .. 15 */
ATTNFOLD_LANE_FN Lanes lane_numbers() {
  Lanes r;
  ATTNFOLD_EACH_LANE r.v[i] = static_cast<float>(i);
  return r;
}
ATTNFOLD_LANE_FN Lanes round_to_even(Lanes a) {
  ATTNFOLD_EACH_LANE a.v[i] = lane::round_to_even(a.v[i]);
  return a;
}
ATTNFOLD_LANE_FN Lanes scale_by_power_of_two(Lanes p, Lanes n) {
  ATTNFOLD_EACH_LANE p.v[i] = lane::scale_by_power_of_two(p.v[i], n.v[i]);
  return p;
}
ATTNFOLD_LANE_FN Lanes zero_below(Lanes x, float limit, Lanes y) {
  ATTNFOLD_EACH_LANE y.v[i] = lane::zero_below(x.v[i], limit, y.v[i]);
  return y;
}
ATTNFOLD_LANE_FN float reduce_max(Lanes a) {
  float m = a.v[0];
  ATTNFOLD_EACH_LANE m = a.v[i] > m ? a.v[i] : m;
  return m;
}

/** The one order in which 16 lanes are summed: e[i] = (p[i] + p[i+8]) + (p[i+4] + p[i+12]); (e0 +
 * e2) + (e1 + e3). */
ATTNFOLD_LANE_FN float reduce_add(Lanes a) {
  float e[4];
  for (int i = 0; i < 4; ++i) e[i] = (a.v[i] + a.v[i + 8]) + (a.v[i + 4] + a.v[i + 12]);
  return (e[0] + e[2]) + (e[1] + e[3]);
}

/** Where accumulator f (= row * keys + key) of a block stands in the argument of sum_block. */
ATTNFOLD_LANE_FN constexpr int block_slot(int f) { return f; }

/** out[f] = reduce_add(v[block_slot(f)]) */
ATTNFOLD_LANE_FN void sum_block(const Lanes* v, float* out) {
  for (int f = 0; f < kBlock; ++f) out[f] = reduce_add(v[f]);
}

/**
 * 32 consecutive elements.  bf16: a holds the even ones, b the odd ones (widening is then a shift
 * and a mask); other types: a holds the first 16, b the last 16.
 */
struct Pair {
  Lanes a, b;
};

template <DType T>
ATTNFOLD_LANE_FN Pair load32(const char* p) {
  Pair r;
  ATTNFOLD_EACH_LANE {
    if constexpr (T == DType::bf16) {
      uint16_t h[2];
      memcpy(h, p + 4 * i, 4);
      r.a.v[i] = bf16_to_f32(h[0]);
      r.b.v[i] = bf16_to_f32(h[1]);
    } else if constexpr (T == DType::f16) {
      uint16_t lo, hi;
      memcpy(&lo, p + 2 * i, 2);
      memcpy(&hi, p + 32 + 2 * i, 2);
      r.a.v[i] = f16_to_f32(lo);
      r.b.v[i] = f16_to_f32(hi);
    } else if constexpr (T == DType::f32) {
      memcpy(&r.a.v[i], p + 4 * i, 4);
      memcpy(&r.b.v[i], p + 64 + 4 * i, 4);
    } else {  // bytes
      r.a.v[i] = load_f32(p, T, i);
      r.b.v[i] = load_f32(p, T, i + 16);
    }
  }
  return r;
}

/** Sixteen rows of 16 words become sixteen columns: out[i][j] = in[j][i]; strides in words. */
ATTNFOLD_LANE_FN void transpose_16(const void* in, int64_t in_stride, void* out,
                                   int64_t out_stride) {
  const uint32_t* from = static_cast<const uint32_t*>(in);
  uint32_t* to = static_cast<uint32_t*>(out);
  for (int j = 0; j < 16; ++j) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) to[i * out_stride + j] = from[j * in_stride + i];
  }
}

ATTNFOLD_LANE_FN void prefetch(const char* p) { __builtin_prefetch(p, 0, 2); }

#undef ATTNFOLD_EACH_LANE
