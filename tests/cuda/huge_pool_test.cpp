// Offsets beyond 2^31 elements: pools of 11 GiB, filled by attnfold_append, read by one decode.
#include <algorithm>
#include <memory>

#include "attnfold/cache.h"
#include "check/device_buffer.h"
#include "cuda/device_suite.h"

namespace attnfold::check::device_test {
namespace {

constexpr int32_t kHeads = 8, kDim = 128, kPage = 16;
constexpr int64_t kPages = (int64_t{11} << 29) / (kPage * kHeads * kDim * 2);  // 5.5 GiB of k

/** Runs once, by name: ATTNFOLD_SEED and shapes do not matter to it. */
class HugePoolSlow : public DeviceTestWith<attnfold_kv_layout> {
 protected:
  void SetUp() override {
    DeviceTestWith::SetUp();
    if (IsSkipped()) return;
    size_t free = 0, total = 0;
    require_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    if (free < size_t{12} << 30) GTEST_SKIP() << "needs 12 GiB of device memory";
  }
};

/** Device copy of a vector. */
template <class T>
DeviceBuffer sent(const std::vector<T>& v) {
  return DeviceBuffer(v.data(), v.size() * sizeof(T));
}

/** All keys of a call, request after request, as rows to append. */
std::vector<char> rows_of(const Call& call, const Buffer& from, const Strides& strides,
                          int64_t offset) {
  std::vector<char> rows;
  for (int32_t r = 0; r < call.batch; ++r) {
    for (int32_t token = 0; token < call.kv_len[r]; ++token) {
      const char* at = reinterpret_cast<const char*>(from.data()) +
                       2 * call.kv_element_offset(r, token, strides, offset);
      for (int32_t h = 0; h < kHeads; ++h)
        rows.insert(rows.end(), at + 2 * h * strides.head, at + 2 * (h * strides.head + kDim));
    }
  }
  return rows;
}

TEST_P(HugePoolSlow, AppendAndDecodeReachAllOfIt) {
  const Call call =
      repage(generate(cases::make_spec({4 * kHeads, kHeads, kDim, kDim}, DType::bf16, kPage,
                                       cases::kCausal, {1, 3, 1}, {1000, 777, 4100}),
                      test::seed()),
             kPage, ATTNFOLD_NHD, false, 1);
  Answer want;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, on_device(), want));

  // Pages in turn from the end, from where offsets outgrow 31 and 32 bits, and from the start.
  const int64_t ends[] = {kPages - 1, (int64_t{1} << 31) / (kPage * kHeads * kDim) + 50,
                          (int64_t{1} << 30) / (kPage * kHeads * kDim) + 50, 200};
  std::vector<int32_t> table(static_cast<size_t>(call.batch * call.block_table_stride), 0x7ffffff0);
  std::vector<int64_t> slots;
  int32_t next = 0;
  for (int32_t r = 0; r < call.batch; ++r) {
    for (int32_t token = 0; token < call.kv_len[r]; ++token) {
      int32_t& page = table[static_cast<size_t>(r * call.block_table_stride + token / kPage)];
      if (token % kPage == 0) {
        page = static_cast<int32_t>(ends[next % 4] - next / 4);
        ++next;
      }
      slots.push_back(int64_t{page} * kPage + token % kPage);
    }
  }
  ASSERT_LT(next / 4, 150);

  const size_t bytes = static_cast<size_t>(kPages) * kPage * kHeads * kDim * 2;
  const DeviceBuffer k(bytes), v(bytes);  // all NaN
  const DeviceBuffer new_k = sent(rows_of(call, *call.k, call.k_strides, call.k_offset)),
                     new_v = sent(rows_of(call, *call.v, call.v_strides, call.v_offset)),
                     on_slots = sent(slots), on_table = sent(table);
  attnfold_kv_pool pool = ATTNFOLD_KV_POOL_INIT;
  pool.k = k.data();
  pool.v = v.data();
  pool.kv_layout = GetParam();
  pool.kv_heads = kHeads;
  pool.page_size = kPage;
  pool.num_pages = kPages;
  attnfold_kv_rows rows = ATTNFOLD_KV_ROWS_INIT;
  rows.num_tokens = static_cast<int64_t>(slots.size());
  rows.k = new_k.data();
  rows.v = new_v.data();
  rows.slots = reinterpret_cast<const int64_t*>(on_slots.data());
  const attnfold_execution e = on_device();
  ASSERT_EQ(attnfold_append(&pool, &rows, &e), ATTNFOLD_OK) << attnfold_last_error();

  attnfold_problem problem = call.problem;
  problem.num_pages = kPages;
  problem.kv_layout = GetParam();
  const UniquePlan plan = create_plan(problem, e);
  ASSERT_NE(plan, nullptr) << attnfold_last_error();
  DeviceCall device(call);
  attnfold_lengths lengths = device.lengths();
  lengths.block_table = reinterpret_cast<const int32_t*>(on_table.data());
  attnfold_tensors tensors = device.tensors();
  tensors.k = k.data();
  tensors.v = v.data();
  tensors.k_stride_page = tensors.k_stride_token = tensors.k_stride_head = 0;
  tensors.v_stride_page = tensors.v_stride_token = tensors.v_stride_head = 0;
  const size_t workspace = attnfold_plan_workspace_bytes(plan.get());
  ASSERT_EQ(attnfold_plan_update(plan.get(), &lengths, nullptr), ATTNFOLD_OK)
      << attnfold_last_error();
  ASSERT_EQ(
      attnfold_plan_run(plan.get(), &tensors, device.workspace(workspace), workspace, nullptr),
      ATTNFOLD_OK)
      << attnfold_last_error();
  Answer got;
  ATTNFOLD_ASSERT_HOLDS(device.take(&got));
  ATTNFOLD_EXPECT_HOLDS(cases::same_rows(call, want, 0, got, 0, call.num_rows(), "huge pool"));
  EXPECT_TRUE(k.canaries_whole() && v.canaries_whole());
}

INSTANTIATE_TEST_SUITE_P(Layouts, HugePoolSlow, ::testing::Values(ATTNFOLD_NHD, ATTNFOLD_HND));

}  // namespace
}  // namespace attnfold::check::device_test
