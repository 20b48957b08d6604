// What the large-row kernel is given.
#pragma once

#include <cuda.h>

#include "cuda/attend.h"

namespace attnfold::cuda {

/** Keys or values as the tensor copy engine finds them: boxes of 16 keys, or of 8 where they are
 * ragged, and how their coordinates count. */
struct KeyPlaces {
  CUtensorMap map;
  int32_t page, token, head;  // steps of the last coordinate
  int32_t first;              // of page 0, token 0, head 0
};

struct LargeArgs {
  KeyPlaces k, v;
  AttendArgs attend;
  float* totals;         // [blocks, tile_total_floats]: rows' folded super-chunks
  bool sees_prefixes;    // every row sees the keys from 0 to some end
  float exponent_scale;  // of scores, in the log2 domain; 1 where ALiBi has already scaled them
};

constexpr int32_t kBoxKeys = 16;

/** Floats of one block's tile: o, m and l of each thread's part of each row. */
ATTNFOLD_HD constexpr int32_t tile_total_floats(int32_t dim) { return kTileRows * (dim + 8); }

}  // namespace attnfold::cuda
