// The calls round a plan in a captured graph: nothing of them happens on the host when it is
// replayed. A suite is a process of its own under CTest: here each kernel's first launch is a
// captured one.
#include <functional>

#include "attnfold/cache.h"
#include "cuda/states.h"

namespace attnfold::check::device_test {
namespace {

class Captured : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (IsSkipped()) return;
    require_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    execution_ = on_device();
    execution_.stream = stream_;
  }
  void TearDown() override {
    if (graph_) cudaGraphExecDestroy(graph_);
    if (stream_) cudaStreamDestroy(stream_);
  }
  void capture(const std::function<void()>& calls) {
    cudaGraph_t graph;
    require_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "capture");
    calls();
    require_cuda(cudaStreamEndCapture(stream_, &graph), "capture");
    require_cuda(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
    cudaGraphDestroy(graph);
  }
  void replay() {
    require_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    require_cuda(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch");
    require_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  attnfold_execution execution_ = ATTNFOLD_EXECUTION_INIT;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

/** Two merges, the second of the first's output, and a conversion of that. */
TEST_F(Captured, MergesAndConversions) {
  std::mt19937_64 rng(test::seed());
  const StateShape shape{50, 8, 128};
  Convention plain, odd;
  odd.o_dtype = DType::f32;
  odd.base2 = odd.by_head = true;
  odd.gap_row = 3;
  TwinState a(rng, shape, plain), b(rng, shape, plain), c(rng, shape, odd), ab(rng, shape, plain),
      abc(rng, shape, odd), converted(rng, shape, plain);
  const auto calls = [&](bool device, const attnfold_execution* e) {
    const auto view = [&](TwinState& s) { return device ? s.on_device() : s.on_host(); };
    const attnfold_state first[] = {view(a), view(b)}, second[] = {view(ab), view(c)},
                         out[] = {view(ab), view(abc), view(converted)};
    ASSERT_EQ(attnfold_merge_parallel(shape.rows, shape.heads, shape.width, first, 2, &out[0],
                                      nullptr, 0, e),
              ATTNFOLD_OK)
        << attnfold_last_error();
    ASSERT_EQ(attnfold_merge_parallel(shape.rows, shape.heads, shape.width, second, 2, &out[1],
                                      nullptr, 0, e),
              ATTNFOLD_OK)
        << attnfold_last_error();
    ASSERT_EQ(attnfold_convert_state(shape.rows, shape.heads, shape.width, &out[1], &out[2], e),
              ATTNFOLD_OK)
        << attnfold_last_error();
  };
  capture([&] { calls(true, &execution_); });
  for (int round = 0; round < 6; ++round) {
    calls(false, nullptr);
    replay();
    for (TwinState* s : {&ab, &abc, &converted}) ATTNFOLD_ASSERT_HOLDS(s->differs()) << round;
    for (TwinState* s : {&a, &b, &c}) {
      std::shuffle(s->lse().values().begin(), s->lse().values().end(), rng);
      s->send();
    }
  }
}

/** A decode step as an engine captures it: slots of the new tokens, their rows, then a copy of a
 * page; replayed with other lengths, tables, rows and pairs. */
TEST_F(Captured, SlotsAppendAndCopies) {
  constexpr int32_t kBatch = 7, kStride = 4, kPages = 40, kPage = 16, kHeads = 4, kDim = 64;
  std::mt19937_64 rng(test::seed());
  std::vector<int32_t> qo_indptr;
  for (int32_t r = 0; r <= kBatch; ++r) qo_indptr.push_back(r);
  Twin<int32_t> qo{qo_indptr}, kv_len{std::vector<int32_t>(kBatch)},
      table{std::vector<int32_t>(kBatch * kStride)}, pairs{std::vector<int32_t>(6)};
  Twin<int64_t> slots{std::vector<int64_t>(kBatch + 2)};
  const std::vector<uint16_t> empty_pool(kPages * kPage * kHeads * kDim),
      no_rows((kBatch + 2) * kHeads * kDim);
  Twin<uint16_t> k{empty_pool}, v{empty_pool}, new_k{no_rows}, new_v{no_rows};
  const auto calls = [&](bool device, const attnfold_execution* e) {
    const auto at = [&](auto& twin) { return device ? twin.device() : twin.host(); };
    attnfold_lengths lengths = ATTNFOLD_LENGTHS_INIT;
    lengths.batch = kBatch;
    lengths.qo_indptr = at(qo);
    lengths.kv_len = at(kv_len);
    lengths.block_table = at(table);
    lengths.block_table_stride = kStride;
    attnfold_kv_pool pool = ATTNFOLD_KV_POOL_INIT;
    pool.k = at(k);
    pool.v = at(v);
    pool.kv_heads = kHeads;
    pool.head_dim_qk = pool.head_dim_vo = kDim;
    pool.page_size = kPage;
    pool.num_pages = kPages;
    attnfold_kv_rows rows = ATTNFOLD_KV_ROWS_INIT;
    rows.num_tokens = kBatch + 2;
    rows.k = at(new_k);
    rows.v = at(new_v);
    rows.slots = at(slots);
    ASSERT_EQ(attnfold_slot_mapping_on(&lengths, kPage, kPages, nullptr, kBatch + 2, at(slots), e),
              ATTNFOLD_OK)
        << attnfold_last_error();
    ASSERT_EQ(attnfold_append(&pool, &rows, e), ATTNFOLD_OK) << attnfold_last_error();
    ASSERT_EQ(attnfold_copy_pages(&pool, &pool, at(pairs), 3, e), ATTNFOLD_OK)
        << attnfold_last_error();
  };
  capture([&] { calls(true, &execution_); });
  for (int round = 0; round < 6; ++round) {
    for (int32_t& n : kv_len.values())
      n = rng() % 4 ? 1 + static_cast<int32_t>(rng() % (kStride * kPage)) : 0;
    for (int32_t& page : table.values()) page = static_cast<int32_t>(rng() % kPages);
    for (int32_t& page : pairs.values()) page = static_cast<int32_t>(rng() % kPages);
    for (auto* rows : {&new_k, &new_v}) {
      for (uint16_t& x : rows->values()) x = static_cast<uint16_t>(rng());
      rows->send();
    }
    kv_len.send();
    table.send();
    pairs.send();
    calls(false, nullptr);
    replay();
    ATTNFOLD_ASSERT_HOLDS(slots.differs(DType::f32, false)) << round;
    ATTNFOLD_ASSERT_HOLDS(k.differs(DType::bf16, false)) << round;
    ATTNFOLD_ASSERT_HOLDS(v.differs(DType::bf16, false)) << round;
  }
}

}  // namespace
}  // namespace attnfold::check::device_test
