#include "probe.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

#include "cpu/backend.h"

namespace attnfold::tools {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

std::atomic<uint64_t> g_sink{0};  // what was read, so that no read can be dropped

/** body(t) for t = 0..threads-1, on the threads that the engine's own runs take. */
template <class Body>
void on_threads(int threads, Body&& body) {
  const auto call = [](void* context, int32_t t) {
    (*static_cast<std::remove_reference_t<Body>*>(context))(t);
  };
  cpu::run_parallel({threads, nullptr, nullptr}, {{threads, call, &body}});
}

}  // namespace

void Ceiling::raise(double other, const std::string& other_loop) {
  if (other <= value) return;
  value = other;
  loop = other_loop;
}

double read_pieces_us(const ReadLoop& loop, std::span<const Piece> pieces, int threads) {
  const int64_t num_pieces = static_cast<int64_t>(pieces.size());
  return elapsed_us([&] {
    on_threads(threads, [&](int t) {
      uint64_t sum = 0;
      const int64_t end = num_pieces * (t + 1) / threads;
      for (int64_t i = num_pieces * t / threads; i < end; ++i) {
        const Piece& piece = pieces[static_cast<size_t>(i)];
        const std::byte* next = i + 1 < end ? pieces[static_cast<size_t>(i + 1)].data : piece.data;
        sum ^= loop.read(piece.data, piece.bytes, next);
      }
      g_sink.fetch_xor(sum, std::memory_order_relaxed);
    });
  });
}

std::vector<Piece> linear_pieces(std::span<const Piece> ranges, int threads) {
  std::vector<Piece> shares;
  for (int t = 0; t < threads; ++t) {
    for (const Piece& range : ranges) {
      const int64_t lines = range.bytes / 64;
      const int64_t begin = lines * t / threads * 64, end = lines * (t + 1) / threads * 64;
      shares.push_back({range.data + begin, end - begin});
    }
  }
  return shares;
}

Ceiling compute_peak(std::span<const ComputeLoop> loops, int threads, int repeats) {
  constexpr double kTargetUs = 3000;
  Ceiling peak;
  for (const ComputeLoop& loop : loops) {
    auto time_us = [&](int64_t rounds) {
      return elapsed_us([&] { on_threads(threads, [&](int) { loop.run(rounds); }); });
    };
    int64_t rounds = 1000;
    double us = time_us(rounds);
    while (us < kTargetUs) {
      rounds *= 2;
      us = time_us(rounds);
    }
    std::vector<double> times;
    for (int i = 0; i < repeats; ++i) times.push_back(time_us(rounds));
    const double flop = loop.flop_per_round * static_cast<double>(rounds) * threads;
    peak.raise(flop / spread_of(times).median / 1e3, loop.name);
  }
  return peak;
}

void advise_huge_pages(std::byte* data, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t begin =
      (reinterpret_cast<uintptr_t>(data) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const uintptr_t end =
      (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePageBytes * kHugePageBytes;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

HugeBuffer::HugeBuffer(size_t bytes)
    : size_((bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes) {
  data_ = static_cast<std::byte*>(std::aligned_alloc(kHugePageBytes, size_));
  if (data_ == nullptr) throw std::bad_alloc();
  advise_huge_pages(data_, size_);
  std::memset(data_, 1, size_);
}

HugeBuffer::~HugeBuffer() { std::free(data_); }

}  // namespace attnfold::tools
