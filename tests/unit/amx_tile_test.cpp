// What a product of AMX tiles is, to the bit: the order of its sums, and what becomes of
// subnormals. Real tiles where the machine has them, and the emulation that stands for them
// elsewhere.
#if defined(__x86_64__)

#include <gtest/gtest.h>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>

#include "attnfold/attnfold.h"
#include "cpu/target_region.h"

namespace attnfold::check {
namespace {

/** Of one product: C [rows, columns] += A [rows, 2 pairs] B [pairs, columns, 2]. */
struct Shape {
  int rows, pairs, columns;
};

/** Tiles at their largest, 64 bytes a row. */
struct Operands {
  alignas(64) uint16_t a[16][32];
  alignas(64) uint16_t b[16][32];
  alignas(64) float c[16][16];
};

}  // namespace
}  // namespace attnfold::check

ATTNFOLD_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace attnfold::check {
namespace {

#define ATTNFOLD_LANE_FN static inline __attribute__((always_inline))
#define ATTNFOLD_TEST_MULTIPLY                                           \
  __attribute__((noinline)) void multiply(const Shape& s, Operands* x) { \
    alignas(64) unsigned char config[64] = {1};                          \
    const int rows[3] = {s.rows, s.rows, s.pairs};                       \
    const int bytes[3] = {s.columns * 4, s.pairs * 4, s.columns * 4};    \
    for (int t = 0; t < 3; ++t) {                                        \
      config[16 + 2 * t] = static_cast<unsigned char>(bytes[t]);         \
      config[48 + t] = static_cast<unsigned char>(rows[t]);              \
    }                                                                    \
    tile_configure(config);                                              \
    tile_load<0>(x->c, 64);                                              \
    tile_load<1>(x->a, 64);                                              \
    tile_load<2>(x->b, 64);                                              \
    tile_multiply<0, 1, 2>();                                            \
    tile_store<0>(x->c, 64);                                             \
    tile_release();                                                      \
  }

namespace real {
#include "cpu/simd/amx.h"
ATTNFOLD_TEST_MULTIPLY
}  // namespace real

namespace emulated {
#include "cpu/simd/amx_emulated.h"
ATTNFOLD_TEST_MULTIPLY
}  // namespace emulated

#undef ATTNFOLD_LANE_FN

}  // namespace
}  // namespace attnfold::check
ATTNFOLD_TARGET_END

namespace attnfold::check {
namespace {

float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

float widened(uint16_t code) {
  const uint32_t bits = uint32_t{code} << 16;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return flushed(x);
}

/** The law: even and odd elements in a chain of fma each from zero, the two added, and that added
 * to C; subnormals are zero wherever they are met. */
void multiply_by_law(const Shape& s, Operands* x) {
  for (int m = 0; m < s.rows; ++m) {
    for (int n = 0; n < s.columns; ++n) {
      float sum[2] = {0.0f, 0.0f};
      for (int k = 0; k < 2 * s.pairs; ++k) {
        const float a = widened(x->a[m][k]), b = widened(x->b[k / 2][2 * n + k % 2]);
        sum[k % 2] = flushed(std::fma(a, b, sum[k % 2]));
      }
      x->c[m][n] = flushed(flushed(x->c[m][n]) + flushed(sum[0] + sum[1]));
    }
  }
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

/** Random finite numbers of exponents [least, most], as float32 codes of which bf16 is the upper
 * half; an exponent of 0 is a subnormal. */
struct Numbers {
  const char* name;
  int least, most;      // of A
  int least_b, most_b;  // of B
  int least_c, most_c;  // of C
};

constexpr Numbers kNumbers[] = {
    {"of the size of scores", 120, 130, 120, 130, 120, 135},
    {"of any size", 1, 254, 1, 254, 1, 254},
    {"that cancel", 126, 127, 126, 127, 150, 152},
    {"whose products are near the least normal number", 55, 70, 55, 70, 0, 8},
    {"that are subnormal, and large ones", 0, 0, 200, 254, 60, 130},
    {"that are subnormal or not", 0, 1, 0, 140, 0, 1},
};

uint32_t draw(std::mt19937_64& rng, int least, int most) {
  const uint64_t word = rng();
  const uint32_t exponent =
      static_cast<uint32_t>(least) + static_cast<uint32_t>((word >> 32) % (most - least + 1));
  return (static_cast<uint32_t>(word) & 0x807fffffu) | exponent << 23;
}

Operands draw_operands(std::mt19937_64& rng, const Numbers& numbers) {
  Operands x;
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 32; ++j) {
      x.a[i][j] = static_cast<uint16_t>(draw(rng, numbers.least, numbers.most) >> 16);
      x.b[i][j] = static_cast<uint16_t>(draw(rng, numbers.least_b, numbers.most_b) >> 16);
    }
    for (int j = 0; j < 16; ++j) {
      const uint32_t bits = draw(rng, numbers.least_c, numbers.most_c);
      std::memcpy(&x.c[i][j], &bits, sizeof(bits));
    }
  }
  return x;
}

/** Whether this machine runs the rows of an ISA; tiles are asked of the system by the library. */
bool has(const char* isa) {
  for (int32_t i = 0; i < attnfold_num_kernels(); ++i) {
    attnfold_kernel_info info{};
    info.struct_size = sizeof info;
    if (attnfold_get_kernel(i, &info) == ATTNFOLD_OK && std::strcmp(info.isa, isa) == 0)
      return info.available != 0;
  }
  return false;
}

void expect_law(void (*multiply)(const Shape&, Operands*)) {
  std::mt19937_64 rng(20260);
  constexpr unsigned int kModes[] = {0x1f80, 0x7f80, 0x9fc0};  // nearest; to zero; flushing
  for (const Numbers& numbers : kNumbers) {
    int64_t wrong = 0;
    std::string first;
    for (int i = 0; i < 300; ++i) {
      Shape shape{16, 16, 16};
      if (i % 3 == 0) {
        shape = {1 + static_cast<int>(rng() % 16), 1 + static_cast<int>(rng() % 16),
                 1 + static_cast<int>(rng() % 16)};
      }
      Operands x = draw_operands(rng, numbers), law = x;
      multiply_by_law(shape, &law);
      const unsigned int mode = _mm_getcsr();
      _mm_setcsr(kModes[i % 7 % 3]);
      multiply(shape, &x);
      _mm_setcsr(mode);
      for (int m = 0; m < shape.rows; ++m) {
        for (int n = 0; n < shape.columns; ++n) {
          const float got = x.c[m][n], want = law.c[m][n];
          if (bits_of(got) == bits_of(want) || (std::isnan(got) && std::isnan(want))) continue;
          if (wrong++ == 0) {
            first = "tile " + std::to_string(i) + ", row " + std::to_string(m) + ", column " +
                    std::to_string(n) + ": " + std::to_string(got) + ", by law " +
                    std::to_string(want);
          }
        }
      }
    }
    EXPECT_EQ(wrong, 0) << "numbers " << numbers.name << ": " << first;
  }
}

TEST(AmxTile, RealProductsFollowTheLaw) {
  if (!has("amx_bf16")) GTEST_SKIP() << "this machine has no AMX with bf16 tiles";
  expect_law(real::multiply);
}

TEST(AmxTile, EmulatedProductsFollowTheLaw) {
  if (!has("avx512")) GTEST_SKIP() << "this machine has no AVX-512";
  expect_law(emulated::multiply);
}

}  // namespace
}  // namespace attnfold::check

#endif
