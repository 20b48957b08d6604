#include "cpu/cpu_features.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace attnfold::cpu {
namespace {

#if defined(__x86_64__)
uint64_t enabled_registers() {  // XCR0
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

bool bit(uint32_t word, int i) { return (word >> i) & 1u; }

/** Asks for the state of AMX tiles, for all threads of this process: without, the first tile
 * instruction is a fault. */
[[maybe_unused]] bool may_use_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Features detect() {
  Features f;
  uint32_t a, b, c, d;
  if (!__get_cpuid(0, &a, &b, &c, &d)) return f;
  const bool intel = b == 0x756e6547u, amd = b == 0x68747541u;  // "Genu", "Auth"
  if (!__get_cpuid(1, &a, &b, &c, &d)) return f;
  const uint32_t family = (a >> 8 & 15) + (a >> 20 & 255);
  f.prefetch_into_l1 = amd && family >= 26;
  const bool os_saves = bit(c, 27), fma = bit(c, 12), f16c = bit(c, 29);
  if (!os_saves) return f;
  const uint64_t registers = enabled_registers();
  const bool ymm = (registers & 0x6u) == 0x6u, zmm = (registers & 0xe6u) == 0xe6u;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
  f.avx2 = ymm && fma && f16c && bit(b, 5);
  f.avx512 = f.avx2 && zmm && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);
  uint32_t a1 = 0, b1, c1, d1;
  if (a >= 1 && __get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) f.avx512_bf16 = f.avx512 && bit(a1, 5);
#ifdef ATTNFOLD_EMULATE_AMX  // tests: cpu/simd/amx_emulated.h
  f.amx_bf16 = f.avx512_bf16;
#else
  const bool tiles = (registers & 0x60000u) == 0x60000u && bit(d, 22) && bit(d, 24);
  f.amx_bf16 = f.avx512_bf16 && tiles && may_use_tiles();
#endif
  f.slow_bf16_dot = intel;
  return f;
}
#else
Features detect() { return {}; }
#endif

}  // namespace

const Features& features() {
  static const Features f = detect();
  return f;
}

std::string why_not(const char* isa) {
  const Features& f = features();
  if (std::strcmp(isa, "avx2") == 0 && !f.avx2) return "this CPU or system lacks AVX2, FMA or F16C";
  if (std::strcmp(isa, "avx512") == 0 && !f.avx512)
    return "this CPU or system lacks AVX-512 F, BW, DQ or VL";
  const bool dot = std::strcmp(isa, "avx512_bf16") == 0 || std::strcmp(isa, "avx512_bf16_p16") == 0;
  if (dot && !f.avx512_bf16) return "this CPU or system lacks AVX512_BF16";
  const bool tiles = std::strcmp(isa, "amx_bf16") == 0 || std::strcmp(isa, "amx_bf16_p16") == 0;
  if (tiles && !f.amx_bf16) return "this CPU or system lacks AMX with bf16 tiles";
  return "";
}

}  // namespace attnfold::cpu
