// Turns what a caller hands over into plain checked data, or says which argument is wrong.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attnfold/attnfold.h"
#include "core/problem.h"
#include "plan/schedule.h"
#include "status.h"

namespace attnfold {

/** Reads a struct of the public API whose size the caller states: fields the caller does not know
 * keep their defaults. */
template <class T>
Status read_struct(const char* name, const T* given, const T& defaults, T* out);

/** Fills `out` and `p` (the struct with every default resolved). */
Status validate_problem(const attnfold_problem* given, attnfold_problem* p, Problem* out);

Status validate_execution(const attnfold_execution* given, attnfold_execution* e);

/** Checks shapes and every entry that a run may read.  `out` borrows the arrays. */
Status validate_lengths(const attnfold_problem& p, const Problem& problem,
                        const attnfold_lengths* given, attnfold_lengths* out);

/** Checks the prefix groups against each other and the page tables, after validate_lengths.
 * `group_of` is scratch, [max_batch]. */
Status validate_prefixes(const attnfold_problem& p, const UnitShape& shape, const Mask& mask,
                         const attnfold_lengths& l, int32_t* group_of);

/** Bytes that a tensor may touch, from the first to one past the last. */
struct Extent {
  const char* name;
  uintptr_t begin = 0, end = 0;
};

/** The extent of [n0, n1, n2, width] elements at `p`; an error if it leaves the address space. */
Status extent_of(const char* name, const void* p, const int64_t (&n)[3], const int64_t (&stride)[3],
                 int64_t width, int bytes, Extent* out);

bool overlap(const Extent& a, const Extent& b);

/** Rows and heads of an output, `width` elements each, must not overlap each other. */
Status check_output_strides(const char* name, int64_t rows, int64_t row_stride, int64_t heads,
                            int64_t head_stride, int64_t width);

/** What a step's lengths say about the tensors of a run. */
struct TensorExtents {
  int64_t qo_rows;
  int64_t kv_tokens;                 // tokens of a page, or rows if ragged
  int64_t num_pages;                 // 1 if ragged
  bool reads_kv;                     // some row sees some key
  bool sizes_known = true;           // else only first bytes are held apart from each other
  Extent workspace = {"workspace"};  // what the run may write of it
};

/** The first `bytes` bytes of a workspace. */
Extent workspace_extent(const void* workspace, size_t bytes);

Status validate_tensors(const attnfold_problem& p, const TensorExtents& extents,
                        const attnfold_tensors* given, Tensors* out);

}  // namespace attnfold
