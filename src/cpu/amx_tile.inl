// The weighted sum of values on AMX tiles for many rows of one head.  Included inside the AMX
// namespace, after tile.inl.

/** tile_values. */
template <class S>
void matrix_tile_values(const UnitWork<S>& w, const TileWork<S>& tile, const TileKeys& keys,
                        int64_t head_offset, int block) {
  constexpr int kPartBytes = 4 * kTileVecs * 1024;
  alignas(64) char p[3 * kPartBytes];
  alignas(64) float sum[3][16 * 16];
  const char* v = reinterpret_cast<const char*>(tile.v);
  pack_tile_weights(tile.s, keys.begin, keys.end, p);
  const int first = keys.begin / 32, last = (keys.end + 31) / 32;
  const int64_t o_stride = w.leaf.o_stride;
  for (int64_t d = 0; d < o_stride; d += 16) {
    for (int vec = 0; vec < kTileVecs; ++vec) {
      tile_zero<0>();
      tile_zero<1>();
      tile_zero<2>();
      for (int n = first; n < last; ++n) {
        const char* weights = p + (n * kTileVecs + vec) * 1024;
        tile_load<3>(v + (d / 16 * 4 + n) * 1024, 64);
        tile_load<4>(weights, 64);
        tile_multiply<0, 3, 4>();
        tile_load<5>(weights + kPartBytes, 64);
        tile_multiply<1, 3, 5>();
        tile_load<6>(weights + 2 * kPartBytes, 64);
        tile_multiply<2, 3, 6>();
      }
      tile_store<0>(sum[0], 64);
      tile_store<1>(sum[1], 64);
      tile_store<2>(sum[2], 64);
      float* o = tile.leaf.o + d * kTileRows + vec * 16;
      for (int i = 0; i < 16; ++i) {
        store(o + i * kTileRows,
              add(load(sum[0] + i * 16), add(load(sum[1] + i * 16), load(sum[2] + i * 16))));
      }
    }
  }
  if (!tile.special) return;
  for (int r = 0; r < kTileRows && block * kTileRows + r < w.rows; ++r) {
    const LeafKeys& seen = w.seen[(block * kTileRows + r) / w.p.group_size];
    add_special(
        *w.v, head_offset, keys.begin, keys.end, w.p.head_dim_vo,
        [&](int n) { return n < seen.sink || (n >= seen.begin && n < seen.end); },
        [&](int n) { return tile.s[n * kTileRows + r]; }, tile.leaf.o + r, kTileRows);
  }
}
