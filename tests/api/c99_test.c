/* The headers alone, in C99: a decode of one request over three keys, by hand. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attnfold/attnfold.h"
#include "attnfold/cache.h"

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, attnfold_last_error());
  return 1;
}

/* Writes one token into the third slot of a pool, and copies its page. */
static int use_cache(void) {
  float k[2 * 4 * 8] = {0}, v[2 * 4 * 8] = {0}, row[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  const int64_t slots[1] = {2};
  const int32_t pairs[2] = {0, 1};
  attnfold_kv_pool pool = ATTNFOLD_KV_POOL_INIT;
  attnfold_kv_rows rows = ATTNFOLD_KV_ROWS_INIT;
  pool.k = k;
  pool.v = v;
  pool.kv_dtype = rows.dtype = ATTNFOLD_F32;
  pool.head_dim_qk = pool.head_dim_vo = 8;
  pool.page_size = 4;
  pool.num_pages = 2;
  rows.num_tokens = 1;
  rows.k = rows.v = row;
  rows.slots = slots;
  if (attnfold_append(&pool, &rows, NULL) != ATTNFOLD_OK) return failed("append");
  if (attnfold_copy_pages(&pool, &pool, pairs, 1, NULL) != ATTNFOLD_OK) return failed("copy");
  return k[2 * 8 + 3] == 3.0f && v[(4 + 2) * 8 + 5] == 5.0f ? 0 : failed("the row is not there");
}

/* With q = 0 every key has the same weight: o is the mean of v, lse = log 3. */
int main(void) {
  attnfold_problem problem = ATTNFOLD_PROBLEM_INIT;
  attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
  attnfold_lengths lengths = ATTNFOLD_LENGTHS_INIT;
  attnfold_tensors tensors = ATTNFOLD_TENSORS_INIT;
  attnfold_plan* plan = NULL;
  attnfold_plan_report report;
  const int32_t qo_indptr[2] = {0, 1}, kv_len[1] = {3}, block_table[1] = {0};
  float* memory; /* q, k, v, o of [1, 8], [4, 8], [4, 8], [1, 8] */
  float lse = 0.0f;
  void* workspace;
  size_t bytes;
  int i;

  memory = malloc(80 * sizeof(float)); /* aligned to 16 bytes on every 64-bit system */
  if (!memory) return 1;
  memset(memory, 0, 80 * sizeof(float));
  for (i = 0; i < 24; ++i) memory[40 + i] = (float)(i / 8); /* v rows: 0, 1, 2 */

  problem.head_dim_qk = problem.head_dim_vo = 8;
  problem.q_dtype = problem.kv_dtype = problem.o_dtype = ATTNFOLD_F32;
  problem.page_size = 4;
  problem.num_pages = 1;
  problem.max_batch = problem.max_qo_rows = 1;
  problem.max_kv_len = 3;
  execution.num_threads = 2;
  if (attnfold_plan_create(&problem, &execution, &plan) != ATTNFOLD_OK) return failed("create");

  lengths.batch = 1;
  lengths.qo_indptr = qo_indptr;
  lengths.kv_len = kv_len;
  lengths.block_table = block_table;
  lengths.block_table_stride = 1;
  if (attnfold_plan_update(plan, &lengths, NULL) != ATTNFOLD_OK) return failed("update");

  tensors.q = memory;
  tensors.k = memory + 8;
  tensors.v = memory + 40;
  tensors.o = memory + 72;
  tensors.lse = &lse;
  bytes = attnfold_plan_workspace_bytes(plan);
  workspace = malloc(bytes);
  if (attnfold_plan_run(plan, &tensors, workspace, bytes, NULL) != ATTNFOLD_OK) return failed("run");
  for (i = 0; i < 8; ++i) {
    if (fabsf(memory[72 + i] - 1.0f) > 1e-6f) return failed("o is not the mean of v");
  }
  if (fabsf(lse - logf(3.0f)) > 1e-6f) return failed("lse is not log 3");

  memset(&report, 0, sizeof(report));
  report.struct_size = sizeof(report);
  if (attnfold_plan_get_report(plan, &report) != ATTNFOLD_OK) return failed("report");
  if (report.num_requests != 1 || report.num_leaves != 1) return failed("the report is of another call");

  if (use_cache() != 0) return 1;
  attnfold_plan_destroy(plan);
  free(workspace);
  free(memory);
  printf("C99: %s, numerics of version %d\n", attnfold_status_name(ATTNFOLD_OK), (int)attnfold_version());
  return 0;
}
