// core/mask.h against the oracle's own predicates: every mask, every row, every key.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <vector>

#include "core/problem.h"
#include "ref/oracle.h"

namespace attnfold {
namespace {

struct Drawn {
  attnfold_problem problem = ATTNFOLD_PROBLEM_INIT;
  int32_t qo_len, kv_len;

  Mask mask() const {
    return {problem.mask == ATTNFOLD_MASK_CAUSAL, problem.window_left, problem.window_right,
            problem.attention_chunk, problem.sink_tokens};
  }
};

Drawn draw() {
  Drawn d;
  d.problem.mask = *rc::gen::element(ATTNFOLD_MASK_NONE, ATTNFOLD_MASK_CAUSAL);
  d.problem.window_left = *rc::gen::inRange(-1, 20);
  d.problem.window_right = *rc::gen::inRange(-1, 20);
  d.problem.attention_chunk = *rc::gen::inRange(0, 20);
  d.problem.sink_tokens = *rc::gen::inRange(0, 20);
  d.qo_len = *rc::gen::inRange(1, 40);
  d.kv_len = *rc::gen::inRange(0, 60);
  return d;
}

bool contains(const VisibleKeys& keys, int32_t j) {
  return j < keys.sink || (j >= keys.begin && j < keys.end);
}

/** A call of one request with what the step says of it; its tensors are not looked at. */
struct DrawnRequest {
  check::Call call;
  Mask mask;
  RequestShape shape;
};

DrawnRequest draw_request() {
  const Drawn d = draw();
  DrawnRequest r{{}, d.mask(), {d.qo_len, d.kv_len}};
  if (*rc::gen::element(true, false)) {
    const int32_t least = std::min(d.qo_len, d.kv_len);
    r.shape.mask_width = *rc::gen::inRange(least, d.kv_len + 1);
  }
  r.shape.visible_prefix = *rc::gen::inRange(0, d.kv_len - r.shape.mask_width + 1);
  r.call.problem = d.problem;
  r.call.batch = 1;
  r.call.qo_indptr = {0, d.qo_len};
  r.call.kv_len = {d.kv_len};
  r.call.visible_prefix = {r.shape.visible_prefix};
  r.call.mask_width = {r.shape.mask_width};
  const int64_t bytes = d.qo_len * mask_row_bytes(r.shape.mask_width);
  r.call.mask_indptr = {0, bytes};
  r.call.mask_bits = *rc::gen::container<std::vector<uint8_t>>(static_cast<size_t>(bytes),
                                                               rc::gen::arbitrary<uint8_t>());
  return r;
}

/** Before the mask's keys what the ranges say; among them all that lie in a range may be seen. */
RC_GTEST_PROP(MaskProperty, VisibleKeysAreThoseOfTheOracle, ()) {
  const DrawnRequest d = draw_request();
  const int32_t kv_len = d.shape.kv_len, tail = kv_len - d.shape.mask_width;
  for (int32_t i = 0; i < d.shape.qo_len; ++i) {
    const VisibleKeys keys = visible_keys(d.mask, d.shape, i);
    RC_ASSERT(keys.sink == 0 || keys.sink < keys.begin);
    RC_ASSERT(keys.begin <= keys.end && keys.end <= kv_len);
    for (int32_t j = 0; j < tail; ++j)
      RC_ASSERT(contains(keys, j) == ref::visible(d.call, 0, i, j));
    for (int32_t j = tail; j < kv_len; ++j) RC_ASSERT(contains(keys, j));
  }
}

RC_GTEST_PROP(MaskProperty, KeysOfATileHoldThoseOfEachRow, ()) {
  const DrawnRequest d = draw_request();
  const int32_t first = *rc::gen::inRange(0, d.shape.qo_len),
                n = *rc::gen::inRange(1, d.shape.qo_len - first + 1);
  const VisibleKeys tile = visible_keys(d.mask, d.shape, first, n);
  for (int32_t i = first; i < first + n; ++i) {
    for (int32_t j = 0; j < d.shape.kv_len; ++j) {
      if (ref::visible(d.call, 0, i, j)) RC_ASSERT(contains(tile, j));
    }
  }
}

RC_GTEST_PROP(MaskProperty, SeenKeysOfACallHoldThoseOfEachRow, ()) {
  const DrawnRequest d = draw_request();
  const check::KeyRange seen = check::seen_keys(d.call, 0);
  const VisibleKeys all = visible_keys(d.mask, d.shape, 0, d.shape.qo_len);
  for (int32_t j = 0; j < d.shape.kv_len; ++j) RC_ASSERT(seen.meets(j, j + 1) == contains(all, j));
}

}  // namespace
}  // namespace attnfold
