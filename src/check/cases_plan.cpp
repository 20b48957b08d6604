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
  out.o = Buffer(heads * p.head_dim_vo * dtype_bytes(static_cast<DType>(p.o_dtype)));
  if (out.o.size() > 0) std::memset(out.o.data(), 0xff, out.o.size());
  out.lse.assign(heads + 1, kNaN);
  attnfold_tensors tensors = call.tensors();
  tensors.o = out.o.data();
  tensors.o_stride_row = tensors.o_stride_head = 0;
  tensors.lse = out.lse.data();
  tensors.lse_stride_row = tensors.lse_stride_head = 0;
  const attnfold_status status = attnfold_plan_run(plan_, &tensors, workspace_.data(),
                                                   workspace_.size() * sizeof(float), nullptr);
  out.lse.resize(heads);
  out.numerics_id = attnfold_plan_numerics_id(plan_);
  if (status != ATTNFOLD_OK) return failure("attnfold_plan_run", status);
  out.report.struct_size = sizeof(out.report);
  const attnfold_status reported = attnfold_plan_get_report(plan_, &out.report);
  return reported == ATTNFOLD_OK ? "" : failure("attnfold_plan_get_report", reported);
}

namespace {

constexpr int64_t kHeadGap = 5, kRowGap = 3, kMargin = 64;  // in elements
constexpr unsigned char kCanary = 0xa7;

/** Copies element (row, head, e) at margin + row * row_stride + head * head_stride + e of `spaced`
 * to `packed`, and looks whether all other bytes are canaries. */
std::string collect(const std::byte* spaced, int64_t spaced_elements, int64_t rows, int64_t heads,
                    int64_t width, int64_t row_stride, int64_t head_stride, int64_t element_bytes,
                    std::byte* packed, const char* what) {
  std::vector<char> owned(static_cast<size_t>(spaced_elements * element_bytes), 0);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t at = (kMargin + row * row_stride + h * head_stride) * element_bytes;
      std::memcpy(packed + (row * heads + h) * width * element_bytes, spaced + at,
                  static_cast<size_t>(width * element_bytes));
      std::fill_n(owned.begin() + at, width * element_bytes, 1);
    }
  }
  for (size_t i = 0; i < owned.size(); ++i) {
    if (!owned[i] && static_cast<unsigned char>(spaced[i]) != kCanary) {
      return std::string(what) + ": byte " + std::to_string(i) + " outside the answer was written";
    }
  }
  return "";
}

}  // namespace

std::string run_spaced(const Call& call, const attnfold_execution& execution, Answer& out) {
  const attnfold_problem& p = call.problem;
  Plan plan(p, execution);
  ATTNFOLD_HOLD(plan.update(call));
  const int64_t rows = call.num_rows(), heads = p.qo_heads, width = p.head_dim_vo;
  const int64_t o_bytes = dtype_bytes(static_cast<DType>(p.o_dtype));
  const int64_t head_stride = width + kHeadGap, row_stride = heads * head_stride + kRowGap;
  const int64_t lse_row_stride = 2 * heads + kRowGap;
  const int64_t o_elements = 2 * kMargin + rows * row_stride,
                lse_elements = 2 * kMargin + rows * lse_row_stride;
  Buffer o(static_cast<size_t>(o_elements * o_bytes)), lse(static_cast<size_t>(lse_elements * 4));
  std::memset(o.data(), kCanary, o.size());
  std::memset(lse.data(), kCanary, lse.size());
  const size_t workspace_bytes = attnfold_plan_workspace_bytes(plan.get());
  Buffer workspace(workspace_bytes + kMargin);
  std::memset(workspace.data(), kCanary, workspace.size());
  attnfold_tensors t = call.tensors();
  t.o = o.data() + kMargin * o_bytes;
  t.o_stride_row = row_stride;
  t.o_stride_head = head_stride;
  t.lse = reinterpret_cast<float*>(lse.data()) + kMargin;
  t.lse_stride_row = lse_row_stride;
  t.lse_stride_head = 2;
  const attnfold_status status =
      attnfold_plan_run(plan.get(), &t, workspace.data(), workspace_bytes, nullptr);
  if (status != ATTNFOLD_OK) return failure("attnfold_plan_run", status);
  for (size_t i = workspace_bytes; i < workspace.size(); ++i) {
    if (static_cast<unsigned char>(workspace.data()[i]) != kCanary)
      return "the run wrote past its workspace";
  }
  out.o = Buffer(static_cast<size_t>(rows * heads * width * o_bytes));
  out.lse.resize(static_cast<size_t>(rows * heads));
  out.numerics_id = attnfold_plan_numerics_id(plan.get());
  ATTNFOLD_HOLD(collect(o.data(), o_elements, rows, heads, width, row_stride, head_stride, o_bytes,
                        out.o.data(), "o"));
  return collect(lse.data(), lse_elements, rows, heads, 1, lse_row_stride, 2, 4,
                 reinterpret_cast<std::byte*>(out.lse.data()), "lse");
}

State state_of(const Call& call, const Answer& answer) {
  const attnfold_problem& p = call.problem;
  State state;
  state.lse = answer.lse;
  state.rounds_weights = bound_of(answer.numerics_id).weights != Weights::kFloat32;
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
  out.rounds_weights = false;
  for (State& s : states) {
    views.push_back(view(s));
    out.rounds_weights = out.rounds_weights || s.rounds_weights;
  }
  out.o.assign(static_cast<size_t>(rows) * heads * width, kNaN);
  out.lse.assign(static_cast<size_t>(rows) * heads, kNaN);
  const attnfold_state to = view(out);
  const attnfold_status status = attnfold_merge(
      rows, heads, width, views.data(), static_cast<int32_t>(views.size()), &to, nullptr, 0);
  return status == ATTNFOLD_OK ? "" : failure("attnfold_merge", status);
}

Bound bound_of_merged(const State& state) {
  Bound bound;
  if (state.rounds_weights) bound.weights = Weights::kRoundedSomehow;
  return bound;
}

std::string judge_state(const Call& call, const State& state, const ref::Truth& truth) {
  const Judgement j =
      judge(call, truth, state.o.data(), DType::f32, state.lse.data(), 0, bound_of_merged(state));
  return j.right ? "" : j.text;
}

}  // namespace attnfold::check::cases
