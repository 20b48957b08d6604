#include "bench_workers.h"

#include <fmt/format.h>

#include <cstring>
#include <optional>

#include "bench_call.h"
#include "command.h"
#include "engine.h"

namespace attnfold::tools {

WorkerSweep sweep_workers(const std::vector<int>& workers, int threads, const std::string& isa,
                          bool quick) {
  const check::Call call = make_call(decode_shape(1, quick ? 8192 : 32768, 32, 8));
  Table table({"workers", "units", "cuts", "inside", "partial", "us", "GB/s", "<bits"});
  WorkerSweep sweep;
  std::optional<check::Answer> first;
  Progress progress;
  for (const int n : workers) {
    attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
    execution.num_threads = threads;
    execution.num_workers = n;
    execution.isa = isa_or_null(isa);
    PreparedCall prepared(call, execution);
    prepared.run();
    std::vector<double> us;
    const size_t runs = quick ? 5 : 20;
    while (us.size() < runs) {
      us.push_back(elapsed_us([&] { prepared.run(); }));
      progress.show(fmt::format("{} workers, run {}", n, us.size()));
    }
    const attnfold_plan_report report = prepared.report();
    check::Answer answer = prepared.take_answer();
    const bool same =
        !first ||
        (std::memcmp(first->o.data(), answer.o.data(), answer.o.size()) == 0 &&
         std::memcmp(first->lse.data(), answer.lse.data(), answer.lse.size() * sizeof(float)) == 0);
    if (!first) first = std::move(answer);
    sweep.same_bits = sweep.same_bits && same;
    const double median = spread_of(us).median;
    table.add_row({fmt::format("{}", n), fmt::format("{}", report.num_units),
                   fmt::format("{}", report.num_cuts), fmt::format("{}", report.num_cuts_inside),
                   bytes_text(static_cast<double>(report.partial_bytes)), short_number(median),
                   short_number(static_cast<double>(report.kv_bytes) / median / 1e3),
                   same ? "same" : "OTHER"});
  }
  progress.clear();
  sweep.text = table.text();
  return sweep;
}

}  // namespace attnfold::tools
