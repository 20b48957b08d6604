// The CPU backend: its kernel table, how work is cut for it, and a run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "attnfold/attnfold.h"
#include "core/problem.h"
#include "cpu/kernel_row.h"
#include "cpu/thread_pool.h"
#include "plan/schedule.h"
#include "status.h"

namespace attnfold::cpu {

/** Every row of this build, in order of preference on this machine. */
const std::vector<const KernelRow*>& kernel_table();

/** Whether a row is taken for a problem without being named: one that rounds weights where o is
 * rounded as much anyway. */
bool is_default_for(const KernelRow& row, const Problem& problem);

/** "" if the row serves the problem on this machine; else the field that it does not serve, in
 * words. */
std::string why_row_rejects(const KernelRow& row, const Problem& problem);

/** How threads are had. */
struct Threads {
  int32_t num_threads;
  attnfold_parallel_for parallel_for;  // or null: the pool
  void* user;
};

/** That ATTNFOLD_NUM_THREADS, if it is set, is a number of threads. */
Status check_default_threads();

/** What a validated execution asks for: its own number, else ATTNFOLD_NUM_THREADS, else the CPUs
 * that this process may use. */
Threads threads_of(const attnfold_execution& execution);

/** Runs the bodies of each phase on the threads, a phase after all of the one before it, each body
 * with rounding and flush modes set to the defaults and set back. */
void run_parallel(const Threads& threads, std::initializer_list<Phase> phases);

/** How many bodies of a run need scratch of their own. */
int32_t bodies_at_once(const Threads& threads, int32_t num_workers);

/** Answers a batch.  `args.states` and `args.scratch` are the caller's; nothing is allocated. */
void run(const KernelRow& row, const Threads& threads, const RunArgs& args);

}  // namespace attnfold::cpu
