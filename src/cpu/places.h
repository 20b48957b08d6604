// Where the threads of a call are woken.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <cstdint>

namespace attnfold::cpu {

/**
 * A CPU for each thread of a call.  Some schedulers put a thread that is woken on the CPU of its
 * waker or close to it, so that other CPUs stay idle, and there it waits in the queue while the
 * waker does the work of both.  So threads are woken where they were last, or where no other thread
 * of the call is.  Once awake they may be moved as the scheduler likes.
 */
class Places {
 public:
  /** For `num_threads` threads, the calling one included; none are known if it may not use as many
   * CPUs. */
  void begin(int32_t num_threads) {
    mine_ = sched_getcpu();
    known_ = mine_ >= 0 && sched_getaffinity(0, sizeof(allowed_), &allowed_) == 0 &&
             CPU_COUNT(&allowed_) >= num_threads;
    free_ = allowed_;
    if (known_) CPU_CLR(mine_, &free_);
  }

  bool known() const { return known_; }
  /** All CPUs that the calling thread may use. */
  const cpu_set_t& allowed() const { return allowed_; }

  /** Whether the CPU was free until now. */
  bool take(int cpu) {
    if (!known_ || cpu < 0 || !CPU_ISSET(cpu, &free_)) return false;
    CPU_CLR(cpu, &free_);
    return true;
  }

  /** A CPU that was free until now, or -1.  Of neighbours, which may be two threads of one core,
   * the second one later. */
  int take_any() {
    static const int num = static_cast<int>(sysconf(_SC_NPROCESSORS_CONF));
    for (int neighbour = 0; neighbour < 2; ++neighbour) {
      for (int i = 1; i <= (num + 1) / 2; ++i) {
        const int cpu = (mine_ + neighbour + 2 * i) % num;
        if (take(cpu)) return cpu;
      }
    }
    return -1;
  }

 private:
  cpu_set_t allowed_, free_;
  int mine_ = -1;
  bool known_ = false;
};

}  // namespace attnfold::cpu
