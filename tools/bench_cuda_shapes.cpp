#include "bench_cuda_shapes.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>

namespace attnfold::tools {
namespace {

std::vector<int> lognormal_lengths() {  // 128 requests, mean 4000
  std::mt19937_64 rng(0);
  std::vector<int> n;
  for (int i = 0; i < 128; ++i) {
    double u = 0;
    for (int k = 0; k < 12; ++k) u += static_cast<double>(rng() >> 11) * 0x1p-53;
    n.push_back(
        static_cast<int>(std::clamp(std::exp(std::log(4000.0) - 0.5 + (u - 6.0)), 16.0, 32768.0)));
  }
  return n;
}

std::vector<int> equal(int batch, int kv_len) {
  return std::vector<int>(static_cast<size_t>(batch), kv_len);
}

}  // namespace

std::vector<CudaDecode> cuda_decodes() {
  return {
      {"D1", 32, 8, 128, 16, equal(1, 2560)},
      {"D2", 32, 8, 128, 16, equal(1, 32768)},
      {"D3", 32, 8, 128, 16, equal(1, 131072)},
      {"D4", 32, 8, 128, 16, equal(16, 8192)},
      {"D5", 32, 8, 128, 16, equal(64, 4096)},
      {"D6", 32, 8, 128, 16, lognormal_lengths()},
      {"D7a", 8, 1, 128, 16, equal(1, 32768)},
      {"D7b", 8, 1, 128, 16, equal(32, 8192)},
      {"D8", 32, 32, 128, 16, equal(8, 4096)},
      {"D9", 32, 8, 128, 16, equal(256, 128)},
      {"D10", 32, 8, 128, 16, equal(17, 2560)},
      {"E1", 32, 8, 128, 16, equal(2, 3000)},
      {"E2", 32, 8, 128, 16, equal(4, 4096)},
      {"E3", 32, 8, 128, 16, equal(8, 1777)},
      {"E4", 32, 8, 128, 16, equal(3, 20000)},
      {"E5", 32, 8, 128, 16, equal(32, 1500)},
      {"E6", 32, 8, 128, 16, equal(2, 65536)},
      {"E7", 32, 8, 128, 16, equal(100, 3000)},
      {"E8", 32, 8, 128, 16, equal(48, 10000)},
      {"E9", 8, 1, 128, 16, equal(4, 12000)},
      {"E10", 8, 1, 128, 16, equal(2, 50000)},
      {"E11", 8, 1, 128, 16, equal(17, 6000)},
      {"E12", 64, 8, 128, 16, equal(5, 5000)},
      {"D4-page1", 32, 8, 128, 1, equal(16, 8192)},
      {"D4-page64", 32, 8, 128, 64, equal(16, 8192)},
      {"D4-head-major", 32, 8, 128, 16, equal(16, 8192), true},
      {"D4-group1", 8, 8, 128, 16, equal(16, 8192)},
      {"D4-group2", 16, 8, 128, 16, equal(16, 8192)},
      {"D4-group6", 48, 8, 128, 16, equal(16, 8192)},
      {"D4-group8", 64, 8, 128, 16, equal(16, 8192)},
      {"D4-group16", 128, 8, 128, 16, equal(16, 8192)},
      {"D4-dim64", 32, 8, 64, 16, equal(16, 16384)},
      {"D4-dim256", 32, 8, 256, 16, equal(16, 4096)},
  };
}

std::vector<CudaMerge> cuda_merges() { return {{"M256", 256}, {"M4096", 4096}, {"M16384", 16384}}; }

std::vector<CudaPrefill> cuda_prefills() {
  const std::vector<CudaRequest> decodes(63, CudaRequest{1, 4096});
  std::vector<CudaRequest> mixed = decodes;
  mixed.push_back({512, 8704});
  const std::vector<CudaRequest> one{{8192, 8192}};
  return {{"X1", one},
          {"X2", std::vector<CudaRequest>(8, CudaRequest{2048, 2048})},
          {"X3", {{512, 8704}}},
          {"X4", mixed},
          {"X4-decodes", decodes},
          {"X1-dim64", one, 64},
          {"X1-dim256", one, 256},
          {"X1-page1", one, 128, 1},
          {"X1-softcap", one, 128, 16, 30.0f}};
}

std::vector<std::string> cuda_shape_names() {
  std::vector<std::string> names;
  for (const CudaDecode& s : cuda_decodes()) names.emplace_back(s.name);
  for (const CudaMerge& m : cuda_merges()) names.push_back(m.name);
  for (const CudaPrefill& w : cuda_prefills()) names.emplace_back(w.name);
  return names;
}

}  // namespace attnfold::tools
