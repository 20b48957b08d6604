// Plans that stay over several steps, and states to merge.
#include <algorithm>
#include <cstring>

#include "check/cases_util.h"

namespace attnfold::check::cases {

namespace {

std::string failure(const char* call, attnfold_status status) {
  return std::string(call) + " said " + attnfold_status_name(status) + ": " + attnfold_last_error();
}

}  // namespace

Plan::Plan(const attnfold_problem& problem, const attnfold_execution& execution) {
  const attnfold_status status = attnfold_plan_create(&problem, &execution, &plan_);
  if (status != ATTNFOLD_OK) {
    error_ = failure("attnfold_plan_create", status);
    plan_ = nullptr;
    return;
  }
  workspace_.assign(attnfold_plan_workspace_bytes(plan_) / sizeof(float) + 1, kNaN);
}

Plan::~Plan() { attnfold_plan_destroy(plan_); }

std::string Plan::update(const Call& call) {
  if (plan_ == nullptr) return error_;
  const attnfold_lengths lengths = call.lengths();
  const attnfold_status status = attnfold_plan_update(plan_, &lengths, nullptr);
  return status == ATTNFOLD_OK ? "" : failure("attnfold_plan_update", status);
}

std::string Plan::run(const Call& call, Answer& out) {
  if (plan_ == nullptr) return error_;
  const attnfold_problem& p = call.problem;
  const size_t heads = static_cast<size_t>(call.num_rows()) * p.qo_heads;
  out.o = Buffer(std::max<size_t>(heads * p.head_dim_vo * dtype_bytes(static_cast<DType>(p.o_dtype)), 1));
  std::memset(out.o.data(), 0xff, out.o.size());
  out.lse.assign(heads + 1, kNaN);
  attnfold_tensors tensors = call.tensors();
  tensors.o = out.o.data();
  tensors.o_stride_row = tensors.o_stride_head = 0;
  tensors.lse = out.lse.data();
  tensors.lse_stride_row = tensors.lse_stride_head = 0;
  const attnfold_status status =
      attnfold_plan_run(plan_, &tensors, workspace_.data(), workspace_.size() * sizeof(float), nullptr);
  out.lse.resize(heads);
  if (status != ATTNFOLD_OK) return failure("attnfold_plan_run", status);
  out.report.struct_size = sizeof(out.report);
  const attnfold_status reported = attnfold_plan_get_report(plan_, &out.report);
  return reported == ATTNFOLD_OK ? "" : failure("attnfold_plan_get_report", reported);
}

State state_of(const Call& call, const Answer& answer) {
  const attnfold_problem& p = call.problem;
  State state;
  state.lse = answer.lse;
  state.o.resize(answer.lse.size() * p.head_dim_vo);
  for (size_t i = 0; i < state.o.size(); ++i) {
    state.o[i] = load_f32(answer.o.data(), static_cast<DType>(p.o_dtype), static_cast<int64_t>(i));
  }
  return state;
}

attnfold_state view(State& state) {
  attnfold_state s = ATTNFOLD_STATE_INIT;
  s.o = state.o.data();
  s.lse = state.lse.data();
  return s;
}

std::string merge(int64_t rows, int32_t heads, int32_t width, std::span<State> states, State& out) {
  std::vector<attnfold_state> views;
  for (State& s : states) views.push_back(view(s));
  out.o.assign(static_cast<size_t>(rows) * heads * width, kNaN);
  out.lse.assign(static_cast<size_t>(rows) * heads, kNaN);
  const attnfold_state to = view(out);
  const attnfold_status status =
      attnfold_merge(rows, heads, width, views.data(), static_cast<int32_t>(views.size()), &to, nullptr, 0);
  return status == ATTNFOLD_OK ? "" : failure("attnfold_merge", status);
}

std::string judge_state(const Call& call, const State& state, const ref::Truth& truth) {
  const Judgement j = judge(call, truth, state.o.data(), DType::f32, state.lse.data(), 0);
  return j.right ? "" : j.text;
}

}  // namespace attnfold::check::cases
