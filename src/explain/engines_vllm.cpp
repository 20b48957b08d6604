// vLLM: Triton unified attention, cascade attention, the former PagedAttention, ROCm's kernel.
#include <fmt/format.h>

#include "explain/engines.h"
#include "explain/heuristics.h"

namespace attnfold::explain {
namespace {

int32_t narrow(size_t x) { return static_cast<int32_t>(x); }

constexpr const char* kLatentElsewhere = "latent attention has kernels of its own there";

/** Which of the four reasons against the split kernel hold. */
std::vector<std::string> reasons_2d(const Question& question, int64_t threshold) {
  const int64_t requests = static_cast<int64_t>(question.batch.size());
  std::vector<std::string> reasons;
  if (!question.switches.vllm_buffers) reasons.push_back("no scratch for partial states");
  if (longest_q(question) > 1) {
    reasons.push_back(fmt::format("a request has {} query tokens", longest_q(question)));
  }
  if (requests > threshold) {
    reasons.push_back(fmt::format("batch {} > {}", requests, threshold));
  }
  if (question.switches.batch_invariant) reasons.push_back("batch invariance is on");
  return reasons;
}

void add_segments(const Question& question, int64_t tile, int64_t block_m, Line& line) {
  const Model& m = question.model;
  for (size_t i = 0; i < question.batch.size(); ++i) {
    const Request& r = question.batch[i];
    const int64_t keys = vllm::segment_keys(r.kv, tile, vllm::kSegments);
    const int64_t active = vllm::active_segments(r.kv, tile, vllm::kSegments);
    const KeySpan seen = seen_keys(question, r);
    line.splits[i] = 0;
    for (int64_t segment = 0; segment < active; ++segment) {
      const int64_t begin = std::max(segment * keys, seen.begin),
                    end = std::min((segment + 1) * keys, seen.end);
      if (begin >= end) continue;  // before the window: the segment has nothing to do
      line.blocks.push_back({narrow(i), -1, m.h_kv, end - begin, 1, m.group(), block_m});
      ++line.splits[i];
    }
    line.partial_bytes += 2 * m.h * active * state_bytes(m.d_vo);
  }
}

void add_query_blocks(const Question& question, int64_t block_q, int64_t block_m, Line& line) {
  const Model& m = question.model;
  for (size_t i = 0; i < question.batch.size(); ++i) {
    const Request& r = question.batch[i];
    for (int64_t token = 0; token < r.q; token += block_q) {
      const int64_t n = std::min(block_q, r.q - token);
      line.blocks.push_back({narrow(i), -1, m.h_kv, tile_keys(question, r, token, n).size(), 1,
                             n * m.group(), block_m});
    }
  }
}

}  // namespace

Line vllm_unified(const Question& question) {
  const Model& m = question.model;
  const char* name = "vLLM unified";
  if (m.latent) return not_used(name, kLatentElsewhere);
  Line line = start(question, name);
  const int64_t requests = static_cast<int64_t>(question.batch.size());
  const int64_t block_m = vllm::block_m(m.group()), block_q = vllm::block_q(block_m, m.group());
  const int64_t computed = vllm::threshold_3d(m.h_kv, vllm::kMinGrid2d);
  const int64_t threshold =
      vllm::captured_threshold(computed, question.switches.vllm_capture_sizes);
  const int64_t q_blocks = vllm::q_blocks(total_q(question), requests, block_q);
  const std::vector<std::string> reasons = reasons_2d(question, threshold);
  if (!reasons.empty()) {
    add_query_blocks(question, block_q, block_m, line);
    line.grid = fmt::format("({}, {})", q_blocks, m.h_kv);
    line.launched = q_blocks * m.h_kv;
    line.rule = fmt::format("2D: {}", fmt::join(reasons, "; "));
    return line;
  }
  const int64_t window = question.windowed ? m.window : 0;
  const int64_t tile = vllm::decode_tile(question.q_bytes(), window, m.d_qk);
  add_segments(question, tile, block_m, line);
  line.grid = fmt::format("({}, {}, {})", q_blocks, m.h_kv, vllm::kSegments);
  line.launched = q_blocks * m.h_kv * vllm::kSegments;
  line.rule = fmt::format(
      "3D: decodes only, batch {} <= {} (128 / {} kv heads{}); the longest request is cut "
      "into segments of {} keys",
      requests, threshold, m.h_kv, threshold == computed ? "" : ", moved to a captured size",
      vllm::segment_keys(longest_kv(question), tile, vllm::kSegments));
  return line;
}

namespace {

/** "" if vLLM would use cascade attention, else why not. */
std::string why_no_cascade(const Question& question, int64_t prefix) {
  const Model& m = question.model;
  const int64_t requests = static_cast<int64_t>(question.batch.size());
  if (m.latent) return kLatentElsewhere;
  if (prefix < vllm::kCascadePrefix) {
    return fmt::format("{} keys in whole pages are common to all requests; {} are needed", prefix,
                       vllm::kCascadePrefix);
  }
  if (requests < vllm::kCascadeRequests) {
    return fmt::format("batch {}; {} are needed", requests, vllm::kCascadeRequests);
  }
  if (m.alibi) return "ALiBi";
  if (question.windowed) return "the layer has a window";
  if (question.switches.batch_invariant) return "batch invariance is on";
  const bool flash_decoding = m.group() > 1 && decodes_only(question);
  const vllm::CascadeCost cost =
      vllm::cascade_cost(requests, m.h, m.h_kv, prefix, question.machine.sms);
  if (!flash_decoding || cost.pays()) return {};
  return fmt::format("flash decoding costs {} waves of 128 keys, cascade {}", cost.flash_decoding,
                     cost.cascade);
}

}  // namespace

Line vllm_cascade(const Question& question) {
  constexpr int64_t kRows = 128;
  const Model& m = question.model;
  const char* name = "vLLM cascade";
  const int64_t prefix = question.shared_prefix / question.page * question.page;
  if (const std::string why = why_no_cascade(question, prefix); !why.empty()) {
    return not_used(name, why);
  }
  Line line = start(question, name);
  const int64_t requests = static_cast<int64_t>(question.batch.size()), tokens = total_q(question);
  line.kv_bytes -=
      (requests - 1) * prefix * m.h_kv * m.kv_elements() * question.kv_bytes();  // read once
  for (int64_t token = 0; token < tokens; token += kRows) {
    line.blocks.push_back({0, -1, m.h, prefix, 1, std::min(kRows, tokens - token), kRows});
  }
  int64_t suffix_tiles = 0;
  for (size_t i = 0; i < question.batch.size(); ++i) {
    const Request& r = question.batch[i];
    const int64_t rows = r.q * m.group();
    for (int64_t row = 0; row < rows; row += kRows) {
      line.blocks.push_back(
          {narrow(i), -1, m.h_kv, r.kv - prefix, 1, std::min(kRows, rows - row), kRows});
      ++suffix_tiles;
    }
    line.splits[i] = 2;
  }
  line.partial_bytes = 2 * 2 * tokens * m.h * (m.d_vo * question.q_bytes() + kFloatBytes);
  line.launched = ceil_div(tokens, kRows) * m.h + suffix_tiles * m.h_kv;
  line.grid = fmt::format("{} x {} + {} x {}", ceil_div(tokens, kRows), m.h, suffix_tiles, m.h_kv);
  const vllm::CascadeCost cost =
      vllm::cascade_cost(requests, m.h, m.h_kv, prefix, question.machine.sms);
  line.rule = fmt::format(
      "used: {} shared keys are read once for all {} requests ({} waves of 128 keys, flash "
      "decoding "
      "{}); the two results are merged in 16 bits",
      prefix, requests, cost.cascade, cost.flash_decoding);
  return line;
}

Line paged_attention_v2(const Question& question) {
  const Model& m = question.model;
  const char* name = "PagedAttention v2";
  if (m.latent) return not_used(name, kLatentElsewhere);
  if (!decodes_only(question)) return not_used(name, "it takes decodes only");
  if (question.windowed) return not_used(name, "it has no window");
  Line line = start(question, name);
  for (size_t i = 0; i < question.batch.size(); ++i) {
    const int64_t s = question.batch[i].kv;
    line.splits[i] = static_cast<int32_t>(paged::partitions(s, paged::kPartition));
    for (int64_t key = 0; key < s; key += paged::kPartition) {
      line.blocks.push_back({narrow(i), -1, m.h, std::min(paged::kPartition, s - key), 1, 1, 1});
    }
    line.partial_bytes +=
        2 * m.h * line.splits[i] * (m.d_vo * question.q_bytes() + 2 * kFloatBytes);
  }
  const int64_t most = paged::partitions(longest_kv(question), paged::kPartition);
  const int64_t requests = static_cast<int64_t>(question.batch.size());
  line.grid = fmt::format("({}, {}, {})", m.h, requests, most);
  line.launched = m.h * requests * most;
  line.rule = fmt::format(
      "every {} keys of a query head are a block; heads of a group load the same keys {} times",
      paged::kPartition, m.group());
  return line;
}

Line rocm_paged(const Question& question) {
  constexpr int64_t kTileRows = 16;
  const Model& m = question.model;
  const char* name = "ROCm paged";
  if (m.latent) return not_used(name, kLatentElsewhere);
  if (!decodes_only(question)) return not_used(name, "it takes decodes only");
  if (question.windowed) return not_used(name, "it has no window");
  if (m.d_qk != 64 && m.d_qk != 128) {
    return not_used(name, fmt::format("head widths are 64 and 128, got {}", m.d_qk));
  }
  if (m.group() > 16) return not_used(name, fmt::format("groups are 1..16, got {}", m.group()));
  Line line = start(question, name);
  for (size_t i = 0; i < question.batch.size(); ++i) {
    const int64_t s = question.batch[i].kv;
    line.splits[i] = static_cast<int32_t>(paged::partitions(s, paged::kRocmPartition));
    for (int64_t key = 0; key < s; key += paged::kRocmPartition) {
      line.blocks.push_back({narrow(i), -1, m.h_kv, std::min(paged::kRocmPartition, s - key), 1,
                             m.group(), kTileRows});
    }
    line.partial_bytes +=
        2 * m.h * line.splits[i] * (m.d_vo * question.q_bytes() + 2 * kFloatBytes);
  }
  const int64_t most = paged::partitions(longest_kv(question), paged::kRocmPartition);
  const int64_t requests = static_cast<int64_t>(question.batch.size());
  line.grid = fmt::format("({}, {}, {})", requests, most, m.h_kv);
  line.launched = requests * most * m.h_kv;
  line.rule =
      fmt::format("every {} keys of a kv head are a block, which holds the whole group of {}",
                  paged::kRocmPartition, m.group());
  return line;
}

}  // namespace attnfold::explain
