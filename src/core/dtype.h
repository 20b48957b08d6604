// Storage types and their exact scalar decode; the only numerics that the oracle shares with the
// kernels.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/host_device.h"

namespace attnfold {

// Values of attnfold_dtype.
enum class DType : int32_t { f32 = 0, f16 = 1, bf16 = 2, e4m3 = 3, e5m2 = 4, i8 = 5 };
constexpr int kNumDTypes = 6;

ATTNFOLD_HD constexpr bool is_8_bit(DType t) {
  return t == DType::e4m3 || t == DType::e5m2 || t == DType::i8;
}

ATTNFOLD_HD constexpr int dtype_bytes(DType t) { return t == DType::f32 ? 4 : is_8_bit(t) ? 1 : 2; }

inline const char* dtype_name(DType t) {
  constexpr const char* kNames[kNumDTypes] = {"f32", "f16", "bf16", "e4m3", "e5m2", "i8"};
  return kNames[static_cast<int>(t)];
}

ATTNFOLD_HD inline uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

ATTNFOLD_HD inline float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

ATTNFOLD_HD inline float bf16_to_f32(uint16_t h) {
  return float_of(static_cast<uint32_t>(h) << 16);
}

/** Round to nearest even; a NaN stays one and becomes quiet. */
ATTNFOLD_HD inline uint16_t f32_to_bf16(float x) {
  const uint32_t u = bits_of(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/** Exact; a signalling NaN becomes quiet, as vcvtph2ps makes it. */
ATTNFOLD_HD inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // Inf, NaN
    const uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
    return float_of(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13) | quiet);
  }
  if (magnitude >= 0x400u)
    return float_of(sign | ((magnitude << 13) + 0x38000000u));  // rebias by 112
  return float_of(sign |
                  bits_of(static_cast<float>(magnitude) * 0x1p-24f));  // subnormal: exact product
}

/** Round to nearest even, overflow to Inf; a NaN stays one and becomes quiet. */
ATTNFOLD_HD inline uint16_t f32_to_f16(float x) {
  const uint32_t u = bits_of(x);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
  if (a >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // at and above 65520
  if (a < 0x38800000u) {  // below 2^-14: units of 2^-24; adding 2^-1 rounds to that grid
    const uint32_t r = bits_of(float_of(a) + 0.5f) - 0x3f000000u;
    return static_cast<uint16_t>(sign | r);
  }
  return static_cast<uint16_t>(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13));
}

// The 8-bit floats are those of OCP.  A code's fields, moved into those of f16, are its value
// (e5m2) or 2^-8 of it (e4m3), subnormals included.

/** Exact; no Inf: the codes 0x7f and 0xff are NaN, and their neighbours +-448. */
ATTNFOLD_HD inline float e4m3_to_f32(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t nan = magnitude == 0x7fu ? 0x7e00u : 0u;
  return f16_to_f32(static_cast<uint16_t>((code & 0x80u) << 8 | magnitude << 7 | nan)) * 256.0f;
}

/** Exact; Inf at 0x7c, NaN above. */
ATTNFOLD_HD inline float e5m2_to_f32(uint8_t code) {
  return f16_to_f32(static_cast<uint16_t>(code << 8));
}

/** Round to nearest even; what lies beyond +-448, Inf too, becomes +-448; a NaN stays one. */
ATTNFOLD_HD inline uint8_t f32_to_e4m3(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t sign = u >> 24 & 0x80u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (a >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // at and above 448
  if (a < 0x3c800000u)  // below 2^-6: units of 2^-9; adding 2^14 rounds to that grid
    return static_cast<uint8_t>(sign | (bits_of(float_of(a) + 16384.0f) - 0x46800000u));
  return static_cast<uint8_t>(sign | ((a - 0x3c000000u + 0x7ffffu + (a >> 20 & 1u)) >> 20));
}

/** Round to nearest even; what lies beyond +-57344, Inf too, becomes +-57344; a NaN stays one. */
ATTNFOLD_HD inline uint8_t f32_to_e5m2(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t sign = u >> 24 & 0x80u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (a >= 0x47600000u) return static_cast<uint8_t>(sign | 0x7bu);  // at and above 57344
  if (a < 0x38800000u)  // below 2^-14: units of 2^-16; adding 2^7 rounds to that grid
    return static_cast<uint8_t>(sign | (bits_of(float_of(a) + 128.0f) - 0x43000000u));
  return static_cast<uint8_t>(sign | ((a - 0x38000000u + 0xfffffu + (a >> 21 & 1u)) >> 21));
}

/** Round to nearest even, -128 and 127 beyond; a NaN, which int8 lacks, becomes 0. */
ATTNFOLD_HD inline int8_t f32_to_i8(float x) {
  if (!(x == x)) return 0;
  const float bounded = x < -128.0f ? -128.0f : x > 127.0f ? 127.0f : x;
  const float magic = 12582912.0f;  // 1.5 x 2^23
  return static_cast<int8_t>((bounded + magic) - magic);
}

/** Element `i` of an array of type `t`. */
ATTNFOLD_HD inline float load_f32(const void* p, DType t, int64_t i) {
  switch (t) {
    case DType::f32: return static_cast<const float*>(p)[i];
    case DType::f16: return f16_to_f32(static_cast<const uint16_t*>(p)[i]);
    case DType::bf16: return bf16_to_f32(static_cast<const uint16_t*>(p)[i]);
    case DType::e4m3: return e4m3_to_f32(static_cast<const uint8_t*>(p)[i]);
    case DType::e5m2: return e5m2_to_f32(static_cast<const uint8_t*>(p)[i]);
    default: return static_cast<float>(static_cast<const int8_t*>(p)[i]);
  }
}

ATTNFOLD_HD inline void store_f32(void* p, DType t, int64_t i, float x) {
  switch (t) {
    case DType::f32: static_cast<float*>(p)[i] = x; return;
    case DType::f16: static_cast<uint16_t*>(p)[i] = f32_to_f16(x); return;
    case DType::bf16: static_cast<uint16_t*>(p)[i] = f32_to_bf16(x); return;
    case DType::e4m3: static_cast<uint8_t*>(p)[i] = f32_to_e4m3(x); return;
    case DType::e5m2: static_cast<uint8_t*>(p)[i] = f32_to_e5m2(x); return;
    default: static_cast<int8_t*>(p)[i] = f32_to_i8(x); return;
  }
}

}  // namespace attnfold
