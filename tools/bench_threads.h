// A few decodes and prefills at several numbers of threads.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace attnfold::tools {

struct ThreadSweep {
  std::string text;
  nlohmann::json json;
};

/** What `shapes` may name. */
std::vector<std::string> sweep_shape_names();

/** `shapes`: names of those to time; none: all. */
ThreadSweep sweep_threads(const std::vector<int>& threads, const std::vector<std::string>& shapes,
                          const std::string& isa, bool quick);

}  // namespace attnfold::tools
