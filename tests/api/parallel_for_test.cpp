// A host that brings its own threads.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <thread>
#include <vector>

#include "api/small_call.h"

namespace attnfold::api_test {
namespace {

/** A host's pool: how it was called, and the order in which it runs bodies. */
struct Host {
  enum Order { kForward, kBackward, kThreads } order = kForward;
  std::vector<int32_t> calls;  // the n of each call

  static void parallel_for(void* user, int32_t n, void (*body)(void*, int32_t), void* context) {
    Host* host = static_cast<Host*>(user);
    host->calls.push_back(n);
    if (host->order == kThreads) {
      std::vector<std::thread> threads;
      for (int32_t i = 0; i < n; ++i) threads.emplace_back(body, context, i);
      for (std::thread& t : threads) t.join();
      return;
    }
    for (int32_t i = 0; i < n; ++i) {
      body(context, host->order == kForward ? i : n - 1 - i);
    }
  }

  attnfold_execution execution_with(int32_t num_workers) {
    attnfold_execution e = execution(0, num_workers);
    e.parallel_for = &Host::parallel_for;
    e.parallel_user = this;
    return e;
  }
};

int num_threads_of_process() {
  int n = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator("/proc/self/task")) {
    ++n;
  }
  return n;
}

TEST(ParallelFor, TheHostsIsCalledAndTheLibraryStartsNoThreadOfItsOwn) {
  SmallCall call({{1, 6000}, {3, 900}});
  Host host;
  const PlanPtr plan = make_plan(call, host.execution_with(7));
  const int before = num_threads_of_process();
  ASSERT_EQ(run(plan.get(), call.tensors), ATTNFOLD_OK) << attnfold_last_error();
  EXPECT_EQ(num_threads_of_process(), before);
  ASSERT_FALSE(host.calls.empty());
  EXPECT_EQ(host.calls.front(), 7) << "the workers' shares";
  for (const int32_t n : host.calls) EXPECT_GE(n, 1);
}

TEST(ParallelFor, AnyOrderAndAnyThreadsGiveTheSameBits) {
  SmallCall call({{1, 6000}, {3, 900}, {1, 0}, {40, 333}});
  const Bytes expected = answer(call, execution(1, 1));
  for (const Host::Order order : {Host::kForward, Host::kBackward, Host::kThreads}) {
    for (const int32_t workers : {1, 2, 5, 8}) {
      Host host;
      host.order = order;
      EXPECT_TRUE(same_bytes(answer(call, host.execution_with(workers)), expected))
          << "order " << order << ", " << workers << " workers";
    }
  }
}

}  // namespace
}  // namespace attnfold::api_test
