// A cache that grew by append, forked by copy on write, and moved between pools holds the same
// requests: the same bits.
#include <gtest/gtest.h>

#include <random>

#include "conformance/suite.h"

namespace attnfold::check {
namespace {

using cases::Lengths;

/** A random paged call without a window to the left: rows see keys from the first on.  Appending
 * does not quantise. */
Call any_paged_call(uint64_t seed) {
  for (std::mt19937_64 rng(seed);;) {
    Spec spec = random_case(rng);
    attnfold_problem& p = spec.problem;  // blocks that nobody lists have no page to append to
    p.sparse_block_size = p.sparse_local_blocks = p.sparse_vertical_stride = p.sparse_head_step = 0;
    if (spec.problem.kv_storage != ATTNFOLD_KV_PAGED) continue;
    if (is_8_bit(static_cast<DType>(spec.problem.kv_dtype))) continue;
    spec.problem.window_left = -1;
    spec.problem.attention_chunk = 0;
    return generate(spec, seed);
  }
}

/** The same call over a cache of NaN. */
Call without_keys(const Call& call) {
  Call empty = cases::deep_copy(call);
  cases::fill_buffer(*empty.k, static_cast<DType>(call.problem.kv_dtype), cases::kNaN);
  cases::fill_buffer(*empty.v, static_cast<DType>(call.problem.kv_dtype), cases::kNaN);
  return empty;
}

class CacheRandom : public ::testing::TestWithParam<int> {};

TEST_P(CacheRandom, AppendedInAnyStepsIsTheSame) {
  const uint64_t seed = test::seed() + 7000 + static_cast<uint64_t>(GetParam());
  const cases::Context x{seed, nullptr};
  const Call call = any_paged_call(seed);
  Call grown = without_keys(call);
  std::mt19937_64 rng(seed + 1);
  Lengths done(static_cast<size_t>(call.batch), 0), end;  // of the keys that some row sees
  for (int32_t r = 0; r < call.batch; ++r) {
    const int32_t qo_len = call.qo_indptr[r + 1] - call.qo_indptr[r];
    end.push_back(static_cast<int32_t>(seen_keys(call.problem, qo_len, call.kv_len[r]).end));
  }
  while (done != end) {
    Lengths next = done;
    for (int32_t r = 0; r < call.batch; ++r) {
      const int32_t step = std::uniform_int_distribution<int32_t>(0, 1 + end[r] / 3)(rng);
      next[r] = std::min(end[r], done[r] + step);
    }
    ATTNFOLD_ASSERT_HOLDS(cases::append_keys(call, done, next, grown)) << "seed " << seed;
    done = next;
  }
  Answer direct, appended;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), direct)) << "seed " << seed;
  ATTNFOLD_ASSERT_HOLDS(cases::run(grown, cases::execution(x, 3, seed), appended));
  ATTNFOLD_ASSERT_HOLDS(cases::same_bytes(call, direct, appended, "a cache filled by append"))
      << "seed " << seed;
}

INSTANTIATE_TEST_SUITE_P(Seeds, CacheRandom, ::testing::Range(0, 12));

/** Requests with the same first `shared` keys, and then each its own. */
Call families(const Lengths& qo_len, const Lengths& kv_len, int32_t page_size, int32_t shared,
              uint64_t seed) {
  Call call = cases::zero_call(
      cases::make_spec({4, 2, 64, 32}, DType::bf16, page_size, cases::kCausal, qo_len, kv_len));
  cases::fill_noise(call, seed);
  const auto family = [&](int r, int t) { return t < shared ? 0 : r; };
  cases::fill_k(call, [&](int r, int t, int h, int e) {
    return cases::noise(seed + 1, family(r, t), t, h, e);
  });
  cases::fill_v(call, [&](int r, int t, int h, int e) {
    return cases::noise(seed + 2, family(r, t), t, h, e);
  });
  return call;
}

TEST(Cache, AForkedRequestHasTheBitsOfOneThatWasNot) {
  const cases::Context x = test::context();
  for (const int32_t page_size : {1, 16, 19}) {
    for (const int32_t shared : {1, 16, 130}) {
      const Lengths kv_len = {shared + 9, shared + 3, shared + 40};
      const Call apart = families({1, 2, 7}, kv_len, page_size, shared, x.seed);
      Call forked = without_keys(apart);
      ATTNFOLD_ASSERT_HOLDS(
          cases::append_keys(apart, {0, 0, 0}, {shared, 0, 0}, forked));  // the first alone
      // The others share its whole pages, and get a copy of the one that it will write to.
      const int32_t whole = shared / page_size;
      std::vector<int32_t> pairs;
      for (int32_t r = 1; r < 3; ++r) {
        int32_t* table = forked.block_table.data() + r * forked.block_table_stride;
        std::copy_n(forked.block_table.data(), whole, table);
        if (shared % page_size != 0)
          pairs.insert(pairs.end(), {forked.block_table[whole], table[whole]});
      }
      const attnfold_kv_pool pool = cases::pool_of(forked);
      ASSERT_EQ(attnfold_copy_pages(&pool, &pool, pairs.data(),
                                    static_cast<int64_t>(pairs.size() / 2), nullptr),
                ATTNFOLD_OK)
          << attnfold_last_error();
      ATTNFOLD_ASSERT_HOLDS(
          cases::append_keys(apart, {shared, shared, shared}, apart.kv_len, forked));
      Answer want, got;
      ATTNFOLD_ASSERT_HOLDS(cases::run(apart, cases::execution(x), want));
      ATTNFOLD_ASSERT_HOLDS(cases::judge_answer(apart, want));
      ATTNFOLD_ASSERT_HOLDS(cases::run(forked, cases::execution(x, 3), got));
      ATTNFOLD_ASSERT_HOLDS(cases::same_bytes(apart, want, got, "forked"))
          << "pages of " << page_size << ", " << shared << " shared keys";
    }
  }
}

TEST(Cache, SwappedOutAndInAgainOnOtherPages) {
  const cases::Context x = test::context();
  const Call call = families({1, 3}, {100, 70}, 16, 0, x.seed);
  Call swapped = cases::with_extra_pages(call, 3, cases::kNaN);
  Call outside = without_keys(swapped);
  const int32_t num_pages = static_cast<int32_t>(swapped.problem.num_pages);
  std::vector<int32_t> out, in;
  std::vector<int32_t> table = swapped.block_table;
  for (int32_t& id : table) {
    if (id < 0 || id >= num_pages) continue;
    const int32_t parked = num_pages - 1 - id, back = (id + 3) % num_pages;
    out.insert(out.end(), {id, parked});
    in.insert(in.end(), {parked, back});
    id = back;
  }
  const attnfold_kv_pool near = cases::pool_of(swapped), far = cases::pool_of(outside);
  const int64_t n = static_cast<int64_t>(out.size() / 2);
  ASSERT_EQ(attnfold_copy_pages(&near, &far, out.data(), n, nullptr), ATTNFOLD_OK);
  cases::fill_buffer(*swapped.k, DType::bf16, cases::kNaN);
  cases::fill_buffer(*swapped.v, DType::bf16, cases::kNaN);
  ASSERT_EQ(attnfold_copy_pages(&far, &near, in.data(), n, nullptr), ATTNFOLD_OK);
  swapped.block_table = table;
  Answer want, got;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), want));
  ATTNFOLD_ASSERT_HOLDS(cases::run(swapped, cases::execution(x), got));
  ATTNFOLD_ASSERT_HOLDS(cases::same_bytes(call, want, got, "swapped out and in"));
}

/** A manager with blocks of 64 tokens over a kernel with pages of 16. */
TEST(Cache, BlocksOfAManagerAsPagesOfTheKernel) {
  const cases::Context x = test::context();
  const Call by_block = families({1, 5}, {300, 65}, 64, 0, x.seed);
  Call by_page = by_block;
  const int32_t n = 4, width = static_cast<int32_t>(by_block.block_table_stride);
  by_page.problem.page_size = 16;
  by_page.problem.num_pages *= n;
  for (Strides* s : {&by_page.k_strides, &by_page.v_strides}) s->page /= n;
  by_page.block_table_stride = int64_t{width} * n;
  by_page.block_table.assign(static_cast<size_t>(2 * width * n), 0x7ffffff0);
  const int32_t used[] = {5, 2};
  ASSERT_EQ(attnfold_map_to_kernel_pages(2, width, 64, 16, by_block.problem.num_pages,
                                         by_block.block_table.data(), width, used,
                                         by_page.block_table.data(), by_page.block_table_stride),
            ATTNFOLD_OK)
      << attnfold_last_error();
  Answer want, got;
  ATTNFOLD_ASSERT_HOLDS(cases::run(by_block, cases::execution(x), want));
  ATTNFOLD_ASSERT_HOLDS(cases::judge_answer(by_block, want));
  ATTNFOLD_ASSERT_HOLDS(cases::run(by_page, cases::execution(x), got));
  ATTNFOLD_ASSERT_HOLDS(cases::same_bytes(by_block, want, got, "by pages of 16"));
}

}  // namespace
}  // namespace attnfold::check
