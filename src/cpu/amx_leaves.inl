// A unit's leaves, block by block, on AMX tiles.  Included inside the AMX namespace, after
// amx_stages.inl.
//
// Where all rows see all keys of a leaf, blocks run three at a time (amx_stages.inl).  Other
// leaves, those with Inf or NaN among their values, and units of one or two blocks: scores of a
// block, then its weights while tiles multiply the values of the block before.

/** Leaves of one super-chunk of a unit.  A block meets the next ones while they belong to the leaf
 * after, too; scores are in L1 still when they become weights. */
template <class S>
class TileLeaves {
 public:
  TileLeaves(UnitWork<S>& work, TileWork<S>& tile_work)
      : w(work), tile(tile_work), halves{tile_work, tile_work}, mod(score_mod(work, 0)) {
    float** const places[] = {&halves[1].begin, &halves[1].end, &halves[1].sink, &halves[1].leaf.m,
                              &halves[1].leaf.l};
    for (int i = 0; i < 5; ++i) *places[i] = others[i];
  }

  /** One leaf; meanwhile the lines of leaf `next` are prefetched, or of none if it is -1. */
  void take(int leaf, int next);

  /** The blocks that wait. */
  void finish() {
    drain();
    if (waiting >= 0) add_block([] {});
    waiting = -1;
  }

 private:
  static constexpr int kParts = S::kWeightParts;
  using Weights = BlockWeights<kParts, S>;

  /** Values of the block that waits into its chunk. */
  template <class Meanwhile>
  void add_block(Meanwhile meanwhile) {
    const int at = 1 - now;
    const TileStates& leaf = halves[at].leaf;
    const int64_t o_stride = w.leaf.o_stride;
    const char* v = reinterpret_cast<const char*>(tile.v);
    const TileStates chunk = block_of(tile.chunk, waiting, o_stride);
    const auto add_special = [&](float* o) {
      if (special) add_block_special(w, halves[at], seen[at], v_offset(), waiting, o);
    };
    if (is_first) {
      memcpy(chunk.m, leaf.m, kTileRows * sizeof(float));
      memcpy(chunk.l, leaf.l, kTileRows * sizeof(float));
      put_block_values<kParts>(v, p[at], seen[at], o_stride, chunk.o, meanwhile);
      add_special(chunk.o);
    } else if (special || has_empty_rows(chunk, leaf)) {
      put_block_values<kParts>(v, p[at], seen[at], o_stride, leaf.o, meanwhile);
      add_special(leaf.o);
      fold_block(chunk, leaf, o_stride);
    } else {
      fold_block_values<kParts>(v, p[at], seen[at], o_stride, chunk, leaf, meanwhile);
    }
  }
  int64_t v_offset() const {
    return w.unit.kv_head_begin * w.args.tensors.v.stride_head * dtype_bytes(S::kKeys);
  }

  static constexpr int kLeastBlocks = 3;  // so that values are packed while their leaf is at hand
  /** A block of a leaf that every row sees whole. */
  struct Flight {
    int block = -1, leaf = 0;
    bool first = false;
  };
  bool advance(const KeyTile* k, Flight next);
  void drain() {
    while (scored.block >= 0 || weighted.block >= 0) advance(nullptr, Flight{});
  }
  bool pack_leaf(int leaf);

  Flight scored, weighted;  // scores are in tile.s, weights in p[1 - now]
  BlockMax scored_max;
  int packed_leaf = -1;  // whose V^T there is

  UnitWork<S>& w;
  TileWork<S>& tile;
  TileWork<S> halves[2];  // of the block at hand, halves[now], and of the one that waits
  const ScoreMod mod;
  TileKeys seen[2];
  int now = 0, waiting = -1;
  bool is_first = false, special = false;  // the leaf of the block that waits
  Ahead ahead[2]{};
  alignas(64) float others[5][kTileRows];
  alignas(64) char p[2][kParts * kWeightBytes];
};

/** V^T of a leaf that is seen whole; false if some values are Inf or NaN. */
template <class S>
bool TileLeaves<S>::pack_leaf(int leaf) {
  const Tensors& t = w.args.tensors;
  point_rows(w.p, *w.args.lengths, t.v, dtype_bytes(S::kKeys), w.unit.request, leaf,
             unit_leaf(w, leaf), w.v);
  packed_leaf = leaf;
  return !pack_matrix_values(*w.v, v_offset(), 0, kLeaf, w.p.head_dim_vo,
                             reinterpret_cast<char*>(tile.v));
}

/** A step of the pipeline: scores of `next`, weights of the block before, values of the one before
 * that.  False if the leaf of the last has Inf or NaN among its values: then nothing is done. */
template <class S>
bool TileLeaves<S>::advance(const KeyTile* k, Flight next) {
  const int64_t o_stride = w.leaf.o_stride;
  Stages<kParts> at;
  LaneWork<kParts>& lanes = at.lanes;
  alignas(64) float sums[kTileVecs][16][16];
  lanes.sums = sums;
  lanes.ahead = ahead;
  at.depth = S::tile_depth(w.q_stride);
  at.s = tile.s;
  at.o_stride = o_stride;
  at.o_tiles = nullptr;
  lanes.put = false;
  if (weighted.block >= 0) {
    if (packed_leaf != weighted.leaf && !pack_leaf(weighted.leaf)) return false;
    const TileStates chunk = block_of(tile.chunk, weighted.block, o_stride);
    const TileStates& leaf = halves[1 - now].leaf;
    const char* v = reinterpret_cast<const char*>(tile.v);
    if (weighted.first) {
      memcpy(chunk.m, leaf.m, kTileRows * sizeof(float));
      memcpy(chunk.l, leaf.l, kTileRows * sizeof(float));
      lanes.put = true;
      if (kParts == 1) at.o_tiles = chunk.o;
    } else if (has_empty_rows(chunk, leaf)) {
      put_block_values<kParts>(v, p[1 - now], {0, kLeaf, 0, kLeaf}, o_stride, leaf.o, [] {});
      fold_block(chunk, leaf, o_stride);
      v = nullptr;
    } else {
      begin_fold(chunk, leaf, lanes.fold_scale, lanes.b_leads);
    }
    at.v = v;
    at.p = p[1 - now];
    lanes.next_o = chunk.o;
  }
  TileWork<S>& made = halves[now];
  if (scored.block >= 0) {
    const TileKeys all{0, kLeaf, 0, kLeaf};
    memset(made.leaf.m, 0, kTileRows * sizeof(float));
    Weights weights(made, all, mod, scored_max, false, ahead, p[now]);
    if (weights.exact[0] && weights.exact[1]) {
      lanes.s = tile.s;
      lanes.p = p[now];
      lanes.scale = splat(mod.scale);
      lanes.scale_low = splat(mod.scale_low);
      memset(sums, 0, sizeof(sums));
      for (int i = 0; i < kTileVecs; ++i) {
        const Lanes m = max_keep_nan(weights.max[i], splat(kLowest));
        lanes.minus_m[i] = sub(splat(0.0f), m);
        store(made.leaf.m + i * 16, m);
      }
    } else {
      weights.finish();
    }
  }
  if (next.block >= 0) {
    at.q = tile.q + next.block * tile.block_q;
    at.k = k;
    lanes.scores = tile.s;
    for (int i = 0; i < kTileVecs; ++i) lanes.max[i][0] = lanes.max[i][1] = splat(kLowest);
  }
  run_stages<kParts>(at, &scored_max);
  if (lanes.p != nullptr) {
    for (int i = 0; i < kTileVecs; ++i) store(made.leaf.l + i * 16, sum_of_chains(sums[i]));
  }
  weighted = scored;
  scored = next;
  now = 1 - now;
  return true;
}

template <class S>
void TileLeaves<S>::take(int leaf, int next) {
  const Lengths& lengths = *w.args.lengths;
  const Tensors& t = w.args.tensors;
  const UnitLeaf keys = unit_leaf(w, leaf);
  const int64_t bytes = dtype_bytes(S::kKeys);
  point_rows(w.p, lengths, t.k, bytes, w.unit.request, leaf, keys, w.k);
  see_leaf(w, leaf, keys);
  ahead[0] = ahead[1] = Ahead{};
  if (next >= 0) {
    LeafRows *next_k = w.next_k, *next_v = w.k_scale_rows;  // there are no scales here
    const UnitLeaf next_keys = unit_leaf(w, next);
    const LeafHull hull = hull_of(next_keys);
    point_rows(w.p, lengths, t.k, bytes, w.unit.request, next, next_keys, next_k);
    point_rows(w.p, lengths, t.v, bytes, w.unit.request, next, next_keys, next_v);
    const int shares = tile.num_blocks * Weights::kSteps;
    ahead[0] = look_at(w, *next_k, hull, t.k, w.p.head_dim_qk, shares);
    ahead[1] = look_at(w, *next_v, hull, t.v, w.p.head_dim_vo, shares);
  }
  const LeafHull hull = hull_of(keys);
  const int64_t row_bytes = int64_t{w.q_stride} * 2;
  KeyTile k[kLeaf / 16];
  for (int n = hull.begin; n < hull.end; n += 16) {
    const char* const* rows = w.k->row + n;
    k[n / 16] = key_tile(rows, even_stride(rows, w.p.head_dim_qk),
                         w.unit.kv_head_begin * t.k.stride_head * bytes, w.p.head_dim_qk, row_bytes,
                         tile.k + n * row_bytes);
  }
  const bool all = all_see_all(w), first_of_chunk = tile.chunk.empty;
  if (all && tile.num_blocks >= kLeastBlocks) {
    if (waiting >= 0) finish();
    int block = 0;
    while (block < tile.num_blocks && advance(k, {block, leaf, first_of_chunk})) ++block;
    if (block == tile.num_blocks) {
      tile.chunk.empty = false;
      return;
    }
    scored = weighted = Flight{};  // values of this leaf are Inf or NaN
  } else {
    drain();
  }
  packed_leaf = -1;
  bool packed = false;
  for (int block = 0; block < tile.num_blocks; ++block) {
    TileWork<S>& at = halves[now];
    TileKeys& keys_seen = seen[now];
    if (all) {
      keys_seen = {0, kLeaf, 0, kLeaf};
      memset(at.leaf.m, 0, kTileRows * sizeof(float));
    } else {
      keys_seen = see_block(w, at, block, at.leaf.m);
    }
    if (keys_seen.begin == keys_seen.end) {
      if (first_of_chunk)
        memcpy(tile.chunk.m + block * kTileRows, at.leaf.m, kTileRows * sizeof(float));
      continue;
    }
    BlockMax largest;
    largest.clear();
    const uint32_t* q = tile.q + block * tile.block_q;
    matrix_tile_scores(q, k, S::tile_depth(w.q_stride), keys_seen.begin, keys_seen.end, at.s,
                       [&](int n) {
                         const int end = n + 32 < keys_seen.end ? n + 32 : keys_seen.end;
                         see_scores(at, keys_seen, n, end, &largest);
                       });
    Weights weights(at, keys_seen, mod, largest, packed && special, ahead, p[now]);
    if (waiting >= 0) {
      add_block([&] {
        if (weights.done < Weights::kSteps) weights.step();
      });
    }
    if (!packed) {  // now that no block of the leaf before needs its V^T
      point_rows(w.p, lengths, t.v, bytes, w.unit.request, leaf, keys, w.v);
      special = pack_matrix_values(*w.v, v_offset(), hull.begin, hull.end, w.p.head_dim_vo,
                                   reinterpret_cast<char*>(tile.v));
      is_first = first_of_chunk;
      packed = true;
      if (special) weights.begin_anew(true);
    }
    weights.finish();
    waiting = block;
    now = 1 - now;
    if (special) finish();  // its weights are where the scores of the next go
  }
  tile.chunk.empty = false;
}

/** Leaves [begin, end) of a unit's, all of one super-chunk, into tile.chunk; `last` is the end of
 * those to come. */
template <class S>
__attribute__((noinline)) void matrix_tile_leaves(UnitWork<S>& w, TileWork<S>& tile, int begin,
                                                  int end, int last) {
  TileShapes::all(16, 64).configure();
  TileLeaves<S> leaves(w, tile);
  for (int at = begin; at < end; ++at)
    leaves.take(leaf_at(w.unit, at), at + 1 < last ? leaf_at(w.unit, at + 1) : -1);
  leaves.finish();
}
