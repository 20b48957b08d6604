// attnfold's own line, asked of its planner.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "attnfold/attnfold.hpp"
#include "explain/engines.h"
#include "explain/quantities.h"
#include "plan/build_schedule.h"

namespace attnfold::explain {
namespace {

constexpr const char* kName = "attnfold";

/** Ragged KV: the schedule does not depend on pages, and a pool of them is not needed to plan. */
attnfold_problem problem_of(const Question& question) {
  const Model& m = question.model;
  const auto type = [](int64_t bytes) { return bytes == 4 ? ATTNFOLD_F32 : ATTNFOLD_BF16; };
  attnfold_problem p = ATTNFOLD_PROBLEM_INIT;
  p.qo_heads = static_cast<int32_t>(m.h);
  p.kv_heads = static_cast<int32_t>(m.h_kv);
  p.head_dim_qk = static_cast<int32_t>(m.d_qk);
  p.head_dim_vo = static_cast<int32_t>(m.d_vo);
  p.q_dtype = p.o_dtype = type(question.q_bytes);
  p.kv_dtype = type(question.kv_bytes);
  p.kv_storage = ATTNFOLD_KV_RAGGED;
  if (question.windowed) p.window_left = static_cast<int32_t>(m.window - 1);
  p.max_batch = static_cast<int32_t>(question.batch.size());
  p.max_qo_rows = static_cast<int32_t>(total_q(question));
  p.max_kv_len = static_cast<int32_t>(longest_kv(question));
  return p;
}

/** Workers' shares of units, and what they sum to. */
struct Shares {
  std::vector<attnfold_plan_item> items;
  attnfold_plan_report report{};
  std::string error;
};

/** On a CPU: a plan of the library. */
Shares plan_cpu(const Question& question, const attnfold_lengths& lengths, int32_t workers) {
  attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
  execution.num_threads = 1;
  execution.num_workers = workers;
  auto created = api::Plan::create(problem_of(question), execution);
  if (!created.ok()) return {{}, {}, created.outcome().message};
  const api::Outcome updated = created.value().update(lengths);
  if (!updated.ok()) return {{}, {}, updated.message};
  Shares shares;
  shares.report = created.value().report();
  for (int32_t i = 0; i < shares.report.num_items; ++i) {
    attnfold_plan_item item{};
    item.struct_size = sizeof(item);
    attnfold_plan_get_item(created.value().get(), i, &item);
    shares.items.push_back(item);
  }
  return shares;
}

attnfold_plan_item item_of(const Item& item, const Unit& unit) {
  attnfold_plan_item i{};
  i.worker = item.worker;
  i.unit = item.unit;
  i.request = unit.request;
  i.qo_begin = unit.qo_begin;
  i.num_qo = unit.num_qo;
  i.kv_head_begin = unit.kv_head_begin;
  i.num_kv_heads = unit.num_kv_heads;
  i.leaf_begin = item.leaf_begin;
  i.leaf_end = item.leaf_end;
  return i;
}

/** On a GPU: the same planner with units of one kv head, which a thread block takes. */
Shares plan_gpu(const Question& question, const attnfold_lengths& lengths, int32_t workers) {
  constexpr int32_t kRows = 64, kReadCost = 16;  // reading a leaf outweighs the rows of a decode
  const attnfold_problem p = problem_of(question);
  const UnitShape shape = {p.kv_heads, p.qo_heads / p.kv_heads, 0, kRows,
                           kReadCost,  p.head_dim_vo + 2};
  Mask mask;
  mask.causal = 1;
  mask.window_left = p.window_left;
  const ScheduleCapacity capacity =
      schedule_capacity(shape, p.max_batch, p.max_qo_rows, p.max_kv_len, workers);
  std::vector<Unit> units(static_cast<size_t>(capacity.units));
  std::vector<Item> items(static_cast<size_t>(capacity.items));
  std::vector<SharedUnit> shared(static_cast<size_t>(capacity.shared));
  std::vector<int32_t> worker_items(static_cast<size_t>(workers) + 1);
  Schedule s{};
  s.units = units.data();
  s.items = items.data();
  s.shared = shared.data();
  s.worker_items = worker_items.data();
  std::vector<int32_t> kv_len;
  for (const Request& r : question.batch) kv_len.push_back(static_cast<int32_t>(r.kv));
  Lengths step{};
  step.batch = lengths.batch;
  step.qo_indptr = lengths.qo_indptr;
  step.kv_len = kv_len.data();
  build_schedule(shape, mask, {}, step, {}, workers, 0, capacity.state_floats, &s);
  Shares shares;
  attnfold_plan_report& r = shares.report;
  r.num_workers = workers;
  r.num_units = s.num_units;
  r.num_items = s.num_items;
  r.num_cuts = s.num_items - s.num_units;
  r.total_cost = s.total_cost;
  r.max_worker_cost = s.max_worker_cost;
  r.partial_bytes = 2 * s.state_floats * kFloatBytes;
  for (int32_t i = 0; i < s.num_items; ++i) {
    const Item& item = items[static_cast<size_t>(i)];
    const Unit& u = units[static_cast<size_t>(item.unit)];
    const bool cut = item.leaf_end != u.leaf_end;
    if (cut && chunk_begin(u, item.leaf_end) != item.leaf_end) ++r.num_cuts_inside;
    shares.items.push_back(item_of(item, u));
  }
  return shares;
}

void add_items(const Question& question, const std::vector<attnfold_plan_item>& items, Line& line) {
  std::map<int32_t, int32_t> items_of_unit;
  for (const attnfold_plan_item& item : items) {
    const Request& r = question.batch[static_cast<size_t>(item.request)];
    const KeySpan seen = tile_keys(question, r, item.qo_begin, item.num_qo);
    const int64_t begin = std::max<int64_t>(int64_t{item.leaf_begin} * ATTNFOLD_LEAF, seen.begin),
                  end = std::min<int64_t>(int64_t{item.leaf_end} * ATTNFOLD_LEAF, seen.end);
    const int64_t rows = item.num_qo * question.model.group() * item.num_kv_heads;
    line.blocks.push_back({item.request, item.worker, 1, std::max<int64_t>(end - begin, 0),
                           item.num_kv_heads, rows, rows});
    int32_t& splits = line.splits[static_cast<size_t>(item.request)];
    splits = std::max(splits, ++items_of_unit[item.unit]);
  }
}

}  // namespace

Line attnfold_engine(const Question& question) {
  const Switches& on = question.switches;
  for (const int64_t bytes : {question.q_bytes, question.kv_bytes}) {
    if (bytes != 2 && bytes != 4) {
      return not_used(kName, fmt::format("elements of 2 or 4 bytes are planned, got {}", bytes));
    }
  }
  for (const int64_t d : {question.model.d_qk, question.model.d_vo}) {
    if (d % 8 != 0 || d > ATTNFOLD_MAX_HEAD_DIM) {
      return not_used(kName, fmt::format("head widths are multiples of 8 up to {}, got {}",
                                         ATTNFOLD_MAX_HEAD_DIM, d));
    }
  }
  std::vector<int32_t> qo_indptr{0}, kv_indptr{0};
  int64_t keys = 0;
  for (const Request& r : question.batch) {
    keys += r.kv;
    if (keys > INT32_MAX) return not_used(kName, "more than 2147483647 keys in one step");
    qo_indptr.push_back(qo_indptr.back() + static_cast<int32_t>(r.q));
    kv_indptr.push_back(static_cast<int32_t>(keys));
  }
  attnfold_lengths lengths = ATTNFOLD_LENGTHS_INIT;
  lengths.batch = static_cast<int32_t>(question.batch.size());
  lengths.qo_indptr = qo_indptr.data();
  lengths.kv_indptr = kv_indptr.data();
  const bool gpu = question.machine.kind == MachineKind::gpu;
  const int32_t workers =
      static_cast<int32_t>(on.attnfold_workers > 0 ? on.attnfold_workers : question.machine.sms);
  const Shares shares =
      gpu ? plan_gpu(question, lengths, workers) : plan_cpu(question, lengths, workers);
  if (!shares.error.empty()) return not_used(kName, shares.error);
  const attnfold_plan_report& report = shares.report;
  Line line = start(question, kName);
  add_items(question, shares.items, line);
  line.partial_bytes = report.partial_bytes;
  line.launched = report.num_workers;
  line.grid = fmt::format("{} workers", report.num_workers);
  const double mean =
      static_cast<double>(report.total_cost) / static_cast<double>(report.num_workers);
  line.rule = fmt::format(
      "equal shares of all leaves of {} keys, whatever the batch: {} units in {} shares, the "
      "largest "
      "worker has {:.2f} of the mean; {} cuts, {} inside a super-chunk; {}",
      ATTNFOLD_LEAF, report.num_units, report.num_items,
      mean > 0 ? static_cast<double>(report.max_worker_cost) / mean : 1.0, report.num_cuts,
      report.num_cuts_inside,
      gpu ? "units of one kv head and up to 64 rows" : "units as the CPU kernels take them");
  return line;
}

}  // namespace attnfold::explain
