// Prefix groups that a caller names: what is wrong with them is named, and what is right is served.
#include <gtest/gtest.h>

#include <vector>

#include "api/small_call.h"

namespace attnfold::api_test {
namespace {

/** Four decodes; 0 to 2 have the first 20 pages of request 0, 0 and 1 of these ten more. */
struct Prefixes {
  SmallCall call{{{1, 700}, {1, 500}, {1, 400}, {1, 600}}};
  std::vector<int32_t> keys = {320, 480}, indptr = {0, 3, 5}, requests = {2, 1, 0, 0, 1};

  Prefixes() {
    const size_t stride = static_cast<size_t>(call.lengths.block_table_stride);
    std::copy_n(call.block_table.begin(), 30, call.block_table.begin() + stride);
    std::copy_n(call.block_table.begin(), 20, call.block_table.begin() + 2 * stride);
    name_groups(2);
  }
  void name_groups(int32_t n) {
    call.lengths.num_prefix_groups = n;
    call.lengths.prefix_keys = keys.data();
    call.lengths.prefix_indptr = indptr.data();
    call.lengths.prefix_requests = requests.data();
  }
};

TEST(PrefixArguments, GroupsThatAgreeAreServed) {
  Prefixes named, found;
  found.name_groups(0);
  for (const attnfold_prefix_use use : {ATTNFOLD_PREFIX_AUTO, ATTNFOLD_PREFIX_ALWAYS}) {
    attnfold_execution e = execution(1, 2);
    e.prefix_use = use;
    EXPECT_TRUE(same_bytes(answer(named.call, e), answer(found.call, e)));
  }
  named.name_groups(0);
  named.call.lengths.prefix_keys = nullptr;
  EXPECT_FALSE(answer(named.call, execution(1, 1)).empty());
}

TEST(PrefixArguments, WhatIsWrongIsNamedAndTheLastGoodScheduleStays) {
  using P = Prefixes;
  struct Fault {
    const char* argument;
    void (*make)(P&);
  };
  const Fault faults[] = {
      {"num_prefix_groups", [](P& p) { p.call.lengths.num_prefix_groups = -1; }},
      {"prefix_keys", [](P& p) { p.call.lengths.prefix_keys = nullptr; }},
      {"prefix_indptr", [](P& p) { p.call.lengths.prefix_indptr = nullptr; }},
      {"prefix_requests", [](P& p) { p.call.lengths.prefix_requests = nullptr; }},
      {"prefix_indptr[0]", [](P& p) { p.indptr[0] = 1; }},
      {"prefix_indptr[2]", [](P& p) { p.indptr[2] = 2; }},
      {"prefix_keys[0]", [](P& p) { p.keys[0] = -1; }},
      {"prefix_keys[1]", [](P& p) { p.keys[1] = 319; }},
      {"prefix_keys[1]", [](P& p) { p.keys[1] = 501; }},  // past kv_len[1]
      {"prefix_requests[0]", [](P& p) { p.requests[0] = 4; }},
      {"prefix_requests[0]", [](P& p) { p.requests[0] = -1; }},
      {"prefix_requests[2]", [](P& p) { p.requests[2] = 1; }},  // twice
      {"prefix_requests[4]", [](P& p) { p.requests[4] = 3; }},  // of no group before
      {"block_table[3][0]", [](P& p) { p.requests[2] = 3; p.requests[3] = 1; p.requests[4] = 2; }},
      {"block_table[1][20]", [](P& p) { p.requests[3] = 2; p.keys[1] = 400; }},
      {"block_table[1][7]", [](P& p) { p.call.block_table[p.call.lengths.block_table_stride + 7] = 0; }},
  };
  for (const auto& [argument, make] : faults) {
    Prefixes good, bad;
    const PlanPtr plan = make_plan(good.call, execution(1, 3));
    ASSERT_NE(plan, nullptr);
    good.call.poison_outputs();
    ASSERT_EQ(run(plan.get(), good.call.tensors), ATTNFOLD_OK);
    const Bytes before = good.call.output_bytes();
    make(bad);
    EXPECT_EQ(attnfold_plan_update(plan.get(), &bad.call.lengths, nullptr),
              ATTNFOLD_INVALID_ARGUMENT)
        << argument;
    EXPECT_TRUE(names_argument(attnfold_last_error(), argument));
    good.call.poison_outputs();
    EXPECT_EQ(run(plan.get(), good.call.tensors), ATTNFOLD_OK) << attnfold_last_error();
    EXPECT_TRUE(same_bytes(good.call.output_bytes(), before)) << argument;
  }
}

TEST(PrefixArguments, RaggedKeysHaveNoGroups) {
  SmallCall call({{1, 160}, {1, 160}});
  call.problem.kv_storage = ATTNFOLD_KV_RAGGED;
  const std::vector<int32_t> kv_indptr = {0, 160, 320}, keys = {128}, indptr = {0, 2},
                             requests = {0, 1};
  call.lengths.block_table = nullptr;
  call.lengths.kv_indptr = kv_indptr.data();
  const PlanPtr plan = make_plan(call, execution(1, 1));
  call.lengths.num_prefix_groups = 1;
  call.lengths.prefix_keys = keys.data();
  call.lengths.prefix_indptr = indptr.data();
  call.lengths.prefix_requests = requests.data();
  EXPECT_EQ(attnfold_plan_update(plan.get(), &call.lengths, nullptr), ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_TRUE(names_argument(attnfold_last_error(), "num_prefix_groups"));
}

}  // namespace
}  // namespace attnfold::api_test
