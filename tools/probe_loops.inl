// The probe loops, written once against Words (integers to read) and Floats (to multiply); each ISA
// includes this file.

/** Reads in kStreams places at once with kUnroll accumulators in all, prefetching kPrefetch bytes
 * ahead (0 = not). */
template <int kUnroll, int kStreams, int kPrefetch>
uint64_t read_loop(const std::byte* data, int64_t bytes, const std::byte* next) {
  constexpr int kDepth = kUnroll / kStreams;
  constexpr int64_t kWordBytes = sizeof(Words), kStepBytes = kDepth * kWordBytes;
  const int64_t stream_bytes = bytes / kStreams / kStepBytes * kStepBytes;
  Words sum[kUnroll];
#pragma GCC unroll 32
  for (int u = 0; u < kUnroll; ++u) sum[u] = zero_words();
  for (int64_t i = 0; i < stream_bytes; i += kStepBytes) {
#pragma GCC unroll 4
    for (int s = 0; s < kStreams; ++s) {
      const std::byte* p = data + s * stream_bytes + i;
      if constexpr (kPrefetch > 0) {
        const bool inside = s * stream_bytes + i + kPrefetch < bytes;
        const std::byte* ahead =
            inside ? p + kPrefetch : next + (s * stream_bytes + i + kPrefetch - bytes);
#pragma GCC unroll 32
        for (int64_t b = 0; b < kStepBytes; b += 64) __builtin_prefetch(ahead + b);
      }
#pragma GCC unroll 32
      for (int d = 0; d < kDepth; ++d) mix(sum[s * kDepth + d], p + d * kWordBytes);
    }
  }
  for (int64_t i = kStreams * stream_bytes; i < bytes; i += kWordBytes) mix(sum[0], data + i);
  for (int u = 1; u < kUnroll; ++u) mix(sum[0], sum[u]);
  return first_word(sum[0]);
}

template <int kAccumulators>
void fma_loop(int64_t rounds) {
  Floats sum[kAccumulators];
  const Floats a = all_floats(0.5f), b = all_floats(1.0f);
#pragma GCC unroll 32
  for (int i = 0; i < kAccumulators; ++i) sum[i] = all_floats(static_cast<float>(i));
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 32
    for (int i = 0; i < kAccumulators; ++i) multiply_add(sum[i], a, b);
  }
  for (int i = 1; i < kAccumulators; ++i) multiply_add(sum[0], a, sum[i]);
  keep(sum[0]);
}

template <int kAccumulators>
constexpr double kFmaFlop = 2.0 * kAccumulators*(sizeof(Floats) / sizeof(float));
