// Storage types and their exact scalar decode; the only numerics that the oracle shares with the
// kernels.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/host_device.h"

namespace attnfold {

enum class DType : int32_t { f32 = 0, f16 = 1, bf16 = 2 };  // values of attnfold_dtype
constexpr int kNumDTypes = 3;

ATTNFOLD_HD inline int dtype_bytes(DType t) { return t == DType::f32 ? 4 : 2; }

inline const char* dtype_name(DType t) {
  return t == DType::f32 ? "f32" : t == DType::f16 ? "f16" : "bf16";
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

/** Element `i` of an array of type `t`. */
ATTNFOLD_HD inline float load_f32(const void* p, DType t, int64_t i) {
  switch (t) {
    case DType::f32: return static_cast<const float*>(p)[i];
    case DType::f16: return f16_to_f32(static_cast<const uint16_t*>(p)[i]);
    default: return bf16_to_f32(static_cast<const uint16_t*>(p)[i]);
  }
}

ATTNFOLD_HD inline void store_f32(void* p, DType t, int64_t i, float x) {
  switch (t) {
    case DType::f32: static_cast<float*>(p)[i] = x; return;
    case DType::f16: static_cast<uint16_t*>(p)[i] = f32_to_f16(x); return;
    default: static_cast<uint16_t*>(p)[i] = f32_to_bf16(x); return;
  }
}

}  // namespace attnfold
