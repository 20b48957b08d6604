// attnfold_append: rows of new tokens into the slots of a pool.
//
// Every share walks all slots in order and writes those that fall to it, so that of two tokens with
// one slot the later is written last, whoever writes.  Rows move once; slots are read by each
// share.
#include "cache/cache.h"
#include "cache/pool.h"
#include "core/cache.h"

namespace attnfold::cache {
namespace {

constexpr int64_t kSlotBytes = sizeof(int64_t);

using Convert = void (*)(const void* from, void* to, int64_t n);

template <DType kTo>
Convert converter_to(DType from) {
  switch (from) {
    case DType::f32: return convert_elements<DType::f32, kTo>;
    case DType::f16: return convert_elements<DType::f16, kTo>;
    default: return convert_elements<DType::bf16, kTo>;
  }
}

Convert converter(DType from, DType to) {
  switch (to) {
    case DType::f32: return converter_to<DType::f32>(from);
    case DType::f16: return converter_to<DType::f16>(from);
    default: return converter_to<DType::bf16>(from);
  }
}

struct Append {
  Pool pool;
  int64_t num_tokens;
  Rows<const char> k, v;
  DType dtype;
  const int64_t* slots;
  Convert convert;
  int32_t num_shares;
};

Status resolve_rows(const char* name, const void* data, int64_t stride_token, int64_t stride_head,
                    const Rows<char>& pool_rows, const Append& a, Rows<const char>* out) {
  const int32_t width = pool_rows.width;
  *out = {{static_cast<const char*>(data), 0,
           stride_token ? stride_token : static_cast<int64_t>(a.pool.kv_heads) * width,
           stride_head ? stride_head : width},
          width,
          {name}};
  if (a.num_tokens == 0 || width == 0) return {};
  const int bytes = dtype_bytes(a.dtype);
  ATTNFOLD_RETURN_IF_ERROR(check_array(name, data, static_cast<size_t>(bytes)));
  return extent_of(name, data, {1, a.num_tokens, a.pool.kv_heads},
                   {0, out->view.stride_token, out->view.stride_head}, width, bytes, &out->extent);
}

Status check_slots(const Append& a) {
  if (a.num_tokens == 0) return {};
  ATTNFOLD_RETURN_IF_ERROR(check_array("rows.slots", a.slots, sizeof(int64_t)));
  const int64_t num_slots = a.pool.num_pages * a.pool.page_size;
  for (int64_t i = 0; i < a.num_tokens; ++i) {
    if (a.slots[i] >= ATTNFOLD_NO_SLOT && a.slots[i] < num_slots) continue;
    return invalid(indexed("rows.slots", i),
                   num_slots > 0
                       ? "a slot, 0.." + std::to_string(num_slots - 1) + ", or -1 to skip the token"
                       : "-1 (the pool has no page)",
                   a.slots[i]);
  }
  return {};
}

/** The heads of one token into one slot. */
void write_token(const Append& a, const Rows<const char>& from, const Rows<char>& to, int64_t token,
                 SlotPlace place) {
  const int in_bytes = dtype_bytes(a.dtype), out_bytes = dtype_bytes(a.pool.dtype);
  const char* source = from.view.data + token * from.view.stride_token * in_bytes;
  char* target =
      to.view.data +
      (place.page * to.view.stride_page + place.offset * to.view.stride_token) * out_bytes;
  if (from.view.stride_head == to.width && to.view.stride_head == to.width) {
    a.convert(source, target, static_cast<int64_t>(a.pool.kv_heads) * to.width);
    return;
  }
  for (int32_t h = 0; h < a.pool.kv_heads; ++h) {
    a.convert(source + h * from.view.stride_head * in_bytes,
              target + h * to.view.stride_head * out_bytes, to.width);
  }
}

void write_share(void* context, int32_t share) {
  const Append& a = *static_cast<const Append*>(context);
  for (int64_t i = 0; i < a.num_tokens; ++i) {
    const int64_t slot = a.slots[i];
    if (slot < 0) continue;
    if (share_of_slot(slot, static_cast<uint32_t>(a.num_shares)) != static_cast<uint32_t>(share))
      continue;
    const SlotPlace place = place_of_slot(slot, a.pool.page_size);
    write_token(a, a.k, a.pool.k, i, place);
    if (a.pool.v.width > 0) write_token(a, a.v, a.pool.v, i, place);
  }
}

}  // namespace

Status append(const attnfold_kv_pool* pool, const attnfold_kv_rows* rows,
              const attnfold_execution* execution) {
  Append a{};
  ATTNFOLD_RETURN_IF_ERROR(resolve_pool({"pool", "pool.k", "pool.v"}, pool, &a.pool));
  if (is_8_bit(a.pool.dtype)) {
    return invalid("pool.kv_dtype", "f32, f16 or bf16 (rows of 8 bits need scales)",
                   dtype_name(a.pool.dtype));
  }
  const attnfold_kv_rows defaults = ATTNFOLD_KV_ROWS_INIT;
  attnfold_kv_rows r;
  ATTNFOLD_RETURN_IF_ERROR(read_struct("rows", rows, defaults, &r));
  ATTNFOLD_RETURN_IF_ERROR(check_range({"rows", "num_tokens"}, r.num_tokens, 0, INT32_MAX));
  ATTNFOLD_RETURN_IF_ERROR(check_range({"rows", "dtype"}, r.dtype, 0, ATTNFOLD_BF16));
  a.num_tokens = r.num_tokens;
  a.dtype = static_cast<DType>(r.dtype);
  a.slots = r.slots;
  ATTNFOLD_RETURN_IF_ERROR(check_slots(a));
  ATTNFOLD_RETURN_IF_ERROR(
      resolve_rows("rows.k", r.k, r.k_stride_token, r.k_stride_head, a.pool.k, a, &a.k));
  ATTNFOLD_RETURN_IF_ERROR(
      resolve_rows("rows.v", r.v, r.v_stride_token, r.v_stride_head, a.pool.v, a, &a.v));
  const Extent read[] = {a.k.extent, a.v.extent,
                         extent_of_array("rows.slots", r.slots, r.num_tokens * kSlotBytes)};
  for (const Extent& input : read) {
    ATTNFOLD_RETURN_IF_ERROR(check_apart(a.pool.k.extent, input));
    ATTNFOLD_RETURN_IF_ERROR(check_apart(a.pool.v.extent, input));
  }
  a.convert = converter(a.dtype, a.pool.dtype);
  cpu::Threads threads;
  const int64_t token_bytes = a.pool.page_bytes() / a.pool.page_size;
  ATTNFOLD_RETURN_IF_ERROR(
      threads_for(execution, token_bytes * a.num_tokens, &threads, &a.num_shares));
  if (a.num_tokens > 0) cpu::run_parallel(threads, a.num_shares, write_share, &a);
  return {};
}

}  // namespace attnfold::cache
