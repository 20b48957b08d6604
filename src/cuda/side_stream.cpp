#include "cuda/side_stream.h"

#include "cuda/device.h"

namespace attnfold::cuda {
namespace {

/** 0 if the stream is not being captured, else which capture it belongs to. */
Status capture_of(cudaStream_t stream, unsigned long long* id) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 13000
  ATTNFOLD_RETURN_IF_CUDA_ERROR(
      cudaStreamGetCaptureInfo(stream, &status, id, nullptr, nullptr, nullptr, nullptr));
#else
  ATTNFOLD_RETURN_IF_CUDA_ERROR(cudaStreamGetCaptureInfo(stream, &status, id));
#endif
  if (status == cudaStreamCaptureStatusNone) *id = 0;
  return {};
}

}  // namespace

SideStream::~SideStream() {
  if (!stream_) return;
  const CurrentDevice current(device_);
  cudaStreamDestroy(stream_);
  if (begin_) cudaEventDestroy(begin_);
  if (end_) cudaEventDestroy(end_);
}

Status SideStream::create(int device) {
  device_ = device;
  int least = 0, greatest = 0;
  ATTNFOLD_RETURN_IF_CUDA_ERROR(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  // Its blocks are long: they should not wait for the others' to leave.
  ATTNFOLD_RETURN_IF_CUDA_ERROR(
      cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
  ATTNFOLD_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&begin_, cudaEventDisableTiming));
  ATTNFOLD_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&end_, cudaEventDisableTiming));
  return {};
}

SideStream::Fork::Fork(SideStream* side, cudaStream_t main)
    : side_(side), main_(main), lock_(side->mutex_) {
  status_ = begin();
}

Status SideStream::Fork::begin() {
  unsigned long long main_capture = 0, side_capture = 0;
  ATTNFOLD_RETURN_IF_ERROR(capture_of(main_, &main_capture));
  ATTNFOLD_RETURN_IF_ERROR(capture_of(side_->stream_, &side_capture));
  if (side_capture != 0 && side_capture != main_capture) return {};
  ATTNFOLD_RETURN_IF_CUDA_ERROR(cudaEventRecord(side_->begin_, main_));
  ATTNFOLD_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(side_->stream_, side_->begin_, 0));
  forked_ = true;
  return {};
}

Status SideStream::Fork::join() const {
  if (!forked_) return {};
  ATTNFOLD_RETURN_IF_CUDA_ERROR(cudaEventRecord(side_->end_, side_->stream_));
  ATTNFOLD_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(main_, side_->end_, 0));
  return {};
}

}  // namespace attnfold::cuda
