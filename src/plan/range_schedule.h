// Who does what on a GPU.  Integer functions of the lengths, for the host and the device: every
// thread may compute the part that it needs, and nobody has to wait for a list to be built.
//
// A batch becomes row sets: up to `set_rows` consecutive rows of one request, counted token by
// token and within a token by the head of the group, the same for every kv head.  The leaves that a
// row set's rows see, set after set, form a line, which is cut into ranges.  A worker is a (range,
// kv head): the workers of one range read all kv heads of the same pages at about the same time.
//
// Where a range ends inside a row set, states stay behind.  Which ones, and in which order, follows
// from the cuts.  A range leaves
//   of the row set that it enters: single leaves up to the next super-chunk, then super-chunks, the
//     last perhaps a prefix;
//   of the row set that it begins: the row, which is its whole super-chunks, folded, if any; then
//     the started super-chunk after them, if any.
//
// Some multiprocessors read faster than others.  In large problems the end of each block's range is
// therefore a few small ranges of their own, which blocks claim when they are done with what they
// own, the larger ones first.  Who carries out a range changes neither its states nor their places.
//
// Where a machine has a kernel for many rows, requests with many are cut into tiles of kTileRows
// rows instead.  A tile is never cut; (tile, kv head) pairs are dealt to blocks, longest first.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/fold.h"
#include "core/mask.h"

namespace attnfold {

struct alignas(16) RowSet {
  int32_t request;
  int32_t row_begin, num_rows;  // within the request: row = token * group_size + head of the group
  int32_t num_leaves;
  int32_t q_token;   // the request's first token, as a row of q and o
  int32_t position;  // of that token: kv_len - qo_len
  int32_t kv_len;
  int32_t start;        // of this set's leaves on the line
  int32_t sink_leaves;  // leaves [0, sink_leaves), then those from leaf_begin on
  int32_t leaf_begin;
  int32_t seen_begin, seen_end;  // keys that some of its rows see, beside a sink
};

/** How a problem's rows are grouped and the line is cut.  Follows from the problem and the machine.
 */
struct RangeShape {
  int32_t group_size;
  int32_t set_rows;
  int32_t num_ranges;
  uint64_t cut_seed;        // 0: balanced cuts
  int32_t tile_blocks = 0;  // blocks that take tiles; 0: there are no tiles
  int32_t kv_heads = 1;
  int32_t claims = 0;  // ranges to claim after each that a block owns; num_ranges counts both
  int32_t fewest_tile_rows = 0;  // requests with more rows may take tiles
  int32_t tile_cost = 1;         // of a tile and a leaf: 1 with wgmma, kMmaTileCost with mma.sync
};

/** Ranges that blocks own: every (claims + 1)th. */
ATTNFOLD_HD constexpr int32_t num_owned(const RangeShape& shape) {
  return shape.num_ranges / (shape.claims + 1);
}

constexpr int32_t kMaxSetRows = 16;
constexpr int32_t kTileRows = 128;
constexpr int32_t kLongShare = 25;      // leaves: of large problems' ranges
constexpr int32_t kVeryLongShare = 80;  // what claims leave behind costs more than they gain
constexpr int32_t kShortSet = 4;        // leaves of a row set that is rarely cut

constexpr int32_t kMmaTileCost = 3;

/** Rows of a set: a token's, where every request has one new token; `few`, where tiles of wgmma
 * serve requests with more. */
ATTNFOLD_HD constexpr int32_t choose_set_rows(int32_t group_size, bool only_decodes, bool few) {
  if (only_decodes && group_size < kMaxSetRows) return group_size;
  return few && group_size <= kMaxSetRows / 2 ? kMaxSetRows / 2 : kMaxSetRows;
}

/** Blocks of the small-row kernel that an SM holds at once. */
ATTNFOLD_HD constexpr int32_t blocks_per_sm(int32_t head_dim) { return head_dim > 128 ? 1 : 2; }

/**
 * Ranges that the line is cut into, for `workers` blocks that run at once: as many as there is room
 * for, unless that leaves more than a tenth of the blocks idle; then more, in several rounds.
 */
inline int32_t choose_num_ranges(int32_t workers, int32_t kv_heads) {
  const auto idle =
      [&](int32_t ranges) {  // blocks of the rounds that have nothing to do, per thousand
        const int64_t blocks = static_cast<int64_t>(ranges) * kv_heads;
        const int64_t room = (blocks + workers - 1) / workers * workers;
        return (room - blocks) * 1000 / room;
      };
  int32_t best = workers / kv_heads > 1 ? workers / kv_heads : 1;
  if (idle(best) <= 100) return best;
  for (int32_t ranges = best + 1; ranges <= best + 8; ++ranges) {
    if (idle(ranges) < idle(best)) best = ranges;
  }
  return best;
}

constexpr int32_t kMaxClaimed = 32;  // leaves behind an owned range, at most

/** RangeShape::claims for so many owned ranges, where a batch has at most `max_leaves`, and a row
 * set `max_set_leaves`; `any`: whether or not there will be any. */
inline int32_t choose_claims(int32_t owned, int64_t max_leaves, int64_t max_set_leaves, bool any) {
  constexpr int32_t kMost = 5, kMaxRanges = 511;  // the second kernel has room for their places
  if (owned == 1) return 0;
  const bool some = max_leaves >= int64_t{kLongShare} * owned || max_set_leaves <= kShortSet;
  if (!some && !any) return 0;
  return std::clamp(kMaxRanges / owned - 1, 0, kMost);
}

/** Two row sets' worth of counts: of one request, or of a batch. */
struct RangeCounts {
  int32_t sets, empty_sets;  // with leaves, without
  int32_t leaves;
};

/** A range, with all that its worker needs to begin. */
struct alignas(16) Range {
  RowSet set;  // in which it begins
  int32_t set_index, number, num_leaves;
  int32_t entered_states;  // index of the first state of the row set that it enters
  int32_t begun_states;    // and of the row set that it begins and does not end
  int32_t num_claimed;     // ranges to claim, in all
  int32_t kv_head;         // of a claimed range, noted by the block that claimed it
  int32_t unused;
};

/** The same for everyone else: where a range begins on the line, and its states. */
struct alignas(16) RangePlace {
  int32_t cut, entered_states, begun_states, unused;
};

/** A row set that several ranges share; `first_range` holds its first leaf, and -1 marks an entry
 * without a set. */
struct alignas(16) SharedSet {
  RowSet set;
  int32_t first_range;
  int32_t first_state, num_states;  // they lie one after the other
  int32_t unused;
};

/** Row sets that several ranges share, and the rows that the largest of them has. */
struct SharedCounts {
  int32_t sets, rows;
};

/** Tiles, and the blocks that take them. */
struct TileCounts {
  int32_t tiles, blocks;
};

/** One step's schedule.  Row sets without leaves stand at the end of `sets`, the first one last. */
struct RangeSchedule {
  RangeCounts* counts;
  SharedCounts* num_shared;
  RowSet* sets;  // [max_sets]
  int32_t max_sets;
  RangePlace* places;  // [num_ranges + 1]
  Range* ranges;       // [num_ranges]
  SharedSet* shared;   // [num_ranges], those with a set first
  TileCounts* num_tiles = nullptr;
  RowSet* tiles = nullptr;  // [2 * max_tiles], longest first; the second half is the planner's own
  int32_t max_tiles = 0;
  Range* claimed = nullptr;  // ranges to claim, in that order, none empty; [all that may be]
};

// ------------------------------------------------------------------------------------------------
// leaves of a row set
//
// They are numbered 0, 1, .. in ascending order, without the gap between a sink and a window.

ATTNFOLD_HD inline int32_t leaf_of(const RowSet& s, int32_t number) {
  return number < s.sink_leaves ? number : number - s.sink_leaves + s.leaf_begin;
}

/** The first number of the super-chunk that holds `number`. */
ATTNFOLD_HD inline int32_t chunk_begin(const RowSet& s, int32_t number) {
  const int32_t leaf = leaf_of(s, number) / kSuperChunk * kSuperChunk;
  if (leaf < s.sink_leaves) return leaf;
  return leaf > s.leaf_begin ? leaf - s.leaf_begin + s.sink_leaves : s.sink_leaves;
}

/** One past the last number of it. */
ATTNFOLD_HD inline int32_t chunk_end(const RowSet& s, int32_t number) {
  const int32_t edge = leaf_of(s, number) / kSuperChunk * kSuperChunk + kSuperChunk;
  int32_t end = edge - s.leaf_begin + s.sink_leaves;
  if (number < s.sink_leaves && edge <= s.leaf_begin) {
    end = edge < s.sink_leaves ? edge : s.sink_leaves;
  }
  return end < s.num_leaves ? end : s.num_leaves;
}

/** Super-chunks of the row set before the one that holds `number`. */
ATTNFOLD_HD inline int32_t chunk_ordinal(const RowSet& s, int32_t number) {
  const int32_t chunk = leaf_of(s, number) / kSuperChunk;
  if (number < s.sink_leaves) return chunk;
  const int32_t sink_chunks = (s.sink_leaves + kSuperChunk - 1) / kSuperChunk;
  const int32_t first = s.leaf_begin / kSuperChunk;
  return chunk - first + sink_chunks - (first < sink_chunks ? 1 : 0);
}

/** The number at which the row set's super-chunk of this ordinal begins. */
ATTNFOLD_HD inline int32_t chunk_at(const RowSet& s, int32_t ordinal) {
  const int32_t sink_chunks = (s.sink_leaves + kSuperChunk - 1) / kSuperChunk;
  if (ordinal < sink_chunks) return ordinal * kSuperChunk;
  const int32_t first = s.leaf_begin / kSuperChunk;
  const int32_t chunk = ordinal - sink_chunks + (first < sink_chunks ? 1 : 0) + first;
  const int32_t leaf = chunk * kSuperChunk;
  return leaf > s.leaf_begin ? leaf - s.leaf_begin + s.sink_leaves : s.sink_leaves;
}

// ------------------------------------------------------------------------------------------------
// the line

ATTNFOLD_HD inline int32_t num_row_sets(const RangeShape& shape, int32_t qo_len) {
  return static_cast<int32_t>(
      (static_cast<int64_t>(qo_len) * shape.group_size + shape.set_rows - 1) / shape.set_rows);
}
ATTNFOLD_HD inline int32_t num_tiles(const RangeShape& shape, int32_t qo_len) {
  return static_cast<int32_t>((static_cast<int64_t>(qo_len) * shape.group_size + kTileRows - 1) /
                              kTileRows);
}

/** Keys that some of the set's rows see, and perhaps a few between. */
ATTNFOLD_HD inline VisibleKeys seen_by_any(const RangeShape& shape, const Mask& mask,
                                           const RowSet& s) {
  const int32_t first = s.row_begin / shape.group_size;
  const int32_t last = (s.row_begin + s.num_rows - 1) / shape.group_size;
  return visible_keys(mask, RequestShape{s.kv_len - s.position, s.kv_len}, first, last - first + 1);
}

/** The same of a set that row_set() made: a sink that other keys do not reach is a whole one. */
ATTNFOLD_HD inline VisibleKeys seen_by_any(const Mask& mask, const RowSet& s) {
  return {s.seen_begin > 0 ? mask.sink_tokens : 0, s.seen_begin, s.seen_end};
}

/** Set `index` of a request's rows, `set_rows` to a set; `start` is left 0. */
ATTNFOLD_HD_LARGE inline RowSet row_set(const RangeShape& shape, int32_t set_rows, const Mask& mask,
                                        int32_t request, int32_t q_token, int32_t qo_len,
                                        int32_t kv_len, int32_t index) {
  const int32_t rows = qo_len * shape.group_size, begin = index * set_rows;
  RowSet s{};
  s.request = request;
  s.row_begin = begin;
  s.num_rows = rows - begin < set_rows ? rows - begin : set_rows;
  s.q_token = q_token;
  s.position = kv_len - qo_len;
  s.kv_len = kv_len;
  const VisibleKeys keys = seen_by_any(shape, mask, s);
  s.seen_begin = keys.begin;
  s.seen_end = keys.end;
  s.sink_leaves = (keys.sink + kLeaf - 1) / kLeaf;
  s.leaf_begin = keys.begin / kLeaf;
  int32_t leaf_end = keys.end > keys.begin ? (keys.end - 1) / kLeaf + 1 : s.leaf_begin;
  if (leaf_end == s.leaf_begin) {  // the sink alone
    leaf_end = s.sink_leaves;
    s.leaf_begin = s.sink_leaves = 0;
  } else if (s.sink_leaves >= s.leaf_begin) {  // no gap
    s.leaf_begin = s.sink_leaves = 0;
  }
  s.num_leaves = s.sink_leaves + leaf_end - s.leaf_begin;
  return s;
}

// ------------------------------------------------------------------------------------------------
// tiles

/** What tiles would cost: about so many leaves in all, and in the longest one. */
struct TileLoad {
  int64_t leaves;
  int32_t longest;
};

constexpr int32_t kNoTiles = 0x7fffffff;

/** Rows of a request above which it may take tiles. */
ATTNFOLD_HD inline int32_t fewest_tile_rows(const RangeShape& shape) {
  if (shape.tile_blocks == 0) return kNoTiles;
  if (shape.cut_seed != 0) return static_cast<int32_t>(shape.cut_seed % (2 * kTileRows));
  return shape.fewest_tile_rows;
}

/** Of one request, if it takes tiles. */
ATTNFOLD_HD_LARGE inline TileLoad tile_load(const RangeShape& shape, const Mask& mask,
                                            int32_t qo_len, int32_t kv_len) {
  if (qo_len * shape.group_size <= fewest_tile_rows(shape)) return {0, 0};
  const int32_t tiles = num_tiles(shape, qo_len);
  const int32_t middle =
      row_set(shape, kTileRows, mask, 0, 0, qo_len, kv_len, tiles / 2).num_leaves;
  const int32_t last = row_set(shape, kTileRows, mask, 0, 0, qo_len, kv_len, tiles - 1).num_leaves;
  return {static_cast<int64_t>(tiles) * middle, middle > last ? middle : last};
}

/**
 * Rows above which requests of a batch take tiles.  A tile is one block's from end to end: where
 * tiles are too few to fill the machine, a request that ranges can spread over all of it is sooner
 * done that way, unless it has very many rows.
 */
ATTNFOLD_HD inline int32_t tile_limit(const RangeShape& shape, const TileLoad& load) {
  const int32_t few = fewest_tile_rows(shape);
  if (few == kNoTiles || shape.cut_seed != 0) return few;
  if (2 * load.leaves * shape.kv_heads >= static_cast<int64_t>(load.longest) * shape.tile_blocks)
    return few;
  // A row set and a leaf take one multiprocessor about as long as a tile and a leaf by wgmma.
  const int32_t many = shape.set_rows * shape.tile_cost * shape.tile_blocks / shape.kv_heads;
  return many > few ? many : few;
}

/**
 * Blocks that so many tiles are dealt to, where row sets have `line` leaves beside them.
 *
 * A multiprocessor has room for a tile's block or for the small-row kernel's, and these alone read
 * as fast as memory: so tiles on few multiprocessors, one after the other, while the others read,
 * may be done sooner than tiles on all and then reads on all.  In 20ths of what a tile and a leaf
 * take by wgmma, measured on an H200 (1.65 us): a tile takes 52 besides its leaves, and 24 for each
 * beside reads; a leaf of a row set 20, or, where all multiprocessors read at once, what memory
 * takes.
 */
ATTNFOLD_HD_LARGE inline int32_t choose_tile_blocks(const RangeShape& shape, const TileLoad& load,
                                                    int32_t tiles, int32_t line) {
  const int64_t all = shape.tile_blocks, pairs = int64_t{tiles} * shape.kv_heads,
                leaves = int64_t{line} * shape.kv_heads;
  if (pairs == 0 || leaves == 0 || shape.cut_seed != 0) return shape.tile_blocks;
  // Requests that might have taken tiles and do not are in the load, too.
  const int64_t mean = load.leaves / tiles < load.longest ? load.leaves / tiles : load.longest;
  const int64_t tile = (mean * 24 + 52) * shape.tile_cost,
                longest = (int64_t{load.longest} * 24 + 52) * shape.tile_cost;
  const int64_t fewest = (pairs + all - 1) / all;
  int64_t best = 0, best_time = 0;
  for (int64_t rounds = fewest; rounds < fewest + 8; ++rounds) {
    const int64_t blocks = (pairs + rounds - 1) / rounds;
    const int64_t time = rounds * tile > longest ? rounds * tile : longest;
    const int64_t rest = leaves - (all - blocks) * time / 20;
    const int64_t end = time + (rest > 0 ? rest * 23 / all : 0);
    if (best > 0 && end >= best_time) continue;
    best = blocks;
    best_time = end;
  }
  return static_cast<int32_t>(best);
}

/** Tiles are sorted so many at a time. */
constexpr int32_t kTileSegment = 4096;

// ------------------------------------------------------------------------------------------------
// places on the line

/** The row set that holds place `at` of the line, `at` < all leaves. */
ATTNFOLD_HD inline int32_t set_at(const RowSet* sets, int32_t num_sets, int32_t at) {
  int32_t low = 0, high = num_sets - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (sets[middle].start <= at) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/** The range that holds place `at` of the line: the last that begins there or before. */
ATTNFOLD_HD inline int32_t range_at(const RangePlace* places, int32_t num_ranges, int32_t at) {
  int32_t low = 0, high = num_ranges - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (places[middle].cut <= at) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// ------------------------------------------------------------------------------------------------
// cuts

/** Where ranges may begin: at multiples of `align` leaves of a request, and at row sets' ends. */
struct CutRule {
  const RowSet* sets;
  int32_t num_sets, leaves;
  int32_t num_ranges;
  int32_t spread;  // 2: every second range is empty, and num_ranges are not
  int32_t align;
  uint64_t seed;
  int32_t claims;  // RangeShape's; what follows says where owned ranges begin
  bool beside_tiles;
};

ATTNFOLD_HD inline uint64_t mix_bits(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/** Where range `i` begins; never falls as i grows, up to the end of the line. */
ATTNFOLD_HD_LARGE inline int32_t cut_at(const CutRule& rule, int32_t i) {
  i = (i + rule.spread - 1) / rule.spread;
  if (i <= 0) return 0;
  if (i >= rule.num_ranges) return rule.leaves;
  const int32_t even =
      static_cast<int32_t>(static_cast<int64_t>(rule.leaves) * i / rule.num_ranges);
  if (rule.seed != 0) {
    const int64_t share = rule.leaves / rule.num_ranges;
    const uint64_t drawn = mix_bits(rule.seed ^ mix_bits(static_cast<uint64_t>(i)));
    const int64_t shift =
        static_cast<int64_t>(drawn % static_cast<uint64_t>(share + 1)) - share / 2;
    return static_cast<int32_t>(clamp_to(even + shift, 0, rule.leaves));
  }
  if (rule.align == 1 || rule.leaves == 0) return even;
  const RowSet& s = rule.sets[set_at(rule.sets, rule.num_sets, even)];
  const int32_t number = even - s.start, leaf = leaf_of(s, number);
  const int32_t back = leaf % rule.align, ahead = rule.align - back;
  const int32_t low = number > back ? number - back : 0;
  const int32_t high = number + ahead < s.num_leaves ? number + ahead : s.num_leaves;
  return s.start + (number - low <= high - number ? low : high);
}

/** An even share of the leaves. */
ATTNFOLD_HD inline int32_t even_share(const CutRule& rule) {
  return static_cast<int32_t>((static_cast<int64_t>(rule.leaves) + rule.num_ranges - 1) /
                              rule.num_ranges);
}

/** Leaves behind each owned range that are to be claimed: what the slowest blocks are behind the
 * others in the end, and a little more. */
ATTNFOLD_HD inline int32_t claimed_leaves(const CutRule& rule) {
  if (rule.claims == 0 || rule.num_ranges == 0) return 0;
  const int32_t share = rule.leaves / rule.num_ranges;
  if (rule.seed != 0) {
    const int32_t most = share < kMaxClaimed ? share : kMaxClaimed;
    return static_cast<int32_t>(mix_bits(rule.seed) % static_cast<uint64_t>(most + 1));
  }
  if (rule.spread != 1 || rule.beside_tiles) return 0;
  if (share >= kLongShare) return share < kVeryLongShare ? share / 10 : 0;
  if (share >= 4 && rule.leaves <= kShortSet * rule.num_sets) return share / 2 < 3 ? share / 2 : 3;
  return 0;
}

/** Where range `k` of all begins, owned or to be claimed, of a rule whose claimed_leaves() are
 * `claimed`. */
ATTNFOLD_HD inline int32_t range_begin(const CutRule& rule, int32_t claimed, int32_t k) {
  const int32_t each = rule.claims + 1, owned = k / each, piece = k - owned * each;
  const int32_t begin = cut_at(rule, owned);
  if (piece == 0) return begin;
  int32_t left = claimed;  // of the owned range, from this piece on: each takes half of the rest
  for (int32_t i = 1; i < piece; ++i) left -= left > 1 ? left / 2 : left;
  const int32_t end = cut_at(rule, owned + 1), at = end - left;
  if (at > begin || end == begin) return at > begin ? at : begin;
  return begin + 1;  // who owns nothing claims nothing
}

/** The range that is claimed as number `i` of them all, empty ones counted: larger ones first. */
ATTNFOLD_HD inline int32_t claimed_range(const RangeShape& shape, int32_t i) {
  const int32_t owned = num_owned(shape);
  return i % owned * (shape.claims + 1) + 1 + i / owned;
}

constexpr int32_t kSmallShare = 12;  // leaves: problems of no larger even share are small

/** Leaves that the largest range may have.  One more than an even share costs large problems
 * little, and half of what is claimed evens out; a whole super-chunk in place of a little less
 * costs less than the states of cuts inside it. */
ATTNFOLD_HD inline int32_t largest_share_allowed(const CutRule& rule) {
  const int32_t even = even_share(rule);
  if (rule.align == kSuperChunk && rule.spread == 1 && even > kSmallShare && even < kSuperChunk)
    return kSuperChunk;
  if (even < kLongShare) return even;
  const int32_t claimed = claimed_leaves(rule);
  return even + (claimed > 2 ? claimed / 2 : 1);
}

// Rules of cuts, tried one after the other until the largest range is within the limit; the last
// one always is.  Whole super-chunks leave the fewest states behind, so that in small problems,
// where states weigh most, half of the ranges with whole super-chunks come before all with parts of
// them: one block on each SM reads nearly as fast as two.  Empty ranges stand between the others,
// so that few of an SM's two blocks are both busy.
constexpr int kCutRules = 7;

/** Rule `index`, beside tiles or not; num_ranges = 0 says that it is not to be tried. */
ATTNFOLD_HD inline CutRule cut_rule(const RowSet* sets, const RangeCounts& n,
                                    const RangeShape& shape, bool tiles, int index) {
  CutRule rule{sets,           n.sets,       n.leaves, num_owned(shape), 1, kSuperChunk,
               shape.cut_seed, shape.claims, tiles};
  if (index == 1 || index == 2) {
    const bool small = even_share(rule) <= kSmallShare && shape.cut_seed == 0;
    rule.num_ranges = small ? (rule.num_ranges + index - 1) / 2 : 0;
    rule.spread = 2;
  } else if (index > 2) {
    rule.align = kSuperChunk >> (index - 2);
  }
  return rule;
}

// ------------------------------------------------------------------------------------------------
// states

/** States that one range may leave behind where no row set has more than `max_leaves` leaves. */
ATTNFOLD_HD inline int32_t max_states(int64_t max_leaves) {
  return static_cast<int32_t>((kSuperChunk - 1) + (max_leaves + kSuperChunk - 1) / kSuperChunk + 1 +
                              2);
}

/** States that so many owned ranges may leave behind in all: of no more sets than there are, nor
 * than ranges, the super-chunks. */
ATTNFOLD_HD inline int64_t max_states(int32_t owned, int64_t max_sets, int64_t max_leaves) {
  const int64_t each = max_states(0), of_set = max_states(max_leaves) - each;
  return owned * each + (max_sets < owned ? max_sets : owned) * of_set;
}

/** The first whole super-chunk of a range that enters the row set at `entry`, as a number. */
ATTNFOLD_HD inline int32_t first_chunk(const RowSet& s, int32_t entry) {
  return chunk_begin(s, entry) == entry ? entry : chunk_end(s, entry);
}

/** Which state, counted from 0, begins at `number` in a range that enters the row set at `entry` >
 * 0. */
ATTNFOLD_HD inline int32_t entered_state(const RowSet& s, int32_t entry, int32_t number) {
  const int32_t first = first_chunk(s, entry);
  if (number < first) return number - entry;
  return first - entry + chunk_ordinal(s, number) - chunk_ordinal(s, first);
}

/** The range between two cuts. */
ATTNFOLD_HD inline Range make_range(const RowSet* sets, const RangeCounts& n, int32_t begin,
                                    int32_t end) {
  Range range{};
  range.num_leaves = end - begin;
  if (n.sets == 0) return range;
  range.set_index = set_at(sets, n.sets, begin);
  range.set = sets[range.set_index];
  range.number = begin - range.set.start;
  return range;
}

/** Whether the cut at which `range` begins, be it empty, is the first inside its row set;
 * `cut_before` is the one before. */
ATTNFOLD_HD inline bool is_first_inside(const Range& range, int32_t cut_before) {
  return range.number > 0 && range.number < range.set.num_leaves && cut_before <= range.set.start;
}

/** Notes where the states of a row set that ranges share lie, once all places are known. */
ATTNFOLD_HD inline void find_states(const RangePlace* places, int32_t num_ranges, SharedSet* s) {
  const int32_t last = range_at(places, num_ranges, s->set.start + s->set.num_leaves - 1);
  s->first_state = places[s->first_range].begun_states;
  s->num_states = places[last].begun_states - s->first_state;
}

/** How many states a range leaves behind. */
struct RangeStates {
  int32_t entered, begun;
};

ATTNFOLD_HD inline RangeStates count_states(const RowSet* sets, const RangeCounts& n,
                                            const Range& range) {
  RangeStates states{};
  if (range.num_leaves == 0) return states;
  const int32_t begin = range.set.start + range.number, end = begin + range.num_leaves;
  if (range.number > 0) {
    const int32_t last =
        end - range.set.start < range.set.num_leaves ? end - range.set.start : range.set.num_leaves;
    states.entered = entered_state(range.set, range.number, last - 1) + 1;
  }
  const RowSet& last = sets[set_at(sets, n.sets, end - 1)];
  const int32_t number = end - last.start;
  if (number < last.num_leaves && last.start >= begin) {
    const int32_t whole = chunk_begin(last, number);
    states.begun = (whole > 0 ? 1 : 0) + (whole < number ? 1 : 0);
  }
  return states;
}

/** Everything at once, on one thread: what the device's planner computes in parallel. */
inline void build_range_schedule(const RangeShape& shape, const Mask& mask, int32_t batch,
                                 const int32_t* qo_indptr, const int32_t* kv_len,
                                 RangeSchedule* out) {
  RangeCounts n{};
  TileLoad load{};
  for (int32_t r = 0; r < batch; ++r) {
    const TileLoad one = tile_load(shape, mask, qo_indptr[r + 1] - qo_indptr[r], kv_len[r]);
    load.leaves += one.leaves;
    load.longest = one.longest > load.longest ? one.longest : load.longest;
  }
  const int32_t limit = tile_limit(shape, load);
  int32_t tiles = 0;
  for (int32_t r = 0; r < batch; ++r) {
    const int32_t qo_len = qo_indptr[r + 1] - qo_indptr[r];
    if (qo_len * shape.group_size > limit) {
      for (int32_t i = 0; i < num_tiles(shape, qo_len); ++i) {
        out->tiles[tiles++] =
            row_set(shape, kTileRows, mask, r, qo_indptr[r], qo_len, kv_len[r], i);
      }
      continue;
    }
    for (int32_t i = 0; i < num_row_sets(shape, qo_len); ++i) {
      RowSet s = row_set(shape, shape.set_rows, mask, r, qo_indptr[r], qo_len, kv_len[r], i);
      s.start = n.leaves;
      out->sets[s.num_leaves > 0 ? n.sets++ : out->max_sets - 1 - n.empty_sets++] = s;
      n.leaves += s.num_leaves;
    }
  }
  *out->counts = n;
  if (out->num_tiles) *out->num_tiles = {tiles, choose_tile_blocks(shape, load, tiles, n.leaves)};
  for (int32_t begin = 0; begin < tiles; begin += kTileSegment) {
    std::stable_sort(out->tiles + begin, out->tiles + std::min(tiles, begin + kTileSegment),
                     [](const RowSet& x, const RowSet& y) { return x.num_leaves > y.num_leaves; });
  }
  CutRule rule{};
  for (int index = 0; index < kCutRules; ++index) {
    rule = cut_rule(out->sets, n, shape, tiles > 0, index);
    if (rule.num_ranges == 0) continue;
    int32_t largest = 0;
    for (int32_t i = 0; i < num_owned(shape); ++i) {
      const int32_t share = cut_at(rule, i + 1) - cut_at(rule, i);
      largest = share > largest ? share : largest;
    }
    if (largest <= largest_share_allowed(rule)) break;
  }
  *out->num_shared = {0, 0};
  int32_t states = 0, claimed = claimed_leaves(rule), before = 0;
  for (int32_t i = 0; i < shape.num_ranges; ++i) {
    const int32_t cut = range_begin(rule, claimed, i);
    Range range = make_range(out->sets, n, cut, range_begin(rule, claimed, i + 1));
    const RangeStates left = count_states(out->sets, n, range);
    range.entered_states = states;
    range.begun_states = states + left.entered;
    states += left.entered + left.begun;
    out->ranges[i] = range;
    out->places[i] = {cut, range.entered_states, range.begun_states, 0};
    out->shared[i] = {{}, -1, 0, 0, 0};
    if (i > 0 && is_first_inside(range, before)) {
      out->shared[out->num_shared->sets++] = {range.set, i - 1, 0, 0, 0};
      out->num_shared->rows = std::max(out->num_shared->rows, range.set.num_rows);
    }
    before = cut;
  }
  int32_t num_claimed = 0;
  for (int32_t i = 0; i < num_owned(shape) * shape.claims; ++i) {
    const Range& range = out->ranges[claimed_range(shape, i)];
    if (range.num_leaves > 0) out->claimed[num_claimed++] = range;
  }
  for (int32_t i = 0; i < shape.num_ranges; ++i) out->ranges[i].num_claimed = num_claimed;
  out->places[shape.num_ranges] = {n.leaves, states, states, 0};
  for (int32_t i = 0; i < out->num_shared->sets; ++i)
    find_states(out->places, shape.num_ranges, &out->shared[i]);
}

}  // namespace attnfold
