// Visible prefixes and mask bits: what single requests say about their keys.
#include <gtest/gtest.h>

#include <cstring>

#include "conformance/suite.h"

namespace attnfold::check {
namespace {

using cases::kCausal;
using cases::kNone;
using cases::same_bytes;
using cases::Shape;

constexpr int32_t kLeaf = ATTNFOLD_LEAF;

// ------------------------------------------------ visible prefixes

Spec prefix_spec(attnfold_mask_kind mask, int32_t prefix) {
  Spec spec = cases::make_spec({4, 2, 32, 32}, DType::bf16, 16, mask, {1, 40, 9, 300, 5},
                               {700, 300, 333, 300, 3});
  for (int32_t n : spec.kv_len) spec.visible_prefix.push_back(std::min(n, prefix));
  return spec;
}

TEST(VisiblePrefix, WithEveryOtherMask) {
  const cases::Context x = test::context();
  for (int32_t prefix : {0, 1, 100, 127, 128, 129, 300}) {
    for (int32_t turn = 0; turn < 6; ++turn) {
      Spec spec = prefix_spec(turn == 5 ? kNone : kCausal, prefix);
      if (turn == 1 || turn == 4) spec.problem.window_left = 20;
      if (turn == 5) spec.problem.window_right = 3;
      if (turn == 2 || turn == 4) spec.problem.sink_tokens = 7;
      if (turn == 3 || turn == 4) spec.problem.attention_chunk = 100;
      ATTNFOLD_EXPECT_HOLDS(cases::right_under(generate(spec, x.seed), x, {1, 4}))
          << "prefix " << prefix << " turn " << turn;
    }
  }
}

TEST(VisiblePrefix, OverAllKeysIsNoMask) {
  const cases::Context x = test::context();
  Spec spec = prefix_spec(kCausal, 1000);
  spec.problem.window_left = 5;
  spec.problem.attention_chunk = 64;
  Answer prefixed, plain;
  ATTNFOLD_ASSERT_HOLDS(cases::run(generate(spec, x.seed), cases::execution(x, 3), prefixed));
  const Call unmasked = generate(prefix_spec(kNone, 0), x.seed);
  ATTNFOLD_ASSERT_HOLDS(cases::run(unmasked, cases::execution(x), plain));
  ATTNFOLD_EXPECT_HOLDS(same_bytes(unmasked, plain, prefixed, "prefix over all keys"));
}

/** P3: behind the prefix a prefill may be cut anywhere, also into single tokens. */
TEST(VisiblePrefix, ChunksBehindIt) {
  const cases::Context x = test::context();
  for (int32_t window_left : {-1, 40}) {
    Spec spec = cases::make_spec({6, 2, 40, 32}, DType::f16, 5, kCausal, {300}, {300});
    spec.problem.window_left = window_left;
    spec.visible_prefix = {137};
    const Call call = generate(spec, x.seed);
    Answer whole;
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), whole));
    for (const auto& [begin, end] :
         {std::pair{0, 137}, std::pair{0, 140}, std::pair{137, 138}, std::pair{138, 200},
          std::pair{200, 300}, std::pair{299, 300}}) {
      const Call chunk = chunk_of(call, 0, begin, end);
      Answer part;
      ATTNFOLD_ASSERT_HOLDS(cases::run(chunk, cases::execution(x, 2, x.seed + begin), part));
      ATTNFOLD_EXPECT_HOLDS(
          cases::same_rows(chunk, part, 0, whole, begin, end - begin, std::to_string(begin)));
    }
  }
}

// ------------------------------------------------ mask bits

/** The same call with bits over the last `extra` keys more than the new tokens' that say what its
 * masks say. */
Call with_own_bits(const Call& call, int32_t extra) {
  Call out = call;
  cases::Lengths width;
  for (int32_t r = 0; r < call.batch; ++r) {
    const int32_t qo_len = call.qo_indptr[r + 1] - call.qo_indptr[r];
    width.push_back(std::min(call.kv_len[r], std::min(qo_len, call.kv_len[r]) + extra));
  }
  cases::set_mask(out, width,
                  [&](int32_t r, int32_t i, int32_t key) { return ref::visible(call, r, i, key); });
  return out;
}

class MaskBitsOf : public ::testing::TestWithParam<int> {};

/** Rows whose bits say what the masks say have the same bytes, decode, verify and prefill. */
TEST_P(MaskBitsOf, WhatTheMasksSayChangesNothing) {
  const cases::Context x{test::seed() + 3000 + static_cast<uint64_t>(GetParam()), nullptr};
  constexpr Shape kShapes[] = {
      {4, 2, 32, 32}, {1, 1, 16, 24}, {8, 1, 64, 64}, {6, 2, 40, 32}, {3, 3, 128, 128}};
  const int turn = GetParam();
  Spec spec = cases::make_spec(kShapes[turn % 5], static_cast<DType>(turn % 3), turn % 2 ? 16 : 3,
                               turn % 4 == 3 ? kNone : kCausal, {1, 5, 40, 200, 9, 3},
                               {513, 260, 300, 200, 2200, 2});
  if (turn % 3 == 1) spec.problem.window_left = 50;
  if (turn % 3 == 2) spec.problem.attention_chunk = 90;
  if (turn % 2 == 1) spec.problem.sink_tokens = 5;
  if (turn % 5 == 4) spec.problem.logits_softcap = 20.0f;
  if (turn % 4 == 2) spec.alibi_slopes.assign(static_cast<size_t>(spec.problem.qo_heads), 0.1f);
  spec.poison = false;  // the bits' keys count as read
  const Call call = generate(spec, x.seed);
  Answer plain, masked;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), plain));
  for (int32_t extra : {0, 1, 37, 129, 5000}) {
    const Call with_bits = with_own_bits(call, extra);
    ATTNFOLD_ASSERT_HOLDS(cases::run(with_bits, cases::execution(x, 1 + extra % 4), masked));
    ATTNFOLD_EXPECT_HOLDS(same_bytes(call, plain, masked, "bits over " + std::to_string(extra)));
  }
}

INSTANTIATE_TEST_SUITE_P(Turns, MaskBitsOf, ::testing::Range(0, 15));

TEST(MaskBits, TokenTreesAreVerified) {
  const cases::Context x = test::context();
  for (int32_t extra : {0, 11}) {
    for (int32_t window_left : {-1, 100}) {
      Spec spec = cases::make_spec({8, 2, 64, 64}, DType::bf16, 16, kCausal, {60, 7, 1, 25, 12},
                                   {2060, 128, 400, 131, 12});
      spec.problem.window_left = window_left;
      for (size_t r = 0; r < spec.qo_len.size(); ++r)
        spec.mask_width.push_back(std::min(spec.kv_len[r], spec.qo_len[r] + extra));
      spec.mask_bits = MaskBits::tree;
      ATTNFOLD_EXPECT_HOLDS(cases::right_under(generate(spec, x.seed), x, {1, 2, 7}));
    }
  }
}

TEST(MaskBits, FullCustomMasks) {
  const cases::Context x = test::context();
  for (DType type : {DType::f32, DType::f16, DType::bf16}) {
    Spec spec =
        cases::make_spec({3, 1, 24, 40}, type, 7, kCausal, {1, 33, 200, 50}, {700, 290, 129, 20});
    spec.mask_width = spec.kv_len;
    const Call call = generate(spec, x.seed);
    ATTNFOLD_EXPECT_HOLDS(cases::right_under(call, x, {1, 3}));
    Answer answer;
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), answer));
    int32_t num_empty = 0;
    for (int32_t r = 0; r < call.batch; ++r) {
      for (int32_t i = 0; i < spec.qo_len[r]; ++i) {
        bool sees = false;
        for (int32_t j = 0; j < spec.kv_len[r] && !sees; ++j) sees = ref::visible(call, r, i, j);
        if (sees) continue;
        ++num_empty;
        ATTNFOLD_EXPECT_HOLDS(cases::row_is_empty(call, answer, call.qo_indptr[r] + i));
      }
    }
    EXPECT_GT(num_empty, 10) << "queries without a bit";
  }
}

/** P5: NaN in a key reaches the rows whose bit is set, and no other. */
TEST(MaskBits, HiddenKeysDoNotLeak) {
  const cases::Context x = test::context();
  Spec spec = cases::make_spec({6, 2, 40, 40}, DType::bf16, 16, kCausal, {21}, {150});
  spec.mask_width = {45};
  const Call clean = generate(spec, x.seed);
  Answer want;
  ATTNFOLD_ASSERT_HOLDS(cases::run(clean, cases::execution(x), want));
  for (int32_t key = 100; key < 150; ++key) {
    for (bool in_k : {true, false}) {
      Call call = cases::deep_copy(clean);
      const int64_t at = in_k ? call.kv_element_offset(0, key, call.k_strides, call.k_offset)
                              : call.kv_element_offset(0, key, call.v_strides, call.v_offset);
      store_f32(in_k ? call.k->data() : call.v->data(), DType::bf16, at + 3, cases::kNaN);
      Answer got;
      ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x, 1 + key % 3), got));
      for (int32_t i = 0; i < 21; ++i) {
        if (ref::visible(clean, 0, i, key)) {
          EXPECT_TRUE(std::isnan(cases::o_at(call, got, i, 0, 3))) << key << " " << i;
        } else {
          ATTNFOLD_EXPECT_HOLDS(cases::same_rows(clean, want, i, got, i, 1, "leaked"));
        }
      }
    }
  }
}

/** Bytes behind a request's rows, bits behind its keys, and widths of requests without new tokens.
 */
TEST(MaskBits, OnlyTheBitsOfKeysAreRead) {
  const cases::Context x = test::context();
  Spec spec = cases::make_spec({2, 1, 16, 16}, DType::f32, 16, kCausal, {3, 0, 20}, {200, 50, 131});
  spec.mask_width = {13, 50, 131};
  Call call = generate(spec, x.seed);
  Answer first, second;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), first));
  Call other = call;
  other.mask_bits.assign(call.mask_bits.size(), 0xff);
  for (int32_t r = 0; r < call.batch; ++r) {
    const int32_t width = spec.mask_width[r], row_bytes = (width + 7) / 8;
    for (int64_t i = 0; i < spec.qo_len[r]; ++i) {
      for (int32_t b = 0; b < row_bytes; ++b) {
        const int64_t at = call.mask_indptr[r] + i * row_bytes + b;
        const int32_t num_bits = std::min(8, width - 8 * b);
        other.mask_bits[at] = call.mask_bits[at] & ((1 << num_bits) - 1);
      }
    }
  }
  ATTNFOLD_ASSERT_HOLDS(cases::run(other, cases::execution(x, 2), second));
  ATTNFOLD_EXPECT_HOLDS(same_bytes(call, first, second, "other bytes around the bits"));
}

// ------------------------------------------------ what is read

attnfold_plan_report report_of(const Call& call, const cases::Context& x) {
  Answer answer;
  EXPECT_EQ(cases::run(call, cases::execution(x, 2), answer), "");
  return answer.report;
}

TEST(MaskWork, APrefixAddsItsOwnKeysToAWindow) {
  const cases::Context x = test::context();
  const int64_t key_bytes = 2 * (16 + 16) * 2;
  for (int32_t kv_len : {5000, 20000}) {
    for (int32_t prefix : {0, 1, 128, 1000}) {
      Spec spec = cases::make_spec({4, 2, 16, 16}, DType::bf16, 16, kCausal, {1}, {kv_len});
      spec.problem.window_left = 1023;
      spec.visible_prefix = {prefix};
      const attnfold_plan_report report = report_of(generate(spec, x.seed), x);
      EXPECT_EQ(report.kv_bytes, (1024 + prefix) * key_bytes) << kv_len << " " << prefix;
      EXPECT_LE(report.num_leaves, 1024 / kLeaf + 1 + (prefix + kLeaf - 1) / kLeaf);
    }
  }
}

TEST(MaskWork, ATreeUnderAWindowReadsTheWindowAndTheTree) {
  const cases::Context x = test::context();
  Spec spec = cases::make_spec({4, 2, 16, 16}, DType::bf16, 16, kCausal, {30}, {20000});
  spec.problem.window_left = 1023;
  spec.mask_width = {64};
  spec.mask_bits = MaskBits::tree;
  const attnfold_plan_report report = report_of(generate(spec, x.seed), x);
  const int64_t row_sets = report.num_units, leaves = (1024 + 30 + kLeaf - 1) / kLeaf + 1;
  EXPECT_LE(report.num_leaves, row_sets * leaves);
  EXPECT_LE(report.kv_bytes, row_sets * (1024 + 30) * 2 * (16 + 16) * 2);
}

}  // namespace
}  // namespace attnfold::check
