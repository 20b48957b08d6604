// Calls for the bench: large, cheap to make, and in huge pages; and the bytes that they must read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check/call.h"
#include "probe.h"

namespace attnfold::tools {

/** One row of the bench, before it is measured.  Pages are permuted. */
struct BenchShape {
  std::string name;  // "1 x 32768"
  int32_t qo_heads, kv_heads;
  std::vector<int32_t> qo_len, kv_len;
  attnfold_dtype dtype = ATTNFOLD_BF16;  // of k and v; 8-bit ones are asked for in bf16
  int32_t head_dim = 128;
  int32_t page_size = 16;
  int32_t head_dim_in_k = 0;  // not 0: v is the first that many columns of k
  bool head_major = false;    // within a page
};

/** `batch` decodes of kv_len keys each. */
BenchShape decode_shape(int32_t batch, int32_t kv_len, int32_t qo_heads, int32_t kv_heads);
/** 64 decodes of lognormal lengths, always the same ones. */
BenchShape ragged_shape(int32_t qo_heads, int32_t kv_heads);
/** One decode of an MLA layer: 128 heads over latent rows of 576, whose first 512 are the values.
 */
BenchShape mla_shape(int32_t kv_len);
/** A causal prefill of qo_len new tokens, kv_len keys with them. */
BenchShape prefill_shape(int32_t qo_len, int32_t kv_len, int32_t qo_heads, int32_t kv_heads);

/** Values are uniform in [-1, 1]. */
check::Call make_call(const BenchShape& shape);

/** `batch` decodes on one prefix of `prefix` keys, whole pages, with `own` keys each. */
check::Call prefix_call(int32_t batch, int32_t prefix, int32_t own, int32_t qo_heads,
                        int32_t kv_heads);

/** The same keys and values for another number of query heads. */
check::Call with_qo_heads(const check::Call& call, int32_t qo_heads);

/** k and v in the order of the page tables: a page of k, the same page of v, and on. */
std::vector<Piece> table_pieces(const check::Call& call);
/** The two pools, whole. */
std::vector<Piece> pool_pieces(const check::Call& call);

}  // namespace attnfold::tools
