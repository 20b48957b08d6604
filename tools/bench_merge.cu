// The merge of two states, timed over sets of arrays so that none of them is in L2.
#include "bench_graph.cuh"

namespace attnfold::tools {
namespace {

constexpr int kHeads = 32, kDim = 128;
constexpr double kColdBytes = 600e6;  // of all sets: ten times an L2

/** Reads two arrays and writes one. */
__global__ void plain_merge(const uint4* a, const uint4* b, uint4* to, size_t n) {
  constexpr int kUnroll = 4;
  const size_t base = size_t{blockIdx.x} * blockDim.x * kUnroll + threadIdx.x;
  uint4 x[kUnroll], y[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const size_t i = base + u * blockDim.x;
    if (i < n) x[u] = a[i], y[u] = b[i];
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const size_t i = base + u * blockDim.x;
    if (i < n) to[i] = {x[u].x ^ y[u].x, x[u].y ^ y[u].y, x[u].z ^ y[u].z, x[u].w ^ y[u].w};
  }
}

/** Natural logarithms in about (-4, 4). */
__global__ void fill_lse(float* lse, size_t n) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < n;
       i += size_t{gridDim.x} * blockDim.x)
    lse[i] = static_cast<float>(static_cast<int>(i * 2654435761u % 8000u) - 4000) * 1e-3f;
}

}  // namespace

MergeTime time_merge(int tokens, cudaStream_t stream, int replays) {
  const size_t pairs = size_t{static_cast<unsigned>(tokens)} * kHeads, elements = pairs * kDim;
  const double bytes = 3.0 * (static_cast<double>(elements) * 2 + static_cast<double>(pairs) * 4);
  const int sets = std::max(2, std::min(128, static_cast<int>(kColdBytes / bytes) + 1));
  char *o = nullptr, *lse = nullptr;
  check(cudaMalloc(&o, 3 * elements * 2 * sets), "cudaMalloc");
  check(cudaMalloc(&lse, 3 * pairs * 4 * sets), "cudaMalloc");
  fill_random<<<1024, 256, 0, stream>>>(reinterpret_cast<uint16_t*>(o), 3 * elements * sets);
  fill_lse<<<1024, 256, 0, stream>>>(reinterpret_cast<float*>(lse), 3 * pairs * sets);
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");

  const auto array = [&](int set, int which) {
    return o + (static_cast<size_t>(set) * 3 + which) * elements * 2;
  };
  attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
  e.backend = ATTNFOLD_CUDA;
  e.stream = stream;
  const int calls = sets * std::max(1, 256 / sets);
  Graph merge(stream, calls, [&](int i) {
    const int set = i % sets;
    attnfold_state states[3] = {ATTNFOLD_STATE_INIT, ATTNFOLD_STATE_INIT, ATTNFOLD_STATE_INIT};
    for (int s = 0; s < 3; ++s) {
      states[s].o = array(set, s);
      states[s].o_dtype = ATTNFOLD_BF16;
      states[s].lse = reinterpret_cast<float*>(lse) + (static_cast<size_t>(set) * 3 + s) * pairs;
    }
    check(attnfold_merge_parallel(tokens, kHeads, kDim, states, 2, &states[2], nullptr, 0, &e),
          "attnfold_merge_parallel");
  });
  const size_t words = elements * 2 / 16;
  Graph plain(stream, calls, [&](int i) {
    const int set = i % sets;
    plain_merge<<<static_cast<unsigned>((words + 1023) / 1024), 256, 0, stream>>>(
        reinterpret_cast<const uint4*>(array(set, 0)),
        reinterpret_cast<const uint4*>(array(set, 1)), reinterpret_cast<uint4*>(array(set, 2)),
        words);
  });
  std::vector<double> merge_us, plain_us;
  for (int i = 0; i < replays; ++i) {
    merge_us.push_back(merge.replay_us());
    plain_us.push_back(plain.replay_us());
  }
  cudaFree(o);
  cudaFree(lse);
  const double us = median(merge_us);
  return {tokens, us, bytes / us / 1e3, median(plain_us)};
}

}  // namespace attnfold::tools
