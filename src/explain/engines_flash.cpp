// FlashAttention 2 and 3, FlashMLA.
#include <fmt/format.h>

#include "explain/engines.h"
#include "explain/heuristics.h"

namespace attnfold::explain {
namespace {

int32_t narrow(int64_t x) { return static_cast<int32_t>(x); }

/** Row tiles of `m` rows and `splits` runs of key blocks of request i, for each of `copies` heads
 * with `rows_per_token` rows. */
void add_tiles(const Question& question, size_t i, fa3::Tile tile, int64_t splits, int64_t copies,
               int64_t rows_per_token, Line& line) {
  const Request& r = question.batch[i];
  const int64_t rows = r.q * rows_per_token;
  for (int64_t row = 0; row < rows; row += tile.m) {
    const int64_t n = std::min(tile.m, rows - row);
    const int64_t first = row / rows_per_token, last = (row + n - 1) / rows_per_token;
    const KeySpan seen = tile_keys(question, r, first, last - first + 1);
    const int64_t begin = seen.begin / tile.n, end = ceil_div(seen.end, tile.n);
    const int64_t run = std::max<int64_t>(ceil_div(end - begin, splits), 1);
    for (int64_t block = begin; block < end; block += run) {
      const int64_t from = std::max(block * tile.n, seen.begin),
                    to = std::min((block + run) * tile.n, seen.end);
      line.blocks.push_back({narrow(static_cast<int64_t>(i)), -1, copies, to - from, 1, n, tile.m});
    }
  }
}

}  // namespace

Line flash_attention_2(const Question& question) {
  constexpr int64_t kRows = 64, kMostSplits = 128;
  const Model& m = question.model;
  const char* name = "FA2";
  if (m.latent || m.d_qk > 256) {
    return not_used(name, fmt::format("head widths are at most 256, got {}", m.d_qk));
  }
  if (question.q_bytes() != 2 || question.kv_bytes() != 2) {
    return not_used(name, "q, k and v are fp16 or bf16 alike");
  }
  const int64_t requests = static_cast<int64_t>(question.batch.size());
  const int64_t tokens = longest_q(question);
  // One query token: the heads of a group take the place of tokens.
  const bool swapped = tokens == 1 && m.group() > 1 && !question.windowed && !m.alibi;
  const int64_t heads = swapped ? m.h_kv : m.h, rows = swapped ? m.group() : tokens;
  const int64_t blocks = requests * heads * ceil_div(rows, kRows);
  const int64_t n_blocks = ceil_div(longest_kv(question), fa2::block_n(m.d_qk));
  const bool one = question.switches.batch_invariant;
  const int64_t given = question.switches.fa_splits;
  const int64_t splits = one ? 1
                         : given > 0
                             ? given
                             : fa2::num_splits(blocks, question.machine.sms, n_blocks, kMostSplits);
  Line line = start(question, name);
  for (size_t i = 0; i < question.batch.size(); ++i) {
    const size_t before = line.blocks.size();
    add_tiles(question, i, {kRows, fa2::block_n(m.d_qk)}, splits, heads, swapped ? m.group() : 1,
              line);
    const int64_t tiles = ceil_div(question.batch[i].q * (swapped ? m.group() : 1), kRows);
    line.splits[i] = narrow(ceil_div(static_cast<int64_t>(line.blocks.size() - before), tiles));
    if (splits > 1) {
      line.partial_bytes += 2 * question.batch[i].q * m.h * splits * lse_state_bytes(m.d_vo);
    }
  }
  line.grid = fmt::format("({}, {}, {})", ceil_div(rows, kRows), splits, requests * heads);
  line.launched = blocks * splits;
  const std::string why =
      one         ? "num_splits = 1 for batch invariance"
      : given > 0 ? fmt::format("num_splits = {}, as given", given)
      : splits > 1
          ? fmt::format("the fewest splits within 85 % of the best wave of {} blocks on 2 x {} SMs",
                        blocks, question.machine.sms)
          : fmt::format("{} blocks against 2 x {} SMs: one split is best or enough", blocks,
                        question.machine.sms);
  line.rule = why + (swapped ? "; a group's heads are the rows of a tile" : "");
  return line;
}

namespace {

struct Fa3Plan {
  fa3::Tile tile;
  int64_t bound, per_split;
  std::vector<int64_t> splits;
};

Fa3Plan plan_fa3(const Question& question) {
  const Model& m = question.model;
  const int64_t tokens = longest_q(question), sms = question.machine.sms;
  const bool local = question.windowed;
  const bool causal = !local && !(tokens == 1 && (m.d_qk <= 64 || m.d_qk > 128));
  Fa3Plan plan;
  plan.tile = fa3::tile_size(m.d_qk, m.d_vo, causal, local, false, question.kv_bytes());
  const bool tma = question.page % plan.tile.n == 0 && tokens * m.group() > plan.tile.m;
  plan.tile = fa3::tile_size(m.d_qk, m.d_vo, causal, local, !tma, question.kv_bytes());
  const int64_t seen =
      local ? std::min(longest_kv(question), m.window + plan.tile.m) : longest_kv(question);
  const int64_t m_blocks = ceil_div(tokens * m.group(), plan.tile.m);
  const Switches& on = question.switches;
  plan.bound = on.batch_invariant ? 1
               : on.fa_splits > 0
                   ? on.fa_splits
                   : fa3::split_bound({m.h_kv * m_blocks, m_blocks, ceil_div(seen, plan.tile.n),
                                       longest_kv(question) * m.kv_elements() * question.kv_bytes(),
                                       sms, causal || local});
  int64_t sum = 0;
  for (const Request& r : question.batch) {
    sum += ceil_div(r.q * m.group(), plan.tile.m) * ceil_div(r.kv, plan.tile.n);
  }
  plan.per_split = fa3::blocks_per_split(sum, m.h_kv, sms);
  const bool fixed =
      plan.bound == 1 || static_cast<int64_t>(question.batch.size()) > fa3::kLargestDynamicBatch;
  for (const Request& r : question.batch) {
    plan.splits.push_back(
        fixed ? 1 : fa3::dynamic_splits(ceil_div(r.kv, plan.tile.n), plan.per_split, plan.bound));
  }
  return plan;
}

}  // namespace

Line flash_attention_3(const Question& question) {
  const Model& m = question.model;
  const char* name = "FA3";
  if (question.machine.arch != 90) return not_used(name, "it is for Hopper (SM90)");
  if (m.latent || m.d_qk > 256) {
    return not_used(name, fmt::format("head widths are at most 256, got {}", m.d_qk));
  }
  if (m.alibi) return not_used(name, "it has no ALiBi");
  if (question.q_bytes() != question.kv_bytes() || question.q_bytes() > 2) {
    return not_used(name, "q, k and v are fp16, bf16 or fp8 alike");
  }
  const Fa3Plan plan = plan_fa3(question);
  Line line = start(question, name);
  for (size_t i = 0; i < question.batch.size(); ++i) {
    const size_t before = line.blocks.size();
    add_tiles(question, i, plan.tile, plan.splits[i], m.h_kv, m.group(), line);
    const int64_t tiles = ceil_div(question.batch[i].q * m.group(), plan.tile.m);
    line.splits[i] = narrow(ceil_div(static_cast<int64_t>(line.blocks.size() - before), tiles));
    if (plan.splits[i] > 1) {
      line.partial_bytes +=
          2 * question.batch[i].q * m.h * plan.splits[i] * lse_state_bytes(m.d_vo);
    }
    line.launched += tiles * plan.splits[i] * m.h_kv;
  }
  line.grid = fmt::format("{} tiles", line.launched);
  const char* whose = question.switches.batch_invariant ? "1 for batch invariance"
                      : question.switches.fa_splits > 0 ? "as given"
                                                        : "from the longest request alone";
  line.rule = fmt::format(
      "tiles of {} x {}; at most {} splits ({}); on the device one split for {} key blocks, from "
      "the "
      "sum over the batch",
      plan.tile.m, plan.tile.n, plan.bound, whose, plan.per_split);
  return line;
}

Line flash_mla(const Question& question) {
  constexpr int64_t kRows = 64;
  const Model& m = question.model;
  const char* name = "FlashMLA";
  if (!m.latent) return not_used(name, "it takes latent attention only");
  if (question.machine.arch < 90) return not_used(name, "it is for SM90 and SM100");
  const int64_t rows = longest_q(question) * m.group();
  const int64_t parts = flashmla::parts(question.machine.sms, rows, m.h_kv);
  Line line = start(question, name);
  std::vector<int64_t> lengths;
  for (const Request& r : question.batch) lengths.push_back(r.kv);
  line.splits.assign(lengths.size(), 0);
  std::vector<int64_t> done(lengths.size(), 0);
  const int64_t row_tiles = ceil_div(rows, kRows);
  for (const flashmla::Piece& piece : flashmla::pieces(lengths, parts)) {
    const size_t r = static_cast<size_t>(piece.request);
    const int64_t keys = std::min(piece.pages * flashmla::kPage, lengths[r] - done[r]);
    done[r] += keys;
    ++line.splits[r];
    const int64_t live = question.batch[r].q * m.group();
    for (int64_t tile = 0; tile < row_tiles; ++tile) {
      const int64_t n = std::clamp<int64_t>(live - tile * kRows, 0, kRows);
      if (n == 0) continue;
      line.blocks.push_back(
          {piece.request, narrow(piece.part * row_tiles + tile), 1, keys, 1, n, kRows});
    }
  }
  for (size_t r = 0; r < lengths.size(); ++r) {
    if (line.splits[r] > 1) {
      line.partial_bytes +=
          2 * question.batch[r].q * m.h * line.splits[r] * lse_state_bytes(m.d_vo);
    }
  }
  line.grid = fmt::format("({}, {}, {})", row_tiles, m.h_kv, parts);
  line.launched = row_tiles * m.h_kv * parts;
  line.rule = fmt::format(
      "{} parts take equal shares of all pages of 64 keys, in the order of the requests", parts);
  return line;
}

}  // namespace attnfold::explain
