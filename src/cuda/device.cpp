#include "cuda/device.h"

namespace attnfold::cuda {
namespace {

constexpr int kOldestMajor = 8;  // cp.async, mma of bf16

}  // namespace

Status device_error(const char* call, cudaError_t error) {
  cudaGetLastError();  // it is reported here; the caller's next check must not find it
  return {ATTNFOLD_DEVICE_ERROR, std::string(call) + ": " + cudaGetErrorString(error)};
}

std::string why_not(int device) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return std::string("no CUDA device: ") + cudaGetErrorString(error);
  }
  if (device < 0 || device >= count) {
    return "no CUDA device " + std::to_string(device) + ": there are " + std::to_string(count);
  }
  int major = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
    cudaGetLastError();
    return "CUDA device " + std::to_string(device) + " does not say what it is";
  }
  if (major < kOldestMajor)
    return "needs compute capability 8.0, the device has " + std::to_string(major);
  return "";
}

Status choose_device(const attnfold_execution& execution, int* device) {
  *device = execution.device;
  if (*device < 0 && cudaGetDevice(device) != cudaSuccess) {
    cudaGetLastError();
    *device = 0;
  }
  const std::string why = why_not(*device);
  if (why.empty()) return {};
  return {ATTNFOLD_UNSUPPORTED,
          "backend: expected one that this machine runs, got ATTNFOLD_CUDA; " + why};
}

Status launch_overlapped(const void* kernel, unsigned blocks, unsigned threads, size_t shared_bytes,
                         void* stream, const void* args) {
  cudaFuncAttributes
      attributes;  // loads it, which must not happen within a launch that is captured
  ATTNFOLD_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, kernel));
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &overlap;
  config.numAttrs = waits_by_itself(attributes) ? 1 : 0;
  void* parameters[] = {const_cast<void*>(args)};
  ATTNFOLD_RETURN_IF_CUDA_ERROR(cudaLaunchKernelExC(&config, kernel, parameters));
  return {};
}

CurrentDevice::CurrentDevice(int device) {
  if (cudaGetDevice(&before_) != cudaSuccess) {
    cudaGetLastError();
    before_ = -1;
  }
  if (before_ == device) {
    before_ = -1;
  } else if (cudaSetDevice(device) != cudaSuccess) {
    cudaGetLastError();  // the call that follows says it again
  }
}

CurrentDevice::~CurrentDevice() {
  if (before_ >= 0) cudaSetDevice(before_);
}

Status DeviceMemory::allocate(size_t bytes, int device) {
  release();
  void* p = nullptr;
  const cudaError_t error = cudaMalloc(&p, bytes > 0 ? bytes : 1);
  if (error != cudaSuccess) return device_error("cudaMalloc", error);
  data_ = static_cast<char*>(p);
  device_ = device;
  return {};
}

void DeviceMemory::release() {
  if (!data_) return;
  const CurrentDevice device(device_);
  cudaFree(data_);
  data_ = nullptr;
}

}  // namespace attnfold::cuda
