// Which keys a row sees.  The oracle states each mask again in its own words; a property test holds
// one to the other.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace attnfold {

struct Mask {
  int32_t causal = 0;
  int32_t window_left = -1;  // -1 = off
  int32_t window_right = -1;
  int32_t attention_chunk = 0;  // 0 = off
  int32_t sink_tokens = 0;
};

/** What of a request decides which keys its queries see. */
struct RequestShape {
  int32_t qo_len = 0, kv_len = 0;
  int32_t visible_prefix = 0;  // keys that every query sees, whatever the mask
  int32_t mask_width = 0;      // of the last keys a query sees those whose bit is set, no others
};

/** Keys [0, sink) and [begin, end) of a request; sink < begin, or 0. */
struct VisibleKeys {
  int32_t sink = 0, begin = 0, end = 0;
};

ATTNFOLD_HD inline int64_t clamp_to(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

/**
 * Keys that query `i` of a request sees; begin and end never fall as i grows.
 *
 * With a mask_width, end is kv_len: the bits have the last word on the last mask_width keys.  These
 * are at least the new tokens' own, so that what the query sees before them reaches up to them.
 */
ATTNFOLD_HD inline VisibleKeys visible_keys(const Mask& mask, const RequestShape& request,
                                            int32_t i) {
  const int32_t kv_len = request.kv_len;
  const int64_t position = static_cast<int64_t>(kv_len) - request.qo_len + i;
  int64_t begin = 0, end = kv_len;
  if (mask.causal) end = clamp_to(position + 1, 0, end);
  if (mask.window_right >= 0) end = clamp_to(position + mask.window_right + 1, 0, end);
  if (mask.window_left >= 0) begin = clamp_to(position - mask.window_left, 0, end);
  if (mask.attention_chunk > 0) {
    const int64_t chunk =
        (position > 0 ? position : 0) / mask.attention_chunk * mask.attention_chunk;
    begin = clamp_to(chunk, begin, end);
    end = clamp_to(chunk + mask.attention_chunk, begin, end);
  }
  if (request.mask_width > 0) {
    const int64_t tail = kv_len - request.mask_width;
    begin = begin < tail ? begin : tail;
    end = kv_len;
  }
  int64_t sink = mask.sink_tokens < end ? mask.sink_tokens : end;
  if (sink < request.visible_prefix) sink = request.visible_prefix;
  if (sink >= begin) return {0, 0, static_cast<int32_t>(sink > end ? sink : end)};
  return {static_cast<int32_t>(sink), static_cast<int32_t>(begin), static_cast<int32_t>(end)};
}

/** Keys that some query of [i, i + n) sees, and perhaps a few between. */
ATTNFOLD_HD inline VisibleKeys visible_keys(const Mask& mask, const RequestShape& request,
                                            int32_t i, int32_t n) {
  const VisibleKeys first = visible_keys(mask, request, i);
  const VisibleKeys last = visible_keys(mask, request, i + n - 1);
  return {first.sink, first.begin < last.end ? first.begin : last.end, last.end};
}

}  // namespace attnfold
