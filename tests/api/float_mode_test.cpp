// A caller whose thread rounds or flushes otherwise: the answer's bits are the same, and the thread
// gets its mode back.
#include <gtest/gtest.h>

#if defined(__x86_64__) || defined(__aarch64__)

#include <limits>
#include <string>

#include "api/small_call.h"
#include "control_word.h"

namespace attnfold::api_test {
namespace {

using test::control_word;
using test::kDefaultControl;
using test::kOddControls;
using test::set_control_word;

/** Sets a mode for its scope, and checks on the way out that it was still there. */
class ModeKept {
 public:
  explicit ModeKept(uint64_t mode) : mode_(mode), saved_(control_word()) { set_control_word(mode); }
  ~ModeKept() {
    const uint64_t now = control_word();
    set_control_word(saved_);
    EXPECT_EQ(now, mode_) << std::hex << "the mode was not restored";
  }

 private:
  uint64_t mode_, saved_;
};

/** A call whose answer changes if subnormal numbers are flushed: some keys, queries and values are
 * subnormal. */
SmallCall call_with_subnormals() {
  SmallCall call({{1, 5000}, {5, 300}});
  for (size_t i = 0; i < call.v.size(); i += 3) call.v.data()[i] *= 0x1p-130f;
  for (size_t i = 0; i < call.v.size(); i += kHeadDim) call.v.data()[i] *= 0x1p-60f * 0x1p-75f;
  for (size_t i = 0; i < call.k.size(); i += 7) call.k.data()[i] *= 0x1p-135f;
  for (size_t i = 0; i < call.q.size(); i += 5) call.q.data()[i] *= 0x1p-135f;
  return call;
}

TEST(FloatMode, RunGivesTheSameBitsAndRestoresTheMode) {
  SmallCall call = call_with_subnormals();
  const Bytes expected = answer(call, execution(1, 1));
  for (const uint64_t mode : kOddControls) {
    for (const int32_t threads : {1, 3}) {
      const PlanPtr plan = make_plan(call, execution(threads, 4));
      call.poison_outputs();
      std::vector<char> workspace(attnfold_plan_workspace_bytes(plan.get()));
      attnfold_status status;
      {
        ModeKept kept(mode);
        status = attnfold_plan_run(plan.get(), &call.tensors, workspace.data(), workspace.size(),
                                   nullptr);
      }
      ASSERT_EQ(status, ATTNFOLD_OK);
      EXPECT_TRUE(same_bytes(call.output_bytes(), expected))
          << "mode " << mode << ", threads " << threads;
    }
  }
}

TEST(FloatMode, CreateAndUpdateGiveTheSamePlanInEveryMode) {
  for (const int32_t head_dim : {16, 8}) {  // 1/sqrt is exact for one and rounded for the other
    SmallCall call = call_with_subnormals();
    call.problem.head_dim_qk = call.problem.head_dim_vo = head_dim;
    call.tensors.q_stride_row = call.tensors.o_stride_row = kQoHeads * kHeadDim;
    call.tensors.q_stride_head = call.tensors.o_stride_head = kHeadDim;
    const int64_t kv_strides[] = {kPageSize * kKvHeads * kHeadDim, kKvHeads * kHeadDim, kHeadDim};
    call.tensors.k_stride_page = call.tensors.v_stride_page = kv_strides[0];
    call.tensors.k_stride_token = call.tensors.v_stride_token = kv_strides[1];
    call.tensors.k_stride_head = call.tensors.v_stride_head = kv_strides[2];
    for (const float sm_scale : {ATTNFOLD_SM_SCALE_DEFAULT, 0.3f, 1e-39f}) {
      call.problem.sm_scale = sm_scale;
      const Bytes expected = answer(call, execution(1, 2));
      for (const uint64_t mode : kOddControls) {
        attnfold_plan* raw = nullptr;
        {
          ModeKept kept(mode);
          const attnfold_execution e = execution(1, 2);
          if (attnfold_plan_create(&call.problem, &e, &raw) == ATTNFOLD_OK) {
            (void)attnfold_plan_update(raw, &call.lengths, nullptr);
          }
        }
        const PlanPtr plan(raw);
        ASSERT_NE(plan, nullptr);
        call.poison_outputs();
        ASSERT_EQ(run(plan.get(), call.tensors), ATTNFOLD_OK) << attnfold_last_error();
        EXPECT_TRUE(same_bytes(call.output_bytes(), expected))
            << "mode " << mode << ", head_dim " << head_dim << ", sm_scale " << sm_scale;
      }
    }
  }
}

TEST(FloatMode, MergeGivesTheSameBitsAndRestoresTheMode) {
  constexpr int64_t kRows = 50;
  constexpr int32_t kHeads = 2, kWidth = 8;
  Floats a(kRows * kHeads * kWidth), b(a.size()), o(a.size());
  Floats lse_a(kRows * kHeads), lse_b(lse_a.size()), lse(lse_a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    a.data()[i] = noise(i) * (i % 3 ? 1.0f : 0x1p-130f);
    b.data()[i] = noise(5000 + i) * (i % 4 ? 1.0f : 0x1p-128f);
  }
  for (size_t i = 0; i < lse_a.size(); ++i) {
    lse_a.data()[i] = 9 * noise(9000 + i);
    lse_b.data()[i] = 9 * noise(9500 + i);
  }
  lse_b.data()[3] = -std::numeric_limits<float>::infinity();
  attnfold_state states[2] = {ATTNFOLD_STATE_INIT, ATTNFOLD_STATE_INIT};
  states[0].o = a.data();
  states[0].lse = lse_a.data();
  states[1].o = b.data();
  states[1].lse = lse_b.data();
  attnfold_state out = ATTNFOLD_STATE_INIT;
  out.o = o.data();
  out.lse = lse.data();

  const auto merged = [&](uint64_t mode) {
    o.poison();
    lse.poison();
    attnfold_status status;
    {
      ModeKept kept(mode);
      status = attnfold_merge(kRows, kHeads, kWidth, states, 2, &out, nullptr, 0);
    }
    EXPECT_EQ(status, ATTNFOLD_OK) << attnfold_last_error();
    Bytes bytes(o.bytes() + lse.bytes());
    std::memcpy(bytes.data(), o.data(), o.bytes());
    std::memcpy(bytes.data() + o.bytes(), lse.data(), lse.bytes());
    return bytes;
  };
  const Bytes expected = merged(kDefaultControl);
  for (const uint64_t mode : kOddControls) {
    EXPECT_TRUE(same_bytes(merged(mode), expected)) << "mode " << mode;
  }
}

}  // namespace
}  // namespace attnfold::api_test

#endif
