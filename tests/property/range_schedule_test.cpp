// The planner of the CUDA backend: every leaf in one range, even shares, and states that are
// numbered without a gap in the order in which a worker leaves them behind.
#include "plan/range_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace attnfold {
namespace {

/** A schedule and the arrays it lies in. */
struct Planned {
  RangeCounts counts{};
  SharedCounts num_shared{};
  std::vector<RowSet> sets;
  std::vector<RangePlace> places;
  std::vector<Range> ranges;
  std::vector<SharedSet> shared;
  std::vector<Range> claimed;
  TileCounts num_tiles{};
  std::vector<RowSet> tiles;
  RangeShape shape{};
  Mask mask;
  std::vector<int32_t> qo_indptr{0}, kv_len;

  /** Of short requests, or of such as take tiles. */
  explicit Planned(std::mt19937_64& rng, int32_t tile_blocks = 0) {
    const auto below = [&](uint64_t n) { return static_cast<int32_t>(rng() % n); };
    shape = {1 + below(17), 1 + below(16), 1 + below(300), rng() % 3 ? 0 : rng()};
    shape.tile_blocks = tile_blocks;
    if (below(2)) {
      shape.claims = 1 + below(5);
      shape.num_ranges = (1 + below(60)) * (shape.claims + 1);
    }
    shape.kv_heads = 1 + below(8);
    shape.fewest_tile_rows = below(40);
    shape.tile_cost = 1 + below(3);
    mask.causal = below(2);
    if (below(3) == 0) mask.window_left = below(3000);
    if (below(4) == 0) mask.sink_tokens = below(600);
    if (below(5) == 0) mask.attention_chunk = 1 + below(3000);
    const int32_t batch = below(40), longest = below(3) ? 3000 : 100000;
    for (int32_t r = 0; r < batch; ++r) {
      const bool is_long = tile_blocks > 0 && below(2);
      qo_indptr.push_back(qo_indptr.back() + below(is_long ? 900 : 4));
      kv_len.push_back(below(static_cast<uint64_t>(longest)));
    }
    const int32_t max_sets = batch + qo_indptr.back() * shape.group_size / shape.set_rows + 1;
    sets.resize(static_cast<size_t>(max_sets));
    places.resize(static_cast<size_t>(shape.num_ranges) + 1);
    ranges.resize(static_cast<size_t>(shape.num_ranges));
    shared.resize(static_cast<size_t>(shape.num_ranges));
    claimed.resize(static_cast<size_t>(shape.num_ranges));
    const int32_t max_tiles = batch + qo_indptr.back() * shape.group_size / kTileRows;
    tiles.resize(static_cast<size_t>(2 * max_tiles));
    RangeSchedule schedule{&counts,       &num_shared,   sets.data(),   max_sets,
                           places.data(), ranges.data(), shared.data(), &num_tiles,
                           tiles.data(),  max_tiles,     claimed.data()};
    build_range_schedule(shape, mask, batch, qo_indptr.data(), kv_len.data(), &schedule);
  }
};

class RangeSchedules : public ::testing::TestWithParam<int> {};

TEST_P(RangeSchedules, RangesCoverTheLineEvenly) {
  for (int round = 0; round < 200; ++round) {
    const int seed = GetParam() * 1000 + round;
    std::mt19937_64 rng(static_cast<uint64_t>(seed));
    const Planned p(rng);
    ASSERT_EQ(p.places.front().cut, 0) << seed;
    ASSERT_EQ(p.places.back().cut, p.counts.leaves) << seed;
    int32_t leaves = 0;
    for (int32_t i = 0; i < p.counts.sets; ++i) {
      const RowSet& set = p.sets[static_cast<size_t>(i)];
      ASSERT_EQ(set.start, leaves) << seed;
      ASSERT_GT(set.num_leaves, 0) << seed;
      const VisibleKeys seen = seen_by_any(p.shape, p.mask, set), noted = seen_by_any(p.mask, set);
      ASSERT_EQ(noted.sink, seen.sink) << seed;
      ASSERT_EQ(noted.begin, seen.begin) << seed;
      ASSERT_EQ(noted.end, seen.end) << seed;
      leaves += set.num_leaves;
    }
    ASSERT_EQ(leaves, p.counts.leaves) << seed;
    int32_t largest = 0, num_busy = 0;
    for (size_t i = 0; i < p.ranges.size(); ++i) {
      const int32_t share = p.places[i + 1].cut - p.places[i].cut;
      ASSERT_GE(share, 0) << seed;
      ASSERT_EQ(p.ranges[i].num_leaves, share) << seed;
      if (p.shape.cut_seed == 0) {
        largest = share > largest ? share : largest;
        num_busy += share > 0 ? 1 : 0;
      }
    }
    if (p.shape.cut_seed != 0) continue;
    // Even over all ranges, or in a small problem over half of them.
    const CutRule all = cut_rule(p.sets.data(), p.counts, p.shape, p.num_tiles.tiles > 0, 0),
                  half = cut_rule(p.sets.data(), p.counts, p.shape, p.num_tiles.tiles > 0, 1);
    if (largest > largest_share_allowed(all)) {
      ASSERT_GT(half.num_ranges, 0) << seed;
      ASSERT_LE(largest, largest_share_allowed(half)) << seed;
      ASSERT_LE(num_busy, half.num_ranges + 1) << seed;
    }
  }
}

/** Walks each range as a worker does, and finds each row set that has to be finished by somebody
 * else. */
TEST_P(RangeSchedules, StatesAreNumberedAsTheyAreLeftBehind) {
  for (int round = 0; round < 200; ++round) {
    const int seed = GetParam() * 1000 + round;
    std::mt19937_64 rng(static_cast<uint64_t>(seed));
    const Planned p(rng);
    int32_t states = 0, num_shared = 0, num_set_states = 0;
    for (size_t i = 0; i < p.ranges.size(); ++i) {
      const Range& range = p.ranges[i];
      ASSERT_EQ(range.entered_states, states) << seed;
      for (int32_t at = p.places[i].cut; at < p.places[i + 1].cut; ++at) {
        const int32_t index = set_at(p.sets.data(), p.counts.sets, at);
        const RowSet& set = p.sets[static_cast<size_t>(index)];
        const int32_t number = at - set.start, begin = chunk_begin(set, number);
        const bool last = at + 1 == p.places[i + 1].cut, row_ends = number + 1 == set.num_leaves;
        const bool chunk_ends = number + 1 == chunk_end(set, number);
        const int32_t entry = index == range.set_index ? range.number : 0;
        ASSERT_EQ(chunk_at(set, chunk_ordinal(set, number)), begin) << seed;
        if (entry > 0) {
          const bool single = begin < entry;
          if (!single && !chunk_ends && !last) continue;
          ASSERT_EQ(range.entered_states + entered_state(set, entry, single ? number : begin),
                    states)
              << seed;
          ++states;
          ++num_set_states;
          if (row_ends) {
            ASSERT_EQ(p.shared[static_cast<size_t>(num_shared - 1)].num_states, num_set_states)
                << seed;
          }
        } else if (last && !row_ends) {
          ASSERT_EQ(range.begun_states, states) << seed;
          ASSERT_EQ(p.shared[static_cast<size_t>(num_shared)].first_state, states) << seed;
          num_set_states = (chunk_ends || begin > 0 ? 1 : 0) + (chunk_ends ? 0 : 1);
          states += (chunk_ends || begin > 0 ? 1 : 0) + (chunk_ends ? 0 : 1);
          ASSERT_EQ(p.shared[static_cast<size_t>(num_shared)].first_range, static_cast<int32_t>(i))
              << seed;
          ASSERT_EQ(p.shared[static_cast<size_t>(num_shared)].set.start, set.start) << seed;
          ++num_shared;
        }
      }
    }
    ASSERT_EQ(p.places.back().entered_states, states) << seed;
    ASSERT_EQ(p.num_shared.sets, num_shared) << seed;
    int32_t most = 0;
    for (const RowSet& set : p.sets) most = std::max(most, set.num_leaves);
    for (size_t i = 0; i < p.ranges.size(); ++i) {
      ASSERT_LE(p.places[i + 1].entered_states - p.places[i].entered_states, max_states(most))
          << seed;
    }
    ASSERT_LE(p.places.back().entered_states,
              max_states(num_owned(p.shape), p.counts.sets, most) +
                  (p.shape.claims > 0 ? kMaxClaimed * num_owned(p.shape) : 0))
        << seed;
  }
}

/** Rows are in tiles or in sets: each once, all of a request's in one kind, tiles longest first. */
TEST_P(RangeSchedules, EveryRowIsInOneTileOrSet) {
  int32_t with_tiles = 0;
  for (int round = 0; round < 100; ++round) {
    const int seed = GetParam() * 1000 + 500 + round;
    std::mt19937_64 rng(static_cast<uint64_t>(seed));
    const Planned p(rng, 1 + static_cast<int32_t>(rng() % 132));
    std::vector<int32_t> in_tiles(p.kv_len.size()), in_sets(p.kv_len.size());
    for (int32_t i = 0; i < p.num_tiles.tiles; ++i) {
      const RowSet& tile = p.tiles[static_cast<size_t>(i)];
      ASSERT_EQ(tile.row_begin % kTileRows, 0) << seed;
      ASSERT_LE(tile.num_rows, kTileRows) << seed;
      in_tiles[static_cast<size_t>(tile.request)] += tile.num_rows;
      if (i % kTileSegment > 0) {
        ASSERT_LE(tile.num_leaves, p.tiles[static_cast<size_t>(i) - 1].num_leaves) << seed;
      }
    }
    const auto count = [&](const RowSet& set) {
      in_sets[static_cast<size_t>(set.request)] += set.num_rows;
    };
    std::for_each_n(p.sets.begin(), p.counts.sets, count);
    std::for_each_n(p.sets.rbegin(), p.counts.empty_sets, count);
    for (size_t r = 0; r < p.kv_len.size(); ++r) {
      const int32_t rows = (p.qo_indptr[r + 1] - p.qo_indptr[r]) * p.shape.group_size;
      ASSERT_EQ(in_tiles[r] + in_sets[r], rows) << seed << ", request " << r;
      ASSERT_TRUE(in_tiles[r] == 0 || in_sets[r] == 0) << seed << ", request " << r;
    }
    with_tiles += p.num_tiles.tiles > 0;
    ASSERT_GE(p.num_tiles.blocks, 1) << seed;
    ASSERT_LE(p.num_tiles.blocks, p.shape.tile_blocks) << seed;
    if (p.counts.leaves == 0) {
      ASSERT_EQ(p.num_tiles.blocks, p.shape.tile_blocks) << seed;
    }
  }
  EXPECT_GT(with_tiles, 20);
}

/** A chunk of a prefill beside many decodes leaves them multiprocessors; beside few, or none, not.
 */
TEST(RangeSchedule, TilesLeaveRoomForReads) {
  RangeShape shape{4, 16, 132, 0, 132, 8};
  const TileLoad chunk{16 * 67, 68};  // 512 tokens on 8192 keys
  EXPECT_EQ(choose_tile_blocks(shape, chunk, 16, 63 * 32), 64);
  EXPECT_EQ(choose_tile_blocks(shape, chunk, 16, 1), 128);
  EXPECT_EQ(choose_tile_blocks(shape, chunk, 16, 0), 132);
  EXPECT_EQ(choose_tile_blocks(shape, {}, 0, 63 * 32), 132);
  shape.tile_cost = kMmaTileCost;  // tiles outlast the reads
  EXPECT_EQ(choose_tile_blocks(shape, chunk, 16, 63 * 32), 128);
}

/** Each range is a block's own or claimed, once; what is claimed comes after a share of what is
 * owned, larger ranges first. */
TEST_P(RangeSchedules, RangesAreOwnedOrClaimed) {
  int32_t with_claims = 0;
  for (int round = 0; round < 200; ++round) {
    const int seed = GetParam() * 1000 + round;
    std::mt19937_64 rng(static_cast<uint64_t>(seed));
    const Planned p(rng);
    std::vector<int32_t> owners(static_cast<size_t>(p.counts.leaves));  // of each leaf of the line
    const auto take = [&](const Range& range) {
      for (int32_t i = 0; i < range.num_leaves; ++i)
        ++owners[static_cast<size_t>(range.set.start + range.number + i)];
    };
    const size_t each = static_cast<size_t>(p.shape.claims) + 1;
    int32_t owned = 0, claimed = 0;  // of an owned range, and behind it
    for (size_t i = 0; i < p.ranges.size(); ++i) {
      const int32_t share = p.ranges[i].num_leaves;
      if (i % each == 0) {
        owned = share;
        claimed = 0;
        take(p.ranges[i]);
        continue;
      }
      claimed += share;
      ASSERT_LE(claimed, kMaxClaimed) << seed;
      ASSERT_TRUE(owned > 0 || share == 0) << seed;  // or nobody might claim
      if (owned > 1 && i % each > 1 && i % each < each - 1) {
        ASSERT_LE(share, p.ranges[i - 1].num_leaves) << seed;
      }
    }
    const int32_t num_claimed = p.ranges[0].num_claimed;
    with_claims += num_claimed > 0;
    for (int32_t i = 0; i < num_claimed; ++i) {
      const Range& range = p.claimed[static_cast<size_t>(i)];
      ASSERT_GT(range.num_leaves, 0) << seed;
      take(range);
    }
    for (const int32_t owner : owners) ASSERT_EQ(owner, 1) << seed;
  }
  EXPECT_GT(with_claims, 20);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RangeSchedules, ::testing::Range(0, 8));

}  // namespace
}  // namespace attnfold
