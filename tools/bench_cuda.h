// attnfold bench --backend cuda, in builds that have it.
#pragma once

#include <string>
#include <vector>

#include "bench_library.h"

namespace attnfold::tools {

/** Prints a table of decode times beside a plain read of as many bytes, and those of the libraries
 * after the first, which take turns with it; the same as JSON to a file, if it is named.  Throws
 * std::runtime_error where CUDA or a library fails. */
void bench_cuda(const std::vector<std::string>& shapes, const std::vector<Library>& libraries,
                int replays, const std::string& json_file);

}  // namespace attnfold::tools
