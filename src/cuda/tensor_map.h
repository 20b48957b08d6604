// Tensor maps: where the copy engine finds keys and values.
#pragma once

#include "cuda/large_args.h"
#include "status.h"

namespace attnfold::cuda {

/** Whether this driver can make maps. */
bool has_tensor_maps();

/** Fills `out` for k or v, [num_pages, page_size, heads, head_dim], or [num_rows, heads, head_dim]
 * if ragged; errors name `name`. */
Status make_key_places(const char* name, const Problem& problem, const View<const char>& view,
                       int64_t num_pages, int64_t num_rows, KeyPlaces* out);

}  // namespace attnfold::cuda
