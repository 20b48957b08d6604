// The same through the C++ face, with an error as a value.
#include <attnfold/attnfold.hpp>
#include <cstdio>

int main() {
  attnfold_problem problem = ATTNFOLD_PROBLEM_INIT;
  problem.max_batch = problem.max_qo_rows = 4;
  problem.max_kv_len = 1000;
  const auto plan = attnfold::api::Plan::create(problem);
  if (!plan.ok()) {
    std::fprintf(stderr, "%s\n", plan.outcome().message.c_str());
    return 1;
  }
  problem.head_dim_qk = 12;
  const auto refused = attnfold::api::Plan::create(problem);
  if (refused.ok() || refused.outcome().code != ATTNFOLD_INVALID_ARGUMENT) return 1;
  std::printf("C++ consumer: %s\n", refused.outcome().message.c_str());
  return 0;
}
