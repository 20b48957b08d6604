// The pool of threads by itself: every body once, phases in order, whoever calls and whatever the
// system gives.
#include "cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#define ATTNFOLD_FORKS_WITH_THREADS 0  // ThreadSanitizer refuses threads in a forked child
#else
#define ATTNFOLD_FORKS_WITH_THREADS 1
#endif

namespace attnfold::cpu {
namespace {

void call(const Phase& phase, int32_t i) { phase.body(phase.context, i); }

/** What one call does: counts its bodies, and those that came before all of an earlier phase. */
class Counted {
 public:
  explicit Counted(const std::vector<int32_t>& sizes) : phases_(sizes.size()) {
    int32_t before = 0;
    for (size_t p = 0; p < sizes.size(); ++p) {
      phases_[p].all = this;
      phases_[p].num_before = before;
      phases_[p].calls = std::vector<std::atomic<int32_t>>(static_cast<size_t>(sizes[p]));
      before += sizes[p];
    }
  }

  /** Runs it; whether every body was called once, and in order. */
  bool run(int32_t num_threads) {
    std::vector<Phase> phases;
    for (OnePhase& p : phases_)
      phases.push_back({static_cast<int32_t>(p.calls.size()), &OnePhase::body, &p});
    for (OnePhase& p : phases_)
      for (std::atomic<int32_t>& calls : p.calls) calls = 0;
    num_done_ = 0;
    run_on_pool(num_threads, phases, call);
    bool right = num_early_ == 0;
    for (const OnePhase& p : phases_)
      for (const std::atomic<int32_t>& calls : p.calls) right = right && calls == 1;
    return right;
  }

 private:
  struct OnePhase {
    Counted* all;
    int32_t num_before;
    std::vector<std::atomic<int32_t>> calls;

    static void body(void* context, int32_t i) {
      OnePhase* phase = static_cast<OnePhase*>(context);
      if (phase->all->num_done_ < phase->num_before) ++phase->all->num_early_;
      ++phase->calls[static_cast<size_t>(i)];
      ++phase->all->num_done_;
    }
  };
  std::vector<OnePhase> phases_;
  std::atomic<int32_t> num_done_{0}, num_early_{0};
};

/** Calls body(i) for i = 0..n-1 on the pool. */
template <class Body>
void for_each(int32_t num_threads, int32_t n, Body body) {
  const auto one = [](void* context, int32_t i) { (*static_cast<Body*>(context))(i); };
  const Phase phase{n, one, &body};
  run_on_pool(num_threads, {&phase, 1}, call);
}

/** Threads of the pool, by their name. */
int num_pool_threads() {
  int n = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(entry.path() / "comm") >> name;
    n += name == "attnfold";
  }
  return n;
}

/** Waits for `done()`, a minute at most. */
template <class Done>
bool comes_true(Done done) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

/** The exit status of a child that runs `body`; -1 if a signal ended it. */
template <class Body>
int in_child(Body body) {
  const pid_t pid = fork();
  if (pid == 0) {
    std::signal(SIGALRM, SIG_DFL);
    alarm(60);
    _exit(body());
  }
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(ThreadPool, CallsEveryBodyOnceAndPhasesInOrder) {
  for (const int32_t threads : {0, 1, 2, 3, 7, 16}) {
    for (const int32_t first : {0, 1, 2, 5, 16, 17, 1000}) {
      for (const int32_t second : {0, 1, 3, 40}) {
        Counted two({first, second});
        for (int i = 0; i < 5; ++i)
          ASSERT_TRUE(two.run(threads)) << threads << " threads, " << first << " and " << second;
      }
    }
  }
  for (const std::vector<int32_t>& sizes :
       {std::vector<int32_t>{}, {0}, {4, 0, 4}, {1, 1, 1, 1}, {3, 5, 2, 9}}) {
    Counted all(sizes);
    EXPECT_TRUE(all.run(4));
  }
}

TEST(ThreadPool, APhaseSeesWhatTheOneBeforeItWrote) {
  struct Values {
    std::vector<int> first, second;  // plain: the pool orders them
  } values{std::vector<int>(50), std::vector<int>(20)};
  const auto write = [](void* v, int32_t i) {
    static_cast<Values*>(v)->first[static_cast<size_t>(i)] = i;
  };
  const auto sum = [](void* v, int32_t i) {
    for (const int x : static_cast<Values*>(v)->first)
      static_cast<Values*>(v)->second[static_cast<size_t>(i)] += x;
  };
  const Phase phases[] = {{50, write, &values}, {20, sum, &values}};
  for (int round = 1; round <= 200; ++round) {
    std::fill(values.first.begin(), values.first.end(), 0);
    run_on_pool(5, phases, call);
    for (const int x : values.second) ASSERT_EQ(x, round * 49 * 50 / 2);
  }
}

TEST(ThreadPool, ASingleBodyStaysOnTheCallersThread) {
  std::thread::id where;
  for (int i = 0; i < 100; ++i) {
    for_each(8, 1, [&](int32_t) { where = std::this_thread::get_id(); });
    ASSERT_EQ(where, std::this_thread::get_id());
  }
}

TEST(ThreadPool, AsManyThreadsWorkAtOnceAsWereAskedFor) {
  // Each body waits for all: with fewer threads than bodies none would come to its end.
  std::atomic<int32_t> num_here{0};
  std::atomic<bool> all_came{true};
  for_each(6, 6, [&](int32_t) {
    ++num_here;
    if (!comes_true([&] { return num_here == 6; })) all_came = false;
  });
  EXPECT_TRUE(all_came);
}

TEST(ThreadPool, IsNoLargerThanTheLargestCallAndItsThreadsAreUsedAgain) {
  Counted wide({64}), narrow({3});
  EXPECT_TRUE(wide.run(16));
  const int n = num_pool_threads();
  EXPECT_LE(n, std::max(16, usable_cpus()) - 1);
  for (int i = 0; i < 50; ++i) EXPECT_TRUE(i % 2 ? wide.run(16) : narrow.run(3));
  EXPECT_EQ(num_pool_threads(), n);
}

TEST(ThreadPool, BodiesMayCallItAgain) {
  std::atomic<int32_t> num_right{0};
  for_each(4, 8, [&](int32_t i) {
    Counted inner({i, 5});
    num_right += inner.run(3);
  });
  EXPECT_EQ(num_right, 8);
}

TEST(ThreadPool, CallersAtOnceShareIt) {
  std::atomic<int32_t> num_wrong{0};
  std::vector<std::thread> callers;
  for (int32_t t = 0; t < 8; ++t) {
    callers.emplace_back([&, t] {
      Counted mine({1 + t, 2 * t});
      for (int i = 0; i < 300; ++i) num_wrong += !mine.run(1 + (t + i) % 6);
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(num_wrong, 0);
}

TEST(ThreadPool, ACallNeedsNoThreadThatAnotherCallHas) {
  // The other call holds its threads until this one is done.
  std::atomic<bool> done{false};
  std::atomic<int32_t> num_held{0};
  const int32_t most = std::max(16, usable_cpus());
  std::thread other([&] {
    for_each(most, most, [&](int32_t) {
      ++num_held;
      comes_true([&] { return done.load(); });
    });
  });
  EXPECT_TRUE(comes_true([&] { return num_held == most; }));
  Counted mine({20, 20});
  EXPECT_TRUE(mine.run(most));
  done = true;
  other.join();
}

TEST(ThreadPool, ACallThatIsShortOfThreadsGetsThoseThatAnotherGivesBack) {
  std::atomic<bool> go_on{false};
  std::atomic<int32_t> num_held{0}, num_here{0};
  std::atomic<bool> was_helped{false};
  const int32_t most = std::max(16, usable_cpus());
  std::thread other([&] {
    for_each(most, most, [&](int32_t) {
      ++num_held;
      comes_true([&] { return go_on.load(); });
    });
  });
  EXPECT_TRUE(comes_true([&] { return num_held == most; }));
  for_each(2, 2, [&](int32_t) {  // each body waits for the other: this takes two threads
    ++num_here;
    go_on = true;
    if (comes_true([&] { return num_here == 2; })) was_helped = true;
  });
  EXPECT_TRUE(was_helped);
  other.join();
}

TEST(ThreadPool, ThreadsSleepBetweenCalls) {
  Counted work({8});
  ASSERT_TRUE(work.run(4));
  const auto cpu_ms = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return 1e3 * static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-3 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
  };
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double before = cpu_ms();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_LT(cpu_ms() - before, 30) << "of 300 ms, on all threads together";
}

TEST(ThreadPoolFork, AChildHasItsOwn) {
  if (!ATTNFOLD_FORKS_WITH_THREADS) GTEST_SKIP() << "ThreadSanitizer allows no threads in a child";
  Counted work({9, 4});
  ASSERT_TRUE(work.run(4));
  EXPECT_EQ(in_child([&] { return work.run(4) && num_pool_threads() == 3 ? 0 : 1; }), 0);
  EXPECT_TRUE(work.run(4));
}

TEST(ThreadPoolFork, LeavesNoLockBehindWhileOthersCall) {
  if (!ATTNFOLD_FORKS_WITH_THREADS) GTEST_SKIP() << "ThreadSanitizer allows no threads in a child";
  std::atomic<bool> done{false};
  std::vector<std::thread> callers;
  for (int t = 0; t < 3; ++t) {
    callers.emplace_back([&] {
      Counted mine({4, 4});
      while (!done) mine.run(3);
    });
  }
  for (int i = 0; i < 50; ++i) {
    ASSERT_EQ(in_child([&] {
                Counted mine({6, 2});
                return mine.run(4) ? 0 : 1;
              }),
              0);
  }
  done = true;
  for (std::thread& caller : callers) caller.join();
}

TEST(ThreadPoolFork, AChildExitsInOrder) {
  if (!ATTNFOLD_FORKS_WITH_THREADS) GTEST_SKIP() << "ThreadSanitizer allows no threads in a child";
  Counted work({9, 4});
  ASSERT_TRUE(work.run(4));
  for (const bool calls : {false, true}) {
    EXPECT_EQ(in_child([&] {
                if (calls && !work.run(4)) return 1;
                std::fflush(nullptr);
                std::exit(0);  // runs destructors, those of the pool among them
                return 1;
              }),
              0);
  }
}

TEST(ThreadPoolFork, AThreadThatIsRefusedIsDoneWithout) {
  if (!ATTNFOLD_FORKS_WITH_THREADS) GTEST_SKIP() << "ThreadSanitizer allows no threads in a child";
  constexpr int kNoLimit = 77;  // of threads, is to be had here
  constexpr uid_t kUser = 64123;
  for (const rlim_t most : {1, 3}) {  // threads of the child, its first one included
    const int status = in_child([&] {
      if (geteuid() != 0 || setuid(kUser) != 0) return kNoLimit;  // root has no limit
      const rlimit limit{most, most};
      if (setrlimit(RLIMIT_NPROC, &limit) != 0) return kNoLimit;
      Counted work({30, 7});
      for (int i = 0; i < 20; ++i)
        if (!work.run(8)) return 1;
      if (num_pool_threads() + 1 > static_cast<int>(most)) return kNoLimit;
      return most == 1 || num_pool_threads() > 0 ? 0 : 2;
    });
    if (status == kNoLimit) GTEST_SKIP() << "the number of threads cannot be limited here";
    EXPECT_EQ(status, 0) << most;
  }
}

}  // namespace
}  // namespace attnfold::cpu
