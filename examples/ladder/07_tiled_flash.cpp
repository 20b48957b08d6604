// Step 7: tiles.  A key is read once for many rows.
//
// Since step 5: rows come in tiles of 64 that walk over tiles of 64 keys together, so that keys and
// values cross from memory once per tile of rows instead of once per row.  This is the loop of
// FlashAttention (Dao et al. 2022, arXiv:2205.14135): fast memory holds q, k, v, s of a tile and
// the states of its rows.
#include "ladder.h"

using namespace ladder;

namespace {

constexpr int kRows = 64, kKeys = 64;

/** Absorbs keys [begin, begin + n) into the state of one row; p is scratch for the tile's weights.
 */
void absorb(const Inputs& in, int row, int begin, int n, float& m, float& l, float* o) {
  float s[kKeys], m_new = m;
  for (int j = 0; j < n; ++j) m_new = std::max(m_new, s[j] = score(in, row, begin + j));
  const float alpha = m == m_new ? 1 : std::exp(m - m_new);  // once per tile, not per key
  l *= alpha;
  for (int i = 0; i < in.width; ++i) o[i] *= alpha;
  for (int j = 0; j < n; ++j) {
    const float p = std::exp(s[j] - m_new);
    l += p;
    for (int i = 0; i < in.width; ++i) o[i] += p * in.v[(begin + j) * in.width + i];
  }
  m = m_new;
}

std::vector<float> tiled(const Inputs& in, Traffic& t) {
  std::vector<float> o(static_cast<size_t>(in.rows) * in.width, 0.0f);
  for (int row = 0; row < in.rows; row += kRows) {
    const int rows = std::min(kRows, in.rows - row);
    std::vector<float> m(rows, -std::numeric_limits<float>::infinity()), l(rows, 0.0f);
    t.read += int64_t{rows} * in.width;
    for (int key = 0; key < in.keys; key += kKeys) {
      const int keys = std::min(kKeys, in.keys - key);
      t.read += int64_t{2} * keys * in.width;  // k and v, for all rows of the tile
      for (int r = 0; r < rows; ++r)
        absorb(in, row + r, key, keys, m[r], l[r], &o[(row + r) * in.width]);
    }
    for (int r = 0; r < rows; ++r) {
      for (int i = 0; i < in.width; ++i) o[(row + r) * in.width + i] /= l[r];
    }
    t.written += int64_t{rows} * in.width;
  }
  t.held = kRows * kKeys + 2 * kRows;
  return o;
}

}  // namespace

int main() {
  std::printf("7 tiled: 64 rows share every key\n");
  const Inputs in = draw(500, 1000, 64);  // neither is a multiple of the tile
  Traffic t;
  claim(error(tiled(in, t), exact(in)) < 1e-5, "equals float64 to 1e-5");
  show(t);
  const int64_t by_row = 500 * (64 + 2 * int64_t{1000} * 64);
  std::printf("  step 5 would read %.1f times as much\n", double(by_row) / double(t.read));
  claim(t.read == 500 * 64 + 8 * 2 * int64_t{1000} * 64,
        "k and v are read 8 times, once per tile of rows");
  claim(t.held < 500 * 1000 / 100, "and no matrix of scores exists");
  return failures;
}
