// The instructions of AMX tiles.  Included inside the AMX namespace and target region, after
// avx512.h, whose assembler need not be asked for AMX.

template <int kTile>
ATTNFOLD_LANE_FN void tile_load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                   :
                   : "r"(from), "r"(stride), "i"(kTile)
                   : "memory");
}
/** The same of what will not be loaded again soon: it should not push other lines out of L1. */
template <int kTile>
ATTNFOLD_LANE_FN void tile_load_once(const void* from, int64_t stride) {
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2"
                   :
                   : "r"(from), "r"(stride), "i"(kTile)
                   : "memory");
}
template <int kTile>
ATTNFOLD_LANE_FN void tile_store(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                   :
                   : "r"(to), "r"(stride), "i"(kTile)
                   : "memory");
}
template <int kTile>
ATTNFOLD_LANE_FN void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
/** C += A B */
template <int kC, int kA, int kB>
ATTNFOLD_LANE_FN void tile_multiply() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

/** Shapes of the tiles, in the layout of ldtilecfg; all tiles become zero. */
ATTNFOLD_LANE_FN void tile_configure(const unsigned char* config) {
  __asm__ volatile("ldtilecfg (%0)" : : "r"(config) : "memory");
}
ATTNFOLD_LANE_FN void tile_release() { __asm__ volatile("tilerelease"); }
