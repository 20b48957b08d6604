// A validated problem, as kernels see it: plain data.
#pragma once

#include <cstdint>

#include "core/block_mask.h"
#include "core/dtype.h"
#include "core/mask.h"

namespace attnfold {

struct Problem {
  int32_t qo_heads, kv_heads, group_size;
  int32_t head_dim_qk, head_dim_vo;
  DType q_dtype, kv_dtype, o_dtype;
  int32_t ragged;  // 1: k and v are rows at kv_indptr; 0: pages
  int32_t page_size;
  Mask mask;
  float score_scale;      // sm_scale * log2(e), rounded down: scores are kept in the log2 domain
  float score_scale_low;  // what the rounding took off, > 0: the two together have 48 bits
  float softcap;          // 0 = off; else score = softcap_log2 * tanh(q.k * softcap_scale)
  float softcap_scale;    // sm_scale / softcap
  float softcap_log2;     // softcap * log2(e)
  int32_t v_in_k;         // 1: v's elements are the first head_dim_vo of k's
  BlockMask blocks;
};

/** A tensor of [page, token, head, element]; q and o have one page, and rows for tokens.  Strides
 * in elements. */
template <class Byte>
struct View {
  Byte* data;
  int64_t stride_page, stride_token, stride_head;
};

/** The tensors of one run, with every stride resolved. */
struct Tensors {
  View<const char> q, k, v;
  View<char> o;
  float* lse;  // or null
  int64_t lse_stride_row, lse_stride_head;
  const float* alibi_slopes;  // [qo_heads] or null
  const float* sink_logits;   // [qo_heads] or null
  // Scales of k and v, as float32 at [page, token, kv head], with stride 0 along what they do not
  // depend on; data is null if there are none.  A scale that is not finite counts as NaN.
  View<const char> k_scale, v_scale;
  const float* o_scale;  // [1], of an o in e4m3, or null
};

/** The lengths of one step.  One of block_table and kv_indices is set, or neither if ragged. */
struct Lengths {
  int32_t batch;
  const int32_t* qo_indptr;    // [batch + 1]
  const int32_t* kv_len;       // [batch]
  const int32_t* block_table;  // [batch, block_table_stride]
  int64_t block_table_stride;
  const int32_t* kv_indptr;  // [batch + 1]
  const int32_t* kv_indices;
  const int32_t* visible_prefix = nullptr;  // [batch] or null
  const int32_t* mask_width = nullptr;      // [batch] or null; with the two below
  const int64_t* mask_indptr = nullptr;     // [batch + 1] offsets into mask_bits
  const uint8_t* mask_bits = nullptr;       // per request [qo_len, mask_row_bytes(mask_width)]
  const int32_t* block_indptr = nullptr;    // [batch * kv_heads + 1] offsets into block_indices
  const int32_t* block_indices = nullptr;
};

ATTNFOLD_HD inline HeadBlocks head_blocks(const BlockMask& mask, const Lengths& lengths,
                                          int32_t kv_heads, int32_t request, int32_t kv_head) {
  HeadBlocks blocks;
  blocks.mask = mask;
  blocks.kv_head = kv_head;
  if (has_lists(mask)) {
    const int32_t* offset =
        lengths.block_indptr + static_cast<int64_t>(request) * kv_heads + kv_head;
    blocks.list = lengths.block_indices + offset[0];
    blocks.num_listed = offset[1] - offset[0];
  }
  return blocks;
}

/** Whether every query sees the same blocks under both heads of a request. */
ATTNFOLD_HD inline bool same_blocks(const HeadBlocks& a, const HeadBlocks& b) {
  if (!has_lists(a.mask)) {
    return a.mask.vertical_stride == 0 ||
           int64_t{b.kv_head - a.kv_head} * a.mask.head_step % a.mask.vertical_stride == 0;
  }
  if (a.num_listed != b.num_listed) return false;
  for (int32_t i = 0; i < a.num_listed; ++i) {
    if (a.list[i] != b.list[i]) return false;
  }
  return true;
}

/** Bytes of one query's bits. */
ATTNFOLD_HD inline int64_t mask_row_bytes(int32_t mask_width) {
  return (static_cast<int64_t>(mask_width) + 7) / 8;
}

ATTNFOLD_HD inline RequestShape request_shape(const Lengths& lengths, int32_t r) {
  RequestShape shape;
  shape.qo_len = lengths.qo_indptr[r + 1] - lengths.qo_indptr[r];
  shape.kv_len = lengths.kv_len[r];
  if (lengths.visible_prefix) shape.visible_prefix = lengths.visible_prefix[r];
  if (lengths.mask_width) shape.mask_width = lengths.mask_width[r];
  return shape;
}

/** Page ids of request r, in key order. */
ATTNFOLD_HD inline const int32_t* pages_of(const Lengths& lengths, int32_t r) {
  return lengths.block_table ? lengths.block_table + r * lengths.block_table_stride
                             : lengths.kv_indices + lengths.kv_indptr[r];
}

}  // namespace attnfold
