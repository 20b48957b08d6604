// Attention of few rows of several kv heads: lanes are elements of a row.  Included inside an ISA's
// anonymous namespace, after scores.inl and values.inl.
//
// Data movement per leaf of 128 keys, for a unit of R rows over H kv heads:
//   K, V   memory -> registers, in memory order: 16 keys, then head by head.  Each byte once from
//          memory, 2 * 128 * H * head_dim * element bytes; further blocks of 4 rows find it in L1.
//   S, P   [R, 128] f32 in L1/L2          Q      [R, head_dim] packed once per item
//   O      leaf, super-chunk and row accumulators, 3 x [R, head_dim] f32 in L1/L2
// 16 keys of all heads ahead are prefetched meanwhile, line by line in memory order.

/** Points rows [begin, end) of `out`; `bytes` are those of an element. */
ATTNFOLD_LANE_FN void point_segment(const Problem& p, const Lengths& lengths,
                                    const View<const char>& view, int64_t bytes, int request,
                                    int leaf, int begin, int end, LeafRows* out) {
  if (p.ragged) {
    const char* base = view.data + (static_cast<int64_t>(lengths.kv_indptr[request]) +
                                    static_cast<int64_t>(leaf) * kLeaf) *
                                       view.stride_token * bytes;
    for (int n = begin; n < end; ++n) out->row[n] = base + n * view.stride_token * bytes;
    return;
  }
  const int32_t* pages = pages_of(lengths, request);
  const int64_t first = static_cast<int64_t>(leaf) * kLeaf + begin;
  int64_t page = first / p.page_size, token = first % p.page_size;
  for (int n = begin; n < end; ++page, token = 0) {
    const char* base = view.data + pages[page] * view.stride_page * bytes;
    for (; token < p.page_size && n < end; ++token, ++n)
      out->row[n] = base + token * view.stride_token * bytes;
  }
}

/** Keys of a leaf that some row of a unit sees. */
struct UnitLeaf {
  LeafKeys keys;
  bool sparse;      // a block-sparse mask leaves out some of them
  LeafBits wanted;  // then: the others
};

/** Points the rows of stretches of bits. */
void point_bits(const Problem& p, const Lengths& lengths, const View<const char>& view,
                int64_t bytes, int request, int leaf, const LeafBits& bits, LeafRows* out) {
  const LeafKeys hull = bits.hull();
  for (int begin = hull.begin, end; begin < hull.end; begin = end) {
    end = begin + 1;
    while (end < hull.end && bits.has(end) == bits.has(begin)) ++end;
    if (bits.has(begin)) {
      point_segment(p, lengths, view, bytes, request, leaf, begin, end, out);
    } else {
      for (int n = begin; n < end; ++n) out->row[n] = out->row[hull.begin];
    }
  }
  for (int n = hull.begin & ~15; n < hull.begin; ++n) out->row[n] = out->row[hull.begin];
  for (int n = hull.end; n < ((hull.end + 15) & ~15); ++n) out->row[n] = out->row[hull.begin];
}

/** Points the rows of `unit_leaf`; others among the same 16 repeat a valid one and are never used.
 */
void point_rows(const Problem& p, const Lengths& lengths, const View<const char>& view,
                int64_t bytes, int request, int leaf, const UnitLeaf& unit_leaf, LeafRows* out) {
  if (unit_leaf.sparse) {
    return point_bits(p, lengths, view, bytes, request, leaf, unit_leaf.wanted, out);
  }
  const LeafKeys& keys = unit_leaf.keys;
  point_segment(p, lengths, view, bytes, request, leaf, 0, keys.sink, out);
  point_segment(p, lengths, view, bytes, request, leaf, keys.begin, keys.end, out);
  const char* valid = keys.sink > 0 ? out->row[0] : out->row[keys.begin];
  const int gap_begin = keys.sink > 0 ? keys.sink : keys.begin & ~15;
  const int end = keys.end > keys.begin ? keys.end : keys.sink;
  const int gap_end = keys.end > keys.begin ? keys.begin : keys.sink;
  for (int n = gap_begin; n < gap_end; ++n) out->row[n] = valid;
  for (int n = end; n < ((end + 15) & ~15); ++n) out->row[n] = valid;
}

/** One unit while a worker has it: its rows, and where a worker keeps them. */
template <class S>
struct UnitWork {
  const RunArgs& args;
  const Problem& p;
  const Unit& unit;
  int head_rows;  // rows of one kv head
  int rows;
  int q_stride;                     // elements of a packed q row
  typename S::Q* q = nullptr;       // [rows, q_stride]
  float* s = nullptr;               // [rows, kLeaf]: scores, then p
  States leaf{}, chunk{}, total{};  // [rows]
  TokenRow* tokens = nullptr;       // [num_qo], those of a prefix unit member by member
  LeafKeys* seen = nullptr;         // [num_qo] keys that the token sees of the leaf at hand
  LeafBits* bits = nullptr;         // [num_qo] which of them, if by_bits
  bool by_bits = false;             // bits say what is seen of the leaf at hand
  HeadBlocks blocks{};              // of the unit's heads, with a block-sparse mask
  LeafRows *k = nullptr, *v = nullptr, *next_k = nullptr;
  LeafRows *k_scale_rows = nullptr, *v_scale_rows = nullptr;
  float *k_scale = nullptr, *v_scale = nullptr;  // [kLeaf] of the kv head at hand
  char* tiles = nullptr;                         // scratch of tile.inl
};

template <class T>
ATTNFOLD_LANE_FN T* take(char*& at, size_t n) {
  T* r = reinterpret_cast<T*>(at);
  at += (n * sizeof(T) + 63) / 64 * 64;
  return r;
}

template <class S>
UnitWork<S> open_unit(const RunArgs& args, const Unit& unit) {
  const Problem& p = *args.problem;
  const int max_rows = max_unit_rows(*args.shape);
  const int64_t o_stride = padded(p.head_dim_vo);
  char* at = args.scratch;
  UnitWork<S> w{args,
                p,
                unit,
                unit.num_qo * p.group_size,
                unit_rows(*args.shape, unit),
                padded(p.head_dim_qk)};
  if (p.blocks.block_size > 0) {
    w.blocks = head_blocks(p.blocks, *args.lengths, p.kv_heads, unit.request, unit.kv_head_begin);
  }
  w.k = take<LeafRows>(at, 1);
  w.v = take<LeafRows>(at, 1);
  w.next_k = take<LeafRows>(at, 1);
  w.k_scale_rows = take<LeafRows>(at, 1);
  w.v_scale_rows = take<LeafRows>(at, 1);
  w.k_scale = take<float>(at, kLeaf);
  w.v_scale = take<float>(at, kLeaf);
  w.tokens = take<TokenRow>(at, max_rows);
  w.seen = take<LeafKeys>(at, max_rows);
  w.bits = take<LeafBits>(at, max_rows);
  w.q =
      reinterpret_cast<typename S::Q*>(take<float>(at, static_cast<size_t>(max_rows) * w.q_stride));
  w.s = take<float>(at, static_cast<size_t>(max_rows) * kLeaf);
  States* const states[] = {&w.leaf, &w.chunk, &w.total};
  for (States* s : states)
    *s = states_at(take<float>(at, max_rows * (o_stride + 2)), w.rows, o_stride);
  w.tiles = at;
  return w;
}

/** Appends tokens [qo_begin, qo_begin + num_qo) of a request. */
ATTNFOLD_LANE_FN TokenRow* point_tokens(const Problem& p, const Lengths& lengths, int request,
                                        int qo_begin, int num_qo, TokenRow* out) {
  const RequestShape shape = request_shape(lengths, request);
  for (int i = qo_begin; i < qo_begin + num_qo; ++i) {
    *out++ = {static_cast<int64_t>(lengths.qo_indptr[request]) + i,
              static_cast<int64_t>(shape.kv_len) - shape.qo_len + i,
              visible_keys(p.mask, shape, i)};
  }
  return out;
}

template <class S>
void point_unit_tokens(const UnitWork<S>& w) {
  const Lengths& lengths = *w.args.lengths;
  if (w.unit.num_members == 0) {
    point_tokens(w.p, lengths, w.unit.request, w.unit.qo_begin, w.unit.num_qo, w.tokens);
    return;
  }
  TokenRow* at = w.tokens;
  for (int m = w.unit.member; m < w.unit.member + w.unit.num_members; ++m) {
    const int request = w.args.schedule->members[m].request;
    const int qo_len = lengths.qo_indptr[request + 1] - lengths.qo_indptr[request];
    at = point_tokens(w.p, lengths, request, 0, qo_len, at);
  }
}

/** Row index: [kv head of the unit, token, head of the group]. */
template <class S>
void pack_queries(const UnitWork<S>& w) {
  const View<const char>& q = w.args.tensors.q;
  const int64_t bytes = dtype_bytes(w.p.q_dtype);
  for (int r = 0; r < w.rows; ++r) {
    const int head = (w.unit.kv_head_begin + r / w.head_rows) * w.p.group_size + r % w.p.group_size;
    const TokenRow& token = w.tokens[r % w.head_rows / w.p.group_size];
    const char* row = q.data + (token.row * q.stride_token + head * q.stride_head) * bytes;
    S::pack_q(row, w.p.q_dtype, w.p.head_dim_qk, w.q + static_cast<int64_t>(r) * w.q_stride);
  }
}

/** Keys that are prefetched: [begin, end) of `rows`, under a unit's heads. */
struct NextKeys {
  const LeafRows* rows;
  int begin, end;
  int64_t head_begin, head_bytes;  // of the first head, of each
};

/** Rows that will be read next, in the order in which they lie in memory, so that the hardware's
 * own prefetch sees a stream: a token's heads and then the next token, or, head-major, a head's
 * tokens. */
class RowsAhead {
 public:
  RowsAhead(const NextKeys& next, int num_heads, int64_t row_bytes)
      : next_(next), row_bytes_(row_bytes), num_heads_(num_heads), key_(next.begin) {
    for (int k = 0; k < kSlack; ++k) offset_[k] = k * row_bytes;
  }

  /** The next n rows, once for each head; the last key comes again and again.  May write kSlack
   * more.
   */
  void take(int n, const char** out) {
    if (next_.head_bytes != row_bytes_) {
      for (int i = 0; i < n; ++i) {
        const int key = next_.begin + i < next_.end ? next_.begin + i : next_.end - 1;
        out[i] = next_.rows->row[key] + next_.head_begin + head_ * next_.head_bytes;
      }
      ++head_;
      return;
    }
    while (n > 0) {
      const int m = num_heads_ - head_ < n ? num_heads_ - head_ : n;
      const char* at = next_.rows->row[key_] + next_.head_begin + head_ * row_bytes_;
      for (int i = 0; i < m; i += kSlack, at += kSlack * row_bytes_) {
#pragma GCC unroll 8
        for (int k = 0; k < kSlack; ++k) out[i + k] = at + offset_[k];
      }
      out += m;
      n -= m;
      head_ += m;
      if (head_ < num_heads_) continue;
      head_ = 0;
      if (key_ + 1 < next_.end) ++key_;
    }
  }
  static constexpr int kSlack = 8;

 private:
  NextKeys next_;
  int64_t row_bytes_, offset_[kSlack];
  int num_heads_, key_, head_ = 0;
};

/** Whether any of the 16 keys from n on is wanted. */
ATTNFOLD_LANE_FN bool meets(const UnitLeaf& leaf, int n) {
  const LeafKeys& keys = leaf.keys;
  if (leaf.sparse) return leaf.wanted.of_16(n) != 0;
  return n < keys.sink || (n < keys.end && n + 16 > keys.begin && keys.begin < keys.end);
}

/** The next group of 16 keys from n on that is wanted, or kLeaf. */
ATTNFOLD_LANE_FN int next_group(const UnitLeaf& leaf, int n) {
  while (n < kLeaf && !meets(leaf, n)) n += 16;
  return n;
}

/** Keys that are taken together, begin and end multiples of 16. */
struct KeyBlock {
  int begin, end;
};

/** The next groups of 16 keys from n on that are wanted and follow one another, up to `most` keys;
 * none from kLeaf on. */
ATTNFOLD_LANE_FN KeyBlock next_block(const UnitLeaf& leaf, int n, int most) {
  KeyBlock block;
  block.begin = block.end = next_group(leaf, n);
  do {
    block.end += 16;
  } while (block.end < kLeaf && block.end - block.begin < most && meets(leaf, block.end));
  return block;
}

/** Keys that a unit takes together, at most. */
template <class S>
ATTNFOLD_LANE_FN int keys_together(const UnitWork<S>& w) {
  const int head_dim = w.p.head_dim_qk > w.p.head_dim_vo ? w.p.head_dim_qk : w.p.head_dim_vo;
  return S::keys_together(w.unit.num_kv_heads * head_dim * dtype_bytes(w.p.kv_dtype));
}

/** Whether short rows of a token's heads lie side by side in memory, and tokens too.  Then scores
 * are taken in that order, by a few keys under each head: Zen 4 reads heads of 64 elements from
 * memory 1.4 times as fast by 8 keys as by 16 or 64, of 128 up to 1.1 times, of 256 no faster. */
template <class S>
bool has_short_rows_in_order(const UnitWork<S>& w) {
  constexpr int64_t kShortBytes = 256;
  const int64_t row = w.p.head_dim_qk, token = w.args.tensors.k.stride_token;
  return w.args.tensors.k.stride_head == row && token == row * w.p.kv_heads &&
         (w.p.ragged || w.p.page_size >= score_step(w.head_rows)) &&
         row * dtype_bytes(w.p.kv_dtype) <= kShortBytes;
}

/** Scores of all rows on the leaf's keys; prefetches ahead, at last the leaf's first values. */
template <class S, int kChunks>
void leaf_scores(const UnitWork<S>& w, const UnitLeaf& keys) {
  const int64_t bytes = dtype_bytes(w.p.kv_dtype);
  const int64_t head_bytes = w.args.tensors.k.stride_head * bytes,
                v_head_bytes = w.args.tensors.v.stride_head * bytes;
  const int heads = w.unit.num_kv_heads;
  const int most = keys_together(w);
  const bool in_order = has_short_rows_in_order(w);
  const KeyBlock first = next_block(keys, 0, most);
  for (KeyBlock block = first, next; block.begin < kLeaf; block = next) {
    next = next_block(keys, block.end, most);
    const bool more = next.begin < kLeaf;
    const int64_t next_head_bytes = more ? head_bytes : v_head_bytes;
    const NextKeys next_keys = {more ? w.k : w.v, more ? next.begin : first.begin,
                                more ? next.end : first.end, w.unit.kv_head_begin * next_head_bytes,
                                next_head_bytes};
    const int64_t row_bytes = (more ? w.p.head_dim_qk : w.p.head_dim_vo) * bytes;
    const int num_keys = block.end - block.begin;
    const int step = in_order && next_head_bytes == row_bytes ? score_step(w.head_rows) : num_keys;
    RowsAhead ahead(next_keys, heads, row_bytes);
    const char* next_rows[kLeaf + RowsAhead::kSlack];
    for (int n = block.begin; n < block.end; n += step) {
      for (int h = 0; h < heads; ++h) {
        ahead.take(step, next_rows);
        const int64_t row = static_cast<int64_t>(h) * w.head_rows;
        score_keys<S, kChunks>(w.q + row * w.q_stride, w.q_stride, w.head_rows, w.k->row + n, step,
                               (w.unit.kv_head_begin + h) * head_bytes, w.p.head_dim_qk, next_rows,
                               w.s + row * kLeaf + n);
      }
    }
  }
}

/** Stretches of keys among 16, one for each of up to kMaxRowBlock rows. */
struct RowStretches {
  int begin[kMaxRowBlock], end[kMaxRowBlock];
};

/** o of `rows` rows on their stretches: the keys that all of them see together, the others row by
 * row; keys ascending. */
template <DType T, class S>
void stretch_values(const UnitWork<S>& w, int row, int rows, const RowStretches& keys,
                    int64_t head_offset, const char* const* ahead) {
  int all_begin = keys.begin[0], all_end = keys.end[0];
  for (int r = 1; r < rows; ++r) {
    all_begin = keys.begin[r] > all_begin ? keys.begin[r] : all_begin;
    all_end = keys.end[r] < all_end ? keys.end[r] : all_end;
  }
  const float* p = w.s + static_cast<int64_t>(row) * kLeaf;
  float* o = w.leaf.o + row * w.leaf.o_stride;
  const auto single = [&](int r, int from, int to) {
    value_rows<T>(1, p + r * kLeaf, w.v->row, head_offset, from, to, w.p.head_dim_vo, ahead,
                  o + r * w.leaf.o_stride, 0);
  };
  if (all_begin >= all_end) {
    for (int r = 0; r < rows; ++r) single(r, keys.begin[r], keys.end[r]);
    return;
  }
  for (int r = 0; r < rows; ++r) single(r, keys.begin[r], all_begin);
  value_rows<T>(rows, p, w.v->row, head_offset, all_begin, all_end, w.p.head_dim_vo, ahead, o,
                w.leaf.o_stride);
  for (int r = 0; r < rows; ++r) single(r, all_end, keys.end[r]);
}

/** o of up to kMaxRowBlock rows on the 16 keys from n on, where bits say what is seen: stretches
 * over which no row's bit changes, ascending. */
template <DType T, class S>
void bit_values(const UnitWork<S>& w, int row, int rows, int n, int64_t head_offset,
                const char* const* ahead) {
  uint32_t seen[kMaxRowBlock], changes = 0;  // bit i of changes: key i + 1 differs from key i
  for (int r = 0; r < rows; ++r) {
    seen[r] = w.bits[(row + r) % w.head_rows / w.p.group_size].of_16(n);
    changes |= seen[r] ^ (seen[r] >> 1);
  }
  for (int begin = 0, end; begin < 16; begin = end) {
    end = begin + 1;
    while (end < 16 && !(changes >> (end - 1) & 1)) ++end;
    RowStretches keys;
    for (int r = 0; r < rows; ++r) {
      keys.begin[r] = n + begin;
      keys.end[r] = n + (seen[r] >> begin & 1 ? end : begin);
    }
    stretch_values<T>(w, row, rows, keys, head_offset, ahead - n);
  }
}

/** o of up to kMaxRowBlock rows on the 16 keys from n on: the sink's first, then the others. */
template <DType T, class S>
void block_values(const UnitWork<S>& w, int row, int rows, int n, int64_t head_offset,
                  const char* const* ahead) {
  if (w.by_bits) return bit_values<T>(w, row, rows, n, head_offset, ahead);
  RowStretches sink, main;
  bool any_sink = false;
  for (int r = 0; r < rows; ++r) {
    const LeafKeys& seen = w.seen[(row + r) % w.head_rows / w.p.group_size];
    sink.begin[r] = n;
    sink.end[r] = seen.sink < n + 16 ? seen.sink : n + 16;
    any_sink = any_sink || sink.end[r] > n;
    main.begin[r] = seen.begin > n ? seen.begin : n;
    main.end[r] = seen.end < n + 16 ? seen.end : n + 16;
  }
  if (any_sink) stretch_values<T>(w, row, rows, sink, head_offset, ahead - n);
  stretch_values<T>(w, row, rows, main, head_offset, ahead - n);
}

/** Keys of the leaf at hand that every row of the unit sees. */
template <class S>
LeafKeys common_keys(const UnitWork<S>& w) {
  if (w.by_bits) return {0, 0, 0};
  LeafKeys all{0, 0, kLeaf};
  for (int t = 0; t < w.unit.num_qo; ++t) {
    if (w.seen[t].sink > 0) return {0, 0, 0};
    all.begin = w.seen[t].begin > all.begin ? w.seen[t].begin : all.begin;
    all.end = w.seen[t].end < all.end ? w.seen[t].end : all.end;
  }
  return all;
}

template <DType T, class S>
void leaf_values(const UnitWork<S>& w, const UnitLeaf& keys, const UnitLeaf* next_leaf) {
  const LeafKeys common = common_keys(w);
  const int64_t bytes = dtype_bytes(w.p.kv_dtype);
  const int64_t head_bytes = w.args.tensors.v.stride_head * bytes,
                k_head_bytes = w.args.tensors.k.stride_head * bytes;
  const int most = keys_together(w);
  const auto block_from = [&](int n) {
    const KeyBlock block = next_block(keys, n, 16);
    if (!S::kKeyPairs || block.begin < common.begin || block.end > common.end) return block;
    const int whole = common.end & ~15;
    return next_block(keys, n, whole - block.begin < most ? whole - block.begin : most);
  };
  const KeyBlock first_block = block_from(0);
  const bool starts_whole =
      S::kKeyPairs && first_block.begin >= common.begin && first_block.end <= common.end;
  if (!starts_whole) {
    memset(w.leaf.o, 0, static_cast<size_t>(w.rows * w.leaf.o_stride) * sizeof(float));
  }
  for (KeyBlock block = first_block, next; block.begin < kLeaf; block = next) {
    next = block_from(block.end);
    const int n = block.begin, num_keys = block.end - block.begin;
    NextKeys next_keys{w.v, n, n + 1, w.unit.kv_head_begin * head_bytes, head_bytes};
    int64_t row_bytes = w.p.head_dim_vo * bytes;
    if (next.begin < kLeaf) {
      next_keys.begin = next.begin;
      next_keys.end = next.end;
    } else if (next_leaf) {
      const KeyBlock first = next_block(*next_leaf, 0, most);
      next_keys = {w.next_k, first.begin, first.end, w.unit.kv_head_begin * k_head_bytes,
                   k_head_bytes};
      row_bytes = w.p.head_dim_qk * bytes;
    }
    RowsAhead ahead(next_keys, w.unit.num_kv_heads, row_bytes);
    const char* next_rows[kLeaf + RowsAhead::kSlack];
    for (int h = 0; h < w.unit.num_kv_heads; ++h) {
      ahead.take(num_keys, next_rows);
      const int64_t head_offset = (w.unit.kv_head_begin + h) * head_bytes;
      const bool all = n >= common.begin && block.end <= common.end;
      if constexpr (S::kKeyPairs) {
        if (all) {
          const bool fresh = starts_whole && n == first_block.begin;
          all_pair_values(w, h * w.head_rows, n, num_keys, fresh, head_offset, next_rows);
          continue;
        }
      }
      for (int r = 0; r < w.head_rows; r += kMaxRowBlock) {
        const int rows = w.head_rows - r < kMaxRowBlock ? w.head_rows - r : kMaxRowBlock;
        const int row = h * w.head_rows + r;
        const char* const* rows_ahead = r == 0 ? next_rows : w.v->row + n;
        if constexpr (S::kKeyPairs) {
          pair_values(w, row, rows, n, head_offset, rows_ahead);
        } else if (all) {
          value_rows<T>(rows, w.s + row * kLeaf, w.v->row, head_offset, n, n + 16, w.p.head_dim_vo,
                        rows_ahead - n, w.leaf.o + row * w.leaf.o_stride, w.leaf.o_stride);
        } else {
          block_values<T>(w, row, rows, n, head_offset, rows_ahead);
        }
      }
    }
  }
}

ATTNFOLD_LANE_FN int clamp_key(int64_t key) {
  return key < 0 ? 0 : key > kLeaf ? kLeaf : static_cast<int>(key);
}

/** Keys of a request, seen from one leaf. */
ATTNFOLD_LANE_FN LeafKeys keys_in_leaf(int32_t sink, int32_t begin, int32_t end, int leaf) {
  const int64_t first = static_cast<int64_t>(leaf) * kLeaf;
  LeafKeys keys{clamp_key(sink - first), clamp_key(begin - first), clamp_key(end - first)};
  if (keys.begin >= keys.end) keys.begin = keys.end = keys.sink;
  return keys;
}

ATTNFOLD_LANE_FN LeafBits bits_in(const LeafKeys& keys) {
  return LeafBits::below(keys.sink) | LeafBits::between(keys.begin, keys.end);
}

/** What token `token` of a request with a mask sees of a leaf: of keys before the last mask_width
 * what `seen` says, of the others those whose bit is set. */
LeafBits masked_keys(const Lengths& lengths, int request, const RequestShape& shape, int token,
                     const VisibleKeys& seen, int leaf) {
  const int32_t tail = shape.kv_len - shape.mask_width;
  LeafBits bits = bits_in(keys_in_leaf(seen.sink < tail ? seen.sink : tail,
                                       seen.begin < tail ? seen.begin : tail, tail, leaf));
  const int64_t first = static_cast<int64_t>(leaf) * kLeaf - tail;  // bit of the leaf's key 0
  const int from = clamp_key(-first), to = clamp_key(shape.mask_width - first);
  const uint8_t* row =
      lengths.mask_bits + lengths.mask_indptr[request] + token * mask_row_bytes(shape.mask_width);
  for (int64_t byte = (first + from) / 8; byte * 8 < first + to; ++byte) {
    for (int b = 0; b < 8; ++b) {
      const int64_t n = byte * 8 + b - first;
      if (n >= from && n < to && (row[byte] >> b & 1)) bits.set_one(static_cast<int>(n));
    }
  }
  return bits;
}

/** Keys of a leaf that every query sees of the blocks, and those from `first_local` on. */
LeafBits block_keys(const HeadBlocks& blocks, int64_t first_local, int leaf) {
  const int64_t first = static_cast<int64_t>(leaf) * kLeaf;
  LeafBits bits{};
  for (int64_t key = first; key < first + kLeaf;) {
    const KeyStretch stretch = next_stretch(blocks, first_local, key);
    bits =
        bits | LeafBits::between(clamp_key(stretch.begin - first), clamp_key(stretch.end - first));
    key = stretch.end;
  }
  return bits;
}

template <class S>
UnitLeaf unit_leaf(const UnitWork<S>& w, int leaf) {
  UnitLeaf u{keys_in_leaf(w.unit.sink_keys, w.unit.key_begin, w.unit.key_end, leaf), false, {}};
  if (w.p.blocks.block_size == 0) return u;
  const int64_t first_local = first_local_key(w.p.blocks, w.tokens[0].position);
  const LeafBits keys = bits_in(u.keys);
  u.wanted = keys & block_keys(w.blocks, first_local, leaf);
  u.sparse = !(keys - u.wanted).empty();
  return u;
}

/** Fills w.seen, and w.bits if they are needed, with what each token sees of a leaf. */
template <class S>
void see_leaf(UnitWork<S>& w, int leaf, const UnitLeaf& keys) {
  const Lengths& lengths = *w.args.lengths;
  const RequestShape shape = request_shape(lengths, w.unit.request);
  const bool masked = w.unit.num_members == 0 && shape.mask_width > 0 &&
                      (static_cast<int64_t>(leaf) + 1) * kLeaf > shape.kv_len - shape.mask_width;
  LeafBits listed{};
  bool sparse = false;
  if (w.p.blocks.block_size > 0) {  // the last token has the fewest local blocks behind it
    const int64_t last = w.tokens[w.unit.num_qo - 1].position;
    listed = block_keys(w.blocks, kNoKey, leaf);
    sparse = !(bits_in(keys.keys) - block_keys(w.blocks, first_local_key(w.p.blocks, last), leaf))
                  .empty();
  }
  w.by_bits = masked || sparse;
  for (int t = 0; t < w.unit.num_qo; ++t) {
    const VisibleKeys& seen = w.tokens[t].keys;
    w.seen[t] = keys_in_leaf(seen.sink, seen.begin, seen.end, leaf);
    if (!w.by_bits) continue;
    w.bits[t] = masked
                    ? masked_keys(lengths, w.unit.request, shape, w.unit.qo_begin + t, seen, leaf)
                    : bits_in(w.seen[t]);
    if (sparse) {
      const int64_t local =
          first_local_key(w.p.blocks, w.tokens[t].position) - static_cast<int64_t>(leaf) * kLeaf;
      w.bits[t] = w.bits[t] & (listed | LeafBits::between(clamp_key(local), kLeaf));
    }
    w.seen[t] = w.bits[t].hull();
  }
}

template <class S>
ATTNFOLD_LANE_FN ScoreMod score_mod(const UnitWork<S>& w, int row) {
  const float* slopes = w.args.tensors.alibi_slopes;
  const int head =
      (w.unit.kv_head_begin + row / w.head_rows) * w.p.group_size + row % w.p.group_size;
  return {w.p.score_scale,
          w.p.score_scale_low,
          w.p.softcap_scale,
          w.p.softcap_log2,
          w.p.softcap != 0.0f,
          slopes != nullptr,
          slopes ? slopes[head] * kLog2E : 0.0f,
          w.args.tensors.k_scale.data ? w.k_scale : nullptr};
}

/** Scales of the leaf's keys under the kv head at `head_offset` bytes.  x + (x - x) is x, or NaN
 * where x is not finite. */
ATTNFOLD_LANE_FN void read_scales(const LeafRows& rows, const UnitLeaf& keys, int64_t head_offset,
                                  float* out) {
  for (int n = next_group(keys, 0); n < kLeaf; n = next_group(keys, n + 16)) {
    for (int i = n; i < n + 16; ++i) {
      float x;
      memcpy(&x, rows.row[i] + head_offset, sizeof(x));
      out[i] = x + (x - x);
    }
  }
}

template <class S>
void point_scales(const UnitWork<S>& w, int leaf, const UnitLeaf& keys) {
  const Tensors& t = w.args.tensors;
  const Lengths& lengths = *w.args.lengths;
  if (t.k_scale.data) {
    point_rows(w.p, lengths, t.k_scale, sizeof(float), w.unit.request, leaf, keys, w.k_scale_rows);
  }
  if (t.v_scale.data) {
    point_rows(w.p, lengths, t.v_scale, sizeof(float), w.unit.request, leaf, keys, w.v_scale_rows);
  }
}

/** Reads the scales of the unit's kv head h. */
template <class S>
void read_head_scales(const UnitWork<S>& w, int h, const UnitLeaf& keys) {
  const Tensors& t = w.args.tensors;
  const int64_t head_bytes = (w.unit.kv_head_begin + h) * static_cast<int64_t>(sizeof(float));
  if (t.k_scale.data)
    read_scales(*w.k_scale_rows, keys, head_bytes * t.k_scale.stride_head, w.k_scale);
  if (t.v_scale.data)
    read_scales(*w.v_scale_rows, keys, head_bytes * t.v_scale.stride_head, w.v_scale);
}

/** p of one row becomes p times the scale of the value, in groups of 16 keys that the row and the
 * unit see some of: of others there is no scale. */
ATTNFOLD_LANE_FN void scale_weights(float* p, const LeafKeys& keys, const UnitLeaf& leaf,
                                    const float* scale) {
  const UnitLeaf row{keys, false, {}};
  for (int n = next_group(row, 0); n < kLeaf; n = next_group(row, n + 16))
    if (meets(leaf, n)) store(p + n, mul(load(p + n), load(scale + n)));
}

/** Scores become weights; m and l. */
template <class S>
void leaf_weights(const UnitWork<S>& w, int leaf, const UnitLeaf& keys) {
  for (int r = 0; r < w.rows; ++r) {
    if (r % w.head_rows == 0) read_head_scales(w, r / w.head_rows, keys);
    const int token = r % w.head_rows / w.p.group_size;
    const LeafKeys& seen = w.seen[token];
    if (seen.sink == 0 && seen.begin == seen.end) {
      w.leaf.m[r] = -__builtin_inff();
      continue;
    }
    const float distance =
        static_cast<float>(static_cast<int64_t>(leaf) * kLeaf - w.tokens[token].position);
    float* s = w.s + static_cast<int64_t>(r) * kLeaf;
    if constexpr (S::kKeyPairs) {
      const bool whole = seen.begin == 0 && seen.end == kLeaf && !w.by_bits;
      if (whole && S::whole_leaf_weights(s, score_mod(w, r), w.leaf.m + r, w.leaf.l + r)) continue;
    }
    leaf_softmax(s, seen, w.by_bits ? &w.bits[token] : nullptr, score_mod(w, r), distance,
                 w.leaf.m + r, w.leaf.l + r);
    if (w.args.tensors.v_scale.data) scale_weights(s, seen, keys, w.v_scale);
    if constexpr (S::kKeyPairs) S::round_weights(s);
  }
}

/** Fills w.leaf with the state of every row on one leaf.  Its keys are pointed already; `next` is
 * the leaf after, or -1. */
template <DType T, class S, int kChunks>
void leaf_states(UnitWork<S>& w, int leaf, int next) {
  const Lengths& lengths = *w.args.lengths;
  const UnitLeaf keys = unit_leaf(w, leaf);
  UnitLeaf next_keys{};
  const int64_t bytes = dtype_bytes(w.p.kv_dtype);
  point_rows(w.p, lengths, w.args.tensors.v, bytes, w.unit.request, leaf, keys, w.v);
  point_scales(w, leaf, keys);
  if (next >= 0) {
    next_keys = unit_leaf(w, next);
    point_rows(w.p, lengths, w.args.tensors.k, bytes, w.unit.request, next, next_keys, w.next_k);
  }
  see_leaf(w, leaf, keys);
  if constexpr (S::kMatrix) {
    matrix_leaf(w, leaf, keys, next_keys);
  } else {
    leaf_scores<S, kChunks>(w, keys);
    leaf_weights(w, leaf, keys);
    leaf_values<T>(w, keys, next >= 0 ? &next_keys : nullptr);
  }
  LeafRows* used = w.k;
  w.k = w.next_k;
  w.next_k = used;
}

/** Folds a learned sink logit into a finished row: one more state, of mass 1 and no value. */
ATTNFOLD_LANE_FN void fold_sink(float logit, float* m, float* l, float* o, int64_t width) {
  const float m_sink = sink_log2(logit);
  const FoldStep step = fold_step(*m, m_sink);
  *l = fold_value(step, *l, 1.0f);
  if (!step.b_leads) return;
  *m = m_sink;
  const Lanes scale = splat(step.scale);
  for (int64_t i = 0; i < width; i += 16) store(o + i, mul(scale, load(o + i)));
}

template <DType T>
ATTNFOLD_LANE_FN void narrow_elements(const float* from, int n, void* out) {
  for (int i = 0; i < n; ++i) store_f32(out, T, i, from[i]);
}

/** n elements, each rounded once. */
ATTNFOLD_LANE_FN void narrow_row(const float* from, int n, void* out, DType type) {
  switch (type) {
    case DType::bf16: return narrow_elements<DType::bf16>(from, n, out);
    case DType::f16: return narrow_elements<DType::f16>(from, n, out);
    case DType::e4m3: return narrow_elements<DType::e4m3>(from, n, out);
    default: return narrow_elements<DType::f32>(from, n, out);
  }
}

/** Rows [begin, end) of the unit, finished: o = total.o / total.l in o's type, lse. */
void finish_rows(const RunArgs& args, const Unit& unit, const States& total, LaneOrder order,
                 int begin, int end) {
  const Problem& p = *args.problem;
  const View<char>& o = args.tensors.o;
  const int head_rows = unit.num_qo * p.group_size;
  for (int r = begin; r < end; ++r) {
    const int64_t head = (unit.kv_head_begin + r / head_rows) * static_cast<int64_t>(p.group_size) +
                         r % p.group_size;
    const int64_t row = static_cast<int64_t>(args.lengths->qo_indptr[unit.request]) +
                        unit.qo_begin + r % head_rows / p.group_size;
    const bool empty = total.m[r] == -__builtin_inff();
    char* out = o.data + (row * o.stride_token + head * o.stride_head) * dtype_bytes(p.o_dtype);
    float* acc = total.o + r * total.o_stride;
    const float sink =
        args.tensors.sink_logits ? args.tensors.sink_logits[head] : -__builtin_inff();
    const bool has_sink = sink != -__builtin_inff();
    if (has_sink && !empty) fold_sink(sink, total.m + r, total.l + r, acc, total.o_stride);
    const Lanes divisor = splat(empty ? 1.0f : divisor_of(total.l[r]));
    for (int64_t i = 0; i < total.o_stride; i += 16) {
      store(acc + i, empty ? splat(0.0f) : divide(load(acc + i), divisor));
    }
    if (args.tensors.o_scale) {
      const Lanes o_scale = splat(*args.tensors.o_scale);
      for (int64_t i = 0; i < total.o_stride; i += 16)
        store(acc + i, divide(load(acc + i), o_scale));
    }
    for (int d = 0; d < p.head_dim_vo; d += kChunk) {
      const int n = p.head_dim_vo - d < kChunk ? p.head_dim_vo - d : kChunk;
#ifdef ATTNFOLD_STORES_BF16
      if (p.o_dtype == DType::bf16 && order == LaneOrder::halves && n == kChunk) {
        store_bf16(load(acc + d), load(acc + d + 16), out + d * 2);
        continue;
      }
#endif
      float chunk[kChunk];
      for (int e = 0; e < kChunk; ++e) chunk[e] = acc[d + lane_of(order, e)];
      narrow_row(chunk, n, out + d * dtype_bytes(p.o_dtype), p.o_dtype);
    }
    if (args.tensors.lse) {
      args.tensors.lse[row * args.tensors.lse_stride_row + head * args.tensors.lse_stride_head] =
          empty || is_all_sink(sink) ? sink : lse_of(total.m[r], total.l[r]);
    }
  }
}
