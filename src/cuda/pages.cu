// attnfold_copy_pages and attnfold_slot_mapping_on on the device.
#include <algorithm>
#include <cstdint>

#include "attnfold/cache.h"
#include "core/cache.h"
#include "cuda/backend.h"
#include "cuda/device.h"
#include "cuda/ptx.h"

namespace attnfold::cuda {
namespace {

constexpr int kThreads = 128;

// ------------------------------------------------------------------------------------------------
// Pages: a thread has one place of a page, and carries it through all pairs in their order.  So
// pairs may chain, as on the CPU.  A few pairs are on their way at once: what a pair reads of those
// just before it is taken from registers.

constexpr int kPairs = 8;

struct CopyArgs {
  CopyWork work;
  int32_t unit_bytes;
  int64_t units_end[4];  // of a page: of k, v and scales, each counted on from the one before it
};

/** Where a thread's unit is in a page of each pool. */
struct UnitPlace {
  const char* from;
  char* to;
  int64_t from_page_bytes, to_page_bytes;
};

__device__ __forceinline__ UnitPlace place_of_unit(const CopyArgs& a, int64_t unit) {
  const CopyWork& w = a.work;
  int part = 0;
  while (unit >= a.units_end[part]) ++part;
  if (part > 0) unit -= a.units_end[part - 1];
  const int bytes = w.element_bytes[part];
  const int64_t row_units = int64_t{w.width[part]} * bytes / a.unit_bytes;
  const int64_t row = unit / row_units, byte = (unit - row * row_units) * a.unit_bytes;
  const int64_t token = row / w.kv_heads, head = row - token * w.kv_heads;
  const auto at = [&](const View<char>& v) {
    return v.data + (token * v.stride_token + head * v.stride_head) * bytes + byte;
  };
  return {at(w.from[part]), at(w.to[part]), w.from[part].stride_page * bytes,
          w.to[part].stride_page * bytes};
}

template <class Unit>
__global__ void __launch_bounds__(kThreads) copy_pairs(const __grid_constant__ CopyArgs a) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const CopyWork& w = a.work;
  const int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (unit >= a.units_end[3]) return;
  const UnitPlace place = place_of_unit(a, unit);
  for (int64_t begin = 0; begin < w.num_pairs; begin += kPairs) {
    int32_t from[kPairs], to[kPairs];
    Unit value[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      from[i] = to[i] = -1;
      if (begin + i >= w.num_pairs) continue;
      const int32_t source = w.pairs[2 * (begin + i)], target = w.pairs[2 * (begin + i) + 1];
      const bool exists =
          source >= 0 && source < w.from_pages && target >= 0 && target < w.to_pages;
      if (!exists || (w.within && source == target)) continue;
      from[i] = source;
      to[i] = target;
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (to[i] >= 0)
        value[i] = *reinterpret_cast<const Unit*>(place.from + from[i] * place.from_page_bytes);
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int j = 0; j < i; ++j) {
        if (w.within && to[j] >= 0 && to[j] == from[i]) value[i] = value[j];
      }
      if (to[i] >= 0) *reinterpret_cast<Unit*>(place.to + to[i] * place.to_page_bytes) = value[i];
    }
  }
}

/** The most bytes, up to 16, in which every row of both pools can be moved. */
int32_t unit_bytes_of(const CopyWork& w) {
  uint64_t bits = 16;
  for (int i = 0; i < 4; ++i) {
    if (w.width[i] == 0) continue;
    const int64_t bytes = w.element_bytes[i];
    bits |= static_cast<uint64_t>(w.width[i] * bytes);
    for (const View<char>* v : {&w.from[i], &w.to[i]}) {
      bits |= reinterpret_cast<uintptr_t>(v->data);
      for (const int64_t stride : {v->stride_page, v->stride_token, v->stride_head})
        bits |= static_cast<uint64_t>(stride * bytes);
    }
  }
  return static_cast<int32_t>(bits & -bits);
}

// ------------------------------------------------------------------------------------------------
// Slots: a thread for each.

__global__ void __launch_bounds__(kThreads) find_slots(const __grid_constant__ SlotWork w) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= w.num_slots) return;
  const Lengths& l = w.lengths;
  const int32_t row = static_cast<int32_t>(i);
  w.slots[i] = ATTNFOLD_NO_SLOT;
  if (l.batch == 0 || row >= l.qo_indptr[l.batch]) return;
  int32_t low = 0, high = l.batch;  // the request with qo_indptr[low] <= row < qo_indptr[low + 1]
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    (l.qo_indptr[middle] <= row ? low : high) = middle;
  }
  const int64_t position = position_of_token(w, low, row);
  if (position < 0 || (l.kv_len && position >= l.kv_len[low])) return;
  const int64_t page_index = position / w.page_size;
  if (page_index >= num_pages_of(l, low)) return;
  const int32_t page = pages_of(l, low)[page_index];
  if (page >= 0 && page < w.num_pages)
    w.slots[i] = slot_of_position(pages_of(l, low), position, w.page_size);
}

}  // namespace

Status copy_pages(const CopyWork& work, const attnfold_execution& execution) {
  int device;
  ATTNFOLD_RETURN_IF_ERROR(choose_device(execution, &device));
  if (work.num_pairs == 0 || work.from_pages == 0 || work.to_pages == 0) return {};
  const CurrentDevice current(device);
  CopyArgs a{work, unit_bytes_of(work), {}};
  int64_t units = 0;
  for (int i = 0; i < 4; ++i) {
    units += int64_t{work.page_size} * work.kv_heads * work.width[i] * work.element_bytes[i] /
             a.unit_bytes;
    a.units_end[i] = units;
  }
  const void* const kernel =
      a.unit_bytes == 16  ? reinterpret_cast<const void*>(copy_pairs<uint4>)
      : a.unit_bytes == 8 ? reinterpret_cast<const void*>(copy_pairs<uint2>)
      : a.unit_bytes == 4 ? reinterpret_cast<const void*>(copy_pairs<uint32_t>)
      : a.unit_bytes == 2 ? reinterpret_cast<const void*>(copy_pairs<uint16_t>)
                          : reinterpret_cast<const void*>(copy_pairs<uint8_t>);
  const int64_t blocks = (units + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX)
    return {ATTNFOLD_UNSUPPORTED, "page_size: expected pages of at most 2^38 units on CUDA, got " +
                                      std::to_string(work.page_size)};
  return launch_overlapped(kernel, static_cast<unsigned>(blocks), kThreads, 0, execution.stream,
                           &a);
}

Status map_slots(const SlotWork& work, const attnfold_execution& execution) {
  int device;
  ATTNFOLD_RETURN_IF_ERROR(choose_device(execution, &device));
  if (work.num_slots == 0) return {};
  const CurrentDevice current(device);
  return launch_overlapped(reinterpret_cast<const void*>(find_slots),
                           static_cast<unsigned>((work.num_slots + kThreads - 1) / kThreads),
                           kThreads, 0, execution.stream, &work);
}

}  // namespace attnfold::cuda
