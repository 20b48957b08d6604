// What the suites of the CUDA backend share.  Without a device every test says that it was skipped.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "check/cases_util.h"
#include "check/device_call.h"
#include "conformance/suite.h"

namespace attnfold::check::device_test {

/** "" or why this machine runs none of these tests. */
inline std::string why_not_here() {
  for (int32_t i = 0; i < attnfold_num_kernels(); ++i) {
    attnfold_kernel_info info{};
    info.struct_size = sizeof(info);
    if (attnfold_get_kernel(i, &info) == ATTNFOLD_OK && std::string(info.isa) == "cuda")
      return info.why_not;
  }
  return "no kernel row of this build is CUDA's";
}

class DeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_not_here(); !why.empty()) GTEST_SKIP() << why;
  }
};

template <class Parameter>
class DeviceTestWith : public DeviceTest, public ::testing::WithParamInterface<Parameter> {};

inline attnfold_execution on_device(int32_t num_workers = 0, uint64_t cut_seed = 0) {
  attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
  e.backend = ATTNFOLD_CUDA;
  e.num_workers = num_workers;
  e.cut_seed = cut_seed;
  return e;
}

using UniquePlan = std::unique_ptr<attnfold_plan, decltype(&attnfold_plan_destroy)>;

/** NULL where attnfold_last_error says why. */
inline UniquePlan create_plan(const attnfold_problem& problem, const attnfold_execution& e) {
  attnfold_plan* plan = nullptr;
  attnfold_plan_create(&problem, &e, &plan);
  return {plan, attnfold_plan_destroy};
}

/** Random specs of what the kernel rows serve. */
inline Spec random_device_spec(std::mt19937_64& rng) {
  static constexpr int32_t kHeadDims[] = {8, 64, 64, 80, 96, 112, 120, 128, 128, 128, 200, 256};
  Spec spec = random_spec(rng);
  attnfold_problem& p = spec.problem;
  p.kv_dtype = rng() % 2 ? ATTNFOLD_BF16 : ATTNFOLD_F16;
  p.q_dtype = p.kv_dtype;
  p.o_dtype = rng() % 4 ? p.q_dtype : ATTNFOLD_F32;
  p.head_dim_qk = p.head_dim_vo = kHeadDims[rng() % std::size(kHeadDims)];
  p.k_scale_kind = p.v_scale_kind = ATTNFOLD_SCALE_NONE;
  p.v_in_k = 0;
  p.sparse_block_size = p.sparse_local_blocks = 0;
  p.sparse_vertical_stride = p.sparse_head_step = 0;
  spec.visible_prefix.clear();
  spec.mask_width.clear();
  spec.odd_strides = false;
  return spec;
}

inline std::string right(const Call& call, const Answer& answer) {
  const DType type = static_cast<DType>(call.problem.o_dtype);
  const Judgement j = judge(call, ref::answer(call), answer.o.data(), type, answer.lse.data(),
                            type == DType::f32 ? 0 : 1, bound_of(answer.numerics_id));
  return j.right ? "" : j.text;
}

}  // namespace attnfold::check::device_test
