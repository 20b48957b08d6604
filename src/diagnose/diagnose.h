// What went wrong with a recorded answer: the field's known faults, tried against it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check/call.h"

namespace attnfold::diagnose {

/** Faults that give the same rows, each of which explains the requests named. */
struct Finding {
  std::vector<std::string> faults;  // one name, or two joined by " and "
  std::vector<int32_t> requests;
  int64_t wrong_rows = 0;    // (token, head) rows of these requests that are wrong
  int64_t checked_rows = 0;  // of these, looked at, and all explained
};

struct Diagnosis {
  int64_t rows = 0, wrong_rows = 0;
  std::vector<Finding> findings;     // the one with most wrong rows first
  std::vector<int32_t> unexplained;  // requests whose wrong rows are none of these

  bool right() const { return wrong_rows == 0; }
};

/** Why a call cannot be diagnosed, or "": it has no recorded o, or something of which no fault is
 * known. */
std::string why_not(const check::Call& call);

/** Of a call that can be diagnosed. */
Diagnosis diagnose(const check::Call& call);

}  // namespace attnfold::diagnose
