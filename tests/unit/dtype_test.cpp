// Storage types: every 16-bit and 8-bit code, and rounding against a method that shares nothing with ours.
#include "core/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace attnfold {
namespace {

constexpr uint32_t kNumCodes = 65536;
constexpr uint64_t kSeed = 20240611;

/** A binary interchange format with a sign bit on top. */
struct Format {
  int exponent_bits, fraction_bits;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  uint32_t exponent_of(uint32_t code) const {
    return code >> fraction_bits & ((1u << exponent_bits) - 1);
  }
  uint32_t fraction_of(uint32_t code) const { return code & ((1u << fraction_bits) - 1); }
  bool is_special(uint32_t code) const { return exponent_of(code) == (1u << exponent_bits) - 1; }
  bool is_nan(uint32_t code) const { return is_special(code) && fraction_of(code) != 0; }
};
constexpr Format kF16{5, 10};
constexpr Format kBf16{8, 7};

/** The value of a code by the definition of the format; not for NaN. */
double value_of(const Format& format, uint32_t code) {
  const double sign = code >> 15 ? -1 : 1;
  const int exponent = static_cast<int>(format.exponent_of(code));
  const double fraction = std::ldexp(format.fraction_of(code), -format.fraction_bits);
  if (format.is_special(code)) return sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - format.bias());
  return sign * std::ldexp(1 + fraction, exponent - format.bias());
}

/** Nearest code by comparing distances to the two neighbours, ties to the even code; not for NaN. */
uint16_t nearest_code(const Format& format, float x) {
  const double magnitude = std::fabs(static_cast<double>(x));
  uint32_t low = 0;  // the largest code whose value is at most the magnitude
  uint32_t high = ((1u << format.exponent_bits) - 1) << format.fraction_bits;  // Inf
  const uint32_t inf = high;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (value_of(format, middle) <= magnitude ? low : high) = middle;
  }
  // Inf stands where the next finite value would be.
  const double above = high == inf
                           ? std::ldexp(1.0, (1 << format.exponent_bits) - 1 - format.bias())
                           : value_of(format, high);
  const double to_low = magnitude - value_of(format, low), to_high = above - magnitude;
  const uint32_t nearest = to_low < to_high || (to_low == to_high && low % 2 == 0) ? low : high;
  return static_cast<uint16_t>(nearest | (std::signbit(x) ? 0x8000u : 0u));
}

/** Floats of every exponent, and floats at, just below and just above the middle of two codes. */
template <typename Check>
void for_hard_floats(const Format& format, Check check) {
  std::mt19937_64 rng(kSeed);
  for (int i = 0; i < 300000; ++i) {
    const float x = float_of(static_cast<uint32_t>(rng()));
    if (!std::isnan(x)) check(x);
  }
  for (uint32_t code = 0; code < kNumCodes; ++code) {
    if (format.is_special(code) || format.is_special(code + 1)) continue;
    const double middle = (value_of(format, code) + value_of(format, code + 1)) / 2;
    const float x = static_cast<float>(middle);
    check(x);
    check(std::nextafter(x, std::numeric_limits<float>::infinity()));
    check(std::nextafter(x, -std::numeric_limits<float>::infinity()));
  }
}

TEST(Dtype, EveryF16CodeDecodesToItsValue) {
  for (uint32_t code = 0; code < kNumCodes; ++code) {
    const float x = f16_to_f32(static_cast<uint16_t>(code));
    if (kF16.is_nan(code)) {
      ASSERT_TRUE(std::isnan(x)) << std::hex << code;
      continue;
    }
    ASSERT_EQ(x, value_of(kF16, code)) << std::hex << code;
    ASSERT_EQ(std::signbit(x), code >> 15 != 0) << std::hex << code;
  }
}

TEST(Dtype, EveryBf16CodeDecodesToItsValue) {
  for (uint32_t code = 0; code < kNumCodes; ++code) {
    const float x = bf16_to_f32(static_cast<uint16_t>(code));
    if (kBf16.is_nan(code)) {
      ASSERT_TRUE(std::isnan(x)) << std::hex << code;
      continue;
    }
    ASSERT_EQ(x, value_of(kBf16, code)) << std::hex << code;
    ASSERT_EQ(std::signbit(x), code >> 15 != 0) << std::hex << code;
  }
}

TEST(Dtype, EncodeUndoesDecodeForEveryCodeButNan) {
  for (uint32_t code = 0; code < kNumCodes; ++code) {
    const uint16_t half = static_cast<uint16_t>(code);
    if (!kF16.is_nan(code)) {
      ASSERT_EQ(f32_to_f16(f16_to_f32(half)), half);
    }
    if (!kBf16.is_nan(code)) {
      ASSERT_EQ(f32_to_bf16(bf16_to_f32(half)), half);
    }
  }
}

TEST(Dtype, NanStaysNanWithItsSignThroughDecodeAndEncode) {
  for (uint32_t code = 0; code < kNumCodes; ++code) {
    const uint16_t half = static_cast<uint16_t>(code);
    if (kF16.is_nan(code)) {
      const uint16_t again = f32_to_f16(f16_to_f32(half));
      ASSERT_TRUE(kF16.is_nan(again)) << std::hex << code;
      ASSERT_EQ(again, code | 0x200u) << "quiet, payload kept; " << std::hex << code;
    }
    if (kBf16.is_nan(code)) {
      const uint16_t again = f32_to_bf16(bf16_to_f32(half));
      ASSERT_TRUE(kBf16.is_nan(again)) << std::hex << code;
      ASSERT_EQ(again, code | 0x40u) << "quiet, payload kept; " << std::hex << code;
    }
  }
}

TEST(Dtype, NanWhosePayloadLiesInTheLostBitsStaysNan) {
  for (uint32_t bits : {0x7f800001u, 0xff800001u, 0x7f801fffu, 0x7fc00000u, 0xffffffffu}) {
    EXPECT_TRUE(kF16.is_nan(f32_to_f16(float_of(bits)))) << std::hex << bits;
    EXPECT_TRUE(kBf16.is_nan(f32_to_bf16(float_of(bits)))) << std::hex << bits;
  }
}

TEST(Dtype, F16RoundsToNearestEven) {
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  for_hard_floats(kF16, [](float x) {
    ASSERT_EQ(f32_to_f16(x), nearest_code(kF16, x)) << x << " 0x" << std::hex << bits_of(x);
  });
}

TEST(Dtype, Bf16RoundsToNearestEven) {
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  for_hard_floats(kBf16, [](float x) {
    ASSERT_EQ(f32_to_bf16(x), nearest_code(kBf16, x)) << x << " 0x" << std::hex << bits_of(x);
  });
}

TEST(Dtype, RangeEndsRoundAsIeeeSays) {
  EXPECT_EQ(f32_to_f16(65504.0f), 0x7bff);
  EXPECT_EQ(f32_to_f16(std::nextafter(65520.0f, 0.0f)), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(f32_to_f16(-65520.0f), 0xfc00);
  EXPECT_EQ(f32_to_f16(0x1p-24f), 0x0001);
  EXPECT_EQ(f32_to_f16(0x1p-25f), 0x0000) << "a tie goes to the even code";
  EXPECT_EQ(f32_to_f16(-0x1p-26f), 0x8000) << "the sign of a vanished value stays";
  EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(f32_to_bf16(0x1.fep127f), 0x7f7f);
}

TEST(Dtype, LoadAndStoreAgreeWithTheCodes) {
  const float values[] = {0.0f, -0.0f, 1.0f, -2.5f, 3.1415927f, 1e-6f, 6e4f};
  constexpr int64_t kAt = 3;
  for (float x : values) {
    float f32[8] = {};
    uint16_t half[8] = {};
    store_f32(f32, DType::f32, kAt, x);
    EXPECT_EQ(bits_of(load_f32(f32, DType::f32, kAt)), bits_of(x));
    store_f32(half, DType::f16, kAt, x);
    EXPECT_EQ(half[kAt], nearest_code(kF16, x));
    EXPECT_EQ(load_f32(half, DType::f16, kAt), f16_to_f32(half[kAt]));
    store_f32(half, DType::bf16, kAt, x);
    EXPECT_EQ(half[kAt], nearest_code(kBf16, x));
    EXPECT_EQ(load_f32(half, DType::bf16, kAt), bf16_to_f32(half[kAt]));
    EXPECT_EQ(half[kAt - 1], 0);
    EXPECT_EQ(half[kAt + 1], 0);
  }
}

/** An 8-bit float by its definition; `has_inf` false: the top exponent is one of numbers, but for the
 * largest code, which is NaN. */
struct ByteFormat {
  int exponent_bits, fraction_bits;
  bool has_inf;
  float (*decode)(uint8_t);
  uint8_t (*encode)(float);
  double largest;

  bool is_nan(uint32_t code) const {
    const uint32_t magnitude = code & 0x7fu;
    return has_inf ? magnitude > (0x7fu >> fraction_bits << fraction_bits) : magnitude == 0x7fu;
  }
  double value_of(uint32_t code) const {
    const double sign = code >> 7 ? -1 : 1;
    const int top = (1 << exponent_bits) - 1, bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = static_cast<int>(code >> fraction_bits) & top;
    const double fraction = std::ldexp(code & ((1u << fraction_bits) - 1), -fraction_bits);
    if (has_inf && exponent == top) return sign * std::numeric_limits<double>::infinity();
    if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias);
    return sign * std::ldexp(1 + fraction, exponent - bias);
  }
};
constexpr ByteFormat kE4m3{4, 3, false, e4m3_to_f32, f32_to_e4m3, 448};
constexpr ByteFormat kE5m2{5, 2, true, e5m2_to_f32, f32_to_e5m2, 57344};

TEST(Dtype, EveryCodeOfThe8BitFloatsDecodesToItsValueAndBack) {
  for (const ByteFormat& format : {kE4m3, kE5m2}) {
    for (uint32_t code = 0; code < 256; ++code) {
      const uint8_t byte = static_cast<uint8_t>(code);
      const float x = format.decode(byte);
      EXPECT_EQ(std::signbit(x), code >> 7 != 0) << std::hex << code;
      if (format.is_nan(code)) {
        EXPECT_TRUE(std::isnan(x)) << std::hex << code;
        EXPECT_EQ(format.encode(x), (code & 0x80u) | 0x7fu) << "NaN keeps its sign";
      } else {
        EXPECT_EQ(x, format.value_of(code)) << std::hex << code;
        const uint8_t inf_saturates = static_cast<uint8_t>((code & 0x80u) | 0x7bu);
        EXPECT_EQ(format.encode(x), std::isinf(x) ? inf_saturates : byte) << std::hex << code;
      }
    }
  }
}

/** The nearest finite code by trying them all, ties to the even one. */
uint8_t nearest_byte(const ByteFormat& format, float x) {
  const double magnitude = std::min(std::fabs(static_cast<double>(x)), format.largest);
  uint32_t best = 0;
  for (uint32_t code = 0; code < 128; ++code) {
    if (format.is_nan(code) || std::isinf(format.value_of(code))) continue;
    const double to_code = std::fabs(format.value_of(code) - magnitude);
    const double to_best = std::fabs(format.value_of(best) - magnitude);
    if (to_code < to_best || (to_code == to_best && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best | (std::signbit(x) ? 0x80u : 0u));
}

TEST(Dtype, The8BitFloatsRoundToNearestEvenAndSaturate) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  for (const ByteFormat& format : {kE4m3, kE5m2}) {
    const auto check = [&](float x) {
      ASSERT_EQ(format.encode(x), nearest_byte(format, x)) << x << " 0x" << std::hex << bits_of(x);
    };
    for (uint32_t code = 0; code < 255; ++code) {
      if (format.is_nan(code) || format.is_nan(code + 1)) continue;
      const double middle = (format.value_of(code) + format.value_of(code + 1)) / 2;
      if (!std::isfinite(middle)) continue;
      const float x = static_cast<float>(middle);
      for (float y : {x, std::nextafter(x, inf), std::nextafter(x, -inf)}) check(y);
    }
    for (float x : {inf, -inf, 1e30f, -1e30f, 449.0f, 463.0f, 464.0f, 465.0f, 60000.0f, 65536.0f})
      check(x);
    std::mt19937_64 rng(kSeed);
    for (int i = 0; i < 20000; ++i) {
      const float x = float_of(static_cast<uint32_t>(rng()));
      if (!std::isnan(x)) check(x);
      check(std::ldexp(static_cast<float>(rng() % 100000) - 50000.0f, -14));
    }
  }
}

TEST(Dtype, Int8RoundsToNearestEvenAndSaturates) {
  for (int code = -128; code < 128; ++code) {
    const int32_t stored = code;  // its first byte is the code
    EXPECT_EQ(load_f32(&stored, DType::i8, 0), static_cast<float>(code));
    EXPECT_EQ(f32_to_i8(static_cast<float>(code)), code);
    EXPECT_EQ(f32_to_i8(static_cast<float>(code) + 0.49f), code);
    const int even = code % 2 == 0 ? code : code + 1;
    EXPECT_EQ(f32_to_i8(static_cast<float>(code) + 0.5f), std::min(even, 127));
  }
  EXPECT_EQ(f32_to_i8(1e30f), 127);
  EXPECT_EQ(f32_to_i8(-1e30f), -128);
  EXPECT_EQ(f32_to_i8(std::numeric_limits<float>::quiet_NaN()), 0);
}

TEST(Dtype, SizesAndNamesMatchTheApi) {
  EXPECT_EQ(dtype_bytes(DType::f32), 4);
  EXPECT_EQ(dtype_bytes(DType::f16), 2);
  EXPECT_EQ(dtype_bytes(DType::bf16), 2);
  EXPECT_STREQ(dtype_name(DType::f32), "f32");
  EXPECT_STREQ(dtype_name(DType::f16), "f16");
  EXPECT_STREQ(dtype_name(DType::bf16), "bf16");
  for (DType type : {DType::e4m3, DType::e5m2, DType::i8}) EXPECT_EQ(dtype_bytes(type), 1);
  EXPECT_STREQ(dtype_name(DType::e4m3), "e4m3");
  EXPECT_STREQ(dtype_name(DType::e5m2), "e5m2");
  EXPECT_STREQ(dtype_name(DType::i8), "i8");
}

}  // namespace
}  // namespace attnfold
