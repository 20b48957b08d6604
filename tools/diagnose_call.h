// attnfold verify --diagnose: which of the field's known faults a recorded answer has.
#pragma once

#include <string>
#include <vector>

#include "command.h"

namespace attnfold::tools {

/** Prints a diagnosis of each file; the code of several as in verify. */
ExitCode run_diagnose(const std::vector<std::string>& files, bool as_json);

}  // namespace attnfold::tools
