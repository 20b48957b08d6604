// A plan with what its last update has to keep alive, and with workspaces for the threads that run
// it.
#ifndef ATTNFOLD_PYTHON_PLAN_H_
#define ATTNFOLD_PYTHON_PLAN_H_

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "arrays.h"
#include "fields.h"

namespace attnfold::python {

class Plan {
 public:
  Plan(nb::dict problem, nb::dict execution);
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  void update(nb::dict lengths, nb::handle stream);
  void run(nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse,
           nb::handle alibi_slopes, nb::handle sink_logits, nb::handle k_scale, nb::handle v_scale,
           nb::handle o_scale, nb::handle workspace, nb::handle stream);

  /** Lets go of the arrays of the last update, which no run follows. */
  void forget();

  size_t workspace_bytes() const { return attnfold_plan_workspace_bytes(plan_); }
  const char* kernel() const { return attnfold_plan_kernel(plan_); }
  const char* numerics_id() const { return attnfold_plan_numerics_id(plan_); }
  nb::dict report();
  nb::dict problem() const { return fields_of(problem_); }
  bool cuda() const { return place_.cuda; }
  int device() const { return place_.device; }

 private:
  struct Step {
    std::vector<Integers> arrays;
    int64_t qo_rows = -1, kv_rows = 0;
  };
  struct Sizes {
    int64_t table_width = 0, kv_indices = 0, mask_bits = 0, block_indices = 0, prefix_indptr = 0,
            prefix_requests = 0;
  };
  using Workspace = std::unique_ptr<std::byte, void (*)(void*)>;
  /** What threads share, and take without the GIL only. */
  struct Shared {
    std::shared_mutex schedule;         // an update waits for runs, and they for it
    std::atomic<bool> updating{false};  // somebody holds it to change the schedule
    std::vector<Integers> arrays;       // those of the last update
    std::mutex workspaces_mutex;
    std::vector<Workspace> workspaces;
  };

  Place place_in(nb::handle stream) const {
    return {place_.cuda, place_.device, stream_of(stream)};
  }
  void read_lengths(nb::dict given, const Place& place, attnfold_lengths* lengths,
                    Step* step) const;
  void check_sizes(const attnfold_lengths& lengths, const Sizes& sizes) const;
  void set_kv(const char* name, nb::handle object, const Place& place, int64_t width,
              const void** data, int64_t* page, int64_t* token, int64_t* head,
              std::vector<nb::object>* keep) const;
  void set_scale(const char* name, nb::handle object, const Place& place, attnfold_scale_kind kind,
                 float* number, const float** data, int64_t* page, int64_t* token, int64_t* head,
                 std::vector<nb::object>* keep) const;
  void set_outputs(nb::handle o, nb::handle lse, const Place& place, int64_t rows,
                   attnfold_tensors* tensors, std::vector<nb::object>* keep) const;
  Workspace take_workspace(Shared* shared);
  Shared& shared();
  /** Raises if the schedule is one that a fork cut in half. */
  void check_whole() const;

  attnfold_problem problem_ = ATTNFOLD_PROBLEM_INIT;
  attnfold_plan* plan_ = nullptr;
  Place place_;
  std::atomic<int64_t> qo_rows_{-1};  // of q; -1: only the device knows
  std::atomic<int64_t> kv_rows_{0};   // that ragged k and v need
  std::atomic<uint64_t> version_{0};  // of the schedule
  std::atomic<bool> torn_{false};     // the process was forked while the schedule changed
  pid_t process_ = getpid();
  std::unique_ptr<Shared> shared_ = std::make_unique<Shared>();
};

}  // namespace attnfold::python

#endif  // ATTNFOLD_PYTHON_PLAN_H_
