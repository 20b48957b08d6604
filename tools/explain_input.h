// The question that the flags of `attnfold explain` ask.
#pragma once

#include <string>

#include "command.h"
#include "explain/engines.h"

namespace attnfold::tools {

class ExplainFlags {
 public:
  void add_to(CLI::App* sub);
  explain::Question question() const;  // throws BadInput

  /** Throws BadInput if any other flag is given than `flag` and those that may stand `beside` it.
   */
  void require_alone(const std::string& flag, const std::vector<std::string>& beside) const;

 private:
  explain::Model model() const;
  explain::Machine machine() const;
  std::vector<explain::Request> requests() const;
  void require_one_source() const;
  void read_call(explain::Question& question) const;

  std::string file_, model_, config_, heads_, head_dim_ = "128", gpu_ = "h100", q_ = "bf16",
                                              kv_ = "bf16", lengths_;
  int64_t layers_ = 1, window_ = 0, tp_ = 1, batch_ = 1, context_ = 2560, query_ = 1,
          page_size_ = 16, shared_prefix_ = 0, sms_ = 0;
  double tb_per_s_ = 0, tflop_per_s_ = 0;
  CLI::App* sub_ = nullptr;
  CLI::Option *lengths_option_ = nullptr, *page_size_option_ = nullptr;
  std::vector<CLI::Option*> of_call_;  // those that say what a FILE says, and a few more
  bool local_ = false, no_scratch_ = false;
  explain::Switches switches_;
};

/** Text of a file; throws BadInput. */
std::string read_text(const std::string& path);

/** This machine's CPUs, with bandwidth and peak measured now. */
explain::Machine measured_machine();

}  // namespace attnfold::tools
