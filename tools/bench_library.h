// The functions that the CUDA benches call, of this program or of another build of the library.
#pragma once

#include <string>
#include <vector>

#include "attnfold/attnfold.h"

namespace attnfold::tools {

struct Library {
  std::string name;
  decltype(&attnfold_plan_create) plan_create = attnfold_plan_create;
  decltype(&attnfold_plan_destroy) plan_destroy = attnfold_plan_destroy;
  decltype(&attnfold_plan_update) plan_update = attnfold_plan_update;
  decltype(&attnfold_plan_workspace_bytes) plan_workspace_bytes = attnfold_plan_workspace_bytes;
  decltype(&attnfold_plan_run) plan_run = attnfold_plan_run;
  decltype(&attnfold_last_error) last_error = attnfold_last_error;

  /** Throws what the library says of a call that failed. */
  void check(attnfold_status status, const char* what) const;
};

/** This program's own, then those of the shared libraries at `paths`.  Throws std::runtime_error
 * where one cannot be loaded.  They stay loaded. */
std::vector<Library> load_libraries(const std::vector<std::string>& paths);

}  // namespace attnfold::tools
