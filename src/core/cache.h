// A token's place in a paged pool, and the conversion of its row.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace attnfold {

struct SlotPlace {
  int64_t page;
  int32_t offset;
};

ATTNFOLD_HD inline SlotPlace place_of_slot(int64_t slot, int32_t page_size) {
  const int64_t page = slot / page_size;
  return {page, static_cast<int32_t>(slot - page * page_size)};
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

/** The scale with which the largest of n elements becomes the largest number of an 8-bit type; NaN
 * if one is Inf, or is NaN and the type has none. */
template <DType kFrom>
ATTNFOLD_HD inline float scale_of_row(const void* row, int64_t n, DType to) {
  const uint32_t inf = 0x7f800000u;
  uint32_t largest = 0, nan = 0;  // magnitudes of floats compare as integers
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t a = bits_of(load_f32(row, kFrom, i)) & 0x7fffffffu;
    nan |= a > inf ? 1u : 0u;
    largest = a <= inf && a > largest ? a : largest;
  }
  if (largest == inf || (nan && to == DType::i8)) return float_of(0x7fc00000u);
  if (largest == 0) return 1.0f;
  const float scale = float_of(largest) / largest_number(to);
  return scale < 0x1p-126f ? 0x1p-126f : scale;
}

/** n elements over their scale, each rounded once more to an 8-bit type. */
template <DType kFrom, DType kTo>
ATTNFOLD_HD inline void quantise_elements(const void* from, void* to, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) store_f32(to, kTo, i, load_f32(from, kFrom, i) / scale);
}

}  // namespace attnfold
