// The cache calls on the device: the bytes of the same calls on the CPU, in every gap of the pool
// too.
#include "cuda/pools.h"

namespace attnfold::check::device_test {
namespace {

using Cache = DeviceTestWith<int>;

TEST_P(Cache, AppendIsTheCpus) {
  const uint64_t seed = test::seed() + 20000 + static_cast<uint64_t>(GetParam());
  std::mt19937_64 rng(seed);
  for (int to = 0; to < kNumDTypes; ++to) {
    for (const DType from : {DType::f32, DType::f16, DType::bf16}) {
      const bool even = rng() % 3 == 0;
      TwinPool pool(rng, static_cast<DType>(to), even);
      TwinRows rows(rng, pool, from, below(rng, rng() % 4 ? 20 : 200), even);
      ATTNFOLD_ASSERT_HOLDS(append_both(pool, rows))
          << seed << ", " << dtype_name(from) << " to " << dtype_name(static_cast<DType>(to));
    }
  }
}

TEST_P(Cache, CopiesOfPagesAreTheCpus) {
  const uint64_t seed = test::seed() + 21000 + static_cast<uint64_t>(GetParam());
  std::mt19937_64 rng(seed);
  for (int i = 0; i < 8; ++i) {
    TwinPool from(rng, static_cast<DType>(rng() % kNumDTypes), rng() % 2);
    TwinPool other(rng, from);
    const bool within = rng() % 2;
    TwinPool& to = within ? from : other;
    std::vector<int32_t> list(static_cast<size_t>(2 * below(rng, 60) + 2));
    for (size_t j = 0; j < list.size(); ++j)
      list[j] =
          static_cast<int32_t>(below(rng, j % 2 ? to.shape().num_pages : from.shape().num_pages));
    Twin<int32_t> pairs(std::move(list));
    const int64_t num_pairs = static_cast<int64_t>(pairs.values().size() / 2) - below(rng, 2);
    const attnfold_kv_pool host[] = {from.on_host(), to.on_host()},
                           device[] = {from.on_device(), to.on_device()};
    const attnfold_execution e = on_device();
    ASSERT_EQ(
        attnfold_copy_pages(&host[0], &host[within ? 0 : 1], pairs.host(), num_pairs, nullptr),
        ATTNFOLD_OK)
        << attnfold_last_error();
    ASSERT_EQ(
        attnfold_copy_pages(&device[0], &device[within ? 0 : 1], pairs.device(), num_pairs, &e),
        ATTNFOLD_OK)
        << attnfold_last_error();
    require_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    ATTNFOLD_ASSERT_HOLDS(to.differs(false)) << seed << ", " << i;
    ATTNFOLD_ASSERT_HOLDS(from.differs(false)) << seed << ", " << i;
  }
}

TEST_P(Cache, SlotsAreTheCpus) {
  const uint64_t seed = test::seed() + 22000 + static_cast<uint64_t>(GetParam());
  std::mt19937_64 rng(seed);
  for (int i = 0; i < 16; ++i) {
    const int32_t batch = static_cast<int32_t>(below(rng, 9));
    const int32_t page_size = 1 + static_cast<int32_t>(below(rng, 20)), num_pages = 500;
    std::vector<int32_t> qo_indptr = {0}, kv_len, indptr = {0}, ids, table;
    std::vector<int64_t> positions;
    const int32_t stride = 12;
    for (int32_t r = 0; r < batch; ++r) {
      const int32_t pages = 1 + static_cast<int32_t>(below(rng, stride));
      const int32_t keys = 1 + static_cast<int32_t>(below(rng, pages * page_size));
      const int32_t tokens = static_cast<int32_t>(below(rng, std::min(keys, 30) + 1));
      const bool padding = rng() % 4 == 0;
      qo_indptr.push_back(qo_indptr.back() + tokens);
      kv_len.push_back(padding ? 0 : keys);
      indptr.push_back(indptr.back() + pages);
      for (int32_t t = 0; t < tokens; ++t) positions.push_back(padding ? -1 : below(rng, keys));
      for (int32_t p = 0; p < stride; ++p) {
        table.push_back(p < pages ? static_cast<int32_t>(below(rng, num_pages)) : 0x7ffffff0);
        if (p < pages) ids.push_back(table.back());
      }
    }
    positions.push_back(0);  // so that there is something to copy
    kv_len.push_back(0);
    table.push_back(0);
    ids.push_back(0);
    const int64_t num_slots = qo_indptr.back() + below(rng, 5);
    Twin<int32_t> qo(qo_indptr), lens(kv_len), csr(indptr), pages(rng() % 2 ? table : ids);
    Twin<int64_t> places(positions),
        slots(std::vector<int64_t>(static_cast<size_t>(num_slots) + 2, 99));
    const bool by_table = pages.values().size() == table.size() && pages.values() == table;
    const bool given = rng() % 2;
    const auto lengths = [&](bool device) {
      attnfold_lengths l = ATTNFOLD_LENGTHS_INIT;
      l.batch = batch;
      l.qo_indptr = device ? qo.device() : qo.host();
      if (!given || i % 2) l.kv_len = device ? lens.device() : lens.host();
      (by_table ? l.block_table : l.kv_indices) = device ? pages.device() : pages.host();
      if (by_table) l.block_table_stride = stride;
      if (!by_table) l.kv_indptr = device ? csr.device() : csr.host();
      return l;
    };
    const attnfold_lengths host = lengths(false), device = lengths(true);
    const attnfold_execution e = on_device();
    ASSERT_EQ(attnfold_slot_mapping(&host, page_size, num_pages, given ? places.host() : nullptr,
                                    num_slots, slots.host() + 1),
              ATTNFOLD_OK)
        << attnfold_last_error();
    ASSERT_EQ(
        attnfold_slot_mapping_on(&device, page_size, num_pages, given ? places.device() : nullptr,
                                 num_slots, slots.device() + 1, &e),
        ATTNFOLD_OK)
        << attnfold_last_error();
    require_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    ATTNFOLD_ASSERT_HOLDS(slots.differs(DType::f32, false)) << seed << ", " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Cache, ::testing::Range(0, 16));

/** Blocks of many tokens, each slot named many times, by tokens of the same block and of others. */
TEST_F(DeviceTest, TheLastOfManyTokensInOneSlotWins) {
  for (const int64_t num_tokens : {1056, 1057, 5000, 70000}) {
    std::mt19937_64 rng(test::seed() + static_cast<uint64_t>(num_tokens));
    TwinPool pool(rng, DType::bf16, true);
    TwinRows rows(rng, pool, DType::bf16, num_tokens, true);
    ATTNFOLD_EXPECT_HOLDS(append_both(pool, rows)) << num_tokens;
  }
}

/** What the host cannot check: nothing of it reaches memory that is not the call's. */
TEST_F(DeviceTest, SlotsAndPagesThatAPoolLacksArePassedOver) {
  std::mt19937_64 rng(test::seed());
  for (int i = 0; i < 20; ++i) {
    TwinPool pool(rng, static_cast<DType>(rng() % 3));
    TwinRows rows(rng, pool, DType::f32, 40);
    std::vector<int64_t> sound = rows.slots().values();
    for (int64_t& slot : rows.slots().values()) {
      if (rng() % 2) continue;
      const int64_t bad[] = {pool.num_slots(), pool.num_slots() + 1, -2, INT64_MIN, INT64_MAX};
      slot = bad[rng() % std::size(bad)];
    }
    rows.slots().send();
    for (size_t j = 0; j < sound.size(); ++j) {
      int64_t& slot = rows.slots().values()[j];
      if (slot < 0 || slot >= pool.num_slots()) slot = -1;
    }
    ATTNFOLD_ASSERT_HOLDS(append_both(pool, rows)) << i;

    const int32_t last = static_cast<int32_t>(pool.shape().num_pages) - 1;
    Twin<int32_t> pairs({last, 0, -1, 0, last + 1, 0, 0, last + 1, 0, INT32_MIN, INT32_MAX, last});
    const attnfold_kv_pool host = pool.on_host(), device = pool.on_device();
    const attnfold_execution e = on_device();
    ASSERT_EQ(attnfold_copy_pages(&host, &host, pairs.host(), 1, nullptr), ATTNFOLD_OK);
    ASSERT_EQ(attnfold_copy_pages(&device, &device, pairs.device(), 6, &e), ATTNFOLD_OK);
    require_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    ATTNFOLD_ASSERT_HOLDS(pool.differs(false)) << i;
  }
}

}  // namespace
}  // namespace attnfold::check::device_test
