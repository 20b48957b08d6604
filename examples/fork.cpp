// A request forks: both halves go on from the same 20 keys.  Pages are shared until one of them would write to a page of the
// other; that page is copied first.
#include <attnfold/attnfold.hpp>
#include <cstdio>
#include <vector>

namespace api = attnfold::api;

constexpr int32_t kHeads = 2, kHeadDim = 64, kPageSize = 16, kNumPages = 6;

int main() {
  std::vector<float> k(kNumPages * kPageSize * kHeads * kHeadDim), v(k.size());
  attnfold_kv_pool pool = ATTNFOLD_KV_POOL_INIT;
  pool.k = k.data();
  pool.v = v.data();
  pool.kv_dtype = ATTNFOLD_F32;
  pool.kv_heads = kHeads;
  pool.head_dim_qk = pool.head_dim_vo = kHeadDim;
  pool.page_size = kPageSize;
  pool.num_pages = kNumPages;

  // The prompt of 20 tokens, on pages 4 and 2: slots, then rows.
  std::vector<int32_t> qo_indptr = {0, 20}, kv_len = {20}, block_table = {4, 2};
  attnfold_lengths lengths = ATTNFOLD_LENGTHS_INIT;
  lengths.batch = 1;
  lengths.qo_indptr = qo_indptr.data();
  lengths.kv_len = kv_len.data();
  lengths.block_table = block_table.data();
  lengths.block_table_stride = 2;
  std::vector<int64_t> slots(20);
  api::slot_mapping(lengths, kPageSize, kNumPages, slots).or_throw();
  std::vector<float> new_k(20 * kHeads * kHeadDim, 0.1f), new_v(20 * kHeads * kHeadDim, 1.0f);
  attnfold_kv_rows rows = ATTNFOLD_KV_ROWS_INIT;
  rows.num_tokens = 20;
  rows.k = new_k.data();
  rows.v = new_v.data();
  rows.dtype = ATTNFOLD_F32;
  rows.slots = slots.data();
  api::append(pool, rows).or_throw();

  // Fork: the full page 4 is shared, the half-full page 2 is copied to page 5.
  const std::vector<api::PagePair> pairs = {{2, 5}};
  api::copy_pages(pool, pool, pairs).or_throw();

  // A step: one new token for each half, whose value is 3 in the parent and 5 in the child; a third row is padding.
  qo_indptr = {0, 1, 2};
  kv_len = {21, 21};
  block_table = {/* parent: */ 4, 2, /* child: */ 4, 5};
  lengths.batch = 2;
  lengths.qo_indptr = qo_indptr.data();
  lengths.kv_len = kv_len.data();
  lengths.block_table = block_table.data();
  slots.resize(3);
  api::slot_mapping(lengths, kPageSize, kNumPages, slots).or_throw();  // 36, 84, -1
  std::fill(new_v.begin(), new_v.begin() + kHeads * kHeadDim, 3.0f);
  std::fill(new_v.begin() + kHeads * kHeadDim, new_v.begin() + 2 * kHeads * kHeadDim, 5.0f);
  rows.num_tokens = 3;
  rows.slots = slots.data();
  api::append(pool, rows).or_throw();

  attnfold_problem problem = ATTNFOLD_PROBLEM_INIT;
  problem.qo_heads = problem.kv_heads = kHeads;
  problem.head_dim_qk = problem.head_dim_vo = kHeadDim;
  problem.q_dtype = problem.kv_dtype = problem.o_dtype = ATTNFOLD_F32;
  problem.num_pages = kNumPages;
  problem.max_batch = problem.max_qo_rows = 2;
  problem.max_kv_len = 32;
  auto plan = api::Plan::create(problem).value_or_throw();
  plan.update(lengths).or_throw();
  std::vector<float> q(2 * kHeads * kHeadDim, 0.5f), o(q.size());
  std::vector<std::byte> workspace(plan.workspace_bytes());
  attnfold_tensors tensors = ATTNFOLD_TENSORS_INIT;
  tensors.q = q.data();
  tensors.k = k.data();
  tensors.v = v.data();
  tensors.o = o.data();
  plan.run(tensors, workspace).or_throw();
  // Equal keys: the mean of 20 ones and the new value.
  std::printf("slots %d %d %d, parent %.4f, child %.4f\n", static_cast<int>(slots[0]),
              static_cast<int>(slots[1]), static_cast<int>(slots[2]), o[0], o[kHeads * kHeadDim]);
}
