// One worker's items, and the fold of rows whose leaves are with several items.  Included inside an
// ISA's anonymous namespace, after attend.inl and tile.inl.

/** One item, span by span. */
template <DType T, class S, int kChunks>
void attend_item(const RunArgs& args, const Item& item) {
  UnitWork<S> w = open_unit<S>(args, args.schedule->units[item.unit]);
  const int64_t state_floats = static_cast<int64_t>(w.rows) * state_row_floats(w.p);
  float* slot = item.state_offset < 0 ? nullptr : args.states + item.state_offset;
  if (item.leaf_begin < item.leaf_end) {
    point_unit_tokens(w);
    pack_queries(w);
  }
  if constexpr (!is_8_bit(T)) {  // which have scales
    if (is_tiled(w)) return attend_tiles<T>(w, item);
  }
  if (item.leaf_begin < item.leaf_end) {
    if constexpr (S::kMatrix) pack_matrix_queries(w);
    const int leaf = leaf_at(w.unit, item.leaf_begin);
    point_rows(w.p, *args.lengths, args.tensors.k, dtype_bytes(w.p.kv_dtype), w.unit.request, leaf,
               unit_leaf(w, leaf), w.k);
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
      const int edge = chunk_end(w.unit, at);
      const int end = edge < span.leaf_end ? edge : span.leaf_end;
      clear_states(w.chunk, w.rows);
      for (; at < end; ++at) {
        leaf_states<T, S, kChunks>(w, leaf_at(w.unit, at),
                                   at + 1 < item.leaf_end ? leaf_at(w.unit, at + 1) : -1);
        fold_states(w.chunk, w.leaf, w.rows);
      }
      if (span.kind == SpanKind::row) fold_states(w.total, w.chunk, w.rows);
    }
  }
  if (item.state_offset < 0) finish_rows(args, w.unit, w.total, S::kOrder, 0, w.rows);
}

template <DType T, class S>
void run_worker(const RunArgs& args, int32_t worker) {
  const Schedule& s = *args.schedule;
  [[maybe_unused]] const typename S::Mode mode;
  for (int32_t i = s.worker_items[worker]; i < s.worker_items[worker + 1]; ++i) {
    switch (args.problem->head_dim_qk) {
      case 64: attend_item<T, S, 2>(args, s.items[i]); break;
      case 128: attend_item<T, S, 4>(args, s.items[i]); break;
      default: attend_item<T, S, 0>(args, s.items[i]); break;
    }
  }
}

/** What has been folded of some rows: whole super-chunks, and the one at hand.  `o` grows where the
 * first states lie, each of which is read before anything is folded into it; `m` and `l` do not, as
 * other tasks have rows in the same lines. */
struct RowFold {
  States total, chunk;
  int chunk_index;
  float m[2][kMergeRows], l[2][kMergeRows];

  States grow_from(const States& first, int n) {
    const int free = total.m == m[0] ? 1 : 0;
    memcpy(m[free], first.m, static_cast<size_t>(n) * sizeof(float));
    memcpy(l[free], first.l, static_cast<size_t>(n) * sizeof(float));
    States s = first;
    s.m = m[free];
    s.l = l[free];
    return s;
  }
};

/** Asks for n rows of the states at `slot`: another thread has written them. */
ATTNFOLD_LANE_FN void ask_for_rows(const States& s, int n) {
  for (int i = 0; i < n; i += 16) {
    __builtin_prefetch(s.m + i);
    __builtin_prefetch(s.l + i);
  }
  for (int64_t i = 0; i < n * s.o_stride; i += 16) __builtin_prefetch(s.o + i);
}

/** Folds rows [row, row + n) of a unit's states into `fold`. */
ATTNFOLD_LANE_FN void fold_unit(const RunArgs& args, const Unit& unit, int row, int n,
                                RowFold* fold) {
  const int rows = unit_rows(*args.shape, unit);
  const int64_t o_stride = padded(args.problem->head_dim_vo);
  for (int i = unit.item_begin; i < unit.item_begin + unit.num_items; ++i) {
    const Item& item = args.schedule->items[i];
    float* slot = args.states + item.state_offset;
    for (int at = item.leaf_begin; at < item.leaf_end; slot += rows * (o_stride + 2)) {
      const Span span = span_at(unit, item, at);
      const States state = from_row(states_at(slot, rows, o_stride), row);
      if (span.leaf_end < item.leaf_end) {
        ask_for_rows(from_row(states_at(slot + rows * (o_stride + 2), rows, o_stride), row), n);
      } else if (i + 1 < unit.item_begin + unit.num_items) {
        float* next = args.states + args.schedule->items[i + 1].state_offset;
        ask_for_rows(from_row(states_at(next, rows, o_stride), row), n);
      }
      const int chunk_index = leaf_at(unit, at) / kSuperChunk;
      if (span.kind == SpanKind::row) {
        fold->total = fold->grow_from(state, n);
      } else if (fold->chunk.m && chunk_index == fold->chunk_index) {
        fold_states(fold->chunk, state, n);
      } else {  // a new super-chunk: the one before is whole
        if (fold->chunk.m && fold->total.m) fold_states(fold->total, fold->chunk, n);
        if (fold->chunk.m && !fold->total.m) fold->total = fold->chunk;
        fold->chunk = fold->grow_from(state, n);
        fold->chunk_index = chunk_index;
      }
      at = span.leaf_end;
    }
  }
}

/** Rows [begin, end) of a unit, of one kv head if its request has leaves in prefix units: the
 * states of all their spans, folded in the canonical order. */
template <LaneOrder kOrder>
void merge_rows(const RunArgs& args, const Unit& unit, int begin, int end) {
  RowFold fold{};
  const int head_rows = unit.num_qo * args.problem->group_size;
  const int head = unit.kv_head_begin + begin / head_rows;
  for (int m = unit.member; m >= 0; m = args.schedule->members[m].next) {
    const Member& member = args.schedule->members[m];
    const int heads = args.schedule->units[member.unit].num_kv_heads;
    const Unit& shared = args.schedule->units[member.unit + head / heads];
    const int row = (head % heads * shared.num_qo + member.token) * args.problem->group_size;
    fold_unit(args, shared, row + begin % head_rows, end - begin, &fold);
  }
  fold_unit(args, unit, begin, end - begin, &fold);
  if (fold.chunk.m && fold.total.m) fold_states(fold.total, fold.chunk, end - begin);
  States total = fold.total.m ? fold.total : fold.chunk;
  total.m -= begin;  // finish_rows counts rows of the unit
  total.l -= begin;
  total.o -= begin * total.o_stride;
  finish_rows(args, unit, total, kOrder, begin, end);
}

template <LaneOrder kOrder>
void merge_states(const RunArgs& args, const MergeTask& task) {
  const Unit& unit = args.schedule->units[task.unit];
  if (unit.member < 0) return merge_rows<kOrder>(args, unit, task.row_begin, task.row_end);
  const int head_rows = unit.num_qo * args.problem->group_size;
  for (int begin = task.row_begin, end; begin < task.row_end; begin = end) {
    end = begin / head_rows * head_rows + head_rows;
    if (end > task.row_end) end = task.row_end;
    merge_rows<kOrder>(args, unit, begin, end);
  }
}

template <DType T>
void merge_shared(const RunArgs& args, const MergeTask& task) {
  merge_states<order_of(T)>(args, task);
}
