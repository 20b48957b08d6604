// What this machine can do at best: loops that only read, and loops that only multiply.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "text.h"

namespace attnfold::tools {

/** Contiguous bytes, read front to back. */
struct Piece {
  const std::byte* data;
  int64_t bytes;  // a multiple of 64
};

/** Reads a piece once; `next` is what will be read after it, for loops that prefetch.  Returns a
 * value that depends on all. */
struct ReadLoop {
  const char* name;
  uint64_t (*read)(const std::byte* data, int64_t bytes, const std::byte* next);
};

/** `rounds` times its block of independent multiply-adds. */
struct ComputeLoop {
  const char* name;
  double flop_per_round;
  void (*run)(int64_t rounds);
};

// Loops that this machine can run, at least six of each kind; the last two may be none.
std::vector<ReadLoop> read_loops();
std::vector<ComputeLoop> fma_loops();
std::vector<ComputeLoop> dot_loops();   // bf16 dot product instructions
std::vector<ComputeLoop> tile_loops();  // bf16 products of AMX tiles

/** A ceiling and the loop that reached it. */
struct Ceiling {
  double value = 0;  // GB/s or GFLOP/s
  std::string loop;
  void raise(double other, const std::string& other_loop);
};

/** Reads every piece once, the pieces dealt to `threads` in contiguous shares.  Microseconds. */
double read_pieces_us(const ReadLoop& loop, std::span<const Piece> pieces, int threads);

/** The same bytes as `threads` pieces each, for a linear read. */
std::vector<Piece> linear_pieces(std::span<const Piece> ranges, int threads);

/** The best loop by median of `repeats`. */
Ceiling compute_peak(std::span<const ComputeLoop> loops, int threads, int repeats);

/** Memory in huge pages where the system gives them, written once so that every page is real. */
class HugeBuffer {
 public:
  explicit HugeBuffer(size_t bytes);  // throws std::bad_alloc
  ~HugeBuffer();
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_;
  size_t size_;
};

/** Advises huge pages for memory that was not yet touched. */
void advise_huge_pages(std::byte* data, size_t bytes);

}  // namespace attnfold::tools
