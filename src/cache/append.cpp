// attnfold_append: rows of new tokens into the slots of a pool.
//
// Every share walks all slots in order and writes those that fall to it, so that of two tokens with
// one slot the later is written last, whoever writes.  Rows move once; slots are read by each
// share.
#include <cmath>
#include <cstring>

#include "cache/cache.h"
#include "cache/pool.h"
#include "core/cache.h"
#include "cuda/backend.h"

namespace attnfold::cache {
namespace {

constexpr int64_t kSlotBytes = sizeof(int64_t);

using Convert = void (*)(const void* from, void* to, int64_t n);
using Quantise = void (*)(const void* from, void* to, int64_t n, float scale);
using ScaleOfRow = float (*)(const void* row, int64_t n, DType to);

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

template <DType kTo>
Quantise quantiser_to(DType from) {
  switch (from) {
    case DType::f32: return quantise_elements<DType::f32, kTo>;
    case DType::f16: return quantise_elements<DType::f16, kTo>;
    default: return quantise_elements<DType::bf16, kTo>;
  }
}

Quantise quantiser(DType from, DType to) {
  switch (to) {
    case DType::e4m3: return quantiser_to<DType::e4m3>(from);
    case DType::e5m2: return quantiser_to<DType::e5m2>(from);
    default: return quantiser_to<DType::i8>(from);
  }
}

ScaleOfRow row_scaler(DType from) {
  switch (from) {
    case DType::f32: return scale_of_row<DType::f32>;
    case DType::f16: return scale_of_row<DType::f16>;
    default: return scale_of_row<DType::bf16>;
  }
}

struct Append {
  Pool pool;
  int64_t num_tokens;
  Rows<const char> rows[2];  // k, v
  DType dtype;
  const int64_t* slots;
  Convert convert;  // into a pool of 16 or 32 bits
  Quantise quantise;
  ScaleOfRow scale_of_row;
  int32_t num_shares;
};

Status resolve_rows(const char* name, const void* data, int64_t stride_token, int64_t stride_head,
                    const Rows<char>& pool_rows, const Append& a, Rows<const char>* out) {
  const int32_t width = pool_rows.width;
  *out = {{static_cast<const char*>(data), 0,
           stride_token ? stride_token : static_cast<int64_t>(a.pool.kv_heads) * width,
           stride_head ? stride_head : width},
          width,
          dtype_bytes(a.dtype),
          {name}};
  if (a.num_tokens == 0 || width == 0) return {};
  const int bytes = out->bytes;
  ATTNFOLD_RETURN_IF_ERROR(check_array(name, data, static_cast<size_t>(bytes)));
  return extent_of(name, data, {1, a.num_tokens, a.pool.kv_heads},
                   {0, out->view.stride_token, out->view.stride_head}, width, bytes, &out->extent);
}

/** Their memory alone, if it is a device's. */
Status check_slots(const Append& a, bool on_device) {
  if (a.num_tokens == 0) return {};
  ATTNFOLD_RETURN_IF_ERROR(check_array("rows.slots", a.slots, sizeof(int64_t)));
  if (on_device) return {};
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

/** Scales of the caller's: numbers that one can divide by. */
Status check_given_scales(const char* name, const Append& a, const GivenScales& scales) {
  if (!scales.data) return {};
  for (int32_t h = 0; h < (scales.stride_head ? a.pool.kv_heads : 1); ++h) {
    const float scale = scales.data[h * scales.stride_head];
    if (std::isfinite(scale) && scale != 0.0f) continue;
    return invalid(indexed(name, h), "a finite number other than 0", scale);
  }
  return {};
}

/** Into int8 with a scale of the caller's nothing could tell that there was a NaN. */
Status check_no_nan(const char* name, const Append& a, const Rows<const char>& rows) {
  for (int64_t i = 0; i < a.num_tokens; ++i) {
    if (a.slots[i] < 0) continue;
    for (int32_t h = 0; h < a.pool.kv_heads; ++h) {
      const char* row =
          rows.view.data + (i * rows.view.stride_token + h * rows.view.stride_head) * rows.bytes;
      for (int32_t e = 0; e < rows.width; ++e) {
        if (!std::isnan(load_f32(row, a.dtype, e))) continue;
        return invalid(indexed(name, i) + "[" + std::to_string(h) + "][" + std::to_string(e) + "]",
                       "a number (int8 has no NaN)", "NaN");
      }
    }
  }
  return {};
}

Status check_scales(const Append& a, bool on_device) {
  static constexpr const char* kKinds[] = {"k_scale_kind", "v_scale_kind"};
  static constexpr const char* kScales[] = {"pool.k_scale", "pool.v_scale"};
  static constexpr const char* kRows[] = {"rows.k", "rows.v"};
  if (!is_8_bit(a.pool.dtype) || a.num_tokens == 0 || a.pool.num_pages == 0) return {};
  for (int t = 0; t < 2; ++t) {
    if (a.pool.part[kK + t].width == 0) continue;
    const GivenScales& given = a.pool.given[t];
    if (a.pool.part[kKScale + t].width > 0) continue;
    if (!given.data) {
      return invalid(Name{"pool", kKinds[t]}.text(),
                     std::string("1..3 (kv_dtype is ") + dtype_name(a.pool.dtype) + ")", 0);
    }
    if (on_device) continue;
    ATTNFOLD_RETURN_IF_ERROR(check_given_scales(kScales[t], a, given));
    if (a.pool.dtype == DType::i8) ATTNFOLD_RETURN_IF_ERROR(check_no_nan(kRows[t], a, a.rows[t]));
  }
  return {};
}

/** Where a slot's row of head 0 begins. */
char* slot_row(const Rows<char>& to, SlotPlace place) {
  return to.view.data +
         (place.page * to.view.stride_page + place.offset * to.view.stride_token) * to.bytes;
}

/** The heads of one token of k (t = 0) or v into one slot. */
void write_token(const Append& a, int t, int64_t token, SlotPlace place) {
  const Rows<const char>& from = a.rows[t];
  const Rows<char>& to = a.pool.part[kK + t];
  const char* source = from.view.data + token * from.view.stride_token * from.bytes;
  char* target = slot_row(to, place);
  if (from.view.stride_head == to.width && to.view.stride_head == to.width) {
    a.convert(source, target, static_cast<int64_t>(a.pool.kv_heads) * to.width);
    return;
  }
  for (int32_t h = 0; h < a.pool.kv_heads; ++h) {
    a.convert(source + h * from.view.stride_head * from.bytes,
              target + h * to.view.stride_head * to.bytes, to.width);
  }
}

/** The same into a pool of 8 bits, with its scales. */
void quantise_token(const Append& a, int t, int64_t token, SlotPlace place) {
  const Rows<const char>& from = a.rows[t];
  const Rows<char>&to = a.pool.part[kK + t], &scales = a.pool.part[kKScale + t];
  const char* source = from.view.data + token * from.view.stride_token * from.bytes;
  char* target = slot_row(to, place);
  for (int32_t h = 0; h < a.pool.kv_heads; ++h) {
    const char* row = source + h * from.view.stride_head * from.bytes;
    float scale;
    if (scales.width > 0) {
      scale = a.scale_of_row(row, to.width, a.pool.dtype);
      std::memcpy(slot_row(scales, place) + h * scales.view.stride_head * scales.bytes, &scale,
                  sizeof(scale));
    } else {
      scale = a.pool.given[t].data[h * a.pool.given[t].stride_head];
    }
    a.quantise(row, target + h * to.view.stride_head * to.bytes, to.width, scale);
  }
}

void write_share(void* context, int32_t share) {
  const Append& a = *static_cast<const Append*>(context);
  const auto write = is_8_bit(a.pool.dtype) ? quantise_token : write_token;
  for (int64_t i = 0; i < a.num_tokens; ++i) {
    const int64_t slot = a.slots[i];
    if (slot < 0) continue;
    if (share_of_slot(slot, static_cast<uint32_t>(a.num_shares)) != static_cast<uint32_t>(share))
      continue;
    const SlotPlace place = place_of_slot(slot, a.pool.page_size);
    write(a, 0, i, place);
    if (a.pool.v().width > 0) write(a, 1, i, place);
  }
}

/** What a device needs to know. */
AppendWork device_work(const Append& a) {
  AppendWork w{};
  w.num_parts = a.pool.v().width > 0 ? 2 : 1;
  for (int t = 0; t < w.num_parts; ++t) {
    w.part[t] = {a.rows[t].view,
                 a.pool.part[kK + t].view,
                 a.pool.part[kK + t].width,
                 a.pool.part[kKScale + t].view,
                 a.pool.given[t].data,
                 a.pool.given[t].stride_head};
  }
  w.from = a.dtype;
  w.to = a.pool.dtype;
  w.kv_heads = a.pool.kv_heads;
  w.page_size = a.pool.page_size;
  w.num_slots = a.pool.num_pages * a.pool.page_size;
  w.num_tokens = a.num_tokens;
  w.slots = a.slots;
  return w;
}

}  // namespace

Status append(const attnfold_kv_pool* pool, const attnfold_kv_rows* rows,
              const attnfold_execution* execution) {
  Append a{};
  attnfold_execution e;
  ATTNFOLD_RETURN_IF_ERROR(validate_execution(execution, &e));
  const bool on_device = e.backend == ATTNFOLD_CUDA;
  ATTNFOLD_RETURN_IF_ERROR(
      resolve_pool({"pool", {"pool.k", "pool.v", "pool.k_scale", "pool.v_scale"}}, pool, &a.pool));
  const attnfold_kv_rows defaults = ATTNFOLD_KV_ROWS_INIT;
  attnfold_kv_rows r;
  ATTNFOLD_RETURN_IF_ERROR(read_struct("rows", rows, defaults, &r));
  ATTNFOLD_RETURN_IF_ERROR(check_range({"rows", "num_tokens"}, r.num_tokens, 0, INT32_MAX));
  ATTNFOLD_RETURN_IF_ERROR(check_range({"rows", "dtype"}, r.dtype, 0, ATTNFOLD_BF16));
  a.num_tokens = r.num_tokens;
  a.dtype = static_cast<DType>(r.dtype);
  a.slots = r.slots;
  ATTNFOLD_RETURN_IF_ERROR(check_slots(a, on_device));
  ATTNFOLD_RETURN_IF_ERROR(
      resolve_rows("rows.k", r.k, r.k_stride_token, r.k_stride_head, a.pool.k(), a, &a.rows[0]));
  ATTNFOLD_RETURN_IF_ERROR(
      resolve_rows("rows.v", r.v, r.v_stride_token, r.v_stride_head, a.pool.v(), a, &a.rows[1]));
  const Extent read[] = {a.rows[0].extent, a.rows[1].extent,
                         extent_of_array("rows.slots", r.slots, r.num_tokens * kSlotBytes)};
  for (const Rows<char>& part : a.pool.part) {
    if (part.width == 0) continue;
    for (const Extent& input : read) ATTNFOLD_RETURN_IF_ERROR(check_apart(part.extent, input));
  }
  ATTNFOLD_RETURN_IF_ERROR(check_scales(a, on_device));
  if (on_device) return cuda::append(device_work(a), e);
  a.convert = converter(a.dtype, a.pool.dtype);
  a.quantise = quantiser(a.dtype, a.pool.dtype);
  a.scale_of_row = row_scaler(a.dtype);
  const int64_t token_bytes = a.pool.page_bytes() / a.pool.page_size;
  const cpu::Threads threads = threads_for(e, token_bytes * a.num_tokens, &a.num_shares);
  if (a.num_tokens > 0) cpu::run_parallel(threads, {{a.num_shares, write_share, &a}});
  return {};
}

}  // namespace attnfold::cache
