// Memory on a CUDA device for tests: poisoned, and between canaries.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace attnfold::check {

inline void require_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

/** Bytes on the device between two canaries. */
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t bytes) : bytes_(bytes) {
    require_cuda(cudaMalloc(&base_, bytes + 2 * kCanaryBytes), "cudaMalloc");
    require_cuda(cudaMemset(base_, kCanary, bytes + 2 * kCanaryBytes), "cudaMemset");
    require_cuda(cudaMemset(data(), kPoison, bytes), "cudaMemset");
  }
  DeviceBuffer(const void* from, size_t bytes) : DeviceBuffer(bytes) {
    if (bytes > 0)
      require_cuda(cudaMemcpy(data(), from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceBuffer() { cudaFree(base_); }

  char* data() const { return base_ ? static_cast<char*>(base_) + kCanaryBytes : nullptr; }
  size_t size() const { return bytes_; }

  void read(void* to) const {
    if (bytes_ > 0)
      require_cuda(cudaMemcpy(to, data(), bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }
  bool canaries_whole() const {
    unsigned char edges[2][kCanaryBytes];
    require_cuda(cudaMemcpy(edges[0], base_, kCanaryBytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    require_cuda(cudaMemcpy(edges[1], data() + bytes_, kCanaryBytes, cudaMemcpyDeviceToHost),
                 "cudaMemcpy");
    for (const auto& edge : edges)
      for (const unsigned char byte : edge)
        if (byte != kCanary) return false;
    return true;
  }

 private:
  static constexpr size_t kCanaryBytes = 256;  // keeps what lies between them aligned
  static constexpr int kCanary = 0xc5, kPoison = 0xff;

  void* base_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace attnfold::check
