// Promise P6: a captured step answers any lengths up to the maxima.  And the device's schedule is
// the host's.
#include <cuda_runtime.h>

#include <cstring>
#include <random>

#include "check/device_call.h"
#include "cuda/device_suite.h"
#include "cuda/kernels.h"
#include "cuda/plan_kernel.h"

namespace attnfold::check::device_test {
namespace {

/** A decode batch whose lengths can be drawn anew within the same pool and tables. */
Call with_lengths(const Call& call, const std::vector<int32_t>& qo_len,
                  const std::vector<int32_t>& kv_len) {
  Call out = call;
  for (int32_t r = 0; r < call.batch; ++r) {
    out.qo_indptr[r + 1] = out.qo_indptr[r] + qo_len[r];
    out.kv_len[r] = kv_len[r];
  }
  return out;
}

TEST_F(DeviceTest, OneGraphAnswersAllLengths) {
  constexpr int32_t kBatch = 12, kMaxLen = 5000;
  std::mt19937_64 rng(test::seed());
  Spec spec = cases::make_spec({8, 2, 128, 128}, DType::bf16, 16, cases::kCausal,
                               cases::Lengths(kBatch, 2), cases::Lengths(kBatch, kMaxLen));
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
  ASSERT_EQ(attnfold_plan_run(plan.get(), &tensors, workspace, bytes, stream), ATTNFOLD_OK)
      << attnfold_last_error();
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&step, graph, 0), cudaSuccess);
  for (int replay = 0; replay < 50; ++replay) {
    std::vector<int32_t> qo_len(kBatch), kv_len(kBatch);
    const int32_t live = replay == 0 ? kBatch : static_cast<int32_t>(rng() % (kBatch + 1));
    for (int32_t r = 0; r < live; ++r) {
      qo_len[r] = replay == 0 ? 2 : static_cast<int32_t>(rng() % 3);
      kv_len[r] = replay == 0 ? kMaxLen
                  : rng() % 5 ? static_cast<int32_t>(rng() % (kMaxLen + 1))
                              : 0;
    }
    const Call call = with_lengths(most, qo_len, kv_len);
    ASSERT_EQ(cudaMemcpy(const_cast<int32_t*>(lengths.qo_indptr), call.qo_indptr.data(),
                         (kBatch + 1) * 4, cudaMemcpyHostToDevice),
              cudaSuccess);
    ASSERT_EQ(cudaMemcpy(const_cast<int32_t*>(lengths.kv_len), call.kv_len.data(), kBatch * 4,
                         cudaMemcpyHostToDevice),
              cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(step, stream), cudaSuccess);
    Answer replayed, eager;
    ATTNFOLD_ASSERT_HOLDS(device.take(&replayed));
    if (call.num_rows() == 0) continue;
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, on_device(), eager));
    ATTNFOLD_ASSERT_HOLDS(cases::same_rows(call, eager, 0, replayed, 0, call.num_rows(), "replay"))
        << replay;
  }
  cudaGraphExecDestroy(step);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

/** More workspaces than a plan has counters for, and a few again: of decodes, and beside tiles. */
TEST_F(DeviceTest, AnyNumberOfWorkspaces) {
  for (const bool has_tiles : {false, true}) {
    const Spec spec = cases::make_spec(
        {8, 2, 128, 128}, DType::bf16, 16, cases::kCausal,
        has_tiles ? cases::Lengths{1, 70, 1, 200, 33} : cases::Lengths(40, 1),
        has_tiles ? cases::Lengths{2900, 70, 300, 700, 2100} : cases::Lengths(40, 300));
    const Call call = generate(spec, test::seed());
    const UniquePlan plan = create_plan(call.problem, on_device(14));
    ASSERT_NE(plan, nullptr) << attnfold_last_error();
    Answer expected, answer;
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, on_device(), expected));
    DeviceCall device(call);
    const attnfold_lengths lengths = device.lengths();
    const size_t bytes = attnfold_plan_workspace_bytes(plan.get());
    char* workspace = static_cast<char*>(device.workspace(bytes + 100 * 16));
    ASSERT_EQ(attnfold_plan_update(plan.get(), &lengths, nullptr), ATTNFOLD_OK)
        << attnfold_last_error();
    for (int i = 0; i < 140; ++i) {
      const attnfold_tensors tensors = device.tensors();
      ASSERT_EQ(attnfold_plan_run(plan.get(), &tensors, workspace + i % 100 * 16, bytes, nullptr),
                ATTNFOLD_OK)
          << attnfold_last_error();
      ATTNFOLD_ASSERT_HOLDS(device.take(&answer));
      ATTNFOLD_ASSERT_HOLDS(cases::same_bytes(call, expected, answer, "a workspace")) << i;
    }
  }
}

/** A graph of layers, each of whose queries are the o of the layer before: the kernels of one may
 * not begin to read before those of the other have written. */
TEST_F(DeviceTest, LayersOfOneGraphFollowOneAnother) {
  constexpr int kLayers = 12;
  for (const cases::Lengths& qo_len :
       {cases::Lengths(7, 1), cases::Lengths{90, 1, 33, 1, 1, 4, 150}}) {
    const Call call = generate(cases::make_spec({16, 4, 128, 128}, DType::bf16, 16, cases::kCausal,
                                                qo_len, {90, 3000, 2100, 17, 700, 4, 1500}),
                               test::seed());
    const UniquePlan plan = create_plan(call.problem, on_device());
    ASSERT_NE(plan, nullptr) << attnfold_last_error();
    DeviceCall device(call);
    const attnfold_lengths lengths = device.lengths();
    const attnfold_tensors first = device.tensors();
    const size_t bytes = attnfold_plan_workspace_bytes(plan.get()),
                 o_bytes = static_cast<size_t>(call.num_rows()) * 16 * 128 * 2;
    void* workspace = device.workspace(bytes);
    char* memory = nullptr;  // o of each layer
    ASSERT_EQ(cudaMalloc(&memory, o_bytes * kLayers), cudaSuccess);
    const auto layer = [&](int i) {
      attnfold_tensors tensors = first;
      if (i > 0) {
        tensors.q = memory + (i - 1) * o_bytes;
        tensors.q_stride_row = 16 * 128;
        tensors.q_stride_head = 128;
      }
      tensors.o = memory + i * o_bytes;
      tensors.o_stride_row = 16 * 128;
      tensors.o_stride_head = 128;
      return tensors;
    };
    cudaStream_t stream;
    ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    std::vector<char> one_by_one(o_bytes * kLayers), replayed(o_bytes * kLayers);
    ASSERT_EQ(cudaMemset(memory, 0xff, o_bytes * kLayers), cudaSuccess);
    ASSERT_EQ(attnfold_plan_update(plan.get(), &lengths, stream), ATTNFOLD_OK)
        << attnfold_last_error();
    for (int i = 0; i < kLayers; ++i) {
      const attnfold_tensors tensors = layer(i);
      ASSERT_EQ(attnfold_plan_run(plan.get(), &tensors, workspace, bytes, stream), ATTNFOLD_OK)
          << attnfold_last_error();
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    }
    ASSERT_EQ(cudaMemcpy(one_by_one.data(), memory, one_by_one.size(), cudaMemcpyDeviceToHost),
              cudaSuccess);
    cudaGraph_t graph;
    cudaGraphExec_t step;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    ASSERT_EQ(attnfold_plan_update(plan.get(), &lengths, stream), ATTNFOLD_OK)
        << attnfold_last_error();
    for (int i = 0; i < kLayers; ++i) {
      const attnfold_tensors tensors = layer(i);
      ASSERT_EQ(attnfold_plan_run(plan.get(), &tensors, workspace, bytes, stream), ATTNFOLD_OK)
          << attnfold_last_error();
    }
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&step, graph, 0), cudaSuccess);
    for (int replay = 0; replay < 20; ++replay) {
      ASSERT_EQ(cudaMemsetAsync(memory, 0xff, o_bytes * kLayers, stream), cudaSuccess);
      ASSERT_EQ(cudaGraphLaunch(step, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      ASSERT_EQ(cudaMemcpy(replayed.data(), memory, replayed.size(), cudaMemcpyDeviceToHost),
                cudaSuccess);
      for (int i = 0; i < kLayers; ++i)
        ASSERT_EQ(memcmp(&replayed[i * o_bytes], &one_by_one[i * o_bytes], o_bytes), 0)
            << "layer " << i << ", replay " << replay;
    }
    EXPECT_NE(memcmp(&replayed[0], &replayed[o_bytes], o_bytes), 0);
    cudaGraphExecDestroy(step);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    cudaFree(memory);
  }
}

/** A workspace over a tensor is refused, and nothing is launched. */
TEST_F(DeviceTest, AWorkspaceThatOverlapsATensorIsNamed) {
  const Call call = generate(
      cases::make_spec({8, 2, 128, 128}, DType::bf16, 16, cases::kCausal, {1, 70}, {300, 400}),
      test::seed());
  const UniquePlan plan = create_plan(call.problem, on_device());
  ASSERT_NE(plan, nullptr) << attnfold_last_error();
  DeviceCall device(call);
  const attnfold_lengths lengths = device.lengths();
  ASSERT_EQ(attnfold_plan_update(plan.get(), &lengths, nullptr), ATTNFOLD_OK)
      << attnfold_last_error();
  const attnfold_tensors tensors = device.tensors();
  const size_t bytes = attnfold_plan_workspace_bytes(plan.get());
  for (const void* tensor : {tensors.q, tensors.k, tensors.v, static_cast<const void*>(tensors.o),
                             static_cast<const void*>(tensors.lse)}) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(tensor);
    for (const uintptr_t workspace : {at, at - bytes + 16}) {
      EXPECT_EQ(attnfold_plan_run(plan.get(), &tensors, reinterpret_cast<void*>(workspace), bytes,
                                  nullptr),
                ATTNFOLD_INVALID_ARGUMENT);
      EXPECT_NE(std::string(attnfold_last_error()).find("workspace"), std::string::npos)
          << attnfold_last_error();
    }
  }
  Answer expected, answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, on_device(), expected));
  ASSERT_EQ(attnfold_plan_run(plan.get(), &tensors, device.workspace(bytes), bytes, nullptr),
            ATTNFOLD_OK)
      << attnfold_last_error();
  ATTNFOLD_ASSERT_HOLDS(device.take(&answer));
  ATTNFOLD_EXPECT_HOLDS(cases::same_bytes(call, expected, answer, "after that"));
}

/** Schedule arrays in managed memory's stead: plain memory here, device memory there. */
struct Arrays {
  RangeCounts counts{};
  SharedCounts num_shared{};
  std::vector<RowSet> sets;
  std::vector<RangePlace> places;
  std::vector<Range> ranges;
  std::vector<SharedSet> shared;
  std::vector<Range> claimed;
  TileCounts num_tiles{};
  std::vector<RowSet> tiles;
};

TEST_F(DeviceTest, SchedulesAreTheHosts) {
  std::mt19937_64 rng(test::seed());
  constexpr int32_t kMaxSets = 8192, kMaxRanges = 512, kMaxBatch = 2000;
  char* memory = nullptr;
  const size_t sizes[] = {sizeof(RangeCounts),        sizeof(SharedCounts),
                          kMaxSets * sizeof(RowSet),  (kMaxRanges + 1) * sizeof(RangePlace),
                          kMaxRanges * sizeof(Range), kMaxRanges * sizeof(SharedSet),
                          (kMaxBatch + 1) * 4,        kMaxBatch * 4,
                          sizeof(TileCounts),         2 * kMaxSets * sizeof(RowSet),
                          kMaxRanges * sizeof(Range)};
  size_t offsets[11], total = 0;
  for (int i = 0; i < 11; ++i) offsets[i] = total, total += (sizes[i] + 255) / 256 * 256;
  ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&memory), total), cudaSuccess);
  for (int round = 0; round < 2000; ++round) {
    const int32_t batch = static_cast<int32_t>(rng() % (round % 50 ? 40 : kMaxBatch));
    const int32_t longest = round % 3 ? 3000 : 100000;
    RangeShape shape{1 + static_cast<int32_t>(rng() % 17), 1 + static_cast<int32_t>(rng() % 16),
                     1 + static_cast<int32_t>(rng() % kMaxRanges), rng() % 3 ? 0 : rng()};
    if (round % 2) shape.tile_blocks = 1 + static_cast<int32_t>(rng() % 132);
    shape.kv_heads = 1 + static_cast<int32_t>(rng() % 8);
    shape.claims = static_cast<int32_t>(rng() % 6);
    shape.tile_cost = 1 + static_cast<int32_t>(rng() % 3);
    shape.fewest_tile_rows = static_cast<int32_t>(rng() % 40);
    shape.num_ranges = (shape.num_ranges / (shape.claims + 1) + 1) * (shape.claims + 1);
    if (shape.num_ranges > kMaxRanges) continue;
    Mask mask;
    mask.causal = rng() % 2;
    if (rng() % 3 == 0) mask.window_left = static_cast<int32_t>(rng() % 3000);
    if (rng() % 4 == 0) mask.sink_tokens = static_cast<int32_t>(rng() % 600);
    if (rng() % 5 == 0) mask.attention_chunk = 1 + static_cast<int32_t>(rng() % 3000);
    std::vector<int32_t> indptr{0}, kv_len;
    for (int32_t r = 0; r < batch; ++r) {
      const bool is_long = shape.tile_blocks > 0 && rng() % 8 == 0;
      indptr.push_back(indptr.back() + static_cast<int32_t>(rng() % (is_long ? 2000 : 4)));
      kv_len.push_back(static_cast<int32_t>(rng() % static_cast<uint64_t>(longest)));
    }
    Arrays host;
    host.sets.resize(kMaxSets);
    host.places.resize(kMaxRanges + 1);
    host.ranges.resize(kMaxRanges);
    host.shared.resize(kMaxRanges);
    host.claimed.resize(kMaxRanges);
    host.tiles.resize(2 * kMaxSets);
    Arrays device = host;
    if (static_cast<int64_t>(indptr.back()) * shape.group_size / shape.set_rows + batch >= kMaxSets)
      continue;
    RangeSchedule schedule{&host.counts,       &host.num_shared,   host.sets.data(),
                           kMaxSets,           host.places.data(), host.ranges.data(),
                           host.shared.data(), &host.num_tiles,    host.tiles.data(),
                           kMaxSets,           host.claimed.data()};
    build_range_schedule(shape, mask, batch, indptr.data(), kv_len.data(), &schedule);

    const auto at = [&](int i) { return memory + offsets[i]; };
    ASSERT_EQ(cudaMemcpy(at(6), indptr.data(), indptr.size() * 4, cudaMemcpyHostToDevice),
              cudaSuccess);
    kv_len.push_back(0);  // so that there is something to copy
    ASSERT_EQ(
        cudaMemcpy(at(7), kv_len.data(), static_cast<size_t>(batch) * 4, cudaMemcpyHostToDevice),
        cudaSuccess);
    const RangeSchedule on_gpu{
        reinterpret_cast<RangeCounts*>(at(0)), reinterpret_cast<SharedCounts*>(at(1)),
        reinterpret_cast<RowSet*>(at(2)),      kMaxSets,
        reinterpret_cast<RangePlace*>(at(3)),  reinterpret_cast<Range*>(at(4)),
        reinterpret_cast<SharedSet*>(at(5)),   reinterpret_cast<TileCounts*>(at(8)),
        reinterpret_cast<RowSet*>(at(9)),      kMaxSets,
        reinterpret_cast<Range*>(at(10))};
    const cuda::PlanArgs args{shape,
                              mask,
                              batch,
                              1 << 30,
                              reinterpret_cast<const int32_t*>(at(6)),
                              reinterpret_cast<const int32_t*>(at(7)),
                              nullptr,
                              on_gpu};
    ASSERT_EQ(cuda::launch_plan(args, nullptr), cudaSuccess);
    void* to[] = {&device.counts,       &device.num_shared,   device.sets.data(),
                  device.places.data(), device.ranges.data(), device.shared.data()};
    for (int i = 0; i < 6; ++i)
      ASSERT_EQ(cudaMemcpy(to[i], at(i), sizes[i], cudaMemcpyDeviceToHost), cudaSuccess);
    if (shape.tile_blocks > 0) {
      ASSERT_EQ(cudaMemcpy(&device.num_tiles, at(8), sizeof(TileCounts), cudaMemcpyDeviceToHost),
                cudaSuccess);
      ASSERT_EQ(host.num_tiles.tiles, device.num_tiles.tiles) << round;
      ASSERT_EQ(host.num_tiles.blocks, device.num_tiles.blocks) << round;
      const size_t bytes = static_cast<size_t>(host.num_tiles.tiles) * sizeof(RowSet);
      device.tiles.resize(host.tiles.size());
      ASSERT_EQ(cudaMemcpy(device.tiles.data(), at(9), bytes, cudaMemcpyDeviceToHost), cudaSuccess);
      ASSERT_EQ(std::memcmp(host.tiles.data(), device.tiles.data(), bytes), 0) << round;
    }
    ASSERT_EQ(cudaMemcpy(device.claimed.data(), at(10), sizes[10], cudaMemcpyDeviceToHost),
              cudaSuccess);
    const RangeCounts &h = host.counts, &d = device.counts;
    ASSERT_TRUE(h.sets == d.sets && h.empty_sets == d.empty_sets && h.leaves == d.leaves) << round;
    ASSERT_EQ(host.num_shared.sets, device.num_shared.sets) << round;
    ASSERT_EQ(host.num_shared.rows, device.num_shared.rows) << round;
    const auto same = [](const auto& a, const auto& b, size_t from, size_t n) {
      return std::memcmp(a.data() + from, b.data() + from, n * sizeof(a[0])) == 0;
    };
    const size_t ranges = static_cast<size_t>(shape.num_ranges);
    ASSERT_TRUE(same(host.sets, device.sets, 0, static_cast<size_t>(h.sets))) << round;
    ASSERT_TRUE(same(host.sets, device.sets, kMaxSets - static_cast<size_t>(h.empty_sets),
                     static_cast<size_t>(h.empty_sets)))
        << round;
    ASSERT_TRUE(same(host.places, device.places, 0, ranges + 1)) << round;
    ASSERT_TRUE(same(host.ranges, device.ranges, 0, ranges)) << round;
    ASSERT_TRUE(same(host.shared, device.shared, 0, ranges)) << round;
    const size_t claimed = static_cast<size_t>(host.ranges[0].num_claimed);
    ASSERT_TRUE(same(host.claimed, device.claimed, 0, claimed)) << round;
  }
  cudaFree(memory);
}

}  // namespace
}  // namespace attnfold::check::device_test
