// The cache round a call: appending, slots, tables of pages, copies of pages.
#ifndef ATTNFOLD_PYTHON_CACHE_H_
#define ATTNFOLD_PYTHON_CACHE_H_

#include "arrays.h"

namespace attnfold::python {

/** `pool` is a tuple (k, v or None, kv_layout, k_scale_kind, v_scale_kind, k_scale, v_scale). */
void append(nb::tuple pool, nb::handle k, nb::handle v, nb::handle slots, nb::dict execution);
void copy_pages(nb::tuple from, nb::tuple to, nb::handle pairs, nb::dict execution);

/** Returns `slots`, or new ones of numpy where it is None: `num_slots`, or one for each token. */
nb::object slot_mapping(nb::handle qo_indptr, nb::handle kv_len, nb::handle block_table,
                        nb::handle kv_indptr, nb::handle kv_indices, nb::handle page_size,
                        nb::handle num_pages, nb::handle positions, nb::handle num_slots,
                        nb::handle slots, nb::dict execution);

/** Returns a new table of numpy. */
nb::object map_to_kernel_pages(nb::handle block_table, nb::handle block_size, nb::handle page_size,
                               nb::handle num_blocks, nb::handle used);

}  // namespace attnfold::python

#endif  // ATTNFOLD_PYTHON_CACHE_H_
