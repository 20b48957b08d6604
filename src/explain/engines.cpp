#include "explain/engines.h"

#include <algorithm>
#include <queue>
#include <set>

#include "core/mask.h"
#include "explain/quantities.h"

namespace attnfold::explain {
namespace {

Mask mask_of(const Question& question) {
  Mask mask;
  mask.causal = 1;
  if (question.windowed && question.model.window > 0) {
    mask.window_left = static_cast<int32_t>(question.model.window - 1);
  }
  return mask;
}

int32_t narrow(int64_t x) { return static_cast<int32_t>(x); }

}  // namespace

std::string question_problem(const Question& question) {
  const auto bad = [](const char* name, const std::string& expected, int64_t got) {
    return std::string(name) + ": expected " + expected + ", got " + std::to_string(got);
  };
  const Model& m = question.model;
  if (const std::string problem = model_problem(m); !problem.empty()) return problem;
  const int64_t requests = static_cast<int64_t>(question.batch.size());
  if (requests < 1 || requests > 65536) return bad("batch", "1..65536 requests", requests);
  for (const Request& r : question.batch) {
    if (r.kv < 1 || r.kv > (1 << 24)) return bad("context", "1..16777216 keys", r.kv);
    if (r.q < 1 || r.q > r.kv) {
      return bad("query tokens", "1.." + std::to_string(r.kv) + ", no more than keys", r.q);
    }
  }
  if (total_q(question) > (1 << 18)) {
    return bad("query tokens", "at most 262144 in all", total_q(question));
  }
  if (question.machine.sms < 1 || question.machine.sms > 1024) {
    return bad("sms", "1..1024", question.machine.sms);
  }
  if (!(question.machine.bytes_per_s > 0) || !(question.machine.flop_per_s > 0)) {
    return "bandwidth and peak: expected numbers > 0";
  }
  if (question.page < 1 || question.page > (1 << 20)) {
    return bad("page size", "1..1048576", question.page);
  }
  if (question.windowed && m.window == 0) return "local: " + m.name + " has no windowed layers";
  int64_t shortest = question.batch[0].kv;
  for (const Request& r : question.batch) shortest = std::min(shortest, r.kv);
  if (question.shared_prefix < 0 || question.shared_prefix > shortest) {
    return bad("shared prefix", "0.." + std::to_string(shortest), question.shared_prefix);
  }
  return {};
}

bool decodes_only(const Question& question) { return longest_q(question) == 1; }

int64_t longest_q(const Question& question) {
  int64_t most = 0;
  for (const Request& r : question.batch) most = std::max(most, r.q);
  return most;
}

int64_t longest_kv(const Question& question) {
  int64_t most = 0;
  for (const Request& r : question.batch) most = std::max(most, r.kv);
  return most;
}

int64_t total_q(const Question& question) {
  int64_t sum = 0;
  for (const Request& r : question.batch) sum += r.q;
  return sum;
}

KeySpan tile_keys(const Question& question, const Request& r, int64_t token, int64_t n) {
  const VisibleKeys keys =
      visible_keys(mask_of(question), {narrow(r.q), narrow(r.kv)}, narrow(token), narrow(n));
  return {keys.begin, keys.end};
}

KeySpan seen_keys(const Question& question, const Request& r) {
  return tile_keys(question, r, 0, r.q);
}

int64_t visible_pairs(const Question& question) {
  const Mask mask = mask_of(question);
  int64_t pairs = 0;
  for (const Request& r : question.batch) {
    for (int32_t i = 0; i < narrow(r.q); ++i) {
      const VisibleKeys keys = visible_keys(mask, {narrow(r.q), narrow(r.kv)}, i);
      pairs += keys.end - keys.begin;
    }
  }
  return pairs;
}

int64_t distinct_kv_bytes(const Question& question) {
  int64_t keys = 0;
  for (const Request& r : question.batch) keys += seen_keys(question, r).size();
  return keys * question.model.h_kv * question.model.kv_elements() * question.kv_bytes();
}

Line not_used(const char* engine, std::string why) {
  Line line;
  line.engine = engine;
  line.used = false;
  line.rule = std::move(why);
  return line;
}

Line start(const Question& question, const char* engine) {
  const Model& m = question.model;
  Line line;
  line.engine = engine;
  line.splits.assign(question.batch.size(), 1);
  line.kv_bytes = distinct_kv_bytes(question);
  line.other_bytes = tensor_bytes(m.h, total_q(question), m.d_qk, question.q_bytes()) +
                     tensor_bytes(m.h, total_q(question), m.d_vo, question.o_bytes());
  line.flop = attention_flop(m.h, visible_pairs(question), m.d_qk, m.d_vo);
  return line;
}

std::vector<Span> timeline(const Question& question, const Line& line, size_t most) {
  const Model& m = question.model;
  const Machine& machine = question.machine;
  const double share = static_cast<double>(machine.sms);
  const int64_t key_bytes = m.kv_elements() * question.kv_bytes();
  using Free = std::pair<double, int32_t>;  // when, who
  std::priority_queue<Free, std::vector<Free>, std::greater<>> idle;
  for (int32_t w = 0; w < narrow(machine.sms); ++w) idle.emplace(0.0, w);
  std::vector<double> busy_until(static_cast<size_t>(machine.sms), 0.0);
  std::vector<Span> spans;
  for (const Block& block : line.blocks) {
    const double us = 1e6 * share *
                      floor_seconds(product_flop(block.tile_rows, block.keys, m.d_qk + m.d_vo),
                                    block.keys * block.kv_heads * key_bytes, machine.flop_per_s,
                                    machine.bytes_per_s);
    for (int64_t copy = 0; copy < block.copies; ++copy) {
      if (spans.size() == most) return spans;
      if (block.worker >= 0) {
        double& until = busy_until[static_cast<size_t>(block.worker % machine.sms)];
        spans.push_back({narrow(block.worker % machine.sms), block.request, until, until + us});
        until += us;
        continue;
      }
      const auto [when, who] = idle.top();
      idle.pop();
      spans.push_back({who, block.request, when, when + us});
      idle.emplace(when + us, who);
    }
  }
  return spans;
}

void finish(const Question& question, Line& line) {
  const Model& m = question.model;
  const Machine& machine = question.machine;
  int64_t rows = 0, tile_rows = 0;
  std::set<int32_t> workers;
  for (const Block& block : line.blocks) {
    line.live += block.copies;
    line.keys_per_block = std::max(line.keys_per_block, block.keys);
    line.kv_loads +=
        block.copies * block.keys * block.kv_heads * m.kv_elements() * question.kv_bytes();
    rows += block.copies * block.rows;
    tile_rows += block.copies * block.tile_rows;
    if (block.worker >= 0) workers.insert(block.worker);
  }
  line.waves = waves(line.launched, machine.sms);
  const int64_t at_work = workers.empty() ? line.live : static_cast<int64_t>(workers.size());
  line.busy = ratio(busy_sms(at_work, machine.sms), machine.sms);
  line.wasted_rows = tile_rows > 0 ? 1 - ratio(rows, tile_rows) : 0;
  line.intensity = intensity(line.flop, line.bytes());
  line.compute_bound = line.intensity > ridge(machine.flop_per_s, machine.bytes_per_s);
  line.floor_us =
      1e6 * floor_seconds(line.flop, line.bytes(), machine.flop_per_s, machine.bytes_per_s);
  constexpr size_t kMostSpans = size_t{1} << 24;
  for (const Span& span : timeline(question, line, kMostSpans)) {
    line.shared_us = std::max(line.shared_us, span.end_us);
  }
}

std::vector<Line> explain_call(const Question& question) {
  std::vector<Line> lines;
  for (auto* engine :
       {textbook, flash, vllm_unified, vllm_cascade, sglang_adaptive, sglang_deterministic,
        flashinfer_tensor_core, flashinfer_decode, flash_attention_2, flash_attention_3, flash_mla,
        paged_attention_v2, rocm_paged, attnfold_engine}) {
    lines.push_back(engine(question));
    if (lines.back().used) finish(question, lines.back());
  }
  return lines;
}

}  // namespace attnfold::explain
