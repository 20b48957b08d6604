// Prefixes that several requests share: their leaves are planned once, as units whose rows come
// from all of them.  Integer arithmetic on plain arrays, as the rest of the planner.
//
// Requests whose page tables begin with the same pages form a tree: a node is a set of requests and
// the number of keys that they share.  A node becomes a group if the bytes of k and v that it saves
// exceed those of the states that it adds; its leaves are then those that its parents in the tree
// do not hold already.  Only leaves that all rows of a request see whole are shared, from leaf 0
// on, so that no row of a prefix unit is masked, and only requests of which two fit into one unit.
//
// A row's leaves are then with several units, and its states meet in the second pass.  Which leaves
// are shared changes no bit: each state is one that a cut at the same place would leave behind.
#pragma once

#include "plan/schedule.h"

namespace attnfold {

constexpr int32_t kPrefixLevels = 4;    // groups within groups
constexpr int32_t kPrefixBatch = 4096;  // larger batches are not searched
constexpr int32_t kPrefixTokens = 256;  // for whose states memory is reserved,
constexpr int32_t kPrefixStates = 16;   // so many for each row

namespace planner {

ATTNFOLD_HD_LARGE inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/** How the rows of a request of `qo_len` tokens are grouped: follows from that request alone. */
struct RowSets {
  int32_t tokens;    // per row set
  int32_t kv_heads;  // per row set
};

ATTNFOLD_HD_LARGE inline RowSets row_sets(const UnitShape& shape, int64_t qo_len) {
  const int64_t head_rows = qo_len * shape.group_size;
  if (head_rows <= shape.small_rows) {
    const int64_t heads = shape.max_rows / (head_rows > 0 ? head_rows : 1);
    return {static_cast<int32_t>(qo_len), static_cast<int32_t>(clamp_to(heads, 1, shape.kv_heads))};
  }
  const int32_t tokens = shape.max_rows / shape.group_size;
  return {tokens > 1 ? tokens : 1, 1};
}

ATTNFOLD_HD_LARGE inline void set_leaf_cost(const UnitShape& shape, Unit* u, Schedule* s) {
  u->leaf_cost = static_cast<int64_t>(u->num_kv_heads) * shape.read_cost + unit_rows(shape, *u);
  if (num_leaves(*u) > 0 && u->leaf_cost > s->max_leaf_cost) s->max_leaf_cost = u->leaf_cost;
  s->total_cost += u->leaf_cost * num_leaves(*u);
}

/** States that one row leaves behind on leaves [begin, end), uncut, if the row has others. */
ATTNFOLD_HD_LARGE inline int64_t num_states(int64_t begin, int64_t end) {
  if (begin == 0) return (end >= kSuperChunk ? 1 : 0) + (end % kSuperChunk != 0 ? 1 : 0);
  const int64_t edge = divide_up(begin, kSuperChunk) * kSuperChunk;
  if (end <= edge) return end - begin;
  return edge - begin + divide_up(end - edge, kSuperChunk);
}

/** Most tokens of a request that shares a prefix: two such requests fit into a unit. */
ATTNFOLD_HD_LARGE inline int32_t most_shared_tokens(const UnitShape& shape) {
  return shape.max_rows / shape.group_size / 2;
}

/** Keys from 0 on, in whole leaves, that all rows of a request see; 0 if it cannot share them. */
ATTNFOLD_HD_LARGE inline int32_t shareable_keys(const UnitShape& shape, const Mask& mask,
                                                const RequestShape& request) {
  if (request.qo_len == 0 || request.qo_len > most_shared_tokens(shape)) return 0;
  const VisibleKeys first = visible_keys(mask, request, 0);
  const VisibleKeys last = visible_keys(mask, request, request.qo_len - 1);
  if (first.begin > 0 || last.begin > 0) return 0;
  const int32_t tail = request.kv_len - request.mask_width;
  return (first.end < tail ? first.end : tail) / kLeaf * kLeaf;
}

/** Of n entries, how many agree from the first on. */
ATTNFOLD_HD_LARGE inline int64_t num_equal(const int32_t* a, const int32_t* b, int64_t n) {
  constexpr int64_t kBlock = 64;
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    int32_t differ = 0;
    for (int64_t k = 0; k < kBlock; ++k) differ |= a[i + k] ^ b[i + k];
    if (differ != 0) break;
  }
  while (i < n && a[i] == b[i]) ++i;
  return i;
}

/** Finds the groups of one batch and makes their units. */
class PrefixPlanner {
 public:
  ATTNFOLD_HD_LARGE PrefixPlanner(const UnitShape& shape, const Lengths& lengths,
                                  const PrefixSource& prefixes, Schedule* s)
      : shape_(shape), lengths_(lengths), prefixes_(prefixes), s_(s), x_(s->prefix) {}

  ATTNFOLD_HD_LARGE void plan(const Mask& mask) {
    int32_t n = 0;
    for (int32_t r = 0; r < lengths_.batch; ++r) {
      x_.requests[r] = {shareable_keys(shape_, mask, request_shape(lengths_, r)), 0, -1, -1, 0};
      if (x_.requests[r].limit > 0) x_.order[n++] = r;
    }
    if (n < 2) return;
    if (prefixes_.num_groups > 0) {
      plan_given();
    } else {
      plan_found(n);
    }
  }

 private:
  ATTNFOLD_HD_LARGE int32_t num_qo(int32_t r) const {
    return lengths_.qo_indptr[r + 1] - lengths_.qo_indptr[r];
  }
  ATTNFOLD_HD_LARGE const int32_t* pages(int32_t r) const { return pages_of(lengths_, r); }

  ATTNFOLD_HD_LARGE void plan_given() {
    const PrefixSource& given = prefixes_;
    for (int32_t g = 0; g < given.num_groups; ++g) {
      int32_t n = 0, keys = given.keys[g];
      for (int32_t i = given.indptr[g]; i < given.indptr[g + 1]; ++i) {
        const int32_t r = given.requests[i], limit = x_.requests[r].limit;
        if (limit == 0) continue;
        x_.order[n++] = r;
        keys = limit < keys ? limit : keys;
      }
      if (n > 1 && x_.requests[x_.order[0]].levels < kPrefixLevels) group(0, n, keys / kLeaf);
    }
  }

  /** Nodes are taken up in the order in which they are found: a parent before its children. */
  ATTNFOLD_HD_LARGE void plan_found(int32_t num_requests) {
    const int32_t page_size = prefixes_.page_size;
    num_nodes_ = 0;
    split(0, num_requests, 0);
    for (int32_t i = 0; i < num_nodes_; ++i) {
      const PrefixNode node = x_.nodes[i];
      const int64_t limit = smallest_limit(node);
      const int64_t equal = equal_pages(node, divide_up(limit, page_size));
      const int64_t keys = equal * page_size < limit ? equal * page_size : limit;
      group(node.begin, node.count, static_cast<int32_t>(keys / kLeaf));
      if (x_.requests[x_.order[node.begin]].levels < kPrefixLevels) {
        split(node.begin, node.count, keys);
      }
    }
  }

  ATTNFOLD_HD_LARGE int64_t smallest_limit(const PrefixNode& node) const {
    int64_t least = x_.requests[x_.order[node.begin]].limit;
    for (int32_t i = node.begin + 1; i < node.begin + node.count; ++i) {
      const int32_t limit = x_.requests[x_.order[i]].limit;
      least = limit < least ? limit : least;
    }
    return least;
  }

  /** Of the first `n` pages of the node's requests, how many all have. */
  ATTNFOLD_HD_LARGE int64_t equal_pages(const PrefixNode& node, int64_t n) const {
    const int64_t known = node.known_pages;
    const int32_t* first = pages(x_.order[node.begin]);
    for (int32_t i = node.begin + 1; i < node.begin + node.count && n > known; ++i) {
      n = known + num_equal(first + known, pages(x_.order[i]) + known, n - known);
    }
    return n;
  }

  /** The class of requests that have `page`, a new one if there is none yet. */
  ATTNFOLD_HD_LARGE int32_t class_of_page(int32_t page, uint32_t slot_mask) {
    uint32_t slot = static_cast<uint32_t>(page) * 0x9e3779b1u;
    for (slot = (slot ^ (slot >> 15)) & slot_mask; x_.slots[slot] >= 0;
         slot = (slot + 1) & slot_mask) {
      if (x_.classes[x_.slots[slot]].page == page) return x_.slots[slot];
    }
    x_.slots[slot] = num_classes_;
    x_.classes[num_classes_] = {page, 0, 0};
    return num_classes_++;
  }

  /** Moves those of order[begin, begin + n) that have the same page at key `keys` next to each
   * other, and makes nodes of them; those that can share no more go last. */
  ATTNFOLD_HD_LARGE void split(int32_t begin, int32_t n, int64_t keys) {
    const int64_t at = keys / prefixes_.page_size;
    uint32_t num_slots = 1;
    while (num_slots < 2 * static_cast<uint32_t>(n)) num_slots *= 2;
    for (uint32_t i = 0; i < num_slots; ++i) x_.slots[i] = -1;
    num_classes_ = 0;
    for (int32_t i = 0; i < n; ++i) {
      const int32_t r = x_.order[begin + i];
      const bool ends = keys >= x_.requests[r].limit;
      x_.class_of[i] = ends ? -1 : class_of_page(pages(r)[at], num_slots - 1);
      if (!ends) ++x_.classes[x_.class_of[i]].count;
    }
    int32_t next = begin;
    for (int32_t c = 0; c < num_classes_; ++c) {
      const int32_t count = x_.classes[c].count;
      if (count > 1) x_.nodes[num_nodes_++] = {next, count, static_cast<int32_t>(at + 1)};
      x_.classes[c].begin = next;
      next += count;
    }
    for (int32_t i = 0; i < n; ++i) {
      const int32_t c = x_.class_of[i];
      const int32_t to = c < 0 ? next++ : x_.classes[c].begin++;
      x_.moved[to] = x_.order[begin + i];
    }
    for (int32_t i = begin; i < begin + n; ++i) x_.order[i] = x_.moved[i];
  }

  /** How many requests of a group go into one unit, at most `max_rows` rows of a kv head. */
  struct Tiles {
    int32_t tokens, requests;
  };
  ATTNFOLD_HD_LARGE Tiles tiles_of(int32_t begin, int32_t n) const {
    int64_t tokens = 0;
    for (int32_t i = begin; i < begin + n; ++i) tokens += num_qo(x_.order[i]);
    const int32_t most = shape_.max_rows / shape_.group_size;
    return {most, static_cast<int32_t>(divide_up(n, divide_up(tokens, most)))};
  }
  /** One past the last request of the tile that begins with `from`. */
  ATTNFOLD_HD_LARGE int32_t tile_end(const Tiles& tiles, int32_t from, int32_t end) const {
    int32_t tokens = 0, i = from;
    for (; i < end && i - from < tiles.requests; ++i) {
      tokens += num_qo(x_.order[i]);
      if (tokens > tiles.tokens) break;
    }
    return i;
  }

  struct Gain {
    int64_t bytes;  // saved less added
    int64_t saved_bytes;
    int64_t state_floats;  // added
  };
  ATTNFOLD_HD_LARGE Gain gain(int32_t begin, int32_t n, int64_t leaf_begin,
                              int64_t leaf_end) const {
    const Tiles tiles = tiles_of(begin, n);
    int64_t num_tiles = 0, rows = 0;
    for (int32_t i = begin; i < begin + n; ++num_tiles) i = tile_end(tiles, i, begin + n);
    for (int32_t i = begin; i < begin + n; ++i) {
      const int32_t r = x_.order[i];
      const int64_t end = divide_up(lengths_.kv_len[r], kLeaf);
      const int64_t before = leaf_begin == 0 ? 0 : num_states(leaf_begin, end);
      const int64_t after = num_states(leaf_begin, leaf_end) + num_states(leaf_end, end);
      rows += (after - before) * num_qo(r);
    }
    Gain g;
    g.saved_bytes = (n - num_tiles) * (leaf_end - leaf_begin) * shape_.leaf_bytes * shape_.kv_heads;
    g.state_floats = rows * shape_.group_size * shape_.kv_heads * shape_.state_row_floats;
    const int64_t added = 2 * g.state_floats * static_cast<int64_t>(sizeof(float));
    g.bytes = g.saved_bytes - added;
    return g;
  }

  /** Plans order[begin, begin + n) together up to leaf_end, or to the super-chunk's edge before,
   * whichever saves more; not at all if neither saves or has room for its states. */
  ATTNFOLD_HD_LARGE void group(int32_t begin, int32_t n, int32_t leaf_end) {
    const int32_t leaf_begin = x_.requests[x_.order[begin]].leaf_end;
    const int32_t ends[] = {leaf_end, leaf_end / kSuperChunk * kSuperChunk};
    int32_t best_end = leaf_begin;
    Gain best{0, 0, 0};
    for (const int32_t end : ends) {
      if (end <= leaf_begin) continue;
      const Gain g = gain(begin, n, leaf_begin, end);
      if (s_->whole_floats + g.state_floats > prefixes_.max_state_floats) continue;
      if (g.bytes <= best.bytes && !(prefixes_.always && best_end == leaf_begin)) continue;
      best = g;
      best_end = end;
    }
    if (best_end == leaf_begin) return;
    s_->whole_floats += best.state_floats;
    s_->saved_bytes += best.saved_bytes;
    s_->num_shared_leaves += best_end - leaf_begin;
    ++s_->num_prefix_groups;
    const Tiles tiles = tiles_of(begin, n);
    for (int32_t i = begin, end; i < begin + n; i = end) {
      end = tile_end(tiles, i, begin + n);
      add_tile(i, end, leaf_begin, best_end);
    }
  }

  /** The units of requests order[begin, end), one for each block of kv heads. */
  ATTNFOLD_HD_LARGE void add_tile(int32_t begin, int32_t end, int32_t leaf_begin,
                                  int32_t leaf_end) {
    const int32_t first_member = s_->num_members, first_unit = s_->num_units;
    int32_t tokens = 0;
    for (int32_t i = begin; i < end; ++i) {
      const int32_t r = x_.order[i], m = s_->num_members++;
      RequestPrefix& prefix = x_.requests[r];
      s_->members[m] = {r, first_unit, tokens, -1};
      if (prefix.last < 0) prefix.first = m;
      if (prefix.last >= 0) s_->members[prefix.last].next = m;
      prefix.last = m;
      prefix.leaf_end = leaf_end;
      ++prefix.levels;
      tokens += num_qo(r);
    }
    const int32_t heads = row_sets(shape_, tokens).kv_heads;
    for (int32_t head = 0; head < shape_.kv_heads; head += heads) {
      Unit& u = s_->units[s_->num_units++];
      u = {};
      u.request = s_->members[first_member].request;
      u.num_qo = tokens;
      u.kv_head_begin = head;
      u.num_kv_heads = heads < shape_.kv_heads - head ? heads : shape_.kv_heads - head;
      u.key_begin = leaf_begin * kLeaf;
      u.key_end = leaf_end * kLeaf;
      u.leaf_begin = leaf_begin;
      u.leaf_end = leaf_end;
      u.starts_inside = leaf_begin > 0 ? 1 : 0;
      u.ends_inside = 1;
      u.member = first_member;
      u.num_members = end - begin;
      set_leaf_cost(shape_, &u, s_);
    }
  }

  const UnitShape& shape_;
  const Lengths& lengths_;
  const PrefixSource& prefixes_;
  Schedule* s_;
  const PrefixScratch x_;
  int32_t num_nodes_ = 0, num_classes_ = 0;
};

}  // namespace planner
}  // namespace attnfold
