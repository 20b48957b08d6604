// Three blocks of rows at once on AMX tiles: of one the scores, of one the weights, of one the
// values.  Included inside the AMX namespace, after amx_tile.inl.
//
// A processor looks ahead by some hundred instructions: it overlaps tiles and vectors only where
// they alternate in the program; and at times, on a shared machine, tile instructions that follow
// each other closely take more than twice as long.  Of a block of 32 rows and 128 keys, head dim
// 128, with weights rounded to bf16:
//   tiles     128 products of 16 cycles, as many loads, 32 stores
//   vectors   256 of weights, 16.5 operations each on two ports; 256 of a fold, 3; 256 of a maximum
// So a product or a load comes after each quarter of the work on 4 vectors of weights, with 4 of a
// fold or 8 of a maximum.  Blocks that are ahead of each other by one take part, as weights need
// all scores of a leaf, and values all weights; their leaves may differ.  Scores of 32 keys are
// stored where weights have read those of the block before.
//
// Only blocks whose rows see all keys of a leaf come here, with finite values.

/** What lanes do while tiles multiply: weights of a block, the fold of elements of another, the
 * largest scores of a third. */
template <int kParts>
struct LaneWork {
  using Tiles = ValueTiles<kParts>;
  static constexpr int kGroupSteps = kTileVecs * 8;  // of weights of 32 keys

  // Weights, straight into B tiles.
  const float* s = nullptr;
  char* p = nullptr;
  Lanes scale, scale_low, minus_m[kTileVecs];
  int weights_at = 0, weights_end = 0;
  // Fold.
  float *o, *next_o;  // of the tiles at hand, of the next
  Lanes fold_scale[kTileVecs];
  __mmask16 b_leads[kTileVecs];
  bool put;  // and no fold
  int fold_at = 0, fold_end = 0;
  // Largest scores.
  const float* scores = nullptr;
  int max_at = 0, max_end = 0;
  Lanes max[kTileVecs][2];
  Ahead* ahead;
  float (*sums)[16][16];
  const Tiles* tiles;

  /** Weights of four vectors by exp2_of_differences, in quarters: before each of them comes
   * next(0) .. next(3). */
  template <class Next>
  __attribute__((always_inline)) void take_weights(Next next) {
    const unsigned step = static_cast<unsigned>(weights_at), group = step / kGroupSteps,
                   vec = step / 8 % kTileVecs, i = step % 8 * 2;
    const float* at = s + (group * 32 + i) * kTileRows + vec * 16;
    const Lanes shift = splat(0x1.8p23f), minus = minus_m[vec];
    Lanes x[4], n[4], y[4];
    __mmask16 keep[4];
#define ATTNFOLD_FOR_FOUR(statement) _Pragma("GCC unroll 4") for (int j = 0; j < 4; ++j) statement
    next(0);
    ATTNFOLD_FOR_FOUR(x[j] = load(at + (j / 2 * 16 + j % 2) * kTileRows));
    ATTNFOLD_FOR_FOUR(x[j] = fma(x[j], scale, fma(x[j], scale_low, minus)));
    ATTNFOLD_FOR_FOUR(n[j] = add(x[j], shift));
    ATTNFOLD_FOR_FOUR(n[j] = sub(n[j], shift));
    next(1);
    ATTNFOLD_FOR_FOUR(keep[j] = _mm512_cmp_ps_mask(x[j].v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ));
    ATTNFOLD_FOR_FOUR(x[j] = sub(x[j], n[j]));
    ATTNFOLD_FOR_FOUR(y[j] = fma(splat(1.53264627e-4f), x[j], splat(1.33908063e-3f)));
    ATTNFOLD_FOR_FOUR(y[j] = fma(y[j], x[j], splat(9.61850584e-3f)));
    next(2);
    ATTNFOLD_FOR_FOUR(y[j] = fma(y[j], x[j], splat(5.55035993e-2f)));
    ATTNFOLD_FOR_FOUR(y[j] = fma(y[j], x[j], splat(2.40226477e-1f)));
    ATTNFOLD_FOR_FOUR(y[j] = fma(y[j], x[j], splat(6.93147182e-1f)));
    next(3);
    ATTNFOLD_FOR_FOUR(y[j] = fma(y[j], x[j], splat(1.0f)));
    ATTNFOLD_FOR_FOUR(x[j].v = _mm512_maskz_scalef_ps(keep[j], y[j].v, n[j].v));
#undef ATTNFOLD_FOR_FOUR
    float* sum = sums[vec][i];
    store(sum, add(add(load(sum), x[0]), x[2]));
    store(sum + 16, add(add(load(sum + 16), x[1]), x[3]));
    char* to = p + step / 8 * 1024 + i / 2 * 64;
    store_weights<kParts>(x[0], x[1], to);
    store_weights<kParts>(x[2], x[3], to + 8 * 64);
    if (++weights_at % 4 != 0) return;
    ask_ahead(ahead);
    ask_ahead(ahead + 1);
  }
  void finish_weights() {
    while (weights_at < weights_end) take_weights([](int) {});
  }
  __attribute__((always_inline)) void take_fold() {
    float* to = o + fold_at * 16;
    const float* from = tiles->o[0] + fold_at * 16;
    const auto joined = [&](int i) __attribute__((always_inline)) {
      Lanes sum = load(from + i * 16);
      constexpr int kPart = Tiles::kDims * kTileRows;
      if constexpr (kParts == 3)
        sum = add(sum, add(load(from + kPart + i * 16), load(from + 2 * kPart + i * 16)));
      return sum;
    };
    fold_at += 4;
    if (put) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) store(to + i * 16, joined(i));
      return;
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512 x = load(to + i * 16).v, y = joined(i).v;
      const __m512 lesser = _mm512_mask_mov_ps(y, b_leads[i % kTileVecs], x);
      const __m512 larger = _mm512_mask_mov_ps(x, b_leads[i % kTileVecs], y);
      store(to + i * 16, {_mm512_fmadd_ps(fold_scale[i % kTileVecs].v, lesser, larger)});
    }
  }
  __attribute__((always_inline)) void take_max() {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      Lanes& largest = max[i % 2][i / 2 % 2];
      largest = max_keep_nan(load(scores + (max_at + i) * 16), largest);
    }
    max_at += 8;
  }
  /** A step of each, beside the tile instructions of tiles_next(0) .. tiles_next(3). */
  template <class Next>
  __attribute__((always_inline)) void step(Next tiles_next) {
    const auto next = [&](int i) __attribute__((always_inline)) {
      if (i % 2 == 1 && fold_at < fold_end) take_fold();
      if (i == 2 && max_at < max_end) take_max();
      tiles_next(i);
    };
    if (weights_at < weights_end) {
      take_weights(next);
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) next(i);
    }
  }
};

/** What is at hand of three blocks; `lanes` has the weights, and what is done with the others'
 * scores and values. */
template <int kParts>
struct Stages {
  const uint32_t* q = nullptr;  // null: no scores
  const KeyTile* k;
  int depth;
  float* s;
  const char *v = nullptr, *p;  // null: no values
  float* o_tiles;               // where o goes as tiles leave it, or null
  int64_t o_stride;
  LaneWork<kParts> lanes;
};

template <int kParts>
__attribute__((noinline)) void run_stages(const Stages<kParts>& at, BlockMax* largest) {
  using Tiles = ValueTiles<kParts>;
  constexpr int64_t kStride = kTileRows * sizeof(float);
  constexpr int kFoldVecs = Tiles::kDims * kTileVecs;
  alignas(64) Tiles tiles;
  LaneWork<kParts> lanes = at.lanes;
  lanes.tiles = &tiles;
  const int units = at.v != nullptr ? static_cast<int>(at.o_stride) / Tiles::kDims : 0;
  const auto value_at = [&](int u) __attribute__((always_inline)) {
    const int d = u * Tiles::kDims;
    return at.v + d / kChunk * 8192 + d % kChunk / 16 * 4096;
  };
  const auto load_values = [&](int u) __attribute__((always_inline)) {
    Tiles::load_first(value_at(u), at.p);
  };
  const auto load_scores = [&](int g) __attribute__((always_inline)) {
    tile_load_once<4>(at.k[2 * g].data, at.k[2 * g].stride);
    tile_load<6>(at.q, kStride);
    tile_load<7>(at.q + 16, kStride);
    tile_load_once<5>(at.k[2 * g + 1].data, at.k[2 * g + 1].stride);
  };
  if (at.q == nullptr ? units > 0 : units >= 4) {
    load_values(0);
  } else if (at.q != nullptr) {
    load_scores(0);
  }
  for (int g = 0; g < 4; ++g) {
    if (lanes.p != nullptr) lanes.weights_end += LaneWork<kParts>::kGroupSteps;
    if (at.q != nullptr && g > 0) lanes.max_end += 32 * kTileVecs;
    const int begin = units * g / 4, end = units * (g + 1) / 4;
    for (int u = begin; u < end; ++u) {
      const char *v = value_at(u), *p = at.p;
      tile_zero<0>();
      tile_zero<1>();
      tile_zero<2>();
      tile_zero<3>();
      if constexpr (kParts == 3) {
        tile_zero<4>();
        tile_zero<5>();
      }
#pragma GCC unroll 1
      for (int n = 0; n < 4; ++n, p += kTileVecs * 1024) {
        const bool more = n < 3;
        const auto next_unit = [&]() __attribute__((always_inline)) {
          if (u + 1 < end) {
            load_values(u + 1);
          } else if (at.q != nullptr) {
            if (kParts == 1) load_scores(g);  // else these are accumulators
          } else if (u + 1 < units) {
            load_values(u + 1);
          }
        };
        if constexpr (kParts == 1) {
          lanes.step([&](int i) __attribute__((always_inline)) {
            if (i == 0) tile_multiply<0, 6, 7>();
            if (i == 1) tile_multiply<1, 6, 4>();
            if (i == 2 && more) tile_load_once<6>(v + (n + 1) * 1024, 64);
            if (i == 3) tile_multiply<2, 5, 7>();
          });
          lanes.step([&](int i) __attribute__((always_inline)) {
            if (i == 0 && more) tile_load<7>(p + kTileVecs * 1024, 64);
            if (i == 1) tile_multiply<3, 5, 4>();
            if (i == 2 && more) tile_load<4>(p + kTileVecs * 1024 + 1024, 64);
            if (i == 3 && more) tile_load_once<5>(v + 4096 + (n + 1) * 1024, 64);
            if (i == 3 && !more) next_unit();
          });
        } else {
          lanes.step([&](int i) __attribute__((always_inline)) {
            if (i == 0) {
              tile_multiply<0, 6, 7>();
              tile_load<7>(p + 1024, 64);
            } else if (i == 1) {
              tile_multiply<1, 6, 7>();
              tile_load<7>(p + kWeightBytes, 64);
              tile_multiply<2, 6, 7>();
              tile_load<7>(p + kWeightBytes + 1024, 64);
            } else if (i == 2) {
              tile_multiply<3, 6, 7>();
              tile_load<7>(p + 2 * kWeightBytes, 64);
              tile_multiply<4, 6, 7>();
              tile_load<7>(p + 2 * kWeightBytes + 1024, 64);
            } else {
              tile_multiply<5, 6, 7>();
              if (more) Tiles::load_first(v + (n + 1) * 1024, p + kTileVecs * 1024);
              if (!more) next_unit();
            }
          });
        }
      }
      while (lanes.fold_at < lanes.fold_end) lanes.take_fold();
      if (kParts == 1 && at.o_tiles != nullptr) {
        Tiles::stores(reinterpret_cast<Tiles*>(at.o_tiles + u * kFoldVecs * 16));
      } else {
        Tiles::stores(&tiles);
        lanes.fold_at = 0;
        lanes.fold_end = kFoldVecs;
        lanes.o = lanes.next_o;
        lanes.next_o += kFoldVecs * 16;
      }
    }
    if (at.q == nullptr) {
      lanes.finish_weights();
      continue;
    }
    if (kParts == 3 && end > begin) load_scores(g);
    const KeyTile a = at.k[2 * g], b = at.k[2 * g + 1];
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
#pragma GCC unroll 1
    for (int d = 0; d < at.depth; d += 16) {
      const bool more = d + 16 < at.depth;
      lanes.step([&](int i) __attribute__((always_inline)) {
        if (i == 0) tile_multiply<0, 4, 6>();
        if (i == 1) tile_multiply<1, 4, 7>();
        if (i == 2 && more) tile_load_once<4>(a.data + (d + 16) * 4, a.stride);
        if (i == 3) tile_multiply<2, 5, 6>();
      });
      lanes.step([&](int i) __attribute__((always_inline)) {
        if (i == 0 && more) tile_load<6>(at.q + (d + 16) * kTileRows, kStride);
        if (i == 1) tile_multiply<3, 5, 7>();
        if (i == 2 && more) tile_load<7>(at.q + (d + 16) * kTileRows + 16, kStride);
        if (i != 3) return;
        if (more) {
          tile_load_once<5>(b.data + (d + 16) * 4, b.stride);
        } else if (units * (g + 2) / 4 > end && g < 3) {
          load_values(end);
        } else if (g < 3) {
          load_scores(g + 1);
        }
      });
    }
    lanes.finish_weights();
    float* s = at.s + g * 32 * kTileRows;
    tile_store<0>(s, kStride);
    tile_store<1>(s + 16, kStride);
    tile_store<2>(s + 16 * kTileRows, kStride);
    tile_store<3>(s + 16 * kTileRows + 16, kStride);
  }
  while (lanes.fold_at < lanes.fold_end) lanes.take_fold();
  if (at.q == nullptr) return;
  lanes.max_end += 32 * kTileVecs;
  while (lanes.max_at < lanes.max_end) lanes.take_max();
  for (int i = 0; i < kTileVecs; ++i)
    for (int j = 0; j < 2; ++j) largest->of[i][j] = lanes.max[i][j];
}
