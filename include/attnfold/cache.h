/**
 * The paged KV cache round an attention call: where new tokens go, writing them, and moving pages.
 *
 *   attnfold_map_to_kernel_pages   when a table changes   tables of a manager's large blocks   -> tables of pages
 *   attnfold_slot_mapping          once per step          positions and page tables            -> a slot for each new token
 *   attnfold_append                once per layer         new rows of k and v                  -> their slots
 *   attnfold_copy_pages            at a fork or a swap    pages of a pool                      -> pages of it, or of another
 *
 * Words are those of attnfold.h.  A pool is the memory of all pages of one layer.  A slot is a token's place in it,
 * page * page_size + offset.  Strides count elements; one left at 0 means packed in the pool's layout.
 *
 * These calls check every argument, id and slot before they write anything, allocate nothing when they succeed, and give
 * the same bytes with any number of threads.  None of them keeps a pointer.  A call must not write a slot or page that a
 * run, or another of these calls, reads or writes at the same time.
 *
 * Calls that take an `execution` run on the GPU if its backend is ATTNFOLD_CUDA: with every array in device memory, launched on
 * its stream without waiting, so that a captured graph replays them with whatever slots, pairs and rows it then finds.  The
 * bytes are the CPU's, but for the bits of a NaN that is not copied.  What arrays hold cannot be checked there: a slot or page
 * that the pool does not have is passed over, a scale of the caller's is taken as it is, and a NaN in int8 becomes 0.
 */
#ifndef ATTNFOLD_CACHE_H_
#define ATTNFOLD_CACHE_H_

#include "attnfold/attnfold.h"

#ifdef __cplusplus
extern "C" {
#endif

/** The token that attnfold_append skips, and what attnfold_slot_mapping gives to padding. */
#define ATTNFOLD_NO_SLOT (-1)

/** The page that attnfold_map_to_kernel_pages gives to padding. */
#define ATTNFOLD_NO_PAGE (-1)

/**
 * A paged pool of keys and values, as in attnfold_problem and attnfold_tensors.
 * Set it to ATTNFOLD_KV_POOL_INIT first, then fill it in.
 *
 * No two (page, token, head) may share an element, nor k, v and scales; but they may be interleaved in one allocation, such as
 * [num_pages, 2, page_size, kv_heads, head_dim], or scales behind the keys of their page.  Pointers must be aligned to their elements.
 */
typedef struct attnfold_kv_pool {
  size_t struct_size;
  void* k;                                                 /* [num_pages, page_size, kv_heads, head_dim_qk], or head-major */
  int64_t k_stride_page, k_stride_token, k_stride_head;    /* 0 = packed; may be negative */
  void* v;                                                 /* NULL: a pool of keys alone (MLA, where v is a part of k) */
  int64_t v_stride_page, v_stride_token, v_stride_head;
  attnfold_dtype kv_dtype;                                 /* any */
  attnfold_kv_layout kv_layout;                            /* what packed means */
  int32_t kv_heads;                                        /* 1..65536 */
  int32_t head_dim_qk, head_dim_vo;                        /* multiples of 8, 8..576; head_dim_vo is not read if v is NULL */
  int32_t page_size;                                       /* >= 1, any */
  int64_t num_pages;                                       /* with 0, pointers may be NULL */
  attnfold_scale_kind k_scale_kind, v_scale_kind;          /* NONE unless kv_dtype has 8 bits; appending needs one there */
  float* k_scale;                                          /* as in attnfold_tensors.  Per tensor and per head: read.  Per */
  int64_t k_scale_stride_page, k_scale_stride_token, k_scale_stride_head;   /* token: written, and copied with the pages */
  float* v_scale;
  int64_t v_scale_stride_page, v_scale_stride_token, v_scale_stride_head;
} attnfold_kv_pool;

#define ATTNFOLD_KV_POOL_INIT                                                                                   \
  {                                                                                                             \
    sizeof(attnfold_kv_pool), NULL, 0, 0, 0, NULL, 0, 0, 0, ATTNFOLD_BF16, ATTNFOLD_NHD, 1, 128, 128, 16, 0,    \
        ATTNFOLD_SCALE_NONE, ATTNFOLD_SCALE_NONE, NULL, 0, 0, 0, NULL, 0, 0, 0                                  \
  }

/** New rows of k and v.  Set it to ATTNFOLD_KV_ROWS_INIT first. */
typedef struct attnfold_kv_rows {
  size_t struct_size;
  int64_t num_tokens;                          /* 0..2^31-1; with 0, pointers may be NULL */
  const void* k;                               /* [num_tokens, kv_heads, head_dim_qk] */
  int64_t k_stride_token, k_stride_head;       /* 0 = packed */
  const void* v;                               /* [num_tokens, kv_heads, head_dim_vo]; not read if the pool has no v */
  int64_t v_stride_token, v_stride_head;
  attnfold_dtype dtype;                        /* of both: F32, F16 or BF16, whatever the pool's */
  const int64_t* slots;                        /* [num_tokens]; ATTNFOLD_NO_SLOT skips the token */
} attnfold_kv_rows;

#define ATTNFOLD_KV_ROWS_INIT \
  { sizeof(attnfold_kv_rows), 0, NULL, 0, 0, NULL, 0, 0, ATTNFOLD_BF16, NULL }

/**
 * Writes rows of k and v into their slots.
 *
 * Rows of the pool's type are copied bit for bit.  Others are rounded once, to nearest even; what leaves the range of the
 * pool's type becomes Inf, and a NaN stays a NaN.  Of several tokens with one slot the last wins.  The rows of skipped
 * tokens are not read.
 *
 * A pool of 8 bits gets x / scale, divided in float32 and rounded to nearest even.  What lies beyond the type's range, Inf
 * too, becomes its largest number; a NaN stays a NaN.
 *   per tensor, per head   the scale is the caller's, finite and not 0.  int8 has no NaN: one among the rows is an error
 *   per token              the call computes the scale of each token and head, max|x| over the type's largest number (448,
 *                          57344, 127; at least 2^-126; 1 if all are 0; a NaN does not count), and writes it to k_scale or
 *                          v_scale.  It is NaN, and with it all that is stored there, if an x is Inf, or NaN in int8
 *
 * pool        k and v must be apart from the rows and the slots
 * execution   num_threads and parallel_for, or a GPU, as above; NULL = all defaults
 * Errors: INVALID_ARGUMENT names the argument, and of a slot its index; nothing is written then.
 */
ATTNFOLD_API attnfold_status attnfold_append(const attnfold_kv_pool* pool, const attnfold_kv_rows* rows,
                                             const attnfold_execution* execution);

/**
 * The slots of a step's new tokens: slot = page_of(position / page_size) * page_size + position % page_size.
 *
 * lengths     qo_indptr says which tokens belong to which request, block_table or kv_indices which pages; kv_len as below
 * positions   NULL: the qo_len tokens of a request are its last, kv_len - qo_len + i; kv_len counts them and must be
 *             at least qo_len, but a request with kv_len 0 is padding: its tokens get ATTNFOLD_NO_SLOT.
 *             Else [qo_indptr[batch]], the position of each token in its request; -1 is padding; below kv_len, if that
 *             is given
 * num_slots   length of `slots`, at least qo_indptr[batch]; what lies beyond the last token gets ATTNFOLD_NO_SLOT
 * slots       [num_slots], apart from the other arrays
 *
 * Runs on the calling thread.  Errors: INVALID_ARGUMENT names the argument and index; nothing is written then.
 */
ATTNFOLD_API attnfold_status attnfold_slot_mapping(const attnfold_lengths* lengths, int32_t page_size, int64_t num_pages,
                                                   const int64_t* positions, int64_t num_slots, int64_t* slots);

/**
 * attnfold_slot_mapping on `execution`.  On CUDA every array is device memory: a token at a bad position or page gets
 * ATTNFOLD_NO_SLOT, offsets that fall give any slots of the pool, and tokens from num_slots on get none.
 */
ATTNFOLD_API attnfold_status attnfold_slot_mapping_on(const attnfold_lengths* lengths, int32_t page_size,
                                                      int64_t num_pages, const int64_t* positions, int64_t num_slots,
                                                      int64_t* slots, const attnfold_execution* execution);

/**
 * Block tables of a manager whose blocks hold several pages each -> tables of pages.  With n = block_size / page_size,
 * block b is the pages b * n .. b * n + n - 1, and entry i of a row becomes the entries i * n .. i * n + n - 1.
 *
 * width          entries of each row that are mapped; page_table gets width * n
 * block_size     tokens of a block, a multiple of page_size
 * num_blocks     of the pool; page ids must stay below 2^31
 * block_table    [batch, block_table_stride] block ids; ATTNFOLD_NO_PAGE is padding
 * used           [batch] entries of each row that mean anything, 0..width, or NULL: all; the others are not read
 * page_table     [batch, page_table_stride], apart from the inputs; padding and what is not used get ATTNFOLD_NO_PAGE,
 *                entries from width * n on stay as they are
 *
 * Runs on the calling thread.  Errors: INVALID_ARGUMENT names the argument and index; nothing is written then.
 */
ATTNFOLD_API attnfold_status attnfold_map_to_kernel_pages(int32_t batch, int32_t width, int32_t block_size,
                                                          int32_t page_size, int64_t num_blocks,
                                                          const int32_t* block_table, int64_t block_table_stride,
                                                          const int32_t* used, int32_t* page_table,
                                                          int64_t page_table_stride);

/**
 * Copies whole pages of k and v, bit for bit: within a pool (copy on write after a fork), or from one pool to another
 * (swapping requests out and in).
 *
 * The pairs take effect one after the other: a page that one pair writes is what a later pair reads, and of two pairs with
 * one destination the last wins.  A pair of a page with itself changes nothing.
 *
 * from, to     the same pool, or two with disjoint memory; types, kinds of scale, heads, head dims and page_size must be equal, layouts and
 *              strides need not
 * pairs        [num_pairs, 2] page of from, page of to; apart from the pool `to`
 * execution    num_threads and parallel_for, or a GPU, as above; NULL = all defaults
 * Errors: INVALID_ARGUMENT names the argument and index; nothing is written then.
 */
ATTNFOLD_API attnfold_status attnfold_copy_pages(const attnfold_kv_pool* from, const attnfold_kv_pool* to,
                                                 const int32_t* pairs, int64_t num_pairs,
                                                 const attnfold_execution* execution);

#ifdef __cplusplus
}
#endif
#endif /* ATTNFOLD_CACHE_H_ */
