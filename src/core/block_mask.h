// Block-sparse masks: which blocks of keys a kv head sees.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace attnfold {

/** A pattern of local and vertical blocks; or, with neither, a list of blocks for each kv head of
 * each request. */
struct BlockMask {
  int32_t block_size = 0;  // keys; 0 = off
  int32_t local_blocks = 0;
  int32_t vertical_stride = 0;  // 0 = no vertical blocks
  int32_t head_step = 0;
};

ATTNFOLD_HD inline bool has_lists(const BlockMask& mask) {
  return mask.block_size > 0 && mask.local_blocks == 0 && mask.vertical_stride == 0;
}

/** The blocks that every query of one kv head sees. */
struct HeadBlocks {
  BlockMask mask;
  int32_t kv_head = 0;
  const int32_t* list = nullptr;  // [num_listed] rising, if the mask has lists
  int32_t num_listed = 0;
};

constexpr int64_t kNoKey = int64_t{1} << 62;

struct KeyStretch {
  int64_t begin, end;
};

/** The first key that a query at `position` sees because it is local; all after it are. */
ATTNFOLD_HD inline int64_t first_local_key(const BlockMask& mask, int64_t position) {
  if (mask.local_blocks == 0) return kNoKey;
  const int64_t own = (position > 0 ? position : 0) / mask.block_size;
  const int64_t first = own - mask.local_blocks + 1;
  return (first > 0 ? first : 0) * mask.block_size;
}

/** The first block that holds `key` or lies behind it, and that every query sees. */
ATTNFOLD_HD inline int64_t next_block(const HeadBlocks& blocks, int64_t key) {
  const BlockMask& mask = blocks.mask;
  const int64_t from = key / mask.block_size;
  if (!has_lists(mask)) {
    if (mask.vertical_stride == 0) return -1;
    const int64_t phase = from + int64_t{blocks.kv_head} * mask.head_step + 1;
    const int64_t past = phase % mask.vertical_stride;
    return past == 0 ? from : from + mask.vertical_stride - past;
  }
  int32_t low = 0, high = blocks.num_listed;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (blocks.list[middle] < from) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < blocks.num_listed ? blocks.list[low] : -1;
}

/** The first keys from `key` on that are listed, or local from `first_local` on; begin is kNoKey if
 * there are none. */
ATTNFOLD_HD inline KeyStretch next_stretch(const HeadBlocks& blocks, int64_t first_local,
                                           int64_t key) {
  if (key >= first_local) return {key, kNoKey};
  const int64_t block = next_block(blocks, key);
  const int64_t begin = block < 0 ? kNoKey : block * blocks.mask.block_size;
  if (begin >= first_local) return {first_local, kNoKey};
  return {begin > key ? begin : key, begin == kNoKey ? kNoKey : begin + blocks.mask.block_size};
}

}  // namespace attnfold
