// What a call file says about single requests' keys: visible prefixes, mask bits,
// lists of blocks.
#pragma once

#include "check/call.h"
#include "check/fields.h"

namespace attnfold::check {

/** Reads them into `call`, whose qo_indptr and kv_len are there.  Throws Malformed. */
void read_request_masks(const Fields& fields, Call* call);

}  // namespace attnfold::check
