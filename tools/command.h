// What the subcommands of `attnfold` share: exit codes, errors, common flags.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "attnfold/attnfold.h"

namespace attnfold::tools {

/** Exit codes of every subcommand. */
enum ExitCode : int {
  kRight = 0,
  kWrong = 1,     // an answer was judged and is wrong
  kBadInput = 2,  // flags, files or a machine that do not allow an answer; nothing was judged
  kInternal = 3   // a fault of attnfold itself
};

/** What the caller has to change; main prints it and exits with kBadInput. */
struct BadInput : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/** Chosen by the command line, run after it is parsed; returns the exit code. */
using Command = std::function<int()>;

void add_info(CLI::App& app, Command& command);
void add_run(CLI::App& app, Command& command);
void add_verify(CLI::App& app, Command& command);
void add_bench(CLI::App& app, Command& command);
void add_explain(CLI::App& app, Command& command);

/** "0.1.0" */
std::string version_text();

/** A number in [low, high], in decimal digits; the message is "expected low..high, got <text>". */
CLI::Validator in_range(int64_t low, int64_t high);

/** Any int32_t or uint64_t likewise.  Without it CLI11 takes -1 for 2^64 - 1, and 010 for 8. */
template <class T>
CLI::Validator whole_number();

/** What is not empty: "" would be taken for an option that is not there. */
CLI::Validator not_empty();

/** A finite number; a number in [low, high]. */
CLI::Validator finite_number();
CLI::Validator number_between(double low, double high);

// Values with commas between them, none of which may be missing: CLI11's own delimiter drops empty
// ones, so that 1,,2 would be 1,2.
template <class T>
CLI::Option* add_numbers(CLI::App* sub, const std::string& flag, std::vector<T>& numbers, T low,
                         T high, const std::string& help);
CLI::Option* add_names(CLI::App* sub, const std::string& flag, std::vector<std::string>& names,
                       const std::string& help);

// Flags that mean the same in every subcommand.
CLI::Option* add_threads_flag(CLI::App* sub, int32_t& threads);
CLI::Option* add_isa_flag(CLI::App* sub, std::string& isa);
CLI::Option* add_backend_flag(CLI::App* sub, attnfold_backend& backend);

/** Throws BadInput unless `isa` is "" or names a kernel row that this machine can run. */
void require_isa(const std::string& isa);

/** NULL for "", as attnfold_execution.isa wants it. */
inline const char* isa_or_null(const std::string& isa) {
  return isa.empty() ? nullptr : isa.c_str();
}

/** Every row of the kernel table, in order of preference. */
std::vector<attnfold_kernel_info> kernel_table();

/** The flags --heads, --head-dim, --q, --kv and so on, that describe a problem without a file. */
class ProblemFlags {
 public:
  void add_to(CLI::App* sub);
  bool any_given() const;
  attnfold_problem problem() const;  // throws BadInput

 private:
  std::vector<CLI::Option*> options_;
  std::string heads_ = "32/8", head_dim_ = "128", q_ = "bf16", kv_ = "bf16", o_, storage_ = "paged",
              layout_ = "NHD", mask_ = "causal";
  int32_t page_size_ = 16, window_left_ = -1, window_right_ = -1, attention_chunk_ = 0,
          sink_tokens_ = 0, v_in_k_ = 0, sparse_block_size_ = 0, sparse_local_blocks_ = 0,
          sparse_vertical_stride_ = 0, sparse_head_step_ = 0;
  float logits_softcap_ = 0;
};

}  // namespace attnfold::tools
