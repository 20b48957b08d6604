// A call made ready to run through the public API, and what it costs.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "attnfold/attnfold.h"
#include "check/call.h"
#include "check/device_call.h"

namespace attnfold::tools {

/** The engine refused or failed; what() is attnfold_last_error(). */
struct EngineError : std::runtime_error {
  EngineError(attnfold_status status_in, const std::string& text)
      : std::runtime_error(text), status(status_in) {}
  attnfold_status status;
};

/** A plan whose lengths are set, with outputs and workspace: run() may be called any number of
 * times. */
class PreparedCall {
 public:
  /** `call` must outlive this: its page tables and tensors are used in place.  Throws EngineError.
   */
  PreparedCall(const check::Call& call, const attnfold_execution& execution);

  void update();
  void run();
  attnfold_plan_report report() const;
  const char* kernel() const { return attnfold_plan_kernel(plan_.get()); }
  const char* numerics_id() const { return attnfold_plan_numerics_id(plan_.get()); }
  size_t workspace_bytes() const { return workspace_bytes_; }

  /** Moves the outputs out; run() must not be called afterwards. */
  check::Answer take_answer();

 private:
  struct Destroy {
    void operator()(attnfold_plan* plan) const { attnfold_plan_destroy(plan); }
  };
  const check::Call& call_;
  std::unique_ptr<attnfold_plan, Destroy> plan_;
  check::Buffer o_, workspace_;
  std::vector<float> lse_;
  attnfold_tensors tensors_;
  size_t workspace_bytes_ = 0;
  std::unique_ptr<check::DeviceCall> device_;  // on CUDA: everything is there
  void* device_workspace_ = nullptr;
};

/** (query, key) pairs in which the query's token may see the key, over all requests and one head.
 */
int64_t visible_pairs(const check::Call& call);

/** Floating-point operations of the two products over visible pairs and all query heads; softmax is
 * not counted. */
double useful_flop(const check::Call& call);

}  // namespace attnfold::tools
