// The cache round a call: appending, slots, tables of pages, copies of pages.
#ifndef ATTNFOLD_PYTHON_CACHE_H_
#define ATTNFOLD_PYTHON_CACHE_H_

#include "arrays.h"

namespace attnfold::python {

/** `pool` is a tuple (k, v or None, kv_layout, k_scale_kind, v_scale_kind, k_scale, v_scale). */
void append(nb::tuple pool, nb::handle k, nb::handle v, nb::handle slots, nb::dict execution);
void copy_pages(nb::tuple from, nb::tuple to, nb::handle pairs, nb::dict execution);
void slot_mapping(nb::handle qo_indptr, nb::handle kv_len, nb::handle block_table,
                  nb::handle kv_indptr, nb::handle kv_indices, int page_size, int64_t num_pages,
                  nb::handle positions, nb::handle slots, nb::dict execution);
void map_to_kernel_pages(nb::handle block_table, int block_size, int page_size, int64_t num_blocks,
                         nb::handle used, nb::handle page_table);

}  // namespace attnfold::python

#endif  // ATTNFOLD_PYTHON_CACHE_H_
