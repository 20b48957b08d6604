// Draws calls: random ragged batches with poison in every place that must not be read.
#pragma once

#include <cstdint>
#include <random>

#include "check/call.h"

namespace attnfold::check {

/** Bits of a mask to draw. */
enum class MaskBits {
  random,  // a fair coin each, every fourth query without any
  tree,    // a token sees its ancestors and itself, the keys before the new tokens all or none
  causal   // what causal says
};

/** Shape of a call to draw; what is not set here is set by generate(). */
struct Spec {
  attnfold_problem problem = ATTNFOLD_PROBLEM_INIT;  // heads, dims, dtypes, storage, layout,
                                                     // page_size, mask, window, sm_scale
  std::vector<int32_t> qo_len, kv_len;
  bool csr = false;           // page ids as kv_indptr + kv_indices instead of a block table
  bool permute_pages = true;  // else page i of the pool follows page i-1
  bool poison =
      true;  // NaN in every KV slot that no row may see, 0x7ffffff0 in unused table entries
  bool odd_strides =
      false;  // rows, heads, tokens and pages padded by odd multiples of elements; gaps poisoned
  std::vector<float> alibi_slopes, sink_logits;  // [qo_heads], or empty
  std::vector<int32_t> visible_prefix;           // [batch], or empty
  std::vector<int32_t> mask_width;               // [batch], or empty
  MaskBits mask_bits = MaskBits::random;         // what to draw for mask_width
  bool uniform = false;  // uniform draws: the same bits under every C library; else normal ones
  float q_range = 1.0f, k_range = 1.0f, v_range = 1.0f;  // standard deviations of draws, scales
                                                         // included
  float o_scale = 0.01f;                                 // of an o in e4m3
};

/** Same spec and seed: same call.  The values of a request's q, k, v depend on (seed, request
 * index, position) alone, so that two specs that differ in page size, layout, order of pages or
 * batch mates hold the same numbers. */
Call generate(const Spec& spec, uint64_t seed);

/** A random spec over everything the engine serves, small enough for the oracle. */
Spec random_spec(std::mt19937_64& rng);

/** A random spec, in one of three with the types of a kernel row that the others seldom get to: a
 * row of bf16 is chosen by the types of q and o too. */
Spec random_case(std::mt19937_64& rng);

/** The same requests in another order or a subset: `pick[i]` is the request of `call` that becomes
 * request i. */
Call select_requests(const Call& call, const std::vector<int32_t>& pick);

/** The same keys and values in another page size, layout, storage or page placement. */
Call repage(const Call& call, int32_t page_size, attnfold_kv_layout layout, bool csr,
            uint64_t page_seed);
Call to_ragged(const Call& call);

/** Gives request `to` the pages that hold the first `keys` keys of request `from`, whole pages
 * only; at most those that both have and all rows of `from` see from key 0 on.  Returns the keys.
 */
int32_t share_prefix(Call* call, int32_t from, int32_t to, int32_t keys);

/** Lets requests continue prefixes of earlier ones: a tree drawn from `rng`. */
void share_prefixes(Call* call, std::mt19937_64& rng);

/** Tokens [begin, end) of request r as a call of their own, on the keys that a chunked prefill
 * would have by then. */
Call chunk_of(const Call& call, int32_t r, int32_t begin, int32_t end);

}  // namespace attnfold::check
