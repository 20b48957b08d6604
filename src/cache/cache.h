#pragma once

#include "attnfold/cache.h"
#include "status.h"

namespace attnfold::cache {

// The functions of attnfold/cache.h, with their arguments.

Status append(const attnfold_kv_pool* pool, const attnfold_kv_rows* rows,
              const attnfold_execution* execution);

Status slot_mapping(const attnfold_lengths* lengths, int32_t page_size, int64_t num_pages,
                    const int64_t* positions, int64_t num_slots, int64_t* slots,
                    const attnfold_execution* execution);

struct BlockTables {
  int32_t batch, width, block_size, page_size;
  int64_t num_blocks;
  const int32_t* block_table;
  int64_t block_table_stride;
  const int32_t* used;
  int32_t* page_table;
  int64_t page_table_stride;
};
Status map_to_kernel_pages(const BlockTables& tables);

Status copy_pages(const attnfold_kv_pool* from, const attnfold_kv_pool* to, const int32_t* pairs,
                  int64_t num_pairs, const attnfold_execution* execution);

}  // namespace attnfold::cache
