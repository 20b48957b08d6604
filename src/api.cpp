// The C ABI: catches everything, keeps the text of the last error.
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>

#include "attnfold/attnfold.h"
#include "cache/cache.h"
#include "cpu/cpu_features.h"
#include "cuda/backend.h"
#include "float_mode.h"
#include "merge.h"
#include "plan/plan.h"
#include "plan/validate.h"
#include "status.h"

using attnfold::invalid;
using attnfold::Status;

struct attnfold_plan {
  std::unique_ptr<attnfold::AnyPlan> plan;
};

namespace {

std::string& last_error() {
  thread_local std::string text;
  return text;
}

attnfold_status report(const Status& status) noexcept {
  if (!status.ok()) {
    try {
      last_error() = status.message();
    } catch (...) {
      last_error().clear();
    }
  }
  return status.code();
}

/** Runs `body`, which returns a Status, in the library's floating-point mode, and turns exceptions
 * into a status. */
template <class Body>
attnfold_status guarded(Body&& body) noexcept {
  const attnfold::FloatingPointMode mode;
  try {
    return report(body());
  } catch (const std::bad_alloc&) {
    return report({ATTNFOLD_INTERNAL, "memory: expected more, got std::bad_alloc"});
  } catch (const std::exception& e) {
    return report({ATTNFOLD_INTERNAL, std::string("internal: ") + e.what()});
  } catch (...) {
    return report({ATTNFOLD_INTERNAL, "internal: unknown exception"});
  }
}

/** An output struct states its size; a newer caller's further fields are left alone. */
template <class T>
Status check_output_struct(const char* name, const T* out) {
  if (!out) return invalid(name, "a pointer", "NULL");
  const size_t size = out->struct_size;
  if (size < sizeof(size_t) || size > (1u << 20)) {
    return invalid(std::string(name) + ".struct_size", std::to_string(sizeof(T)), size);
  }
  return {};
}

/** A row of the kernel table, of one backend or the other. */
struct AnyRow {
  const attnfold::cpu::KernelRow* cpu;
  const attnfold::cuda::KernelRow* cuda;
  attnfold_kernel_info info;
  std::string why;  // it cannot run here, or ""
};

/** Found out once; the strings live as long as the process. */
const std::vector<AnyRow>& kernel_rows() {
  static const auto* rows = [] {
    auto* all = new std::vector<AnyRow>;
    for (const auto* row : attnfold::cpu::kernel_table()) {
      const attnfold_kernel_info info = {0, row->name, row->isa, row->q_dtypes,
                                         attnfold::dtype_name(row->kv_dtype), row->numerics_id,
                                         0, nullptr};
      all->push_back({row, nullptr, info, attnfold::cpu::why_not(row->isa)});
    }
    for (int i = 0; i < attnfold::cuda::kNumKernelRows; ++i) {
      const attnfold::cuda::KernelRow& row = attnfold::cuda::kernel_row(i);
      const char* type = attnfold::dtype_name(row.dtype);
      all->push_back({nullptr, &row, {0, row.name, "cuda", type, type, row.numerics_id, 0, nullptr},
                      attnfold::cuda::why_not_here()});
    }
    return all;
  }();
  return *rows;
}

Status check_kernel_index(int32_t index) {
  const size_t n = kernel_rows().size();
  if (index >= 0 && static_cast<size_t>(index) < n) return {};
  return invalid("index", "0.." + std::to_string(n - 1), index);
}

}  // namespace

extern "C" {

attnfold_status attnfold_plan_create(const attnfold_problem* problem,
                                     const attnfold_execution* execution, attnfold_plan** plan) {
  return guarded([&]() -> Status {
    if (!plan) return invalid("plan", "a pointer to receive it", "NULL");
    auto handle = std::make_unique<attnfold_plan>();
    attnfold_execution e;
    ATTNFOLD_RETURN_IF_ERROR(attnfold::validate_execution(execution, &e));
    ATTNFOLD_RETURN_IF_ERROR(e.backend == ATTNFOLD_CUDA
                                 ? attnfold::cuda::create_plan(problem, e, &handle->plan)
                                 : attnfold::Plan::create(problem, e, &handle->plan));
    *plan = handle.release();
    return {};
  });
}

attnfold_status attnfold_plan_update(attnfold_plan* plan, const attnfold_lengths* lengths,
                                     void* stream) {
  return guarded([&]() -> Status {
    if (!plan) return invalid("plan", "a plan", "NULL");
    return plan->plan->update(lengths, stream);
  });
}

size_t attnfold_plan_workspace_bytes(const attnfold_plan* plan) {
  return plan ? plan->plan->workspace_bytes() : 0;
}

attnfold_status attnfold_plan_run(const attnfold_plan* plan, const attnfold_tensors* tensors,
                                  void* workspace, size_t workspace_bytes, void* stream) {
  return guarded([&]() -> Status {
    if (!plan) return invalid("plan", "a plan", "NULL");
    return plan->plan->run(tensors, workspace, workspace_bytes, stream);
  });
}

void attnfold_plan_destroy(attnfold_plan* plan) { delete plan; }

attnfold_status attnfold_plan_get_report(const attnfold_plan* plan, attnfold_plan_report* out) {
  return guarded([&]() -> Status {
    if (!plan) return invalid("plan", "a plan", "NULL");
    ATTNFOLD_RETURN_IF_ERROR(check_output_struct("report", out));
    return plan->plan->report(out);
  });
}

attnfold_status attnfold_plan_get_item(const attnfold_plan* plan, int32_t index,
                                       attnfold_plan_item* item) {
  return guarded([&]() -> Status {
    if (!plan) return invalid("plan", "a plan", "NULL");
    ATTNFOLD_RETURN_IF_ERROR(check_output_struct("item", item));
    return plan->plan->item(index, item);
  });
}

const char* attnfold_plan_kernel(const attnfold_plan* plan) {
  return plan ? plan->plan->kernel() : "";
}

const char* attnfold_plan_numerics_id(const attnfold_plan* plan) {
  return plan ? plan->plan->numerics_id() : "";
}

attnfold_status attnfold_merge(int64_t rows, int32_t heads, int32_t head_dim_vo,
                               const attnfold_state* states, int32_t n, const attnfold_state* out,
                               const uint8_t* row_mask, int64_t row_mask_stride) {
  attnfold_execution calling_thread = ATTNFOLD_EXECUTION_INIT;
  calling_thread.num_threads = 1;
  return attnfold_merge_parallel(rows, heads, head_dim_vo, states, n, out, row_mask,
                                 row_mask_stride, &calling_thread);
}

attnfold_status attnfold_merge_parallel(int64_t rows, int32_t heads, int32_t head_dim_vo,
                                        const attnfold_state* states, int32_t n,
                                        const attnfold_state* out, const uint8_t* row_mask,
                                        int64_t row_mask_stride,
                                        const attnfold_execution* execution) {
  return guarded([&] {
    return attnfold::merge_states(rows, heads, head_dim_vo, states, n, out, row_mask,
                                  row_mask_stride, execution);
  });
}

attnfold_status attnfold_convert_state(int64_t rows, int32_t heads, int32_t head_dim_vo,
                                       const attnfold_state* from, const attnfold_state* to,
                                       const attnfold_execution* execution) {
  return guarded(
      [&] { return attnfold::convert_state(rows, heads, head_dim_vo, from, to, execution); });
}

attnfold_status attnfold_append(const attnfold_kv_pool* pool, const attnfold_kv_rows* rows,
                                const attnfold_execution* execution) {
  return guarded([&] { return attnfold::cache::append(pool, rows, execution); });
}

attnfold_status attnfold_slot_mapping(const attnfold_lengths* lengths, int32_t page_size,
                                      int64_t num_pages, const int64_t* positions,
                                      int64_t num_slots, int64_t* slots) {
  return attnfold_slot_mapping_on(lengths, page_size, num_pages, positions, num_slots, slots,
                                  nullptr);
}

attnfold_status attnfold_slot_mapping_on(const attnfold_lengths* lengths, int32_t page_size,
                                         int64_t num_pages, const int64_t* positions,
                                         int64_t num_slots, int64_t* slots,
                                         const attnfold_execution* execution) {
  return guarded([&] {
    return attnfold::cache::slot_mapping(lengths, page_size, num_pages, positions, num_slots, slots,
                                         execution);
  });
}

attnfold_status attnfold_map_to_kernel_pages(int32_t batch, int32_t width, int32_t block_size,
                                             int32_t page_size, int64_t num_blocks,
                                             const int32_t* block_table, int64_t block_table_stride,
                                             const int32_t* used, int32_t* page_table,
                                             int64_t page_table_stride) {
  return guarded([&] {
    return attnfold::cache::map_to_kernel_pages({batch, width, block_size, page_size, num_blocks,
                                                 block_table, block_table_stride, used, page_table,
                                                 page_table_stride});
  });
}

attnfold_status attnfold_copy_pages(const attnfold_kv_pool* from, const attnfold_kv_pool* to,
                                    const int32_t* pairs, int64_t num_pairs,
                                    const attnfold_execution* execution) {
  return guarded(
      [&] { return attnfold::cache::copy_pages(from, to, pairs, num_pairs, execution); });
}

const char* attnfold_last_error(void) { return last_error().c_str(); }

const char* attnfold_status_name(attnfold_status status) {
  switch (status) {
    case ATTNFOLD_OK: return "OK";
    case ATTNFOLD_INVALID_ARGUMENT: return "INVALID_ARGUMENT";
    case ATTNFOLD_UNSUPPORTED: return "UNSUPPORTED";
    case ATTNFOLD_OUT_OF_WORKSPACE: return "OUT_OF_WORKSPACE";
    case ATTNFOLD_DEVICE_ERROR: return "DEVICE_ERROR";
    case ATTNFOLD_INTERNAL: return "INTERNAL";
  }
  return "unknown status";
}

int32_t attnfold_version(void) {
  return ATTNFOLD_VERSION_MAJOR * 10000 + ATTNFOLD_VERSION_MINOR * 100 + ATTNFOLD_VERSION_PATCH;
}

int32_t attnfold_num_kernels(void) {
  return static_cast<int32_t>(kernel_rows().size());
}

attnfold_status attnfold_get_kernel(int32_t index, attnfold_kernel_info* info) {
  return guarded([&]() -> Status {
    ATTNFOLD_RETURN_IF_ERROR(check_output_struct("info", info));
    ATTNFOLD_RETURN_IF_ERROR(check_kernel_index(index));
    const AnyRow& row = kernel_rows()[static_cast<size_t>(index)];
    attnfold_kernel_info filled = row.info;
    filled.struct_size = info->struct_size;
    filled.available = row.why.empty();
    filled.why_not = row.why.c_str();
    std::memcpy(info, &filled, std::min(info->struct_size, sizeof(filled)));
    return {};
  });
}

attnfold_status attnfold_kernel_serves(int32_t index, const attnfold_problem* problem) {
  return guarded([&]() -> Status {
    ATTNFOLD_RETURN_IF_ERROR(check_kernel_index(index));
    attnfold_problem resolved;
    attnfold::Problem p;
    ATTNFOLD_RETURN_IF_ERROR(attnfold::validate_problem(problem, &resolved, &p));
    const AnyRow& row = kernel_rows()[static_cast<size_t>(index)];
    const std::string why = row.cpu ? attnfold::cpu::why_row_rejects(*row.cpu, p)
                                    : attnfold::cuda::why_row_rejects(*row.cuda, resolved);
    if (why.empty()) return {};
    return {ATTNFOLD_UNSUPPORTED, std::string(row.info.name) + ": " + why};
  });
}

}  // extern "C"
