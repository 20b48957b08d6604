// Draws the shape of a call: every axis that the engine serves, edges more often than chance would.
#include <algorithm>
#include <cmath>
#include <iterator>

#include "check/generate.h"

namespace attnfold::check {
namespace {

constexpr int64_t kMaxProducts = 20'000'000;  // of elements of q and k, and of weights and v
constexpr int64_t kMaxElements = 6'000'000;   // of k and v together
constexpr int32_t kSuperChunkKeys = ATTNFOLD_LEAF * ATTNFOLD_SUPER_CHUNK;

/** A choice of uint64 `rng` alone, so that every standard library draws the same. */
class Dice {
 public:
  explicit Dice(std::mt19937_64& rng) : rng_(rng) {}
  int32_t between(int32_t low, int32_t high) {  // both included
    return low + static_cast<int32_t>(rng_() % (static_cast<uint64_t>(high - low) + 1));
  }
  bool one_in(int32_t n) { return between(1, n) == 1; }
  template <typename T, size_t n>
  T of(const T (&values)[n]) {
    return values[between(0, static_cast<int32_t>(n) - 1)];
  }

 private:
  std::mt19937_64& rng_;
};

constexpr int32_t kHeadDims[] = {8, 16, 24, 32, 40, 64, 64, 64, 72, 80, 96, 128, 128, 192, 256};
constexpr int32_t kWideHeadDims[] = {288, 512, 568, 576};
constexpr int32_t kGroups[] = {1, 1, 2, 3, 4, 4, 5, 7, 8, 9, 16, 17};
constexpr int32_t kPageSizes[] = {1, 2, 3, 5, 16, 16, 17, 32, 64, 96, 128, 129, 256};
constexpr int32_t kWindows[] = {0, 1, 7, 15, 16, 63, 127, 128, 129, 300, 2048};
constexpr int32_t kSinkTokens[] = {1, 4, 16, 127, 128, 129, 300};
constexpr int32_t kChunks[] = {1, 16, 100, 128, 1000};
constexpr float kSoftcaps[] = {5.0f, 30.0f, 50.0f};
constexpr attnfold_dtype kDtypes[] = {ATTNFOLD_F32, ATTNFOLD_F16, ATTNFOLD_BF16};
constexpr attnfold_dtype kByteDtypes[] = {ATTNFOLD_E4M3, ATTNFOLD_E5M2, ATTNFOLD_I8};
constexpr attnfold_scale_kind kScaleKinds[] = {
    ATTNFOLD_SCALE_PER_TENSOR, ATTNFOLD_SCALE_PER_HEAD, ATTNFOLD_SCALE_PER_TOKEN};

void draw_problem(Dice& dice, attnfold_problem* p) {
  p->kv_heads = dice.between(1, 4);
  p->qo_heads = p->kv_heads * dice.of(kGroups);
  p->head_dim_qk = dice.one_in(12) ? dice.of(kWideHeadDims) : dice.of(kHeadDims);
  p->head_dim_vo = dice.one_in(4) ? dice.of(kHeadDims) : p->head_dim_qk;
  p->kv_dtype = dice.of(kDtypes);
  p->q_dtype = dice.one_in(4) ? dice.of(kDtypes) : p->kv_dtype;
  p->o_dtype = dice.one_in(4) ? ATTNFOLD_F32 : p->q_dtype;
  p->kv_storage = dice.one_in(5) ? ATTNFOLD_KV_RAGGED : ATTNFOLD_KV_PAGED;
  p->kv_layout = dice.one_in(2) ? ATTNFOLD_HND : ATTNFOLD_NHD;
  p->page_size = dice.of(kPageSizes);
  p->mask = dice.one_in(3) ? ATTNFOLD_MASK_NONE : ATTNFOLD_MASK_CAUSAL;
  p->window_left = dice.one_in(3) ? dice.of(kWindows) : -1;
  p->window_right = dice.one_in(5) ? dice.of(kWindows) : -1;
  if (dice.one_in(6)) p->sink_tokens = dice.of(kSinkTokens);
  if (dice.one_in(8)) p->attention_chunk = dice.of(kChunks);
  if (dice.one_in(6)) p->logits_softcap = dice.of(kSoftcaps);
  if (dice.one_in(4)) {
    static constexpr float kScales[] = {0.0f, 0.01f, 0.125f, 1.0f, 1.7f};
    p->sm_scale = dice.of(kScales);
  }
}

/** Storage: 8-bit keys, scales, values inside the keys, a quantised o. */
void draw_formats(Dice& dice, Spec* spec) {
  attnfold_problem& p = spec->problem;
  if (dice.one_in(3)) p.kv_dtype = dice.of(kByteDtypes);
  if (is_8_bit(static_cast<DType>(p.kv_dtype)) || dice.one_in(10)) {
    p.k_scale_kind = dice.of(kScaleKinds);
    p.v_scale_kind = dice.of(kScaleKinds);
  }
  if (p.head_dim_vo <= p.head_dim_qk && dice.one_in(8)) p.v_in_k = 1;
  if (dice.one_in(8)) {
    p.o_dtype = ATTNFOLD_E4M3;
    spec->o_scale = dice.one_in(3) ? 0.001f : 0.01f * spec->v_range;  // the first saturates
  }
}

int32_t draw_kv_len(Dice& dice) {
  switch (dice.between(0, 9)) {
    case 0: return dice.between(0, 3);
    case 1: return dice.between(1, 4) * ATTNFOLD_LEAF + dice.between(-1, 1);
    case 2: return kSuperChunkKeys + dice.between(-1, 1);
    case 3: return dice.between(0, 3 * kSuperChunkKeys);
    case 4: return 4 * kSuperChunkKeys + dice.between(1, 1000);
    default: return dice.between(1, 700);
  }
}

int32_t draw_qo_len(Dice& dice, int32_t kv_len) {
  switch (dice.between(0, 9)) {
    case 0: return 0;
    case 1: return dice.between(2, 8);     // speculative verification
    case 2: return std::min(kv_len, 200);  // the end of a prompt, or all of it
    case 3: return dice.between(1, std::max(1, std::min(kv_len, 150)));
    case 4: return std::min(kv_len, 40) + dice.between(1, 5);  // more queries than keys, if short
    default: return 1;
  }
}

void draw_block_mask(Dice& dice, attnfold_problem* p) {
  static constexpr int32_t kBlockSizes[] = {1, 7, 16, 64, 64, 100, 128, 192, 1000};
  p->sparse_block_size = dice.of(kBlockSizes);
  if (dice.one_in(2)) return;  // lists
  p->sparse_local_blocks = dice.between(0, 4);
  p->sparse_vertical_stride = dice.between(p->sparse_local_blocks > 0 ? 0 : 1, 9);
  if (p->sparse_vertical_stride > 0) p->sparse_head_step = dice.between(0, 3);
}

void draw_mask_width(Dice& dice, Spec* spec) {
  static constexpr MaskBits kKinds[] = {MaskBits::random, MaskBits::tree, MaskBits::causal};
  spec->mask_bits = dice.of(kKinds);
  for (size_t r = 0; r < spec->kv_len.size(); ++r) {
    const int32_t least = std::min(spec->qo_len[r], spec->kv_len[r]);
    const int32_t most = dice.one_in(3) ? spec->kv_len[r] : std::min(spec->kv_len[r], least + 70);
    spec->mask_width.push_back(dice.one_in(4) ? 0 : dice.between(least, most));
    if (!spec->visible_prefix.empty()) {
      const int32_t rest = spec->kv_len[r] - spec->mask_width[r];
      spec->visible_prefix[r] = std::min(spec->visible_prefix[r], rest);
    }
  }
}

void draw_visible_prefix(Dice& dice, Spec* spec) {
  for (int32_t n : spec->kv_len) {
    const int32_t most = dice.one_in(3) ? n : std::min(n, 300);
    spec->visible_prefix.push_back(dice.one_in(4) ? 0 : dice.between(0, most));
  }
}

}  // namespace

Spec random_spec(std::mt19937_64& rng) {
  Dice dice(rng);
  Spec spec;
  attnfold_problem& p = spec.problem;
  draw_problem(dice, &p);
  const int64_t key_elements = int64_t{p.kv_heads} * (p.head_dim_qk + p.head_dim_vo);
  const int64_t pair_products = int64_t{p.qo_heads} * (p.head_dim_qk + p.head_dim_vo);
  const int32_t batch = dice.one_in(20) ? 0 : dice.between(1, 8);
  int64_t elements = 0, products = 0;
  for (int32_t r = 0; r < batch; ++r) {
    int32_t kv_len = draw_kv_len(dice);
    int32_t qo_len = draw_qo_len(dice, kv_len);
    const auto too_much = [&] {
      return elements + kv_len * key_elements > kMaxElements ||
             products + int64_t{qo_len} * kv_len * pair_products > kMaxProducts;
    };
    while (too_much() && qo_len > 1) qo_len /= 2;
    while (too_much() && kv_len > 1) kv_len /= 2;
    elements += kv_len * key_elements;
    products += int64_t{qo_len} * kv_len * pair_products;
    spec.kv_len.push_back(kv_len);
    spec.qo_len.push_back(qo_len);
  }
  if (dice.one_in(3)) {  // maxima beyond the call's own sizes
    p.max_batch = batch + dice.between(0, 5);
    p.max_qo_rows = dice.between(1, 3000);
    p.max_kv_len = dice.between(1, 20000);
  }
  if (dice.one_in(6)) {
    for (int32_t h = 0; h < p.qo_heads; ++h) spec.alibi_slopes.push_back(std::exp2(-1.0f - h % 8));
  }
  if (dice.one_in(6)) {
    for (int32_t h = 0; h < p.qo_heads; ++h) {
      spec.sink_logits.push_back(static_cast<float>(dice.between(-5, 10)));
    }
  }
  spec.csr = dice.one_in(3);
  spec.permute_pages = !dice.one_in(5);
  spec.odd_strides = dice.one_in(3);
  if (dice.one_in(5)) spec.q_range = 8.0f;  // peaked rows
  if (dice.one_in(8)) spec.k_range = 3.0f;
  if (dice.one_in(8)) spec.v_range = 100.0f;
  if (dice.one_in(5)) draw_visible_prefix(dice, &spec);
  if (dice.one_in(4)) draw_mask_width(dice, &spec);
  draw_formats(dice, &spec);
  if (dice.one_in(4)) draw_block_mask(dice, &p);
  return spec;
}

Spec random_case(std::mt19937_64& rng) {
  Spec spec = random_spec(rng);
  Dice dice(rng);
  if (!dice.one_in(3)) return spec;
  attnfold_problem& p = spec.problem;
  p.kv_dtype = ATTNFOLD_BF16;
  p.q_dtype = dice.one_in(4) ? ATTNFOLD_F16 : ATTNFOLD_BF16;
  p.o_dtype = p.q_dtype;
  if (p.q_dtype == ATTNFOLD_F16) return spec;
  constexpr attnfold_dtype kOutputs[] = {ATTNFOLD_BF16, ATTNFOLD_E4M3, ATTNFOLD_F32};
  p.o_dtype = dice.of(kOutputs);
  return spec;
}

}  // namespace attnfold::check
