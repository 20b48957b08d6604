// attnfold run: answers the call in a file, times it, and writes o and lse.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "check/call_file.h"
#include "command.h"
#include "engine.h"
#include "text.h"

namespace attnfold::tools {
namespace {

using nlohmann::json;

struct RunOptions {
  std::string file, out, isa, prefixes = "auto";
  int32_t threads = 0, workers = 0, repeat = 0;
  attnfold_backend backend = ATTNFOLD_CPU;
  bool as_json = false;
};

struct Timing {
  Spread run_us, update_us;
  int32_t num_runs = 0;
};

/** `repeat` timed runs after one that is not; 0 repeats for half a second, 3 to 1000 times. */
Timing time_call(PreparedCall& prepared, int32_t repeat) {
  Progress progress;
  prepared.run();
  std::vector<double> run_us, update_us;
  double total_us = 0;
  const int32_t most = repeat > 0 ? repeat : 1000;
  for (int32_t i = 0; i < most; ++i) {
    if (repeat == 0 && i >= 3 && total_us > 5e5) break;
    update_us.push_back(elapsed_us([&] { prepared.update(); }));
    run_us.push_back(elapsed_us([&] { prepared.run(); }));
    total_us += run_us.back();
    progress.show(fmt::format("run {} of at most {}", i + 1, most));
  }
  return {spread_of(run_us), spread_of(update_us), static_cast<int32_t>(run_us.size())};
}

/** A name, its value for people, its value for JSON. */
struct Line {
  const char* name;
  std::string text;
  json value;
};

std::vector<Line> timing_lines(const Timing& timing, const attnfold_plan_report& report,
                               double flop) {
  auto spread_text = [](const Spread& s) {
    return fmt::format("{} us (quartiles {}, {})", short_number(s.median), short_number(s.lower),
                       short_number(s.upper));
  };
  auto spread_json = [](const Spread& s) {
    return json{{"median", s.median}, {"q1", s.lower}, {"q3", s.upper}};
  };
  const double kv_gb_per_s = static_cast<double>(report.kv_bytes) / timing.run_us.median / 1e3;
  const double gflop_per_s = flop / timing.run_us.median / 1e3;
  return {{"runs", fmt::format("{}", timing.num_runs), timing.num_runs},
          {"run_us", spread_text(timing.run_us), spread_json(timing.run_us)},
          {"update_us", spread_text(timing.update_us), spread_json(timing.update_us)},
          {"kv_gb_per_s", short_number(kv_gb_per_s), kv_gb_per_s},
          {"gflop_per_s", short_number(gflop_per_s) + " (visible pairs)", gflop_per_s}};
}

std::vector<Line> plan_lines(const attnfold_plan_report& r, size_t workspace_bytes) {
  const double mean_cost = static_cast<double>(r.total_cost) / std::max(r.num_workers, 1);
  const double balance = mean_cost > 0 ? static_cast<double>(r.max_worker_cost) / mean_cost : 1.0;
  auto count = [](auto n) { return fmt::format("{}", n); };
  return {{"num_workers", count(r.num_workers), r.num_workers},
          {"num_requests", count(r.num_requests), r.num_requests},
          {"num_units", count(r.num_units), r.num_units},
          {"num_items", count(r.num_items), r.num_items},
          {"num_cuts", fmt::format("{} ({} inside a super-chunk)", r.num_cuts, r.num_cuts_inside),
           r.num_cuts},
          {"num_cuts_inside", "", r.num_cuts_inside},
          {"num_leaves", count(r.num_leaves), r.num_leaves},
          {"max_super_chunks", count(r.max_super_chunks), r.max_super_chunks},
          {"balance", fmt::format("{:.3f} (largest worker / mean)", balance), balance},
          {"partial_bytes", bytes_text(static_cast<double>(r.partial_bytes)), r.partial_bytes},
          {"kv_bytes", bytes_text(static_cast<double>(r.kv_bytes)), r.kv_bytes},
          {"num_prefix_groups",
           r.num_prefix_groups == 0
               ? "0"
               : fmt::format("{} ({} leaves read once)", r.num_prefix_groups, r.num_shared_leaves),
           r.num_prefix_groups},
          {"num_shared_leaves", "", r.num_shared_leaves},
          {"saved_kv_bytes",
           r.num_prefix_groups == 0 ? "" : bytes_text(static_cast<double>(r.saved_kv_bytes)),
           r.saved_kv_bytes},
          {"workspace_bytes", bytes_text(static_cast<double>(workspace_bytes)), workspace_bytes},
          {"schedule_id", fmt::format("{:016x}", r.schedule_id),
           fmt::format("{:016x}", r.schedule_id)}};
}

void print_lines(const std::vector<Line>& lines) {
  for (const Line& line : lines) {
    if (!line.text.empty()) fmt::print("  {:<18}{}\n", line.name, line.text);
  }
}

int run_run(const RunOptions& options) {
  require_isa(options.isa);
  const check::LoadResult loaded = check::load_call(options.file);
  if (!loaded.ok) throw BadInput(loaded.error);
  const check::Call& call = loaded.call;
  attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
  execution.num_threads = options.threads;
  execution.num_workers = options.workers;
  execution.isa = isa_or_null(options.isa);
  execution.prefix_use = options.prefixes == "off"      ? ATTNFOLD_PREFIX_OFF
                         : options.prefixes == "always" ? ATTNFOLD_PREFIX_ALWAYS
                                                        : ATTNFOLD_PREFIX_AUTO;
  execution.backend = options.backend;

  PreparedCall prepared(call, execution);
  const Timing timing = time_call(prepared, options.repeat);
  const attnfold_plan_report report = prepared.report();
  const std::vector<Line> times = timing_lines(timing, report, useful_flop(call));
  const std::vector<Line> plan = plan_lines(report, prepared.workspace_bytes());
  const std::string kernel = prepared.kernel(), numerics_id = prepared.numerics_id();
  if (!options.out.empty()) {
    const std::string error = check::save_answer(call, prepared.take_answer(), options.out);
    if (!error.empty()) throw BadInput(error);
  }

  if (options.as_json) {
    json out = {{"file", options.file},       {"out", options.out},
                {"kernel", kernel},           {"numerics_id", numerics_id},
                {"qo_rows", call.num_rows()}, {"timing", json::object()},
                {"plan", json::object()}};
    for (const Line& line : times) out["timing"][line.name] = line.value;
    for (const Line& line : plan) out["plan"][line.name] = line.value;
    fmt::print("{}\n", out.dump(2, ' ', false, json::error_handler_t::replace));
    return kRight;
  }
  fmt::print("{}\n", options.file);
  if (!call.origin.empty()) fmt::print("  {:<18}{}\n", "origin", wrapped(call.origin, 78, 20));
  fmt::print("  {:<18}{}  (numerics {})\n", "kernel", kernel, numerics_id);
  print_lines(times);
  fmt::print("plan\n");
  print_lines(plan);
  if (!options.out.empty()) fmt::print("o and lse written to {}\n", options.out);
  return kRight;
}

/** What the engine refuses is the caller's to change, unless it failed by itself. */
int run_run_or_explain(const RunOptions& options) {
  try {
    return run_run(options);
  } catch (const EngineError& error) {
    if (error.status == ATTNFOLD_INTERNAL) throw;
    throw BadInput(
        fmt::format("{}: {}: {}", options.file, attnfold_status_name(error.status), error.what()));
  }
}

}  // namespace

void add_run(CLI::App& app, Command& command) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* sub = app.add_subcommand("run", "Answer the call in FILE, time it, write o and lse");
  sub->add_option("FILE", options->file, "The call")->type_name("")->required();
  sub->add_option("--out", options->out, "Write o and lse to this safetensors file")
      ->check(not_empty())
      ->type_name("FILE");
  add_threads_flag(sub, options->threads);
  sub->add_option("--workers", options->workers,
                  "Shares that the work is cut into; default the threads")
      ->check(in_range(1, 1024));
  add_isa_flag(sub, options->isa);
  sub->add_option("--prefixes", options->prefixes,
                  "Shared prefixes: auto reads them once where that pays, off never, always "
                  "wherever there are any")
      ->type_name("auto|off|always")
      ->check(CLI::IsMember({"auto", "off", "always"}));
  add_backend_flag(sub, options->backend);
  sub->add_option("--repeat", options->repeat, "Timed runs; default as many as half a second holds")
      ->check(in_range(1, 1000000));
  sub->add_flag("--json", options->as_json, "Print JSON");
  sub->footer(
      "kv_gb_per_s counts the bytes of k and v that the plan reads, once per kv head and row set.\n"
      "Exit codes: 0 answered, 2 bad input or unsupported.");
  sub->callback(
      [options, &command] { command = [options] { return run_run_or_explain(*options); }; });
}

}  // namespace attnfold::tools
