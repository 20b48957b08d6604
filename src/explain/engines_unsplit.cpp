// Textbook attention and one-pass attention without splits: what the engines are measured against.
#include <fmt/format.h>

#include "explain/engines.h"
#include "explain/quantities.h"

namespace attnfold::explain {

Line textbook(const Question& question) {
  const Model& m = question.model;
  Line line = start(question, "textbook");
  int64_t total = 0, scores = 0;
  for (const Request& r : question.batch) {
    const Materialised bytes =
        materialised(m.h, m.h_kv, r.q, r.kv, m.d_qk, m.d_vo, question.q_bytes());
    // k and v as they are stored, whatever q, o and the scores are.
    total += bytes.total() - kv_bytes(m.h_kv, r.kv, m.d_qk, m.d_vo, question.q_bytes()) +
             kv_bytes(m.h_kv, r.kv, m.d_qk, m.d_vo, question.kv_bytes());
    scores += score_bytes(m.h, r.q, r.kv, question.q_bytes());
  }
  line.other_bytes = total - line.kv_bytes;
  line.grid = "3 kernels";
  line.rule = fmt::format("S and P are written and read: {} of {} bytes, {} bytes each", 4 * scores,
                          total, scores);
  return line;
}

Line flash(const Question& question) {
  constexpr int64_t kRows = 128;
  const Model& m = question.model;
  Line line = start(question, "flash");
  const int64_t tiles = ceil_div(longest_q(question), kRows);
  const int64_t requests = static_cast<int64_t>(question.batch.size());
  for (size_t i = 0; i < question.batch.size(); ++i) {
    const Request& r = question.batch[i];
    for (int64_t token = 0; token < r.q; token += kRows) {
      const int64_t n = std::min(kRows, r.q - token);
      line.blocks.push_back(
          {static_cast<int32_t>(i), -1, m.h, tile_keys(question, r, token, n).size(), 1, n, kRows});
    }
  }
  line.grid = fmt::format("({}, {}, {})", tiles, m.h, requests);
  line.launched = tiles * m.h * requests;
  line.rule = fmt::format(
      "one block for {} tokens of a query head walks over all its keys; nothing is split", kRows);
  return line;
}

}  // namespace attnfold::explain
