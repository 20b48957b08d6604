// A plan: one problem on one backend, and the schedule of its current step.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "attnfold/attnfold.h"
#include "core/problem.h"
#include "cpu/backend.h"
#include "plan/any_plan.h"
#include "plan/schedule.h"
#include "status.h"

namespace attnfold {

/** The kernel row for a problem: the first of the table that serves it, among those of `isa` (or
 * NULL: any). */
Status choose_row(const Problem& problem, const char* isa, const cpu::KernelRow** row);

/** A plan on the CPU. */
class Plan final : public AnyPlan {
 public:
  static Status create(const attnfold_problem* problem, const attnfold_execution& execution,
                       std::unique_ptr<AnyPlan>* out);

  Status update(const attnfold_lengths* lengths, void* stream) override;
  Status run(const attnfold_tensors* tensors, void* workspace, size_t workspace_bytes,
             void* stream) const override;
  size_t workspace_bytes() const override { return workspace_bytes_; }
  Status report(attnfold_plan_report* out) const override;
  Status item(int32_t index, attnfold_plan_item* out) const override;
  const char* kernel() const override { return row_->name; }
  const char* numerics_id() const override { return row_->numerics_id; }

 private:
  Status reserve();
  size_t all_scratch_bytes() const;
  /** Most rows of a unit, for a batch of so many new tokens. */
  int32_t rows_of_units(int32_t num_tokens) const;
  int64_t key_bytes() const;  // of k, v and scales of one key of one kv head
  int64_t kv_bytes() const;
  int64_t num_block_keys(const Unit& unit) const;
  uint64_t schedule_id() const;
  const int32_t* requests_of(const Unit& unit) const;
  Status check_updated() const;

  attnfold_problem given_;  // every default resolved
  Problem problem_;
  cpu::Threads threads_;
  int32_t num_workers_;  // at most
  int32_t shared_threads_ =
      0;  // that take shares in turn, as many as suit a batch; 0: num_workers_ shares
  uint64_t cut_seed_;
  attnfold_prefix_use prefix_use_;
  const cpu::KernelRow* row_;
  UnitShape shape_;
  int32_t most_rows_;  // shape_.max_rows of most batches
  ScheduleCapacity capacity_;
  size_t scratch_bytes_, workspace_bytes_;

  bool updated_ = false;
  bool reads_kv_ = false;
  int64_t num_kv_rows_ = 0;  // ragged
  Schedule schedule_{};
  Lengths lengths_{};  // points at the arrays below, and at the caller's page tables and mask_bits
  std::vector<int32_t> qo_indptr_, kv_len_, kv_indptr_, visible_prefix_, mask_width_;
  std::vector<int64_t> mask_indptr_;
  std::unique_ptr<Unit[]> units_;  // uninitialised: large maxima cost address space, not memory
  std::unique_ptr<Item[]> items_;
  std::unique_ptr<SharedUnit[]> shared_;
  std::unique_ptr<Member[]> members_;
  std::unique_ptr<int32_t[]> live_leaves_;
  std::vector<int32_t> worker_items_;
  // Of the search for shared prefixes.
  std::unique_ptr<RequestPrefix[]> prefix_requests_;
  std::unique_ptr<PrefixClass[]> prefix_classes_;
  std::unique_ptr<PrefixNode[]> prefix_nodes_;
  std::unique_ptr<int32_t[]> prefix_ints_;
  std::vector<int32_t> group_of_;        // [max_batch] scratch of a check
  std::unique_ptr<int32_t[]> requests_;  // [members + max_batch]: of each member, and 0, 1, 2, ..
};

}  // namespace attnfold
