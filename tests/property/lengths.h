// Random steps for the planner: lengths without tensors, on a pool of one page.
#pragma once

#include <rapidcheck.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "attnfold/attnfold.h"

namespace attnfold::property {

struct Step {
  attnfold_problem problem = ATTNFOLD_PROBLEM_INIT;
  std::vector<int32_t> qo_len, kv_len;
  int32_t num_workers = 1;
  uint64_t cut_seed = 0;
  attnfold_prefix_use prefix_use = ATTNFOLD_PREFIX_AUTO;
  int32_t page_size = 1 << 20;
  int32_t num_pages = 1;
  std::vector<int32_t> tables;  // [batch, stride] page ids; empty: every request has page 0
  int32_t stride = 1;
};

struct Destroy {
  void operator()(attnfold_plan* plan) const { attnfold_plan_destroy(plan); }
};
using PlanPointer = std::unique_ptr<attnfold_plan, Destroy>;

inline PlanPointer create(const Step& step) {
  attnfold_problem problem = step.problem;
  problem.page_size = step.page_size;
  problem.num_pages = step.num_pages;
  problem.max_batch = static_cast<int32_t>(step.qo_len.size());
  problem.max_qo_rows = std::accumulate(step.qo_len.begin(), step.qo_len.end(), 0);
  problem.max_kv_len = 1 << 20;
  attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
  execution.num_threads = 1;
  execution.num_workers = step.num_workers;
  execution.cut_seed = step.cut_seed;
  execution.prefix_use = step.prefix_use;
  attnfold_plan* plan = nullptr;
  if (attnfold_plan_create(&problem, &execution, &plan) != ATTNFOLD_OK)
    RC_FAIL(attnfold_last_error());
  return PlanPointer(plan);
}

/** Groups that a caller names, as attnfold_lengths has them. */
struct Groups {
  std::vector<int32_t> keys, indptr{0}, requests;
  void add(int32_t num_keys, const std::vector<int32_t>& members) {
    keys.push_back(num_keys);
    requests.insert(requests.end(), members.begin(), members.end());
    indptr.push_back(static_cast<int32_t>(requests.size()));
  }
};

inline void update(attnfold_plan* plan, const Step& step, const Groups& groups = {}) {
  std::vector<int32_t> qo_indptr(1, 0);
  for (int32_t n : step.qo_len) qo_indptr.push_back(qo_indptr.back() + n);
  const std::vector<int32_t> one_page(step.qo_len.size() + 1, 0);
  attnfold_lengths lengths = ATTNFOLD_LENGTHS_INIT;
  lengths.batch = static_cast<int32_t>(step.qo_len.size());
  lengths.qo_indptr = qo_indptr.data();
  lengths.kv_len = step.kv_len.data();
  lengths.block_table = step.tables.empty() ? one_page.data() : step.tables.data();
  lengths.block_table_stride = step.stride;
  lengths.num_prefix_groups = static_cast<int32_t>(groups.keys.size());
  lengths.prefix_keys = groups.keys.data();
  lengths.prefix_indptr = groups.indptr.data();
  lengths.prefix_requests = groups.requests.data();
  if (attnfold_plan_update(plan, &lengths, nullptr) != ATTNFOLD_OK) RC_FAIL(attnfold_last_error());
}

inline attnfold_plan_report report_of(const attnfold_plan* plan) {
  attnfold_plan_report report{};
  report.struct_size = sizeof report;
  if (attnfold_plan_get_report(plan, &report) != ATTNFOLD_OK) RC_FAIL(attnfold_last_error());
  return report;
}

inline std::vector<attnfold_plan_item> items_of(const attnfold_plan* plan) {
  std::vector<attnfold_plan_item> items(static_cast<size_t>(report_of(plan).num_items));
  for (size_t i = 0; i < items.size(); ++i) {
    items[i].struct_size = sizeof items[i];
    if (attnfold_plan_get_item(plan, static_cast<int32_t>(i), &items[i]) != ATTNFOLD_OK)
      RC_FAIL(attnfold_last_error());
  }
  return items;
}

/** Decodes, prefills, verify steps and nothings, over short and long keys, windows or not. */
inline rc::Gen<Step> any_step() {
  return rc::gen::resize(
      100, rc::gen::exec([] {  // full ranges from the first draw
        Step step;
        attnfold_problem& p = step.problem;
        p.kv_heads = *rc::gen::inRange(1, 6);
        p.qo_heads = p.kv_heads * *rc::gen::element(1, 2, 3, 4, 8, 16, 24);
        p.head_dim_qk = *rc::gen::element(8, 64, 128, 576);
        p.head_dim_vo = *rc::gen::element(8, 64, 128, 512);
        p.mask = *rc::gen::element(ATTNFOLD_MASK_NONE, ATTNFOLD_MASK_CAUSAL);
        p.window_left = *rc::gen::element(-1, -1, 0, 100, 1023, 5000);
        p.window_right = *rc::gen::element(-1, -1, -1, 0, 300);
        p.kv_dtype = p.q_dtype = p.o_dtype =
            *rc::gen::element(ATTNFOLD_F32, ATTNFOLD_F16, ATTNFOLD_BF16);
        const int32_t batch = *rc::gen::inRange(0, 12);
        for (int32_t r = 0; r < batch; ++r) {
          step.qo_len.push_back(*rc::gen::oneOf(rc::gen::just(1), rc::gen::just(1),
                                                rc::gen::inRange(0, 17), rc::gen::inRange(0, 700)));
          step.kv_len.push_back(*rc::gen::oneOf(rc::gen::inRange(0, 300), rc::gen::inRange(0, 5000),
                                                rc::gen::inRange(0, 60000)));
        }
        step.num_workers = *rc::gen::element(1, 2, 3, 4, 7, 8, 16, 61, 132);
        step.cut_seed = *rc::gen::element<uint64_t>(0, 0, 1, 2, 12345, 987654321);
        step.prefix_use = *rc::gen::element(ATTNFOLD_PREFIX_AUTO, ATTNFOLD_PREFIX_AUTO,
                                            ATTNFOLD_PREFIX_OFF, ATTNFOLD_PREFIX_ALWAYS);
        return step;
      }));
}

inline std::string text_of(const Step& step) {
  std::string text =
      "heads " + std::to_string(step.problem.qo_heads) + "/" +
      std::to_string(step.problem.kv_heads) + " mask " + std::to_string(step.problem.mask) +
      " window " + std::to_string(step.problem.window_left) + "," +
      std::to_string(step.problem.window_right) + " workers " + std::to_string(step.num_workers) +
      " cut_seed " + std::to_string(step.cut_seed) + " prefix_use " +
      std::to_string(step.prefix_use) + " page_size " + std::to_string(step.page_size) + " lengths";
  for (size_t r = 0; r < step.qo_len.size(); ++r) {
    text += " " + std::to_string(step.qo_len[r]) + "/" + std::to_string(step.kv_len[r]);
  }
  return text;
}

}  // namespace attnfold::property

namespace rc {
template <>
struct Arbitrary<attnfold::property::Step> {
  static Gen<attnfold::property::Step> arbitrary() { return attnfold::property::any_step(); }
};
}  // namespace rc

namespace attnfold::property {
inline std::ostream& operator<<(std::ostream& out, const Step& step) {
  return out << text_of(step);
}
}  // namespace attnfold::property
