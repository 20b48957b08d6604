// A run takes its memory from the workspace alone: counted at operator new, which every allocation
// of the library goes through.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "api/small_call.h"
#include "attnfold/cache.h"

namespace {
std::atomic<long> g_num_allocations{0};
}

// Not inlined: gcc would see one of a pair without the other, and warn.
[[gnu::noinline]] void* operator new(size_t bytes) {
  ++g_num_allocations;
  if (void* p = std::malloc(bytes > 0 ? bytes : 1)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace attnfold::api_test {
namespace {

void one_after_the_other(void*, int32_t n, void (*body)(void*, int32_t), void* context) {
  for (int32_t i = 0; i < n; ++i) body(context, i);
}

TEST(Allocation, CreateIsCounted) {
  SmallCall call;
  const long before = g_num_allocations;
  const PlanPtr plan = make_plan(call, execution(1, 1));
  EXPECT_GT(g_num_allocations, before);
}

TEST(Allocation, RunAllocatesNothingAlsoWhereUnitsAreCut) {
  SmallCall call({{1, 5000}, {5, 700}, {40, 90}, {1, 0}});
  attnfold_execution e = execution(4, 7);
  e.parallel_for = one_after_the_other;
  const PlanPtr plan = make_plan(call, e);
  attnfold_plan_report report{};
  report.struct_size = sizeof(report);
  ASSERT_EQ(attnfold_plan_get_report(plan.get(), &report), ATTNFOLD_OK);
  ASSERT_GT(report.num_cuts, 0);
  std::vector<char> workspace(attnfold_plan_workspace_bytes(plan.get()));
  const long before = g_num_allocations;
  const attnfold_status status =
      attnfold_plan_run(plan.get(), &call.tensors, workspace.data(), workspace.size(), nullptr);
  const long after = g_num_allocations;
  EXPECT_EQ(status, ATTNFOLD_OK);
  EXPECT_EQ(after - before, 0);
}

/** Requests 1.. get the first pages of request 0. */
void share_pages(SmallCall& call, int32_t pages) {
  const auto stride = call.lengths.block_table_stride;
  for (int32_t r = 1; r < call.lengths.batch; ++r) {
    for (int32_t i = 0; i < pages; ++i) {
      call.block_table[static_cast<size_t>(r * stride + i)] =
          call.block_table[static_cast<size_t>(i)];
    }
  }
}

TEST(Allocation, SharedPrefixesAllocateNothing) {
  SmallCall call({{1, 5000}, {2, 4700}, {1, 4090}, {1, 300}});
  share_pages(call, 18);
  attnfold_execution e = execution(4, 7);
  e.parallel_for = one_after_the_other;
  e.prefix_use = ATTNFOLD_PREFIX_ALWAYS;
  const PlanPtr plan = make_plan(call, e);
  std::vector<char> workspace(attnfold_plan_workspace_bytes(plan.get()));
  const int32_t keys[] = {200, 288}, indptr[] = {0, 4, 6}, requests[] = {0, 1, 2, 3, 2, 0};
  for (const int32_t num_groups : {0, 2}) {
    call.lengths.num_prefix_groups = num_groups;
    call.lengths.prefix_keys = keys;
    call.lengths.prefix_indptr = indptr;
    call.lengths.prefix_requests = requests;
    const long before = g_num_allocations;
    const attnfold_status updated = attnfold_plan_update(plan.get(), &call.lengths, nullptr);
    const attnfold_status ran =
        attnfold_plan_run(plan.get(), &call.tensors, workspace.data(), workspace.size(), nullptr);
    const long after = g_num_allocations;
    EXPECT_EQ(updated, ATTNFOLD_OK) << attnfold_last_error();
    EXPECT_EQ(ran, ATTNFOLD_OK);
    EXPECT_EQ(after - before, 0);
    attnfold_plan_report report{};
    report.struct_size = sizeof(report);
    ASSERT_EQ(attnfold_plan_get_report(plan.get(), &report), ATTNFOLD_OK);
    EXPECT_GT(report.num_prefix_groups, 0);
  }
}

TEST(Allocation, UpdateAllocatesNothing) {
  SmallCall call;
  const PlanPtr plan = make_plan(call, execution(2, 3));
  const long before = g_num_allocations;
  const attnfold_status status = attnfold_plan_update(plan.get(), &call.lengths, nullptr);
  const long after = g_num_allocations;
  EXPECT_EQ(status, ATTNFOLD_OK);
  EXPECT_EQ(after - before, 0);
}

/** Allocations of a call that must succeed. */
template <class Call>
long num_allocations(Call call) {
  const long before = g_num_allocations;
  const attnfold_status status = call();
  const long after = g_num_allocations;
  EXPECT_EQ(status, ATTNFOLD_OK) << attnfold_last_error();
  return after - before;
}

TEST(Allocation, TheCallsRoundTheCacheAndOfStatesAllocateNothing) {
  SmallCall call;
  attnfold_kv_pool pool = ATTNFOLD_KV_POOL_INIT;
  pool.k = call.k.data();
  pool.v = call.v.data();
  pool.kv_dtype = ATTNFOLD_F32;
  pool.kv_heads = kKvHeads;
  pool.head_dim_qk = pool.head_dim_vo = kHeadDim;
  pool.page_size = kPageSize;
  pool.num_pages = call.problem.num_pages;
  const int64_t n = 2000;  // several shares
  std::vector<int64_t> slots(static_cast<size_t>(n), 5);
  const std::vector<float> new_rows(static_cast<size_t>(n) * kKvHeads * kHeadDim, 0.5f);
  attnfold_kv_rows rows = ATTNFOLD_KV_ROWS_INIT;
  rows.num_tokens = n;
  rows.k = rows.v = new_rows.data();
  rows.dtype = ATTNFOLD_F32;
  rows.slots = slots.data();
  attnfold_execution e = execution(4, 0);
  e.parallel_for = one_after_the_other;
  const int32_t pairs[] = {0, 1, 1, 2}, blocks[] = {3, -1};
  int32_t pages[4];
  attnfold_state state = ATTNFOLD_STATE_INIT, merged = ATTNFOLD_STATE_INIT;
  std::vector<float> o(200 * 64), lse(200), out_o(200 * 64), out_lse(200);
  state.o = o.data();
  state.lse = lse.data();
  merged.o = out_o.data();
  merged.lse = out_lse.data();
  const std::vector<attnfold_state> states(32, state);
  EXPECT_EQ(num_allocations([&] {
              return attnfold_merge_parallel(100, 2, 64, states.data(), 32, &merged, nullptr, 0,
                                             &e);
            }),
            0);
  EXPECT_EQ(
      num_allocations([&] { return attnfold_convert_state(100, 2, 64, &state, &merged, &e); }), 0);
  EXPECT_EQ(num_allocations([&] { return attnfold_append(&pool, &rows, &e); }), 0);
  EXPECT_EQ(num_allocations([&] { return attnfold_copy_pages(&pool, &pool, pairs, 2, &e); }), 0);
  EXPECT_EQ(num_allocations([&] {
              return attnfold_slot_mapping(&call.lengths, kPageSize, pool.num_pages, nullptr, n,
                                           slots.data());
            }),
            0);
  EXPECT_EQ(num_allocations([&] {
              return attnfold_map_to_kernel_pages(1, 2, 32, 16, 4, blocks, 2, nullptr, pages, 4);
            }),
            0);
}

}  // namespace
}  // namespace attnfold::api_test
