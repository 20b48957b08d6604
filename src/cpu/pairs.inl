// Queries and keys as pairs of bf16, as they lie in memory.  Included inside an ISA's anonymous
// namespace, after its Lanes.

struct PairQueries {
  using Q = uint16_t;
  static constexpr DType kKeys = DType::bf16;
  static void pack_q(const void* q, DType, int head_dim, Q* out) {
    memcpy(out, q, static_cast<size_t>(head_dim) * sizeof(Q));
    for (int e = head_dim; e < padded(head_dim); ++e) out[e] = 0;
  }

  // In tiles: a pair is one word.
  using TileQ = uint32_t;
  static int tile_depth(int q_stride) { return q_stride / 2; }
  static void pack_keys(const LeafRows& rows, int64_t head_offset, int begin, int end, int head_dim,
                        char* out) {
    const size_t bytes = static_cast<size_t>(head_dim) * sizeof(Q);
    const size_t row_bytes = static_cast<size_t>(padded(head_dim)) * sizeof(Q);
    for (int n = begin; n < end; ++n) {
      memcpy(out + n * row_bytes, rows.row[n] + head_offset, bytes);
      if (bytes < row_bytes) memset(out + n * row_bytes + bytes, 0, row_bytes - bytes);
    }
  }
};
