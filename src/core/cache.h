// A token's place in a paged pool, and the conversion of its row.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/problem.h"

namespace attnfold {

struct SlotPlace {
  int64_t page;
  int32_t offset;
};

ATTNFOLD_HD inline SlotPlace place_of_slot(int64_t slot, int32_t page_size) {
  const int64_t page = slot / page_size;
  return {page, static_cast<int32_t>(slot - page * page_size)};
}

/** k or v of new tokens, and where it goes.  A scale stands at [page, token, head] if it is
 * written, at [head] if it is given; both are null in a pool of 16 or 32 bits. */
struct AppendPart {
  View<const char> from;  // no pages
  View<char> to;
  int32_t width;  // elements of a row
  View<char> scale;
  const float* given_scale;
  int64_t given_stride_head;
};

/** New tokens on their way into a pool, checked. */
struct AppendWork {
  AppendPart part[2];
  int32_t num_parts;  // 1: no v
  DType from, to;
  int32_t kv_heads, page_size;
  int64_t num_slots, num_tokens;
  const int64_t* slots;
};

/** Pages on their way, checked: k, v, and scales per token; a width is 0 where there is none. */
struct CopyWork {
  View<char> from[4], to[4];
  int32_t width[4], element_bytes[4];
  int32_t kv_heads, page_size;
  int64_t from_pages, to_pages;
  bool within;           // one pool
  const int32_t* pairs;  // [num_pairs, 2]
  int64_t num_pairs;
};

/** A slot mapping, checked as far as the host can see. */
struct SlotWork {
  Lengths lengths;
  int32_t page_size;
  int64_t num_pages;
  const int64_t* positions;  // [qo_indptr[batch]], or null
  int64_t num_slots;
  int64_t* slots;
};

/** Position of new token `row` of request r, or -1 for padding. */
ATTNFOLD_HD inline int64_t position_of_token(const SlotWork& m, int32_t r, int32_t row) {
  if (m.positions) return m.positions[row];
  if (m.lengths.kv_len[r] == 0) return -1;
  return static_cast<int64_t>(m.lengths.kv_len[r]) - (m.lengths.qo_indptr[r + 1] - row);
}

/** Pages that request r may have. */
ATTNFOLD_HD inline int64_t num_pages_of(const Lengths& l, int32_t r) {
  return l.block_table ? l.block_table_stride
                       : static_cast<int64_t>(l.kv_indptr[r + 1]) - l.kv_indptr[r];
}

/** The slot of position >= 0 of the request with these pages. */
ATTNFOLD_HD inline int64_t slot_of_position(const int32_t* pages, int64_t position,
                                            int32_t page_size) {
  const int64_t i = position / page_size;
  return pages[i] * static_cast<int64_t>(page_size) + (position - i * page_size);
}

/** Entry j of a row of pages whose blocks hold `pages_per_block` each; a negative block is padding
 * and stays as it is. */
ATTNFOLD_HD inline int32_t kernel_page(int32_t block, int32_t pages_per_block, int32_t j) {
  return block < 0 ? block : block * pages_per_block + j % pages_per_block;
}

/** Which of `num_shares` writes a slot.  Eight neighbours go together: they may share a line. */
ATTNFOLD_HD inline uint32_t share_of_slot(int64_t slot, uint32_t num_shares) {
  const uint64_t mixed = static_cast<uint64_t>(slot >> 3) * 0x9e3779b97f4a7c15u;
  return static_cast<uint32_t>(((mixed >> 32) * num_shares) >> 32);
}

/** n elements, each rounded once; the same type is copied bit for bit. */
template <DType kFrom, DType kTo>
ATTNFOLD_HD inline void convert_elements(const void* from, void* to, int64_t n) {
  if constexpr (kFrom == kTo) {
    memcpy(to, from, static_cast<size_t>(n * dtype_bytes(kTo)));
  } else {
    for (int64_t i = 0; i < n; ++i) store_f32(to, kTo, i, load_f32(from, kFrom, i));
  }
}

/** Largest number of an 8-bit type. */
ATTNFOLD_HD inline float largest_number(DType t) {
  return t == DType::e4m3 ? 448.0f : t == DType::e5m2 ? 57344.0f : 127.0f;
}

/** What the elements of a row have in common, as far as its scale goes. */
struct RowMagnitude {
  uint32_t largest = 0;  // of those that are not NaN; magnitudes of floats compare as integers
  uint32_t nan = 0;      // 1: there was one

  ATTNFOLD_HD void add(float x) {
    const uint32_t a = bits_of(x) & 0x7fffffffu;
    nan |= a > 0x7f800000u ? 1u : 0u;
    largest = a <= 0x7f800000u && a > largest ? a : largest;
  }
};

/** The scale with which the largest element becomes the largest number of an 8-bit type; NaN if one
 * is Inf, or is NaN and the type has none. */
ATTNFOLD_HD inline float scale_of(RowMagnitude row, DType to) {
  if (row.largest == 0x7f800000u || (row.nan && to == DType::i8)) return float_of(0x7fc00000u);
  if (row.largest == 0) return 1.0f;
  const float scale = float_of(row.largest) / largest_number(to);
  return scale < 0x1p-126f ? 0x1p-126f : scale;
}

template <DType kFrom>
ATTNFOLD_HD inline float scale_of_row(const void* row, int64_t n, DType to) {
  RowMagnitude magnitude;
  for (int64_t i = 0; i < n; ++i) magnitude.add(load_f32(row, kFrom, i));
  return scale_of(magnitude, to);
}

/** n elements over their scale, each rounded once more to an 8-bit type. */
template <DType kFrom, DType kTo>
ATTNFOLD_HD inline void quantise_elements(const void* from, void* to, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) store_f32(to, kTo, i, load_f32(from, kFrom, i) / scale);
}

}  // namespace attnfold
