// Judges one call: oracle against engine, schedules against each other, and a recorded answer
// against the oracle.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "check/call.h"
#include "check/judge.h"
#include "command.h"

namespace attnfold::tools {

struct VerifyOptions {
  int schedules = 20;
  uint64_t seed = 1;
  std::string isa;
  attnfold_backend backend = ATTNFOLD_CPU;
};

struct Verdict {
  ExitCode code = kRight;
  std::string why;       // "" if right; else what is wrong, or why it cannot be judged
  int32_t num_rows = 0;  // (token, query head) pairs
  std::string kernel;
  std::optional<check::Judgement> engine;    // o in float32, before any rounding to 16 bits
  std::optional<check::Judgement> recorded;  // plus one rounding of its stored dtype
  bool recorded_lse = false;                 // an lse was recorded too
  int num_schedules = 0;                     // distinct ones that gave the same bits
};

/** `step` is told what is being done, for a progress line. */
Verdict verify_call(const check::Call& call, const VerifyOptions& options,
                    const std::function<void(const std::string&)>& step);

/** The code of several: wrong before cannot be judged before right. */
ExitCode worse_of(ExitCode a, ExitCode b);

}  // namespace attnfold::tools
