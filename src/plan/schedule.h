// Who does what.  Plain data and integer arithmetic, no containers: the same source can run on a
// device.
//
// A batch becomes units: a set of rows that share kv heads, with the range of leaves that some of
// those rows see.  The rows are those of one request or, on leaves of a prefix that several
// requests share, of several (plan/prefix.h).  Units laid end to end, each leaf at its unit's cost,
// form a line; worker w takes the part between two cuts.  Where a row's leaves are with several
// items, states are left behind, one for each span (below), which are folded afterwards in the
// canonical order.
#pragma once

#include <cstdint>

#include "core/fold.h"
#include "core/problem.h"

namespace attnfold {

/** How a family of kernels wants its work cut.  Follows from the problem alone, never from a batch.
 */
struct UnitShape {
  int32_t kv_heads, group_size;
  int32_t small_rows;        // rows of one kv head up to which a request is one row set that takes
                             // several kv heads at once
  int32_t max_rows;          // rows of a unit, as long as the group allows it
  int32_t read_cost;         // of one leaf of one kv head, in units of one row's arithmetic on it
  int32_t state_row_floats;  // floats of one row of a state
  int64_t leaf_bytes = 0;    // of k, v and scales of one leaf of one kv head
};

/** Rows of the largest unit. */
ATTNFOLD_HD inline int32_t max_unit_rows(const UnitShape& s) {
  const int32_t small = s.small_rows > s.max_rows ? s.small_rows : s.max_rows;
  return small > s.group_size ? small : s.group_size;
}

struct Unit {
  int32_t request;           // whose page table is read; of a prefix unit the first member's
  int32_t qo_begin, num_qo;  // tokens, within the request; of a prefix unit those of all members
  int32_t kv_head_begin, num_kv_heads;
  int32_t sink_keys;  // keys [0, sink_keys) and [key_begin, key_end): those that some row sees
  int32_t key_begin, key_end;
  int32_t sink_leaves;  // leaves that hold the first kind, if apart from the others; else 0
  int32_t leaf_begin, leaf_end;  // leaves that hold the second; none if begin == end
  int64_t leaf_cost;
  int32_t starts_inside;  // 1: leaves before leaf_begin are with prefix units
  int32_t ends_inside;    // 1: the rows go on in other units
  int32_t member;         // of a prefix unit: its first member; else the request's first, or -1
  int32_t num_members;    // 0: not a prefix unit
  int32_t item_begin, num_items;
  const int32_t* live;  // with a block-sparse mask: [leaf_end] absolute leaves, rising; else null
};

/** The tokens of one request, all of them, within the prefix units that hold the same leaves: one
 * unit for each block of kv heads, one after the other. */
struct Member {
  int32_t request;
  int32_t unit;   // the first of those units
  int32_t token;  // where the request's tokens begin among the unit's
  int32_t next;   // the request's member on the leaves that follow, or -1: its own units
};

// Leaves of a unit are numbered so that they follow one another: [first_leaf, leaf_end), the sink's
// leaves just before leaf_begin.  With a block-sparse mask those that hold a key that some row sees
// are numbered from 0.  leaf_at() gives the absolute leaf of a number.
ATTNFOLD_HD inline int32_t first_leaf(const Unit& u) { return u.leaf_begin - u.sink_leaves; }
ATTNFOLD_HD inline int32_t num_leaves(const Unit& u) { return u.leaf_end - first_leaf(u); }
ATTNFOLD_HD inline int32_t leaf_at(const Unit& u, int32_t number) {
  if (u.live) return u.live[number];
  return number < u.leaf_begin ? number - first_leaf(u) : number;
}

/** The first number of the super-chunk that holds `number`; before the unit's own leaves if that
 * super-chunk begins in another unit. */
ATTNFOLD_HD inline int32_t chunk_begin(const Unit& u, int32_t number) {
  if (u.live) {
    int32_t begin = number;
    while (begin > 0 && u.live[begin - 1] / kSuperChunk == u.live[number] / kSuperChunk) --begin;
    return begin;
  }
  const int32_t chunk_leaf = leaf_at(u, number) / kSuperChunk * kSuperChunk;
  if (chunk_leaf < u.sink_leaves) return first_leaf(u) + chunk_leaf;
  return chunk_leaf > u.leaf_begin || u.starts_inside ? chunk_leaf : u.leaf_begin;
}

/** One past the last number of it. */
ATTNFOLD_HD inline int32_t chunk_end(const Unit& u, int32_t number) {
  if (u.live) {
    int32_t end = number + 1;
    while (end < u.leaf_end && u.live[end] / kSuperChunk == u.live[number] / kSuperChunk) ++end;
    return end;
  }
  const int32_t edge = leaf_at(u, number) / kSuperChunk * kSuperChunk + kSuperChunk;  // absolute
  int32_t end = edge;
  if (edge <= u.leaf_begin && u.sink_leaves > 0) {  // among the sink's leaves
    end = edge < u.sink_leaves ? first_leaf(u) + edge : u.leaf_begin;
  }
  return end < u.leaf_end ? end : u.leaf_end;
}

/** A worker's share of a unit: leaves numbered [leaf_begin, leaf_end). */
struct Item {
  int32_t unit, worker;
  int32_t leaf_begin, leaf_end;
  int64_t
      state_offset;  // of its first state, in floats; -1 if the item has all of its rows' leaves
};

/** Rows of a unit that one task of the second pass finishes: few, as a decode that is cut between
 * all threads has no more than a group or some groups. */
constexpr int32_t kMergeRows = 4;

/** A unit of one request whose rows' leaves are with several items: the second pass folds their
 * states. */
struct SharedUnit {
  int32_t unit;
  int32_t task_begin;  // tasks of those before it
};

/** What the planner keeps of one request while it looks for shared prefixes. */
struct RequestPrefix {
  int32_t limit;        // keys from 0 on, in whole leaves, that all rows see; 0: nothing to share
  int32_t leaf_end;     // leaves [0, leaf_end) are with prefix units
  int32_t first, last;  // its members there, or -1
  int32_t levels;       // how many
};

/** Requests of one page at the place where others have another. */
struct PrefixClass {
  int32_t page, count, begin;
};

/** Requests whose first keys are the same, and not yet compared beyond. */
struct PrefixNode {
  int32_t begin, count;  // in order
  int32_t known_pages;   // that agree
};

/** Arrays for that; sizes are those of ScheduleCapacity. */
struct PrefixScratch {
  RequestPrefix* requests;  // [batch]
  int32_t* order;           // [batch] requests
  int32_t* moved;           // [batch]
  int32_t* class_of;        // [batch]
  PrefixClass* classes;     // [batch]
  PrefixNode* nodes;        // [batch]
  int32_t* slots;           // [prefix_slots] a hash table
};

struct Schedule {
  int32_t num_units, num_items, num_shared, num_workers;
  Unit* units;  // prefix units first
  Item* items;  // by unit, then by leaf; workers never fall
  SharedUnit* shared;
  int32_t* worker_items;  // [num_workers + 1] offsets into items
  Member* members;
  PrefixScratch prefix;
  int32_t num_merge_tasks;
  int32_t num_members;
  int32_t num_prefix_groups;
  int64_t num_shared_leaves;  // of all groups
  int64_t saved_bytes;        // of k and v, that prefix units need not read
  int64_t whole_floats;       // of states that prefixes cost before anything is cut
  int32_t* live_leaves;       // units' lists, one after the other; null without a block-sparse mask
  int64_t num_live_leaves;
  int64_t state_floats;
  int64_t total_cost, max_worker_cost, max_leaf_cost;
};

/** Bounds on what any batch within the maxima needs (plan/build_schedule.h). */
struct ScheduleCapacity {
  int64_t units, items, shared;
  int64_t requests, prefix_slots, members;  // 0 where nothing can be shared
  int64_t prefix_floats;                    // of states for prefixes, cuts apart
  int64_t state_floats;                     // of all states
};

/** Where shared prefixes come from, and what they may take. */
struct PrefixSource {
  int32_t max_batch = 0;         // larger batches share nothing: ScheduleCapacity::requests
  int64_t max_state_floats = 0;  // ScheduleCapacity::prefix_floats
  int32_t page_size = 0;
  int32_t always = 0;  // 1: also where it does not pay
  // Groups that the caller names, checked, fewer keys first; none: the tables are searched.
  int32_t num_groups = 0;
  const int32_t* keys = nullptr;      // [num_groups]
  const int32_t* indptr = nullptr;    // [num_groups + 1] offsets into requests
  const int32_t* requests = nullptr;  // [indptr[num_groups]]
};

/** A stretch of leaves that leaves one state behind. */
enum class SpanKind : int32_t {
  row,    // whole super-chunks from the row's first leaf on, folded: the row's own accumulator
  chunk,  // leaves of one super-chunk from the first that the row has, folded: all or a prefix
  leaf    // one leaf
};
struct Span {
  SpanKind kind;
  int32_t leaf_begin, leaf_end;
};

/** The span of an item that starts at leaf `at`. */
ATTNFOLD_HD inline Span span_at(const Unit& unit, const Item& item, int32_t at) {
  const int32_t end = item.leaf_end;
  if (at == first_leaf(unit) && !unit.starts_inside) {
    if (end == unit.leaf_end && !unit.ends_inside) return {SpanKind::row, at, end};
    const int32_t whole = chunk_begin(unit, end);  // end of the last whole super-chunk
    if (whole > at) return {SpanKind::row, at, whole};
  }
  if (at == chunk_begin(unit, at)) {
    const int32_t edge = chunk_end(unit, at);
    return {SpanKind::chunk, at, end < edge ? end : edge};
  }
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
