// The floating-point mode that every number of the library is computed in, whatever the caller's
// thread has set.
#pragma once

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
#else
  FloatingPointMode() {}
  ~FloatingPointMode() {}
#endif
  FloatingPointMode(const FloatingPointMode&) = delete;
  FloatingPointMode& operator=(const FloatingPointMode&) = delete;

 private:
#if defined(__x86_64__)
  unsigned saved_;
#endif
};

}  // namespace attnfold
