// Random values that are pure functions of their coordinates.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace attnfold::check {

/** A bijection of 64-bit words that leaves no visible pattern (the finaliser of SplitMix64). */
inline uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/** One word for a list of coordinates. */
template <typename... Coordinates>
uint64_t hash_of(uint64_t seed, Coordinates... coordinates) {
  uint64_t h = mix64(seed);
  ((h = mix64(h ^ static_cast<uint64_t>(coordinates))), ...);
  return h;
}

/** Two independent standard normal values from one word (Box and Muller); the last bit depends on
 * the C library's log and cos. */
inline std::pair<double, double> normals_of(uint64_t word) {
  constexpr double kTwoPi = 6.283185307179586477;
  const double u = (static_cast<double>(word >> 32) + 0.5) * 0x1p-32;  // in (0, 1)
  const double angle = static_cast<double>(word & 0xffffffffu) * 0x1p-32 * kTwoPi;
  const double radius = std::sqrt(-2.0 * std::log(u));
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

/** Two independent uniform values of mean 0 and variance 1, the same bits on every machine. */
inline std::pair<double, double> uniforms_of(uint64_t word) {
  constexpr double kSqrt3 = 1.7320508075688772;
  const auto uniform = [](uint64_t bits) {
    return (static_cast<double>(static_cast<uint32_t>(bits)) * 0x1p-31 - 1.0) * kSqrt3;
  };
  return {uniform(word >> 32), uniform(word)};
}

/** 0..n-1 in an order drawn from the seed. */
inline std::vector<int32_t> permutation(int32_t n, uint64_t seed) {
  std::vector<int32_t> order(static_cast<size_t>(n));
  for (int32_t i = 0; i < n; ++i) order[i] = i;
  for (int32_t i = n - 1; i > 0; --i) {
    std::swap(order[i], order[hash_of(seed, i) % (static_cast<uint64_t>(i) + 1)]);
  }
  return order;
}

}  // namespace attnfold::check
