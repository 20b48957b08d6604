// Promise P2: a request's bits depend on that request alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <thread>

#include "conformance/suite.h"
#include "control_word.h"

namespace attnfold::check {
namespace {

using cases::kCausal;
using cases::kNone;
using cases::same_bytes;
using cases::Shape;

/** Rows of more than four super-chunks beside short ones. */
Spec long_spec(Shape shape, DType type, int32_t window_left = -1,
               attnfold_mask_kind mask = kCausal) {
  Spec spec =
      cases::make_spec(shape, type, 16, mask, {1, 5, 3, 1, 40, 0}, {8500, 8330, 17, 0, 200, 30});
  spec.problem.window_left = window_left;
  return spec;
}

struct Family {
  const char* name;
  Spec spec;
};

std::vector<Family> families() {
  return {
      {"f32 group 1", long_spec({2, 2, 16, 16}, DType::f32)},
      {"bf16 group 4", long_spec({8, 2, 16, 24}, DType::bf16)},
      {"f16 group 3, unmasked", long_spec({3, 1, 24, 16}, DType::f16, -1, kNone)},
      {"bf16 group 16", long_spec({16, 1, 16, 16}, DType::bf16)},
      {"f16 windowed", long_spec({4, 2, 16, 16}, DType::f16, 8201)},
  };
}

TEST(Invariance, SchedulesDoNotChangeABit) {
  const cases::Context x = test::context();
  for (const Family& family : families()) {
    const Call call = generate(family.spec, x.seed);
    const std::vector<attnfold_execution> executions = distinct_schedules(call, 14, x.seed, x.isa);
    std::set<uint64_t> ids;
    int32_t cuts_inside = 0, cuts_between = 0;
    Answer first;
    for (const attnfold_execution& execution : executions) {
      Answer answer;
      ATTNFOLD_ASSERT_HOLDS(cases::run(call, execution, answer)) << family.name;
      ids.insert(answer.report.schedule_id);
      cuts_inside += answer.report.num_cuts_inside;
      cuts_between += answer.report.num_cuts - answer.report.num_cuts_inside;
      EXPECT_GE(answer.report.max_super_chunks, 4) << family.name;
      if (ids.size() == 1) {
        ATTNFOLD_EXPECT_HOLDS(cases::judge_tokens(call, answer, cases::sample_tokens(call, 2)))
            << family.name;
        first = std::move(answer);
      } else {
        ATTNFOLD_ASSERT_HOLDS(same_bytes(call, first, answer, family.name))
            << execution.num_workers << " workers, cut_seed " << execution.cut_seed;
      }
    }
    EXPECT_EQ(ids.size(), executions.size())
        << family.name << ": the schedules compared were not distinct";
    EXPECT_GE(ids.size(), 12u) << family.name;
    EXPECT_GT(cuts_inside, 0) << family.name << ": no cut inside a super-chunk";
    EXPECT_GT(cuts_between, 0) << family.name << ": no cut between super-chunks";
  }
}

TEST(Invariance, OneToEightWorkers) {
  const cases::Context x = test::context();
  const Call call = generate(long_spec({4, 2, 16, 16}, DType::bf16), x.seed);
  std::set<uint64_t> ids;
  Answer first;
  for (int32_t workers = 1; workers <= 8; ++workers) {
    for (uint64_t cut_seed : {uint64_t{0}, x.seed + workers}) {
      Answer answer;
      ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x, workers, cut_seed), answer));
      EXPECT_EQ(answer.report.num_workers, workers);
      ids.insert(answer.report.schedule_id);
      if (workers == 1 && cut_seed == 0) {
        first = std::move(answer);
      } else {
        ATTNFOLD_ASSERT_HOLDS(
            same_bytes(call, first, answer, std::to_string(workers) + " workers"));
      }
    }
  }
  EXPECT_GE(ids.size(), 15u);  // one worker has one schedule
}

class InvarianceRandom : public ::testing::TestWithParam<int> {};

/** Every request of a random batch alone, the batch reversed, each request twice. */
TEST_P(InvarianceRandom, BatchMatesAndOrder) {
  const uint64_t seed = test::seed() + 1000 + static_cast<uint64_t>(GetParam());
  const cases::Context x{seed, nullptr};
  std::mt19937_64 rng(seed);
  const Call call = generate(random_case(rng), seed);
  Answer whole;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), whole));
  std::vector<int32_t> reversed, twice;
  for (int32_t r = 0; r < call.batch; ++r) {
    reversed.insert(reversed.begin(), r);
    twice.push_back(r);
    twice.push_back(r);
    const Call one = select_requests(call, {r});
    Answer alone;
    ATTNFOLD_ASSERT_HOLDS(cases::run(one, cases::execution(x, 1 + r % 4, seed + r), alone));
    ATTNFOLD_ASSERT_HOLDS(
        cases::same_rows(one, alone, 0, whole, call.qo_indptr[r], one.num_rows(), "alone"))
        << "seed " << seed;
  }
  for (const std::vector<int32_t>& pick : {reversed, twice}) {
    const Call other = select_requests(call, pick);
    Answer answer;
    ATTNFOLD_ASSERT_HOLDS(cases::run(other, cases::execution(x, 3), answer));
    for (size_t i = 0; i < pick.size(); ++i) {
      const int32_t begin = other.qo_indptr[i], n = other.qo_indptr[i + 1] - begin;
      ATTNFOLD_ASSERT_HOLDS(cases::same_rows(other, answer, begin, whole, call.qo_indptr[pick[i]],
                                             n, "in another batch"))
          << "seed " << seed;
    }
  }
}

/** The same keys in pages of other sizes, other places, both layouts, CSR, and as rows. */
TEST_P(InvarianceRandom, WhereTheKeysLie) {
  const uint64_t seed = test::seed() + 2000 + static_cast<uint64_t>(GetParam());
  const cases::Context x{seed, nullptr};
  std::mt19937_64 rng(seed);
  const Call call = generate(random_case(rng), seed);
  Answer first, answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), first));
  int turn = 0;
  for (int32_t page_size : {1, 3, 16, 64, 128}) {
    ++turn;
    const attnfold_kv_layout layout = turn % 2 ? ATTNFOLD_HND : ATTNFOLD_NHD;
    const Call other = repage(call, page_size, layout, turn % 3 == 0, seed + turn);
    ATTNFOLD_ASSERT_HOLDS(cases::run(other, cases::execution(x, turn), answer)) << "seed " << seed;
    ATTNFOLD_ASSERT_HOLDS(same_bytes(call, first, answer, "page size " + std::to_string(page_size)))
        << "seed " << seed;
  }
  const Call ragged = to_ragged(call);
  ATTNFOLD_ASSERT_HOLDS(cases::run(ragged, cases::execution(x), answer)) << "seed " << seed;
  ATTNFOLD_ASSERT_HOLDS(same_bytes(call, first, answer, "ragged")) << "seed " << seed;
}

INSTANTIATE_TEST_SUITE_P(Seeds, InvarianceRandom, ::testing::Range(0, 12));

/** A mixed batch, small enough to be run many ways. */
Spec mixed_spec(DType type) {
  return cases::make_spec({6, 2, 40, 32}, type, 16, kCausal, {1, 20, 3, 1, 2},
                          {700, 150, 17, 1, 2100});
}

TEST(Invariance, EveryPageSizeLayoutTableAndPlacement) {
  const cases::Context x = test::context();
  const Call call = generate(mixed_spec(DType::bf16), x.seed);
  Answer first, answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), first));
  ATTNFOLD_ASSERT_HOLDS(cases::judge_answer(call, first));
  for (int32_t page_size : {1, 3, 16, 64, 128}) {
    for (attnfold_kv_layout layout : {ATTNFOLD_NHD, ATTNFOLD_HND}) {
      for (bool csr : {false, true}) {
        for (uint64_t place : {1, 2}) {
          const Call other = repage(call, page_size, layout, csr, x.seed + place);
          ATTNFOLD_ASSERT_HOLDS(cases::run(other, cases::execution(x), answer));
          ATTNFOLD_EXPECT_HOLDS(
              same_bytes(call, first, answer, "page " + std::to_string(page_size)))
              << layout << csr;
        }
      }
    }
  }
}

/** [batch, capacity] rows: request r at row r * capacity, its length in kv_len. */
Call contiguous(const Call& call, int32_t capacity) {
  Call out = call;
  const Call rows = to_ragged(call);
  out.problem = rows.problem;
  out.block_table.clear();
  out.kv_indices.clear();
  out.kv_indptr.clear();
  for (int32_t r = 0; r <= call.batch; ++r) out.kv_indptr.push_back(r * capacity);
  out.num_kv_rows = int64_t{call.batch} * capacity;
  const int64_t bytes = dtype_bytes(static_cast<DType>(call.problem.kv_dtype));
  const auto spread = [&](const Buffer& from, const Strides& s, int64_t offset) {
    auto to = std::make_shared<Buffer>(static_cast<size_t>(out.num_kv_rows * s.token * bytes));
    std::memset(to->data(), 0xff, to->size());
    for (int32_t r = 0; r < call.batch; ++r) {
      std::memcpy(to->data() + r * capacity * s.token * bytes,
                  from.data() + (offset + rows.kv_indptr[r] * s.token) * bytes,
                  static_cast<size_t>(call.kv_len[r] * s.token * bytes));
    }
    return to;
  };
  out.k = spread(*rows.k, rows.k_strides, rows.k_offset);
  out.v = spread(*rows.v, rows.v_strides, rows.v_offset);
  out.k_strides = rows.k_strides;
  out.v_strides = rows.v_strides;
  out.k_offset = out.v_offset = 0;
  return out;
}

TEST(Invariance, RaggedAndContiguousRows) {
  const cases::Context x = test::context();
  const Call call = generate(mixed_spec(DType::f16), x.seed);
  Answer first, answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), first));
  ATTNFOLD_ASSERT_HOLDS(cases::run(to_ragged(call), cases::execution(x), answer));
  ATTNFOLD_EXPECT_HOLDS(same_bytes(call, first, answer, "ragged"));
  for (int32_t capacity : {2100, 2112}) {
    ATTNFOLD_ASSERT_HOLDS(cases::run(contiguous(call, capacity), cases::execution(x), answer));
    ATTNFOLD_EXPECT_HOLDS(
        same_bytes(call, first, answer, "contiguous, capacity " + std::to_string(capacity)));
  }
}

TEST(Invariance, Strides) {
  const cases::Context x = test::context();
  for (DType type : {DType::f32, DType::f16, DType::bf16}) {
    for (int32_t page_size : {cases::kRagged, 16}) {
      Spec spec = mixed_spec(type);
      spec.problem.kv_storage =
          page_size == cases::kRagged ? ATTNFOLD_KV_RAGGED : ATTNFOLD_KV_PAGED;
      const Call packed = generate(spec, x.seed);
      spec.odd_strides = true;
      const Call odd = generate(spec, x.seed);
      Answer a, b, spaced;
      ATTNFOLD_ASSERT_HOLDS(cases::run(packed, cases::execution(x), a));
      ATTNFOLD_ASSERT_HOLDS(cases::run(odd, cases::execution(x, 3), b));
      ATTNFOLD_EXPECT_HOLDS(
          same_bytes(packed, a, b, std::string("odd strides, ") + dtype_name(type)));
      ATTNFOLD_ASSERT_HOLDS(cases::run_spaced(odd, cases::execution(x, 2), spaced));
      ATTNFOLD_EXPECT_HOLDS(
          same_bytes(packed, a, spaced, std::string("outputs with gaps, ") + dtype_name(type)));
    }
  }
}

void in_reverse(void*, int32_t n, void (*body)(void*, int32_t), void* context) {
  for (int32_t i = n; i-- > 0;) body(context, i);
}

void on_threads(void*, int32_t n, void (*body)(void*, int32_t), void* context) {
  std::vector<std::thread> threads;
  for (int32_t i = 0; i < n; ++i) threads.emplace_back(body, context, i);
  for (std::thread& thread : threads) thread.join();
}

TEST(Invariance, ThreadsAndHostPools) {
  const cases::Context x = test::context();
  const Call call = generate(long_spec({4, 2, 16, 16}, DType::bf16), x.seed);
  Answer first, answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x, 1, 0, 1), first));
  for (int32_t threads : {1, 2, 3, 5}) {
    for (int32_t workers : {0, 7}) {
      ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x, workers, 0, threads), answer));
      ATTNFOLD_EXPECT_HOLDS(same_bytes(call, first, answer, std::to_string(threads) + " threads"));
    }
  }
  for (attnfold_parallel_for pool : {in_reverse, on_threads}) {
    attnfold_execution execution = cases::execution(x, 6, 0, 6);
    execution.parallel_for = pool;
    for (int repeat = 0; repeat < 5; ++repeat) {
      ATTNFOLD_ASSERT_HOLDS(cases::run(call, execution, answer));
      ATTNFOLD_EXPECT_HOLDS(same_bytes(call, first, answer, "a host's pool"));
    }
  }
}

/** How many rows a unit has may depend on the batch and the number of threads. */
TEST(Invariance, PrefillsOfOnePlanOnManyThreads) {
  const cases::Context x = test::context();
  const Call call = generate(
      cases::make_spec({16, 1, 16, 16}, DType::bf16, 16, kCausal, {300, 9, 700}, {430, 40, 700}),
      x.seed);
  std::vector<Call> batches = {call};
  for (const std::vector<int32_t>& requests : {std::vector<int32_t>{0}, {1}, {2}, {1, 0}}) {
    batches.push_back(select_requests(call, requests));
    batches.back().problem = call.problem;
  }
  std::vector<Answer> first(batches.size());
  std::set<int32_t> unit_counts;  // of the whole batch
  for (const int32_t threads : {1, 4, 5, 7, 9, 11, 16}) {
    cases::Plan plan(call.problem, cases::execution(x, 0, 0, threads));
    for (size_t i = 0; i < batches.size(); ++i) {
      Answer answer;
      ATTNFOLD_ASSERT_HOLDS(plan.update(batches[i]));
      ATTNFOLD_ASSERT_HOLDS(plan.run(batches[i], answer));
      if (i == 0) unit_counts.insert(answer.report.num_units);
      if (threads == 1) {
        ATTNFOLD_EXPECT_HOLDS(cases::judge_answer(batches[i], answer));
        first[i] = std::move(answer);
      } else {
        ATTNFOLD_ASSERT_HOLDS(
            same_bytes(batches[i], first[i], answer, std::to_string(threads) + " threads"));
      }
    }
  }
  const std::string isa = x.isa != nullptr ? x.isa : "";
  const bool varies = isa.find("p16") != std::string::npos || isa.rfind("amx", 0) == 0;
  if (!isa.empty()) {
    EXPECT_EQ(unit_counts.size(), varies ? 2u : 1u) << isa;
  }
}

TEST(Invariance, LargerMaxima) {
  const cases::Context x = test::context();
  const Call call = generate(mixed_spec(DType::f32), x.seed);
  Call roomy = call;
  roomy.problem.max_batch = 100;
  roomy.problem.max_qo_rows = 5000;
  roomy.problem.max_kv_len = 100000;
  Answer a, b;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x, 3), a));
  ATTNFOLD_ASSERT_HOLDS(cases::run(roomy, cases::execution(x, 3), b));
  ATTNFOLD_EXPECT_HOLDS(same_bytes(call, a, b, "larger maxima"));
  EXPECT_EQ(a.report.schedule_id, b.report.schedule_id);
}

#if defined(__x86_64__) || defined(__aarch64__)
TEST(FloatingPointMode, OfTheCallerChangesNoBit) {
  const cases::Context x = test::context();
  Spec spec = long_spec({4, 2, 16, 16}, DType::f32);
  spec.q_range = 12.0f;   // weights down to subnormal ones
  spec.v_range = 1e-38f;  // and subnormal products
  const Call call = generate(spec, x.seed);
  Answer first;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x, 4), first));
  const uint64_t own = attnfold::test::control_word();
  for (const uint64_t mode : attnfold::test::kOddControls) {
    Answer answer;
    attnfold::test::set_control_word(mode);
    const std::string failed = [&] {
      cases::Plan plan(call.problem, cases::execution(x, 4));
      std::string text = plan.update(call);
      return text.empty() ? plan.run(call, answer) : text;
    }();
    const uint64_t after = attnfold::test::control_word();
    attnfold::test::set_control_word(own);
    ATTNFOLD_ASSERT_HOLDS(failed);
    EXPECT_EQ(after, mode) << "the caller's mode was not restored";
    ATTNFOLD_EXPECT_HOLDS(same_bytes(call, first, answer, "mode " + std::to_string(mode)));
  }
}
#endif

TEST(Invariance, RunsOfOnePlanFromSeveralThreads) {
  const cases::Context x = test::context();
  const Call call = generate(mixed_spec(DType::bf16), x.seed);
  Answer first;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), first));
  cases::Plan plan(call.problem, cases::execution(x, 3));
  ATTNFOLD_ASSERT_HOLDS(plan.update(call));
  std::string wrong[3];
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      Answer answer;
      answer.o = Buffer(first.o.size());
      answer.lse.resize(first.lse.size());
      attnfold_tensors t = call.tensors();
      t.o = answer.o.data();
      t.lse = answer.lse.data();
      Buffer workspace(attnfold_plan_workspace_bytes(plan.get()));
      for (int repeat = 0; repeat < 5 && wrong[i].empty(); ++repeat) {
        if (attnfold_plan_run(plan.get(), &t, workspace.data(), workspace.size(), nullptr) !=
            ATTNFOLD_OK) {
          wrong[i] = attnfold_last_error();
        } else {
          wrong[i] = first_difference(call, first, answer);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& text : wrong) ATTNFOLD_EXPECT_HOLDS(text);
}

}  // namespace
}  // namespace attnfold::check
