// Drawn calls: the values depend on the seed and the token alone, and poison lies where it should.
#include "check/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <set>

#include "check/random.h"
#include "ref/oracle.h"

namespace attnfold::check {
namespace {

constexpr uint64_t kSeed = 77;

Spec mixed_spec() {
  Spec spec;
  spec.problem.qo_heads = 4;
  spec.problem.kv_heads = 2;
  spec.problem.head_dim_qk = 16;
  spec.problem.head_dim_vo = 8;
  spec.problem.page_size = 4;
  spec.qo_len = {1, 0, 5, 9};
  spec.kv_len = {30, 6, 17, 9};
  return spec;
}

float q_of(const Call& call, int32_t r, int32_t i, int32_t head, int32_t d) {
  const int64_t row = call.qo_indptr[r] + i;
  return load_f32(call.q->data(), static_cast<DType>(call.problem.q_dtype),
                  call.q_offset + row * call.q_strides.token + head * call.q_strides.head + d);
}
float k_of(const Call& call, int32_t r, int32_t j, int32_t head, int32_t d) {
  return load_f32(
      call.k->data(), static_cast<DType>(call.problem.kv_dtype),
      call.kv_element_offset(r, j, call.k_strides, call.k_offset) + head * call.k_strides.head + d);
}

/** Bits of the oracle's answer, so that NaN equals itself. */
std::vector<uint64_t> truth_bits(const Call& call) {
  const ref::Truth truth = ref::answer(call);
  std::vector<uint64_t> bits(truth.o.size() + truth.lse.size());
  std::memcpy(bits.data(), truth.o.data(), truth.o.size() * sizeof(double));
  std::memcpy(bits.data() + truth.o.size(), truth.lse.data(), truth.lse.size() * sizeof(double));
  return bits;
}

// ------------------------------------------------ values

TEST(Generate, SameSpecAndSeedGiveTheSameBytes) {
  const Call a = generate(mixed_spec(), kSeed), b = generate(mixed_spec(), kSeed);
  ASSERT_EQ(a.k->size(), b.k->size());
  EXPECT_EQ(std::memcmp(a.q->data(), b.q->data(), a.q->size()), 0);
  EXPECT_EQ(std::memcmp(a.k->data(), b.k->data(), a.k->size()), 0);
  EXPECT_EQ(std::memcmp(a.v->data(), b.v->data(), a.v->size()), 0);
  EXPECT_EQ(a.block_table, b.block_table);
  EXPECT_NE(truth_bits(a), truth_bits(generate(mixed_spec(), kSeed + 1)));
}

TEST(Generate, KeysDependOnTheirPositionNotOnLengthsOrBatchMates) {
  const Call a = generate(mixed_spec(), kSeed);
  Spec other = mixed_spec();
  other.kv_len = {12, 40, 17, 11};
  other.qo_len = {3, 2, 1, 11};
  other.csr = true;
  other.odd_strides = true;
  other.problem.page_size = 3;
  other.problem.kv_layout = ATTNFOLD_HND;
  const Call b = generate(other, kSeed);
  for (int32_t j = 0; j < 12; ++j) EXPECT_EQ(k_of(a, 0, j, 1, 7), k_of(b, 0, j, 1, 7));
  EXPECT_EQ(k_of(a, 2, 16, 0, 3), k_of(b, 2, 16, 0, 3));
  // The last of 5 new tokens and the only new token stand at the same position.
  EXPECT_EQ(q_of(a, 2, 4, 3, 5), q_of(b, 2, 0, 3, 5));
  EXPECT_NE(q_of(a, 2, 3, 3, 5), q_of(b, 2, 0, 3, 5));
}

TEST(Generate, ValuesAreStandardNormalTimesTheRange) {
  double sum = 0, squares = 0;
  int beyond_2 = 0;
  constexpr int kDraws = 200000;
  for (int i = 0; i < kDraws / 2; ++i) {
    const auto [a, b] = normals_of(hash_of(kSeed, i));
    for (double x : {a, b}) {
      sum += x;
      squares += x * x;
      beyond_2 += std::fabs(x) > 2;
    }
  }
  EXPECT_NEAR(sum / kDraws, 0.0, 0.01);
  EXPECT_NEAR(squares / kDraws, 1.0, 0.02);
  EXPECT_NEAR(beyond_2 / double{kDraws}, 0.0455, 0.003);
  Spec spec = mixed_spec();
  spec.k_range = 0.0f;
  EXPECT_EQ(k_of(generate(spec, kSeed), 0, 3, 1, 2), 0.0f);
}

// ------------------------------------------------ poison

TEST(Generate, PoisonFillsEverySlotThatNoRowSees) {
  for (bool odd : {false, true}) {
    for (auto storage : {ATTNFOLD_KV_PAGED, ATTNFOLD_KV_RAGGED}) {
      Spec spec = mixed_spec();
      spec.problem.kv_storage = storage;
      spec.problem.window_left = 4;
      spec.odd_strides = odd;
      const Call call = generate(spec, kSeed);
      std::set<int64_t> seen;
      for (int32_t r = 0; r < call.batch; ++r) {
        for (int32_t j = 0; j < call.kv_len[r]; ++j) {
          const int32_t qo_len = spec.qo_len[r];
          bool visible = false;
          for (int32_t i = 0; i < qo_len; ++i) {
            visible |= ref::visible(call.problem, qo_len, call.kv_len[r], i, j);
          }
          if (!visible) continue;
          for (int32_t head = 0; head < call.problem.kv_heads; ++head) {
            const int64_t at = call.kv_element_offset(r, j, call.k_strides, call.k_offset) +
                               head * call.k_strides.head;
            for (int32_t d = 0; d < call.problem.head_dim_qk; ++d) {
              EXPECT_TRUE(seen.insert(at + d).second) << "two keys share an element";
            }
          }
        }
      }
      const int64_t elements = static_cast<int64_t>(call.k->size()) / 2;
      for (int64_t at = 0; at < elements; ++at) {
        const bool is_nan = std::isnan(load_f32(call.k->data(), DType::bf16, at));
        ASSERT_EQ(is_nan, seen.count(at) == 0) << "element " << at;
      }
    }
  }
}

TEST(Generate, TableEntriesThatNoRowNeedsAreWild) {
  Spec spec = mixed_spec();
  spec.problem.window_left = 4;
  const Call call = generate(spec, kSeed);
  std::set<int32_t> pages;
  for (int32_t r = 0; r < call.batch; ++r) {
    for (int64_t i = 0; i < call.block_table_stride; ++i) {
      const int32_t id = call.block_table[r * call.block_table_stride + i];
      const KeyRange range = seen_keys(call.problem, spec.qo_len[r], spec.kv_len[r]);
      if (i * 4 < range.end && i * 4 + 4 > range.begin) {
        EXPECT_TRUE(id >= 0 && id < call.problem.num_pages);
        EXPECT_TRUE(pages.insert(id).second) << "page " << id << " twice";
      } else {
        EXPECT_EQ(id, 0x7ffffff0) << "request " << r << ", page " << i;
      }
    }
  }
}

TEST(Generate, PagesAreInOrderOnlyIfAsked) {
  Spec spec = mixed_spec();
  spec.poison = false;
  spec.permute_pages = false;
  const Call ordered = generate(spec, kSeed);
  EXPECT_EQ(ordered.block_table[0], 0);
  EXPECT_EQ(ordered.block_table[7], 7);
  spec.permute_pages = true;
  EXPECT_NE(generate(spec, kSeed).block_table, ordered.block_table);
}

TEST(Generate, OddStridesAreOddAndPointersAligned) {
  Spec spec = mixed_spec();
  spec.odd_strides = true;
  const Call call = generate(spec, kSeed);
  EXPECT_NE(call.q_strides.head % 8, 0);
  EXPECT_LT(call.q_strides.token, 0);
  EXPECT_LT(call.k_strides.page, 0);
  EXPECT_LT(call.v_strides.head, 0);
  const attnfold_tensors tensors = call.tensors();
  for (const void* p : {tensors.q, tensors.k, tensors.v}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % 16, 0u);
  }
  EXPECT_EQ(truth_bits(call), truth_bits(generate(mixed_spec(), kSeed)));
}

TEST(Generate, MaximaCoverTheCallAndKeepWhatTheSpecAsks) {
  Spec spec = mixed_spec();
  Call call = generate(spec, kSeed);
  EXPECT_EQ(call.problem.max_batch, 4);
  EXPECT_EQ(call.problem.max_qo_rows, 15);
  EXPECT_EQ(call.problem.max_kv_len, 30);
  spec.problem.max_kv_len = 1000;
  EXPECT_EQ(generate(spec, kSeed).problem.max_kv_len, 1000);
  EXPECT_EQ(generate(Spec{}, kSeed).batch, 0);
}

// ------------------------------------------------ calls made from calls

/** Rows of request r in a truth. */
std::vector<double> rows_of(const Call& call, const ref::Truth& truth, int32_t r) {
  const int64_t width = int64_t{call.problem.qo_heads} * call.problem.head_dim_vo;
  return {truth.o.begin() + call.qo_indptr[r] * width,
          truth.o.begin() + call.qo_indptr[r + 1] * width};
}

class Forms : public testing::TestWithParam<int> {
 protected:
  Spec spec() const {
    Spec spec = mixed_spec();
    spec.csr = GetParam() == 1;
    if (GetParam() == 2) spec.problem.kv_storage = ATTNFOLD_KV_RAGGED;
    spec.problem.window_left = GetParam() == 3 ? 5 : -1;
    spec.odd_strides = GetParam() == 3;
    return spec;
  }
};

TEST_P(Forms, SelectedRequestsKeepTheirAnswers) {
  const Call call = generate(spec(), kSeed);
  const ref::Truth truth = ref::answer(call);
  for (const std::vector<int32_t>& pick :
       {std::vector<int32_t>{2}, {3, 0}, {3, 2, 1, 0}, {0, 0, 2}, {}}) {
    const Call selected = select_requests(call, pick);
    ASSERT_EQ(selected.batch, static_cast<int32_t>(pick.size()));
    const ref::Truth other = ref::answer(selected);
    for (size_t i = 0; i < pick.size(); ++i) {
      EXPECT_EQ(rows_of(selected, other, static_cast<int32_t>(i)), rows_of(call, truth, pick[i]));
    }
  }
}

TEST_P(Forms, RepagedAndRaggedCallsKeepTheirAnswers) {
  const Call call = generate(spec(), kSeed);
  const auto expected = truth_bits(call);
  EXPECT_EQ(truth_bits(to_ragged(call)), expected);
  for (int32_t page_size : {1, 3, 64}) {
    for (auto layout : {ATTNFOLD_NHD, ATTNFOLD_HND}) {
      const Call csr = repage(call, page_size, layout, true, 1);
      const Call table = repage(call, page_size, layout, false, 2);
      EXPECT_EQ(truth_bits(csr), expected);
      EXPECT_EQ(truth_bits(table), expected);
      EXPECT_EQ(truth_bits(to_ragged(table)), expected);
      EXPECT_TRUE(csr.block_table.empty());
      EXPECT_TRUE(table.kv_indptr.empty());
    }
  }
}

TEST_P(Forms, ChunksOfACausalPrefillKeepTheirRows) {
  const Call call = generate(spec(), kSeed);
  const ref::Truth truth = ref::answer(call);
  for (int32_t r : {2, 3}) {
    const int32_t qo_len = call.qo_indptr[r + 1] - call.qo_indptr[r];
    const auto whole = rows_of(call, truth, r);
    for (int32_t cut = 0; cut <= qo_len; ++cut) {
      const Call head = chunk_of(call, r, 0, cut), tail = chunk_of(call, r, cut, qo_len);
      EXPECT_EQ(head.kv_len[0], call.kv_len[r] - (qo_len - cut));
      auto pieces = rows_of(head, ref::answer(head), 0);
      const auto rest = rows_of(tail, ref::answer(tail), 0);
      pieces.insert(pieces.end(), rest.begin(), rest.end());
      EXPECT_EQ(pieces, whole) << "cut at " << cut;
    }
  }
}

std::string form_name(const testing::TestParamInfo<int>& info) {
  static const char* const kNames[] = {"block_table", "csr", "ragged", "window_odd_strides"};
  return kNames[info.param];
}
INSTANTIATE_TEST_SUITE_P(Generate, Forms, testing::Values(0, 1, 2, 3), form_name);

TEST(Generate, SelectedRequestsTakeTheirRecordedAnswersAlong) {
  Call call = generate(mixed_spec(), kSeed);
  call.recorded_o_dtype = DType::f32;
  call.recorded_o = std::make_shared<Buffer>(15 * 4 * 8 * sizeof(float));
  for (int64_t i = 0; i < 15 * 4 * 8; ++i) {
    store_f32(call.recorded_o->data(), DType::f32, i, static_cast<float>(i));
  }
  call.recorded_lse.resize(15 * 4);
  std::iota(call.recorded_lse.begin(), call.recorded_lse.end(), 0.0f);
  const Call selected = select_requests(call, {3, 0});
  ASSERT_EQ(selected.recorded_lse.size(), 10u * 4);
  EXPECT_EQ(selected.recorded_lse[0], 6.0f * 4) << "request 3 begins at row 6";
  EXPECT_EQ(selected.recorded_lse[9 * 4], 0.0f);
  EXPECT_EQ(load_f32(selected.recorded_o->data(), DType::f32, 0), 6.0f * 4 * 8);
}

// ------------------------------------------------ random specs

TEST(Generate, RandomSpecsReachEveryAxis) {
  std::set<int> storages, layouts, masks, q_types, kv_types, o_types, csr, odd, groups, widths;
  std::set<int> k_kinds, v_kinds, in_k;
  bool long_row = false, empty_batch = false, more_queries_than_keys = false, no_new_token = false;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 rng(seed);
    const Spec spec = random_spec(rng);
    const attnfold_problem& p = spec.problem;
    ASSERT_EQ(spec.qo_len.size(), spec.kv_len.size());
    EXPECT_EQ(p.qo_heads % p.kv_heads, 0);
    EXPECT_TRUE(p.head_dim_qk % 8 == 0 && p.head_dim_qk <= ATTNFOLD_MAX_HEAD_DIM);
    EXPECT_TRUE(p.o_dtype == p.q_dtype || p.o_dtype == ATTNFOLD_F32 || p.o_dtype == ATTNFOLD_E4M3);
    k_kinds.insert(p.k_scale_kind);
    v_kinds.insert(p.v_scale_kind);
    in_k.insert(p.v_in_k);
    storages.insert(p.kv_storage);
    layouts.insert(p.kv_layout);
    masks.insert(p.mask);
    q_types.insert(p.q_dtype);
    kv_types.insert(p.kv_dtype);
    o_types.insert(p.o_dtype);
    csr.insert(spec.csr);
    odd.insert(spec.odd_strides);
    groups.insert(p.qo_heads / p.kv_heads);
    widths.insert(p.head_dim_qk);
    empty_batch |= spec.qo_len.empty();
    for (size_t r = 0; r < spec.qo_len.size(); ++r) {
      long_row |= spec.kv_len[r] >= 4 * ATTNFOLD_LEAF * ATTNFOLD_SUPER_CHUNK && spec.qo_len[r] > 0;
      more_queries_than_keys |= spec.qo_len[r] > spec.kv_len[r];
      no_new_token |= spec.qo_len[r] == 0;
    }
  }
  EXPECT_EQ(storages.size(), 2u);
  EXPECT_EQ(layouts.size(), 2u);
  EXPECT_EQ(masks.size(), 2u);
  EXPECT_EQ(q_types.size(), 3u);
  EXPECT_EQ(kv_types.size(), 6u);
  EXPECT_EQ(o_types.size(), 4u);
  EXPECT_EQ(k_kinds.size(), 4u);
  EXPECT_EQ(v_kinds.size(), 4u);
  EXPECT_EQ(in_k.size(), 2u);
  EXPECT_EQ(csr.size(), 2u);
  EXPECT_EQ(odd.size(), 2u);
  EXPECT_GT(groups.size(), 8u);
  EXPECT_GT(widths.size(), 10u);
  EXPECT_TRUE(long_row && empty_batch && more_queries_than_keys && no_new_token);
}

TEST(Generate, RandomCasesReachEachKernelRowOften) {
  // Rows of a CPU are told apart by the type of k and v and, in bf16, by whether q has it and
  // whether o is rounded as much as weights in bf16.
  constexpr int kCases = 1000;
  std::map<std::string, int> seen;
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    std::mt19937_64 rng(seed);
    const attnfold_problem p = random_case(rng).problem;
    EXPECT_TRUE(p.o_dtype == p.q_dtype || p.o_dtype == ATTNFOLD_F32 || p.o_dtype == ATTNFOLD_E4M3);
    std::string row = dtype_name(static_cast<DType>(p.kv_dtype));
    if (p.kv_dtype == ATTNFOLD_BF16) {
      const bool rounded = p.o_dtype == ATTNFOLD_BF16 || p.o_dtype == ATTNFOLD_E4M3;
      row += p.q_dtype != ATTNFOLD_BF16 ? ", q of another type"
             : rounded                  ? ", o rounded"
                                        : ", o in f32";
    }
    ++seen[row];
  }
  EXPECT_EQ(seen.size(), 8u);
  for (const auto& [row, count] : seen) EXPECT_GE(count, kCases / 20) << row;
}

}  // namespace
}  // namespace attnfold::check
