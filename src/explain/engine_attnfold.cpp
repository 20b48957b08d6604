// attnfold's own line, asked of its planner.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "attnfold/attnfold.hpp"
#include "cuda/backend.h"
#include "explain/engines.h"
#include "explain/quantities.h"
#include "plan/range_schedule.h"

namespace attnfold::explain {
namespace {

constexpr const char* kName = "attnfold";

/** Ragged KV: the schedule does not depend on pages, and a pool of them is not needed to plan. */
attnfold_problem problem_of(const Question& question) {
  const Model& m = question.model;
  attnfold_problem p = ATTNFOLD_PROBLEM_INIT;
  p.qo_heads = static_cast<int32_t>(m.h);
  p.kv_heads = static_cast<int32_t>(m.h_kv);
  p.head_dim_qk = static_cast<int32_t>(m.d_qk);
  p.head_dim_vo = static_cast<int32_t>(m.d_vo);
  p.q_dtype = static_cast<attnfold_dtype>(question.q_type);
  p.kv_dtype = static_cast<attnfold_dtype>(question.kv_type);
  p.o_dtype = static_cast<attnfold_dtype>(question.o_type);
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

// ------------------------------------------------------------------------------------------------
// on a CPU: a plan of the library
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

Line cpu_line(const Question& question, const attnfold_lengths& lengths) {
  const Switches& on = question.switches;
  const int32_t workers =
      static_cast<int32_t>(on.attnfold_workers > 0 ? on.attnfold_workers : question.machine.sms);
  const Shares shares = plan_cpu(question, lengths, workers);
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
      "largest worker has {:.2f} of the mean; {} cuts, {} inside a super-chunk; units as the CPU "
      "kernels take them",
      ATTNFOLD_LEAF, report.num_units, report.num_items,
      mean > 0 ? static_cast<double>(report.max_worker_cost) / mean : 1.0, report.num_cuts,
      report.num_cuts_inside);
  return line;
}

// ------------------------------------------------------------------------------------------------
// on a GPU

/** What the device's planner leaves behind, from the same functions on the host. */
struct Ranges {
  RangeCounts counts{};
  SharedCounts num_shared{};
  std::vector<RowSet> sets;
  std::vector<RangePlace> places;
  std::vector<Range> ranges;
};

Ranges plan_ranges(const RangeShape& shape, const Mask& mask, const attnfold_problem& p,
                   const attnfold_lengths& lengths, const std::vector<int32_t>& kv_len) {
  Ranges r;
  const int32_t max_sets = p.max_batch + p.max_qo_rows * shape.group_size / shape.set_rows + 1;
  r.sets.resize(static_cast<size_t>(max_sets));
  r.places.resize(static_cast<size_t>(shape.num_ranges) + 1);
  r.ranges.resize(static_cast<size_t>(shape.num_ranges));
  std::vector<SharedSet> shared(static_cast<size_t>(shape.num_ranges));
  std::vector<Range> claimed(static_cast<size_t>(shape.num_ranges));
  RangeSchedule s{&r.counts,       &r.num_shared,   r.sets.data(), max_sets,
                  r.places.data(), r.ranges.data(), shared.data()};
  s.claimed = claimed.data();
  build_range_schedule(shape, mask, lengths.batch, lengths.qo_indptr, kv_len.data(), &s);
  return r;
}

/** Keys of leaf `number` of a set that some row sees. */
int64_t keys_of_leaf(const VisibleKeys& keys, const RowSet& set, int32_t number) {
  const int32_t begin = leaf_of(set, number) * kLeaf, end = begin + kLeaf;
  const int32_t sink = std::max(std::min(end, keys.sink) - begin, 0);
  return sink + std::max(std::min(end, keys.end) - std::max({begin, keys.begin, keys.sink}), 0);
}

Line gpu_line(const Question& question, const attnfold_lengths& lengths) {
  const attnfold_problem p = problem_of(question);
  std::string reasons;
  bool served = false;
  for (int i = 0; i < cuda::kNumKernelRows; ++i) {
    const std::string why = cuda::why_row_rejects(cuda::kernel_row(i), p);
    served = served || why.empty();
    reasons += (i > 0 ? "; " : "") + std::string(cuda::kernel_row(i).name) + ": " + why;
  }
  if (!served) return not_used(kName, "no kernel row serves this on a GPU; " + reasons);
  const int64_t on_device = question.machine.sms * blocks_per_sm(p.head_dim_vo);
  const int64_t asked = question.switches.attnfold_workers;
  RangeShape shape{};
  shape.group_size = p.qo_heads / p.kv_heads;
  shape.set_rows = choose_set_rows(shape.group_size, decodes_only(question), false);
  const int32_t owned = asked > 0 ? std::max(static_cast<int32_t>(asked) / p.kv_heads, 1)
                                  : choose_num_ranges(static_cast<int32_t>(on_device), p.kv_heads);
  const int64_t max_leaves = (int64_t{p.max_kv_len} + kLeaf - 1) / kLeaf;
  const int64_t max_sets = p.max_batch + int64_t{p.max_qo_rows} * shape.group_size / shape.set_rows;
  shape.claims = choose_claims(owned, max_sets * max_leaves, max_leaves, false);
  shape.num_ranges = owned * (shape.claims + 1);
  Mask mask;
  mask.causal = 1;
  mask.window_left = p.window_left;
  std::vector<int32_t> kv_len;
  for (const Request& r : question.batch) kv_len.push_back(static_cast<int32_t>(r.kv));
  const Ranges plan = plan_ranges(shape, mask, p, lengths, kv_len);

  Line line = start(question, kName);
  std::vector<int32_t> splits_of_set(plan.sets.size());
  int32_t cuts = 0, inside = 0, largest = 0, busy = 0, share = 0, claimed = 0;
  for (int32_t r = 0; r < shape.num_ranges; ++r) {
    const Range& range = plan.ranges[static_cast<size_t>(r)];
    // As if no block were faster than the others: then each claims what follows its own range.
    const int32_t block = r / (shape.claims + 1);
    share = r % (shape.claims + 1) == 0 ? range.num_leaves : share + range.num_leaves;
    largest = std::max(largest, share);
    busy += r % (shape.claims + 1) == 0 && range.num_leaves > 0 ? 1 : 0;
    claimed += r % (shape.claims + 1) > 0 ? range.num_leaves : 0;
    int32_t index = range.set_index, number = range.number;
    for (int32_t left = range.num_leaves; left > 0; ++index, number = 0) {
      const RowSet& set = plan.sets[static_cast<size_t>(index)];
      const VisibleKeys seen = seen_by_any(shape, mask, set);
      const int32_t end = std::min(set.num_leaves, number + left);
      int64_t keys = 0;
      for (int32_t i = number; i < end; ++i) keys += keys_of_leaf(seen, set, i);
      for (int32_t head = 0; head < p.kv_heads; ++head) {
        line.blocks.push_back({set.request, block * p.kv_heads + head, 1, keys, 1, set.num_rows,
                               shape.set_rows <= 8 ? 8 : kMaxSetRows});
      }
      int32_t& splits = line.splits[static_cast<size_t>(set.request)];
      splits = std::max(splits, ++splits_of_set[static_cast<size_t>(index)]);
      left -= end - number;
      if (end == set.num_leaves) continue;
      ++cuts;
      if (chunk_begin(set, end) != end) ++inside;
    }
  }
  const int64_t states = plan.places.back().entered_states;
  line.partial_bytes = 2 * states * p.kv_heads * shape.set_rows * (p.head_dim_vo + 2) * kFloatBytes;
  line.launched = int64_t{owned} * p.kv_heads;
  line.grid = fmt::format("({})", line.launched);
  line.rule = fmt::format(
      "sets of up to {} rows; their {} leaves of {} keys in {} even ranges, {} of them used, for "
      "each of {} kv heads; the largest has {}; {} cuts in a row, {} inside a super-chunk; {} "
      "states; a second kernel folds them",
      shape.set_rows, plan.counts.leaves, kLeaf, owned, busy, p.kv_heads, largest, cuts, inside,
      states * p.kv_heads);
  if (claimed > 0) {
    line.rule += fmt::format(
        "; of a head's leaves {} are claimed by whichever block is done with its own, a few at a "
        "time",
        claimed);
  }
  if (!decodes_only(question)) {
    line.rule += fmt::format(
        "; requests with many rows take tiles of {} rows instead, and on Hopper row sets have {} "
        "rows where groups are no larger, which this line leaves out",
        kTileRows, kMaxSetRows / 2);
  }
  return line;
}

}  // namespace

Line attnfold_engine(const Question& question) {
  for (const int64_t bytes : {question.q_bytes(), question.kv_bytes()}) {
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
  return question.machine.kind == MachineKind::gpu ? gpu_line(question, lengths)
                                                   : cpu_line(question, lengths);
}

}  // namespace attnfold::explain
