// core/mask.h against the oracle's own predicates: every mask, every row, every key.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "core/mask.h"
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

RC_GTEST_PROP(MaskProperty, VisibleKeysAreThoseOfTheOracle, ()) {
  const Drawn d = draw();
  for (int32_t i = 0; i < d.qo_len; ++i) {
    const VisibleKeys keys = visible_keys(d.mask(), {d.qo_len, d.kv_len}, i);
    RC_ASSERT(keys.sink == 0 || keys.sink < keys.begin);
    RC_ASSERT(keys.begin <= keys.end && keys.end <= d.kv_len);
    for (int32_t j = 0; j < d.kv_len; ++j) {
      RC_ASSERT(contains(keys, j) == ref::visible(d.problem, d.qo_len, d.kv_len, i, j));
    }
  }
}

RC_GTEST_PROP(MaskProperty, KeysOfATileHoldThoseOfEachRow, ()) {
  const Drawn d = draw();
  const int32_t first = *rc::gen::inRange(0, d.qo_len),
                n = *rc::gen::inRange(1, d.qo_len - first + 1);
  const VisibleKeys tile = visible_keys(d.mask(), {d.qo_len, d.kv_len}, first, n);
  for (int32_t i = first; i < first + n; ++i) {
    for (int32_t j = 0; j < d.kv_len; ++j) {
      if (ref::visible(d.problem, d.qo_len, d.kv_len, i, j)) RC_ASSERT(contains(tile, j));
    }
  }
}

}  // namespace
}  // namespace attnfold
