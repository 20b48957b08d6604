// The float64 oracle: textbook attention on any problem the engine takes.  Read oracle.cpp top to
// bottom.
#pragma once

#include <cstdint>
#include <vector>

#include "check/call.h"

namespace attnfold::ref {

/** What each row should be, before rounding to an output type, and how far plain float32 arithmetic
 * is from it. */
struct Truth {
  std::vector<double> o;            // [qo_rows, qo_heads, head_dim_vo]
  std::vector<double> lse;          // [qo_rows, qo_heads]
  std::vector<double> naive_o_err;  // [qo_rows, qo_heads] largest |naive float32 - float64| over
                                    // the rows of the request
  std::vector<double> naive_lse_err;
  std::vector<double> max_abs_v;  // [qo_rows, qo_heads] over the keys that the row sees
  // Where k and v are of 16 bits, what an engine does to o that rounds weights to their type, each
  // relative to the largest of its 128 keys [128 i, 128 i + 128), but not their sum:
  std::vector<double> rounding_o;        // [qo_rows, qo_heads, head_dim_vo] how far o moves
  std::vector<double> rounding_limit_o;  // the same at most, whatever the weights are relative to
};

/** Whether query i of a request sees key j by the problem's own masks.  Each mask is stated here in
 * its own words; the kernels have core/mask.h. */
bool visible(const attnfold_problem& problem, int32_t qo_len, int32_t kv_len, int32_t i, int32_t j);

/** The same for request r of a call, with what the step says of that request and kv head. */
bool visible(const check::Call& call, int32_t r, int32_t i, int32_t j, int32_t kv_head = 0);

/** Every row, or only those listed. */
Truth answer(const check::Call& call);
Truth answer_rows(const check::Call& call,
                  const std::vector<int32_t>& rows);  // other rows are left 0

}  // namespace attnfold::ref
