// One row of the CPU's kernel table, and what a kernel is given.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.h"
#include "plan/schedule.h"

namespace attnfold::cpu {

/** What every body of one run reads. */
struct RunArgs {
  const Problem* problem;
  const UnitShape* shape;
  const Schedule* schedule;
  const Lengths* lengths;
  Tensors tensors;
  char* scratch;  // [bodies at once, scratch_bytes]; for a kernel that of its body
  size_t scratch_bytes;
  float* states;  // [schedule->state_floats]
};

/** A stretch of rows of a unit that one task of the second pass finishes. */
struct MergeTask {
  int32_t unit;
  int32_t row_begin, row_end;
};

/** A token of a unit. */
struct TokenRow {
  int64_t row;       // of q and o
  int64_t position;  // among its request's keys
  VisibleKeys keys;
};

/** Keys that a token sees of a leaf: [0, sink) and [begin, end), relative to it. */
struct LeafKeys {
  int32_t sink, begin, end;
};

struct KernelRow {
  const char* name;  // "cpu_avx512/bf16"
  const char* isa;   // "avx512"
  const char* q_dtypes;
  DType kv_dtype;
  bool q_is_kv_dtype;  // false: any q type
  // Weights are rounded to the type of v: chosen by name, or where o is rounded as much anyway.
  bool rounds_weights;
  const char* numerics_id;
  void (*run_worker)(const RunArgs&, int32_t worker);
  void (*merge)(const RunArgs&, const MergeTask&);
};

/** A plain pair, not std::span: an inline function of the library compiled in a target region could
 * reach other callers. */
struct KernelRows {
  const KernelRow* data;
  int32_t count;
};

/** Head dims are padded in scratch to whole chunks of 32 elements. */
constexpr int32_t kChunk = 32;
inline int32_t padded(int32_t head_dim) { return (head_dim + kChunk - 1) / kChunk * kChunk; }

/** Floats of one row of a state: m, l and o. */
inline int32_t state_row_floats(const Problem& p) { return padded(p.head_dim_vo) + 2; }

size_t worker_scratch_bytes(const Problem& problem, const UnitShape& shape);

/** Rows of a unit of several tokens or kv heads, at most. */
constexpr int32_t kMostUnitRows = 256;

/** How a row's kernels want work cut. */
UnitShape unit_shape(const KernelRow& row, const Problem& problem);

// Rows of each ISA, in isa/*.cpp.
namespace scalar {
KernelRows rows();
}
#if defined(__x86_64__)
namespace avx2 {
KernelRows rows();
}
namespace avx512 {
KernelRows rows();
}
namespace avx512_bf16 {
KernelRows rows(bool prefetch_into_l1);
}
namespace amx_bf16 {
KernelRows rows();
}
#elif defined(__AARCH64EL__)
namespace neon {
KernelRows rows();
}
#endif

}  // namespace attnfold::cpu
