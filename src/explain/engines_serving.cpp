// SGLang's Triton decode, and FlashInfer.
#include <fmt/format.h>

#include "explain/engines.h"
#include "explain/heuristics.h"

namespace attnfold::explain {
namespace {

int32_t narrow(size_t x) { return static_cast<int32_t>(x); }

/** Keys of each request that SGLang's indices hold: in windowed layers the window's alone. */
std::vector<int64_t> indexed_keys(const Question& question) {
  std::vector<int64_t> lengths;
  for (const Request& r : question.batch) lengths.push_back(seen_keys(question, r).size());
  return lengths;
}

/** The blocks of a batch of which request i has `wanted[i]` splits. */
void add_splits(const Question& question, const std::vector<int64_t>& lengths,
                const std::vector<int64_t>& wanted, Line& line) {
  const Model& m = question.model;
  const int64_t tiles = sglang::head_tiles(m.h, m.h_kv, sglang::kBlockH);
  const int64_t rows = m.h == m.h_kv ? 1 : sglang::block_h(m.h, m.h_kv, sglang::kBlockH);
  const int64_t tile_rows = m.h == m.h_kv ? 1 : sglang::kBlockH;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int64_t keys = sglang::split_keys(lengths[i], wanted[i]);
    line.splits[i] = 0;
    for (int64_t key = 0; key < lengths[i]; key += keys) {
      line.blocks.push_back(
          {narrow(i), -1, tiles, std::min(keys, lengths[i] - key), 1, rows, tile_rows});
      ++line.splits[i];
    }
    line.partial_bytes += 2 * m.h * line.splits[i] * lse_state_bytes(m.d_vo);
  }
}

Line sglang_line(const Question& question, const char* name, int64_t max_splits) {
  const Model& m = question.model;
  Line line = start(question, name);
  const int64_t tiles = sglang::head_tiles(m.h, m.h_kv, sglang::kBlockH);
  const int64_t requests = static_cast<int64_t>(question.batch.size());
  line.grid = fmt::format("({}, {}, {})", requests, tiles, max_splits);
  line.launched = requests * tiles * max_splits;
  return line;
}

constexpr const char* kExtend = "prefills go to its extend kernel, which does not split";

}  // namespace

Line sglang_adaptive(const Question& question) {
  const char* name = "SGLang adaptive";
  const Model& m = question.model;
  if (!decodes_only(question)) return not_used(name, kExtend);
  const std::vector<int64_t> lengths = indexed_keys(question);
  const int64_t sms = question.machine.sms;
  const int64_t context = std::max(question.switches.max_context, longest_kv(question));
  const int64_t flag = question.switches.sglang_max_splits;
  const int64_t most = m.latent ? sglang::latent_max_splits(flag, sms, context) : flag;
  Line line = sglang_line(question, name, most);
  const int64_t grid =
      sglang::token_grid(static_cast<int64_t>(question.batch.size()), m.h, m.h_kv, sglang::kBlockH);
  const sglang::Chunks chunks = sglang::chunks(lengths, sms, grid, most);
  std::vector<int64_t> wanted;
  for (const int64_t s : lengths) wanted.push_back(sglang::splits(s, chunks));
  add_splits(question, lengths, wanted, line);
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  line.rule = fmt::format(
      "{} SMs count as {} for {} keys; {} blocks unsplit; chunks of {} keys by SMs, {} by lengths, "
      "at most {} splits",
      sms, sglang::extended_sms(sms, longest), longest, grid, chunks.by_sms, chunks.by_length,
      most);
  return line;
}

Line sglang_deterministic(const Question& question) {
  const char* name = "SGLang determin.";
  if (!decodes_only(question)) return not_used(name, kExtend);
  const int64_t context = std::max(question.switches.max_context, longest_kv(question));
  Line line = sglang_line(question, name, ceil_div(context, sglang::kDeterministicTile));
  const std::vector<int64_t> lengths = indexed_keys(question);
  std::vector<int64_t> wanted;
  for (const int64_t s : lengths) wanted.push_back(ceil_div(s, sglang::kDeterministicTile));
  add_splits(question, lengths, wanted, line);
  line.rule = fmt::format(
      "one split for {} keys, whatever the batch; its FlashInfer backend cuts at 2048 keys instead",
      sglang::kDeterministicTile);
  return line;
}

namespace {

/** Pages of each request that FlashInfer's planner counts. */
std::vector<int64_t> planned_pages(const Question& question, int64_t cta_q) {
  std::vector<int64_t> pages;
  for (const Request& r : question.batch) {
    int64_t n = ceil_div(r.kv, question.page);
    if (question.windowed) {
      n = std::min(n, ceil_div(question.model.window - 1 + cta_q, question.page));
    }
    pages.push_back(std::max<int64_t>(n, 1));
  }
  return pages;
}

}  // namespace

Line flashinfer_tensor_core(const Question& question) {
  const Model& m = question.model;
  const char* name = "FlashInfer";
  if (m.latent) return not_used(name, "latent attention has a planner of its own there");
  const Switches& on = question.switches;
  const int64_t requests = static_cast<int64_t>(question.batch.size());
  const int64_t mean = total_q(question) * m.group() / requests;
  const int64_t packed = on.cuda_graph ? longest_q(question) * m.group() : mean;
  const int64_t cta_q = flashinfer::cta_tile_q(packed, m.d_qk, m.d_vo);
  const int64_t limit = std::max<int64_t>(2 * question.machine.sms / m.h_kv, 1);
  const std::vector<int64_t> pages = planned_pages(question, cta_q);
  const auto tiles = [&](size_t i) { return ceil_div(question.batch[i].q * m.group(), cta_q); };
  const auto blocks = [&](int64_t chunk) {
    int64_t n = 0;
    for (size_t i = 0; i < pages.size(); ++i) n += tiles(i) * ceil_div(pages[i], chunk);
    return n;
  };
  const int64_t longest = *std::max_element(pages.begin(), pages.end());
  const bool whole = on.flashinfer_no_split || on.batch_invariant;  // vLLM's invariant mode
  const int64_t chunk = whole ? longest
                        : on.flashinfer_fixed_pages > 0
                            ? on.flashinfer_fixed_pages
                            : flashinfer::smallest_chunk(flashinfer::smallest_pages(question.page),
                                                         longest, limit, blocks);

  Line line = start(question, name);
  const bool split = longest > chunk || (on.cuda_graph && !whole);
  for (size_t i = 0; i < question.batch.size(); ++i) {
    const Request& r = question.batch[i];
    const int64_t keys = seen_keys(question, r).size();
    line.splits[i] = static_cast<int32_t>(ceil_div(pages[i], chunk));
    for (int64_t tile = 0; tile < tiles(i); ++tile) {
      const int64_t rows = std::min(cta_q, r.q * m.group() - tile * cta_q);
      for (int64_t key = 0; key < keys; key += chunk * question.page) {
        line.blocks.push_back(
            {narrow(i), -1, m.h_kv, std::min(chunk * question.page, keys - key), 1, rows, cta_q});
      }
    }
    if (split) {
      line.partial_bytes += 2 * r.q * m.h * line.splits[i] * lse_state_bytes(m.d_vo);
    }
  }
  const int64_t padded = on.cuda_graph ? std::max(limit, blocks(longest)) : blocks(chunk);
  line.grid = fmt::format("({}, 1, {})", padded, m.h_kv);
  line.launched = padded * m.h_kv;
  const std::string cut = whole ? std::string("disable_split_kv: no split")
                          : on.flashinfer_fixed_pages > 0
                              ? fmt::format("fixed_split_size: {} keys", chunk * question.page)
                              : fmt::format(
                                    "{} keys is the smallest chunk with at most 2 x {} SMs "
                                    "/ {} kv heads = {} tiles",
                                    chunk * question.page, question.machine.sms, m.h_kv, limit);
  line.rule = fmt::format("{}; {} rows a tile, from {} packed rows {}", cut, cta_q, packed,
                          on.cuda_graph ? "at most" : "on average");
  return line;
}

Line flashinfer_decode(const Question& question) {
  const Model& m = question.model;
  const char* name = "FlashInfer decode";
  if (m.latent) return not_used(name, "latent attention has a planner of its own there");
  if (!decodes_only(question)) return not_used(name, "it takes decodes only");
  const int64_t requests = static_cast<int64_t>(question.batch.size());
  const int64_t slots = question.switches.flashinfer_blocks_per_sm * question.machine.sms;
  std::vector<int64_t> pages;
  for (const Request& r : question.batch) pages.push_back(ceil_div(r.kv, question.page));
  const int64_t longest = *std::max_element(pages.begin(), pages.end());
  const auto blocks = [&](int64_t chunk) {
    int64_t n = 0;
    for (const int64_t p : pages) n += ceil_div(p, chunk);
    return n * m.h_kv;
  };
  const bool full = requests * m.h_kv >= slots;
  const int64_t chunk = full ? longest
                             : flashinfer::smallest_chunk(flashinfer::smallest_pages(question.page),
                                                          longest, slots, blocks);
  Line line = start(question, name);
  for (size_t i = 0; i < question.batch.size(); ++i) {
    const KeySpan seen = seen_keys(question, question.batch[i]);
    line.splits[i] = 0;
    for (int64_t key = 0; key < question.batch[i].kv; key += chunk * question.page) {
      const int64_t begin = std::max(key, seen.begin),
                    end = std::min(key + chunk * question.page, seen.end);
      if (begin >= end) continue;
      line.blocks.push_back({narrow(i), -1, m.h_kv, end - begin, 1, m.group(), m.group()});
      ++line.splits[i];
    }
    if (longest > chunk) {
      line.partial_bytes += 2 * m.h * ceil_div(pages[i], chunk) * lse_state_bytes(m.d_vo);
    }
  }
  line.launched = blocks(chunk);
  line.grid = fmt::format("({}, {})", line.launched / m.h_kv, m.h_kv);
  line.rule =
      full ? fmt::format("{} requests x {} kv heads fill {} x {} block slots: no split", requests,
                         m.h_kv, question.machine.sms, question.switches.flashinfer_blocks_per_sm)
           : fmt::format(
                 "the smallest chunk that fits {} x {} block slots (assumed per SM): {} keys",
                 question.machine.sms, question.switches.flashinfer_blocks_per_sm,
                 chunk * question.page);
  return line;
}

}  // namespace attnfold::explain
