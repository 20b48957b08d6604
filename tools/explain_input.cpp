#include "explain_input.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>
#include <type_traits>

#include "check/call_file.h"
#include "machine.h"
#include "probe.h"

namespace attnfold::tools {
namespace {

using explain::Machine;
using explain::Model;
using explain::Question;
using explain::Request;

/** A whole number >= 1 at the start of `text`, which is cut off it. */
int64_t take_number(const std::string& flag, std::string_view& text, const std::string& whole) {
  int64_t value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || value < 1) {
    throw BadInput(
        fmt::format("{}: expected lengths as in 2560 or 128/4096 or 512x15, got {}", flag, whole));
  }
  text.remove_prefix(static_cast<size_t>(stop - text.data()));
  return value;
}

bool take(std::string_view& text, char c) {
  if (text.empty() || text.front() != c) return false;
  text.remove_prefix(1);
  return true;
}

/** "65536,512x15,128/4096": keys, or new tokens/keys, each x times. */
std::vector<Request> parse_lengths(const std::string& flag, const std::string& whole) {
  std::vector<Request> batch;
  std::string_view text = whole;
  do {
    Request request;
    int64_t times = 1;
    request.kv = take_number(flag, text, whole);
    if (take(text, '/')) {
      request.q = request.kv;
      request.kv = take_number(flag, text, whole);
    }
    if (take(text, 'x')) times = take_number(flag, text, whole);
    if (times > 65536) throw BadInput(fmt::format("{}: expected at most 65536 requests", flag));
    batch.insert(batch.end(), static_cast<size_t>(times), request);
  } while (take(text, ','));
  if (!text.empty()) take_number(flag, text, whole);
  return batch;
}

DType element_type(const std::string& flag, const std::string& text) {
  if (text == "f32") return DType::f32;
  if (text == "f16") return DType::f16;
  if (text == "bf16") return DType::bf16;
  if (text == "fp8") return DType::e4m3;
  throw BadInput(fmt::format("{}: expected f32, f16, bf16 or fp8, got {}", flag, text));
}

/** "a/b" or "a" (then b = a). */
std::pair<int64_t, int64_t> parse_two(const std::string& flag, const std::string& whole) {
  std::string_view text = whole;
  const int64_t a = take_number(flag, text, whole);
  const int64_t b = take(text, '/') ? take_number(flag, text, whole) : a;
  if (!text.empty()) {
    throw BadInput(fmt::format("{}: expected a number, or two as in 32/8, got {}", flag, whole));
  }
  return {a, b};
}

/** The rows of a Question are causal and see a window at most: what else a call's rows see or do
 * not see cannot be asked.  Throws BadInput. */
void require_plain_mask(const std::string& file, const check::Call& call) {
  const attnfold_problem& p = call.problem;
  const auto refuse = [&](const char* field, const std::string& expected, const std::string& got) {
    throw BadInput(fmt::format(
        "{}: {}: expected {}, got {}: explain knows causal rows, with or without a window_left",
        file, field, expected, got));
  };
  const auto require_off = [&](const char* field, int64_t value, int64_t off) {
    if (value != off) refuse(field, fmt::format("{}", off), fmt::format("{}", value));
  };
  require_off("attention_chunk", p.attention_chunk, 0);
  require_off("sparse_block_size", p.sparse_block_size, 0);
  if (p.window_left >= 0) require_off("sink_tokens", p.sink_tokens, 0);
  for (size_t r = 0; r < static_cast<size_t>(call.batch); ++r) {
    if (!call.mask_width.empty())
      require_off(fmt::format("mask_width[{}]", r).c_str(), call.mask_width[r], 0);
    if (!call.visible_prefix.empty())
      require_off(fmt::format("visible_prefix[{}]", r).c_str(), call.visible_prefix[r], 0);
    // The last row of a request sees all keys up to its own, which is the last, causal or not.
    const int32_t qo_len = call.qo_indptr[r + 1] - call.qo_indptr[r];
    if (p.mask == ATTNFOLD_MASK_CAUSAL || p.window_right == 0 || qo_len <= 1) continue;
    if (p.window_right > 0) require_off("window_right", p.window_right, 0);
    refuse("mask", fmt::format("causal with the {} new tokens of request {}", qo_len, r), "none");
  }
}

template <class Known>
std::string names_of(const Known& known) {
  std::vector<std::string> names;
  for (const auto& entry : known) names.push_back(entry.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

std::string read_text(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in || in.bad()) throw BadInput(fmt::format("{}: expected a readable file", path));
  return text.str();
}

Machine measured_machine() {
  const int32_t threads = num_usable_cpus();
  Machine machine;
  machine.name = cpu_model();
  machine.kind = explain::MachineKind::cpu;
  machine.sms = threads;
  machine.source = "measured now";
  const HugeBuffer buffer(size_t{256} << 20);
  const Piece whole{buffer.data(), static_cast<int64_t>(buffer.size())};
  Ceiling read;
  for (const ReadLoop& loop : read_loops()) {
    const std::vector<Piece> pieces = linear_pieces(std::span(&whole, 1), threads);
    for (int i = 0; i < 3; ++i) {
      read.raise(static_cast<double>(whole.bytes) / read_pieces_us(loop, pieces, threads) / 1e3,
                 loop.name);
    }
  }
  Ceiling peak = compute_peak(fma_loops(), threads, 3);
  if (const std::vector<ComputeLoop> dots = dot_loops(); !dots.empty()) {
    const Ceiling dot = compute_peak(dots, threads, 3);
    peak.raise(dot.value, dot.loop);
  }
  machine.bytes_per_s = read.value * 1e9;
  machine.flop_per_s = peak.value * 1e9;
  return machine;
}

void ExplainFlags::add_to(CLI::App* sub) {
  using explain::known_machines;
  using explain::known_models;
  sub->add_option("FILE", file_, "A call: its lengths and shapes")
      ->check(not_empty())
      ->type_name("");
  const auto add = [sub, this](const char* group, const char* flag, auto& target,
                               const char* help) {
    CLI::Option* option = sub->add_option(flag, target, help)->group(group)->capture_default_str();
    if constexpr (std::is_same_v<decltype(target), std::string&>) option->check(not_empty());
    const bool is_of_call =
        std::string_view(group) == "Batch" || std::string_view(group) == "Model";
    if (is_of_call) of_call_.push_back(option);
    return option;
  };
  sub_ = sub;
  add("Model", "--model", model_, "One of those that --list shows")->type_name("NAME");
  add("Model", "--config", config_, "A config.json of a model")->type_name("FILE");
  CLI::Option* heads = add("Model", "--heads", heads_, "qo_heads/kv_heads")->type_name("N[/N]");
  add("Model", "--head-dim", head_dim_, "head_dim, or head_dim_qk/head_dim_vo")
      ->type_name("N[/N]")
      ->needs(heads);
  add("Model", "--layers", layers_, "Layers")->check(in_range(1, 1024))->needs(heads);
  add("Model", "--window", window_, "Keys a token sees")->check(in_range(1, 1 << 24))->needs(heads);
  add("Model", "--tp", tp_, "Ranks that the heads are dealt to")->check(in_range(1, 1024));
  sub->add_flag("--local", local_, "A layer with the model's window")->group("Model");
  add("Model", "--q", q_, "Type of q and o: f32, f16, bf16 or fp8")->type_name("DTYPE");
  add("Model", "--kv", kv_, "Type of k and v: f32, f16, bf16 or fp8")->type_name("DTYPE");
  add("Batch", "--batch", batch_, "Requests")->check(in_range(1, 65536));
  add("Batch", "--context", context_, "Keys of each")->check(in_range(1, 1 << 24));
  add("Batch", "--query", query_, "New tokens of each")->check(in_range(1, 1 << 18));
  lengths_option_ =
      add("Batch", "--lengths", lengths_, "Instead: 65536,512x15,128/4096 (new tokens/keys)")
          ->type_name("LIST");
  page_size_option_ =
      add("Batch", "--page-size", page_size_, "Tokens per page")->check(in_range(1, 1 << 20));
  add("Batch", "--shared-prefix", shared_prefix_, "Keys that all requests have in common")
      ->check(in_range(0, 1 << 24));
  add("Machine", "--gpu", gpu_, "One of those that --list shows, or here: this machine, measured")
      ->type_name("NAME");
  add("Machine", "--sms", sms_, "SMs or cores, instead of the table's")->check(in_range(1, 1024));
  add("Machine", "--tb-per-s", tb_per_s_, "Bandwidth, instead")->check(number_between(1e-6, 1e6));
  add("Machine", "--tflop-per-s", tflop_per_s_, "Dense peak, instead")
      ->check(number_between(1e-6, 1e6));
  explain::Switches& on = switches_;
  const char* engines = "Engines";
  sub->add_flag("--batch-invariant", on.batch_invariant, "vLLM's VLLM_BATCH_INVARIANT")
      ->group(engines);
  sub->add_flag("--cuda-graph", on.cuda_graph, "FlashInfer under CUDA graphs")->group(engines);
  sub->add_flag("--vllm-no-scratch", no_scratch_, "vLLM without buffers for partial states")
      ->group(engines);
  add_numbers<int64_t>(sub, "--vllm-capture-sizes", on.vllm_capture_sizes, 1, 65536,
                       "Batch sizes of full CUDA graphs")
      ->group(engines);
  add(engines, "--sglang-splits", on.sglang_max_splits, "--triton-attention-num-kv-splits")
      ->check(in_range(1, 1024));
  CLI::Option* fixed_pages =
      add(engines, "--flashinfer-fixed-pages", on.flashinfer_fixed_pages, "fixed_split_size")
          ->check(in_range(1, 1 << 24));
  sub->add_flag("--flashinfer-no-split", on.flashinfer_no_split, "disable_split_kv")
      ->group(engines)
      ->excludes(fixed_pages);
  add(engines, "--flashinfer-blocks-per-sm", on.flashinfer_blocks_per_sm,
      "Its CUDA-core decode kernel's occupancy")
      ->check(in_range(1, 32));
  add(engines, "--fa-splits", on.fa_splits, "num_splits of FlashAttention")
      ->check(in_range(1, 128));
  add(engines, "--max-context", on.max_context, "Longest length served")
      ->check(in_range(1, 1 << 24));
  add(engines, "--workers", on.attnfold_workers, "Of attnfold; default: one per SM or core")
      ->check(in_range(1, 1024));
}

Model ExplainFlags::model() const {
  if ((model_.empty() ? 0 : 1) + (config_.empty() ? 0 : 1) + (heads_.empty() ? 0 : 1) > 1) {
    throw BadInput("--model, --config, --heads: expected one of them, got several");
  }
  if (!config_.empty()) {
    const explain::ConfigResult result = explain::model_of_config(read_text(config_), config_);
    if (!result.error.empty()) throw BadInput(result.error);
    return result.model;
  }
  if (!heads_.empty()) {
    Model m;
    m.name = fmt::format("heads {}, head dim {}", heads_, head_dim_);
    m.source = "flags";
    m.layers = layers_;
    std::tie(m.h, m.h_kv) = parse_two("--heads", heads_);
    std::tie(m.d_qk, m.d_vo) = parse_two("--head-dim", head_dim_);
    m.window = window_;
    m.window_layers = window_ > 0 ? layers_ : 0;
    if (const std::string bad = explain::model_problem(m); !bad.empty()) throw BadInput(bad);
    return m;
  }
  const std::string name = model_.empty() ? "llama-3-8b" : model_;
  if (const Model* known = explain::find_model(name)) return *known;
  throw BadInput(
      fmt::format("--model: expected one of {}, got {}", names_of(explain::known_models()), name));
}

Machine ExplainFlags::machine() const {
  Machine machine;
  if (gpu_ == "here") {
    machine = measured_machine();
  } else if (const Machine* known = explain::find_machine(gpu_)) {
    machine = *known;
  } else {
    throw BadInput(fmt::format("--gpu: expected here or one of {}, got {}",
                               names_of(explain::known_machines()), gpu_));
  }
  if (sms_ > 0) machine.sms = sms_;
  if (tb_per_s_ > 0) machine.bytes_per_s = tb_per_s_ * 1e12;
  if (tflop_per_s_ > 0) machine.flop_per_s = tflop_per_s_ * 1e12;
  if (sms_ > 0 || tb_per_s_ > 0 || tflop_per_s_ > 0) machine.source += ", changed by flags";
  return machine;
}

std::vector<Request> ExplainFlags::requests() const {
  if (lengths_option_->count() > 0) return parse_lengths("--lengths", lengths_);
  return std::vector<Request>(static_cast<size_t>(batch_), Request{query_, context_});
}

/** What FILE says is not said by flags too, nor the lengths in two ways. */
void ExplainFlags::require_one_source() const {
  for (const CLI::Option* option : of_call_) {
    const std::string name = option->get_name();
    if (option->count() == 0) continue;
    const bool is_beside = name == "--tp" || name == "--shared-prefix" || name == "--page-size";
    if (!file_.empty() && !is_beside) {
      throw BadInput(fmt::format("FILE: expected either a FILE or {}, got both", name));
    }
    const bool is_lengths = name == "--batch" || name == "--context" || name == "--query";
    if (lengths_option_->count() > 0 && is_lengths) {
      throw BadInput(fmt::format("--lengths: expected either it or {}, got both", name));
    }
  }
}

void ExplainFlags::require_alone(const std::string& flag,
                                 const std::vector<std::string>& beside) const {
  for (const CLI::Option* option : sub_->get_options()) {
    const std::string name = option->get_name();
    if (option->count() == 0 || name == flag) continue;
    if (std::find(beside.begin(), beside.end(), name) != beside.end()) continue;
    throw BadInput(fmt::format(
        "{}: expected {}, got {} beside it", flag,
        beside.empty() ? "nothing else" : fmt::format("{} alone", fmt::join(beside, ", ")), name));
  }
}

void ExplainFlags::read_call(Question& question) const {
  const check::LoadResult loaded = check::load_call(file_);
  if (!loaded.ok) throw BadInput(loaded.error);
  const attnfold_problem& p = loaded.call.problem;
  require_plain_mask(file_, loaded.call);
  Model& m = question.model;
  m = Model{};
  m.name = file_;
  m.source = "a call";
  m.layers = 1;
  m.h = p.qo_heads;
  m.h_kv = p.kv_heads;
  m.d_qk = p.head_dim_qk;
  m.d_vo = p.head_dim_vo;
  m.latent = p.v_in_k != 0;
  m.alibi = !loaded.call.alibi_slopes.empty();
  if (p.window_left >= 0) {
    m.window = std::min(int64_t{p.window_left} + 1, int64_t{INT32_MAX});  // no call is longer
    m.window_layers = 1;
  }
  question.q_type = static_cast<DType>(p.q_dtype);
  question.kv_type = static_cast<DType>(p.kv_dtype);
  question.o_type = static_cast<DType>(p.o_dtype);
  if (p.kv_storage == ATTNFOLD_KV_PAGED) {
    if (page_size_option_->count() > 0)
      throw BadInput("FILE: expected either a FILE with pages or --page-size, got both");
    question.page = p.page_size;
  }
  question.batch.clear();
  for (size_t r = 0; r < static_cast<size_t>(loaded.call.batch); ++r) {
    const Request request{loaded.call.qo_indptr[r + 1] - loaded.call.qo_indptr[r],
                          loaded.call.kv_len[r]};
    if (request.q > 0 && request.kv > 0) question.batch.push_back(request);
  }
}

Question ExplainFlags::question() const {
  Question question;
  question.page = page_size_;
  question.q_type = question.o_type = element_type("--q", q_);
  question.kv_type = element_type("--kv", kv_);
  require_one_source();
  if (file_.empty()) {
    question.model = model();
    question.batch = requests();
  } else {
    read_call(question);
  }
  if (const std::string bad = explain::shard(question.model, tp_); !bad.empty()) {
    throw BadInput("--" + bad);
  }
  // A model whose every layer has the window has no other layer to show.
  const Model& m = question.model;
  question.windowed = local_ || (m.window > 0 && m.window_layers == m.layers);
  question.shared_prefix = shared_prefix_;
  question.switches = switches_;
  question.switches.vllm_buffers = !no_scratch_;
  question.machine = machine();
  if (const std::string bad = explain::question_problem(question); !bad.empty()) {
    throw BadInput(bad);
  }
  return question;
}

}  // namespace attnfold::tools
