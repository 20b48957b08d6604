#include "explain_measured.h"

#include <fmt/format.h>

#include "bench_call.h"
#include "command.h"
#include "engine.h"
#include "explain_input.h"
#include "machine.h"

namespace attnfold::tools {
namespace {

BenchShape shape_of(const explain::Question& question) {
  const explain::Model& m = question.model;
  if (m.latent || m.d_qk != m.d_vo)
    throw BadInput("--measured: expected keys and values apart and of one width");
  if (question.q_type != question.kv_type || question.kv_bytes() < 2) {
    throw BadInput("--measured: expected q, k and v of one type, f32, f16 or bf16");
  }
  int64_t keys = 0;
  for (const explain::Request& r : question.batch) keys += r.kv;
  const int64_t pool = keys * m.h_kv * m.kv_elements() * question.kv_bytes();
  if (pool > available_memory_bytes() / 2) {
    throw BadInput(
        fmt::format("--measured: the batch has {} of K and V, more than half of the free memory",
                    bytes_text(static_cast<double>(pool))));
  }
  BenchShape shape;
  shape.name = m.name;
  shape.qo_heads = static_cast<int32_t>(m.h);
  shape.kv_heads = static_cast<int32_t>(m.h_kv);
  shape.dtype = static_cast<attnfold_dtype>(question.kv_type);
  shape.head_dim = static_cast<int32_t>(m.d_qk);
  shape.page_size = static_cast<int32_t>(question.page);
  for (const explain::Request& r : question.batch) {
    shape.qo_len.push_back(static_cast<int32_t>(r.q));
    shape.kv_len.push_back(static_cast<int32_t>(r.kv));
  }
  return shape;
}

}  // namespace

MeasuredRun measure_question(const explain::Question& question) {
  const BenchShape shape = shape_of(question);
  Progress progress;
  progress.show("measuring this machine");
  MeasuredRun run;
  run.machine = measured_machine();
  run.threads = static_cast<int32_t>(run.machine.sms);
  explain::Question here = question;
  here.machine = run.machine;
  run.line = explain::attnfold_engine(here);
  if (!run.line.used) throw BadInput("--measured: " + run.line.rule);
  explain::finish(here, run.line);

  progress.show("filling k and v");
  check::Call call = make_call(shape);
  call.problem.o_dtype = static_cast<attnfold_dtype>(question.o_type);
  if (question.windowed) call.problem.window_left = static_cast<int32_t>(question.model.window - 1);
  attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
  execution.num_threads = run.threads;
  try {
    PreparedCall prepared(call, execution);
    prepared.run();
    std::vector<double> us;
    for (double total = 0; us.size() < 5 || (total < 5e5 && us.size() < 1000); total += us.back()) {
      us.push_back(elapsed_us([&] { prepared.run(); }));
      progress.show(fmt::format("run {}", us.size()));
    }
    run.us = spread_of(us);
    run.runs = static_cast<int32_t>(us.size());
    run.kernel = prepared.kernel();
  } catch (const EngineError& error) {
    throw BadInput(fmt::format("--measured: {}", error.what()));
  }
  return run;
}

std::string measured_text(const MeasuredRun& run) {
  return fmt::format(
      "\nmeasured here: {} us (quartiles {}, {}; {} runs of {} on {} threads)\n"
      "floor here:    {} us, by {} GB/s read and {} GFLOP/s, measured just before; caches may hold "
      "KV\n",
      short_number(run.us.median), short_number(run.us.lower), short_number(run.us.upper), run.runs,
      run.kernel, run.threads, short_number(run.line.floor_us),
      short_number(run.machine.bytes_per_s / 1e9), short_number(run.machine.flop_per_s / 1e9));
}

}  // namespace attnfold::tools
