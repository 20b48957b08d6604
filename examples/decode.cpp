// Two requests of a serving step: one decodes a token over 40 keys, one prefills a prompt of 24 tokens.
#include <attnfold/attnfold.hpp>
#include <cstdio>
#include <vector>

int main() {
  attnfold_problem problem = ATTNFOLD_PROBLEM_INIT;  // causal, pages of 16 tokens
  problem.qo_heads = 8;
  problem.kv_heads = 2;
  problem.head_dim_qk = problem.head_dim_vo = 64;
  problem.q_dtype = problem.kv_dtype = problem.o_dtype = ATTNFOLD_F32;
  problem.num_pages = 5;
  problem.max_batch = 2;
  problem.max_qo_rows = 25;
  problem.max_kv_len = 40;
  auto plan = attnfold::api::Plan::create(problem).value_or_throw();  // once

  const std::vector<int32_t> qo_indptr = {0, 1, 25}, kv_len = {40, 24};
  const std::vector<int32_t> block_table = {3, 0, 4, /* request 1: */ 2, 1, -1};
  attnfold_lengths lengths = ATTNFOLD_LENGTHS_INIT;
  lengths.batch = 2;
  lengths.qo_indptr = qo_indptr.data();
  lengths.kv_len = kv_len.data();
  lengths.block_table = block_table.data();
  lengths.block_table_stride = 3;
  plan.update(lengths).or_throw();  // once per step

  std::vector<float> q(25 * 8 * 64, 0.1f), k(5 * 16 * 2 * 64, 0.2f), v(5 * 16 * 2 * 64, 0.3f);
  std::vector<float> o(25 * 8 * 64), lse(25 * 8);
  std::vector<std::byte> workspace(plan.workspace_bytes());
  attnfold_tensors tensors = ATTNFOLD_TENSORS_INIT;
  tensors.q = q.data();
  tensors.k = k.data();
  tensors.v = v.data();
  tensors.o = o.data();
  tensors.lse = lse.data();
  plan.run(tensors, workspace).or_throw();  // once per layer
  std::printf("%s: o[0] = %g, lse[0] = %g\n", plan.kernel(), o[0], lse[0]);
}
