// Flags that several subcommands share, and the kernel table as a vector.
#include "command.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <type_traits>

#include "core/dtype.h"

namespace attnfold::tools {
namespace {

template <class T>
bool parse_whole(const std::string& text, T& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

/** "a/b" or "a" (then b = a). */
std::pair<int32_t, int32_t> parse_pair(const std::string& flag, const std::string& text) {
  const size_t slash = text.find('/');
  std::pair<int32_t, int32_t> p{0, 0};
  const bool first = parse_whole(text.substr(0, slash), p.first);
  p.second = p.first;
  if (!first || (slash != std::string::npos && !parse_whole(text.substr(slash + 1), p.second))) {
    throw BadInput(fmt::format("{}: expected a number, or two as in 32/8, got {}", flag, text));
  }
  return p;
}

attnfold_dtype parse_dtype(const std::string& flag, const std::string& text,
                           const std::vector<DType>& types) {
  std::vector<std::string> names;
  for (const DType type : types) {
    if (text == dtype_name(type)) return static_cast<attnfold_dtype>(type);
    names.emplace_back(dtype_name(type));
  }
  throw BadInput(fmt::format("{}: expected one of {}, got {}", flag, fmt::join(names, ", "), text));
}

/** 0 or 1: which of the two words `text` is. */
int parse_either(const std::string& flag, const std::string& text, const char* zero,
                 const char* one) {
  if (text == zero) return 0;
  if (text == one) return 1;
  throw BadInput(fmt::format("{}: expected {} or {}, got {}", flag, zero, one, text));
}

/** Digits as fmt writes them: CLI11 reads the text again, where a leading 0 means octal. */
template <class T>
auto range_check(T low, T high) {
  return [low, high](std::string& text) -> std::string {
    T value = 0;
    const bool whole = parse_whole(text, value) && text == fmt::format("{}", value);
    if (whole && low <= value && value <= high) return {};
    return fmt::format("expected {}..{}, got {}", low, high, text);
  };
}

/** A finite number above `low`. */
auto number_check(const char* expected, double low) {
  return [expected, low](std::string& text) -> std::string {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    const bool whole = !text.empty() && end == text.c_str() + text.size();
    if (whole && value > low && std::isfinite(value)) return {};
    return fmt::format("expected {}, got {}", expected, text);
  };
}

}  // namespace

std::string version_text() {
  const int32_t v = attnfold_version();
  return fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100);
}

CLI::Validator in_range(int64_t low, int64_t high) {
  return CLI::Validator(range_check(low, high), fmt::format("{}..{}", low, high), "in_range");
}

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

template <class T>
CLI::Option* add_numbers(CLI::App* sub, const std::string& flag, std::vector<T>& numbers, T low,
                         T high, const std::string& help) {
  auto check = [one = range_check(low, high)](std::string& text) -> std::string {
    for (std::string& part : split_list(text)) {
      if (std::string bad = one(part); !bad.empty()) return bad;
    }
    return {};
  };
  auto set = [&numbers](const std::string& text) {
    numbers.clear();
    for (const std::string& part : split_list(text)) parse_whole(part, numbers.emplace_back());
  };
  return sub->add_option_function<std::string>(flag, set, help)
      ->check(CLI::Validator(check, fmt::format("{}..{}", low, high), "numbers"))
      ->type_name("LIST");
}
template CLI::Option* add_numbers(CLI::App*, const std::string&, std::vector<int>&, int, int,
                                  const std::string&);
template CLI::Option* add_numbers(CLI::App*, const std::string&, std::vector<int64_t>&, int64_t,
                                  int64_t, const std::string&);

CLI::Option* add_names(CLI::App* sub, const std::string& flag, std::vector<std::string>& names,
                       const std::string& help) {
  auto set = [&names](const std::string& text) { names = split_list(text); };
  return sub->add_option_function<std::string>(flag, set, help)->type_name("LIST");
}

template <class T>
CLI::Validator whole_number() {
  using Limits = std::numeric_limits<T>;
  return CLI::Validator(range_check<T>(Limits::min(), Limits::max()), "", "whole_number");
}
template CLI::Validator whole_number<int32_t>();
template CLI::Validator whole_number<uint64_t>();

CLI::Validator not_empty() {
  auto check = [](std::string& text) -> std::string {
    return text.empty() ? "expected a value, got " : "";
  };
  return CLI::Validator(check, "", "not_empty");
}

CLI::Validator finite_number() {
  return CLI::Validator(number_check("a finite number", -HUGE_VAL), "", "finite_number");
}

CLI::Validator number_between(double low, double high) {
  auto check = [=](std::string& text) -> std::string {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    const bool whole = !text.empty() && end == text.c_str() + text.size();
    if (whole && low <= value && value <= high) return {};
    return fmt::format("expected {:g}..{:g}, got {}", low, high, text);
  };
  return CLI::Validator(check, fmt::format("{:g}..{:g}", low, high), "number_between");
}

CLI::Option* add_threads_flag(CLI::App* sub, int32_t& threads) {
  return sub
      ->add_option("--threads", threads,
                   "Threads; default ATTNFOLD_NUM_THREADS, else the CPUs of this process")
      ->check(in_range(1, 1024));
}

CLI::Option* add_isa_flag(CLI::App* sub, std::string& isa) {
  return sub
      ->add_option(
          "--isa", isa,
          "Force the kernel rows of this ISA (`attnfold info` lists them); default by CPUID")
      ->check(not_empty())
      ->type_name("NAME");
}

CLI::Option* add_backend_flag(CLI::App* sub, attnfold_backend& backend) {
  auto check = [](std::string& text) -> std::string {
    if (text == "cpu" || text == "cuda") return {};
    return fmt::format("expected cpu or cuda, got {}", text);
  };
  auto set = [&backend](const std::string& text) {
    backend = text == "cuda" ? ATTNFOLD_CUDA : ATTNFOLD_CPU;
  };
  return sub->add_option_function<std::string>("--backend", set, "Where to run: cpu or cuda")
      ->check(CLI::Validator(check, "cpu or cuda"))
      ->type_name("NAME");
}

std::vector<attnfold_kernel_info> kernel_table() {
  std::vector<attnfold_kernel_info> rows;
  for (int32_t i = 0; i < attnfold_num_kernels(); ++i) {
    attnfold_kernel_info info{};
    info.struct_size = sizeof(info);
    if (attnfold_get_kernel(i, &info) != ATTNFOLD_OK)
      throw std::runtime_error(attnfold_last_error());
    rows.push_back(info);
  }
  return rows;
}

void require_isa(const std::string& isa) {
  if (isa.empty()) return;
  std::vector<std::string> names;
  std::string why_not;
  for (const attnfold_kernel_info& row : kernel_table()) {
    if (row.isa == isa) {
      if (row.available != 0) return;
      why_not = row.why_not;
    }
    if (std::find(names.begin(), names.end(), row.isa) == names.end()) names.emplace_back(row.isa);
  }
  if (!why_not.empty())
    throw BadInput(fmt::format("--isa: {} is not available here: {}", isa, why_not));
  throw BadInput(fmt::format("--isa: expected one of {}, got {}", fmt::join(names, ", "), isa));
}

void ProblemFlags::add_to(CLI::App* sub) {
  const std::string group = "Problem";
  auto add = [&](const char* flag, auto& target, const char* help) {
    CLI::Option* option = sub->add_option(flag, target, help)->group(group)->capture_default_str();
    if constexpr (std::is_same_v<decltype(target), std::string&>) option->check(not_empty());
    if constexpr (std::is_same_v<decltype(target), float&>) option->check(finite_number());
    if constexpr (std::is_same_v<decltype(target), int32_t&>)
      option->check(whole_number<int32_t>());
    options_.push_back(option);
    return option;
  };
  add("--heads", heads_, "qo_heads/kv_heads")->type_name("N[/N]");
  add("--head-dim", head_dim_, "head_dim, or head_dim_qk/head_dim_vo")->type_name("N[/N]");
  add("--q", q_, "Storage type of q: f32, f16 or bf16")->type_name("DTYPE");
  add("--kv", kv_, "Storage type of k and v: f32, f16, bf16, e4m3, e5m2 or i8")->type_name("DTYPE");
  add("--o", o_, "Storage type of o: q's type (default), f32 or e4m3")->type_name("DTYPE");
  add("--v-in-k", v_in_k_, "1: v is the first columns of k (MLA); 0 = off")->type_name("N");
  add("--storage", storage_, "Where k and v are: paged or ragged")->type_name("KIND");
  add("--layout", layout_, "Order of a page's axes: NHD (token-major) or HND (head-major)")
      ->type_name("LAYOUT");
  add("--page-size", page_size_, "Tokens per page")->type_name("N");
  add("--mask", mask_, "causal (bottom-right: query i sees keys j <= kv_len - qo_len + i) or none")
      ->type_name("KIND");
  add("--window-left", window_left_, "Keys kept before the query's own position; -1 = off")
      ->type_name("N");
  add("--window-right", window_right_, "Keys kept after it; -1 = off")->type_name("N");
  add("--attention-chunk", attention_chunk_, "Keys of a query's own chunk of N only; 0 = off")
      ->type_name("N");
  add("--sink-tokens", sink_tokens_, "First keys that stay visible; 0 = off")->type_name("N");
  add("--sparse-block-size", sparse_block_size_, "Keys in a block of a block-sparse mask; 0 = off")
      ->type_name("N");
  add("--sparse-local-blocks", sparse_local_blocks_, "Blocks up to a query's own that it sees")
      ->type_name("N");
  add("--sparse-vertical-stride", sparse_vertical_stride_, "Every N-th block is seen; 0 = none")
      ->type_name("N");
  add("--sparse-head-step", sparse_head_step_, "Blocks by which these move from head to head")
      ->type_name("N");
  add("--logits-softcap", logits_softcap_, "Scores become c * tanh(score / c); 0 = off")
      ->type_name("C");
}

bool ProblemFlags::any_given() const {
  for (const CLI::Option* option : options_) {
    if (option->count() > 0) return true;
  }
  return false;
}

attnfold_problem ProblemFlags::problem() const {
  attnfold_problem p = ATTNFOLD_PROBLEM_INIT;
  std::tie(p.qo_heads, p.kv_heads) = parse_pair("--heads", heads_);
  std::tie(p.head_dim_qk, p.head_dim_vo) = parse_pair("--head-dim", head_dim_);
  p.q_dtype = parse_dtype("--q", q_, {DType::f32, DType::f16, DType::bf16});
  p.kv_dtype = parse_dtype(
      "--kv", kv_, {DType::f32, DType::f16, DType::bf16, DType::e4m3, DType::e5m2, DType::i8});
  p.o_dtype = p.q_dtype;
  if (!o_.empty())
    p.o_dtype = parse_dtype("--o", o_, {DType::f32, DType::f16, DType::bf16, DType::e4m3});
  if (is_8_bit(static_cast<DType>(p.kv_dtype)))
    p.k_scale_kind = p.v_scale_kind = ATTNFOLD_SCALE_PER_TENSOR;
  p.v_in_k = v_in_k_;
  p.kv_storage =
      static_cast<attnfold_kv_storage>(parse_either("--storage", storage_, "paged", "ragged"));
  p.kv_layout = static_cast<attnfold_kv_layout>(parse_either("--layout", layout_, "NHD", "HND"));
  p.mask = static_cast<attnfold_mask_kind>(parse_either("--mask", mask_, "none", "causal"));
  p.page_size = page_size_;
  p.window_left = window_left_;
  p.window_right = window_right_;
  p.attention_chunk = attention_chunk_;
  p.sink_tokens = sink_tokens_;
  p.sparse_block_size = sparse_block_size_;
  p.sparse_local_blocks = sparse_local_blocks_;
  p.sparse_vertical_stride = sparse_vertical_stride_;
  p.sparse_head_step = sparse_head_step_;
  p.logits_softcap = logits_softcap_;
  p.num_pages = 1024;
  p.max_batch = 64;
  p.max_qo_rows = 4096;
  p.max_kv_len = 4096;
  return p;
}

}  // namespace attnfold::tools
