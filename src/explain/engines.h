// What each engine would do with one layer of one step, and what that costs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "explain/model.h"

namespace attnfold::explain {

struct Request {
  int64_t q = 1, kv = 0;  // new tokens; keys, the new tokens' own included
};

/** Settings of the engines, at their defaults. */
struct Switches {
  bool batch_invariant = false;
  bool cuda_graph = false;
  bool vllm_buffers = true;  // scratch for partial states was allocated
  std::vector<int64_t>
      vllm_capture_sizes;                // of full CUDA graphs; none: no rounding of the threshold
  int64_t sglang_max_splits = 8;         // --triton-attention-num-kv-splits
  int64_t flashinfer_fixed_pages = 0;    // fixed_split_size
  bool flashinfer_no_split = false;      // disable_split_kv
  int64_t flashinfer_blocks_per_sm = 2;  // measured at run time by FlashInfer, assumed here
  int64_t fa_splits = 0;                 // num_splits of FlashAttention; 0 = its heuristic
  int64_t max_context = 0;               // longest length served; 0 = the batch's
  int64_t attnfold_workers = 0;          // 0 = one for each SM or core
};

struct Question {
  Model model;  // one rank's shard
  Machine machine;
  std::vector<Request> batch;
  DType q_type = DType::bf16, kv_type = DType::bf16, o_type = DType::bf16;
  int64_t page = 16;
  bool windowed = false;      // a layer with the model's window
  int64_t shared_prefix = 0;  // keys that all requests have in common
  Switches switches;

  int64_t q_bytes() const { return dtype_bytes(q_type); }  // of an element
  int64_t kv_bytes() const { return dtype_bytes(kv_type); }
  int64_t o_bytes() const { return dtype_bytes(o_type); }
};

/** "" or which part of the question is unsound. */
std::string question_problem(const Question& question);

/** Blocks that do the same: `copies` of them, one for each head that they are launched for. */
struct Block {
  int32_t request;
  int32_t worker;  // who takes it; -1: whoever is free, in launch order
  int64_t copies;
  int64_t keys;       // that it walks over
  int64_t kv_heads;   // of which it reads them
  int64_t rows;       // live (token, head) rows
  int64_t tile_rows;  // rows that it computes
};

/** One engine's answer. */
struct Line {
  std::string engine;
  bool used = true;  // false: the engine does not take this call, `rule` says why
  std::string rule;  // what decided, in words
  std::string grid;  // as launched: "(1, 8, 16)"
  int64_t launched = 0;
  std::vector<int32_t> splits;  // of each request
  std::vector<Block> blocks;    // that have keys to read
  int64_t partial_bytes = 0;    // written and read back
  int64_t kv_bytes = 0;         // distinct bytes of k and v that the blocks need
  int64_t other_bytes = 0;      // q and o, and what else must cross

  // Of these, see finish().
  int64_t live = 0, waves = 0, keys_per_block = 0, kv_loads = 0, flop = 0;
  double busy = 0;         // share of the SMs that have a block in the first wave
  double wasted_rows = 0;  // share of computed rows that are nobody's
  double intensity = 0, floor_us = 0;
  double shared_us = 0;  // last block's end if each SM has an equal share of bandwidth and peak
  bool compute_bound = false;

  int64_t bytes() const { return partial_bytes + kv_bytes + other_bytes; }
};

/** Every engine's line, attnfold's last. */
std::vector<Line> explain_call(const Question& question);

// One engine each.
Line textbook(const Question& question);
Line flash(const Question& question);
Line vllm_unified(const Question& question);
Line vllm_cascade(const Question& question);
Line sglang_adaptive(const Question& question);
Line sglang_deterministic(const Question& question);
Line flashinfer_tensor_core(const Question& question);
Line flashinfer_decode(const Question& question);
Line flash_attention_2(const Question& question);
Line flash_attention_3(const Question& question);
Line flash_mla(const Question& question);
Line paged_attention_v2(const Question& question);
Line rocm_paged(const Question& question);
Line attnfold_engine(const Question& question);

// ------------------------------------------------------------------------- what they have in
// common

/** A block's span on a worker, in microseconds. */
struct Span {
  int32_t worker, request;
  double begin_us, end_us;
};
/** Blocks in launch order, each to the worker that is free first; at most `most` of them. */
std::vector<Span> timeline(const Question& question, const Line& line, size_t most);

bool decodes_only(const Question& question);
int64_t longest_q(const Question& question);
int64_t longest_kv(const Question& question);
int64_t total_q(const Question& question);
/** Keys that some token of the request sees: [begin, end). */
struct KeySpan {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};
KeySpan seen_keys(const Question& question, const Request& request);
/** Of its tokens [token, token + n). */
KeySpan tile_keys(const Question& question, const Request& request, int64_t token, int64_t n);
/** (token, key) pairs of all requests, one head. */
int64_t visible_pairs(const Question& question);
/** Bytes of the keys and values that some row sees, each once. */
int64_t distinct_kv_bytes(const Question& question);

/** A line with q, o, KV and FLOPs of the call filled in. */
Line start(const Question& question, const char* engine);
Line not_used(const char* engine, std::string why);
/** Derives the second half of a line from the first. */
void finish(const Question& question, Line& line);

}  // namespace attnfold::explain
