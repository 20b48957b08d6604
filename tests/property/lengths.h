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
};

constexpr int32_t kPageSize = 1 << 20;  // every request has one page, always page 0

struct Destroy {
  void operator()(attnfold_plan* plan) const { attnfold_plan_destroy(plan); }
};
using PlanPointer = std::unique_ptr<attnfold_plan, Destroy>;

inline PlanPointer create(const Step& step) {
  attnfold_problem problem = step.problem;
  problem.page_size = kPageSize;
  problem.num_pages = 1;
  problem.max_batch = static_cast<int32_t>(step.qo_len.size());
  problem.max_qo_rows = std::accumulate(step.qo_len.begin(), step.qo_len.end(), 0);
  problem.max_kv_len = kPageSize;
  attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
  execution.num_threads = 1;
  execution.num_workers = step.num_workers;
  execution.cut_seed = step.cut_seed;
  attnfold_plan* plan = nullptr;
  if (attnfold_plan_create(&problem, &execution, &plan) != ATTNFOLD_OK)
    RC_FAIL(attnfold_last_error());
  return PlanPointer(plan);
}

inline void update(attnfold_plan* plan, const Step& step) {
  std::vector<int32_t> qo_indptr(1, 0);
  for (int32_t n : step.qo_len) qo_indptr.push_back(qo_indptr.back() + n);
  const std::vector<int32_t> pages(step.qo_len.size() + 1, 0);
  attnfold_lengths lengths = ATTNFOLD_LENGTHS_INIT;
  lengths.batch = static_cast<int32_t>(step.qo_len.size());
  lengths.qo_indptr = qo_indptr.data();
  lengths.kv_len = step.kv_len.data();
  lengths.block_table = pages.data();
  lengths.block_table_stride = 1;
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
  return rc::gen::exec([] {
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
    return step;
  });
}

inline std::string text_of(const Step& step) {
  std::string text =
      "heads " + std::to_string(step.problem.qo_heads) + "/" +
      std::to_string(step.problem.kv_heads) + " mask " + std::to_string(step.problem.mask) +
      " window " + std::to_string(step.problem.window_left) + "," +
      std::to_string(step.problem.window_right) + " workers " + std::to_string(step.num_workers) +
      " cut_seed " + std::to_string(step.cut_seed) + " lengths";
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
