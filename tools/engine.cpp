#include "engine.h"

#include <algorithm>
#include <utility>

#include "core/problem.h"
#include "ref/oracle.h"

namespace attnfold::tools {
namespace {

void require_ok(attnfold_status status) {
  if (status != ATTNFOLD_OK) throw EngineError(status, attnfold_last_error());
}

}  // namespace

PreparedCall::PreparedCall(const check::Call& call, const attnfold_execution& execution)
    : call_(call), tensors_(call.tensors()) {
  attnfold_plan* plan = nullptr;
  require_ok(attnfold_plan_create(&call.problem, &execution, &plan));
  plan_.reset(plan);
  workspace_bytes_ = attnfold_plan_workspace_bytes(plan);
  if (execution.backend == ATTNFOLD_CUDA) {
    device_ = std::make_unique<check::DeviceCall>(call);
    tensors_ = device_->tensors();
    device_workspace_ = device_->workspace(workspace_bytes_);
    update();
    return;
  }
  update();
  const int64_t rows_heads = int64_t{call.num_rows()} * call.problem.qo_heads;
  const DType o_dtype = static_cast<DType>(call.problem.o_dtype);
  o_ = check::Buffer(
      static_cast<size_t>(rows_heads * call.problem.head_dim_vo * dtype_bytes(o_dtype)));
  lse_.resize(static_cast<size_t>(rows_heads));
  workspace_ = check::Buffer(workspace_bytes_);
  tensors_.o = o_.data();
  tensors_.lse = lse_.data();
}

void PreparedCall::update() {
  const attnfold_lengths lengths = device_ ? device_->lengths() : call_.lengths();
  require_ok(attnfold_plan_update(plan_.get(), &lengths, nullptr));
}

void PreparedCall::run() {
  void* workspace = device_ ? device_workspace_ : workspace_.data();
  require_ok(attnfold_plan_run(plan_.get(), &tensors_, workspace, workspace_bytes_, nullptr));
  if (device_) device_->finish();
}

attnfold_plan_report PreparedCall::report() const {
  attnfold_plan_report report{};
  report.struct_size = sizeof(report);
  require_ok(attnfold_plan_get_report(plan_.get(), &report));
  return report;
}

check::Answer PreparedCall::take_answer() {
  check::Answer answer;
  answer.report = report();
  answer.kernel = kernel();
  answer.numerics_id = numerics_id();
  if (device_) {
    if (const std::string wrong = device_->take(&answer); !wrong.empty())
      throw EngineError(ATTNFOLD_INTERNAL, wrong);
    return answer;
  }
  answer.o = std::move(o_);
  answer.lse = std::move(lse_);
  return answer;
}

namespace {

/** With a block-sparse mask kv heads differ: their mean. */
int64_t sparse_pairs(const check::Call& call) {
  int64_t pairs = 0;
  for (int32_t r = 0; r < call.batch; ++r) {
    const size_t request = static_cast<size_t>(r);
    for (int32_t i = 0; i < call.qo_indptr[request + 1] - call.qo_indptr[request]; ++i) {
      for (int32_t j = 0; j < call.kv_len[request]; ++j) {
        for (int32_t h = 0; h < call.problem.kv_heads; ++h) pairs += ref::visible(call, r, i, j, h);
      }
    }
  }
  return pairs / call.problem.kv_heads;
}

}  // namespace

int64_t visible_pairs(const check::Call& call) {
  if (call.problem.sparse_block_size > 0) return sparse_pairs(call);
  const attnfold_problem& p = call.problem;
  const Mask mask{p.mask == ATTNFOLD_MASK_CAUSAL, p.window_left, p.window_right, p.attention_chunk,
                  p.sink_tokens};
  int64_t pairs = 0;
  for (size_t r = 0; r < static_cast<size_t>(call.batch); ++r) {
    RequestShape shape{call.qo_indptr[r + 1] - call.qo_indptr[r], call.kv_len[r]};
    if (!call.visible_prefix.empty()) shape.visible_prefix = call.visible_prefix[r];
    if (!call.mask_width.empty()) shape.mask_width = call.mask_width[r];
    const int32_t tail = shape.kv_len - shape.mask_width;
    for (int32_t i = 0; i < shape.qo_len; ++i) {
      const VisibleKeys keys = visible_keys(mask, shape, i);
      pairs += std::min(keys.sink, tail) + std::min(keys.end, tail) - std::min(keys.begin, tail);
    }
    if (shape.mask_width == 0) continue;
    const size_t first = static_cast<size_t>(call.mask_indptr[r]);
    const int64_t row_bytes = mask_row_bytes(shape.mask_width);
    for (int64_t i = 0; i < shape.qo_len; ++i) {
      for (int32_t b = 0; b < shape.mask_width; ++b) {
        pairs += call.mask_bits[first + static_cast<size_t>(i * row_bytes + b / 8)] >> (b % 8) & 1;
      }
    }
  }
  return pairs;
}

double useful_flop(const check::Call& call) {
  const attnfold_problem& problem = call.problem;
  return 2.0 * static_cast<double>(visible_pairs(call)) * problem.qo_heads *
         (problem.head_dim_qk + problem.head_dim_vo);
}

}  // namespace attnfold::tools
