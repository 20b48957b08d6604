// The library's threads: one pool for the process, whose threads start when a call first asks for
// them and sleep between calls.
#pragma once

#include <cstdint>
#include <span>

namespace attnfold::cpu {

/** body(context, i) for i = 0..n-1. */
struct Phase {
  int32_t n;
  void (*body)(void* context, int32_t i);
  void* context;
};

constexpr int32_t kMostThreads = 1024;  // that a call may ask for

/** CPUs that this process may use, at least 1. */
int32_t usable_cpus();

/**
 * Calls call(phase, i) once for i = 0..n-1 of each phase, a phase after all of the one before it,
 * on the calling thread and up to num_threads - 1 threads of the pool.
 *
 * The calling thread takes bodies as the others do, so a thread that comes late, that another call
 * has, or that the system refuses means less help and no failure.  A call that found too few gets
 * those that other calls give back while it runs.  The pool grows to the largest num_threads seen,
 * or to a thread per usable CPU where calls at once want more.  `call` must not throw; it may come
 * here again.
 */
void run_on_pool(int32_t num_threads, std::span<const Phase> phases,
                 void (*call)(const Phase& phase, int32_t i));

}  // namespace attnfold::cpu
