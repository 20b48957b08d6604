// Waiting for another thread: first awake, then asleep.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace attnfold::cpu {

using Word = std::atomic<uint32_t>;

#if defined(__linux__)

static_assert(sizeof(Word) == sizeof(uint32_t));

/** Returns at once if the word is not `value`, else when it is woken, or for no reason. */
inline void sleep_while(Word& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

/** Wakes all who sleep on the word. */
inline void wake(Word& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

#else

inline void sleep_while(Word& word, uint32_t value) { word.wait(value); }
inline void wake(Word& word) { word.notify_all(); }

#endif

/** Whether `done()` came true within that time. */
template <class Done>
bool spin_until(Done done, std::chrono::microseconds time) {
  if (done()) return true;
  const auto end = std::chrono::steady_clock::now() + time;
  do {
    for (int i = 0; i < 16; ++i) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      __asm__ volatile("isb");
#endif
      if (done()) return true;
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace attnfold::cpu
