// Calls the functions of src/core and the planner from a kernel, and from host code that nvcc compiled.
#include "core/cache.h"
#include "core/dtype.h"
#include "core/fold.h"
#include "core/mask.h"
#include "core/merge.h"
#include "core/problem.h"
#include "plan/build_schedule.h"

namespace attnfold {
namespace {

/** A little of everything; the numbers mean nothing. */
ATTNFOLD_HD inline float use_core(const Lengths& lengths, const Mask& mask, const void* data, DType dtype, int32_t i) {
  const VisibleKeys keys = visible_keys(mask, request_shape(lengths, 0), i);
  const int32_t page = pages_of(lengths, 0)[keys.begin / dtype_bytes(dtype)];
  const float a = load_f32(data, dtype, page), b = f16_to_f32(f32_to_f16(a)) + bf16_to_f32(f32_to_bf16(a));
  const FoldStep step = fold_step(a, b);
  const float l = fold_value(step, 1.0f, 2.0f);
  const MergeSide side{a, l};
  const float max = merge_max(b, side);
  return lse_of(a, l) / divisor_of(l) + exp2_f32(-a) + merge_lse(max, merge_weight(max, side));
}

/** The planner, as a device would run it: on one thread. */
__global__ void plan_kernel(UnitShape shape, Mask mask, BlockMask blocks, Lengths lengths, int32_t num_workers, Schedule* schedule) {
  const ScheduleCapacity capacity = schedule_capacity(shape, lengths.batch, 64, 4096, num_workers, 1);
  build_schedule(shape, mask, blocks, lengths, PrefixSource{}, num_workers, 0, capacity.state_floats, schedule);
}

/** New rows into a pool, a token for each thread. */
__global__ void append_kernel(const int64_t* slots, const void* rows, void* pool, int32_t page_size, const int32_t* pages) {
  const int32_t i = static_cast<int32_t>(threadIdx.x);
  const int64_t slot = slots ? slots[i] : slot_of_position(pages, i, page_size);
  const SlotPlace place = place_of_slot(slot, page_size);
  if (share_of_slot(slot, 4) != 0 || kernel_page(pages[0], 2, i) < 0) return;
  convert_elements<DType::f32, DType::bf16>(static_cast<const float*>(rows) + i * 8,
                                            static_cast<uint16_t*>(pool) + (place.page * page_size + place.offset) * 8, 8);
  quantise_elements<DType::f32, DType::e4m3>(rows, pool, 8, scale_of_row<DType::f32>(rows, 8, DType::e4m3));
}

__global__ void use_core_kernel(Lengths lengths, Mask mask, const void* data, DType dtype, void* out) {
  const int32_t i = static_cast<int32_t>(threadIdx.x);
  store_f32(out, dtype, i, use_core(lengths, mask, data, dtype, i));
}

}  // namespace

float use_core_on_host(const Lengths& lengths, const Mask& mask, const void* data, DType dtype, void* out) {
  use_core_kernel<<<1, 32>>>(lengths, mask, data, dtype, out);
  append_kernel<<<1, 32>>>(nullptr, data, out, 16, lengths.block_table);
  plan_kernel<<<1, 1>>>(UnitShape{}, mask, BlockMask{}, Lengths{}, 1, nullptr);
  return use_core(lengths, mask, data, dtype, 0);
}

}  // namespace attnfold
