// The planner.  Integer arithmetic on plain data: the host and a device compile this one source.
#pragma once

#include "plan/prefix.h"
#include "plan/schedule.h"

namespace attnfold {
namespace planner {

/** Numbers the leaves of a unit's range of keys. */
ATTNFOLD_HD_LARGE inline void place_leaves(Unit* u) {
  const int32_t sink = u->sink_keys;
  u->leaf_begin = u->key_begin / kLeaf;
  u->leaf_end = u->key_end > u->key_begin ? static_cast<int32_t>(divide_up(u->key_end, kLeaf))
                                          : u->leaf_begin;
  u->sink_leaves = u->starts_inside ? 0 : static_cast<int32_t>(divide_up(sink, kLeaf));
  if (u->starts_inside) return;
  if (u->leaf_end == u->leaf_begin) {  // the sink alone
    u->leaf_begin = u->leaf_end = u->sink_leaves;
    u->sink_leaves = 0;
    if (sink > 0) u->leaf_begin = 0;
  } else if (u->sink_leaves >= u->leaf_begin) {
    u->leaf_begin = u->sink_leaves = 0;
  }
}

/** Lists those leaves of a unit's range of keys that hold a key of its blocks. */
ATTNFOLD_HD_LARGE inline void list_leaves(const HeadBlocks& blocks, int64_t first_position, Unit* u,
                                          Schedule* s) {
  int32_t* live = s->live_leaves + s->num_live_leaves;
  const int64_t first_local = first_local_key(blocks.mask, first_position);
  const int64_t ranges[2][2] = {{0, u->sink_keys}, {u->key_begin, u->key_end}};
  int32_t n = 0;
  for (int32_t r = 0; r < 2; ++r) {
    for (int64_t key = ranges[r][0]; key < ranges[r][1];) {
      const KeyStretch stretch = next_stretch(blocks, first_local, key);
      const int64_t end = stretch.end < ranges[r][1] ? stretch.end : ranges[r][1];
      if (stretch.begin < end) {
        int64_t leaf = stretch.begin / kLeaf;
        if (n > 0 && leaf <= live[n - 1]) leaf = live[n - 1] + 1;
        for (; leaf * kLeaf < end; ++leaf) live[n++] = static_cast<int32_t>(leaf);
      }
      key = stretch.begin < end ? end : ranges[r][1];
    }
  }
  u->live = live;
  u->leaf_begin = u->sink_leaves = 0;
  u->leaf_end = n;
  s->num_live_leaves += n;
}

/** Heads from `head` on, up to `most`, that are one unit: they see the same blocks. */
ATTNFOLD_HD_LARGE inline int32_t num_heads(const BlockMask& mask, const Lengths& lengths,
                                           int32_t kv_heads, int32_t request, int32_t head,
                                           int32_t most) {
  if (most > kv_heads - head) most = kv_heads - head;
  if (mask.block_size == 0) return most;
  const HeadBlocks first = head_blocks(mask, lengths, kv_heads, request, head);
  int32_t n = 1;
  while (n < most && same_blocks(first, head_blocks(mask, lengths, kv_heads, request, head + n))) {
    ++n;
  }
  return n;
}

/** Appends the units of one request, but for the leaves that prefix units hold. */
ATTNFOLD_HD_LARGE inline void add_units(const UnitShape& shape, const Mask& mask,
                                        const BlockMask& blocks, const Lengths& lengths,
                                        int32_t request, const RequestPrefix& prefix, Schedule* s) {
  const RequestShape keys_of = request_shape(lengths, request);
  const int32_t qo_len = keys_of.qo_len;
  const RowSets sets = row_sets(shape, qo_len);
  for (int32_t token = 0; token < qo_len; token += sets.tokens) {
    for (int32_t head = 0, heads; head < shape.kv_heads; head += heads) {
      heads = num_heads(blocks, lengths, shape.kv_heads, request, head, sets.kv_heads);
      Unit& u = s->units[s->num_units++];
      u = {};
      u.request = request;
      u.qo_begin = token;
      u.num_qo = sets.tokens < qo_len - token ? sets.tokens : qo_len - token;
      u.kv_head_begin = head;
      u.num_kv_heads = heads;
      VisibleKeys keys = visible_keys(mask, keys_of, u.qo_begin, u.num_qo);
      if (prefix.leaf_end > 0) {
        keys.begin = prefix.leaf_end * kLeaf;
        u.starts_inside = 1;
      }
      u.member = prefix.first;
      u.sink_keys = keys.sink;
      u.key_begin = keys.begin;
      u.key_end = keys.end;
      if (blocks.block_size == 0) {
        place_leaves(&u);
      } else {
        list_leaves(head_blocks(blocks, lengths, shape.kv_heads, request, head),
                    static_cast<int64_t>(keys_of.kv_len) - qo_len + token, &u, s);
      }
      set_leaf_cost(shape, &u, s);
    }
  }
}

ATTNFOLD_HD_LARGE inline uint64_t mix(uint64_t x) {  // splitmix64's finaliser
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/** Places the cuts one after the other on the line of all leaves. */
class Cutter {
 public:
  ATTNFOLD_HD_LARGE Cutter(int32_t num_workers, uint64_t seed, int64_t total, int64_t max_leaf_cost)
      : num_workers_(num_workers), seed_(seed), total_(total), max_leaf_cost_(max_leaf_cost) {}

  /** Where cut `w` (1..num_workers-1) should lie; random ones are sorted by repeated selection of
   * the next larger. */
  ATTNFOLD_HD_LARGE int64_t wish(int32_t w, int64_t previous) const {
    if (seed_ == 0) return total_ / num_workers_ * w + total_ % num_workers_ * w / num_workers_;
    const int64_t left = total_ - previous;
    const int32_t cuts_left = num_workers_ - w;
    const uint64_t r = mix(seed_ ^ mix(static_cast<uint64_t>(w)));
    const int64_t span = left / (cuts_left + 1) * 2 + 1;
    return clamp_to(previous + static_cast<int64_t>(r % static_cast<uint64_t>(span)), previous,
                    total_);
  }

  /** The leaf of `unit` (which starts at `start` on the line) to cut at for a wish inside it. */
  ATTNFOLD_HD_LARGE int32_t place(const Unit& unit, int64_t start, int64_t wish) {
    const int32_t first = first_leaf(unit);
    const int32_t floor_leaf = first + static_cast<int32_t>((wish - start) / unit.leaf_cost);
    if (seed_ != 0) return floor_leaf;
    const int64_t into = wish - start - (floor_leaf - first) * unit.leaf_cost;
    const int32_t nearest = floor_leaf + (into * 2 > unit.leaf_cost ? 1 : 0);
    int32_t edge =
        (floor_leaf + kSuperChunk / 2) / kSuperChunk * kSuperChunk;  // of the nearest super-chunk
    if (unit.live) {
      const int32_t before = chunk_begin(unit, floor_leaf), after = chunk_end(unit, floor_leaf);
      edge = floor_leaf - before < after - floor_leaf ? before : after;
    }
    const int32_t candidates[] = {edge, nearest, floor_leaf};
    for (const int32_t candidate : candidates) {
      if (candidate < first || candidate > unit.leaf_end) continue;
      const int64_t drift = start + (candidate - first) * unit.leaf_cost - wish;
      const bool near = drift <= unit.leaf_cost && -drift <= unit.leaf_cost;
      if (near &&
          drift - drift_ <= max_leaf_cost_) {  // the share that ends here: at most one leaf over
        drift_ = drift;
        return candidate;
      }
    }
    drift_ = start + (floor_leaf - first) * unit.leaf_cost - wish;
    return floor_leaf;
  }

 private:
  const int32_t num_workers_;
  const uint64_t seed_;
  const int64_t total_, max_leaf_cost_;
  int64_t drift_ = 0;  // of the last cut from its wish
};

ATTNFOLD_HD_LARGE inline int64_t unit_cost(const Unit& unit) {
  return unit.leaf_cost * num_leaves(unit);
}

/** Whether units are so many, and so small, that threads may take them as they are. */
ATTNFOLD_HD_LARGE inline bool units_suffice(const Schedule& s, int32_t num_threads) {
  constexpr int64_t kUnitsOfThread = 4;
  int64_t largest = 0;
  for (int32_t u = 0; u < s.num_units; ++u)
    if (unit_cost(s.units[u]) > largest) largest = unit_cost(s.units[u]);
  return largest * kUnitsOfThread * num_threads <= s.total_cost;
}

/** How many equal shares to cut: some for each thread where units are those of decodes and a share
 * has some leaves.  A cut through many rows leaves too many states. */
ATTNFOLD_HD_LARGE inline int32_t choose_shares(const UnitShape& shape, const Schedule& s,
                                               int32_t num_threads) {
  constexpr int64_t kLeavesOfShare = 8, kSharesOfThread = 4;
  for (int32_t u = 0; u < s.num_units; ++u)
    if (s.units[u].num_qo * shape.group_size > shape.small_rows) return num_threads;
  if (s.max_leaf_cost == 0) return num_threads;
  return static_cast<int32_t>(clamp_to(s.total_cost / (kLeavesOfShare * s.max_leaf_cost),
                                       num_threads, kSharesOfThread * num_threads));
}

/** Floats of the states that an uncut unit leaves behind. */
ATTNFOLD_HD_LARGE inline int64_t whole_floats(const UnitShape& shape, const Unit& unit) {
  if (!unit.starts_inside && !unit.ends_inside) return 0;
  return num_states(unit.leaf_begin, unit.leaf_end) * unit_rows(shape, unit) *
         shape.state_row_floats;
}

/** Places for the states of a unit's items; returns the floats they take. */
ATTNFOLD_HD_LARGE inline int64_t place_items(const UnitShape& shape, const Unit& unit,
                                             Schedule* s) {
  const int64_t state = static_cast<int64_t>(unit_rows(shape, unit)) * shape.state_row_floats;
  int64_t floats = 0;
  for (int32_t i = unit.item_begin; i < s->num_items; ++i) {
    s->items[i].state_offset = s->state_floats + floats;
    floats += num_spans(unit, s->items[i]) * state;
  }
  return floats;
}

/** Gives the items of the last unit their places for states; the unit becomes whole again if its
 * cuts take more than `room`. */
ATTNFOLD_HD_LARGE inline void place_states(const UnitShape& shape, int32_t unit_index, int64_t room,
                                           Schedule* s) {
  Unit& unit = s->units[unit_index];
  const bool has_others = unit.starts_inside || unit.ends_inside;
  const bool is_cut = s->num_items - unit.item_begin > 1;
  int64_t floats = is_cut ? place_items(shape, unit, s) : 0;
  if (floats > room || !is_cut) {
    Item& whole = s->items[unit.item_begin];
    whole.leaf_end = unit.leaf_end;
    whole.state_offset = -1;
    s->num_items = unit.item_begin + 1;
    floats = has_others ? place_items(shape, unit, s) : 0;
  }
  unit.num_items = s->num_items - unit.item_begin;
  s->state_floats += floats;
  if (unit.num_members > 0 || s->items[unit.item_begin].state_offset < 0) return;
  s->shared[s->num_shared++] = {unit_index, s->num_merge_tasks};
  s->num_merge_tasks += static_cast<int32_t>(divide_up(unit_rows(shape, unit), kMergeRows));
}

ATTNFOLD_HD_LARGE inline void count_worker_items(Schedule* s) {
  int32_t item = 0;
  for (int32_t w = 0; w < s->num_workers; ++w) {
    s->worker_items[w] = item;
    int64_t cost = 0;
    for (; item < s->num_items && s->items[item].worker == w; ++item) {
      const Item& it = s->items[item];
      cost += s->units[it.unit].leaf_cost * (it.leaf_end - it.leaf_begin);
    }
    if (cost > s->max_worker_cost) s->max_worker_cost = cost;
  }
  s->worker_items[s->num_workers] = item;
}

}  // namespace planner

/** may_share: 0 if no prefix is ever shared. */
ATTNFOLD_HD_LARGE inline ScheduleCapacity schedule_capacity(const UnitShape& shape,
                                                            int32_t max_batch, int32_t max_qo_rows,
                                                            int32_t max_kv_len, int32_t num_workers,
                                                            int32_t may_share = 0) {
  const int64_t tokens =
      shape.max_rows / shape.group_size > 1 ? shape.max_rows / shape.group_size : 1;
  ScheduleCapacity c{};
  // A request has at most ceil(qo_len / tokens) row sets per kv head, whether small or large; one
  // without tokens has none.
  const int64_t requests = max_batch < max_qo_rows ? max_batch : max_qo_rows;
  c.units = (requests + max_qo_rows / tokens) * shape.kv_heads;
  c.shared = num_workers;
  const int64_t leaves = planner::divide_up(max_kv_len, kLeaf);
  const int64_t shared_tokens = planner::most_shared_tokens(shape);
  if (may_share && requests > 1 && shared_tokens > 0) {
    c.requests = max_batch < kPrefixBatch ? max_batch : kPrefixBatch;
    for (c.prefix_slots = 1; c.prefix_slots < 2 * c.requests;) c.prefix_slots *= 2;
    c.members = c.requests * kPrefixLevels;
    c.units += c.members * shape.kv_heads;
    c.shared += c.requests * shape.kv_heads;
    const int64_t most = clamp_to(c.requests * shared_tokens, 0, kPrefixTokens);
    const int64_t states = leaves < kPrefixStates ? leaves : kPrefixStates;
    c.prefix_floats = (max_qo_rows < most ? max_qo_rows : most) * shape.kv_heads *
                      shape.group_size * states * shape.state_row_floats;
  }
  c.items = c.units + num_workers;
  // Per worker two items that are cut: at most kSuperChunk - 1 single leaves, a prefix and a row
  // each.  Whole super-chunks: four times the longest request's; where a batch wants more, units
  // stay whole.
  const int64_t chunks = planner::divide_up(leaves, kSuperChunk) + 1;
  const int64_t states =
      num_workers == 1 ? 0 : 4 * chunks + static_cast<int64_t>(num_workers) * 2 * (kSuperChunk + 1);
  c.state_floats = states * max_unit_rows(shape) * shape.state_row_floats + c.prefix_floats;
  return c;
}

/**
 * Fills `s`, whose arrays hold what schedule_capacity() says.
 *
 * num_threads   0, or fewer than num_workers: shares are as many as suit the batch, and some may be
 * larger, as threads take them in turn, the last first
 * cut_seed   0: balanced cuts, none of which gives a worker more than its equal share plus one
 * leaf; a cut is moved to the edge of a super-chunk where that holds.  Else: cuts drawn from the
 * seed.
 */
ATTNFOLD_HD_LARGE inline void build_schedule(const UnitShape& shape, const Mask& mask,
                                             const BlockMask& blocks, const Lengths& lengths,
                                             const PrefixSource& prefixes, int32_t num_workers,
                                             uint64_t cut_seed, int64_t state_floats_capacity,
                                             Schedule* s, int32_t num_threads = 0) {
  s->num_live_leaves = 0;
  s->num_units = s->num_items = s->num_shared = s->num_merge_tasks = 0;
  s->num_members = s->num_prefix_groups = 0;
  s->num_shared_leaves = s->saved_bytes = s->whole_floats = 0;
  s->state_floats = s->total_cost = s->max_worker_cost = s->max_leaf_cost = 0;
  const bool may_share = blocks.block_size == 0 && lengths.batch <= prefixes.max_batch;
  if (may_share) planner::PrefixPlanner(shape, lengths, prefixes, s).plan(mask);
  for (int32_t r = 0; r < lengths.batch; ++r) {
    const RequestPrefix prefix = may_share ? s->prefix.requests[r] : RequestPrefix{0, 0, -1, -1, 0};
    if (lengths.qo_indptr[r + 1] > lengths.qo_indptr[r])
      planner::add_units(shape, mask, blocks, lengths, r, prefix, s);
  }

  const bool uncut = num_threads > 0 && planner::units_suffice(*s, num_threads);
  if (uncut) {
    if (num_workers > s->num_units) num_workers = s->num_units > 0 ? s->num_units : 1;
  } else if (num_threads > 0) {
    num_workers = planner::choose_shares(shape, *s, num_threads);
  }
  s->num_workers = num_workers;
  planner::Cutter cutter(num_workers, cut_seed, s->total_cost, s->max_leaf_cost);
  int32_t worker = 0;
  int64_t start = 0;  // of the current unit on the line
  int64_t wish = num_workers > 1 ? cutter.wish(1, 0) : s->total_cost + 1;
  int64_t whole_left = s->whole_floats;  // that uncut units still to come take
  for (int32_t u = 0; u < s->num_units; ++u) {
    Unit& unit = s->units[u];
    const int64_t end = start + planner::unit_cost(unit);
    unit.item_begin = s->num_items;
    int32_t at = first_leaf(unit);
    if (uncut) worker = static_cast<int32_t>(int64_t{u} * num_workers / s->num_units);
    while (!uncut && worker + 1 < num_workers && wish < end) {
      int32_t cut = cutter.place(unit, start, wish);
      if (cut < at) cut = at;
      if (cut > at) s->items[s->num_items++] = {u, worker, at, cut, -1};
      at = cut;
      ++worker;
      wish = worker + 1 < num_workers ? cutter.wish(worker + 1, wish) : end;
    }
    if (at < unit.leaf_end || num_leaves(unit) == 0) {
      s->items[s->num_items++] = {u, worker, at, unit.leaf_end, -1};
    }
    whole_left -= planner::whole_floats(shape, unit);
    planner::place_states(shape, u, state_floats_capacity - s->state_floats - whole_left, s);
    start = end;
  }
  planner::count_worker_items(s);
}

}  // namespace attnfold
