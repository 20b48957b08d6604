// Weighted sums of values, and the fold of states.  Included inside an ISA's anonymous namespace,
// after its Lanes.
//
// o[r][d] is one chain of fma over the keys, ascending, whatever the blocking.  A key that a row
// may not see is not touched for that row: no 0 * NaN can arise.

/** o[r] += sum over n of p[r][n] * v[n] for one stretch of C chunks of 32; o in lane order.
 * ahead[n] + ahead_offset is prefetched meanwhile. */
template <DType T, int R, int C, bool kTail>
ATTNFOLD_LANE_FN void value_chunks(const float* p, const char* const* values, int64_t offset,
                                   int n_begin, int n_end, int tail, const char* const* ahead,
                                   int64_t ahead_offset, float* o, int64_t o_stride) {
  constexpr int kElementBytes = dtype_bytes(T);
  Lanes acc[R][2 * C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * C; ++i) acc[r][i] = load(o + r * o_stride + i * 16);
  }
#pragma GCC unroll 2
  for (int n = n_begin; n < n_end; ++n) {
    const char* v = values[n] + offset;
    Lanes weight[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) weight[r] = splat(p[r * kLeaf + n]);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      if (!kTail) prefetch_chunk<kChunk * kElementBytes>(ahead[n] + ahead_offset, c);
      const Pair x = kTail ? load32_partial<T>(v, tail) : load32<T>(v + c * kChunk * kElementBytes);
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
    for (int i = 0; i < 2 * C; ++i) store(o + r * o_stride + i * 16, acc[r][i]);
  }
}

/** The same over a whole row of v: as many chunks at once as R rows leave registers for. */
template <DType T, int R>
__attribute__((noinline)) void value_block(const float* p, const char* const* values,
                                           int64_t head_offset, int n_begin, int n_end,
                                           int head_dim, const char* const* ahead, float* o,
                                           int64_t o_stride) {
  constexpr int kElementBytes = dtype_bytes(T);
  constexpr int C = R == 1 ? kMaxChunks : R == 2 ? kMaxChunks / 2 : kMaxChunks / 2;
  const int chunks = head_dim / kChunk;
  int c = 0;
#pragma GCC unroll 1
  for (; c + C <= chunks; c += C) {
    value_chunks<T, R, C, false>(p, values, head_offset + c * kChunk * kElementBytes, n_begin,
                                 n_end, 0, ahead, c * kChunk * kElementBytes, o + c * kChunk,
                                 o_stride);
  }
#pragma GCC unroll 1
  for (; c < chunks; ++c) {
    value_chunks<T, R, 1, false>(p, values, head_offset + c * kChunk * kElementBytes, n_begin,
                                 n_end, 0, ahead, c * kChunk * kElementBytes, o + c * kChunk,
                                 o_stride);
  }
  if (const int tail = head_dim % kChunk) {
    value_chunks<T, R, 1, true>(p, values, head_offset + c * kChunk * kElementBytes, n_begin, n_end,
                                tail, ahead, 0, o + c * kChunk, o_stride);
  }
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
