#include "explain_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "explain/quantities.h"
#include "text.h"

namespace attnfold::tools {
namespace {

using explain::Line;
using explain::Question;
using nlohmann::ordered_json;

std::string bytes_of(int64_t bytes) { return bytes_text(static_cast<double>(bytes)); }

std::string batch_text(const Question& question) {
  const auto& batch = question.batch;
  const int64_t q = explain::longest_q(question), kv = explain::longest_kv(question);
  const bool equal = std::all_of(batch.begin(), batch.end(),
                                 [&](const explain::Request& r) { return r.q == q && r.kv == kv; });
  const char* requests = batch.size() == 1 ? "request" : "requests";
  if (!equal) {
    return fmt::format("{} {} of up to {} new tokens and {} keys", batch.size(), requests, q, kv);
  }
  return fmt::format("{} {} of {} new token{} and {} keys", batch.size(), requests, q,
                     q == 1 ? "" : "s", kv);
}

std::vector<std::string> cells_of(const Line& line) {
  const bool has_blocks = line.live > 0;
  const auto if_blocks = [&](std::string text) { return has_blocks ? std::move(text) : "-"; };
  return {line.engine,
          line.grid,
          if_blocks(fmt::format("{}/{}", line.live, line.launched)),
          splits_text(line.splits),
          if_blocks(fmt::format("{}", line.waves)),
          if_blocks(fmt::format("{:.1f} %", 100 * line.busy)),
          if_blocks(fmt::format("{}", line.keys_per_block)),
          if_blocks(fmt::format("{:.0f} %", 100 * line.wasted_rows)),
          bytes_of(line.partial_bytes),
          bytes_of(line.kv_bytes),
          if_blocks(fmt::format("x{}", short_number(explain::ratio(line.kv_loads, line.kv_bytes)))),
          short_number(line.intensity),
          line.compute_bound ? "compute" : "memory",
          short_number(line.floor_us),
          if_blocks(short_number(line.shared_us))};
}

}  // namespace

std::string splits_text(const std::vector<int32_t>& splits) {
  if (splits.empty()) return "-";
  const auto [low, high] = std::minmax_element(splits.begin(), splits.end());
  return *low == *high ? fmt::format("{}", *low) : fmt::format("{}..{}", *low, *high);
}

std::string call_text(const Question& question) {
  const explain::Model& m = question.model;
  return fmt::format(
      "{}: {}/{} heads of {}{}{}; {}", m.name, m.h, m.h_kv,
      m.d_qk == m.d_vo ? fmt::format("{}", m.d_qk) : fmt::format("{}/{}", m.d_qk, m.d_vo),
      m.latent ? ", latent" : "",
      question.windowed ? fmt::format(", window {}", m.window) : std::string(),
      batch_text(question));
}

std::string machine_text(const explain::Machine& machine) {
  return fmt::format("{}: {} {}, {} TB/s, {} TFLOP/s, ridge {} FLOP/B", machine.name, machine.sms,
                     machine.kind == explain::MachineKind::gpu ? "SMs" : "cores",
                     short_number(machine.bytes_per_s / 1e12),
                     short_number(machine.flop_per_s / 1e12),
                     short_number(explain::ridge(machine.flop_per_s, machine.bytes_per_s)));
}

std::string explain_text(const Question& question, const std::vector<Line>& lines) {
  Table table({"<engine", "<grid", "live/launched", "splits", "waves", "SMs busy", "keys/block",
               "wasted rows", "partial", "KV", "loaded", "FLOP/B", "<side", "floor us", "even us"});
  std::string others;
  for (const Line& line : lines) {
    if (line.used) {
      table.add_row(cells_of(line));
      table.add_note(line.rule);
    } else {
      others += fmt::format("  {:<18}{}\n", line.engine, line.rule);
    }
  }
  const int64_t kv = explain::distinct_kv_bytes(question);
  std::string text =
      fmt::format("{}\n{}\none layer reads {} of KV, {} layers {}\n\n{}", call_text(question),
                  machine_text(question.machine), bytes_of(kv), question.model.layers,
                  bytes_of(kv * question.model.layers), table.text());
  if (!others.empty()) text += "\nnot for this call\n" + others;
  return text +
         "\nloaded: what all blocks load of K and V, over KV.  even us: end of the last block if "
         "each SM "
         "has an\nequal share of bandwidth and peak and every load comes from memory; one block "
         "per SM at a "
         "time.\n";
}

ordered_json explain_json(const Question& question, const std::vector<Line>& lines) {
  const explain::Model& m = question.model;
  const explain::Machine& machine = question.machine;
  ordered_json out;
  out["model"] = {
      {"name", m.name},        {"source", m.source}, {"layers", m.layers},
      {"qo_heads", m.h},       {"kv_heads", m.h_kv}, {"head_dim_qk", m.d_qk},
      {"head_dim_vo", m.d_vo}, {"latent", m.latent}, {"window", question.windowed ? m.window : 0}};
  out["machine"] = {{"name", machine.name},
                    {"source", machine.source},
                    {"sms", machine.sms},
                    {"bytes_per_s", machine.bytes_per_s},
                    {"flop_per_s", machine.flop_per_s},
                    {"ridge", explain::ridge(machine.flop_per_s, machine.bytes_per_s)}};
  out["kv_bytes_layer"] = explain::distinct_kv_bytes(question);
  for (const Line& line : lines) {
    ordered_json one = {{"engine", line.engine}, {"used", line.used}, {"rule", line.rule}};
    if (line.used) {
      one.update({{"grid", line.grid},
                  {"launched", line.launched},
                  {"live", line.live},
                  {"splits", line.splits},
                  {"waves", line.waves},
                  {"busy", line.busy},
                  {"keys_per_block", line.keys_per_block},
                  {"wasted_rows", line.wasted_rows},
                  {"partial_bytes", line.partial_bytes},
                  {"kv_bytes", line.kv_bytes},
                  {"kv_loads", line.kv_loads},
                  {"bytes", line.bytes()},
                  {"flop", line.flop},
                  {"intensity", line.intensity},
                  {"side", line.compute_bound ? "compute" : "memory"},
                  {"floor_us", line.floor_us},
                  {"even_us", line.shared_us}});
    }
    out["engines"].push_back(std::move(one));
  }
  return out;
}

std::string known_text() {
  Table models({"<model", "layers", "heads", "head dim", "<window", "<source"});
  for (const explain::Model& m : explain::known_models()) {
    models.add_row({m.name, fmt::format("{}", m.layers), fmt::format("{}/{}", m.h, m.h_kv),
                    m.latent ? fmt::format("{}/{}", m.d_qk, m.d_vo) : fmt::format("{}", m.d_qk),
                    m.window > 0 ? fmt::format("{} in {} layers", m.window, m.window_layers) : "",
                    m.source});
  }
  Table machines({"<machine", "SMs", "TB/s", "TFLOP/s", "ridge", "<source"});
  for (const explain::Machine& m : explain::known_machines()) {
    machines.add_row({m.name, fmt::format("{}", m.sms), short_number(m.bytes_per_s / 1e12),
                      short_number(m.flop_per_s / 1e12),
                      short_number(explain::ridge(m.flop_per_s, m.bytes_per_s)), m.source});
  }
  return models.text() + "\n" + machines.text();
}

}  // namespace attnfold::tools
