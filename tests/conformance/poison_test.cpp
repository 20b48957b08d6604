// Promise P5: nothing unseen reaches a row; what is seen does, NaN too.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "conformance/suite.h"

namespace attnfold::check {
namespace {

using cases::kCausal;
using cases::kInf;
using cases::kNaN;
using cases::kNone;
using cases::same_bytes;

class PoisonRandom : public ::testing::TestWithParam<int> {};

/** NaN in every slot, gap and page that no row may see, and wild ids, against zeros. */
TEST_P(PoisonRandom, UnseenMemoryDoesNotMatter) {
  const uint64_t seed = test::seed() + 3000 + static_cast<uint64_t>(GetParam());
  const cases::Context x{seed, nullptr};
  std::mt19937_64 rng(seed);
  Spec spec = random_case(rng);
  const Call poisoned = generate(spec, seed);
  spec.poison = false;
  const Call clean = generate(spec, seed);
  Answer a, b;
  ATTNFOLD_ASSERT_HOLDS(cases::run(clean, cases::execution(x), a)) << "seed " << seed;
  ATTNFOLD_ASSERT_HOLDS(cases::run_spaced(poisoned, cases::execution(x, 3), b)) << "seed " << seed;
  EXPECT_EQ(same_bytes(clean, a, b, "poisoned"), "") << "seed " << seed;
}

INSTANTIATE_TEST_SUITE_P(Seeds, PoisonRandom, ::testing::Range(0, 20));

TEST(Poison, WildIdsInPaddingAndExpiredPages) {
  const cases::Context x = test::context();
  for (bool csr : {false, true}) {
    Spec spec =
        cases::make_spec({4, 2, 24, 24}, DType::bf16, 16, kCausal, {1, 3, 0}, {700, 400, 90});
    spec.problem.window_left = 100;
    spec.csr = csr;
    const Call call = generate(spec, x.seed);
    Answer first;
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), first));
    ATTNFOLD_ASSERT_HOLDS(cases::judge_answer(call, first));
    for (int32_t wild : {-1, 0x7ffffff0, INT32_MIN, 0x7fffffff}) {
      Call other = call;
      int num_wild = 0;
      for (std::vector<int32_t>* ids : {&other.block_table, &other.kv_indices}) {
        for (int32_t& id : *ids) {
          if (id == 0x7ffffff0) {
            id = wild;
            ++num_wild;
          }
        }
      }
      EXPECT_GT(num_wild, 40);
      Answer answer;
      ATTNFOLD_ASSERT_HOLDS(cases::run(other, cases::execution(x, 3), answer)) << wild;
      ATTNFOLD_EXPECT_HOLDS(same_bytes(call, first, answer, "wild id " + std::to_string(wild)));
    }
  }
}

struct Placed {
  bool in_k;
  float value;
};
constexpr Placed kPlaced[] = {
    {false, kNaN}, {false, kInf}, {false, -kInf}, {true, kNaN}, {true, kInf}};

/** Puts `placed` into one element of key `key` of request 0, and runs. */
std::string run_with(const Call& clean, int32_t key, const Placed& placed, const cases::Context& x,
                     Call& out, Answer& answer) {
  out = cases::deep_copy(clean);
  Buffer& buffer = placed.in_k ? *out.k : *out.v;
  const int64_t at = placed.in_k ? out.kv_element_offset(0, key, out.k_strides, out.k_offset)
                                 : out.kv_element_offset(0, key, out.v_strides, out.v_offset);
  store_f32(buffer.data(), static_cast<DType>(out.problem.kv_dtype), at + 3, placed.value);
  return cases::run(out, cases::execution(x, 1 + key % 3), answer);
}

/** Rows that may not see the key keep their bytes, the others are what the oracle says. */
std::string only_seen_rows_change(const Call& clean, const Answer& want, int32_t key,
                                  const cases::Context& x) {
  const int32_t qo_len = clean.num_rows();
  for (const Placed& placed : kPlaced) {
    const std::string where = "key " + std::to_string(key) + (placed.in_k ? " of k" : " of v") +
                              " = " + cases::text_of(placed.value);
    Call call;
    Answer got;
    ATTNFOLD_HOLD(cases::in(where, run_with(clean, key, placed, x, call, got)));
    for (int32_t i = 0; i < qo_len; ++i) {
      if (!ref::visible(clean, 0, i, key)) {
        ATTNFOLD_HOLD(cases::same_rows(clean, want, i, got, i, 1, where + " leaked"));
      } else if (!placed.in_k || std::isnan(placed.value)) {  // kv head 0, all its rows
        if (std::isfinite(cases::o_at(call, got, i, 0, 3)))
          return where + " did not reach token " + std::to_string(i);
      }
    }
    if (key % 3 == 0) ATTNFOLD_HOLD(cases::in(where, cases::judge_answer(call, got)));
  }
  return "";
}

/** A key that one row sees and its neighbour in the tile does not, at every residue of 16. */
TEST(Poison, NeighboursInATileAtEveryResidue) {
  const cases::Context x = test::context();
  constexpr DType kTypes[] = {DType::bf16, DType::f16, DType::f32};
  int turn = 0;
  for (int32_t group : {1, 2, 3, 5, 8}) {
    for (int32_t window_left : {-1, 20}) {
      const DType type = kTypes[turn++ % 3];
      Spec spec = cases::make_spec({group, 1, 16, 16}, type, 16, kCausal, {18}, {140});
      spec.problem.window_left = window_left;
      spec.poison = false;
      const Call clean = generate(spec, x.seed);
      Answer want;
      ATTNFOLD_ASSERT_HOLDS(cases::run(clean, cases::execution(x), want));
      for (int32_t key = 140 - 17; key < 140; ++key) {  // across the edge of a leaf, at 128
        ATTNFOLD_EXPECT_HOLDS(only_seen_rows_change(clean, want, key, x))
            << "group " << group << " window " << window_left;
      }
      for (int32_t key = 102; window_left > 0 && key < 120; key += 3) {  // where windows begin
        ATTNFOLD_EXPECT_HOLDS(only_seen_rows_change(clean, want, key, x))
            << "group " << group << " window " << window_left;
      }
    }
  }
}

TEST(Poison, WindowRightWithoutCausal) {
  const cases::Context x = test::context();
  Spec spec = cases::make_spec({6, 2, 24, 16}, DType::bf16, 16, kNone, {12}, {300});
  spec.problem.window_left = 40;
  spec.problem.window_right = 3;
  spec.poison = false;
  const Call clean = generate(spec, x.seed);
  Answer want;
  ATTNFOLD_ASSERT_HOLDS(cases::run(clean, cases::execution(x), want));
  for (int32_t key : {247, 248, 255, 256, 259, 290, 291, 295, 299}) {
    ATTNFOLD_EXPECT_HOLDS(only_seen_rows_change(clean, want, key, x));
  }
}

/** Non-finite numbers in a long row, where its key lies in any leaf of any super-chunk. */
TEST(Poison, SeenNumbersReachLongRows) {
  const cases::Context x = test::context();
  Spec spec = cases::make_spec({4, 1, 16, 16}, DType::f16, 16, kCausal, {2}, {8400});
  const Call clean = generate(spec, x.seed);
  for (int32_t key : {0, 127, 128, 2047, 2048, 5000, 8398, 8399}) {
    for (const Placed& placed : kPlaced) {
      if (placed.in_k && !std::isnan(placed.value)) continue;
      Call call;
      Answer answer;
      ATTNFOLD_ASSERT_HOLDS(run_with(clean, key, placed, x, call, answer));
      const int32_t seen_by = key == 8399 ? 1 : 0;
      EXPECT_FALSE(std::isfinite(cases::o_at(call, answer, seen_by, 0, 3))) << key;
      EXPECT_EQ(std::isnan(cases::lse_at(call, answer, seen_by, 0)), placed.in_k) << key;
      ATTNFOLD_EXPECT_HOLDS(cases::judge_answer(call, answer));
    }
  }
}

TEST(Poison, NaNInAQueryStaysInItsRow) {
  const cases::Context x = test::context();
  for (int32_t qo_len : {1, 5, 40}) {
    const Call clean = generate(
        cases::make_spec({6, 2, 40, 40}, DType::bf16, 16, kCausal, {qo_len, 2}, {200, 90}), x.seed);
    Answer want;
    ATTNFOLD_ASSERT_HOLDS(cases::run(clean, cases::execution(x), want));
    for (int32_t token : {0, qo_len / 2, qo_len - 1}) {
      Call call = cases::deep_copy(clean);
      const int64_t at = call.q_offset + token * call.q_strides.token + 2 * call.q_strides.head + 7;
      store_f32(call.q->data(), DType::bf16, at, kNaN);
      Answer got;
      ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x, 2), got));
      for (int32_t row = 0; row < call.num_rows(); ++row) {
        for (int32_t h = 0; h < 6; ++h) {
          const bool is_it = row == token && h == 2;
          EXPECT_EQ(std::isnan(cases::lse_at(call, got, row, h)), is_it) << row << " " << h;
          EXPECT_EQ(std::isnan(cases::o_at(call, got, row, h, 39)), is_it) << row << " " << h;
          if (!is_it) {
            EXPECT_EQ(cases::o_at(call, got, row, h, 39), cases::o_at(clean, want, row, h, 39));
          }
        }
      }
    }
  }
}

/** More heads than one word of marks has bits. */
TEST(Poison, NaNInAValueStaysInItsHead) {
  const cases::Context x = test::context();
  const Call call = cases::deep_copy(
      generate(cases::make_spec({200, 200, 16, 16}, DType::bf16, 16, kCausal, {1}, {150}), x.seed));
  const int64_t at = call.kv_element_offset(0, 20, call.v_strides, call.v_offset);
  store_f32(call.v->data(), DType::bf16, at + 150 * call.v_strides.head + 3, kNaN);
  Answer answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), answer));
  for (int32_t head = 0; head < 200; ++head) {
    for (int32_t e = 0; e < 16; ++e) {
      EXPECT_EQ(std::isnan(cases::o_at(call, answer, 0, head, e)), head == 150 && e == 3)
          << head << " " << e;
    }
  }
}

TEST(Poison, InputsAreNotWritten) {
  const cases::Context x = test::context();
  Spec spec = cases::make_spec({6, 2, 40, 48}, DType::f16, 5, kCausal, {1, 30, 4}, {2500, 90, 0});
  spec.odd_strides = true;
  const Call call = generate(spec, x.seed);
  const Call before = cases::deep_copy(call);
  Answer answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x, 3), answer));
  EXPECT_EQ(std::memcmp(before.q->data(), call.q->data(), call.q->size()), 0);
  EXPECT_EQ(std::memcmp(before.k->data(), call.k->data(), call.k->size()), 0);
  EXPECT_EQ(std::memcmp(before.v->data(), call.v->data(), call.v->size()), 0);
  EXPECT_EQ(before.block_table, call.block_table);
  EXPECT_EQ(before.qo_indptr, call.qo_indptr);
  EXPECT_EQ(before.kv_len, call.kv_len);
}

}  // namespace
}  // namespace attnfold::check
