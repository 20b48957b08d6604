// Where a generated call's tensors and pages lie.
#pragma once

#include <cstdint>

#include "check/call.h"

namespace attnfold::check {

/** Allocates q; with `odd`, tokens run backwards and nothing is a multiple of anything. */
void allocate_q(Call* call, bool odd, int gap_byte);

/** Allocates k and v, or k alone where v lies in it, and their scales. */
void allocate_kv_pair(Call* call, bool odd, int gap_byte);

struct TableOptions {
  bool csr;
  bool permute;
  bool poison;  // no page, and a wild id, where no row looks
  uint64_t seed;
};

/** Gives every request pages of its own; sets num_pages and the tables. */
void make_tables(Call* call, const TableOptions& options);

/** Rows of each request one after the other, `slack` unused rows behind each and at the end. */
void make_ragged(Call* call, int32_t slack);

}  // namespace attnfold::check
