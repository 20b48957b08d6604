// What a call costs beside its arithmetic: planning a step, and running one that is next to
// nothing.
//
// Budget: attnfold_plan_update of 256 requests in 20 us where nothing is shared, since it is on the
// path of every step, and well under a millisecond where prefixes are.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "attnfold/attnfold.h"
#include "check/call.h"
#include "check/generate.h"

namespace {

using attnfold::check::Call;

void require_ok(attnfold_status status) {
  if (status != ATTNFOLD_OK) throw std::runtime_error(attnfold_last_error());
}

/** Decodes whose tables are real and whose keys are few: planning reads lengths and page ids alone.
 */
struct Step {
  attnfold_problem problem = ATTNFOLD_PROBLEM_INIT;
  std::vector<int32_t> qo_indptr, kv_len, block_table;
  int64_t stride = 0;

  Step(int32_t batch, int32_t longest_kv_len, bool ragged) {
    problem.qo_heads = 32;
    problem.kv_heads = 8;
    std::mt19937 random(1);
    stride = (longest_kv_len + problem.page_size - 1) / problem.page_size;
    qo_indptr.push_back(0);
    for (int32_t r = 0; r < batch; ++r) {
      const uint32_t draw = static_cast<uint32_t>(random());
      kv_len.push_back(ragged
                           ? 1 + static_cast<int32_t>(draw % static_cast<uint32_t>(longest_kv_len))
                           : longest_kv_len);
      qo_indptr.push_back(r + 1);
    }
    problem.num_pages = batch * stride;
    block_table.resize(static_cast<size_t>(problem.num_pages));
    for (int32_t& id : block_table) {
      id = static_cast<int32_t>(random() % static_cast<uint32_t>(problem.num_pages));
    }
    problem.max_batch = batch;
    problem.max_qo_rows = batch;
    problem.max_kv_len = longest_kv_len;
  }

  /** Requests of each run of `family` get the first `pages` pages of the first of them. */
  void share(int32_t family, int64_t pages) {
    for (int64_t r = 0; r < static_cast<int64_t>(kv_len.size()); ++r) {
      std::copy_n(block_table.begin() + r / family * family * stride, pages,
                  block_table.begin() + r * stride);
    }
  }

  attnfold_lengths lengths() const {
    attnfold_lengths l = ATTNFOLD_LENGTHS_INIT;
    l.batch = static_cast<int32_t>(kv_len.size());
    l.qo_indptr = qo_indptr.data();
    l.kv_len = kv_len.data();
    l.block_table = block_table.data();
    l.block_table_stride = stride;
    return l;
  }
};

/** Updates of one plan; num_workers 0 = the machine's. */
void time_updates(benchmark::State& state, const Step& step, int32_t num_workers) {
  attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
  execution.num_workers = num_workers;
  attnfold_plan* plan = nullptr;
  require_ok(attnfold_plan_create(&step.problem, &execution, &plan));
  const attnfold_lengths lengths = step.lengths();
  for (auto _ : state) require_ok(attnfold_plan_update(plan, &lengths, nullptr));
  attnfold_plan_report report{};
  report.struct_size = sizeof(report);
  require_ok(attnfold_plan_get_report(plan, &report));
  state.counters["units"] = report.num_units;
  state.counters["cuts"] = report.num_cuts;
  state.counters["groups"] = report.num_prefix_groups;
  attnfold_plan_destroy(plan);
}

/** batch, longest kv_len, workers, ragged. */
void plan_update(benchmark::State& state) {
  const Step step(static_cast<int32_t>(state.range(0)), static_cast<int32_t>(state.range(1)),
                  state.range(3) != 0);
  time_updates(state, step, static_cast<int32_t>(state.range(2)));
}
BENCHMARK(plan_update)
    ->ArgNames({"batch", "kv_len", "workers", "ragged"})
    ->Args({1, 2048, 0, 0})
    ->Args({256, 128, 0, 0})
    ->Args({256, 2048, 0, 1})
    ->Args({256, 8192, 0, 1})
    ->Args({256, 2048, 64, 1})
    ->Unit(benchmark::kMicrosecond);

/** batch, kv_len, pages of 16 that all share, pages that each 4 share. */
void plan_update_shared(benchmark::State& state) {
  Step step(static_cast<int32_t>(state.range(0)), static_cast<int32_t>(state.range(1)), false);
  step.share(4, state.range(3));
  step.share(static_cast<int32_t>(state.range(0)), state.range(2));
  time_updates(state, step, 0);
}
BENCHMARK(plan_update_shared)
    ->ArgNames({"batch", "kv_len", "all", "fours"})
    ->Args({32, 8192, 256, 256})
    ->Args({256, 8192, 64, 64})
    ->Args({256, 8192, 64, 400})
    ->Args({256, 32768, 1920, 2000})
    ->Unit(benchmark::kMicrosecond);

/** A call of one request that can be run at once. */
class Ready {
 public:
  Ready(const attnfold::check::Spec& spec, int64_t num_threads)
      : call_(attnfold::check::generate(spec, 1)) {
    attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
    execution.num_threads = static_cast<int32_t>(num_threads);
    require_ok(attnfold_plan_create(&call_.problem, &execution, &plan_));
    const attnfold_lengths lengths = call_.lengths();
    require_ok(attnfold_plan_update(plan_, &lengths, nullptr));
    workspace_ = attnfold::check::Buffer(attnfold_plan_workspace_bytes(plan_));
    tensors_ = call_.tensors();
    tensors_.o = o_.data();
    tensors_.lse = lse_.data();
  }
  Ready(const Ready&) = delete;
  Ready& operator=(const Ready&) = delete;
  ~Ready() { attnfold_plan_destroy(plan_); }

  void run() {
    require_ok(attnfold_plan_run(plan_, &tensors_, workspace_.data(), workspace_.size(), nullptr));
    benchmark::DoNotOptimize(lse_.data());
  }

 private:
  Call call_;
  attnfold_plan* plan_ = nullptr;
  attnfold::check::Buffer o_ = attnfold::check::Buffer(32 * 128 * 4), workspace_;
  std::vector<float> lse_ = std::vector<float>(32);
  attnfold_tensors tensors_;
};

/** A whole layer's call of one head and 16 keys: threads are woken, little else. */
void tiny_run(benchmark::State& state) {
  attnfold::check::Spec spec;
  spec.problem.head_dim_qk = spec.problem.head_dim_vo = 64;
  spec.qo_len = {1};
  spec.kv_len = {16};
  Ready ready(spec, state.range(0));
  for (auto _ : state) ready.run();
}
BENCHMARK(tiny_run)
    ->ArgName("threads")
    ->Arg(1)
    ->Arg(2)
    ->Unit(benchmark::kMicrosecond)
    ->UseRealTime();

/** One decode of 4096 keys, 32/8 heads in bf16, after its threads had nothing to do for so long. */
void run_after_pause(benchmark::State& state) {
  attnfold::check::Spec spec;
  spec.problem.qo_heads = 32;
  spec.problem.kv_heads = 8;
  spec.problem.q_dtype = spec.problem.kv_dtype = spec.problem.o_dtype = ATTNFOLD_BF16;
  spec.qo_len = {1};
  spec.kv_len = {4096};
  Ready ready(spec, state.range(0));
  for (auto _ : state) {
    if (state.range(1) > 0) std::this_thread::sleep_for(std::chrono::microseconds(state.range(1)));
    const auto start = std::chrono::steady_clock::now();
    ready.run();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    state.SetIterationTime(time.count());
  }
}
BENCHMARK(run_after_pause)
    ->ArgNames({"threads", "pause_us"})
    ->Args({1, 0})
    ->Args({2, 0})
    ->Args({2, 200})
    ->Args({2, 1000})
    ->Unit(benchmark::kMicrosecond)
    ->UseManualTime()
    ->MeasureProcessCPUTime();

}  // namespace

BENCHMARK_MAIN();
