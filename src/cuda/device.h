// Devices: which are there, making one current for a while, memory that frees itself, errors in
// words.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "status.h"

namespace attnfold::cuda {

/** "" if device `device` can run the kernels of this build, else why not. */
std::string why_not(int device);

/** The device that an execution names. */
Status choose_device(const attnfold_execution& execution, int* device);

Status device_error(const char* call, cudaError_t error);

/** Makes a device current; sets back the caller's. */
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = -1;
};

/** Bytes on the current device. */
class DeviceMemory {
 public:
  DeviceMemory() = default;
  ~DeviceMemory() { release(); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  Status allocate(size_t bytes, int device);
  void release();
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  int device_ = 0;
};

/** Whether a kernel's code waits for the kernels before it: that for 9.0 does, PTX of compute_80
 * cannot say it, and must not be launched to overlap them. */
inline bool waits_by_itself(const cudaFuncAttributes& attributes) {
  return attributes.ptxVersion >= 90;
}

/** Launches a kernel that, if it waits by itself, may start while the one before it in the
 * stream ends, and waits for it by itself. */
Status launch_overlapped(const void* kernel, unsigned blocks, unsigned threads, size_t shared_bytes,
                         void* stream, const void* args);

}  // namespace attnfold::cuda

/** Returns a DEVICE_ERROR from the enclosing function if a call of the CUDA runtime fails. */
#define ATTNFOLD_RETURN_IF_CUDA_ERROR(call)                                          \
  do {                                                                               \
    const cudaError_t error_ = (call);                                               \
    if (error_ != cudaSuccess) return ::attnfold::cuda::device_error(#call, error_); \
  } while (0)
