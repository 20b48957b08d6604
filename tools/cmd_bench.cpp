// attnfold bench: decode and prefill beside what this machine can do at best.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench_call.h"
#include "bench_cuda.h"
#include "bench_cuda_shapes.h"
#include "bench_plot.h"
#include "bench_shape.h"
#include "bench_threads.h"
#include "bench_workers.h"
#include "command.h"
#include "engine.h"
#include "machine.h"
#include "measure.h"

namespace attnfold::tools {
namespace {

using nlohmann::json;

struct BenchOptions {
  std::vector<int> workers, threads;
  bool quick = false;
  std::string json_file, svg_file, isa;
  attnfold_backend backend = ATTNFOLD_CPU;
  std::vector<std::string> shapes, against;
};

struct Row {
  BenchShape shape;
  CacheState state = CacheState::cold;
  Measured measured;
};

/** Everything that one bench found. */
struct Results {
  struct Read {
    int64_t bytes;
    CacheState state;
    Ceiling linear;
  };
  std::vector<Read> reads;
  std::vector<Row> decodes, prefills;
  std::vector<std::pair<int32_t, int64_t>> group_kv_bytes;  // group size, what its plan reads
  struct Prefix {
    BenchShape shape;
    SharedPrefix measured;
  };
  std::vector<Prefix> prefixes;
};

const char* state_text(CacheState state) { return state == CacheState::cold ? "cold" : "warm"; }

constexpr int32_t kLongKvLen = 32768;

class Bench {
 public:
  Bench(Measure& measure, bool quick, bool sizes)
      : measure_(measure), quick_(quick), sizes_(sizes) {}

  Results run() {
    measure_.probe_peaks();
    groups(kLongKvLen, true);
    groups(4096, !quick_);
    if (sizes_) {
      for (const int32_t kv_len : {512, 1024, 2048, 8192, 16384, 65536, 131072, 262144})
        one(decode_shape(1, kv_len, 32, 8));
    }
    one(decode_shape(1, 2560, 32, 8));
    one(decode_shape(16, 2048, 32, 8));
    one(typed(decode_shape(1, 32768, 32, 8), ATTNFOLD_F16));
    one(typed(decode_shape(1, 16384, 32, 8), ATTNFOLD_F32));
    one(typed(decode_shape(1, 65536, 32, 8), ATTNFOLD_E4M3));
    one(typed(decode_shape(1, 65536, 32, 8), ATTNFOLD_I8));
    one(mla_shape(8192));
    if (!quick_) {
      one(ragged_shape(32, 8));
      BenchShape page_1 = decode_shape(1, 32768, 32, 8);
      page_1.page_size = 1;
      page_1.name += " page 1";
      one(page_1);
    }
    prefix(8, 4096, 32, 8);
    if (!quick_) {
      prefix(32, 4096, 32, 8);
      prefix(8, 4096, 8, 8);
      prefix(8, 4096, 64, 8);
    }
    measure_.probe_peaks();
    prefill(prefill_shape(2048, 2048, 32, 8));
    if (!quick_) prefill(prefill_shape(512, 8192, 32, 8));
    measure_.probe_peaks();
    return std::move(results_);
  }

  /** These alone. */
  Results run(const std::vector<BenchShape>& shapes) {
    measure_.probe_peaks();
    for (const BenchShape& shape : shapes) {
      if (is_prefill(shape)) {
        prefill(shape);
      } else {
        one(shape);
      }
    }
    measure_.probe_peaks();
    return std::move(results_);
  }

 private:
  static BenchShape typed(BenchShape shape, attnfold_dtype dtype) {
    shape.dtype = dtype;
    return shape;
  }

  /** In both states where it fits into the cache, else cold. */
  void states(const check::Call& call, const BenchShape& shape) {
    const int64_t bytes = measure_.planned_kv_bytes(call);
    const std::string name = fmt::format("{} {}/{}", shape.name, shape.qo_heads, shape.kv_heads);
    if (measure_.fits_in_cache(bytes)) {
      results_.decodes.push_back(
          {shape, CacheState::warm, measure_.decode(call, CacheState::warm, name)});
    }
    results_.decodes.push_back(
        {shape, CacheState::cold, measure_.decode(call, CacheState::cold, name)});
  }

  void one(const BenchShape& shape) { states(make_call(shape), shape); }

  /** One request of kv_len keys at 8 kv heads: its pools read linearly, then groups of 4, or of 1,
   * 4 and 8 query heads. */
  void groups(int32_t kv_len, bool all) {
    constexpr int32_t kKvHeads = 8;
    const check::Call base = make_call(decode_shape(1, kv_len, 4 * kKvHeads, kKvHeads));
    const int64_t bytes = measure_.planned_kv_bytes(base);
    for (const CacheState state : {CacheState::warm, CacheState::cold}) {
      if (state == CacheState::warm && !measure_.fits_in_cache(bytes)) continue;
      results_.reads.push_back({bytes, state, measure_.linear_read(base, state)});
    }
    for (const int32_t group_size : {1, 4, 8}) {
      if (group_size != 4 && !all) continue;
      const BenchShape shape = decode_shape(1, kv_len, group_size * kKvHeads, kKvHeads);
      const check::Call call = with_qo_heads(base, shape.qo_heads);
      const int64_t kv_bytes = measure_.planned_kv_bytes(call);
      if (kv_len == kLongKvLen) results_.group_kv_bytes.emplace_back(group_size, kv_bytes);
      states(call, shape);
    }
  }

  /** Decodes of `keys` shared keys and 128 of their own each. */
  void prefix(int32_t batch, int32_t keys, int32_t qo_heads, int32_t kv_heads) {
    BenchShape shape = decode_shape(batch, keys + 128, qo_heads, kv_heads);
    shape.name = fmt::format("{} on {} + 128", batch, keys);
    const check::Call call = prefix_call(batch, keys, 128, qo_heads, kv_heads);
    results_.prefixes.push_back({shape, measure_.prefix(call, shape.name)});
  }

  void prefill(const BenchShape& shape) {
    const check::Call call = make_call(shape);
    results_.prefills.push_back({shape, CacheState::warm, measure_.prefill(call, shape.name)});
  }

  Measure& measure_;
  bool quick_, sizes_;
  Results results_;
};

/** Peak that the roofline takes: the largest measured, whatever instruction the kernel uses. */
double largest_peak(const Measure& measure) {
  return std::max({measure.fma.value, measure.dot.value, measure.tiles.value});
}

struct Roofline {
  double gb_per_s;
  bool is_read;
};

Roofline roofline_of(const Measured& m, double peak) {
  const double by_peak = peak / m.flop_per_byte();
  return {std::min(m.table_read.value, by_peak), m.table_read.value <= by_peak};
}

/** Decodes of one request, 32 query over 8 kv heads in bf16, by size. */
std::string plot_of(const Results& results, double peak) {
  PlotLine cold{"cold", {}}, warm{"warm", {}};
  for (const Row& row : results.decodes) {
    const BenchShape& shape = row.shape;
    const bool is_plain = shape.kv_len.size() == 1 && shape.qo_heads == 32 && shape.kv_heads == 8 &&
                          shape.dtype == ATTNFOLD_BF16 && shape.head_dim == 128 &&
                          shape.page_size == 16;
    if (!is_plain) continue;
    const Measured& m = row.measured;
    PlotLine& line = row.state == CacheState::cold ? cold : warm;
    line.points.push_back(
        {static_cast<double>(m.kv_bytes), m.gb_per_s() / roofline_of(m, peak).gb_per_s});
  }
  const auto by_size = [](const PlotPoint& a, const PlotPoint& b) {
    return a.kv_bytes < b.kv_bytes;
  };
  std::sort(cold.points.begin(), cold.points.end(), by_size);
  std::sort(warm.points.begin(), warm.points.end(), by_size);
  return fraction_plot("attnfold decode, bf16, 32/8 heads of 128: share of the roofline",
                       {cold, warm});
}

bool kv_is_read_once(const Results& results) {
  const auto& all = results.group_kv_bytes;
  return std::all_of(all.begin(), all.end(),
                     [&](const auto& g) { return g.second == all.front().second; });
}

void print_ceilings(const Results& results, const Measure& measure) {
  Table table({"<ceiling", "", "<unit", "<best of its loops"});
  for (const Results::Read& read : results.reads) {
    table.add_row({fmt::format("linear read, {} {}", bytes_text(static_cast<double>(read.bytes)),
                               state_text(read.state)),
                   short_number(read.linear.value), "GB/s", read.linear.loop});
  }
  table.add_row({"f32 multiply-add", short_number(measure.fma.value), "GFLOP/s", measure.fma.loop});
  if (measure.dot.value > 0) {
    table.add_row(
        {"bf16 dot product", short_number(measure.dot.value), "GFLOP/s", measure.dot.loop});
  }
  if (measure.tiles.value > 0) {
    table.add_row({"bf16 tiles", short_number(measure.tiles.value), "GFLOP/s", measure.tiles.loop});
  }
  fmt::print("{}\n", table.text());
}

void print_decodes(const Results& results, double peak) {
  fmt::print(
      "decode, head dim 128, pages of 16 where not said, permuted\n"
      "table GB/s: a pure read of the same pages in table order and the same state\n");
  Table table({"<shape", "heads", "<kv", "<state", "KV MB", "us", "GB/s", "GFLOP/s", "table GB/s",
               "roofline", "<by", "of it"});
  for (const Row& row : results.decodes) {
    const Measured& m = row.measured;
    const Roofline roofline = roofline_of(m, peak);
    table.add_row({row.shape.name, fmt::format("{}/{}", row.shape.qo_heads, row.shape.kv_heads),
                   dtype_name(static_cast<DType>(row.shape.dtype)), state_text(row.state),
                   short_number(static_cast<double>(m.kv_bytes) / 1e6), short_number(m.us.median),
                   short_number(m.gb_per_s()), short_number(m.gflop_per_s()),
                   short_number(m.table_read.value), short_number(roofline.gb_per_s),
                   roofline.is_read ? "read" : "peak",
                   fmt::format("{:.0f} %", 100 * m.gb_per_s() / roofline.gb_per_s)});
  }
  fmt::print("{}\n", table.text());
  if (results.group_kv_bytes.empty()) return;
  fmt::print("KV bytes that the plan reads at 8 kv heads:");
  for (const auto& [group_size, bytes] : results.group_kv_bytes)
    fmt::print("  group {} {}", group_size, bytes);
  fmt::print("  ({})\n\n", kv_is_read_once(results) ? "the same" : "NOT THE SAME");
}

void print_prefixes(const Results& results) {
  fmt::print(
      "decodes on one shared prefix: its keys read once for all, against each request its own\n");
  Table table({"<shape", "heads", "KV MB", "us", "own KV MB", "own us", "time ratio"});
  for (const Results::Prefix& row : results.prefixes) {
    const SharedPrefix& m = row.measured;
    table.add_row({row.shape.name, fmt::format("{}/{}", row.shape.qo_heads, row.shape.kv_heads),
                   short_number(static_cast<double>(m.shared.kv_bytes) / 1e6),
                   short_number(m.shared_us.median),
                   short_number(static_cast<double>(m.own.kv_bytes) / 1e6),
                   short_number(m.own_us.median), fmt::format("{:.2f}", m.ratio())});
  }
  fmt::print("{}\n", table.text());
}

void print_prefills(const Results& results, double peak) {
  fmt::print("prefill, causal, head dim 128, pages of 16 permuted; GFLOP/s on visible pairs\n");
  Table table({"<shape", "heads", "<kv", "us", "GFLOP/s", "of peak"});
  for (const Row& row : results.prefills) {
    const Measured& m = row.measured;
    table.add_row({row.shape.name, fmt::format("{}/{}", row.shape.qo_heads, row.shape.kv_heads),
                   dtype_name(static_cast<DType>(row.shape.dtype)), short_number(m.us.median),
                   short_number(m.gflop_per_s()),
                   fmt::format("{:.0f} %", 100 * m.gflop_per_s() / peak)});
  }
  fmt::print("{}", table.text());
}

json row_json(const Row& row, const char* kind, double peak) {
  const Measured& m = row.measured;
  json out = {{"kind", kind},
              {"shape", row.shape.name},
              {"qo_heads", row.shape.qo_heads},
              {"kv_heads", row.shape.kv_heads},
              {"head_dim", row.shape.head_dim},
              {"page_size", row.shape.page_size},
              {"layout", row.shape.head_major ? "hnd" : "nhd"},
              {"dtype", dtype_name(static_cast<DType>(row.shape.dtype))}};
  out.update(as_json(m, peak));
  if (m.table_read.value > 0) {
    const Roofline roofline = roofline_of(m, peak);
    out.update({{"state", state_text(row.state)},
                {"gb_per_s", m.gb_per_s()},
                {"table_read_gb_per_s", m.table_read.value},
                {"table_read_loop", m.table_read.loop},
                {"roofline_gb_per_s", roofline.gb_per_s},
                {"bound_by", roofline.is_read ? "read" : "peak"},
                {"of_roofline", m.gb_per_s() / roofline.gb_per_s}});
  }
  return out;
}

json results_json(const Results& results, const Measure& measure, double others) {
  const double peak = largest_peak(measure);
  json out = {{"version", version_text()},
              {"cpu", cpu_model()},
              {"cpu_features", cpu_features()},
              {"threads", measure.threads()},
              {"cpus_used_by_others", others},
              {"cache_bytes", measure.cache_bytes()},
              {"fma_gflop_per_s", measure.fma.value},
              {"bf16_dot_gflop_per_s", measure.dot.value},
              {"bf16_tiles_gflop_per_s", measure.tiles.value},
              {"linear_reads", json::array()},
              {"group_kv_bytes", json::array()},
              {"rows", json::array()}};
  for (const Results::Read& read : results.reads) {
    out["linear_reads"].push_back({{"bytes", read.bytes},
                                   {"state", state_text(read.state)},
                                   {"gb_per_s", read.linear.value},
                                   {"loop", read.linear.loop}});
  }
  for (const auto& [group_size, bytes] : results.group_kv_bytes) {
    out["group_kv_bytes"].push_back({{"group_size", group_size}, {"kv_bytes", bytes}});
  }
  for (const Row& row : results.decodes) out["rows"].push_back(row_json(row, "decode", peak));
  for (const Row& row : results.prefills) out["rows"].push_back(row_json(row, "prefill", peak));
  for (const Results::Prefix& row : results.prefixes) {
    const SharedPrefix& m = row.measured;
    out["shared_prefixes"].push_back({{"shape", row.shape.name},
                                      {"qo_heads", row.shape.qo_heads},
                                      {"kv_heads", row.shape.kv_heads},
                                      {"us", m.shared_us.median},
                                      {"own_us", m.own_us.median},
                                      {"kv_bytes", m.shared.kv_bytes},
                                      {"own_kv_bytes", m.own.kv_bytes},
                                      {"time_ratio", m.ratio()}});
  }
  return out;
}

/** Threads that the library would take. */
int32_t default_threads() {
  const char* text = std::getenv("ATTNFOLD_NUM_THREADS");
  if (text == nullptr || *text == '\0') return num_usable_cpus();
  std::string number = text;
  if (const std::string bad = in_range(1, 1024)(number); !bad.empty())
    throw BadInput("ATTNFOLD_NUM_THREADS: " + bad);
  return std::atoi(text);
}

int32_t threads_of(const BenchOptions& options) {
  return options.threads.empty() ? default_threads() : options.threads.front();
}

int run_worker_sweep(const BenchOptions& options) {
  try {
    const WorkerSweep sweep =
        sweep_workers(options.workers, threads_of(options), options.isa, options.quick);
    fmt::print("{}", sweep.text);
    return sweep.same_bits ? kRight : kWrong;
  } catch (const EngineError& error) {
    if (error.status == ATTNFOLD_INTERNAL) throw;
    throw BadInput(error.what());
  }
}

int run_thread_sweep(const BenchOptions& options, std::ofstream& file) {
  try {
    const ThreadSweep sweep =
        sweep_threads(options.threads, options.shapes, options.isa, options.quick);
    fmt::print("{}", sweep.text);
    if (file.is_open()) {
      file << sweep.json.dump(2) << "\n";
      if (!file.flush()) throw BadInput(fmt::format("--json: cannot write {}", options.json_file));
    }
    return kRight;
  } catch (const EngineError& error) {
    if (error.status == ATTNFOLD_INTERNAL) throw;
    throw BadInput(error.what());
  }
}

/** Opens `path` where one is given. */
std::ofstream open_output(const char* flag, const std::string& path) {
  std::ofstream file;
  if (path.empty()) return file;
  file.open(path);
  if (!file)
    throw BadInput(fmt::format("{}: expected a file that can be written, got {}", flag, path));
  return file;
}

std::vector<Library> libraries_of(const BenchOptions& options) {
  try {
    return load_libraries(options.against);
  } catch (const std::runtime_error& error) {
    throw BadInput(
        fmt::format("--against: expected a shared library of attnfold, got {}", error.what()));
  }
}

/** Before anything is opened or timed. */
void require_shapes(const std::vector<std::string>& given, const std::vector<std::string>& known) {
  for (const std::string& name : given) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      throw BadInput(
          fmt::format("--shapes: expected some of {}, got {}", fmt::join(known, ", "), name));
    }
  }
}

int run_bench_on_gpu(const BenchOptions& options) {
  const std::pair<const char*, bool> of_cpus[] = {{"--workers", !options.workers.empty()},
                                                  {"--threads", !options.threads.empty()},
                                                  {"--isa", !options.isa.empty()},
                                                  {"--svg", !options.svg_file.empty()}};
  for (const auto& [flag, given] : of_cpus) {
    if (given) throw BadInput(fmt::format("{}: expected with --backend cpu alone", flag));
  }
  require_shapes(options.shapes, cuda_shape_names());
  const std::vector<Library> libraries = libraries_of(options);
  for (const attnfold_kernel_info& row : kernel_table()) {
    if (std::string(row.isa) == "cuda" && row.available == 0) {
      throw BadInput(
          fmt::format("--backend: expected one that this machine runs, got cuda; {}", row.why_not));
    }
  }
  open_output("--json", options.json_file);
#if defined(ATTNFOLD_WITH_CUDA)
  try {
    bench_cuda(options.shapes, libraries, options.quick ? 4 : 12, options.json_file);
  } catch (const std::runtime_error& error) {
    throw BadInput(fmt::format("--backend cuda: {}", error.what()));
  }
#endif
  return kRight;
}

int run_bench(const BenchOptions& options) {
  if (options.backend == ATTNFOLD_CUDA) return run_bench_on_gpu(options);
  if (!options.against.empty()) throw BadInput("--against: expected with --backend cuda");
  const bool sweeps_threads = options.threads.size() > 1 && options.workers.empty();
  std::vector<BenchShape> shapes;
  if (sweeps_threads) {
    require_shapes(options.shapes, sweep_shape_names());
  } else {
    for (const std::string& text : options.shapes) shapes.push_back(parse_shape(text));
  }
  require_isa(options.isa);
  if (!options.workers.empty()) {
    if (options.threads.size() > 1) {
      throw BadInput(fmt::format("--threads: expected one number beside --workers, got {}",
                                 fmt::join(options.threads, ",")));
    }
    if (!options.json_file.empty()) throw BadInput("--json: expected without --workers");
    if (!options.shapes.empty()) throw BadInput("--shapes: expected without --workers");
  }
  if (!options.svg_file.empty() &&
      (sweeps_threads || !options.workers.empty() || !options.shapes.empty()))
    throw BadInput("--svg: expected without --workers, --shapes and several --threads");
  if (!options.workers.empty()) return run_worker_sweep(options);
  std::ofstream file = open_output("--json", options.json_file);
  std::ofstream svg = open_output("--svg", options.svg_file);
  if (sweeps_threads) return run_thread_sweep(options, file);
  const double foreign_before = foreign_cpu_seconds();
  const auto start = std::chrono::steady_clock::now();
  Progress progress;
  Measure measure(threads_of(options), options.isa, options.quick ? 0.5 : 3.0, progress);
  Results results;
  try {
    Bench bench(measure, options.quick, !options.svg_file.empty());
    results = shapes.empty() ? bench.run() : bench.run(shapes);
  } catch (const EngineError& error) {
    if (error.status == ATTNFOLD_INTERNAL) throw;
    throw BadInput(error.what());
  }
  progress.clear();
  const double seconds = elapsed_us_since(start) / 1e6;
  const double others =
      foreign_before < 0 ? -1 : std::max(0.0, foreign_cpu_seconds() - foreign_before) / seconds;

  const double peak = largest_peak(measure);
  fmt::print("attnfold {}, {}, {} threads, {} last-level cache\n", version_text(), cpu_model(),
             measure.threads(), bytes_text(static_cast<double>(measure.cache_bytes())));
  const std::vector<Row>& first = results.decodes.empty() ? results.prefills : results.decodes;
  fmt::print("kernel {}\n", first.front().measured.kernel);
  if (others >= 0) {
    fmt::print("other processes used {:.2f} CPUs meanwhile{}\n", others,
               others > 0.2 ? ": the figures below are low" : "");
  }
  fmt::print("\n");
  print_ceilings(results, measure);
  if (!results.decodes.empty()) print_decodes(results, peak);
  if (!results.prefixes.empty()) print_prefixes(results);
  if (!results.prefills.empty()) print_prefills(results, peak);
  if (file.is_open()) {
    file << results_json(results, measure, others).dump(2) << "\n";
    if (!file.flush()) throw BadInput(fmt::format("--json: cannot write {}", options.json_file));
  }
  if (svg.is_open()) {
    svg << plot_of(results, peak);
    if (!svg.flush()) throw BadInput(fmt::format("--svg: cannot write {}", options.svg_file));
  }
  return kv_is_read_once(results) ? kRight : kWrong;
}

}  // namespace

void add_bench(CLI::App& app, Command& command) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* sub =
      app.add_subcommand("bench", "Time decode and prefill beside the ceilings of this machine");
  sub->add_flag("--quick", options->quick, "Fewer shapes and rounds: under 40 seconds on 2 cores");
  add_numbers(sub, "--workers", options->workers, 1, 1024,
              "Instead: one long decode cut into each of these numbers of shares");
  add_numbers(
      sub, "--threads", options->threads, 1, 1024,
      "Threads; default ATTNFOLD_NUM_THREADS, else the CPUs of this process.  Several numbers: "
      "instead, a few shapes at each of them");
  add_isa_flag(sub, options->isa);
  add_backend_flag(sub, options->backend);
  add_names(
      sub, "--shapes", options->shapes,
      "CUDA or several --threads: these shapes of the table alone.  Else these instead of the "
      "table: " +
          std::string(kShapeForm));
  add_names(sub, "--against", options->against,
            "CUDA: other builds of the shared library, timed in turns with this one")
      ->type_name("LIBS");
  sub->add_option("--json", options->json_file, "Write the results to this file too")
      ->check(not_empty())
      ->type_name("FILE");
  sub->add_option("--svg", options->svg_file,
                  "Time decodes of 2 MB to 1 GB too, and plot their share of the roofline")
      ->check(not_empty())
      ->type_name("FILE");
  sub->footer(
      "Ceilings are the best of at least six loops each, measured in the same run.  roofline = the "
      "smaller of a pure read\n"
      "of the same pages in table order and state, and the largest peak / FLOP per KV byte.  warm: "
      "the KV fits into the\n"
      "last-level cache and was just read; cold: it was evicted before each call, or is far "
      "larger.  Medians.\n"
      "Exit codes: 0, 1 if a plan reads the KV more than once for a larger group, 2 bad input.");
  sub->callback([options, &command] { command = [options] { return run_bench(*options); }; });
}

}  // namespace attnfold::tools
