// attnfold bench --backend cuda, in builds that have it.
#pragma once

#include <string>
#include <vector>

namespace attnfold::tools {

/** Prints a table of decode times beside a plain read of as many bytes, and those of other builds
 * of the library, which take turns with this one; the same as JSON to a file, if it is named.
 * Throws std::runtime_error where CUDA fails. */
void bench_cuda(const std::vector<std::string>& shapes, const std::vector<std::string>& against,
                int replays, const std::string& json_file);

}  // namespace attnfold::tools
