// Times calls beside the ceilings of the machine, in the same minutes.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "check/call.h"
#include "probe.h"
#include "text.h"

namespace attnfold::tools {

/** Cold: neither keys nor values are in the last-level cache when the call starts.  Warm: they are,
 * as far as they fit. */
enum class CacheState { warm, cold };

/** What was measured of one call in one state. */
struct Measured {
  Spread us;
  Ceiling table_read;    // GB/s: the same bytes in the order of the page tables, in the same state
  int64_t kv_bytes = 0;  // that the plan says it reads
  double flop = 0;       // over visible pairs
  std::string kernel;
  int32_t num_rounds = 0;

  double gb_per_s() const { return static_cast<double>(kv_bytes) / us.median / 1e3; }
  double gflop_per_s() const { return flop / us.median / 1e3; }
  double flop_per_byte() const { return flop / static_cast<double>(kv_bytes); }
};

/** What every row of a bench says of it; `peak` in GFLOP/s. */
nlohmann::json as_json(const Measured& measured, double peak);

/** A batch with its shared prefixes read once, and the same with each request reading its own. */
struct SharedPrefix {
  Spread shared_us, own_us;
  attnfold_plan_report shared{}, own{};

  double ratio() const { return shared_us.median / own_us.median; }
};

class Measure {
 public:
  Measure(int threads, std::string isa, double seconds_per_row, Progress& progress);

  /** Engine and every read loop in turn, round after round; medians. */
  Measured decode(const check::Call& call, CacheState state, const std::string& name);
  /** The engine alone. */
  Measured prefill(const check::Call& call, const std::string& name);
  /** Both ways in turn, warm or as the caches have it. */
  SharedPrefix prefix(const check::Call& call, const std::string& name);
  /** Best linear read of the call's pools. */
  Ceiling linear_read(const check::Call& call, CacheState state);
  /** Raises `fma`, `dot` and `tiles` to what is measured now. */
  void probe_peaks();
  /** The plan's own count, without running. */
  int64_t planned_kv_bytes(const check::Call& call) const;

  bool fits_in_cache(int64_t bytes) const { return bytes <= cache_bytes_ / 4 * 3; }
  int threads() const { return threads_; }
  int64_t cache_bytes() const { return cache_bytes_; }

  Ceiling fma, dot, tiles;  // GFLOP/s

 private:
  attnfold_execution execution() const;
  bool must_evict(CacheState state, int64_t bytes) const;
  void evict();

  int threads_;
  std::string isa_;
  double seconds_per_row_;
  Progress& progress_;
  int64_t cache_bytes_;
  std::vector<ReadLoop> loops_;
  std::unique_ptr<HugeBuffer> evictor_;
};

}  // namespace attnfold::tools
