// Block-sparse masks: patterns of local and vertical blocks, and lists for each request and kv
// head.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>

#include "conformance/suite.h"

namespace attnfold::check {
namespace {

using cases::kCausal;
using cases::kNone;
using cases::same_bytes;

constexpr int32_t kLeaf = ATTNFOLD_LEAF;

struct Pattern {
  int32_t block_size, local, stride, head_step;
};

constexpr Pattern kPatterns[] = {{64, 4, 8, 1},  {64, 16, 8, 0}, {16, 1, 5, 2},   {128, 2, 0, 0},
                                 {100, 0, 3, 1}, {7, 3, 4, 3},   {1000, 1, 2, 1}, {1, 40, 9, 1}};

void set_pattern(const Pattern& pattern, attnfold_problem* p) {
  p->sparse_block_size = pattern.block_size;
  p->sparse_local_blocks = pattern.local;
  p->sparse_vertical_stride = pattern.stride;
  p->sparse_head_step = pattern.head_step;
}

Spec mixed_spec(attnfold_mask_kind mask) {
  return cases::make_spec({6, 3, 32, 32}, DType::bf16, 16, mask, {1, 40, 9, 300, 5, 1, 0},
                          {2700, 300, 1333, 300, 3, 0, 50});
}

TEST(BlockMask, Patterns) {
  const cases::Context x = test::context();
  int turn = 0;
  for (const Pattern& pattern : kPatterns) {
    Spec spec = mixed_spec(++turn % 3 == 0 ? kNone : kCausal);
    set_pattern(pattern, &spec.problem);
    if (turn % 4 == 1) spec.problem.window_left = 400;
    if (turn % 4 == 2) spec.problem.sink_tokens = 70;
    if (turn % 4 == 3) spec.problem.attention_chunk = 256;
    ATTNFOLD_EXPECT_HOLDS(cases::right_under(generate(spec, x.seed), x, {1, 4}))
        << "block size " << pattern.block_size;
  }
}

TEST(BlockMask, ListsWithEveryOtherMask) {
  const cases::Context x = test::context();
  int turn = 0;
  for (int32_t block_size : {1, 16, 50, 64, 128, 300}) {
    Spec spec = mixed_spec(++turn % 3 == 0 ? kNone : kCausal);
    spec.problem.sparse_block_size = block_size;
    if (turn % 2) {
      for (int32_t n : spec.kv_len) spec.visible_prefix.push_back(n / 3);
    } else {
      for (size_t r = 0; r < spec.kv_len.size(); ++r)
        spec.mask_width.push_back(std::min(spec.kv_len[r], spec.qo_len[r] + 33));
    }
    if (turn % 3 == 1) spec.problem.window_left = 200;
    ATTNFOLD_EXPECT_HOLDS(cases::right_under(generate(spec, x.seed + turn), x, {1, 4}))
        << "block size " << block_size;
  }
}

void list_all_blocks(Call* call) {
  call->block_indptr.assign(1, 0);
  call->block_indices.clear();
  for (int32_t r = 0; r < call->batch; ++r) {
    for (int32_t h = 0; h < call->problem.kv_heads; ++h) {
      for (int32_t b = 0; int64_t{b} * call->problem.sparse_block_size < call->kv_len[r]; ++b)
        call->block_indices.push_back(b);
      call->block_indptr.push_back(static_cast<int32_t>(call->block_indices.size()));
    }
  }
}

TEST(BlockMask, AllBlocksAreTheBitsOfNone) {
  const cases::Context x = test::context();
  for (attnfold_mask_kind mask : {kCausal, kNone}) {
    const Call plain = generate(mixed_spec(mask), x.seed);
    Answer want, got;
    ATTNFOLD_ASSERT_HOLDS(cases::run(plain, cases::execution(x), want));
    for (int32_t block_size : {1, 48, 128}) {
      Call listed = plain;
      listed.problem.sparse_block_size = block_size;
      list_all_blocks(&listed);
      ATTNFOLD_ASSERT_HOLDS(cases::run(listed, cases::execution(x, 3), got));
      ATTNFOLD_EXPECT_HOLDS(same_bytes(plain, want, got, "every block listed"));
      Call local = plain;
      set_pattern({block_size, 5000, 0, 0}, &local.problem);
      ATTNFOLD_ASSERT_HOLDS(cases::run(local, cases::execution(x, 2), got));
      ATTNFOLD_EXPECT_HOLDS(same_bytes(plain, want, got, "every block local"));
    }
  }
}

std::vector<Call> long_calls(uint64_t seed) {
  std::vector<Call> calls;
  Spec spec =
      cases::make_spec({4, 2, 16, 16}, DType::bf16, 16, kCausal, {1, 5, 40}, {20000, 18330, 9000});
  set_pattern({64, 4, 30, 7}, &spec.problem);
  calls.push_back(generate(spec, seed));
  set_pattern({64, 0, 0, 0}, &spec.problem);
  for (uint64_t s = seed;; ++s) {  // with lists that are neither empty nor full
    calls.push_back(generate(spec, s));
    Call& call = calls.back();
    const auto length = [&](size_t i) { return call.block_indptr[i + 1] - call.block_indptr[i]; };
    bool partial = true;
    for (size_t i = 0; i + 1 < call.block_indptr.size(); ++i)
      partial = partial && length(i) > 40 && length(i) * 2 * 64 < call.kv_len[i / 2];
    if (partial) return calls;
    calls.pop_back();
  }
}

/** Keys that are not listed have no scales: what lies in their place, in scratch that nobody has
 * written, does not reach an answer. */
TEST(BlockMask, ScalesOfKeysThatAreNotListed) {
  const cases::Context x = test::context();
  for (DType type : {DType::bf16, DType::f16, DType::e4m3}) {
    Spec spec = cases::make_spec({32, 2, 64, 64}, type, 16, kCausal, {1, 3}, {128, 250});
    spec.problem.k_scale_kind = spec.problem.v_scale_kind = ATTNFOLD_SCALE_PER_TOKEN;
    spec.problem.sparse_block_size = 16;
    spec.poison = false;
    Call call = generate(spec, x.seed);
    call.block_indptr = {0, 7, 9, 13, 15};
    call.block_indices = {0, 1, 2, 3, 4, 5, 7, 0, 7, 0, 3, 8, 15, 1, 15};
    for (int32_t workers : {1, 4}) {
      Answer answer;
      ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x, workers), answer));
      ATTNFOLD_EXPECT_HOLDS(cases::judge_answer(call, answer)) << dtype_name(type);
    }
  }
}

TEST(BlockMask, SchedulesDoNotChangeABit) {
  const cases::Context x = test::context();
  for (const Call& call : long_calls(x.seed)) {
    std::set<uint64_t> ids;
    int32_t cuts_inside = 0;
    Answer first;
    for (int32_t workers : {1, 2, 3, 5, 8, 13}) {
      for (uint64_t cut_seed : {uint64_t{0}, x.seed + 1, x.seed + 2}) {
        Answer answer;
        ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x, workers, cut_seed), answer));
        cuts_inside += answer.report.num_cuts_inside;
        EXPECT_GE(answer.report.max_super_chunks, 4);
        if (ids.insert(answer.report.schedule_id).second && ids.size() == 1) {
          first = std::move(answer);
        } else {
          ATTNFOLD_ASSERT_HOLDS(same_bytes(call, first, answer, std::to_string(workers)));
        }
      }
    }
    ATTNFOLD_EXPECT_HOLDS(cases::judge_answer(call, first));
    EXPECT_GE(ids.size(), 12u) << "the schedules compared were not distinct";
    EXPECT_GT(cuts_inside, 0);
  }
}

/** P3: decodes and chunks of a prefill have the bits of the whole. */
TEST(BlockMask, ChunksAndDecodes) {
  const cases::Context x = test::context();
  for (const Pattern& pattern :
       {Pattern{64, 2, 5, 1}, Pattern{32, 0, 0, 0}, Pattern{20, 1, 4, 0}}) {
    Spec spec = cases::make_spec({4, 2, 32, 32}, DType::f16, 16, kCausal, {300}, {700});
    set_pattern(pattern, &spec.problem);
    const Call call = generate(spec, x.seed + 2);
    Answer whole;
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), whole));
    for (const auto& [begin, end] :
         {std::pair{0, 100}, std::pair{100, 103}, std::pair{103, 104}, std::pair{104, 300},
          std::pair{299, 300}, std::pair{17, 18}, std::pair{240, 241}}) {
      const Call chunk = chunk_of(call, 0, begin, end);
      Answer part;
      ATTNFOLD_ASSERT_HOLDS(cases::run(chunk, cases::execution(x, 2, x.seed + begin), part));
      ATTNFOLD_EXPECT_HOLDS(
          cases::same_rows(chunk, part, 0, whole, begin, end - begin, std::to_string(begin)));
    }
  }
}

/** P5: NaN in every key that no query sees under a head, and in rows of tokens that do not see it.
 */
TEST(BlockMask, UnseenKeysOfAHeadAreNotRead) {
  const cases::Context x = test::context();
  for (const Pattern& pattern :
       {Pattern{64, 2, 5, 1}, Pattern{24, 0, 0, 0}, Pattern{128, 1, 3, 1}}) {
    Spec spec =
        cases::make_spec({6, 3, 24, 24}, DType::bf16, 16, kCausal, {1, 4, 130}, {1500, 900, 400});
    set_pattern(pattern, &spec.problem);
    const Call clean = generate(spec, x.seed);
    Call poisoned = cases::deep_copy(clean);
    int64_t num_poisoned = 0;
    for (int32_t r = 0; r < clean.batch; ++r) {
      const KeyRange seen = seen_keys(clean, r);
      for (int32_t j = 0; j < clean.kv_len[r]; ++j) {
        if (!seen.meets(j, j + 1)) continue;  // may have no page
        for (int32_t h = 0; h < 3; ++h) {
          bool is_seen = false;
          for (int32_t i = 0; i < spec.qo_len[r]; ++i)
            is_seen = is_seen || ref::visible(clean, r, i, j, h);
          if (is_seen) continue;
          ++num_poisoned;
          const int64_t k = clean.kv_element_offset(r, j, clean.k_strides, clean.k_offset);
          const int64_t v = clean.kv_element_offset(r, j, clean.v_strides, clean.v_offset);
          for (int32_t e = 0; e < 24; ++e) {
            store_f32(poisoned.k->data(), DType::bf16, k + h * clean.k_strides.head + e,
                      cases::kNaN);
            store_f32(poisoned.v->data(), DType::bf16, v + h * clean.v_strides.head + e,
                      cases::kNaN);
          }
        }
      }
    }
    EXPECT_GT(num_poisoned, 100);
    Answer want, got;
    ATTNFOLD_ASSERT_HOLDS(cases::run(clean, cases::execution(x, 2), want));
    ATTNFOLD_ASSERT_HOLDS(cases::run(poisoned, cases::execution(x, 3), got));
    ATTNFOLD_EXPECT_HOLDS(same_bytes(clean, want, got, "NaN in keys that a head does not see"));
  }
}

// ------------------------------------------------ what is planned and read

/** Leaves and keys that decodes see, counted key by key with the oracle's predicate. */
void expect_counts(const Call& call, const attnfold_plan_report& report) {
  std::set<std::tuple<int32_t, int32_t, int32_t>> leaves;
  int64_t keys = 0;
  for (int32_t r = 0; r < call.batch; ++r) {
    for (int32_t h = 0; h < call.problem.kv_heads; ++h) {
      for (int32_t j = 0; j < call.kv_len[r]; ++j) {
        if (!ref::visible(call, r, 0, j, h)) continue;
        ++keys;
        leaves.insert({r, h, j / kLeaf});
      }
    }
  }
  const attnfold_problem& p = call.problem;
  EXPECT_EQ(report.kv_bytes, keys * (p.head_dim_qk + p.head_dim_vo) * 2);
  if (report.num_units == call.batch * p.kv_heads) {
    EXPECT_EQ(report.num_leaves, static_cast<int64_t>(leaves.size()));
  }
}

TEST(BlockMaskWork, OnlyLiveLeavesArePlannedAndOnlyListedKeysRead) {
  const cases::Context x = test::context();
  for (const Pattern& pattern : kPatterns) {
    Spec spec =
        cases::make_spec({4, 2, 16, 16}, DType::bf16, 16, kCausal, {1, 1, 1}, {9000, 700, 5});
    for (bool lists : {false, true}) {
      set_pattern(lists ? Pattern{pattern.block_size, 0, 0, 0} : pattern, &spec.problem);
      const Call call = generate(spec, x.seed + 4);
      Answer answer;
      ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x, 3), answer));
      expect_counts(call, answer.report);
    }
  }
}

/** 131072 keys, 4 local blocks of 64 and every 64th block: 4 + 31 or 32 blocks are read. */
TEST(BlockMaskWork, LocalAndVerticalBlocksOfALongDecode) {
  const cases::Context x = test::context();
  Spec spec = cases::make_spec({2, 1, 8, 8}, DType::bf16, 128, kCausal, {1}, {131072});
  set_pattern({64, 4, 64, 0}, &spec.problem);
  const Call call = generate(spec, x.seed);
  Answer answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x, 2), answer));
  EXPECT_EQ(answer.report.kv_bytes, (32 + 3) * 64 * (8 + 8) * 2);  // block 2047 is of both kinds
  EXPECT_EQ(answer.report.num_leaves, 32 + 1);
}

TEST(BlockMaskWork, HeadsShareAUnitWhereTheirListsAreEqual) {
  const cases::Context x = test::context();
  Spec spec = cases::make_spec({4, 4, 16, 16}, DType::bf16, 16, kCausal, {1}, {1000});
  spec.problem.sparse_block_size = 64;
  spec.poison = false;
  Call call = generate(spec, x.seed);
  call.block_indptr = {0, 2, 4, 6, 8};
  const std::pair<std::vector<int32_t>, int32_t> expected[] = {
      {{0, 5, 0, 5, 0, 5, 0, 5}, 1}, {{0, 5, 0, 5, 1, 5, 1, 5}, 2}, {{0, 5, 1, 5, 0, 5, 0, 6}, 4}};
  for (const auto& [blocks, num_units] : expected) {
    call.block_indices = blocks;
    Answer answer;
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x, 1), answer));
    ATTNFOLD_EXPECT_HOLDS(cases::judge_answer(call, answer));
    EXPECT_EQ(answer.report.num_units, num_units);
  }
}

/** Items of a schedule hold the live leaves that the report counts. */
TEST(BlockMaskWork, ItemsCountTheirLeaves) {
  const cases::Context x = test::context();
  for (const Call& call : long_calls(x.seed)) {
    cases::Plan plan(call.problem, cases::execution(x, 5));
    ATTNFOLD_ASSERT_HOLDS(plan.update(call));
    attnfold_plan_report report{};
    report.struct_size = sizeof report;
    ASSERT_EQ(attnfold_plan_get_report(plan.get(), &report), ATTNFOLD_OK);
    int64_t leaves = 0;
    for (int32_t i = 0; i < report.num_items; ++i) {
      attnfold_plan_item item{};
      item.struct_size = sizeof item;
      ASSERT_EQ(attnfold_plan_get_item(plan.get(), i, &item), ATTNFOLD_OK);
      EXPECT_LE(item.num_leaves, item.leaf_end - item.leaf_begin);
      leaves += item.num_leaves;
    }
    EXPECT_EQ(leaves, report.num_leaves);
    EXPECT_LT(report.num_leaves, 2 * (20000 + 18330 + 9000) / kLeaf);
  }
}

// ------------------------------------------------ errors

std::string refusal(const Call& call, const attnfold_lengths& lengths) {
  cases::Plan plan(call.problem, cases::execution(test::context()));
  if (plan.get() == nullptr) return plan.error();
  EXPECT_NE(attnfold_plan_update(plan.get(), &lengths, nullptr), ATTNFOLD_OK);
  return attnfold_last_error();
}

TEST(BlockMaskErrors, OfProblemsAndLists) {
  Spec spec = cases::make_spec({4, 2, 16, 16}, DType::bf16, 16, kCausal, {1, 3}, {100, 70});
  spec.problem.sparse_block_size = 16;
  spec.poison = false;
  Call call = generate(spec, 1);
  call.block_indptr = {0, 2, 2, 3, 4};
  call.block_indices = {1, 6, 0, 4};
  attnfold_lengths lengths = call.lengths();
  const auto expect = [&](const Call& c, const char* begin) {
    const std::string text = refusal(c, c.lengths());
    EXPECT_NE(text.find(begin), std::string::npos) << text;
  };
  const auto with = [&](auto change) {
    Call c = call;
    change(c);
    return c;
  };
  expect(with([](Call& c) { c.block_indices[1] = 7; }), "block_indices[1]: expected 2..6");
  expect(with([](Call& c) { c.block_indices[1] = 1; }), "block_indices[1]: expected 2..6");
  expect(with([](Call& c) { c.block_indices[2] = -1; }), "block_indices[2]: expected 0..4");
  expect(with([](Call& c) { c.block_indptr[2] = 1; }), "block_indptr[2]");
  expect(with([](Call& c) { c.block_indptr[0] = -1; }), "block_indptr[0]");
  expect(with([](Call& c) { c.problem.sparse_block_size = -1; }), "sparse_block_size");
  expect(with([](Call& c) { c.problem.sparse_head_step = 1; }),
         "sparse_head_step: expected 0..0 (sparse_vertical_stride is 0)");
  expect(with([](Call& c) {
           c.problem.sparse_block_size = 0;
           c.problem.sparse_local_blocks = 2;
         }),
         "sparse_local_blocks: expected 0..0 (sparse_block_size is 0)");
  expect(with([](Call& c) { c.problem.sparse_block_size = 0; }),
         "block_indptr: expected NULL (sparse_block_size is 0)");
  expect(with([](Call& c) { c.problem.sparse_vertical_stride = 4; }),
         "block_indptr: expected NULL");
  lengths.block_indptr = nullptr;
  EXPECT_EQ(refusal(call, lengths).rfind("block_indptr: expected [batch * kv_heads + 1]", 0), 0u);
  lengths = call.lengths();
  lengths.block_indices = nullptr;
  EXPECT_EQ(refusal(call, lengths).rfind("block_indices: expected ids", 0), 0u);
}

}  // namespace
}  // namespace attnfold::check
