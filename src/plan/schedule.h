// Who does what.  Plain data and integer arithmetic, no containers: the same source can run on a device.
//
// A batch becomes units: a set of rows that share kv heads, with the range of leaves that some of those rows see.  Units laid
// end to end, each leaf at its unit's cost, form a line; worker w takes the part between two cuts.  A cut inside a unit
// leaves states behind, one for each span (below), which are folded afterwards in the canonical order.
#pragma once

#include <cstdint>

#include "core/fold.h"
#include "core/mask.h"

namespace attnfold {

/** How a family of kernels wants its work cut.  Follows from the problem alone, never from a batch. */
struct UnitShape {
  int32_t kv_heads, group_size;
  int32_t small_rows;         // rows of one kv head up to which a request is one row set that takes several kv heads at once
  int32_t max_rows;           // rows of a unit, as long as the group allows it
  int32_t read_cost;          // of one leaf of one kv head, in units of one row's arithmetic on it
  int32_t state_row_floats;   // floats of one row of a state
};

/** Rows of the largest unit. */
ATTNFOLD_HD inline int32_t max_unit_rows(const UnitShape& s) {
  const int32_t small = s.small_rows > s.max_rows ? s.small_rows : s.max_rows;
  return small > s.group_size ? small : s.group_size;
}

struct Unit {
  int32_t request;
  int32_t qo_begin, num_qo;              // tokens, within the request
  int32_t kv_head_begin, num_kv_heads;
  int32_t key_begin, key_end;            // keys that some row sees
  int32_t leaf_begin, leaf_end;          // leaves that hold them; none if begin == end
  int64_t leaf_cost;
};

/** A worker's share of a unit: leaves [leaf_begin, leaf_end). */
struct Item {
  int32_t unit, worker;
  int32_t leaf_begin, leaf_end;
  int64_t state_offset;                  // of its first state, in floats; -1 if the item is the whole unit
};

/** A unit that several items share; they follow one another. */
struct SharedUnit {
  int32_t unit, item_begin, num_items;
};

struct Schedule {
  int32_t num_units, num_items, num_shared, num_workers;
  Unit* units;
  Item* items;                           // by unit, then by leaf; workers never fall
  SharedUnit* shared;
  int32_t* worker_items;                 // [num_workers + 1] offsets into items
  int64_t state_floats;
  int64_t total_cost, max_worker_cost, max_leaf_cost;
};

/** Bounds on what any batch within the maxima needs (plan/build_schedule.h). */
struct ScheduleCapacity {
  int64_t units, items;
  int64_t state_floats;
};

/** What a batch looks like to the planner. */
struct BatchLengths {
  int32_t batch;
  const int32_t* qo_indptr;   // [batch + 1]
  const int32_t* kv_len;      // [batch]
};

/** A stretch of leaves that leaves one state behind. */
enum class SpanKind : int32_t {
  row,     // whole super-chunks from the unit's first leaf on, folded: the row's own accumulator
  chunk,   // leaves of one super-chunk from its first leaf in the unit on, folded: all of it or a prefix
  leaf     // one leaf
};
struct Span {
  SpanKind kind;
  int32_t leaf_begin, leaf_end;
};

/** The span of an item that starts at leaf `at`. */
ATTNFOLD_HD inline Span span_at(const Unit& unit, const Item& item, int32_t at) {
  const int32_t chunk_begin = at / kSuperChunk * kSuperChunk;
  const int32_t chunk_end = chunk_begin + kSuperChunk;
  const int32_t end = item.leaf_end;
  if (at == unit.leaf_begin) {
    if (end == unit.leaf_end) return {SpanKind::row, at, end};
    const int32_t whole = end / kSuperChunk * kSuperChunk;  // end of the last whole super-chunk
    if (whole > at) return {SpanKind::row, at, whole};
  }
  const bool has_first = at == chunk_begin || at == unit.leaf_begin;
  if (has_first) return {SpanKind::chunk, at, end < chunk_end ? end : chunk_end};
  return {SpanKind::leaf, at, at + 1};
}

ATTNFOLD_HD inline int32_t num_spans(const Unit& unit, const Item& item) {
  int32_t n = 0;
  for (int32_t at = item.leaf_begin; at < item.leaf_end; ++n) at = span_at(unit, item, at).leaf_end;
  return n;
}

ATTNFOLD_HD inline int32_t unit_rows(const UnitShape& shape, const Unit& unit) {
  return unit.num_kv_heads * unit.num_qo * shape.group_size;
}

}  // namespace attnfold
