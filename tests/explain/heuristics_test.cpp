// The engines' rules at inputs whose answers are known: worked by hand from the public sources that
// heuristics.h names, or by running them.
#include "explain/heuristics.h"

#include <gtest/gtest.h>

#include <numeric>

namespace attnfold::explain {
namespace {

constexpr int64_t kSms = 132, kHeads = 32, kKvHeads = 8, kPage = 16;

TEST(VllmRule, BlocksHoldPowersOfTwoRows) {
  EXPECT_EQ(vllm::block_m(1), 16);
  EXPECT_EQ(vllm::block_m(16), 16);
  EXPECT_EQ(vllm::block_m(17), 32);
  EXPECT_EQ(vllm::block_m(71), 128);
  EXPECT_EQ(vllm::block_q(16, 4), 4);
  EXPECT_EQ(vllm::block_q(16, 3), 5);
}

TEST(VllmRule, ThresholdMovesToACapturedSize) {
  EXPECT_EQ(vllm::threshold_3d(8, vllm::kMinGrid2d), 16);
  EXPECT_EQ(vllm::captured_threshold(42, {}), 42);
  EXPECT_EQ(vllm::captured_threshold(42, {1, 2, 4, 8, 16, 32, 40, 48}), 40);
  EXPECT_EQ(vllm::captured_threshold(44, {40, 48}), 40);  // the first of two as near
  EXPECT_EQ(vllm::captured_threshold(128, {1, 8, 64}), 64);
}

TEST(VllmRule, DecodeTiles) {
  EXPECT_EQ(vllm::decode_tile(2, 0, 128), 16);
  EXPECT_EQ(vllm::decode_tile(1, 0, 128), 32);
  EXPECT_EQ(vllm::decode_tile(2, 1024, 128), 32);
  EXPECT_EQ(vllm::decode_tile(2, 1024, 256), 32);
  EXPECT_EQ(vllm::decode_tile(2, 1024, 64), 16);
  EXPECT_EQ(vllm::decode_tile(2, 4096, 128), 16);
}

TEST(VllmRule, CascadeComparesWaves) {
  // 32 heads in one wave of 8 tiles; 8 requests x 8 kv heads x 8 tiles are 4 waves.
  vllm::CascadeCost cost = vllm::cascade_cost(8, kHeads, kKvHeads, 1024, kSms);
  EXPECT_EQ(cost.cascade, 8);
  EXPECT_EQ(cost.flash_decoding, 4);
  EXPECT_FALSE(cost.pays());
  cost = vllm::cascade_cost(64, kHeads, kKvHeads, 1024, kSms);  // 4096 blocks: 32 waves
  EXPECT_EQ(cost.flash_decoding, 32);
  EXPECT_TRUE(cost.pays());
  cost = vllm::cascade_cost(256, 64, 8, 4096, kSms);  // 128 blocks in one wave of 32 tiles
  EXPECT_EQ(cost.cascade, 32);
  EXPECT_EQ(cost.flash_decoding, 497);
}

/** Splits of each request at the flag `most`. */
std::vector<int64_t> sglang_splits(const std::vector<int64_t>& lengths, int64_t most) {
  const int64_t grid =
      sglang::token_grid(static_cast<int64_t>(lengths.size()), kHeads, kKvHeads, sglang::kBlockH);
  const sglang::Chunks chunks = sglang::chunks(lengths, kSms, grid, most);
  std::vector<int64_t> splits;
  for (const int64_t s : lengths) splits.push_back(sglang::splits(s, chunks));
  return splits;
}

std::vector<int64_t> equal(size_t n, int64_t s) { return std::vector<int64_t>(n, s); }

std::vector<int64_t> long_and_short() {
  std::vector<int64_t> lengths{65536};
  lengths.insert(lengths.end(), 15, 512);
  return lengths;
}

TEST(SglangRule, WorkedAnswers) {
  EXPECT_EQ(sglang_splits(equal(1, 2560), 8)[0], 8);
  EXPECT_EQ(sglang_splits(equal(1, 2560), 32)[0], 32);
  EXPECT_EQ(sglang_splits(equal(1, 32768), 8)[0], 8);
  EXPECT_EQ(sglang_splits(equal(1, 32768), 32)[0], 32);
  EXPECT_EQ(sglang_splits(equal(4, 8192), 8)[0], 8);
  EXPECT_EQ(sglang_splits(equal(4, 8192), 32)[0], 29);
  EXPECT_EQ(sglang_splits(equal(16, 4096), 8)[0], 7);
  EXPECT_EQ(sglang_splits(equal(16, 4096), 32)[0], 7);
  EXPECT_EQ(sglang_splits(equal(64, 4096), 8)[0], 2);
  EXPECT_EQ(sglang_splits(equal(64, 4096), 32)[0], 2);
  EXPECT_EQ(sglang_splits(long_and_short(), 8)[0], 8);
  EXPECT_EQ(sglang_splits(long_and_short(), 8)[1], 1);
}

TEST(SglangRule, LengthsWithinAFourthCountAsEqual) {
  // 8 * 1000 < 10 * 801: one chunk by length; at 800 two.
  EXPECT_EQ(sglang::chunks({1000, 801}, kSms, 64, 8).by_length, 1000);
  EXPECT_EQ(sglang::chunks({1000, 800}, kSms, 64, 8).by_length, 500);
}

TEST(SglangRule, SplitsHoldMultiplesOf32Keys) {
  EXPECT_EQ(sglang::split_keys(2560, 8), 320);
  EXPECT_EQ(sglang::split_keys(2561, 8), 352);
  EXPECT_EQ(sglang::split_keys(1, 1), 32);
}

TEST(SglangRule, LatentCap) {
  EXPECT_EQ(sglang::latent_max_splits(8, 132, 131072), 256);
  EXPECT_EQ(sglang::latent_max_splits(8, 132, 2048), 64);
  EXPECT_EQ(sglang::latent_max_splits(8, 132, 64), 8);
}

/** Keys of a chunk and splits of the first request, as the tensor-core planner chooses. */
std::pair<int64_t, int64_t> flashinfer_answer(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> pages;
  for (const int64_t s : lengths) pages.push_back(ceil_div(s, kPage));
  const auto blocks = [&](int64_t chunk) {
    return std::accumulate(pages.begin(), pages.end(), int64_t{0},
                           [&](int64_t n, int64_t p) { return n + ceil_div(p, chunk); });
  };
  const int64_t chunk = flashinfer::smallest_chunk(flashinfer::smallest_pages(kPage),
                                                   *std::max_element(pages.begin(), pages.end()),
                                                   2 * kSms / kKvHeads, blocks);
  return {chunk * kPage, ceil_div(pages[0], chunk)};
}

TEST(FlashInferRule, WorkedAnswers) {
  using Answer = std::pair<int64_t, int64_t>;
  EXPECT_EQ(flashinfer_answer(equal(1, 2560)), Answer(128, 20));
  EXPECT_EQ(flashinfer_answer(equal(1, 32768)), Answer(1008, 33));
  EXPECT_EQ(flashinfer_answer(equal(4, 8192)), Answer(1024, 8));
  EXPECT_EQ(flashinfer_answer(equal(16, 4096)), Answer(2048, 2));
  EXPECT_EQ(flashinfer_answer(equal(64, 4096)), Answer(4096, 1));
  EXPECT_EQ(flashinfer_answer(long_and_short()).second, 18);
  // A request of 4096 keys: alone, and among 32 like it.
  EXPECT_EQ(flashinfer_answer(equal(1, 4096)).second, 32);
  EXPECT_EQ(flashinfer_answer(equal(32, 4096)).second, 1);
}

TEST(FlashInferRule, SmallestChunkIsTheSmallest) {
  for (int64_t pages = 1; pages < 200; ++pages) {
    for (int64_t limit = 1; limit < 40; limit += 3) {
      const auto blocks = [&](int64_t chunk) { return ceil_div(pages, chunk); };
      const int64_t chunk = flashinfer::smallest_chunk(1, pages, limit, blocks);
      EXPECT_LE(blocks(chunk), limit);
      if (chunk > 1) {
        EXPECT_GT(blocks(chunk - 1), limit);
      }
    }
  }
}

TEST(FlashInferRule, TileRows) {
  EXPECT_EQ(flashinfer::cta_tile_q(4, 128, 128), 16);
  EXPECT_EQ(flashinfer::cta_tile_q(17, 128, 128), 64);
  EXPECT_EQ(flashinfer::cta_tile_q(65, 128, 128), 128);
  EXPECT_EQ(flashinfer::cta_tile_q(65, 256, 256), 64);
  EXPECT_EQ(flashinfer::cta_tile_q(65, 576, 512), 32);
  EXPECT_EQ(flashinfer::cta_tile_q(32, 576, 512), 16);
  EXPECT_EQ(flashinfer::cta_tile_q(65, 512, 128), 16);
}

struct Fa3Answer {
  int64_t bound;
  std::vector<int64_t> splits;
};

/** Decodes at 32/8 heads of 128, pages that TMA cannot load, lengths that vary. */
Fa3Answer fa3_answer(const std::vector<int64_t>& lengths) {
  const fa3::Tile tile = fa3::tile_size(128, 128, true, false, true, 2);
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  const int64_t bound =
      fa3::split_bound({kKvHeads, 1, ceil_div(longest, tile.n), longest * 256 * 2, kSms, true});
  int64_t sum = 0;
  for (const int64_t s : lengths) sum += ceil_div(s, tile.n);
  const int64_t per_split = fa3::blocks_per_split(sum, kKvHeads, kSms);
  Fa3Answer answer{bound, {}};
  for (const int64_t s : lengths) {
    answer.splits.push_back(fa3::dynamic_splits(ceil_div(s, tile.n), per_split, bound));
  }
  return answer;
}

TEST(Fa3Rule, WorkedAnswers) {
  const fa3::Tile tile = fa3::tile_size(128, 128, true, false, true, 2);
  EXPECT_EQ(tile.m, 128);
  EXPECT_EQ(tile.n, 128);
  struct Case {
    std::vector<int64_t> lengths;
    int64_t bound, splits;
  };
  for (const Case& c : {Case{equal(1, 2560), 14, 10}, Case{equal(1, 32768), 15, 15},
                        Case{equal(4, 8192), 15, 4}, Case{equal(16, 4096), 14, 1},
                        Case{equal(64, 4096), 14, 1}, Case{long_and_short(), 15, 14}}) {
    const Fa3Answer answer = fa3_answer(c.lengths);
    EXPECT_EQ(answer.bound, c.bound) << c.lengths.size() << " x " << c.lengths[0];
    EXPECT_EQ(answer.splits[0], c.splits) << c.lengths.size() << " x " << c.lengths[0];
  }
  EXPECT_EQ(fa3_answer(long_and_short()).splits[1], 1);
  // 512 keys alone: the device would take 4, the host's bound is 1 at 4 blocks.
  EXPECT_EQ(fa3::dynamic_splits(4, fa3::blocks_per_split(4, kKvHeads, kSms), 128), 4);
  EXPECT_EQ(fa3_answer(equal(1, 512)).bound, 1);
}

TEST(Fa3Rule, FullMachinesSplitOnlyLongHeadsReadOften) {
  EXPECT_EQ(fa3::split_bound({106, 1, 64, int64_t{60} << 20, kSms, false}), 1);
  EXPECT_EQ(fa3::split_bound({264, 264, 64, int64_t{60} << 20, kSms, false}), 2);
  EXPECT_EQ(fa3::split_bound({264, 264, 64, int64_t{60} << 20, kSms, true}), 1);
  EXPECT_EQ(fa3::split_bound({264, 264, 64, int64_t{50} << 20, kSms, false}), 1);
}

TEST(Fa3Rule, Tiles) {
  const auto n = [](int64_t d, int64_t d_vo, bool causal, bool local, bool paged, int64_t bytes) {
    return fa3::tile_size(d, d_vo, causal, local, paged, bytes).n;
  };
  EXPECT_EQ(n(128, 128, false, false, false, 2), 176);
  EXPECT_EQ(n(128, 128, true, false, false, 2), 128);
  EXPECT_EQ(n(256, 256, false, false, false, 2), 80);
  EXPECT_EQ(n(256, 256, false, true, false, 2), 64);
  EXPECT_EQ(n(64, 64, true, false, false, 2), 128);
  EXPECT_EQ(n(64, 64, false, false, false, 2), 192);
  EXPECT_EQ(n(128, 128, true, false, true, 1), 160);
  EXPECT_EQ(fa3::tile_size(64, 64, true, false, false, 2).m, 192);
}

TEST(Fa2Rule, OnlySplitsThatShortenCount) {
  EXPECT_EQ(fa2::block_n(64), 256);
  EXPECT_EQ(fa2::block_n(128), 128);
  EXPECT_EQ(fa2::block_n(256), 64);
  EXPECT_EQ(fa2::num_splits(212, kSms, 64, 128), 1);  // 80 % of 264 slots
  // 8 blocks, 20 key blocks: of 17..20 splits, which are all within 85 % of 20, only 20 shortens.
  EXPECT_EQ(fa2::num_splits(8, kSms, 20, 128), 20);
  // 256 key blocks: 28 of 33 would do, and 29 are the fewest that shorten (256/29 = 9, 256/28 =
  // 10).
  EXPECT_EQ(fa2::num_splits(8, kSms, 256, 128), 29);
  EXPECT_EQ(fa2::num_splits(8, kSms, 1, 128), 1);
}

TEST(FlashMlaRule, PartsCoverEveryPageOnce) {
  EXPECT_EQ(flashmla::parts(132, 128, 1), 66);
  EXPECT_EQ(flashmla::parts(132, 16, 1), 132);
  EXPECT_EQ(flashmla::parts(8, 128, 8), 1);
  const std::vector<int64_t> lengths{100, 131072, 64, 1, 70000};
  std::vector<int64_t> pages(lengths.size(), 0);
  int32_t last_part = 0;
  for (const flashmla::Piece& piece : flashmla::pieces(lengths, 66)) {
    pages[static_cast<size_t>(piece.request)] += piece.pages;
    EXPECT_GE(piece.part, last_part);
    last_part = piece.part;
  }
  for (size_t r = 0; r < lengths.size(); ++r) EXPECT_EQ(pages[r], ceil_div(lengths[r], 64));
  EXPECT_LT(last_part, 66);
}

}  // namespace
}  // namespace attnfold::explain
