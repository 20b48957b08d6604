// attnfold: pages of 16 keys, permuted, token-major.
//   peer_attnfold BATCH QO_LEN KV_LEN QO_HEADS KV_HEADS HEAD_DIM THREADS bf16|f16 [ISA]
#include <algorithm>
#include <numeric>
#include <random>

#include "attnfold/attnfold.hpp"
#include "peer.h"

namespace {

/** Random values on a page border: a row that is not aligned costs two lines for each. */
const uint16_t* values(size_t n, bool bf16, uint64_t seed) {
  constexpr size_t kPageBytes = size_t{2} << 20;
  const size_t bytes = (n * sizeof(uint16_t) + kPageBytes - 1) / kPageBytes * kPageBytes;
  uint16_t* x = static_cast<uint16_t*>(std::aligned_alloc(kPageBytes, bytes));
  for (size_t i = 0; i < n; ++i) x[i] = random_value(bf16, &seed);
  return x;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 9) return 2;
  const Shape s = shape_of(argv);
  const int pages = (s.kv_len + 15) / 16;
  const size_t head_dim = static_cast<size_t>(s.head_dim);
  attnfold_problem problem = ATTNFOLD_PROBLEM_INIT;
  problem.qo_heads = s.qo_heads;
  problem.kv_heads = s.kv_heads;
  problem.head_dim_qk = problem.head_dim_vo = s.head_dim;
  problem.q_dtype = problem.kv_dtype = problem.o_dtype = s.bf16 ? ATTNFOLD_BF16 : ATTNFOLD_F16;
  problem.num_pages = int64_t{pages} * s.batch;
  problem.max_batch = s.batch;
  problem.max_qo_rows = s.batch * s.qo_len;
  problem.max_kv_len = s.kv_len;
  attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
  execution.num_threads = s.threads;
  if (argc > 9) execution.isa = argv[9];
  auto plan = attnfold::api::Plan::create(problem, execution).value_or_throw();

  std::vector<int32_t> qo_indptr, kv_len(static_cast<size_t>(s.batch), s.kv_len);
  for (int r = 0; r <= s.batch; ++r) qo_indptr.push_back(r * s.qo_len);
  std::vector<int32_t> table(static_cast<size_t>(problem.num_pages));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937_64(7));
  attnfold_lengths lengths = ATTNFOLD_LENGTHS_INIT;
  lengths.batch = s.batch;
  lengths.qo_indptr = qo_indptr.data();
  lengths.kv_len = kv_len.data();
  lengths.block_table = table.data();
  lengths.block_table_stride = pages;
  plan.update(lengths).or_throw();

  const size_t rows = static_cast<size_t>(problem.max_qo_rows) * s.qo_heads;
  const size_t pool = static_cast<size_t>(problem.num_pages) * 16 * s.kv_heads * head_dim;
  std::vector<uint16_t> o(rows * head_dim);
  std::vector<std::byte> workspace(plan.workspace_bytes());
  attnfold_tensors tensors = ATTNFOLD_TENSORS_INIT;
  tensors.q = values(rows * head_dim, s.bf16, 1);
  tensors.k = values(pool, s.bf16, 2);
  tensors.v = values(pool, s.bf16, 3);
  tensors.o = o.data();
  std::fprintf(stderr, "%s\n", plan.kernel());
  return serve(s.threads, [&] { plan.run(tensors, workspace).or_throw(); });
}
