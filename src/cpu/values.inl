// Weighted sums of values, and the fold of states.  Included inside an ISA's anonymous namespace,
// after its Lanes.
//
// o[r][d] is one chain of fma over the keys, ascending, whatever the blocking.  A key that a row
// may not see is not touched for that row: no 0 * NaN can arise.

/** o[r] += sum over n of p[r][n] * v[n] for one part of each row of v, C chunks of 32; o in lane
 * order.  Meanwhile as large a part of 16 rows ahead is prefetched: with kParts parts in all, in
 * the order in which they lie, so that the hardware's own prefetch sees a stream; 0 stands for
 * other numbers of parts, then the same part of each row. */
template <DType T, int R, int C, int kParts>
ATTNFOLD_LANE_FN void value_part(const float* p, const char* const* values, int64_t head_offset,
                                 int n_begin, int n_end, const char* const* ahead, int part,
                                 float* o, int64_t o_stride) {
  constexpr int kChunkBytes = kChunk * dtype_bytes(T);
  const int64_t offset = head_offset + static_cast<int64_t>(part) * C * kChunkBytes;
  float* o_part = o + part * C * kChunk;
  Lanes acc[R][2 * C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * C; ++i) acc[r][i] = load(o_part + r * o_stride + i * 16);
  }
  // Written out, so that a load instruction goes on by eight keys: by one or two, often 4 KB, the
  // prefetch of Zen 4 is misled.
#pragma GCC unroll 8
  for (int n = n_begin; n < n_end; ++n) {
    const char* v = values[n] + offset;
    const char* next = ahead[n];
    int next_part = part;
    if constexpr (kParts > 0) {  // row by row: piece part * 16 + n of 16 * kParts
      const int piece = part * 16 + (n & 15);
      next = ahead[(n & ~15) + piece / kParts];
      next_part = piece % kParts;
    }
    Lanes weight[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) weight[r] = splat(p[r * kLeaf + n]);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      prefetch_chunk<kChunkBytes>(next, next_part * C + c);
      const Pair x = load32<T>(v + c * kChunkBytes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        acc[r][2 * c] = fma(weight[r], x.a, acc[r][2 * c]);
        acc[r][2 * c + 1] = fma(weight[r], x.b, acc[r][2 * c + 1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * C; ++i) store(o_part + r * o_stride + i * 16, acc[r][i]);
  }
}

/** The same for the chunk at element `begin`, of which head_dim may end before 32. */
template <DType T, int R>
ATTNFOLD_LANE_FN void value_edge(const float* p, const char* const* values, int64_t head_offset,
                                 int n_begin, int n_end, int begin, int head_dim,
                                 const char* const* ahead, float* o, int64_t o_stride) {
  const int64_t offset = begin * int64_t{dtype_bytes(T)};
  const int tail = head_dim - begin;
  Lanes acc[R][2];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    acc[r][0] = load(o + r * o_stride + begin);
    acc[r][1] = load(o + r * o_stride + begin + 16);
  }
  for (int n = n_begin; n < n_end; ++n) {
    const char* v = values[n] + head_offset + offset;
    prefetch_chunk<kChunk * dtype_bytes(T)>(ahead[n] + offset, 0);
    const Pair x = tail < kChunk ? load32_partial<T>(v, tail) : load32<T>(v);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Lanes weight = splat(p[r * kLeaf + n]);
      acc[r][0] = fma(weight, x.a, acc[r][0]);
      acc[r][1] = fma(weight, x.b, acc[r][1]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    store(o + r * o_stride + begin, acc[r][0]);
    store(o + r * o_stride + begin + 16, acc[r][1]);
  }
}

/** The same over whole rows of v: as many chunks at once as R rows leave registers for. */
template <DType T, int R>
__attribute__((noinline)) void value_block(const float* p, const char* const* values,
                                           int64_t head_offset, int n_begin, int n_end,
                                           int head_dim, const char* const* ahead, float* o,
                                           int64_t o_stride) {
  constexpr int C = R == 1 ? kMaxChunks : kMaxChunks / 2;
  const int parts = head_dim / (C * kChunk);
  const auto add_part = [&]<int kParts>(int part) {
    value_part<T, R, C, kParts>(p, values, head_offset, n_begin, n_end, ahead, part, o, o_stride);
  };
  if (parts == 1) {
    add_part.template operator()<1>(0);
  } else if (parts == 2) {
    add_part.template operator()<2>(0);
    add_part.template operator()<2>(1);
  } else {
#pragma GCC unroll 1
    for (int part = 0; part < parts; ++part) add_part.template operator()<0>(part);
  }
#pragma GCC unroll 1
  for (int begin = parts * C * kChunk; begin < head_dim; begin += kChunk)
    value_edge<T, R>(p, values, head_offset, n_begin, n_end, begin, head_dim, ahead, o, o_stride);
}

template <DType T>
void value_rows(int rows, const float* p, const char* const* values, int64_t head_offset,
                int n_begin, int n_end, int head_dim, const char* const* ahead, float* o,
                int64_t o_stride) {
  if (n_begin >= n_end) return;
  if constexpr (kMaxRowBlock == 4) {
    if (rows == 4)
      value_block<T, 4>(p, values, head_offset, n_begin, n_end, head_dim, ahead, o, o_stride);
    if (rows == 3)
      value_block<T, 3>(p, values, head_offset, n_begin, n_end, head_dim, ahead, o, o_stride);
  }
  if (rows == 2)
    value_block<T, 2>(p, values, head_offset, n_begin, n_end, head_dim, ahead, o, o_stride);
  if (rows == 1)
    value_block<T, 1>(p, values, head_offset, n_begin, n_end, head_dim, ahead, o, o_stride);
}

/** States of a set of rows.  o is in lane order; o of a row with m = -inf holds anything. */
struct States {
  float* m;  // [rows]
  float* l;  // [rows]
  float* o;  // [rows, o_stride]
  int64_t o_stride;
};

/** A state array laid out in one piece of `rows * (o_stride + 2)` floats. */
ATTNFOLD_LANE_FN States states_at(float* base, int rows, int64_t o_stride) {
  return {base + rows * o_stride, base + rows * (o_stride + 1), base, o_stride};
}

ATTNFOLD_LANE_FN States from_row(States s, int row) {
  return {s.m + row, s.l + row, s.o + row * s.o_stride, s.o_stride};
}

ATTNFOLD_LANE_FN void clear_states(const States& s, int rows) {
  for (int r = 0; r < rows; ++r) s.m[r] = -__builtin_inff();
}

/** a = fold(a, b), row by row: core/fold.h. */
void fold_states(const States& a, const States& b, int rows) {
  for (int r = 0; r < rows; ++r) {
    if (b.m[r] == -__builtin_inff()) continue;
    float* o_a = a.o + r * a.o_stride;
    const float* o_b = b.o + r * b.o_stride;
    if (a.m[r] == -__builtin_inff()) {
      a.m[r] = b.m[r];
      a.l[r] = b.l[r];
      memcpy(o_a, o_b, static_cast<size_t>(a.o_stride) * sizeof(float));
      continue;
    }
    const FoldStep step = fold_step(a.m[r], b.m[r]);
    a.l[r] = fold_value(step, a.l[r], b.l[r]);
    const Lanes scale = splat(step.scale);
    if (step.b_leads) {
      a.m[r] = b.m[r];
      for (int64_t i = 0; i < a.o_stride; i += 16)
        store(o_a + i, fma(scale, load(o_a + i), load(o_b + i)));
    } else {
      for (int64_t i = 0; i < a.o_stride; i += 16)
        store(o_a + i, fma(scale, load(o_b + i), load(o_a + i)));
    }
  }
}
