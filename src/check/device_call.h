// A call on a CUDA device: its arrays copied there, its answer copied back.
#pragma once

#include <memory>

#include "check/call.h"

namespace attnfold::check {

/** Device copies of a call's inputs, and outputs between canaries.  Throws std::runtime_error where
 * CUDA fails. */
class DeviceCall {
 public:
  explicit DeviceCall(const Call& call);
  ~DeviceCall();
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  attnfold_lengths lengths() const;
  attnfold_tensors tensors();     // with o and lse, which are poisoned again
  void* workspace(size_t bytes);  // poisoned

  /** Waits for the device. */
  void finish();

  /** Copies o and lse back once the device is done; returns what is wrong with the canaries, or "".
   */
  std::string take(Answer* answer);

 private:
  struct Memory;
  const Call& call_;
  std::unique_ptr<Memory> memory_;
};

/** run_engine for an execution whose backend is CUDA. */
RunResult run_on_device(const Call& call, const attnfold_execution& execution);

}  // namespace attnfold::check
