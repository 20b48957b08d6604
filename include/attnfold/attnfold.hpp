// The C++20 face of attnfold.h and cache.h: a plan that frees itself, and errors as values.  Header
// only; everything else is the C ABI.
#ifndef ATTNFOLD_ATTNFOLD_HPP_
#define ATTNFOLD_ATTNFOLD_HPP_

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "attnfold/attnfold.h"
#include "attnfold/cache.h"

namespace attnfold::api {

/** What a call came to; `message` is empty if it went well. */
struct [[nodiscard]] Outcome {
  attnfold_status code = ATTNFOLD_OK;
  std::string message;

  bool ok() const { return code == ATTNFOLD_OK; }
  /** For those who want exceptions: std::runtime_error with the message. */
  void or_throw() const {
    if (!ok()) throw std::runtime_error(message);
  }
};

inline Outcome outcome_of(attnfold_status status) {
  return status == ATTNFOLD_OK ? Outcome{} : Outcome{status, attnfold_last_error()};
}

/** A value, or why there is none. */
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}              // NOLINT: implicit on purpose
  Result(Outcome failure) : failure_(std::move(failure)) {}  // NOLINT

  bool ok() const { return value_.has_value(); }
  const Outcome& outcome() const { return failure_; }
  T& value() { return *value_; }
  T value_or_throw() && {
    failure_.or_throw();
    return std::move(*value_);
  }

 private:
  std::optional<T> value_;
  Outcome failure_;
};

/** attnfold_plan, owned.  Movable; each method is the C function of its name. */
class Plan {
 public:
  static Result<Plan> create(const attnfold_problem& problem,
                             const attnfold_execution& execution = ATTNFOLD_EXECUTION_INIT) {
    attnfold_plan* plan = nullptr;
    const attnfold_status status = attnfold_plan_create(&problem, &execution, &plan);
    if (status != ATTNFOLD_OK) return outcome_of(status);
    return Plan(plan);
  }

  Outcome update(const attnfold_lengths& lengths, void* stream = nullptr) {
    return outcome_of(attnfold_plan_update(plan_.get(), &lengths, stream));
  }
  size_t workspace_bytes() const { return attnfold_plan_workspace_bytes(plan_.get()); }
  Outcome run(const attnfold_tensors& tensors, std::span<std::byte> workspace,
              void* stream = nullptr) const {
    return outcome_of(
        attnfold_plan_run(plan_.get(), &tensors, workspace.data(), workspace.size(), stream));
  }
  /** The current schedule; all zero before the first update. */
  attnfold_plan_report report() const {
    attnfold_plan_report r{};
    r.struct_size = sizeof(r);
    if (attnfold_plan_get_report(plan_.get(), &r) != ATTNFOLD_OK) return {};
    return r;
  }
  const char* kernel() const { return attnfold_plan_kernel(plan_.get()); }
  const char* numerics_id() const { return attnfold_plan_numerics_id(plan_.get()); }
  attnfold_plan* get() const { return plan_.get(); }

 private:
  struct Destroy {
    void operator()(attnfold_plan* plan) const { attnfold_plan_destroy(plan); }
  };
  explicit Plan(attnfold_plan* plan) : plan_(plan) {}
  std::unique_ptr<attnfold_plan, Destroy> plan_;
};

/** attnfold_merge_parallel over states held in a span. */
inline Outcome merge(int64_t rows, int32_t heads, int32_t head_dim_vo,
                     std::span<const attnfold_state> states, const attnfold_state& out,
                     const uint8_t* row_mask = nullptr, int64_t row_mask_stride = 1,
                     const attnfold_execution& execution = ATTNFOLD_EXECUTION_INIT) {
  return outcome_of(attnfold_merge_parallel(rows, heads, head_dim_vo, states.data(),
                                            static_cast<int32_t>(states.size()), &out, row_mask,
                                            row_mask_stride, &execution));
}

/** attnfold_convert_state. */
inline Outcome convert_state(int64_t rows, int32_t heads, int32_t head_dim_vo,
                             const attnfold_state& from, const attnfold_state& to,
                             const attnfold_execution& execution = ATTNFOLD_EXECUTION_INIT) {
  return outcome_of(attnfold_convert_state(rows, heads, head_dim_vo, &from, &to, &execution));
}

/** attnfold_append. */
inline Outcome append(const attnfold_kv_pool& pool, const attnfold_kv_rows& rows,
                      const attnfold_execution& execution = ATTNFOLD_EXECUTION_INIT) {
  return outcome_of(attnfold_append(&pool, &rows, &execution));
}

/** attnfold_slot_mapping_on; positions may be empty: the new tokens are then each request's last. */
inline Outcome slot_mapping(const attnfold_lengths& lengths, int32_t page_size, int64_t num_pages,
                            std::span<int64_t> slots, std::span<const int64_t> positions = {},
                            const attnfold_execution& execution = ATTNFOLD_EXECUTION_INIT) {
  return outcome_of(attnfold_slot_mapping_on(&lengths, page_size, num_pages, positions.data(),
                                             static_cast<int64_t>(slots.size()), slots.data(),
                                             &execution));
}

/** One pair of attnfold_copy_pages. */
struct PagePair {
  int32_t from, to;
};

/** attnfold_copy_pages from one pool to another, or within one. */
inline Outcome copy_pages(const attnfold_kv_pool& from, const attnfold_kv_pool& to,
                          std::span<const PagePair> pairs,
                          const attnfold_execution& execution = ATTNFOLD_EXECUTION_INIT) {
  return outcome_of(attnfold_copy_pages(&from, &to, pairs.empty() ? nullptr : &pairs[0].from,
                                        static_cast<int64_t>(pairs.size()), &execution));
}

}  // namespace attnfold::api

#endif  // ATTNFOLD_ATTNFOLD_HPP_
