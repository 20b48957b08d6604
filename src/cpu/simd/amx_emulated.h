// EMULATION of AMX tiles with AVX-512, bit for bit and slow: the AMX kernels under the tests of a
// machine without AMX.  No library has it: tests/CMakeLists.txt compiles it into one test program,
// in place of amx.h.
//
// As the instruction: the even and the odd elements of a step of 32 are summed in a chain of fma
// each from zero, the two sums added, and that added to C; round to nearest, subnormal inputs
// and results are zero whatever MXCSR says.

struct EmulatedTiles {
  alignas(64) unsigned char row[8][16][64];
  int rows[8], row_bytes[8];
  bool configured;
};
static thread_local EmulatedTiles emulated_tiles;

/** Without a configuration the instructions are faults. */
ATTNFOLD_LANE_FN void check_tile(int tile) {
  if (!emulated_tiles.configured || emulated_tiles.rows[tile] == 0) __builtin_trap();
}

template <int kTile>
ATTNFOLD_LANE_FN void tile_load(const void* from, int64_t stride) {
  check_tile(kTile);
  EmulatedTiles& t = emulated_tiles;
  memset(t.row[kTile], 0, sizeof(t.row[kTile]));
  for (int r = 0; r < t.rows[kTile]; ++r) {
    memcpy(t.row[kTile][r], static_cast<const char*>(from) + r * stride,
           static_cast<size_t>(t.row_bytes[kTile]));
  }
}
template <int kTile>
ATTNFOLD_LANE_FN void tile_load_once(const void* from, int64_t stride) {
  tile_load<kTile>(from, stride);
}
template <int kTile>
ATTNFOLD_LANE_FN void tile_store(void* to, int64_t stride) {
  check_tile(kTile);
  const EmulatedTiles& t = emulated_tiles;
  for (int r = 0; r < t.rows[kTile]; ++r) {
    memcpy(static_cast<char*>(to) + r * stride, t.row[kTile][r],
           static_cast<size_t>(t.row_bytes[kTile]));
  }
}
template <int kTile>
ATTNFOLD_LANE_FN void tile_zero() {
  check_tile(kTile);
  memset(emulated_tiles.row[kTile], 0, sizeof(emulated_tiles.row[kTile]));
}

/** Of its own, so that no operation leaves the stretch in which MXCSR is changed. */
static __attribute__((noinline)) void emulated_multiply(int c, int a, int b) {
  EmulatedTiles& t = emulated_tiles;
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int m = 0; m < t.rows[c]; ++m) {
    __m512 even = _mm512_setzero_ps(), odd = even;
    for (int k = 0; k < t.row_bytes[a] / 4; ++k) {
      int pair;
      memcpy(&pair, t.row[a][m] + 4 * k, sizeof(pair));
      const __m512i x = _mm512_set1_epi32(pair), y = _mm512_load_si512(t.row[b][k]);
      even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                             _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), even);
      odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, upper)),
                            _mm512_castsi512_ps(_mm512_and_si512(y, upper)), odd);
    }
    float* sum = reinterpret_cast<float*>(t.row[c][m]);
    const __mmask16 columns = static_cast<__mmask16>((1u << (t.row_bytes[c] / 4)) - 1);
    _mm512_mask_store_ps(sum, columns,
                         _mm512_add_ps(_mm512_load_ps(sum), _mm512_add_ps(even, odd)));
  }
}

/** C += A B */
template <int kC, int kA, int kB>
ATTNFOLD_LANE_FN void tile_multiply() {
  check_tile(kC);
  check_tile(kA);
  check_tile(kB);
  const unsigned int mode = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // flush to zero, subnormals are zero, to nearest, no exceptions
  emulated_multiply(kC, kA, kB);
  _mm_setcsr(mode);
}

/** Shapes of the tiles, in the layout of ldtilecfg; all tiles become zero. */
ATTNFOLD_LANE_FN void tile_configure(const unsigned char* config) {
  EmulatedTiles& t = emulated_tiles;
  memset(&t, 0, sizeof(t));
  for (int i = 0; i < 8; ++i) {
    t.row_bytes[i] = config[16 + 2 * i] + 256 * config[17 + 2 * i];
    t.rows[i] = config[48 + i];
  }
  t.configured = config[0] == 1;
}
ATTNFOLD_LANE_FN void tile_release() { emulated_tiles.configured = false; }
