// What the benches of the CUDA backend share: calls timed as an engine replays them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "attnfold/attnfold.h"
#include "bench_library.h"

namespace attnfold::tools {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}
inline void check(attnfold_status status, const char* what) {
  if (status != ATTNFOLD_OK)
    throw std::runtime_error(std::string(what) + ": " + attnfold_last_error());
}

/** A copy on the device, the caller's to free. */
template <class T>
T* upload(const std::vector<T>& v) {
  T* p = nullptr;
  check(cudaMalloc(&p, v.size() * sizeof(T)), "cudaMalloc");
  check(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return p;
}

/** Bits of bfloat16 numbers in about (-2, 2). */
static __global__ void fill_random(uint16_t* to, size_t n) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < n;
       i += size_t{gridDim.x} * blockDim.x) {
    uint64_t x = (i + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    const float u = static_cast<float>(x >> 40) * 0x1p-23f * 1.7f - 1.7f;
    to[i] = static_cast<uint16_t>(__float_as_uint(u) >> 16);
  }
}

/** A graph of calls one after the other. */
class Graph {
 public:
  Graph(cudaStream_t stream, int num_calls, const std::function<void(int)>& call)
      : stream_(stream), num_calls_(num_calls) {
    cudaGraph_t graph;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    for (int i = 0; i < num_calls; ++i) call(i);
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&exec_, graph, 0), "cudaGraphInstantiate");
    cudaGraphDestroy(graph);
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
    check(cudaGraphLaunch(exec_, stream_), "cudaGraphLaunch");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }
  ~Graph() {
    cudaGraphExecDestroy(exec_);
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  double replay_us() {  // of one call
    float ms = 0;
    check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    check(cudaGraphLaunch(exec_, stream_), "cudaGraphLaunch");
    check(cudaEventRecord(end_, stream_), "cudaEventRecord");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    check(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return ms * 1e3 / num_calls_;
  }

 private:
  cudaStream_t stream_;
  int num_calls_;
  cudaGraphExec_t exec_{};
  cudaEvent_t begin_{}, end_{};
};

inline double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<long>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

/** One row of the table of merges. */
struct MergeTime {
  int tokens;
  double us, gb_per_s, plain_us;
};

/** Times the merge of two states of `tokens` rows, 32 heads, 128 wide, bf16, with lse; and a plain
 * kernel that reads and writes as much. */
MergeTime time_merge(int tokens, cudaStream_t stream, int replays);

/** One row of the table of prefills. */
struct PrefillTime {
  std::string name;
  double flop;  // of visible pairs
  double burst_us, sustained_us;
  std::vector<double> others_us;  // of the libraries but the first, bursts too
};

/** Times those of `names`, or all, on pools of random keys and values; last the matrix units. */
std::vector<PrefillTime> time_prefills(const std::vector<std::string>& names,
                                       const std::vector<Library>& libraries, void* k, void* v,
                                       size_t pool_bytes, cudaStream_t stream, int replays);

}  // namespace attnfold::tools
