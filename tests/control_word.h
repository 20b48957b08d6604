// How a thread rounds and flushes: MXCSR of x86-64, FPCR of AArch64.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace attnfold::test {

#if defined(__x86_64__)

inline uint64_t control_word() { return _mm_getcsr() & 0xffc0u; }  // without the sticky flags
inline void set_control_word(uint64_t word) { _mm_setcsr(static_cast<unsigned>(word)); }

constexpr uint64_t kDefaultControl = 0x1f80;
constexpr uint64_t kDenormalsAreZero = 0x0040, kFlushToZero = 0x8000;
constexpr uint64_t kDown = 0x2000, kUp = 0x4000, kTowardZero = 0x6000;
constexpr uint64_t kNoInvalidTraps = 0x0080;

constexpr uint64_t kOddControls[] = {
    kDefaultControl | kFlushToZero | kDenormalsAreZero,
    kDefaultControl | kFlushToZero,
    kDefaultControl | kUp,
    kDefaultControl | kDown,
    kDefaultControl | kTowardZero | kFlushToZero | kDenormalsAreZero,
    kDefaultControl & ~kNoInvalidTraps,
};

#elif defined(__aarch64__)

inline uint64_t control_word() {
  uint64_t word;
  __asm__ volatile("mrs %0, fpcr" : "=r"(word)::"memory");
  return word;
}
inline void set_control_word(uint64_t word) {
  __asm__ volatile("msr fpcr, %0" ::"r"(word) : "memory");
}

constexpr uint64_t kDefaultControl = 0;
constexpr uint64_t kFlushToZero = 1u << 24, kDefaultNan = 1u << 25, kOtherHalves = 1u << 26;
constexpr uint64_t kUp = 1u << 22, kDown = 2u << 22, kTowardZero = 3u << 22;

constexpr uint64_t kOddControls[] = {
    kFlushToZero, kUp, kDown, kTowardZero | kFlushToZero | kDefaultNan, kOtherHalves,
};

#endif

}  // namespace attnfold::test
