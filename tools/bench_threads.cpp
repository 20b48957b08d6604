#include "bench_threads.h"

#include <fmt/format.h>

#include <algorithm>

#include "bench_call.h"
#include "command.h"
#include "machine.h"
#include "measure.h"

namespace attnfold::tools {
namespace {

using nlohmann::json;

struct SweepShape {
  const char* name;  // on the command line
  BenchShape shape;
  CacheState state;
  bool is_prefill;
};

std::vector<SweepShape> all_shapes() {
  return {
      {"16x8192", decode_shape(16, 8192, 32, 8), CacheState::cold, false},
      {"1x32768", decode_shape(1, 32768, 32, 8), CacheState::cold, false},
      {"1x4096", decode_shape(1, 4096, 32, 8), CacheState::warm, false},
      {"2048", prefill_shape(2048, 2048, 32, 8), CacheState::warm, true},
      {"512on8192", prefill_shape(512, 8192, 32, 8), CacheState::warm, true},
  };
}

std::vector<SweepShape> chosen_shapes(const std::vector<std::string>& names) {
  std::vector<SweepShape> all = all_shapes();
  if (names.empty()) return all;
  std::vector<SweepShape> chosen;
  for (const std::string& name : names) {
    const auto found =
        std::find_if(all.begin(), all.end(), [&](const SweepShape& s) { return s.name == name; });
    if (found != all.end()) chosen.push_back(*found);
  }
  return chosen;
}

std::string share(double part, double whole) {
  return whole > 0 ? fmt::format("{:.0f} %", 100 * part / whole) : "";
}

/** One line of the table. */
struct Row {
  const SweepShape* shape;
  int threads;
  Measured measured;
  double peak;  // GFLOP/s, of as many threads

  /** How much longer than a read of the same bytes. */
  double us_over_read() const {
    return measured.us.median -
           static_cast<double>(measured.kv_bytes) / measured.table_read.value / 1e3;
  }

  void add_to(Table& table, double first_us) const {
    const Measured& m = measured;
    const bool reads = !shape->is_prefill;
    table.add_row(
        {shape->shape.name, reads ? (shape->state == CacheState::cold ? "cold" : "warm") : "",
         fmt::format("{}", threads), short_number(m.us.median), short_number(m.us.lower),
         short_number(m.us.upper), fmt::format("{:.2f}", first_us / m.us.median),
         reads ? short_number(m.gb_per_s()) : "", reads ? short_number(m.table_read.value) : "",
         reads ? share(m.gb_per_s(), m.table_read.value) : "",
         reads ? fmt::format("{:.0f}", us_over_read()) : "", short_number(m.gflop_per_s()),
         share(m.gflop_per_s(), peak)});
  }

  json as_json() const {
    const Measured& m = measured;
    json out = {{"shape", shape->shape.name}, {"threads", threads}};
    out.update(tools::as_json(m, peak));
    if (!shape->is_prefill) {
      out.update({{"state", shape->state == CacheState::cold ? "cold" : "warm"},
                  {"gb_per_s", m.gb_per_s()},
                  {"table_read_gb_per_s", m.table_read.value},
                  {"us_over_read", us_over_read()}});
    }
    return out;
  }
};

}  // namespace

std::vector<std::string> sweep_shape_names() {
  std::vector<std::string> names;
  for (const SweepShape& s : all_shapes()) names.emplace_back(s.name);
  return names;
}

ThreadSweep sweep_threads(const std::vector<int>& threads, const std::vector<std::string>& shapes,
                          const std::string& isa, bool quick) {
  const std::vector<SweepShape> chosen = chosen_shapes(shapes);
  Progress progress;
  std::vector<Measure> measures;
  Table peaks({"threads", "f32 multiply-add GFLOP/s", "bf16 dot", "bf16 tiles"});
  ThreadSweep sweep;
  sweep.json = {{"version", version_text()},
                {"cpu", cpu_model()},
                {"isa", isa},
                {"peaks", json::array()},
                {"rows", json::array()}};
  const auto text_of = [](double x) { return x > 0 ? short_number(x) : std::string(); };
  for (const int n : threads) {
    Measure& m = measures.emplace_back(n, isa, quick ? 0.1 : 1.0, progress);
    m.probe_peaks();
    peaks.add_row(
        {fmt::format("{}", n), text_of(m.fma.value), text_of(m.dot.value), text_of(m.tiles.value)});
    sweep.json["peaks"].push_back({{"threads", n},
                                   {"fma_gflop_per_s", m.fma.value},
                                   {"bf16_dot_gflop_per_s", m.dot.value},
                                   {"bf16_tiles_gflop_per_s", m.tiles.value}});
  }
  Table table({"<shape", "<state", "threads", "us", "q1", "q3", "speed-up", "GB/s", "table GB/s",
               "of it", "us over it", "GFLOP/s", "of peak"});
  std::string kernel;
  for (const SweepShape& shape : chosen) {
    const check::Call call = make_call(shape.shape);
    double first_us = 0;
    for (Measure& m : measures) {
      const std::string name = fmt::format("{}, {} threads", shape.shape.name, m.threads());
      const double peak = std::max({m.fma.value, m.dot.value, m.tiles.value});
      const Row row{&shape, m.threads(),
                    shape.is_prefill ? m.prefill(call, name) : m.decode(call, shape.state, name),
                    peak};
      if (first_us == 0) first_us = row.measured.us.median;
      kernel = row.measured.kernel;
      row.add_to(table, first_us);
      sweep.json["rows"].push_back(row.as_json());
    }
  }
  progress.clear();
  sweep.text = fmt::format("attnfold {}, {}, kernel {}\n\n{}\n", version_text(), cpu_model(),
                           kernel, peaks.text());
  sweep.text += fmt::format(
      "head dim 128, bf16, 32/8 heads, pages of 16 permuted; table GB/s: a pure read of the same "
      "pages in table order\n{}",
      table.text());
  return sweep;
}

}  // namespace attnfold::tools
