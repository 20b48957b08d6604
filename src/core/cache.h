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

}  // namespace attnfold
