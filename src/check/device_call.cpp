#include "check/device_call.h"

#include <stdexcept>
#include <utility>

#if defined(ATTNFOLD_WITH_CUDA)
#include "check/device_buffer.h"
#endif

namespace attnfold::check {

#if defined(ATTNFOLD_WITH_CUDA)
namespace {

template <class T>
DeviceBuffer copy_of(const std::vector<T>& v) {
  return v.empty() ? DeviceBuffer() : DeviceBuffer(v.data(), v.size() * sizeof(T));
}

}  // namespace

struct DeviceCall::Memory {
  DeviceBuffer qo_indptr, kv_len, block_table, kv_indptr, kv_indices;
  DeviceBuffer q, k, v, alibi_slopes, sink_logits;
  DeviceBuffer o, lse, workspace;
};

DeviceCall::DeviceCall(const Call& call) : call_(call), memory_(std::make_unique<Memory>()) {
  Memory& m = *memory_;
  m.qo_indptr = copy_of(call.qo_indptr);
  m.kv_len = copy_of(call.kv_len);
  m.block_table = copy_of(call.block_table);
  m.kv_indptr = copy_of(call.kv_indptr);
  m.kv_indices = copy_of(call.kv_indices);
  m.alibi_slopes = copy_of(call.alibi_slopes);
  m.sink_logits = copy_of(call.sink_logits);
  m.q = DeviceBuffer(call.q->data(), call.q->size());
  m.k = DeviceBuffer(call.k->data(), call.k->size());
  m.v = DeviceBuffer(call.v->data(), call.v->size());
}

DeviceCall::~DeviceCall() = default;

attnfold_lengths DeviceCall::lengths() const {
  const auto pointer =
      [&](const DeviceBuffer& b) {  // where a table has no entry, something to point at
        return reinterpret_cast<const int32_t*>(b.data() ? b.data() : memory_->q.data());
      };
  attnfold_lengths lengths = call_.lengths();
  lengths.qo_indptr = pointer(memory_->qo_indptr);
  if (lengths.kv_len) lengths.kv_len = pointer(memory_->kv_len);
  if (lengths.block_table) lengths.block_table = pointer(memory_->block_table);
  if (lengths.kv_indptr) lengths.kv_indptr = pointer(memory_->kv_indptr);
  if (lengths.kv_indices) lengths.kv_indices = pointer(memory_->kv_indices);
  return lengths;
}

attnfold_tensors DeviceCall::tensors() {
  Memory& m = *memory_;
  const size_t rows =
      static_cast<size_t>(call_.num_rows()) * static_cast<size_t>(call_.problem.qo_heads);
  const int o_bytes = dtype_bytes(static_cast<DType>(call_.problem.o_dtype));
  m.o = DeviceBuffer(rows * static_cast<size_t>(call_.problem.head_dim_vo * o_bytes));
  m.lse = DeviceBuffer(rows * sizeof(float));
  const auto moved = [](const void* host, const Buffer& from, const DeviceBuffer& to) {
    return to.data() +
           (static_cast<const char*>(host) - reinterpret_cast<const char*>(from.data()));
  };
  attnfold_tensors t = call_.tensors();
  t.q = moved(t.q, *call_.q, m.q);
  t.k = moved(t.k, *call_.k, m.k);
  t.v = moved(t.v, *call_.v, m.v);
  t.o = m.o.data();
  t.lse = reinterpret_cast<float*>(m.lse.data());
  t.alibi_slopes = reinterpret_cast<const float*>(m.alibi_slopes.data());
  t.sink_logits = reinterpret_cast<const float*>(m.sink_logits.data());
  return t;
}

void* DeviceCall::workspace(size_t bytes) {
  memory_->workspace = DeviceBuffer(bytes);
  return memory_->workspace.data();
}

void DeviceCall::finish() { require_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

std::string DeviceCall::take(Answer* answer) {
  finish();
  const Memory& m = *memory_;
  for (const auto& [name, buffer] : {std::pair<const char*, const DeviceBuffer*>{"o", &m.o},
                                     {"lse", &m.lse},
                                     {"workspace", &m.workspace}}) {
    if (!buffer->canaries_whole()) return std::string(name) + ": canary beside it is broken";
  }
  answer->o = Buffer(m.o.size());
  answer->lse.resize(m.lse.size() / sizeof(float));
  m.o.read(answer->o.data());
  m.lse.read(answer->lse.data());
  return "";
}

namespace {

RunResult engine_failure(attnfold_status status) {
  RunResult result;
  result.status = status;
  result.error = attnfold_last_error();
  return result;
}

}  // namespace

RunResult run_on_device(const Call& call, const attnfold_execution& execution) {
  attnfold_plan* created = nullptr;
  attnfold_status status = attnfold_plan_create(&call.problem, &execution, &created);
  const std::unique_ptr<attnfold_plan, decltype(&attnfold_plan_destroy)> plan(
      created, attnfold_plan_destroy);
  if (status != ATTNFOLD_OK) return engine_failure(status);
  DeviceCall device(call);
  const attnfold_lengths lengths = device.lengths();
  status = attnfold_plan_update(plan.get(), &lengths, nullptr);
  if (status != ATTNFOLD_OK) return engine_failure(status);
  const attnfold_tensors tensors = device.tensors();
  const size_t bytes = attnfold_plan_workspace_bytes(plan.get());
  status = attnfold_plan_run(plan.get(), &tensors, device.workspace(bytes), bytes, nullptr);
  if (status != ATTNFOLD_OK) return engine_failure(status);
  RunResult result;
  result.error = device.take(&result.answer);
  if (!result.error.empty()) {
    result.status = ATTNFOLD_INTERNAL;
    return result;
  }
  result.answer.report.struct_size = sizeof(result.answer.report);
  status = attnfold_plan_get_report(plan.get(), &result.answer.report);
  if (status != ATTNFOLD_OK) return engine_failure(status);
  result.answer.kernel = attnfold_plan_kernel(plan.get());
  result.answer.numerics_id = attnfold_plan_numerics_id(plan.get());
  return result;
}

#else

struct DeviceCall::Memory {};
DeviceCall::DeviceCall(const Call& call) : call_(call) {
  throw std::runtime_error("this build has no CUDA backend (ATTNFOLD_CUDA is OFF)");
}
DeviceCall::~DeviceCall() = default;
attnfold_lengths DeviceCall::lengths() const { return call_.lengths(); }
attnfold_tensors DeviceCall::tensors() { return call_.tensors(); }
void* DeviceCall::workspace(size_t) { return nullptr; }
void DeviceCall::finish() {}
std::string DeviceCall::take(Answer*) { return ""; }

RunResult run_on_device(const Call& call, const attnfold_execution& execution) {
  attnfold_plan* plan = nullptr;  // fails, and says why
  RunResult result;
  result.status = attnfold_plan_create(&call.problem, &execution, &plan);
  result.error = attnfold_last_error();
  attnfold_plan_destroy(plan);
  return result;
}

#endif

}  // namespace attnfold::check
