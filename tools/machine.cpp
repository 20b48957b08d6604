#include "machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <fstream>
#include <sstream>
#include <string_view>
#include <thread>

namespace attnfold::tools {
namespace {

/** Value of the first "key : value" line of a file of such lines, or "". */
std::string value_of(const char* path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const size_t start = line.find_first_not_of(" \t", colon + 1);
    return start == std::string::npos ? std::string() : line.substr(start);
  }
  return {};
}

}  // namespace

std::string cpu_model() {
  std::string name = value_of("/proc/cpuinfo", "model name");
  const std::string part = value_of("/proc/cpuinfo", "CPU part");  // Arm has no names
  if (name.empty() && !part.empty())
    name = "implementer " + value_of("/proc/cpuinfo", "CPU implementer") + ", part " + part;
  if (name.empty()) return "unknown";
  const std::string family = value_of("/proc/cpuinfo", "cpu family");
  const std::string model = value_of("/proc/cpuinfo", "model\t");
  if (!family.empty() && !model.empty()) name += " (family " + family + ", model " + model + ")";
  return name;
}

std::string cpu_features() {
  constexpr std::array<std::string_view, 17> kNames = {
      "avx2",     "fma",         "f16c",        "avx512f",     "avx512bw", "avx512dq",
      "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16",
      "amx_int8", "asimd",       "asimdhp",     "bf16",        "sve"};
  std::istringstream flags(value_of("/proc/cpuinfo", "flags") +
                           value_of("/proc/cpuinfo", "Features"));
  std::string found;
  for (std::string flag; flags >> flag;) {
    if (std::find(kNames.begin(), kNames.end(), flag) == kNames.end()) continue;
    found += found.empty() ? flag : " " + flag;
  }
  return found;
}

int32_t num_usable_cpus() {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

int64_t last_level_cache_bytes() {
  for (const char* index : {"index3", "index2"}) {  // some virtual machines misreport it to sysconf
    std::ifstream file(std::string("/sys/devices/system/cpu/cpu0/cache/") + index + "/size");
    int64_t size = 0;
    char unit = 0;
    if (file >> size >> unit && size > 0) return unit == 'M' ? size << 20 : size << 10;
  }
  int64_t bytes = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
#if defined(_SC_LEVEL2_CACHE_SIZE)
  if (bytes <= 0) bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
  return std::max<int64_t>(bytes, 0);
}

int64_t available_memory_bytes() {
  std::istringstream text(value_of("/proc/meminfo", "MemAvailable"));
  int64_t kilobytes = 0;
  text >> kilobytes;
  return kilobytes * 1024;
}

double foreign_cpu_seconds() {
  std::ifstream file("/proc/stat");
  std::string name;
  std::array<double, 8> ticks{};  // user nice system idle iowait irq softirq steal
  file >> name;
  for (double& t : ticks) file >> t;
  const long ticks_per_second = sysconf(_SC_CLK_TCK);
  timespec own{};
  if (!file || ticks_per_second <= 0 || clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &own) != 0)
    return -1;
  const double busy = ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6] + ticks[7];
  return busy / static_cast<double>(ticks_per_second) - static_cast<double>(own.tv_sec) -
         static_cast<double>(own.tv_nsec) * 1e-9;
}

}  // namespace attnfold::tools
