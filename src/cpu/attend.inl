// Attention on the CPU: one worker's items, and the fold of units that several workers share.
// Included inside an ISA's anonymous namespace, after scores.inl and values.inl.
//
// Data movement per leaf of 128 keys, for a unit of R rows over H kv heads:
//   K, V   memory -> registers, each byte once for each block of 4 rows, in memory order (16 keys, then head by head);
//          a further block of rows finds them in L1.  2 * 128 * H * head_dim * element bytes from memory.
//   S, P   [R, 128] f32 in L1/L2          Q      [R, head_dim] packed once per item
//   O      leaf, super-chunk and row accumulators, 3 x [R, head_dim] f32 in L1/L2
// 16 keys of all heads ahead are prefetched to L2 in the same order.

/** Row pointers of one leaf's keys or values: entry n is key leaf * kLeaf + n, kv head 0. */
struct LeafRows {
  const char* row[kLeaf];
};

/** Points rows [begin, end) of `out`; the others up to the next multiple of 16 repeat a valid one and are never used. */
void point_rows(const Problem& p, const Lengths& lengths, const View<const char>& view, int request, int leaf, int begin,
                int end, LeafRows* out) {
  const int64_t bytes = dtype_bytes(p.kv_dtype);
  if (p.ragged) {
    const char* base = view.data + (static_cast<int64_t>(lengths.kv_indptr[request]) + static_cast<int64_t>(leaf) * kLeaf) *
                                       view.stride_token * bytes;
    for (int n = begin; n < end; ++n) out->row[n] = base + n * view.stride_token * bytes;
  } else {
    const int32_t* pages = pages_of(lengths, request);
    const int64_t first = static_cast<int64_t>(leaf) * kLeaf + begin;
    int64_t page = first / p.page_size, token = first % p.page_size;
    for (int n = begin; n < end; ++page, token = 0) {
      const char* base = view.data + pages[page] * view.stride_page * bytes;
      for (; token < p.page_size && n < end; ++token, ++n) out->row[n] = base + token * view.stride_token * bytes;
    }
  }
  for (int n = begin & ~15; n < begin; ++n) out->row[n] = out->row[begin];
  for (int n = end; n < ((end + 15) & ~15); ++n) out->row[n] = out->row[end - 1];
}

/** One unit while a worker has it: its rows, and where a worker keeps them. */
template <class S>
struct UnitWork {
  const RunArgs& args;
  const Problem& p;
  const Unit& unit;
  int head_rows;                 // rows of one kv head
  int rows;
  int q_stride;                  // elements of a packed q row
  typename S::Q* q;              // [rows, q_stride]
  float* s;                      // [rows, kLeaf]: scores, then p
  States leaf, chunk, total;     // [rows]
  int32_t* row_begin;            // [num_qo] keys that the token sees, relative to the leaf at hand
  int32_t* row_end;
  LeafRows *k, *v, *next_k;
};

template <class T>
ATTNFOLD_LANE_FN T* take(char*& at, size_t n) {
  T* r = reinterpret_cast<T*>(at);
  at += (n * sizeof(T) + 63) / 64 * 64;
  return r;
}

template <class S>
UnitWork<S> open_unit(const RunArgs& args, int worker, const Unit& unit) {
  const Problem& p = *args.problem;
  const int max_rows = max_unit_rows(*args.shape);
  const int64_t o_stride = padded(p.head_dim_vo);
  char* at = args.scratch + static_cast<size_t>(worker) * args.scratch_bytes;
  UnitWork<S> w{args, p, unit, unit.num_qo * p.group_size, unit_rows(*args.shape, unit), padded(p.head_dim_qk),
                nullptr, nullptr, {}, {}, {}, nullptr, nullptr, nullptr, nullptr, nullptr};
  w.k = take<LeafRows>(at, 1);
  w.v = take<LeafRows>(at, 1);
  w.next_k = take<LeafRows>(at, 1);
  w.row_begin = take<int32_t>(at, max_rows);
  w.row_end = take<int32_t>(at, max_rows);
  w.q = reinterpret_cast<typename S::Q*>(take<float>(at, static_cast<size_t>(max_rows) * w.q_stride));
  w.s = take<float>(at, static_cast<size_t>(max_rows) * kLeaf);
  States* const states[] = {&w.leaf, &w.chunk, &w.total};
  for (States* s : states) *s = states_at(take<float>(at, max_rows * (o_stride + 2)), w.rows, o_stride);
  return w;
}

/** Row index: [kv head of the unit, token, head of the group]. */
template <class S>
void pack_queries(const UnitWork<S>& w) {
  const View<const char>& q = w.args.tensors.q;
  const int64_t bytes = dtype_bytes(w.p.q_dtype);
  const int64_t first_row = w.args.lengths->qo_indptr[w.unit.request] + static_cast<int64_t>(w.unit.qo_begin);
  for (int r = 0; r < w.rows; ++r) {
    const int head = (w.unit.kv_head_begin + r / w.head_rows) * w.p.group_size + r % w.p.group_size;
    const int token = r % w.head_rows / w.p.group_size;
    const char* row = q.data + ((first_row + token) * q.stride_token + head * q.stride_head) * bytes;
    S::pack_q(row, w.p.q_dtype, w.p.head_dim_qk, w.q + static_cast<int64_t>(r) * w.q_stride);
  }
}

ATTNFOLD_LANE_FN void prefetch_rows(const LeafRows& rows, int n, int64_t head_offset, int64_t row_bytes) {
  for (int i = 0; i < 16; ++i) {
    const char* row = rows.row[n + i] + head_offset;
    for (int64_t b = 0; b < row_bytes; b += 64) prefetch(row + b);
  }
}

/** Scores of all rows on keys [begin, end) of the leaf; prefetches ahead, at last the leaf's first values. */
template <class S, int kChunks>
void leaf_scores(const UnitWork<S>& w, int begin, int end) {
  const int64_t bytes = dtype_bytes(w.p.kv_dtype);
  const int64_t head_bytes = w.args.tensors.k.stride_head * bytes, v_head_bytes = w.args.tensors.v.stride_head * bytes;
  const int first = begin & ~15;
  for (int n = first; n < end; n += 16) {
    for (int h = 0; h < w.unit.num_kv_heads; ++h) {
      const int64_t head = w.unit.kv_head_begin + h;
      if (n + 16 < end) {
        prefetch_rows(*w.k, n + 16, head * head_bytes, w.p.head_dim_qk * bytes);
      } else {
        prefetch_rows(*w.v, first, head * v_head_bytes, w.p.head_dim_vo * bytes);
      }
      const int64_t row = static_cast<int64_t>(h) * w.head_rows;
      score_16_keys<S, kChunks>(w.q + row * w.q_stride, w.q_stride, w.head_rows, w.k->row + n, head * head_bytes,
                                w.p.head_dim_qk, w.s + row * kLeaf + n);
    }
  }
}

/** o of up to kMaxRowBlock rows on 16 keys from n on: the keys that all of them see together, the others row by row. */
template <DType T, class S>
void block_values(const UnitWork<S>& w, int row, int rows, int n, int64_t head_offset) {
  int begin[kMaxRowBlock], end[kMaxRowBlock];
  int all_begin = n, all_end = n + 16;
  for (int r = 0; r < rows; ++r) {
    const int token = (row + r) % w.head_rows / w.p.group_size;
    begin[r] = w.row_begin[token] > n ? w.row_begin[token] : n;
    end[r] = w.row_end[token] < n + 16 ? w.row_end[token] : n + 16;
    all_begin = begin[r] > all_begin ? begin[r] : all_begin;
    all_end = end[r] < all_end ? end[r] : all_end;
  }
  const float* p = w.s + static_cast<int64_t>(row) * kLeaf;
  float* o = w.leaf.o + row * w.leaf.o_stride;
  const auto single = [&](int r, int from, int to) {
    value_rows<T>(1, p + r * kLeaf, w.v->row, head_offset, from, to, w.p.head_dim_vo, o + r * w.leaf.o_stride, 0);
  };
  if (all_begin >= all_end) {
    for (int r = 0; r < rows; ++r) single(r, begin[r], end[r]);
    return;
  }
  for (int r = 0; r < rows; ++r) single(r, begin[r], all_begin);
  value_rows<T>(rows, p, w.v->row, head_offset, all_begin, all_end, w.p.head_dim_vo, o, w.leaf.o_stride);
  for (int r = 0; r < rows; ++r) single(r, all_end, end[r]);
}

template <DType T, class S>
void leaf_values(const UnitWork<S>& w, int begin, int end, bool has_next) {
  const int64_t bytes = dtype_bytes(w.p.kv_dtype);
  const int64_t head_bytes = w.args.tensors.v.stride_head * bytes, k_head_bytes = w.args.tensors.k.stride_head * bytes;
  for (int n = begin & ~15; n < end; n += 16) {
    for (int h = 0; h < w.unit.num_kv_heads; ++h) {
      const int64_t head = w.unit.kv_head_begin + h;
      if (n + 16 < end) {
        prefetch_rows(*w.v, n + 16, head * head_bytes, w.p.head_dim_vo * bytes);
      } else if (has_next) {
        prefetch_rows(*w.next_k, 0, head * k_head_bytes, w.p.head_dim_qk * bytes);
      }
      for (int r = 0; r < w.head_rows; r += kMaxRowBlock) {
        const int rows = w.head_rows - r < kMaxRowBlock ? w.head_rows - r : kMaxRowBlock;
        block_values<T>(w, h * w.head_rows + r, rows, n, head * head_bytes);
      }
    }
  }
}

ATTNFOLD_LANE_FN int clamp_key(int64_t key) { return key < 0 ? 0 : key > kLeaf ? kLeaf : static_cast<int>(key); }

/** Fills w.leaf with the state of every row on one leaf.  `k` rows of the leaf are pointed; `next` is the leaf after, or -1. */
template <DType T, class S, int kChunks>
void leaf_states(UnitWork<S>& w, int leaf, int next) {
  const Lengths& lengths = *w.args.lengths;
  const int64_t first_key = static_cast<int64_t>(leaf) * kLeaf;
  const int begin = clamp_key(w.unit.key_begin - first_key), end = clamp_key(w.unit.key_end - first_key);
  point_rows(w.p, lengths, w.args.tensors.v, w.unit.request, leaf, begin, end, w.v);
  if (next >= 0) {
    const int next_end = clamp_key(w.unit.key_end - static_cast<int64_t>(next) * kLeaf);
    point_rows(w.p, lengths, w.args.tensors.k, w.unit.request, next, 0, next_end, w.next_k);
  }
  const int qo_len = lengths.qo_indptr[w.unit.request + 1] - lengths.qo_indptr[w.unit.request];
  const int kv_len = lengths.kv_len[w.unit.request];
  for (int t = 0; t < w.unit.num_qo; ++t) {
    const KeyRange keys = visible_keys(w.p.mask, qo_len, kv_len, w.unit.qo_begin + t);
    w.row_begin[t] = clamp_key(keys.begin - first_key);
    w.row_end[t] = clamp_key(keys.end - first_key);
  }
  leaf_scores<S, kChunks>(w, begin, end);
  for (int r = 0; r < w.rows; ++r) {
    const int token = r % w.head_rows / w.p.group_size;
    if (w.row_begin[token] >= w.row_end[token]) {
      w.leaf.m[r] = -__builtin_inff();
      continue;
    }
    leaf_softmax(w.s + static_cast<int64_t>(r) * kLeaf, w.row_begin[token], w.row_end[token], w.p.score_scale, w.leaf.m + r,
                 w.leaf.l + r);
  }
  memset(w.leaf.o, 0, static_cast<size_t>(w.rows * w.leaf.o_stride) * sizeof(float));
  leaf_values<T>(w, begin, end, next >= 0);
  LeafRows* used = w.k;
  w.k = w.next_k;
  w.next_k = used;
}

/** Rows [begin, end) of the unit, finished: o = total.o / total.l in o's type, lse. */
void finish_rows(const RunArgs& args, const Unit& unit, const States& total, DType lane_type, int begin, int end) {
  const Problem& p = *args.problem;
  const View<char>& o = args.tensors.o;
  const int head_rows = unit.num_qo * p.group_size;
  for (int r = begin; r < end; ++r) {
    const int64_t head = (unit.kv_head_begin + r / head_rows) * static_cast<int64_t>(p.group_size) + r % p.group_size;
    const int64_t row = static_cast<int64_t>(args.lengths->qo_indptr[unit.request]) + unit.qo_begin + r % head_rows / p.group_size;
    const bool empty = total.m[r] == -__builtin_inff();
    char* out = o.data + (row * o.stride_token + head * o.stride_head) * dtype_bytes(p.o_dtype);
    float* acc = total.o + r * total.o_stride;
    const Lanes divisor = splat(empty ? 1.0f : divisor_of(total.l[r]));
    for (int64_t i = 0; i < total.o_stride; i += 16) {
      store(acc + i, empty ? splat(0.0f) : divide(load(acc + i), divisor));
    }
    for (int d = 0; d < p.head_dim_vo; ++d) {
      const int e = d % kChunk;
      const int slot = lane_type == DType::bf16 ? lane_slot<DType::bf16>(e) : e;
      store_f32(out, p.o_dtype, d, acc[d - e + slot]);
    }
    if (args.tensors.lse) {
      args.tensors.lse[row * args.tensors.lse_stride_row + head * args.tensors.lse_stride_head] =
          empty ? -__builtin_inff() : lse_of(total.m[r], total.l[r]);
    }
  }
}

/** One item, span by span. */
template <DType T, class S, int kChunks>
void attend_item(const RunArgs& args, int worker, const Item& item) {
  UnitWork<S> w = open_unit<S>(args, worker, args.schedule->units[item.unit]);
  const int64_t state_floats = static_cast<int64_t>(w.rows) * state_row_floats(w.p);
  float* slot = item.state_offset < 0 ? nullptr : args.states + item.state_offset;
  if (item.leaf_begin < item.leaf_end) {
    pack_queries(w);
    const int64_t first_key = static_cast<int64_t>(item.leaf_begin) * kLeaf;
    point_rows(w.p, *args.lengths, args.tensors.k, w.unit.request, item.leaf_begin, clamp_key(w.unit.key_begin - first_key),
               clamp_key(w.unit.key_end - first_key), w.k);
  }
  clear_states(w.total, w.rows);
  for (int at = item.leaf_begin; at < item.leaf_end;) {
    const Span span = span_at(w.unit, item, at);
    if (slot) {  // the span's state grows in its place
      (span.kind == SpanKind::row ? w.total : w.chunk) = states_at(slot, w.rows, w.leaf.o_stride);
      slot += state_floats;
      if (span.kind == SpanKind::row) clear_states(w.total, w.rows);
    }
    while (at < span.leaf_end) {
      const int chunk_end = at / kSuperChunk * kSuperChunk + kSuperChunk;
      const int end = chunk_end < span.leaf_end ? chunk_end : span.leaf_end;
      clear_states(w.chunk, w.rows);
      for (; at < end; ++at) {
        leaf_states<T, S, kChunks>(w, at, at + 1 < item.leaf_end ? at + 1 : -1);
        fold_states(w.chunk, w.leaf, w.rows);
      }
      if (span.kind == SpanKind::row) fold_states(w.total, w.chunk, w.rows);
    }
  }
  if (item.state_offset < 0) finish_rows(args, w.unit, w.total, T, 0, w.rows);
}

template <DType T, class S>
void run_worker(const RunArgs& args, int32_t worker) {
  const Schedule& s = *args.schedule;
  for (int32_t i = s.worker_items[worker]; i < s.worker_items[worker + 1]; ++i) {
    switch (args.problem->head_dim_qk) {
      case 64: attend_item<T, S, 2>(args, worker, s.items[i]); break;
      case 128: attend_item<T, S, 4>(args, worker, s.items[i]); break;
      default: attend_item<T, S, 0>(args, worker, s.items[i]); break;
    }
  }
}

ATTNFOLD_LANE_FN States from_row(States s, int row) {
  return {s.m + row, s.l + row, s.o + row * s.o_stride, s.o_stride};
}

/** Rows [row_begin, row_end) of a unit that several workers share: their spans' states, folded in the canonical order. */
template <DType T>
void merge_shared(const RunArgs& args, const MergeTask& task) {
  const SharedUnit& shared = args.schedule->shared[task.shared];
  const Unit& unit = args.schedule->units[shared.unit];
  const int rows = unit_rows(*args.shape, unit);
  const int n = task.row_end - task.row_begin;
  const int64_t o_stride = padded(args.problem->head_dim_vo);
  // The accumulators live in the first two states of the unit: each is read before anything is folded into it.
  const Item& first = args.schedule->items[shared.item_begin];
  States total{}, chunk{};
  int chunk_index = -1;
  for (int i = 0; i < shared.num_items; ++i) {
    const Item& item = (&first)[i];
    float* slot = args.states + item.state_offset;
    for (int at = item.leaf_begin; at < item.leaf_end; slot += rows * (o_stride + 2)) {
      const Span span = span_at(unit, item, at);
      const States state = from_row(states_at(slot, rows, o_stride), task.row_begin);
      if (span.kind == SpanKind::row) {
        total = state;
      } else if (at / kSuperChunk == chunk_index) {
        fold_states(chunk, state, n);
      } else {  // a new super-chunk: the one before is whole
        if (chunk.m && total.m) fold_states(total, chunk, n);
        if (chunk.m && !total.m) total = chunk;
        chunk = state;
        chunk_index = at / kSuperChunk;
      }
      at = span.leaf_end;
    }
  }
  if (chunk.m && total.m) fold_states(total, chunk, n);
  if (!total.m) total = chunk;
  total.m -= task.row_begin;  // finish_rows counts rows of the unit
  total.l -= task.row_begin;
  total.o -= task.row_begin * o_stride;
  finish_rows(args, unit, total, T, task.row_begin, task.row_end);
}
