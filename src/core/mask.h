// Which keys a row sees.  The oracle states each mask again in its own words; a property test holds one to the other.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace attnfold {

struct Mask {
  int32_t causal = 0;
  int32_t window_left = -1;   // -1 = off
  int32_t window_right = -1;
};

/** Keys [begin, end) of a request; empty ranges have begin == end. */
struct KeyRange {
  int32_t begin = 0, end = 0;
};

ATTNFOLD_HD inline int64_t clamp_to(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

/** Keys that query `i` of a request sees; both ends never fall as i grows. */
ATTNFOLD_HD inline KeyRange visible_keys(const Mask& mask, int32_t qo_len, int32_t kv_len, int32_t i) {
  const int64_t position = static_cast<int64_t>(kv_len) - qo_len + i;
  int64_t begin = 0, end = kv_len;
  if (mask.window_left >= 0) begin = clamp_to(position - mask.window_left, 0, kv_len);
  if (mask.causal) end = clamp_to(position + 1, 0, end);
  if (mask.window_right >= 0) end = clamp_to(position + mask.window_right + 1, 0, end);
  if (begin > end) begin = end;
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
}

/** Keys that some query of [i, i + n) sees. */
ATTNFOLD_HD inline KeyRange visible_keys(const Mask& mask, int32_t qo_len, int32_t kv_len, int32_t i, int32_t n) {
  const int32_t end = visible_keys(mask, qo_len, kv_len, i + n - 1).end;
  const int32_t begin = visible_keys(mask, qo_len, kv_len, i).begin;
  return {begin < end ? begin : end, end};
}

}  // namespace attnfold
