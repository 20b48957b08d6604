// Callers on several threads at once.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "api/small_call.h"

namespace attnfold::api_test {
namespace {

constexpr int kThreads = 4;

/** Runs body(t) on kThreads threads that start together. */
template <class Body>
void at_once(Body body) {
  std::atomic<int> waiting{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      --waiting;
      while (waiting > 0) std::this_thread::yield();
      body(t);
    });
  }
  for (std::thread& t : threads) t.join();
}

/** Adds the ids of this process's threads. */
void add_threads(std::set<std::string>* ids) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    ids->insert(entry.path().filename());
}

TEST(Threads, CallsGoOnWithTheThreadsOfTheFirstOne) {
  SmallCall call(
      {{1, 4000}, {4, 600}});  // whose second pass has fewer tasks than there are threads
  const PlanPtr plan = make_plan(call, execution(4, 6));
  ASSERT_EQ(run(plan.get(), call.tensors), ATTNFOLD_OK);
  std::set<std::string> first, all;
  add_threads(&first);
  all = first;
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(run(plan.get(), call.tensors), ATTNFOLD_OK);
    add_threads(&all);
  }
  EXPECT_EQ(all, first);
}

int32_t num_shares(const SmallCall& call, const attnfold_execution& e) {
  const PlanPtr plan = make_plan(call, e);
  attnfold_plan_report report{};
  report.struct_size = sizeof report;
  EXPECT_EQ(attnfold_plan_get_report(plan.get(), &report), ATTNFOLD_OK);
  return report.num_workers;
}

TEST(Threads, WorkIsCutIntoMoreSharesThanThereAreThreads) {
  SmallCall decode({{1, 16384}}), short_decode({{1, 1000}}), prefill({{300, 16384}}),
      long_prefill({{900, 3000}});
  EXPECT_EQ(num_shares(decode, execution(4, 0)), 16) << "eight leaves each";
  EXPECT_EQ(num_shares(short_decode, execution(4, 0)), 4);
  EXPECT_EQ(num_shares(prefill, execution(4, 0)), 4) << "cuts through many rows";
  EXPECT_GE(num_shares(long_prefill, execution(4, 0)), 16) << "units as they are";
  EXPECT_EQ(num_shares(decode, execution(2, 0)), 2);
  EXPECT_EQ(num_shares(decode, execution(4, 3)), 3);
  for (SmallCall* call : {&decode, &prefill, &long_prefill}) {
    const Bytes expected = answer(*call, execution(1, 1));
    EXPECT_TRUE(same_bytes(answer(*call, execution(4, 0)), expected));
    EXPECT_TRUE(same_bytes(answer(*call, execution(13, 0)), expected));
  }
}

TEST(Threads, OnePlanRunsOnSeveralThreadsEachWithItsOwnWorkspaceAndOutputs) {
  SmallCall call({{1, 5000}, {5, 700}, {1, 20}});
  const Bytes expected = answer(call, execution(1, 1));
  const PlanPtr plan = make_plan(call, execution(2, 5));
  std::vector<Bytes> got(kThreads);
  std::vector<attnfold_status> statuses(kThreads);
  at_once([&](int t) {
    Floats o(call.o.size()), lse(call.lse.size());
    attnfold_tensors tensors = call.tensors;
    tensors.o = o.data();
    tensors.lse = lse.data();
    for (int i = 0; i < 3; ++i) {
      o.poison();
      lse.poison();
      statuses[t] = run(plan.get(), tensors);
      if (statuses[t] != ATTNFOLD_OK) return;
    }
    got[t].resize(expected.size());
    std::memcpy(got[t].data(), o.data(), o.bytes());
    std::memcpy(got[t].data() + o.bytes(), lse.data(), lse.bytes());
  });
  for (int t = 0; t < kThreads; ++t) {
    EXPECT_EQ(statuses[t], ATTNFOLD_OK);
    EXPECT_TRUE(same_bytes(got[t], expected)) << "thread " << t;
  }
}

TEST(Threads, PlansAreMadeUpdatedRunAndDestroyedInParallel) {
  SmallCall reference({{1, 900}, {3, 100}});
  const Bytes expected = answer(reference, execution(1, 1));
  std::vector<int> wrong(kThreads, 0);
  at_once([&](int t) {
    for (int i = 0; i < 10; ++i) {
      SmallCall call({{1, 900}, {3, 100}});
      attnfold_plan* plan = nullptr;
      const attnfold_execution e = execution(1 + i % 2, 1 + (t + i) % 6);
      const bool done = attnfold_plan_create(&call.problem, &e, &plan) == ATTNFOLD_OK &&
                        attnfold_plan_update(plan, &call.lengths, nullptr) == ATTNFOLD_OK &&
                        run(plan, call.tensors) == ATTNFOLD_OK;
      if (!done || call.output_bytes() != expected) ++wrong[t];
      attnfold_plan_destroy(plan);
    }
  });
  for (int t = 0; t < kThreads; ++t) EXPECT_EQ(wrong[t], 0) << "thread " << t;
}

TEST(Threads, EachThreadHasItsOwnLastError) {
  std::vector<std::string> texts(kThreads);
  at_once([&](int t) {
    SmallCall call;
    call.problem.head_dim_qk = 1001 + t;
    attnfold_plan* plan = nullptr;
    for (int i = 0; i < 50; ++i) {
      if (attnfold_plan_create(&call.problem, nullptr, &plan) == ATTNFOLD_OK) return;
      texts[t] = attnfold_last_error();
      if (texts[t].find(std::to_string(1001 + t)) == std::string::npos) return;
    }
  });
  for (int t = 0; t < kThreads; ++t) {
    EXPECT_NE(texts[t].find("got " + std::to_string(1001 + t)), std::string::npos) << texts[t];
  }
}

TEST(Threads, ASuccessLeavesTheLastErrorAsItWas) {
  EXPECT_EQ(attnfold_plan_update(nullptr, nullptr, nullptr), ATTNFOLD_INVALID_ARGUMENT);
  const std::string text = attnfold_last_error();
  SmallCall call;
  EXPECT_FALSE(answer(call, execution(1, 1)).empty());
  EXPECT_EQ(attnfold_last_error(), text);
}

}  // namespace
}  // namespace attnfold::api_test
