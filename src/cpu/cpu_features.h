// What this CPU can run.
#pragma once

#include <string>

namespace attnfold::cpu {

struct Features {
  bool avx2 = false;    // with FMA and F16C, and the system saves ymm
  bool avx512 = false;  // F, BW, DQ, VL, and the system saves zmm
  bool avx512_bf16 = false;
  bool amx_bf16 = false;
  bool slow_bf16_dot =
      false;  // Intel: vdpbf16ps issues every second cycle and holds both FMA ports
  bool prefetch_into_l1 = false;  // AMD from Zen 5 on
};

const Features& features();

/** "" if this CPU runs rows of `isa`; else why not. */
std::string why_not(const char* isa);

}  // namespace attnfold::cpu
