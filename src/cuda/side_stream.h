// A stream beside the caller's, for a kernel that runs at the same time as those of the caller's.
#pragma once

#include <cuda_runtime.h>

#include <mutex>

#include "status.h"

namespace attnfold::cuda {

class SideStream {
 public:
  SideStream() = default;
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  /** On the current device, `device`. */
  Status create(int device);

  /**
   * What is launched on `stream()` runs after what is in `main` already; after join(), what follows
   * in `main` runs after it.  Captured, it becomes a branch of the graph.  Calls of several threads
   * take turns.  Where the side stream is being captured by somebody else there is no fork, and
   * `stream()` is `main`.
   */
  class Fork {
   public:
    Fork(SideStream* side, cudaStream_t main);
    Fork(const Fork&) = delete;
    Fork& operator=(const Fork&) = delete;
    const Status& status() const { return status_; }
    bool forked() const { return forked_; }
    cudaStream_t stream() const { return forked_ ? side_->stream_ : main_; }
    Status join() const;

   private:
    Status begin();
    SideStream* side_;
    cudaStream_t main_;
    std::unique_lock<std::mutex> lock_;
    bool forked_ = false;
    Status status_;
  };

 private:
  int device_ = 0;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  std::mutex mutex_;
};

}  // namespace attnfold::cuda
