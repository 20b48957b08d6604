// The probe loops for each ISA, and which of them this machine can run.
#include <cstring>

#include "cpu/cpu_features.h"
#include "cpu/target_region.h"
#include "probe.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__AARCH64EL__)
#include <arm_neon.h>
#endif

namespace attnfold::tools {

namespace baseline {
namespace {

struct Words {
  uint64_t lane[8];
};
struct Floats {
  float lane[4];
};
Words zero_words() { return {}; }
inline void mix(Words& sum, const Words& w) {
  for (int i = 0; i < 8; ++i) sum.lane[i] ^= w.lane[i];
}
inline void mix(Words& sum, const std::byte* p) {
  Words w;
  std::memcpy(&w, p, sizeof(w));
  mix(sum, w);
}
uint64_t first_word(const Words& w) { return w.lane[0]; }
inline Floats all_floats(float x) { return {{x, x, x, x}}; }
inline void multiply_add(Floats& sum, const Floats& a, const Floats& b) {
  for (int i = 0; i < 4; ++i) sum.lane[i] = sum.lane[i] * a.lane[i] + b.lane[i];
}
void keep(const Floats& x) {
  volatile float sink = x.lane[0];
  (void)sink;
}
#include "probe_loops.inl"

constexpr ReadLoop kReads[] = {
    {"x1", read_loop<1, 1, 0>},
    {"x2", read_loop<2, 1, 0>},
    {"x4", read_loop<4, 1, 0>},
    {"x2 two streams", read_loop<2, 2, 0>},
    {"x4 four streams", read_loop<4, 4, 0>},
    {"x4 prefetch 2 KB", read_loop<4, 1, 2048>},
};
constexpr ComputeLoop kFmas[] = {
    {"x4", kFmaFlop<4>, fma_loop<4>},    {"x6", kFmaFlop<6>, fma_loop<6>},
    {"x8", kFmaFlop<8>, fma_loop<8>},    {"x10", kFmaFlop<10>, fma_loop<10>},
    {"x12", kFmaFlop<12>, fma_loop<12>}, {"x14", kFmaFlop<14>, fma_loop<14>},
};

}  // namespace
}  // namespace baseline

#if defined(__x86_64__)
ATTNFOLD_TARGET_BEGIN("avx2,fma")
namespace avx2 {
namespace {

using Words = __m256i;
using Floats = __m256;
inline Words zero_words() { return _mm256_setzero_si256(); }
inline void mix(Words& sum, Words w) { sum = _mm256_xor_si256(sum, w); }
inline void mix(Words& sum, const std::byte* p) {
  mix(sum, _mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}
inline uint64_t first_word(Words w) { return static_cast<uint64_t>(_mm256_extract_epi64(w, 0)); }
inline Floats all_floats(float x) { return _mm256_set1_ps(x); }
inline void multiply_add(Floats& sum, Floats a, Floats b) { sum = _mm256_fmadd_ps(sum, a, b); }
inline void keep(Floats x) {
  volatile float sink = _mm256_cvtss_f32(x);
  (void)sink;
}
#include "probe_loops.inl"

constexpr ReadLoop kReads[] = {
    {"avx2 x4", read_loop<4, 1, 0>},
    {"avx2 x8", read_loop<8, 1, 0>},
    {"avx2 x8 two streams", read_loop<8, 2, 0>},
    {"avx2 x8 four streams", read_loop<8, 4, 0>},
    {"avx2 x8 prefetch 1 KB", read_loop<8, 1, 1024>},
    {"avx2 x8 prefetch 4 KB", read_loop<8, 1, 4096>},
};
constexpr ComputeLoop kFmas[] = {
    {"avx2 x8", kFmaFlop<8>, fma_loop<8>},    {"avx2 x9", kFmaFlop<9>, fma_loop<9>},
    {"avx2 x10", kFmaFlop<10>, fma_loop<10>}, {"avx2 x11", kFmaFlop<11>, fma_loop<11>},
    {"avx2 x12", kFmaFlop<12>, fma_loop<12>}, {"avx2 x13", kFmaFlop<13>, fma_loop<13>},
};

}  // namespace
}  // namespace avx2
ATTNFOLD_TARGET_END

ATTNFOLD_TARGET_BEGIN("avx2,fma,avx512f")
namespace avx512 {
namespace {

using Words = __m512i;
using Floats = __m512;
inline Words zero_words() { return _mm512_setzero_si512(); }
inline void mix(Words& sum, Words w) { sum = _mm512_xor_si512(sum, w); }
inline void mix(Words& sum, const std::byte* p) { mix(sum, _mm512_load_si512(p)); }
inline uint64_t first_word(Words w) {
  alignas(64) uint64_t lanes[8];
  _mm512_store_si512(lanes, w);
  return lanes[0];
}
inline Floats all_floats(float x) { return _mm512_set1_ps(x); }
inline void multiply_add(Floats& sum, Floats a, Floats b) { sum = _mm512_fmadd_ps(sum, a, b); }
inline void keep(Floats x) {
  volatile float sink = _mm512_cvtss_f32(x);
  (void)sink;
}
#include "probe_loops.inl"

constexpr ReadLoop kReads[] = {
    {"avx512 x4", read_loop<4, 1, 0>},
    {"avx512 x8", read_loop<8, 1, 0>},
    {"avx512 x8 two streams", read_loop<8, 2, 0>},
    {"avx512 x8 four streams", read_loop<8, 4, 0>},
    {"avx512 x8 prefetch 1 KB", read_loop<8, 1, 1024>},
    {"avx512 x8 prefetch 4 KB", read_loop<8, 1, 4096>},
    {"avx512 x8 two streams prefetch 2 KB", read_loop<8, 2, 2048>},
};
constexpr ComputeLoop kFmas[] = {
    {"avx512 x8", kFmaFlop<8>, fma_loop<8>},    {"avx512 x10", kFmaFlop<10>, fma_loop<10>},
    {"avx512 x12", kFmaFlop<12>, fma_loop<12>}, {"avx512 x16", kFmaFlop<16>, fma_loop<16>},
    {"avx512 x20", kFmaFlop<20>, fma_loop<20>}, {"avx512 x24", kFmaFlop<24>, fma_loop<24>},
};

}  // namespace
}  // namespace avx512
ATTNFOLD_TARGET_END

ATTNFOLD_TARGET_BEGIN("avx2,fma,avx512f,avx512bw,avx512vl,avx512bf16")
namespace avx512_bf16 {
namespace {

template <int kAccumulators>
void dot_loop(int64_t rounds) {
  const __m512i ones = _mm512_set1_epi16(0x3c00);  // 2^-7 in bf16
  const __m512bh a = (__m512bh)ones, b = (__m512bh)ones;
  __m512 sum[kAccumulators];
#pragma GCC unroll 32
  for (int i = 0; i < kAccumulators; ++i) sum[i] = _mm512_set1_ps(static_cast<float>(i));
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 32
    for (int i = 0; i < kAccumulators; ++i) sum[i] = _mm512_dpbf16_ps(sum[i], a, b);
  }
  for (int i = 1; i < kAccumulators; ++i) sum[0] = _mm512_add_ps(sum[0], sum[i]);
  volatile float sink = _mm512_cvtss_f32(sum[0]);
  (void)sink;
}

template <int kAccumulators>
constexpr double kDotFlop = 64.0 * kAccumulators;  // 16 lanes of two products and two sums

constexpr ComputeLoop kDots[] = {
    {"avx512_bf16 x8", kDotFlop<8>, dot_loop<8>},
    {"avx512_bf16 x10", kDotFlop<10>, dot_loop<10>},
    {"avx512_bf16 x12", kDotFlop<12>, dot_loop<12>},
    {"avx512_bf16 x16", kDotFlop<16>, dot_loop<16>},
    {"avx512_bf16 x20", kDotFlop<20>, dot_loop<20>},
    {"avx512_bf16 x24", kDotFlop<24>, dot_loop<24>},
};

}  // namespace
}  // namespace avx512_bf16
ATTNFOLD_TARGET_END

namespace amx_bf16 {
namespace {

/** Tiles 0 to kAccumulators - 1 are summed into, 6 and 7 multiplied; their number does not matter
 * to the assembler, so each loop is written out. */
template <int kAccumulators>
void tile_loop(int64_t rounds) {
  alignas(64) unsigned char config[64] = {1};
  for (int t = 0; t < 8; ++t) {
    config[16 + 2 * t] = 64;  // bytes of a row
    config[48 + t] = 16;      // rows
  }
  __asm__ volatile(
      "ldtilecfg (%0)\n\ttilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\t"
      "tilezero %%tmm3\n\ttilezero %%tmm4\n\ttilezero %%tmm5\n\ttilezero %%tmm6\n\t"
      "tilezero %%tmm7"
      :
      : "r"(config)
      : "memory");
  for (int64_t r = 0; r < rounds; ++r) {
    __asm__ volatile("tdpbf16ps %tmm7, %tmm6, %tmm0");
    if constexpr (kAccumulators > 1) __asm__ volatile("tdpbf16ps %tmm7, %tmm6, %tmm1");
    if constexpr (kAccumulators > 2) __asm__ volatile("tdpbf16ps %tmm7, %tmm6, %tmm2");
    if constexpr (kAccumulators > 3) __asm__ volatile("tdpbf16ps %tmm7, %tmm6, %tmm3");
    if constexpr (kAccumulators > 4) __asm__ volatile("tdpbf16ps %tmm7, %tmm6, %tmm4");
    if constexpr (kAccumulators > 5) __asm__ volatile("tdpbf16ps %tmm7, %tmm6, %tmm5");
  }
  __asm__ volatile("tilerelease");
}

template <int kAccumulators>
constexpr double kTileFlop = 2.0 * 16 * 16 * 32 * kAccumulators;

constexpr ComputeLoop kTiles[] = {
    {"amx_bf16 x1", kTileFlop<1>, tile_loop<1>}, {"amx_bf16 x2", kTileFlop<2>, tile_loop<2>},
    {"amx_bf16 x3", kTileFlop<3>, tile_loop<3>}, {"amx_bf16 x4", kTileFlop<4>, tile_loop<4>},
    {"amx_bf16 x5", kTileFlop<5>, tile_loop<5>}, {"amx_bf16 x6", kTileFlop<6>, tile_loop<6>},
};

}  // namespace
}  // namespace amx_bf16
#elif defined(__AARCH64EL__)
namespace neon {
namespace {

using Words = uint64x2_t;
using Floats = float32x4_t;
inline Words zero_words() { return vdupq_n_u64(0); }
inline void mix(Words& sum, Words w) { sum = veorq_u64(sum, w); }
inline void mix(Words& sum, const std::byte* p) {
  mix(sum, vld1q_u64(reinterpret_cast<const uint64_t*>(p)));
}
inline uint64_t first_word(Words w) { return vgetq_lane_u64(w, 0); }
inline Floats all_floats(float x) { return vdupq_n_f32(x); }
inline void multiply_add(Floats& sum, Floats a, Floats b) { sum = vfmaq_f32(sum, a, b); }
inline void keep(Floats x) {
  volatile float sink = vgetq_lane_f32(x, 0);
  (void)sink;
}
#include "probe_loops.inl"

constexpr ReadLoop kReads[] = {
    {"neon x4", read_loop<4, 1, 0>},
    {"neon x8", read_loop<8, 1, 0>},
    {"neon x8 two streams", read_loop<8, 2, 0>},
    {"neon x16 four streams", read_loop<16, 4, 0>},
    {"neon x8 prefetch 1 KB", read_loop<8, 1, 1024>},
    {"neon x8 prefetch 4 KB", read_loop<8, 1, 4096>},
};
constexpr ComputeLoop kFmas[] = {
    {"neon x8", kFmaFlop<8>, fma_loop<8>},    {"neon x12", kFmaFlop<12>, fma_loop<12>},
    {"neon x16", kFmaFlop<16>, fma_loop<16>}, {"neon x20", kFmaFlop<20>, fma_loop<20>},
    {"neon x24", kFmaFlop<24>, fma_loop<24>}, {"neon x28", kFmaFlop<28>, fma_loop<28>},
};

}  // namespace
}  // namespace neon
#endif

namespace {

template <class Loop, size_t kCount>
void append(std::vector<Loop>& loops, const Loop (&more)[kCount]) {
  loops.insert(loops.end(), more, more + kCount);
}

}  // namespace

std::vector<ReadLoop> read_loops() {
  std::vector<ReadLoop> loops;
#if defined(__x86_64__)
  if (cpu::features().avx512) {
    append(loops, avx512::kReads);
    loops.push_back(avx2::kReads[1]);
    return loops;
  }
  if (cpu::features().avx2) {
    append(loops, avx2::kReads);
    return loops;
  }
#elif defined(__AARCH64EL__)
  append(loops, neon::kReads);
#endif
  append(loops, baseline::kReads);
  return loops;
}

std::vector<ComputeLoop> fma_loops() {
  std::vector<ComputeLoop> loops;
#if defined(__x86_64__)
  if (cpu::features().avx512) append(loops, avx512::kFmas);
  if (cpu::features().avx2) append(loops, avx2::kFmas);
#elif defined(__AARCH64EL__)
  append(loops, neon::kFmas);
#endif
  if (loops.empty()) append(loops, baseline::kFmas);
  return loops;
}

std::vector<ComputeLoop> dot_loops() {
  std::vector<ComputeLoop> loops;
#if defined(__x86_64__)
  if (cpu::features().avx512_bf16) append(loops, avx512_bf16::kDots);
#endif
  return loops;
}

std::vector<ComputeLoop> tile_loops() {
  std::vector<ComputeLoop> loops;
#if defined(__x86_64__)
  if (cpu::features().amx_bf16) append(loops, amx_bf16::kTiles);
#endif
  return loops;
}

}  // namespace attnfold::tools
