/* A program that has nothing but the installed package: makes a plan, and asks about kernels. */
#include <attnfold/attnfold.h>
#include <stdio.h>

int main(void) {
  attnfold_problem problem = ATTNFOLD_PROBLEM_INIT;
  attnfold_plan* plan = NULL;
  if (attnfold_version() != ATTNFOLD_VERSION_MAJOR * 10000 + ATTNFOLD_VERSION_MINOR * 100 + ATTNFOLD_VERSION_PATCH) {
    fprintf(stderr, "header and library differ in version\n");
    return 1;
  }
  problem.max_batch = problem.max_qo_rows = 4;
  problem.max_kv_len = 1000;
  if (attnfold_plan_create(&problem, NULL, &plan) != ATTNFOLD_OK) {
    fprintf(stderr, "%s\n", attnfold_last_error());
    return 1;
  }
  printf("C consumer: version %d, %d kernel rows, a plan on %s\n", (int)attnfold_version(), (int)attnfold_num_kernels(),
         attnfold_plan_kernel(plan));
  attnfold_plan_destroy(plan);
  return 0;
}
