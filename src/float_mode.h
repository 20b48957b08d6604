// The floating-point mode that every number of the library is computed in, whatever the caller's
// thread has set.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace attnfold {

/** Sets round-to-nearest and no flushing, and puts back what the thread had. */
class FloatingPointMode {
 public:
#if defined(__x86_64__)
  FloatingPointMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatingPointMode() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)  // FPCR 0 also means: NaN keeps its payload, halves are those of IEEE
  FloatingPointMode() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_)::"memory");
    set(0);
  }
  ~FloatingPointMode() { set(saved_); }
#else
  FloatingPointMode() {}
  ~FloatingPointMode() {}
#endif
  FloatingPointMode(const FloatingPointMode&) = delete;
  FloatingPointMode& operator=(const FloatingPointMode&) = delete;

 private:
#if defined(__x86_64__)
  unsigned saved_;
#elif defined(__aarch64__)
  static void set(uint64_t fpcr) { __asm__ volatile("msr fpcr, %0" ::"r"(fpcr) : "memory"); }

  uint64_t saved_;
#endif
};

}  // namespace attnfold
