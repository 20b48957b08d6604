// Tiles of 128 rows: prefills, chunks of them and mixed batches have the bits of decode steps, and
// what a row may not see does not reach it.
#include <cuda_runtime.h>

#include <cfloat>
#include <random>

#include "check/device_call.h"
#include "cuda/device_suite.h"

namespace attnfold::check::device_test {
namespace {

using cases::kCausal;
using cases::same_rows;

/** Drawn cuts, where requests with more than `rows` rows of a kv head take tiles. */
attnfold_execution tiles_above(int32_t rows, uint64_t seed, int32_t num_workers = 0) {
  return on_device(num_workers, (seed % 1000 + 1) * 256 + static_cast<uint64_t>(rows));
}
constexpr int32_t kAllRows = 0, kNoRows = 255;

uint64_t draw(std::mt19937_64& rng, uint64_t n) { return rng() % n; }

/** A problem that a large-row kernel serves: that of wgmma, or, if not `plain`, that of mma.sync
 * wherever there is another one. */
Spec tile_spec(std::mt19937_64& rng, bool plain, int max_group, cases::Lengths qo_len,
               cases::Lengths kv_len) {
  static constexpr int32_t kPages[] = {16, 16, 32, 48, 64, 256}, kOddPages[] = {1, 5, 8, 24, 100},
                           kOddDims[] = {8, 80, 96, 112, 120, 200, 256, 256};
  const int32_t group = 1 + static_cast<int32_t>(draw(rng, static_cast<uint64_t>(max_group))),
                kv_heads = 1 + static_cast<int32_t>(draw(rng, 2));
  const auto odd = plain ? 3 : draw(rng, 3);  // what wgmma's kernel does not serve
  int32_t dim = rng() % 2 ? 128 : 64, page = kPages[draw(rng, 6)];
  if (odd == 0) dim = kOddDims[draw(rng, 8)];
  if (odd == 1) page = kOddPages[draw(rng, 5)];
  Spec spec =
      cases::make_spec({group * kv_heads, kv_heads, dim, dim}, rng() % 2 ? DType::bf16 : DType::f16,
                       page, kCausal, std::move(qo_len), std::move(kv_len));
  attnfold_problem& p = spec.problem;
  if (odd == 2 || (odd < 2 && rng() % 4 == 0)) p.logits_softcap = 20.0f;
  if (rng() % 3 == 0) p.window_left = static_cast<int32_t>(draw(rng, 700));
  if (rng() % 4 == 0) p.sink_tokens = static_cast<int32_t>(draw(rng, 300));
  if (rng() % 4 == 0) p.kv_layout = ATTNFOLD_HND;
  if (rng() % 4 == 0) p.o_dtype = ATTNFOLD_F32;
  return spec;
}

using Prefill = DeviceTestWith<int>;

/** Whole, cut anywhere, token by token; as tiles, and as ranges of 16 rows. */
TEST_P(Prefill, EveryTokenHasOneAnswer) {
  const uint64_t seed = test::seed() + 40000 + static_cast<uint64_t>(GetParam());
  std::mt19937_64 rng(seed);
  const int32_t qo_len = 1 + static_cast<int32_t>(draw(rng, 700)),
                kv_len = qo_len + static_cast<int32_t>(draw(rng, 3) ? draw(rng, 5000) : 0);
  const Call call = generate(tile_spec(rng, GetParam() < 32, 9, {qo_len}, {kv_len}), seed);
  Answer whole, other;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, tiles_above(kAllRows, seed), whole));
  for (const attnfold_execution& e :
       {on_device(), on_device(40), tiles_above(kNoRows, seed), tiles_above(kAllRows, seed, 3)}) {
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, e, other));
    ATTNFOLD_ASSERT_HOLDS(same_rows(call, other, 0, whole, 0, qo_len, "another schedule"))
        << "seed " << seed;
  }
  for (int32_t begin = 0; begin < qo_len;) {
    const int32_t most = static_cast<int32_t>(draw(rng, 3) ? 300 : 17);
    const int32_t end =
        std::min(qo_len, begin + 1 + static_cast<int32_t>(draw(rng, static_cast<uint64_t>(most))));
    const Call chunk = chunk_of(call, 0, begin, end);
    ATTNFOLD_ASSERT_HOLDS(cases::run(
        chunk, rng() % 2 ? tiles_above(kAllRows, rng()) : tiles_above(kNoRows, rng()), other));
    ATTNFOLD_ASSERT_HOLDS(same_rows(chunk, other, 0, whole, begin, end - begin, "chunk"))
        << "seed " << seed << ", tokens " << begin << " to " << end;
    const Call token = chunk_of(call, 0, end - 1, end);
    ATTNFOLD_ASSERT_HOLDS(cases::run(token, on_device(), other));
    ATTNFOLD_ASSERT_HOLDS(same_rows(token, other, 0, whole, end - 1, 1, "decode step"))
        << "seed " << seed << ", token " << end - 1;
    begin = end;
  }
}

/** Mixed batches of every kind against the oracle, and each request alone. */
TEST_P(Prefill, MixedBatches) {
  const uint64_t seed = test::seed() + 41000 + static_cast<uint64_t>(GetParam());
  std::mt19937_64 rng(seed);
  cases::Lengths qo_len, kv_len;
  for (int r = 0; r < 7; ++r) {
    const int32_t kinds[] = {0, 1, 1, 1 + static_cast<int32_t>(draw(rng, 20)),
                             static_cast<int32_t>(draw(rng, 150))};
    qo_len.push_back(kinds[draw(rng, 5)]);
    // Sometimes fewer keys than queries: the first of them see none.
    kv_len.push_back(rng() % 4 ? qo_len.back() + static_cast<int32_t>(draw(rng, 1500))
                               : static_cast<int32_t>(draw(rng, 200)));
  }
  Spec spec = tile_spec(rng, GetParam() < 32, 4, qo_len, kv_len);
  if (rng() % 3 == 0) spec.problem.mask = ATTNFOLD_MASK_NONE;
  const Call call = generate(spec, seed);
  Answer whole, alone;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, tiles_above(kAllRows, seed), whole));
  ATTNFOLD_EXPECT_HOLDS(right(call, whole)) << "seed " << seed;
  for (int32_t r = 0; r < call.batch; ++r) {
    const Call one = select_requests(call, {r});
    if (one.num_rows() == 0) continue;
    ATTNFOLD_ASSERT_HOLDS(
        cases::run(one, tiles_above(static_cast<int32_t>(draw(rng, 256)), seed + r), alone));
    ATTNFOLD_ASSERT_HOLDS(
        same_rows(one, alone, 0, whole, call.qo_indptr[r], one.num_rows(), "alone"))
        << "seed " << seed << ", request " << r;
  }
  const Call ragged = to_ragged(call);
  ATTNFOLD_ASSERT_HOLDS(cases::run(ragged, tiles_above(kAllRows, seed + 9), alone));
  ATTNFOLD_ASSERT_HOLDS(same_rows(ragged, alone, 0, whole, 0, call.num_rows(), "ragged"))
      << "seed " << seed;
}

INSTANTIATE_TEST_SUITE_P(Seeds, Prefill, ::testing::Range(0, 80));

/** A decode does not notice that a prefill in its batch grows by a token, wherever the prefill
 * begins to be cut otherwise (vllm#51902). */
TEST_F(DeviceTest, ADecodeBesideAGrowingPrefill) {
  constexpr int32_t kMost = 160;
  const Call most = generate(cases::make_spec({32, 8, 128, 128}, DType::bf16, 16, kCausal,
                                              {1, kMost}, {3000, kMost + 500}),
                             test::seed());
  Answer first, answer;
  for (int32_t n = 0; n <= kMost; n += n < 12 ? 1 : 37) {
    Call call = most;
    call.qo_indptr[2] = 1 + n;
    call.kv_len[1] = n + 500;
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, on_device(), n == 0 ? first : answer));
    if (n == 0) continue;
    ATTNFOLD_ASSERT_HOLDS(same_rows(call, answer, 0, first, 0, 1, "the decode")) << n;
  }
}

/** Many more queries than keys: blocks go through several tiles whose rows see nothing, after one
 * of which some rows see some keys. */
TEST_F(DeviceTest, ManyTilesThatSeeNothing) {
  constexpr int32_t kTokens = 3000;  // 94 tiles, on 8 kv heads: 5 for each block of 132
  for (const int32_t page : {16, 8}) {
    const Call call = generate(
        cases::make_spec({32, 8, 64, 64}, DType::bf16, page, kCausal, {kTokens, 1}, {100, 300}),
        test::seed());
    Answer tiles, ranges;
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, tiles_above(kAllRows, 1), tiles));
    ATTNFOLD_EXPECT_HOLDS(right(call, tiles));
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, tiles_above(kNoRows, 2), ranges));
    ATTNFOLD_EXPECT_HOLDS(same_rows(call, ranges, 0, tiles, 0, kTokens + 1, "ranges"));
  }
}

/** A value that is not finite, at every place of a tile's edge. */
using EdgePoison = DeviceTestWith<int>;

TEST_P(EdgePoison, ReachesTheRowsThatSeeItAlone) {
  // Pages of 16 take wgmma's kernel, where there is one, those of 8 that of mma.sync.
  const int32_t kv_len = 256 + GetParam() % 128, qo_len = 45, page = GetParam() < 128 ? 16 : 8;
  const DType type = GetParam() % 2 ? DType::bf16 : DType::f16;
  Spec spec = cases::make_spec({3, 1, 128, 128}, type, page, kCausal, {qo_len}, {kv_len});
  if (GetParam() % 3 == 0) spec.problem.window_left = 90;
  const Call clean = generate(spec, 5);
  Answer without, with, tiny;
  ATTNFOLD_ASSERT_HOLDS(cases::run(clean, tiles_above(kAllRows, 1), without));
  for (const int32_t back : {0, 1, GetParam() % 40, 44}) {
    Call call = cases::deep_copy(clean);
    const int64_t at = call.kv_element_offset(0, kv_len - 1 - back, call.v_strides, call.v_offset);
    for (int32_t e = back % 3; e < 128; e += 3)
      store_f32(call.v->data(), type, at + e, e % 2 ? cases::kNaN : cases::kInf);
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, tiles_above(kAllRows, 2), with));
    ATTNFOLD_EXPECT_HOLDS(right(call, with)) << back;
    ATTNFOLD_EXPECT_HOLDS(
        same_rows(call, with, 0, without, 0, qo_len - 1 - back, "rows that do not see it"));
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, tiles_above(kNoRows, 3), tiny));
    ATTNFOLD_EXPECT_HOLDS(same_rows(call, with, 0, tiny, 0, qo_len, "ranges")) << back;
  }
}

INSTANTIATE_TEST_SUITE_P(Residues, EdgePoison, ::testing::Range(0, 256));

/** One captured graph answers steps of decodes, of prefills, and mixed ones. */
TEST_F(DeviceTest, OneGraphAnswersEveryKindOfStep) {
  constexpr int32_t kBatch = 6, kMaxLen = 3000, kMaxRows = 900;
  std::mt19937_64 rng(test::seed() + 5);
  Spec spec =
      cases::make_spec({8, 2, 128, 128}, DType::bf16, 16, kCausal,
                       cases::Lengths(kBatch, kMaxRows / kBatch), cases::Lengths(kBatch, kMaxLen));
  const Call most = generate(spec, test::seed());
  const UniquePlan plan = create_plan(most.problem, on_device());
  ASSERT_NE(plan, nullptr) << attnfold_last_error();
  DeviceCall device(most);
  const attnfold_lengths lengths = device.lengths();
  const attnfold_tensors tensors = device.tensors();
  const size_t bytes = attnfold_plan_workspace_bytes(plan.get());
  void* workspace = device.workspace(bytes);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t step;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  ASSERT_EQ(attnfold_plan_update(plan.get(), &lengths, stream), ATTNFOLD_OK)
      << attnfold_last_error();
  for (int layer = 0; layer < 3; ++layer) {
    ASSERT_EQ(attnfold_plan_run(plan.get(), &tensors, workspace, bytes, stream), ATTNFOLD_OK)
        << attnfold_last_error();
  }
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&step, graph, 0), cudaSuccess);
  for (int replay = 0; replay < 24; ++replay) {
    Call call = most;
    for (int32_t r = 0; r < kBatch; ++r) {
      const bool decodes = replay % 3 == 0 || (replay % 3 == 2 && r % 2);
      const int32_t qo_len = decodes ? 1 : static_cast<int32_t>(draw(rng, kMaxRows / kBatch + 1));
      call.qo_indptr[r + 1] = call.qo_indptr[r] + qo_len;
      call.kv_len[r] = std::min(kMaxLen, qo_len + static_cast<int32_t>(draw(rng, kMaxLen)));
    }
    ASSERT_EQ(cudaMemcpy(const_cast<int32_t*>(lengths.qo_indptr), call.qo_indptr.data(),
                         (kBatch + 1) * 4, cudaMemcpyHostToDevice),
              cudaSuccess);
    ASSERT_EQ(cudaMemcpy(const_cast<int32_t*>(lengths.kv_len), call.kv_len.data(), kBatch * 4,
                         cudaMemcpyHostToDevice),
              cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(step, stream), cudaSuccess);
    Answer replayed, eager;
    ATTNFOLD_ASSERT_HOLDS(device.take(&replayed));
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, tiles_above(kAllRows, rng()), eager));
    ATTNFOLD_ASSERT_HOLDS(same_rows(call, eager, 0, replayed, 0, call.num_rows(), "replay"))
        << replay;
  }
  cudaGraphExecDestroy(step);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

/** Learned sink logits of any size, from decodes and from tiles: those that the log2 domain has no
 * number for take all weight, +inf makes rows with a key NaN. */
TEST_F(DeviceTest, SinkLogitsOfAnySize) {
  for (const float sink :
       {-FLT_MAX, -1e30f, -3.0f, 40.0f, 2.36e38f, FLT_MAX, -cases::kInf, cases::kInf}) {
    Spec spec = cases::make_spec({8, 2, 128, 128}, DType::bf16, 16, kCausal, {1, 60, 1, 1, 4},
                                 {300, 130, 0, 2500, 2});
    spec.sink_logits.assign(8, sink);
    const Call call = generate(spec, test::seed());
    Answer tiles, ranges;
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, tiles_above(kAllRows, 1), tiles));
    ATTNFOLD_EXPECT_HOLDS(right(call, tiles)) << sink;
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, tiles_above(kNoRows, 2), ranges));
    ATTNFOLD_EXPECT_HOLDS(same_rows(call, ranges, 0, tiles, 0, call.num_rows(), "ranges")) << sink;
  }
}

/** Many tiles to a block, and as ranges. */
TEST_F(DeviceTest, ManyTiles) {
  const Call call = generate(cases::make_spec({8, 2, 64, 64}, DType::bf16, 16, kCausal,
                                              {600, 1, 300, 500}, {600, 900, 1900, 3000}),
                             test::seed());
  Answer first, answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, on_device(), first));
  ATTNFOLD_EXPECT_HOLDS(right(call, first));
  for (const int32_t workers : {1, 5, 100, 132, 264}) {
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, tiles_above(kAllRows, 3, workers), answer));
    ATTNFOLD_ASSERT_HOLDS(
        same_rows(call, answer, 0, first, 0, call.num_rows(), std::to_string(workers)));
  }
}

}  // namespace
}  // namespace attnfold::check::device_test
