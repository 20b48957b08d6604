#include "measure.h"

#include <fmt/format.h>

#include <algorithm>

#include "bench_call.h"
#include "command.h"
#include "engine.h"
#include "machine.h"

namespace attnfold::tools {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kAssumedCacheBytes = 64 * kMiB;  // where the system does not say
constexpr int kLeastRounds = 5, kMostRounds = 101;
constexpr int kAllLoopRounds = 2;  // with evictions, later rounds go on with the best loops

/** A read of so much leaves nothing else in the cache.  Machines that are shared report caches of
 * half a gigabyte, of which they hold a part: 1.25 GB are enough there. */
int64_t evicting_bytes(int64_t cache_bytes) {
  return std::clamp(4 * cache_bytes, 256 * kMiB, std::max(1250 * kMiB, cache_bytes / 4 * 5));
}

/** The two loops with the least median. */
std::vector<bool> fastest(const std::vector<std::vector<double>>& loop_us) {
  std::vector<double> medians;
  for (const std::vector<double>& us : loop_us) medians.push_back(spread_of(us).median);
  std::vector<double> sorted = medians;
  std::sort(sorted.begin(), sorted.end());
  std::vector<bool> is_fast;
  for (const double median : medians) is_fast.push_back(median <= sorted[1]);
  return is_fast;
}

int64_t bytes_of(std::span<const Piece> pieces) {
  int64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

}  // namespace

Measure::Measure(int threads, std::string isa, double seconds_per_row, Progress& progress)
    : threads_(threads),
      isa_(std::move(isa)),
      seconds_per_row_(seconds_per_row),
      progress_(progress),
      cache_bytes_(last_level_cache_bytes()),
      loops_(read_loops()) {
  if (cache_bytes_ == 0) cache_bytes_ = kAssumedCacheBytes;
}

attnfold_execution Measure::execution() const {
  attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
  execution.num_threads = threads_;
  execution.isa = isa_or_null(isa_);
  return execution;
}

/** What is far larger than the cache evicts itself. */
bool Measure::must_evict(CacheState state, int64_t bytes) const {
  return state == CacheState::cold && bytes < evicting_bytes(cache_bytes_);
}

void Measure::evict() {
  if (!evictor_) {
    const int64_t most = std::max(64 * kMiB, available_memory_bytes() / 3);
    evictor_ = std::make_unique<HugeBuffer>(
        static_cast<size_t>(std::min(evicting_bytes(cache_bytes_), most)));
  }
  const Piece all{evictor_->data(), static_cast<int64_t>(evictor_->size())};
  read_pieces_us(loops_.front(), linear_pieces({&all, 1}, threads_), threads_);
}

Measured Measure::decode(const check::Call& call, CacheState state, const std::string& name) {
  PreparedCall prepared(call, execution());
  const std::vector<Piece> pieces = table_pieces(call);
  const int64_t bytes = bytes_of(pieces);
  const bool evicts = must_evict(state, bytes);
  std::vector<double> engine_us;
  std::vector<std::vector<double>> loop_us(loops_.size());
  std::vector<bool> is_fast(loops_.size(), true);
  double spent_us = 0;
  prepared.run();
  for (int round = 0; round < kMostRounds; ++round) {
    if (round >= kLeastRounds && spent_us > seconds_per_row_ * 1e6) break;
    progress_.show(fmt::format("{}: round {}", name, round + 1));
    spent_us += elapsed_us([&] {
      for (size_t i = 0; i < loops_.size(); ++i) {
        if (evicts && round >= kAllLoopRounds && !is_fast[i]) continue;
        if (evicts) evict();
        loop_us[i].push_back(read_pieces_us(loops_[i], pieces, threads_));
      }
      if (round + 1 == kAllLoopRounds) is_fast = fastest(loop_us);
      if (evicts) evict();
      engine_us.push_back(elapsed_us([&] { prepared.run(); }));
    });
  }
  Measured measured;
  measured.us = spread_of(engine_us);
  for (size_t i = 0; i < loops_.size(); ++i) {
    measured.table_read.raise(static_cast<double>(bytes) / spread_of(loop_us[i]).median / 1e3,
                              loops_[i].name);
  }
  measured.kv_bytes = prepared.report().kv_bytes;
  measured.flop = useful_flop(call);
  measured.kernel = prepared.kernel();
  measured.num_rounds = static_cast<int32_t>(engine_us.size());
  return measured;
}

Measured Measure::prefill(const check::Call& call, const std::string& name) {
  PreparedCall prepared(call, execution());
  std::vector<double> engine_us;
  double spent_us = elapsed_us([&] { prepared.run(); });
  while (engine_us.size() < 3 ||
         (engine_us.size() < kMostRounds && spent_us < seconds_per_row_ * 1e6)) {
    progress_.show(fmt::format("prefill {}: round {}", name, engine_us.size() + 1));
    engine_us.push_back(elapsed_us([&] { prepared.run(); }));
    spent_us += engine_us.back();
  }
  Measured measured;
  measured.us = spread_of(engine_us);
  measured.kv_bytes = prepared.report().kv_bytes;
  measured.flop = useful_flop(call);
  measured.kernel = prepared.kernel();
  measured.num_rounds = static_cast<int32_t>(engine_us.size());
  return measured;
}

SharedPrefix Measure::prefix(const check::Call& call, const std::string& name) {
  attnfold_execution own_execution = execution();
  own_execution.prefix_use = ATTNFOLD_PREFIX_OFF;
  PreparedCall shared(call, execution()), own(call, own_execution);
  std::vector<double> shared_us, own_us;
  double spent_us = elapsed_us([&] {
    shared.run();
    own.run();
  });
  while (own_us.size() < 3 || (own_us.size() < kMostRounds && spent_us < seconds_per_row_ * 1e6)) {
    progress_.show(fmt::format("prefix {}: round {}", name, own_us.size() + 1));
    shared_us.push_back(elapsed_us([&] { shared.run(); }));
    own_us.push_back(elapsed_us([&] { own.run(); }));
    spent_us += shared_us.back() + own_us.back();
  }
  return {spread_of(shared_us), spread_of(own_us), shared.report(), own.report()};
}

Ceiling Measure::linear_read(const check::Call& call, CacheState state) {
  const std::vector<Piece> pieces = linear_pieces(pool_pieces(call), threads_);
  const int64_t bytes = bytes_of(pieces);
  const bool evicts = must_evict(state, bytes);
  Ceiling best;
  for (const ReadLoop& loop : loops_) {
    progress_.show(fmt::format("linear read: {}", loop.name));
    std::vector<double> us;
    for (int round = 0; round < kLeastRounds + 1; ++round) {
      if (evicts) evict();
      const double now = read_pieces_us(loop, pieces, threads_);
      if (round > 0) us.push_back(now);
    }
    best.raise(static_cast<double>(bytes) / spread_of(us).median / 1e3, loop.name);
  }
  return best;
}

void Measure::probe_peaks() {
  constexpr int kRepeats = 5;
  progress_.show("peak of the multiply-add loops");
  const Ceiling now = compute_peak(fma_loops(), threads_, kRepeats);
  fma.raise(now.value, now.loop);
  const Ceiling dot_now = compute_peak(dot_loops(), threads_, kRepeats);
  dot.raise(dot_now.value, dot_now.loop);
  const Ceiling tiles_now = compute_peak(tile_loops(), threads_, kRepeats);
  tiles.raise(tiles_now.value, tiles_now.loop);
}

int64_t Measure::planned_kv_bytes(const check::Call& call) const {
  return PreparedCall(call, execution()).report().kv_bytes;
}

nlohmann::json as_json(const Measured& m, double peak) {
  return {{"kernel", m.kernel},
          {"rounds", m.num_rounds},
          {"kv_bytes", m.kv_bytes},
          {"us", m.us.median},
          {"us_q1", m.us.lower},
          {"us_q3", m.us.upper},
          {"gflop_per_s", m.gflop_per_s()},
          {"of_peak", m.gflop_per_s() / peak}};
}

}  // namespace attnfold::tools
