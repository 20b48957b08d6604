// Shared prefixes, as plans show them: who shares what, and what it saves.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "property/lengths.h"

namespace attnfold::property {
namespace {

constexpr int32_t kLeaf = ATTNFOLD_LEAF, kSuperChunk = ATTNFOLD_SUPER_CHUNK;

/** Tables of pages that no two requests share. */
void give_own_pages(Step& step) {
  const int32_t longest = *std::max_element(step.kv_len.begin(), step.kv_len.end());
  step.stride = longest / step.page_size + 2;
  step.num_pages = step.stride * static_cast<int32_t>(step.kv_len.size());
  step.tables.resize(static_cast<size_t>(step.num_pages));
  std::iota(step.tables.begin(), step.tables.end(), 0);
}

/** Request `to` gets the first `keys` keys of request `from`, in whole pages. */
void share(Step& step, int32_t from, int32_t to, int32_t keys) {
  std::copy_n(step.tables.begin() + from * step.stride,
              std::min(keys / step.page_size, step.stride), step.tables.begin() + to * step.stride);
}

/** `batch` decodes on one prefix, with `own` keys each behind it. */
Step family(int32_t batch, int32_t prefix, int32_t own, int32_t qo_len = 1) {
  Step step;
  step.problem.qo_heads = 32;
  step.problem.kv_heads = 8;
  step.page_size = 16;
  step.qo_len.assign(static_cast<size_t>(batch), qo_len);
  step.kv_len.assign(static_cast<size_t>(batch), prefix + own);
  give_own_pages(step);
  for (int32_t r = 1; r < batch; ++r) share(step, 0, r, prefix);
  return step;
}

attnfold_plan_report planned(const Step& step, const Groups& groups = {}) {
  const PlanPointer plan = create(step);
  update(plan.get(), step, groups);
  return report_of(plan.get());
}

attnfold_plan_report planned(Step step, attnfold_prefix_use use) {
  step.prefix_use = use;
  return planned(step);
}

/** A random tree of prefixes: each request continues some prefix of an earlier one, or none. */
Step any_tree() {
  Step step = *any_step();
  if (step.kv_len.empty()) return step;
  step.page_size = *rc::gen::element(1, 3, 16, 64, 128, 200, 2048);
  give_own_pages(step);
  for (int32_t r = 1; r < static_cast<int32_t>(step.kv_len.size()); ++r) {
    if (*rc::gen::inRange(0, 4) == 0) continue;
    const int32_t from = *rc::gen::inRange(0, r);
    const int32_t most = std::min(step.kv_len[from], step.kv_len[r]);
    share(step, from, r, *rc::gen::oneOf(rc::gen::just(most), rc::gen::inRange(0, most + 1)));
  }
  return step;
}

TEST(PrefixProperty, SharedItemsReadPagesThatAllTheirRequestsHave) {
  EXPECT_TRUE(rc::check("the same pages, whole leaves, seen by every row", [] {
    const Step step = any_tree();
    const PlanPointer plan = create(step);
    update(plan.get(), step);
    for (const attnfold_plan_item& item : items_of(plan.get())) {
      if (item.num_requests == 1) continue;
      const int64_t begin = int64_t{item.leaf_begin} * kLeaf, end = int64_t{item.leaf_end} * kLeaf;
      std::set<int32_t> distinct(item.requests, item.requests + item.num_requests);
      RC_ASSERT(static_cast<int32_t>(distinct.size()) == item.num_requests);
      for (const int32_t r : distinct) {
        RC_ASSERT(step.kv_len[r] >= end);
        for (int64_t i = begin / step.page_size; i * step.page_size < end; ++i) {
          RC_ASSERT(step.tables.empty() ||
                    step.tables[static_cast<size_t>(r * step.stride + i)] ==
                        step.tables[static_cast<size_t>(item.request * step.stride + i)]);
        }
      }
    }
  }));
}

TEST(PrefixProperty, EveryLeafIsPlannedOnceWhateverIsShared) {
  EXPECT_TRUE(rc::check("leaves of each (request, token, kv head), from the first to the last", [] {
    Step step = any_tree();
    const auto leaves = [&](attnfold_prefix_use use) {
      step.prefix_use = use;
      const PlanPointer plan = create(step);
      update(plan.get(), step);
      std::map<std::pair<int32_t, int32_t>, std::vector<int32_t>> found;  // of a request's token 0
      for (const attnfold_plan_item& item : items_of(plan.get())) {
        if (item.qo_begin > 0) continue;
        for (int32_t k = 0; k < item.num_requests; ++k) {
          for (int32_t h = item.kv_head_begin; h < item.kv_head_begin + item.num_kv_heads; ++h) {
            std::vector<int32_t>& at = found[{item.requests[k], h}];
            for (int32_t leaf = item.leaf_begin; leaf < item.leaf_end; ++leaf) at.push_back(leaf);
          }
        }
      }
      for (auto& [key, all] : found) std::sort(all.begin(), all.end());
      return found;
    };
    RC_ASSERT(leaves(ATTNFOLD_PREFIX_OFF) == leaves(ATTNFOLD_PREFIX_AUTO));
    RC_ASSERT(leaves(ATTNFOLD_PREFIX_OFF) == leaves(ATTNFOLD_PREFIX_ALWAYS));
  }));
}

TEST(PrefixProperty, WhatIsSavedIsWhatIsNotRead) {
  EXPECT_TRUE(rc::check("kv_bytes falls by saved_kv_bytes, which pays for the states", [] {
    Step step = any_tree();
    step.num_workers = 1;
    step.cut_seed = 0;
    const attnfold_plan_report off = planned(step, ATTNFOLD_PREFIX_OFF),
                               on = planned(step, ATTNFOLD_PREFIX_AUTO),
                               always = planned(step, ATTNFOLD_PREFIX_ALWAYS);
    RC_ASSERT(off.num_prefix_groups == 0 && off.saved_kv_bytes == 0 && off.partial_bytes == 0);
    RC_ASSERT(on.kv_bytes + on.saved_kv_bytes == off.kv_bytes);
    RC_ASSERT(always.kv_bytes + always.saved_kv_bytes == off.kv_bytes);
    RC_ASSERT(on.saved_kv_bytes > on.partial_bytes || on.num_prefix_groups == 0);
    RC_ASSERT((on.num_shared_leaves > 0) == (on.num_prefix_groups > 0));
  }));
}

TEST(PrefixProperty, ThirtyTwoRequestsReadLessThanTwiceWhatOneReads) {
  for (const auto& [qo_heads, kv_heads] : {std::pair(32, 8), std::pair(8, 8), std::pair(6, 2)}) {
    for (const int32_t prefix : {32768, 32768 - 16, 32768 + 112}) {
      Step step = family(32, prefix, 256), one = family(1, prefix, 256);
      step.problem.qo_heads = one.problem.qo_heads = qo_heads;
      step.problem.kv_heads = one.problem.kv_heads = kv_heads;
      for (const int32_t workers : {1, 2, 64}) {
        step.num_workers = one.num_workers = workers;
        const attnfold_plan_report all = planned(step);
        EXPECT_LT(all.kv_bytes, 2 * planned(one).kv_bytes) << prefix;
        EXPECT_EQ(all.num_prefix_groups, 1) << prefix;
        EXPECT_EQ(all.num_shared_leaves, prefix / kLeaf) << prefix;
        EXPECT_EQ(planned(step, ATTNFOLD_PREFIX_OFF).kv_bytes, 32 * planned(one).kv_bytes);
      }
    }
  }
}

TEST(PrefixProperty, LevelsOfPrefixes) {
  Step step = family(32, 4096, 3000);
  for (int32_t r = 0; r < 32; ++r) share(step, r / 4 * 4, r, 4096 + 2048 + r / 4 * 48);
  const attnfold_plan_report report = planned(step);
  EXPECT_EQ(report.num_prefix_groups, 9);
  EXPECT_GE(report.num_shared_leaves, 32 + 8 * kSuperChunk);
  std::swap_ranges(step.tables.begin() + step.stride, step.tables.begin() + 2 * step.stride,
                   step.tables.begin() + 30 * step.stride);  // another order of the batch
  EXPECT_EQ(planned(step).num_shared_leaves, report.num_shared_leaves);
}

/** What states of a prefix cost if `leaves` leaves are shared and 2 follow: written and read. */
int64_t added_bytes(const Step& step, int64_t leaves, int64_t head_dim) {
  const int64_t states = (leaves >= kSuperChunk ? 1 : 0) + (leaves % kSuperChunk != 0 ? 3 : 1);
  const int64_t rows =
      std::accumulate(step.qo_len.begin(), step.qo_len.end(), int64_t{0}) * step.problem.qo_heads;
  return 2 * states * rows * (head_dim + 2) * 4;
}

TEST(PrefixProperty, APrefixTooShortToPayIsNotUsed) {
  // Two verify steps of 8 tokens: many rows, so that a state weighs much against a leaf.
  int32_t used = 0, refused = 0;
  for (int32_t leaves = 1; leaves < 15; ++leaves) {
    Step step = family(2, leaves * kLeaf, 2 * kLeaf, 8);
    step.problem.qo_heads = 64;
    const int64_t saved = leaves * int64_t{kLeaf} * 8 * (128 + 128) * 2;
    const bool pays = saved > added_bytes(step, leaves, 128);
    const attnfold_plan_report report = planned(step);
    EXPECT_EQ(report.num_prefix_groups, pays ? 1 : 0) << leaves << " leaves";
    EXPECT_EQ(report.saved_kv_bytes, pays ? saved : 0) << leaves << " leaves";
    EXPECT_EQ(planned(step, ATTNFOLD_PREFIX_ALWAYS).num_prefix_groups, 1);
    ++(pays ? used : refused);
  }
  EXPECT_GT(used, 3);
  EXPECT_GT(refused, 3);
  for (const int32_t prefix : {0, 16, 112}) {  // less than a leaf
    EXPECT_EQ(planned(family(8, prefix, 900), ATTNFOLD_PREFIX_ALWAYS).num_prefix_groups, 0);
  }
}

TEST(PrefixProperty, GroupsThatAreNamedPlanAsThoseThatAreFound) {
  Step step = family(12, 2048, 1000);
  for (int32_t r = 0; r < 12; ++r) share(step, r / 4 * 4, r, 2560);
  Groups groups;
  groups.add(2048, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  for (int32_t r = 0; r < 12; r += 4) groups.add(2560, {r, r + 1, r + 2, r + 3});
  const attnfold_plan_report found = planned(step), named = planned(step, groups);
  EXPECT_EQ(found.num_prefix_groups, 4);
  EXPECT_EQ(found.schedule_id, named.schedule_id);
  EXPECT_EQ(found.kv_bytes, named.kv_bytes);

  Groups fewer;  // nothing else is searched for
  fewer.add(2048, {3, 7, 11});
  const attnfold_plan_report three = planned(step, fewer);
  EXPECT_EQ(three.num_prefix_groups, 1);
  EXPECT_EQ(three.saved_kv_bytes, int64_t{2} * 2048 * 8 * (128 + 128) * 2);
}

TEST(PrefixProperty, AWindowThatHasLeftTheFirstKeyEndsSharing) {
  Step step = family(8, 2048, 256);
  step.problem.window_left = 4096;
  EXPECT_EQ(planned(step).num_prefix_groups, 1);
  step.problem.window_left = 1024;
  EXPECT_EQ(planned(step, ATTNFOLD_PREFIX_ALWAYS).num_prefix_groups, 0);
  step.kv_len[3] = 800;  // this one still sees it, alone
  EXPECT_EQ(planned(step, ATTNFOLD_PREFIX_ALWAYS).num_prefix_groups, 0);
}

}  // namespace
}  // namespace attnfold::property
