// The hash by which two schedules are told apart.
#pragma once

#include <cstdint>

namespace attnfold {

/** FNV-1a over the bytes of `value`, lowest first. */
inline uint64_t hash_step(uint64_t h, int64_t value) {
  for (int i = 0; i < 8; ++i)
    h = (h ^ ((static_cast<uint64_t>(value) >> (8 * i)) & 0xff)) * 0x100000001b3u;
  return h;
}

}  // namespace attnfold
