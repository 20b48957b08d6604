// What the programs of this folder share: one call each, run when a line asks for it.
//
//   stdin   "run N" or "run N cold"; anything else ends the program
//   stdout  N times in microseconds, in one line; "cold": 1.25 GB are read before each
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

struct Shape {
  int batch, qo_len, kv_len, qo_heads, kv_heads, head_dim, threads;
  bool bf16;  // else f16
};

inline Shape shape_of(char** argv) {
  Shape s{};
  int* const fields[] = {&s.batch,    &s.qo_len,   &s.kv_len, &s.qo_heads,
                         &s.kv_heads, &s.head_dim, &s.threads};
  for (int* field : fields) *field = std::atoi(*++argv);
  s.bf16 = std::strcmp(*++argv, "bf16") == 0;
  return s;
}

inline double now_us() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/** 16-bit floats in [-1, 1), the same ones in every program. */
inline uint16_t random_value(bool bf16, uint64_t* state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  if (!bf16) return static_cast<uint16_t>((*state >> 63 << 15) | 0x3000u | (*state >> 40 & 0x7ffu));
  return static_cast<uint16_t>((*state >> 63 << 15) | 0x3e00u | (*state >> 40 & 0xffu));
}

inline void evict(int threads) {
  static std::vector<uint64_t> memory(size_t{1250} << 17, 1);
  std::vector<std::thread> readers;
  for (int t = 0; t < threads; ++t) {
    readers.emplace_back([&, t] {
      uint64_t sum = 0;
      const size_t n = memory.size();
      for (size_t i = n * t / threads; i < n * (t + 1) / threads; i += 8) sum += memory[i];
      volatile uint64_t sink = sum;
      (void)sink;
    });
  }
  for (std::thread& reader : readers) reader.join();
}

template <class Run>
int serve(int threads, Run&& run) {
  run();
  std::printf("ready\n");
  std::fflush(stdout);
  char line[64];
  while (std::fgets(line, sizeof(line), stdin) != nullptr && std::strncmp(line, "run ", 4) == 0) {
    const bool cold = std::strstr(line, "cold") != nullptr;
    for (int i = std::atoi(line + 4); i > 0; --i) {
      if (cold) evict(threads);
      const double start = now_us();
      run();
      std::printf("%.1f ", now_us() - start);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}
