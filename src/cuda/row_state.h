// The canonical fold on the device, and how a finished row is written.
#pragma once

#include "core/fold.h"
#include "cuda/attend.h"
#include "cuda/ptx.h"

namespace attnfold::cuda {

constexpr float kEmpty = -__builtin_inff();  // m of a state without keys

__device__ __forceinline__ bool sees(const VisibleKeys& keys, int32_t key) {
  return key < keys.sink || (key >= keys.begin && key < keys.end);
}

/** Two values, of keys `key` and the next: those outside `keys` replaced by 0. */
__device__ __forceinline__ uint32_t seen_pair(uint32_t pair, int32_t key, const VisibleKeys& keys) {
  return (sees(keys, key) ? pair & 0xffffu : 0u) | (sees(keys, key + 1) ? pair & 0xffff0000u : 0u);
}

/** fold_step with the device's own exp2. */
__device__ __forceinline__ FoldStep fold_step_fast(float m_a, float m_b) {
  const bool b_leads = m_b > m_a;
  return {b_leads, exp2_fast(b_leads ? m_a - m_b : m_b - m_a)};
}

/** Folds a learned sink logit into m and l; returns the factor for o. */
__device__ __forceinline__ float fold_sink(float logit, float* m, float* l) {
  const float m_sink = sink_log2(logit);
  const FoldStep step = fold_step_fast(*m, m_sink);
  *l = fold_value(step, *l, 1.0f);
  if (!step.b_leads) return 1.0f;
  *m = m_sink;
  return step.scale;
}

/** A finished row: what its accumulated o is multiplied by, and its lse, which few lanes need. */
struct RowEnd {
  float factor;
  float m, l, sink;  // with the sink logit in m and l, unless the row is empty

  __device__ __forceinline__ float lse() const {
    return m == kEmpty || is_all_sink(sink) ? sink : lse_of(m, l);
  }
};

__device__ __forceinline__ RowEnd finish_row(const AttendArgs& a, int32_t head, float m, float l) {
  const float* sinks = a.tensors.sink_logits;
  const float sink = sinks ? sinks[head] : kEmpty;
  if (m == kEmpty) return {0.0f, kEmpty, 0.0f, sink};
  const float scale = sink != kEmpty ? fold_sink(sink, &m, &l) : 1.0f;
  return {scale * (1.0f / divisor_of(l)), m, l, sink};
}

__device__ __forceinline__ void write_lse(const AttendArgs& a, const RowPlace& at,
                                          const RowEnd& end) {
  if (!a.tensors.lse) return;
  a.tensors.lse[at.token * a.tensors.lse_stride_row + at.head * a.tensors.lse_stride_head] =
      end.lse();
}

/** Element offset of a row in o. */
__device__ __forceinline__ int64_t o_offset(const AttendArgs& a, const RowPlace& at) {
  return at.token * a.tensors.o.stride_token + at.head * a.tensors.o.stride_head;
}

/** Two neighbouring elements of o, the first at an even offset. */
template <class T>
__device__ __forceinline__ void write_pair(const AttendArgs& a, int64_t offset, float x, float y) {
  if (a.problem.o_dtype == DType::f32) {
    *reinterpret_cast<float2*>(a.tensors.o.data + offset * 4) = make_float2(x, y);
  } else {
    *reinterpret_cast<uint32_t*>(a.tensors.o.data + offset * 2) = pack<T>(x, y);
  }
}

}  // namespace attnfold::cuda
