#include "cpu/backend.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "cpu/cpu_features.h"
#include "float_mode.h"

namespace attnfold::cpu {
namespace {

void append(std::vector<const KernelRow*>* table, KernelRows rows) {
  for (int32_t i = 0; i < rows.count; ++i) table->push_back(rows.data + i);
}

std::vector<const KernelRow*> make_table() {
  std::vector<const KernelRow*> table;
#if defined(__x86_64__)
  // The bf16 dot comes first where it is the fast instruction; on Intel float32 fma on widened keys
  // is faster.
  append(&table, amx_bf16::rows());
  const KernelRows dot = avx512_bf16::rows(features().prefetch_into_l1);
  if (!features().slow_bf16_dot) append(&table, dot);
  append(&table, avx512::rows());
  if (features().slow_bf16_dot) append(&table, dot);
  append(&table, avx2::rows());
#elif defined(__AARCH64EL__)
  append(&table, neon::rows());
#endif
  append(&table, scalar::rows());
  return table;
}

void call_in_mode(const Phase& phase, int32_t i) {
  FloatingPointMode mode;
  phase.body(phase.context, i);
}

struct Call {
  const KernelRow* row;
  const RunArgs* args;
  int32_t first_worker;  // with anything to do
  int32_t num_shares;    // of workers from there on
  int32_t merge_bodies;  // of the second pass: each takes every so many tasks
  std::atomic<int32_t> next_share{0};
};

/** Takes workers' shares until none is left, as threads are not equally fast, nor there at once;
 * the last first: of a prefill they are those with more keys. */
void run_items(void* context, int32_t body) {
  Call* call = static_cast<Call*>(context);
  RunArgs args = *call->args;
  args.scratch += static_cast<size_t>(body) * args.scratch_bytes;
  const auto next = [&] { return call->next_share.fetch_add(1, std::memory_order_relaxed); };
  for (int32_t i = next(); i < call->num_shares; i = next())
    call->row->run_worker(args, call->first_worker + call->num_shares - 1 - i);
}

/** Task `task` of the second pass: some rows of the last shared unit that begins at or before it.
 */
void run_merge_task(const Call* call, int32_t task) {
  const Schedule& s = *call->args->schedule;
  int32_t low = 0, high = s.num_shared - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (s.shared[middle].task_begin <= task) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int32_t unit = s.shared[low].unit;
  const int32_t rows = unit_rows(*call->args->shape, s.units[unit]);
  const int32_t begin = (task - s.shared[low].task_begin) * kMergeRows;
  const int32_t end = begin + kMergeRows < rows ? begin + kMergeRows : rows;
  call->row->merge(*call->args, {unit, begin, end});
}

void run_merge(void* context, int32_t body) {
  const Call* call = static_cast<const Call*>(context);
  const int32_t end = call->args->schedule->num_merge_tasks;
  for (int32_t task = body; task < end; task += call->merge_bodies) run_merge_task(call, task);
}

/** What ATTNFOLD_NUM_THREADS says, "" if nothing.  Read once, like ATTNFOLD_ISA. */
const std::string& threads_text() {
  static const std::string text =
      std::getenv("ATTNFOLD_NUM_THREADS") ? std::getenv("ATTNFOLD_NUM_THREADS") : "";
  return text;
}

/** 0 if `text` is no number of threads. */
int32_t threads_in(const std::string& text) {
  int32_t n = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, n);
  return error == std::errc() && stop == end && n >= 1 && n <= kMostThreads ? n : 0;
}

int32_t default_threads() {
  static const int32_t threads = [] {
    const int32_t n = threads_in(threads_text());
    return n > 0 ? n : std::min(usable_cpus(), kMostThreads);
  }();
  return threads;
}

}  // namespace

const std::vector<const KernelRow*>& kernel_table() {
  static const std::vector<const KernelRow*> table = make_table();
  return table;
}

bool is_default_for(const KernelRow& row, const Problem& problem) {
  return !row.rounds_weights || problem.o_dtype == DType::bf16 || problem.o_dtype == DType::e4m3;
}

std::string why_row_rejects(const KernelRow& row, const Problem& problem) {
  const std::string machine = why_not(row.isa);
  if (!machine.empty()) return machine;
  if (row.kv_dtype != problem.kv_dtype) {
    return std::string("kv_dtype: serves ") + dtype_name(row.kv_dtype) + ", needs " +
           dtype_name(problem.kv_dtype);
  }
  if (row.q_is_kv_dtype && problem.q_dtype != row.kv_dtype) {
    return std::string("q_dtype: serves ") + dtype_name(row.kv_dtype) + ", needs " +
           dtype_name(problem.q_dtype);
  }
  return "";
}

UnitShape unit_shape(const KernelRow& row, const Problem& p) {
  UnitShape s;
  s.kv_heads = p.kv_heads;
  s.group_size = p.group_size;
  s.small_rows = 32;
  // What is packed once for a unit costs more beside fast products.
  const bool fast = std::strncmp(row.isa, "amx", 3) == 0 || row.rounds_weights;
  s.max_rows = fast ? kMostUnitRows : 128;
  s.read_cost = 4;
  s.state_row_floats = state_row_floats(p);
  s.leaf_bytes = 0;  // the plan knows
  return s;
}

/** What open_tiles (tile.inl) takes for `rows` rows, at most. */
size_t tile_scratch_bytes(const Problem& p, size_t rows) {
  constexpr size_t kRows = 32;  // of the largest block
  const size_t padded_rows = (rows + kRows - 1) / kRows * kRows;
  const size_t q_stride = padded(p.head_dim_qk), state_row = state_row_floats(p);
  const size_t floats = padded_rows * (q_stride + 2 * state_row) + kLeaf * (q_stride + state_row) +
                        kRows * (kLeaf + 3 + state_row);
  // matrix_scratch (amx.inl): rows in groups of 16, head by head.
  const size_t groups = rows / 16 + std::min(rows, static_cast<size_t>(p.kv_heads));
  const size_t parts = rows / 5 + std::min(rows, static_cast<size_t>(p.kv_heads));
  const size_t matrix = groups * q_stride * 8 + parts * 1024 + 8192;
  return std::max(floats, matrix) * sizeof(float) + 16 * 64;
}

size_t worker_scratch_bytes(const Problem& p, const UnitShape& shape) {
  const size_t rows = static_cast<size_t>(max_unit_rows(shape));
  const size_t per_row = sizeof(TokenRow) + sizeof(LeafKeys) + 2 * sizeof(uint64_t) +
                         sizeof(float) * (padded(p.head_dim_qk) + kLeaf + 3 * state_row_floats(p));
  const size_t leaf_pointers = 5 * (kLeaf * sizeof(const char*));
  const size_t leaf_scales = 2 * (kLeaf * sizeof(float));
  const size_t rounding = 15 * 64;
  return (rows * per_row + leaf_pointers + leaf_scales + rounding + tile_scratch_bytes(p, rows) +
          63) /
         64 * 64;
}

Status check_default_threads() {
  static const bool is_sound = threads_text().empty() || threads_in(threads_text()) > 0;
  if (is_sound) return {};
  return invalid("ATTNFOLD_NUM_THREADS", "1.." + std::to_string(kMostThreads),
                 threads_text().c_str());
}

Threads threads_of(const attnfold_execution& e) {
  return {e.num_threads ? e.num_threads : default_threads(), e.parallel_for, e.parallel_user};
}

void run_parallel(const Threads& threads, std::initializer_list<Phase> phases) {
  const auto has_several = [](const Phase& phase) { return phase.n > 1; };
  if (threads.parallel_for && std::any_of(phases.begin(), phases.end(), has_several)) {
    const auto call = [](void* phase, int32_t i) { call_in_mode(*static_cast<Phase*>(phase), i); };
    for (Phase phase : phases)
      if (phase.n > 0) threads.parallel_for(threads.user, phase.n, call, &phase);
    return;
  }
  run_on_pool(threads.parallel_for ? 1 : threads.num_threads, phases, call_in_mode);
}

int32_t bodies_at_once(const Threads& threads, int32_t num_workers) {
  return threads.parallel_for ? num_workers : std::min(num_workers, threads.num_threads);
}

void run(const KernelRow& row, const Threads& threads, const RunArgs& args) {
  // Workers without items are not woken: a small batch runs on the calling thread.
  const Schedule& s = *args.schedule;
  int32_t first = 0, last = s.num_workers;
  while (first < last && s.worker_items[first] == s.worker_items[first + 1]) ++first;
  while (last > first && s.worker_items[last - 1] == s.worker_items[last]) --last;
  // A host's pool is asked for no more bodies at once than it may run.
  const int32_t bodies =
      threads.parallel_for ? std::min(s.num_merge_tasks, threads.num_threads) : s.num_merge_tasks;
  Call call{&row, &args, first, last - first, bodies};
  run_parallel(threads,
               {{std::min(last - first, bodies_at_once(threads, s.num_workers)), run_items, &call},
                {bodies, run_merge, &call}});
}

}  // namespace attnfold::cpu
