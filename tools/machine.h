// What this machine is, for the tables that carry its numbers.
#pragma once

#include <cstdint>
#include <string>

namespace attnfold::tools {

std::string cpu_model();     // "AMD EPYC 9R14", or "unknown"
std::string cpu_features();  // those that a kernel row may need, by their names in /proc/cpuinfo
int32_t num_usable_cpus();   // CPUs that this process may run on
int64_t last_level_cache_bytes();  // 0 if unknown
int64_t available_memory_bytes();  // 0 if unknown
double load_average();             // of the last minute; -1 if unknown

}  // namespace attnfold::tools
