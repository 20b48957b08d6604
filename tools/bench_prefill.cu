// Prefill for attnfold bench --backend cuda: causal, whole, chunked and mixed with decodes, beside
// what the matrix units do at best.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <thread>

#include "attnfold/attnfold.h"
#include "bench_cuda_shapes.h"
#include "bench_graph.cuh"
#include "cuda/wgmma.h"

namespace attnfold::tools {
namespace {

/** Products and nothing else: four warpgroups, operands in shared memory. */
constexpr int kPeakSteps = 2048;
__global__ void __launch_bounds__(512) matrix_peak(uint32_t* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  uint32_t* words = reinterpret_cast<uint32_t*>(memory);
  for (uint32_t i = threadIdx.x; i < 49152 / 4; i += blockDim.x)  // bf16 numbers in [1/2, 2)
    words[i] = (i * 2654435761u & 0x807f807fu) | 0x3f003f00u;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const uint32_t a = cuda::matrix_address(base, 16), b = cuda::matrix_address(base + 16384, 16);
  float d[64];
  for (float& x : d) x = 0.0f;
  for (int i = 0; i < kPeakSteps; ++i) {
    cuda::open_products();
    cuda::multiply_keys<__nv_bfloat16, false>(d, cuda::matrix_at<1024>(a),
                                              cuda::matrix_at<1024>(b));
    cuda::commit_products();
    cuda::wait_for_products<1>();
  }
  cuda::wait_for_products<0>();
  cuda::settle(d);
  float sum = 0.0f;
  for (const float x : d) sum += x;
  if (sum == 1.0f) *out = 1;
#endif
}

constexpr int kQoHeads = 32, kKvHeads = 8;

double operations(const CudaPrefill& w) {  // of visible pairs
  double pairs = 0;
  for (const CudaRequest& r : w.requests) pairs += 0.5 * r.qo_len * (2.0 * r.kv_len - r.qo_len + 1);
  return pairs * 4 * kQoHeads * w.head_dim;
}

/** Some calls of one workload, each on other pages and rows. */
class Calls {
 public:
  Calls(const CudaPrefill& w, const Library& library, void* k, void* v, int64_t num_pages,
        cudaStream_t stream)
      : library_(library), stream_(stream) {
    attnfold_problem p = ATTNFOLD_PROBLEM_INIT;
    p.qo_heads = kQoHeads;
    p.kv_heads = kKvHeads;
    p.head_dim_qk = p.head_dim_vo = w.head_dim;
    p.page_size = w.page_size;
    p.logits_softcap = w.softcap;
    p.num_pages = num_pages;
    p.mask = ATTNFOLD_MASK_CAUSAL;
    p.max_batch = static_cast<int32_t>(w.requests.size());
    const auto pages_of = [&](const CudaRequest& r) {
      return (r.kv_len + w.page_size - 1) / w.page_size;
    };
    int64_t pages = 0;
    std::vector<int32_t> qo_indptr{0}, kv_len;
    for (const CudaRequest& r : w.requests) {
      qo_indptr.push_back(qo_indptr.back() + r.qo_len);
      kv_len.push_back(r.kv_len);
      p.max_kv_len = std::max(p.max_kv_len, r.kv_len);
      pages += pages_of(r);
    }
    // A decode-only step of an engine whose steps may be mixed.
    p.max_qo_rows = std::max(qo_indptr.back(), p.max_batch + 512);
    attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
    e.backend = ATTNFOLD_CUDA;
    const int64_t stride = (p.max_kv_len + w.page_size - 1) / w.page_size;
    std::vector<int32_t> order(static_cast<size_t>(num_pages));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), std::mt19937_64(1));
    const size_t elements =
        static_cast<size_t>(qo_indptr.back()) * static_cast<size_t>(kQoHeads * w.head_dim);
    check(cudaMalloc(&q_, elements * 2), "cudaMalloc");
    check(cudaMalloc(&o_, elements * 2), "cudaMalloc");
    check(cudaMalloc(&lse_, static_cast<size_t>(qo_indptr.back()) * kQoHeads * 4), "cudaMalloc");
    fill_random<<<256, 256, 0, stream>>>(q_, elements);
    tensors_.q = q_;
    tensors_.o = o_;
    tensors_.lse = lse_;
    tensors_.k = k;
    tensors_.v = v;
    lengths_ = {upload(qo_indptr), upload(kv_len)};
    size_t at = 0;
    const int sets = static_cast<int>(std::min<int64_t>(8, num_pages / pages));
    for (int i = 0; i < sets; ++i) {
      std::vector<int32_t> table(w.requests.size() * static_cast<size_t>(stride), -1);
      for (size_t r = 0; r < w.requests.size(); ++r)
        for (int j = 0; j < pages_of(w.requests[r]); ++j)
          table[r * static_cast<size_t>(stride) + static_cast<size_t>(j)] = order[at++];
      tables_.push_back(upload(table));
      attnfold_plan* plan = nullptr;
      library_.check(library_.plan_create(&p, &e, &plan), "attnfold_plan_create");
      plans_.push_back(plan);
      attnfold_lengths lengths = ATTNFOLD_LENGTHS_INIT;
      lengths.batch = p.max_batch;
      lengths.qo_indptr = lengths_[0];
      lengths.kv_len = lengths_[1];
      lengths.block_table = tables_.back();
      lengths.block_table_stride = stride;
      library_.check(library_.plan_update(plan, &lengths, stream), "attnfold_plan_update");
      workspace_bytes_ = library_.plan_workspace_bytes(plan);
    }
    check(cudaMalloc(&workspace_, workspace_bytes_), "cudaMalloc");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  ~Calls() {
    for (attnfold_plan* plan : plans_) library_.plan_destroy(plan);
    for (int32_t* table : tables_) cudaFree(table);
    for (int32_t* lengths : lengths_) cudaFree(lengths);
    for (void* p :
         {static_cast<void*>(q_), static_cast<void*>(o_), static_cast<void*>(lse_), workspace_})
      cudaFree(p);
  }
  int size() const { return static_cast<int>(plans_.size()); }
  void run(int i) const {
    library_.check(library_.plan_run(plans_[static_cast<size_t>(i % size())], &tensors_, workspace_,
                                     workspace_bytes_, stream_),
                   "attnfold_plan_run");
  }

 private:
  const Library& library_;
  cudaStream_t stream_;
  uint16_t *q_ = nullptr, *o_ = nullptr;
  float* lse_ = nullptr;
  void* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
  attnfold_tensors tensors_ = ATTNFOLD_TENSORS_INIT;
  std::vector<int32_t*> lengths_, tables_;
  std::vector<attnfold_plan*> plans_;
};

/** Medians of a cool device's first milliseconds, and after seconds of the same work. */
struct Speed {
  double burst_us, sustained_us;
};

void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(30)); }

Speed time(Graph& graph, int replays, double sustain_s) {
  std::vector<double> burst, sustained;
  for (int i = 0; i < replays; ++i) {
    pause();
    burst.push_back(graph.replay_us());
  }
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() <
         sustain_s)
    sustained.push_back(graph.replay_us());
  sustained.erase(sustained.begin(), sustained.begin() + static_cast<long>(sustained.size() / 2));
  return {median(burst), sustained.empty() ? 0.0 : median(sustained)};
}

}  // namespace

std::vector<PrefillTime> time_prefills(const std::vector<std::string>& names,
                                       const std::vector<Library>& libraries, void* k, void* v,
                                       size_t pool_bytes, cudaStream_t stream, int replays) {
  const auto wanted = [&](const char* name) {
    return names.empty() || std::find(names.begin(), names.end(), name) != names.end();
  };
  std::vector<PrefillTime> times;
  const double sustain_s = replays > 4 ? 0.8 : 0.0;
  for (const CudaPrefill& w : cuda_prefills()) {
    if (!wanted(w.name)) continue;
    const double flop = operations(w);
    const int64_t num_pages =
        static_cast<int64_t>(pool_bytes) / (2 * w.page_size * kKvHeads * w.head_dim);
    std::vector<std::unique_ptr<Calls>> calls;
    std::vector<std::unique_ptr<Graph>> graphs;
    for (const Library& library : libraries) {
      calls.push_back(std::make_unique<Calls>(w, library, k, v, num_pages, stream));
      const Calls& own = *calls.back();
      const int count = std::max(own.size(), static_cast<int>(1.5e12 / flop));
      graphs.push_back(
          std::make_unique<Graph>(stream, std::min(count, 64), [&](int i) { own.run(i); }));
    }
    PrefillTime row{w.name, flop, 0.0, 0.0, {}};
    if (libraries.size() > 1) {  // in turns
      std::vector<std::vector<double>> us(libraries.size());
      for (int i = 0; i < replays; ++i) {
        for (size_t l = 0; l < libraries.size(); ++l) {
          pause();
          us[l].push_back(graphs[l]->replay_us());
        }
      }
      row.burst_us = median(us[0]);
      for (size_t l = 1; l < libraries.size(); ++l) row.others_us.push_back(median(us[l]));
    } else {
      const Speed speed = time(*graphs[0], replays, sustain_s);
      row.burst_us = speed.burst_us;
      row.sustained_us = speed.sustained_us;
    }
    times.push_back(row);
  }
  if (times.empty()) return times;
  check(cudaFuncSetAttribute(matrix_peak, cudaFuncAttributeMaxDynamicSharedMemorySize, 49152),
        "cudaFuncSetAttribute");
  Graph peak(stream, 2,
             [&](int) { matrix_peak<<<132, 512, 49152, stream>>>(static_cast<uint32_t*>(k)); });
  const Speed speed = time(peak, replays, sustain_s);
  times.push_back({"matrix units",
                   132.0 * 4 * kPeakSteps * 2 * 64 * 128 * 16,
                   speed.burst_us,
                   speed.sustained_us,
                   {}});
  return times;
}

}  // namespace attnfold::tools
