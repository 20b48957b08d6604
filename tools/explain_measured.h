// attnfold's real time on this machine for a question, beside the floor of what was measured of it.
#pragma once

#include <string>

#include "explain/engines.h"
#include "text.h"

namespace attnfold::tools {

struct MeasuredRun {
  Spread us;
  int32_t runs = 0, threads = 0;
  std::string kernel;
  explain::Machine machine;  // its bandwidth and peak measured just before
  explain::Line line;        // attnfold's, on that machine
};

/** Runs one layer of the question on random values; throws BadInput where this machine cannot. */
MeasuredRun measure_question(const explain::Question& question);

std::string measured_text(const MeasuredRun& run);

}  // namespace attnfold::tools
