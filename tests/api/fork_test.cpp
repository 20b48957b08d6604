// A process that forks after it has used the library, as servers do: the child must be able to use
// it too.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <system_error>
#include <thread>

#include "api/small_call.h"

#if defined(__SANITIZE_THREAD__)
#define ATTNFOLD_FORKS_WITH_THREADS 0  // ThreadSanitizer refuses threads in a forked child
#else
#define ATTNFOLD_FORKS_WITH_THREADS 1
#endif

namespace attnfold::api_test {
namespace {

constexpr unsigned kSeconds = 60;  // until a child that hangs is ended

/** Exit status of a child that runs `body`, which returns one; -1 if a signal ended it. */
template <class Body>
int in_child(Body body) {
  const pid_t pid = fork();
  if (pid == 0) {
    std::signal(SIGALRM, SIG_DFL);
    alarm(kSeconds);
    _exit(body());
  }
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  if (WIFSIGNALED(status)) {
    ADD_FAILURE() << "child ended by signal " << WTERMSIG(status)
                  << (WTERMSIG(status) == SIGALRM ? ": it hung" : "");
    return -1;
  }
  return WEXITSTATUS(status);
}

/** 0 if the plan gives `expected`, else which step went wrong. */
int check(SmallCall& call, const attnfold_plan* plan, const Bytes& expected) {
  call.poison_outputs();
  if (run(plan, call.tensors) != ATTNFOLD_OK) return 2;
  return call.output_bytes() == expected ? 0 : 3;
}

int check_fresh_plan(SmallCall& call, const Bytes& expected) {
  attnfold_plan* plan = nullptr;
  const attnfold_execution e = execution(3, 4);
  if (attnfold_plan_create(&call.problem, &e, &plan) != ATTNFOLD_OK) return 4;
  if (attnfold_plan_update(plan, &call.lengths, nullptr) != ATTNFOLD_OK) return 5;
  const int status = check(call, plan, expected);
  attnfold_plan_destroy(plan);
  return status;
}

class Fork : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!ATTNFOLD_FORKS_WITH_THREADS)
      GTEST_SKIP() << "ThreadSanitizer allows no threads in a forked child";
    plan_ = make_plan(call_, execution(4, 6));
    ASSERT_NE(plan_, nullptr);
    call_.poison_outputs();
    ASSERT_EQ(run(plan_.get(), call_.tensors), ATTNFOLD_OK);  // the library's threads exist now
    expected_ = call_.output_bytes();
  }
  SmallCall call_{{{1, 4000}, {4, 600}}};
  PlanPtr plan_;
  Bytes expected_;
};

TEST_F(Fork, AChildRunsItsParentsPlan) {
  EXPECT_EQ(in_child([&] { return check(call_, plan_.get(), expected_); }), 0);
}

TEST_F(Fork, AChildMakesPlansOfItsOwn) {
  EXPECT_EQ(in_child([&] { return check_fresh_plan(call_, expected_); }), 0);
}

TEST_F(Fork, AGrandchildRunsToo) {
  const int status = in_child([&] {
    if (const int mine = check(call_, plan_.get(), expected_); mine != 0) return mine;
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(kSeconds);
      _exit(check_fresh_plan(call_, expected_));
    }
    int grandchild = 0;
    waitpid(pid, &grandchild, 0);
    return WIFEXITED(grandchild) ? WEXITSTATUS(grandchild) : 6;
  });
  EXPECT_EQ(status, 0);
}

TEST_F(Fork, AChildThatMayStartNoThreadRunsToo) {
  constexpr uid_t kNobody = 65534;
  constexpr int kNoLimit = 77;  // of processes, is to be had here
  const int status = in_child([&] {
    const rlimit none{0, 0};
    if (setuid(geteuid() == 0 ? kNobody : geteuid()) != 0) return kNoLimit;  // root has no limit
    if (setrlimit(RLIMIT_NPROC, &none) != 0) return kNoLimit;
    try {
      std::thread([] {}).join();
      return kNoLimit;
    } catch (const std::system_error&) {
    }
    return check(call_, plan_.get(), expected_);
  });
  if (status == kNoLimit) GTEST_SKIP() << "the number of threads cannot be limited here";
  EXPECT_EQ(status, 0);
}

TEST_F(Fork, TheParentGoesOn) {
  EXPECT_EQ(in_child([&] { return check(call_, plan_.get(), expected_); }), 0);
  EXPECT_EQ(check(call_, plan_.get(), expected_), 0);
}

}  // namespace
}  // namespace attnfold::api_test
