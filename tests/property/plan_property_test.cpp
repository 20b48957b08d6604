// What every schedule must be, seen through the public API.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "property/lengths.h"

namespace attnfold::property {
namespace {

constexpr int32_t kLeaf = ATTNFOLD_LEAF, kSuperChunk = ATTNFOLD_SUPER_CHUNK;

struct Range {
  int64_t begin, end;
};

/** Keys that token i of a request sees, in words of the header. */
Range seen(const attnfold_problem& p, int64_t qo_len, int64_t kv_len, int64_t i) {
  const int64_t position = kv_len - qo_len + i;
  int64_t begin = 0, end = kv_len;
  if (p.window_left >= 0) begin = std::max(begin, position - p.window_left);
  if (p.mask == ATTNFOLD_MASK_CAUSAL) end = std::min(end, position + 1);
  if (p.window_right >= 0) end = std::min(end, position + p.window_right + 1);
  return begin < end ? Range{begin, end} : Range{0, 0};
}

Range leaves_of(Range keys) {
  return keys.begin < keys.end ? Range{keys.begin / kLeaf, (keys.end + kLeaf - 1) / kLeaf}
                               : Range{0, 0};
}

bool holds(const char* claim, void (*body)(const Step&)) { return rc::check(claim, body); }

TEST(PlanProperty, EveryLeafOfEveryRowIsCoveredOnce) {
  EXPECT_TRUE(holds(
      "each (token, kv head) has every leaf that it sees in one item, and no leaf in two",
      [](const Step& step) {
        const PlanPointer plan = create(step);
        update(plan.get(), step);
        std::map<std::pair<int32_t, int32_t>, std::vector<attnfold_plan_item>>
            by_head;  // (request, kv head)
        for (const attnfold_plan_item& item : items_of(plan.get())) {
          RC_ASSERT(item.worker >= 0 && item.worker < step.num_workers);
          RC_ASSERT(item.kv_head_begin >= 0 && item.num_kv_heads > 0);
          RC_ASSERT(item.kv_head_begin + item.num_kv_heads <= step.problem.kv_heads);
          RC_ASSERT(item.num_requests > 0 && item.requests[0] == item.request);
          int32_t num_qo = 0;
          for (int32_t k = 0; k < item.num_requests; ++k) {
            attnfold_plan_item own = item;  // what one of the requests has of it
            own.request = item.requests[k];
            if (item.num_requests > 1) own.num_qo = step.qo_len[own.request];
            num_qo += own.num_qo;
            RC_ASSERT(own.qo_begin >= 0 && own.num_qo > 0 &&
                      own.qo_begin + own.num_qo <= step.qo_len[own.request]);
            for (int32_t h = 0; h < item.num_kv_heads; ++h)
              by_head[{own.request, item.kv_head_begin + h}].push_back(own);
          }
          RC_ASSERT(num_qo == item.num_qo);
        }
        for (size_t r = 0; r < step.qo_len.size(); ++r) {
          for (int32_t h = 0; h < step.problem.kv_heads; ++h) {
            std::vector<attnfold_plan_item> items = by_head[{static_cast<int32_t>(r), h}];
            std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) {
              return std::pair(a.qo_begin, a.leaf_begin) < std::pair(b.qo_begin, b.leaf_begin);
            });
            size_t first = 0;
            for (int32_t i = 0; i < step.qo_len[r]; ++i) {
              while (first < items.size() && items[first].qo_begin + items[first].num_qo <= i)
                ++first;
              RC_ASSERT(first < items.size() && items[first].qo_begin <= i);
              const Range want = leaves_of(seen(step.problem, step.qo_len[r], step.kv_len[r], i));
              int64_t begin = -1, end = -1;  // one stretch without a gap or an overlap
              for (size_t k = first; k < items.size() && items[k].qo_begin <= i; ++k) {
                if (begin < 0) begin = end = items[k].leaf_begin;
                RC_ASSERT(items[k].leaf_begin == end && items[k].leaf_end >= items[k].leaf_begin);
                end = items[k].leaf_end;
              }
              RC_ASSERT(want.begin == want.end || (begin <= want.begin && want.end <= end));
            }
          }
        }
      }));
}

TEST(PlanProperty, UnitsHoldNoLeafThatNoRowSees) {
  EXPECT_TRUE(holds("leaves of a unit are the hull of what its rows see", [](const Step& given) {
    Step step = given;
    step.prefix_use = ATTNFOLD_PREFIX_OFF;
    const PlanPointer plan = create(step);
    update(plan.get(), step);
    std::map<int32_t, std::pair<attnfold_plan_item, Range>> units;
    for (const attnfold_plan_item& item : items_of(plan.get())) {
      auto [at, is_new] = units.try_emplace(item.unit, item, Range{item.leaf_begin, item.leaf_end});
      if (is_new) continue;
      RC_ASSERT(at->second.first.request == item.request &&
                at->second.first.qo_begin == item.qo_begin);
      at->second.second.begin = std::min<int64_t>(at->second.second.begin, item.leaf_begin);
      at->second.second.end = std::max<int64_t>(at->second.second.end, item.leaf_end);
    }
    for (const auto& [unit, what] : units) {
      const auto& [item, leaves] = what;
      Range hull{1 << 30, 0};
      for (int32_t i = item.qo_begin; i < item.qo_begin + item.num_qo; ++i) {
        const Range one =
            leaves_of(seen(step.problem, step.qo_len[item.request], step.kv_len[item.request], i));
        if (one.begin == one.end) continue;
        hull = {std::min(hull.begin, one.begin), std::max(hull.end, one.end)};
      }
      if (hull.end == 0) {
        RC_ASSERT(leaves.begin == leaves.end);
      } else {
        RC_ASSERT(leaves.begin == hull.begin && leaves.end == hull.end);
      }
    }
  }));
}

TEST(PlanProperty, TheReportCountsWhatTheItemsAre) {
  EXPECT_TRUE(
      holds("units, items, cuts, cuts inside super-chunks and leaves", [](const Step& step) {
        const PlanPointer plan = create(step);
        update(plan.get(), step);
        const attnfold_plan_report report = report_of(plan.get());
        std::set<int32_t> units;
        int32_t cuts = 0, inside = 0;
        int64_t leaves = 0;
        const std::vector<attnfold_plan_item> items = items_of(plan.get());
        for (const attnfold_plan_item& item : items) {
          leaves += item.leaf_end - item.leaf_begin;
          if (units.insert(item.unit).second) continue;
          ++cuts;
          inside += item.leaf_begin % kSuperChunk != 0;
        }
        RC_ASSERT(report.num_workers == step.num_workers);
        RC_ASSERT(report.num_requests == static_cast<int32_t>(step.qo_len.size()));
        RC_ASSERT(report.num_units == static_cast<int32_t>(units.size()));
        RC_ASSERT(report.num_cuts == cuts &&
                  report.num_cuts == report.num_items - report.num_units);
        RC_ASSERT(report.num_cuts_inside == inside);
        RC_ASSERT(report.num_leaves == leaves);
        RC_ASSERT((report.partial_bytes == 0) == (cuts == 0 && report.num_prefix_groups == 0));
      }));
}

TEST(PlanProperty, NoWorkerHasMoreThanItsShareAndOneLeaf) {
  EXPECT_TRUE(
      holds("max_worker_cost <= total_cost / num_workers + max_leaf_cost", [](const Step& given) {
        Step step = given;
        step.cut_seed = 0;
        const PlanPointer plan = create(step);
        update(plan.get(), step);
        const attnfold_plan_report report = report_of(plan.get());
        const int64_t share = (report.total_cost + step.num_workers - 1) / step.num_workers;
        RC_ASSERT(report.max_worker_cost <= share + report.max_leaf_cost);
        RC_ASSERT(report.max_worker_cost >= share || report.total_cost == 0);
      }));
}

TEST(PlanProperty, ALongDecodeUsesEveryWorker) {
  Step step;
  step.problem.qo_heads = 8;
  step.problem.kv_heads = 2;
  step.qo_len = {1, 1};
  step.kv_len = {100000, 10};
  for (int32_t workers : {2, 3, 8, 48, 132}) {
    step.num_workers = workers;
    const PlanPointer plan = create(step);
    update(plan.get(), step);
    std::set<int32_t> used;
    for (const attnfold_plan_item& item : items_of(plan.get())) used.insert(item.worker);
    EXPECT_EQ(static_cast<int32_t>(used.size()), workers);
  }
}

TEST(PlanProperty, SchedulesAreDeterministic) {
  EXPECT_TRUE(
      rc::check("a schedule does not depend on the plan's earlier updates", [](const Step& step) {
        const PlanPointer fresh = create(step), used = create(step);
        update(fresh.get(), step);
        Step other = step;
        std::reverse(other.kv_len.begin(), other.kv_len.end());
        update(used.get(), other);
        update(used.get(), step);
        const attnfold_plan_report a = report_of(fresh.get()), b = report_of(used.get());
        RC_ASSERT(a.schedule_id == b.schedule_id && a.num_items == b.num_items &&
                  a.max_worker_cost == b.max_worker_cost);
      }));
}

TEST(PlanProperty, ScheduleIdsDifferWhereCutsDo) {
  EXPECT_TRUE(rc::check("equal ids mean equal cuts", [](const Step& given) {
    Step step = given;
    const auto cuts_of = [&](uint64_t seed) {
      step.cut_seed = seed;
      const PlanPointer plan = create(step);
      update(plan.get(), step);
      std::set<std::tuple<int32_t, int32_t, int32_t, int32_t>> cuts;
      for (const attnfold_plan_item& i : items_of(plan.get()))
        cuts.insert({i.unit, i.leaf_begin, i.leaf_end, 0});
      return std::pair(report_of(plan.get()).schedule_id, cuts);
    };
    const auto a = cuts_of(0), b = cuts_of(77);
    if (a.first == b.first) RC_ASSERT(a.second == b.second);
  }));
}

int64_t decode_kv_bytes(const Step& step) {
  int64_t keys = 0;
  for (size_t r = 0; r < step.kv_len.size(); ++r) {
    const Range range = seen(step.problem, 1, step.kv_len[r], 0);
    keys += range.end - range.begin;
  }
  const int64_t bytes = step.problem.kv_dtype == ATTNFOLD_F32 ? 4 : 2;
  return keys * step.problem.kv_heads * (step.problem.head_dim_qk + step.problem.head_dim_vo) *
         bytes;
}

TEST(PlanProperty, DecodesReadTheCacheOncePerKvHeadWhateverTheGroup) {
  EXPECT_TRUE(
      rc::check("kv_bytes of decodes is the keys seen, times kv heads, but for what prefixes save",
                [](const Step& given) {
                  Step step = given;
                  std::fill(step.qo_len.begin(), step.qo_len.end(), 1);
                  const int64_t want = decode_kv_bytes(step);
                  for (int32_t group : {1, 3, 4, 16}) {
                    step.problem.qo_heads = step.problem.kv_heads * group;
                    const PlanPointer plan = create(step);
                    update(plan.get(), step);
                    const attnfold_plan_report report = report_of(plan.get());
                    RC_ASSERT(report.kv_bytes + report.saved_kv_bytes == want);
                  }
                }));
}

TEST(PlanProperty, AWindowBoundsWhatIsRead) {
  Step step;
  step.problem.qo_heads = 8;
  step.problem.kv_heads = 2;
  step.problem.window_left = 1023;
  step.qo_len = {1};
  const int64_t key_bytes = 2 * (128 + 128) * 2;
  for (int32_t kv_len : {512, 4096, 16384, 131072}) {
    step.kv_len = {kv_len};
    const PlanPointer plan = create(step);
    update(plan.get(), step);
    const attnfold_plan_report report = report_of(plan.get());
    EXPECT_LE(report.kv_bytes, (1024 + kLeaf) * key_bytes) << kv_len;
    EXPECT_GE(report.kv_bytes, std::min(kv_len, 1024) * key_bytes) << kv_len;
    EXPECT_LE(report.num_leaves, 1024 / kLeaf + 1) << kv_len;
  }
}

}  // namespace
}  // namespace attnfold::property
