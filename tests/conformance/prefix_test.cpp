// Shared prefixes cannot change a bit: every way of sharing against none, and each request alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "conformance/suite.h"

namespace attnfold::check {
namespace {

using cases::kCausal;
using cases::kNone;
using cases::same_bytes;

constexpr int32_t kLeaf = ATTNFOLD_LEAF, kSuperChunkKeys = ATTNFOLD_LEAF * ATTNFOLD_SUPER_CHUNK;

attnfold_execution sharing(attnfold_prefix_use use, const cases::Context& x, int32_t workers = 1,
                           uint64_t cut_seed = 0) {
  attnfold_execution execution = cases::execution(x, workers, cut_seed);
  execution.prefix_use = use;
  return execution;
}

/** Runs without sharing and with it, under 1 to 8 workers and random cuts; returns how many groups
 * there were. */
int32_t compare(const Call& call, const cases::Context& x, Answer* first, const std::string& what) {
  int32_t groups = 0;
  EXPECT_EQ(cases::run(call, sharing(ATTNFOLD_PREFIX_OFF, x), *first), "") << what;
  EXPECT_EQ(first->report.num_prefix_groups, 0);
  for (int32_t workers = 1; workers <= 8; ++workers) {
    const attnfold_prefix_use use =
        workers % 3 == 0 ? ATTNFOLD_PREFIX_AUTO : ATTNFOLD_PREFIX_ALWAYS;
    const uint64_t cut_seed = workers % 2 ? x.seed + static_cast<uint64_t>(workers) : 0;
    Answer answer;
    EXPECT_EQ(cases::run(call, sharing(use, x, workers, cut_seed), answer), "") << what;
    EXPECT_EQ(same_bytes(call, *first, answer, what), "")
        << "seed " << x.seed << ", " << workers << " workers";
    groups = std::max(groups, answer.report.num_prefix_groups);
  }
  return groups;
}

class PrefixRandom : public ::testing::TestWithParam<int> {
 protected:
  static int32_t groups_;
  static void TearDownTestSuite() {
    EXPECT_GT(groups_, 8) << "too few random batches shared anything";
  }
};
int32_t PrefixRandom::groups_ = 0;

/** Any problem that the engine serves, requests of any lengths on a random tree of pages. */
TEST_P(PrefixRandom, SameBytesAsWithout) {
  const uint64_t seed = test::seed() + 7000 + static_cast<uint64_t>(GetParam());
  const cases::Context x{seed, nullptr};
  std::mt19937_64 rng(seed);
  Spec spec = random_case(rng);
  spec.problem.kv_storage = ATTNFOLD_KV_PAGED;
  if (rng() % 4 != 0) {  // mostly without what ends sharing
    spec.problem.window_left = -1;
    spec.problem.attention_chunk = 0;
  }
  for (size_t r = 0; r < spec.kv_len.size(); ++r) {  // most of them long enough, few tokens
    if (rng() % 3 == 0) continue;
    spec.kv_len[r] = static_cast<int32_t>(rng() % 3000) + 1;
    spec.qo_len[r] = static_cast<int32_t>(rng() % 6);
    int32_t width = 0;  // of its mask, which fits these lengths
    if (!spec.mask_width.empty() && spec.mask_width[r] > 0) {
      const int32_t least = std::min(spec.qo_len[r], spec.kv_len[r]);
      width = spec.mask_width[r] = std::clamp(spec.mask_width[r], least, spec.kv_len[r]);
    }
    if (!spec.visible_prefix.empty())
      spec.visible_prefix[r] = std::min(spec.visible_prefix[r], spec.kv_len[r] - width);
  }
  attnfold_problem& p = spec.problem;  // under a block-sparse mask nothing is shared
  p.sparse_block_size = p.sparse_local_blocks = p.sparse_vertical_stride = p.sparse_head_step = 0;
  Call call = generate(spec, seed);
  share_prefixes(&call, rng);
  Answer first;
  groups_ += compare(call, x, &first, "random");
  if (GetParam() % 4 == 0) {
    ATTNFOLD_EXPECT_HOLDS(cases::judge_answer(call, first));
  }
  for (int32_t r = 0; r < call.batch; ++r) {
    const Call one = select_requests(call, {r});
    Answer alone;
    ATTNFOLD_ASSERT_HOLDS(cases::run(one, cases::execution(x), alone));
    ATTNFOLD_ASSERT_HOLDS(
        cases::same_rows(one, alone, 0, first, call.qo_indptr[r], one.num_rows(), "alone"))
        << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, PrefixRandom, ::testing::Range(0, 32));

/** Every length of a prefix that could matter: on and off the edges of pages, leaves and
 * super-chunks; with nothing, little and much behind it. */
TEST(Prefix, AnyLength) {
  const cases::Context x = test::context();
  for (const int32_t prefix :
       {1, kLeaf - 1, kLeaf, kLeaf + 1, 300, 5 * kLeaf, kSuperChunkKeys - 1, kSuperChunkKeys,
        kSuperChunkKeys + 1, kSuperChunkKeys + 3 * kLeaf, 2 * kSuperChunkKeys + 200}) {
    for (const int32_t page_size : {1, 16, 100}) {
      const int32_t n = prefix;
      Call call = generate(
          cases::make_spec({4, 2, 16, 16}, DType::bf16, page_size, kCausal, {1, 1, 3, 1, 0, 2},
                           {n, n + 1, n + 3, n + 2200, n + 5, n + 130}),
          x.seed);
      for (int32_t r = 1; r < call.batch; ++r) share_prefix(&call, 0, r, n);
      Answer first;
      const int32_t groups = compare(call, x, &first, std::to_string(n) + " keys");
      const int32_t pages = n / page_size * page_size;
      EXPECT_EQ(groups > 0, pages / kLeaf > 0) << n << " keys in pages of " << page_size;
    }
  }
}

/** A system prompt, conversations on it, samples of these: found, and named. */
TEST(Prefix, ThreeLevels) {
  const cases::Context x = test::context();
  for (const bool csr : {false, true}) {
    Spec spec = cases::make_spec(
        {8, 2, 24, 16}, DType::f32, 16, kCausal, {1, 1, 2, 1, 1, 0, 1, 5, 1, 1, 1, 1},
        {2600, 2550, 3500, 2500, 2700, 2600, 2333, 2800, 1900, 90, 2222, 2500});
    spec.csr = csr;
    Call call = generate(spec, x.seed);
    for (int32_t r = 1; r < 9; ++r) share_prefix(&call, 0, r, 1000);
    for (const int32_t r : {2, 4, 6}) share_prefix(&call, 0, r, 2060);
    share_prefix(&call, 2, 4, 2400);
    share_prefix(&call, 10, 11, 1500);
    Answer first, named;
    EXPECT_EQ(compare(call, x, &first, "levels"), 4);
    ATTNFOLD_EXPECT_HOLDS(cases::judge_answer(call, first));
    call.prefix_keys = {990, 1488, 2048, 2390};
    call.prefix_indptr = {0, 9, 11, 15, 17};
    call.prefix_requests = {8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 10, 6, 2, 0, 4, 4, 2};
    EXPECT_EQ(compare(call, x, &named, "named levels"), 4);
    ATTNFOLD_EXPECT_HOLDS(same_bytes(call, first, named, "named levels"));
  }
}

/** Masks under which rows of one request see different keys, and terms of the score by position. */
TEST(Prefix, Masks) {
  const cases::Context x = test::context();
  const auto spec_of = [&](attnfold_mask_kind mask) {
    return cases::make_spec({4, 1, 32, 32}, DType::f16, 16, mask, {1, 4, 2, 1, 7, 1},
                            {1500, 1400, 700, 1500, 1600, 900});
  };
  std::vector<Spec> specs(6, spec_of(kCausal));
  specs[0] = spec_of(kNone);
  specs[1].problem.window_left = 1550;
  specs[2].problem.window_left = 200;
  specs[2].problem.sink_tokens = 1300;
  specs[3].problem.attention_chunk = 1024;
  specs[4] = spec_of(kNone);
  specs[4].problem.window_right = 5;
  specs[5].alibi_slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
  specs[5].sink_logits = {1.0f, -2.0f, 0.0f, 8.0f};
  specs[5].problem.logits_softcap = 20.0f;
  for (size_t i = 0; i < specs.size(); ++i) {
    Call call = generate(specs[i], x.seed);
    for (int32_t r = 1; r < call.batch; ++r) share_prefix(&call, 0, r, 1300);
    Answer first;
    const int32_t groups = compare(call, x, &first, "mask " + std::to_string(i));
    EXPECT_EQ(groups > 0, i != 3) << i;  // request 0 has left chunk 0
    ATTNFOLD_EXPECT_HOLDS(cases::judge_answer(call, first));
  }
}

/** More rows than one unit holds, heads that do not fill one, and groups too wide to share. */
TEST(Prefix, ManyRequestsAndGroups) {
  const cases::Context x = test::context();
  for (const cases::Shape shape : {cases::Shape{8, 1, 16, 16}, cases::Shape{6, 6, 16, 8},
                                   cases::Shape{64, 1, 8, 8}, cases::Shape{129, 1, 8, 8}}) {
    cases::Lengths qo_len, kv_len;
    for (int32_t r = 0; r < 37; ++r) {
      qo_len.push_back(r % 11 == 5 ? 0 : 1 + r % 2 * (shape.qo_heads < 64));
      kv_len.push_back(700 + r * 5);
    }
    Call call = generate(cases::make_spec(shape, DType::bf16, 16, kCausal, qo_len, kv_len), x.seed);
    for (int32_t r = 1; r < call.batch; ++r) share_prefix(&call, 0, r, 650);
    Answer first;
    const int32_t groups = compare(call, x, &first, std::to_string(shape.qo_heads) + " heads");
    EXPECT_EQ(groups, shape.qo_heads == 129 ? 0 : 1);
  }
}

/** NaN in a key that all share reaches all; NaN in one that none sees reaches none. */
TEST(Prefix, NaNInSharedPages) {
  const cases::Context x = test::context();
  Call call = generate(
      cases::make_spec({4, 2, 16, 16}, DType::f32, 16, kCausal, {1, 1, 1}, {400, 500, 600}),
      x.seed);
  for (int32_t r = 1; r < call.batch; ++r) share_prefix(&call, 0, r, 390);
  const Call poisoned = cases::deep_copy(call);
  const int64_t at = poisoned.kv_element_offset(1, 200, poisoned.v_strides, poisoned.v_offset);
  store_f32(poisoned.v->data(), DType::f32, at + 3, cases::kNaN);
  Answer first;
  EXPECT_GT(compare(poisoned, x, &first, "NaN"), 0);
  for (int32_t row = 0; row < 3; ++row) {
    EXPECT_TRUE(std::isnan(cases::o_at(call, first, row, 0, 3)));
    EXPECT_FALSE(std::isnan(cases::o_at(call, first, row, 0, 4)));
    EXPECT_FALSE(std::isnan(cases::o_at(call, first, row, 2, 3)));
  }
}

}  // namespace
}  // namespace attnfold::check
