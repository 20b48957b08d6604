// The decode of a long context against the number of shares it is cut into.
#pragma once

#include <string>
#include <vector>

namespace attnfold::tools {

/** A table of times; the bits must not change with the workers: false if they do. */
struct WorkerSweep {
  std::string text;
  bool same_bits = true;
};
WorkerSweep sweep_workers(const std::vector<int>& workers, int threads, const std::string& isa,
                          bool quick);

}  // namespace attnfold::tools
