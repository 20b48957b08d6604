// What the steps of the ladder share: inputs, attention in float64, a count of bytes, half
// precision. The attention of a step stands in its own file.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <vector>

namespace ladder {

/** One head: q [rows, width], k and v [keys, width], each row major.  Scores are q.k / sqrt(width).
 */
struct Inputs {
  int rows, keys, width;
  std::vector<float> q, k, v;
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(width)); }
};

inline Inputs draw(int rows, int keys, int width) {
  uint64_t state = 1;
  const auto fill = [&](int n) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& value : x) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      value = static_cast<float>(static_cast<int32_t>(state >> 32)) * 0x1p-30f;  // in [-2, 2)
    }
    return x;
  };
  return {rows, keys, width, fill(rows * width), fill(keys * width), fill(keys * width)};
}

/** q[row] . k[key] / sqrt(width), in float32. */
inline float score(const Inputs& in, int row, int key) {
  float sum = 0;
  for (int i = 0; i < in.width; ++i) sum += in.q[row * in.width + i] * in.k[key * in.width + i];
  return sum * in.scale();
}

/** The answer, [rows, width], in float64. */
inline std::vector<double> exact(const Inputs& in) {
  std::vector<double> o(static_cast<size_t>(in.rows) * in.width, 0.0), x(in.keys);
  for (int r = 0; r < in.rows; ++r) {
    for (int j = 0; j < in.keys; ++j) {
      double sum = 0;
      for (int i = 0; i < in.width; ++i) {
        sum += double{in.q[r * in.width + i]} * in.k[j * in.width + i];
      }
      x[j] = sum / std::sqrt(double(in.width));
    }
    const double m = *std::max_element(x.begin(), x.end());
    double l = 0;
    for (double& value : x) l += value = std::exp(value - m);
    for (int j = 0; j < in.keys; ++j) {
      for (int i = 0; i < in.width; ++i) o[r * in.width + i] += x[j] / l * in.v[j * in.width + i];
    }
  }
  return o;
}

/** Largest difference; infinite if anything is not finite. */
inline double error(const std::vector<float>& o, const std::vector<double>& want) {
  double most = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(o[i])) return std::numeric_limits<double>::infinity();
    most = std::max(most, std::fabs(o[i] - want[i]));
  }
  return most;
}

/** Floats that cross between the big memory and the chip, and floats held besides q, k, v and o. */
struct Traffic {
  int64_t read = 0, written = 0, held = 0;
};

inline int failures = 0;
/** A claim that a step makes about itself. */
inline void claim(bool holds, const char* what) {
  std::printf("  %s  %s\n", holds ? "holds" : "FAILS", what);
  failures += holds ? 0 : 1;
}
inline void show(const Traffic& t) {
  std::printf("  reads %.2f MB, writes %.2f MB, holds %.1f KB besides q, k, v and o\n",
              t.read * 4e-6, t.written * 4e-6, t.held * 4e-3);
}

/** Rounded to IEEE binary16: 11 significant bits, overflow to infinity, ties to even. */
inline float to_half(float x) {
  if (!std::isfinite(x) || x == 0) return x;
  int exponent;
  std::frexp(x, &exponent);
  const float step = std::ldexp(1.0f, std::max(exponent, -13) - 11);
  const float rounded = std::nearbyint(x / step) * step;
  return std::fabs(rounded) > 65504 ? std::copysign(HUGE_VALF, x) : rounded;
}

}  // namespace ladder
