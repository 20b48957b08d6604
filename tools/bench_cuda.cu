// attnfold bench --backend cuda: times decode as an engine replays it, a captured graph of many
// calls, each on other pages, so that L2 is cold; medians, alternating with a plain read of as many
// bytes.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "attnfold/attnfold.h"
#include "bench_cuda.h"
#include "bench_cuda_shapes.h"
#include "bench_graph.cuh"
#include "bench_library.h"

namespace attnfold::tools {
namespace {

/** Reads everything once, writes (practically) nothing. */
template <int kUnroll>
__global__ void plain_read(const uint4* from, size_t n, uint32_t* out) {
  const size_t tile = size_t{blockDim.x} * kUnroll;
  uint32_t sum = 0;
  for (size_t base = blockIdx.x * tile; base + tile <= n; base += gridDim.x * tile) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint4* p = from + base + size_t{static_cast<unsigned>(u)} * blockDim.x + threadIdx.x;
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v[u].x), "=r"(v[u].y), "=r"(v[u].z), "=r"(v[u].w)
                   : "l"(p));
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  if (sum == 0x9e3779b9u) *out = sum;
}

constexpr size_t kPoolBytes = size_t{5} << 30;  // of K, and of V

struct Pools {
  char *k, *v;
};

/** What another library took, and whether it answered with the same bytes. */
struct Other {
  std::string name;
  double us;
  bool same_bytes;
};

struct Result {
  double kv_mb, read_us, attend_us;
  std::vector<Other> others;
};

/** Plans of one set of pages, a library's each: a call's pages are set by its update, which is not
 * timed. */
struct PageSet {
  std::vector<attnfold_plan*> plans;
  int32_t *table, *kv_len, *qo_indptr;
};

Result time_shape(const CudaDecode& s, const std::vector<Library>& libraries, const Pools& pools,
                  cudaStream_t stream, int replays) {
  const int batch = static_cast<int>(s.kv_len.size());
  const int64_t page_elements = int64_t{s.page_size} * s.kv_heads * s.head_dim;
  const int64_t num_pages = static_cast<int64_t>(kPoolBytes / 2) / page_elements;
  int64_t pages = 0, keys = 0;
  int longest = 0;
  for (const int n : s.kv_len) {
    pages += (n + s.page_size - 1) / s.page_size;
    keys += n;
    longest = std::max(longest, n);
  }
  const double bytes = static_cast<double>(keys) * s.kv_heads * s.head_dim * 4;
  const int sets = static_cast<int>(std::max<int64_t>(
      1, std::min({int64_t{64}, num_pages / pages,
                   std::max<int64_t>(2, static_cast<int64_t>(600e6 / bytes) + 1)})));

  attnfold_problem p = ATTNFOLD_PROBLEM_INIT;
  p.qo_heads = s.qo_heads;
  p.kv_heads = s.kv_heads;
  p.head_dim_qk = p.head_dim_vo = s.head_dim;
  p.page_size = s.page_size;
  p.num_pages = num_pages;
  p.kv_layout = s.head_major ? ATTNFOLD_HND : ATTNFOLD_NHD;
  p.max_batch = p.max_qo_rows = batch;
  p.max_kv_len = longest;
  attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
  e.backend = ATTNFOLD_CUDA;

  std::vector<int32_t> order(static_cast<size_t>(num_pages));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(1));
  const int64_t stride = (longest + s.page_size - 1) / s.page_size;
  std::vector<int32_t> qo_indptr, kv_len(s.kv_len.begin(), s.kv_len.end());
  for (int r = 0; r <= batch; ++r) qo_indptr.push_back(r);
  std::vector<PageSet> page_sets;
  size_t at = 0, workspace_bytes = 0;
  for (int i = 0; i < sets; ++i) {
    std::vector<int32_t> table(static_cast<size_t>(batch * stride), -1);
    for (int r = 0; r < batch; ++r)
      for (int j = 0; j < (s.kv_len[static_cast<size_t>(r)] + s.page_size - 1) / s.page_size; ++j)
        table[static_cast<size_t>(r * stride + j)] = order[at++];
    PageSet set{{}, upload(table), upload(kv_len), upload(qo_indptr)};
    attnfold_lengths lengths = ATTNFOLD_LENGTHS_INIT;
    lengths.batch = batch;
    lengths.qo_indptr = set.qo_indptr;
    lengths.kv_len = set.kv_len;
    lengths.block_table = set.table;
    lengths.block_table_stride = stride;
    for (const Library& l : libraries) {
      attnfold_plan* plan = nullptr;
      l.check(l.plan_create(&p, &e, &plan), "attnfold_plan_create");
      l.check(l.plan_update(plan, &lengths, stream), "attnfold_plan_update");
      workspace_bytes = std::max(workspace_bytes, l.plan_workspace_bytes(plan));
      set.plans.push_back(plan);
    }
    page_sets.push_back(set);
  }
  const size_t row_elements = static_cast<size_t>(s.qo_heads) * s.head_dim;
  uint16_t *q = nullptr, *o = nullptr;
  float* lse = nullptr;
  void* workspace = nullptr;
  check(cudaMalloc(&q, batch * row_elements * 2), "cudaMalloc");
  check(cudaMalloc(&o, batch * row_elements * 2), "cudaMalloc");
  check(cudaMalloc(&lse, static_cast<size_t>(batch * s.qo_heads) * 4), "cudaMalloc");
  check(cudaMalloc(&workspace, workspace_bytes), "cudaMalloc");
  fill_random<<<256, 256, 0, stream>>>(q, batch * row_elements);
  attnfold_tensors t = ATTNFOLD_TENSORS_INIT;
  t.q = q;
  t.k = pools.k;
  t.v = pools.v;
  t.o = o;
  t.lse = lse;
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");

  const double guess_us = 3 + bytes / 4.5e6;
  const int rounds =
      std::max(1, std::min(512 / sets, static_cast<int>(3000 / (guess_us * sets)) + 1));
  const auto run = [&](size_t library, int i) {
    const Library& l = libraries[library];
    l.check(l.plan_run(page_sets[static_cast<size_t>(i % sets)].plans[library], &t, workspace,
                       workspace_bytes, stream),
            "attnfold_plan_run");
  };
  std::vector<std::unique_ptr<Graph>> attend;
  std::vector<std::vector<char>> answers;
  for (size_t library = 0; library < libraries.size(); ++library) {
    attend.push_back(
        std::make_unique<Graph>(stream, rounds * sets, [&](int i) { run(library, i); }));
    check(cudaMemsetAsync(o, 0xff, batch * row_elements * 2, stream), "cudaMemsetAsync");
    run(library, 0);
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    answers.emplace_back(batch * row_elements * 2);
    check(cudaMemcpy(answers.back().data(), o, answers.back().size(), cudaMemcpyDeviceToHost),
          "cudaMemcpy");
  }
  const size_t read_bytes = static_cast<size_t>(bytes) / 65536 * 65536;
  const int reads =
      static_cast<int>(std::min<size_t>(64, std::max<size_t>(1, kPoolBytes / read_bytes)));
  std::vector<std::unique_ptr<Graph>> read_graphs;
  for (const int threads : {256, 512}) {
    for (const int unroll : {4, 8}) {
      for (const int blocks : {1, 2, 4, 8}) {
        if (threads * blocks > 2048) continue;
        const int calls = std::max(rounds * sets / 2, 8);
        read_graphs.push_back(std::make_unique<Graph>(stream, calls, [&](int i) {
          const uint4* from =
              reinterpret_cast<const uint4*>(pools.k + static_cast<size_t>(i % reads) * read_bytes);
          const dim3 grid(static_cast<unsigned>(132 * blocks));
          if (unroll == 4)
            plain_read<4><<<grid, threads, 0, stream>>>(from, read_bytes / 16,
                                                        reinterpret_cast<uint32_t*>(lse));
          else
            plain_read<8><<<grid, threads, 0, stream>>>(from, read_bytes / 16,
                                                        reinterpret_cast<uint32_t*>(lse));
        }));
      }
    }
  }
  std::vector<std::vector<double>> attend_us(libraries.size()), read_us(read_graphs.size());
  for (int i = 0; i < replays; ++i) {
    for (int twice = 0; twice < 2; ++twice) {
      for (size_t l = 0; l < libraries.size(); ++l) attend_us[l].push_back(attend[l]->replay_us());
    }
    for (size_t j = 0; j < read_graphs.size(); ++j)
      if (i < 4) read_us[j].push_back(read_graphs[j]->replay_us());
  }
  double read = 1e30;
  for (const auto& us : read_us) read = std::min(read, median(us));
  for (PageSet& set : page_sets) {
    for (size_t l = 0; l < libraries.size(); ++l) libraries[l].plan_destroy(set.plans[l]);
    cudaFree(set.table);
    cudaFree(set.kv_len);
    cudaFree(set.qo_indptr);
  }
  for (void* m : {static_cast<void*>(q), static_cast<void*>(o), static_cast<void*>(lse), workspace})
    cudaFree(m);
  Result result{bytes / 1e6, read, median(attend_us[0]), {}};
  for (size_t l = 1; l < libraries.size(); ++l)
    result.others.push_back({libraries[l].name, median(attend_us[l]), answers[l] == answers[0]});
  return result;
}

/** The table of merges, and its part of the JSON. */
void print_merges(const std::vector<std::string>& shapes, cudaStream_t stream, int replays,
                  FILE* out) {
  std::printf("\n%-14s %8s %9s %9s %8s\n", "merge", "tokens", "plain us", "us", "GB/s");
  if (out) std::fprintf(out, "\n], \"merge\": [");
  bool first = true;
  for (const auto& [name, tokens] : cuda_merges()) {
    if (!shapes.empty() && std::find(shapes.begin(), shapes.end(), name) == shapes.end()) continue;
    const MergeTime m = time_merge(tokens, stream, replays);
    std::printf("%-14s %8d %9.2f %9.2f %8.0f\n", name.c_str(), tokens, m.plain_us, m.us,
                m.gb_per_s);
    std::fflush(stdout);
    if (out)
      std::fprintf(out,
                   "%s\n {\"shape\": \"%s\", \"plain_us\": %.3f, \"us\": %.3f, \"gb_per_s\": %.1f}",
                   first ? "" : ",", name.c_str(), m.plain_us, m.us, m.gb_per_s);
    first = false;
  }
}

/** The table of prefills, and its part of the JSON. */
void print_prefills(const std::vector<std::string>& shapes, const std::vector<Library>& libraries,
                    const Pools& pools, cudaStream_t stream, int replays, FILE* out) {
  const std::vector<PrefillTime> times =
      time_prefills(shapes, libraries, pools.k, pools.v, kPoolBytes, stream, replays);
  std::printf("\n%-14s %9s %9s %9s %12s %12s\n", "prefill", "GFLOP", "us", "TFLOP/s",
              "sustained us", "TFLOP/s");
  if (out) std::fprintf(out, "\n], \"prefill\": [");
  const char* separator = "";
  for (const PrefillTime& t : times) {
    const double sustained = t.sustained_us > 0 ? t.flop / t.sustained_us / 1e6 : 0.0;
    std::printf("%-14s %9.1f %9.1f %9.0f %12.1f %12.0f\n", t.name.c_str(), t.flop / 1e9, t.burst_us,
                t.flop / t.burst_us / 1e6, t.sustained_us, sustained);
    for (size_t l = 0; l < t.others_us.size(); ++l)
      std::printf("    %-32s %9.1f  %+.1f%%\n", libraries[l + 1].name.c_str(), t.others_us[l],
                  100 * (t.others_us[l] / t.burst_us - 1));
    if (out)
      std::fprintf(out,
                   "%s\n {\"shape\": \"%s\", \"flop\": %.0f, \"us\": %.3f, "
                   "\"sustained_us\": %.3f}",
                   separator, t.name.c_str(), t.flop, t.burst_us, t.sustained_us);
    separator = ",";
  }
  std::fflush(stdout);
}

}  // namespace

void bench_cuda(const std::vector<std::string>& shapes, const std::vector<Library>& libraries,
                int replays, const std::string& json_file) {
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  Pools pools{};
  check(cudaMalloc(&pools.k, kPoolBytes), "cudaMalloc");
  check(cudaMalloc(&pools.v, kPoolBytes), "cudaMalloc");
  fill_random<<<1024, 256, 0, stream>>>(reinterpret_cast<uint16_t*>(pools.k), kPoolBytes / 2);
  fill_random<<<1024, 256, 0, stream>>>(reinterpret_cast<uint16_t*>(pools.v), kPoolBytes / 2);
  FILE* out = json_file.empty() ? nullptr : std::fopen(json_file.c_str(), "w");
  if (out)
    std::fprintf(out, "{\"device\": \"%s\", \"sms\": %d, \"decode\": [", device.name,
                 device.multiProcessorCount);
  std::printf("%s, %d SMs; bf16, pages permuted, L2 cold, graph replay, medians\n", device.name,
              device.multiProcessorCount);
  std::printf("%-14s %8s %9s %9s %8s\n", "decode", "KV MB", "read us", "us", "of read");
  bool first = true;
  for (const CudaDecode& s : cuda_decodes()) {
    if (!shapes.empty() && std::find(shapes.begin(), shapes.end(), s.name) == shapes.end())
      continue;
    const Result r = time_shape(s, libraries, pools, stream, replays);
    std::printf("%-14s %8.1f %9.2f %9.2f %7.1f%%\n", s.name, r.kv_mb, r.read_us, r.attend_us,
                100 * r.read_us / r.attend_us);
    for (const Other& other : r.others)
      std::printf("    %-28s %9.2f  %+.1f%%%s\n", other.name.c_str(), other.us,
                  100 * (other.us / r.attend_us - 1), other.same_bytes ? "" : ", other bytes");
    std::fflush(stdout);
    if (out) {
      std::fprintf(out, "%s\n {\"shape\": \"%s\", \"kv_mb\": %.3f, \"read_us\": %.3f, \"us\": %.3f",
                   first ? "" : ",", s.name, r.kv_mb, r.read_us, r.attend_us);
      if (!r.others.empty()) std::fprintf(out, ", \"others\": {");
      for (const Other& other : r.others)
        std::fprintf(out, "%s\"%s\": %.3f", &other == &r.others[0] ? "" : ", ", other.name.c_str(),
                     other.us);
      std::fprintf(out, r.others.empty() ? "}" : "}}");
    }
    first = false;
  }
  print_merges(shapes, stream, replays, out);
  print_prefills(shapes, libraries, pools, stream, replays, out);
  if (out) std::fprintf(out, "\n]}\n"), std::fclose(out);
  cudaFree(pools.k);
  cudaFree(pools.v);
  cudaStreamDestroy(stream);
}

}  // namespace attnfold::tools
