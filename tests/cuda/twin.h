// Memory that a call on the CPU and one on the device get the same copy of, to compare after.
#pragma once

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "check/device_buffer.h"
#include "core/dtype.h"

namespace attnfold::check::device_test {

/** Host memory of T and its device copy, between canaries.  Both views stay where they are. */
template <class T>
class Twin {
 public:
  Twin() = default;
  explicit Twin(std::vector<T> values)
      : host_(std::move(values)), device_(host_.data(), host_.size() * sizeof(T)) {}

  T* host() { return host_.data(); }
  T* device() const { return reinterpret_cast<T*>(device_.data()); }
  std::vector<T>& values() { return host_; }

  /** What `p`, somewhere in the host's memory, is on the device. */
  template <class P>
  P* moved(P* p) const {
    if (!p) return nullptr;
    return reinterpret_cast<P*>(device_.data() + (reinterpret_cast<const char*>(p) -
                                                  reinterpret_cast<const char*>(host_.data())));
  }
  /** The host's bytes to the device once more. */
  void send() {
    require_cuda(cudaMemcpy(device_.data(), host_.data(), device_.size(), cudaMemcpyHostToDevice),
                 "cudaMemcpy");
  }
  /** "" or where the two differ; elements of `type`, of which two NaN are the same if they may be.
   */
  std::string differs(DType type, bool any_nan) const {
    std::vector<T> got(host_.size());
    device_.read(got.data());
    if (!device_.canaries_whole()) return "a canary is broken";
    const char *a = reinterpret_cast<const char*>(host_.data()),
               *b = reinterpret_cast<const char*>(got.data());
    const size_t bytes = static_cast<size_t>(dtype_bytes(type));
    for (size_t at = 0; at + bytes <= host_.size() * sizeof(T); at += bytes) {
      if (std::memcmp(a + at, b + at, bytes) == 0) continue;
      const float x = load_f32(a + at, type, 0), y = load_f32(b + at, type, 0);
      if (any_nan && std::isnan(x) && std::isnan(y)) continue;
      return "element " + std::to_string(at / bytes) + ": the CPU has " + std::to_string(x) +
             ", the device " + std::to_string(y);
    }
    return "";
  }

 private:
  std::vector<T> host_;
  DeviceBuffer device_;
};

}  // namespace attnfold::check::device_test
