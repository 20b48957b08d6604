// Checks of the tensors of one run: present, aligned, strided without overlap, apart from each
// other.
#include <algorithm>
#include <cfloat>
#include <cstdint>

#include "plan/validate.h"

namespace attnfold {
namespace {

constexpr uintptr_t kAlignment = 16;

#if defined(__x86_64__)
constexpr __int128 kAddressEnd = static_cast<__int128>(1) << 47;  // of a process's addresses
#else
constexpr __int128 kAddressEnd = static_cast<__int128>(1) << 52;
#endif

/** Element offsets that n steps of `stride` span, below and above 0. */
struct Reach {
  __int128 low = 0, high = 0;
  void add(int64_t n, int64_t stride) {
    const __int128 far = static_cast<__int128>(n - 1) * stride;
    (far < 0 ? low : high) += far;
  }
};

Status check_pointer(const char* name, const void* p, uintptr_t alignment) {
  if (!p) return invalid(name, "a pointer", "NULL");
  if (reinterpret_cast<uintptr_t>(p) % alignment != 0) {
    return invalid(
        name, "an address that is a multiple of " + std::to_string(alignment),
        "one that is " + std::to_string(reinterpret_cast<uintptr_t>(p) % alignment) + " past it");
  }
  return {};
}

Status check_apart(const Extent& output, const Extent& other) {
  if (!overlap(output, other)) return {};
  return invalid(output.name, std::string("memory apart from ") + other.name,
                 "memory that overlaps it");
}

Status check_per_head(const char* name, const float* values, int64_t heads, Extent* extent) {
  *extent = {name};
  if (!values) return {};
  ATTNFOLD_RETURN_IF_ERROR(check_pointer(name, values, sizeof(float)));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(values);
  *extent = {name, begin, begin + static_cast<uintptr_t>(heads) * sizeof(float)};
  return {};
}

/** Of two numbers >= 0; INT64_MAX, which no extent has room for, where it does not fit. */
int64_t product(int64_t a, int64_t b) {
  int64_t c;
  return __builtin_mul_overflow(a, b, &c) ? INT64_MAX : c;
}

int64_t or_default(int64_t stride, int64_t packed) { return stride != 0 ? stride : packed; }

struct KvStrides {
  int64_t page, token, head;
};

/** Default strides of k or v in the problem's layout. */
KvStrides packed_kv(const attnfold_problem& p, const TensorExtents& e, int64_t width) {
  const int64_t token = p.kv_heads * width, head = product(e.kv_tokens, width);
  const int64_t page = product(e.kv_tokens, token);
  if (p.kv_layout == ATTNFOLD_HND) return {page, width, head};
  return {page, token, width};
}

Status check_kv(const char* name, const attnfold_problem& p, const TensorExtents& e,
                const void* data, const KvStrides& given, int64_t width, View<const char>* view,
                Extent* extent) {
  const KvStrides packed = packed_kv(p, e, width);
  *view = {static_cast<const char*>(data), or_default(given.page, packed.page),
           or_default(given.token, packed.token), or_default(given.head, packed.head)};
  *extent = {name};
  if (!e.reads_kv) return {};
  ATTNFOLD_RETURN_IF_ERROR(check_pointer(name, data, kAlignment));
  const int64_t n[3] = {e.num_pages, e.kv_tokens, p.kv_heads};
  const int64_t stride[3] = {view->stride_page, view->stride_token, view->stride_head};
  return extent_of(name, data, n, stride, width, dtype_bytes(static_cast<DType>(p.kv_dtype)),
                   extent);
}

/** The scales of k or v: default strides as those of rows of one float. */
Status check_scale(const char* name, const attnfold_problem& p, const TensorExtents& e,
                   attnfold_scale_kind kind, const float* data, const KvStrides& given,
                   View<const char>* view, Extent* extent) {
  *extent = {name};
  *view = {};
  if (kind == ATTNFOLD_SCALE_NONE) {
    if (!data) return {};
    return invalid(name, std::string("NULL (") + name + "_kind is 0)", "a pointer");
  }
  if (!e.reads_kv) return {};
  ATTNFOLD_RETURN_IF_ERROR(check_pointer(name, data, sizeof(float)));
  const bool per_token = kind == ATTNFOLD_SCALE_PER_TOKEN;
  const KvStrides packed = per_token ? packed_kv(p, e, 1) : KvStrides{0, 0, 1};
  *view = {reinterpret_cast<const char*>(data), per_token ? or_default(given.page, packed.page) : 0,
           per_token ? or_default(given.token, packed.token) : 0,
           kind == ATTNFOLD_SCALE_PER_TENSOR ? 0 : or_default(given.head, packed.head)};
  const int64_t n[3] = {e.num_pages, e.kv_tokens, p.kv_heads};
  const int64_t stride[3] = {view->stride_page, view->stride_token, view->stride_head};
  return extent_of(name, data, n, stride, 1, sizeof(float), extent);
}

Status check_o_scale(const attnfold_problem& p, const float* o_scale, Extent* extent) {
  *extent = {"o_scale"};
  if (p.o_dtype != ATTNFOLD_E4M3) {
    if (!o_scale) return {};
    return invalid(
        "o_scale",
        std::string("NULL (o_dtype is ") + dtype_name(static_cast<DType>(p.o_dtype)) + ")",
        "a pointer");
  }
  ATTNFOLD_RETURN_IF_ERROR(check_pointer("o_scale", o_scale, sizeof(float)));
  if (!(*o_scale > 0.0f) || *o_scale > FLT_MAX) {
    return invalid("o_scale", "a finite number > 0", *o_scale);
  }
  const uintptr_t begin = reinterpret_cast<uintptr_t>(o_scale);
  *extent = {"o_scale", begin, begin + sizeof(float)};
  return {};
}

}  // namespace

Status extent_of(const char* name, const void* p, const int64_t (&n)[3], const int64_t (&stride)[3],
                 int64_t width, int bytes, Extent* out) {
  Reach reach;
  for (int i = 0; i < 3; ++i) reach.add(n[i], stride[i]);
  const __int128 base = static_cast<__int128>(reinterpret_cast<uintptr_t>(p));
  const __int128 low = base + reach.low * bytes, high = base + (reach.high + width) * bytes;
  if (low < 0 || high > kAddressEnd) {
    return invalid(name, "strides that stay within the address space", "strides that leave it");
  }
  *out = {name, static_cast<uintptr_t>(low), static_cast<uintptr_t>(high)};
  return {};
}

bool overlap(const Extent& a, const Extent& b) { return a.begin < b.end && b.begin < a.end; }

Extent workspace_extent(const void* workspace, size_t bytes) {
  if (!workspace || bytes == 0) return {"workspace"};
  const uintptr_t begin = reinterpret_cast<uintptr_t>(workspace);
  return {"workspace", begin, begin + bytes};
}

Status check_output_strides(const char* name, int64_t rows, int64_t row_stride, int64_t heads,
                            int64_t head_stride, int64_t width) {
  const auto magnitude = [](__int128 stride) { return stride < 0 ? -stride : stride; };
  const __int128 r = magnitude(row_stride), h = magnitude(head_stride);
  const bool row_outer = (heads == 1 || h >= width) && (rows == 1 || r >= (heads - 1) * h + width);
  const bool head_outer = (rows == 1 || r >= width) && (heads == 1 || h >= (rows - 1) * r + width);
  if (!row_outer && !head_outer) {
    return invalid(
        std::string(name) + "_stride_row",
        "strides whose rows and heads of " + std::to_string(width) + " elements do not overlap",
        "row " + std::to_string(row_stride) + ", head " + std::to_string(head_stride));
  }
  return {};
}

Status validate_tensors(const attnfold_problem& p, const TensorExtents& e,
                        const attnfold_tensors* given, Tensors* out) {
  const attnfold_tensors defaults = ATTNFOLD_TENSORS_INIT;
  attnfold_tensors t;
  ATTNFOLD_RETURN_IF_ERROR(read_struct("tensors", given, defaults, &t));
  *out = {};
  if (e.qo_rows == 0) return {};
  const int64_t rows = e.qo_rows, heads = p.qo_heads;
  Extent q, k, v, o, lse;
  ATTNFOLD_RETURN_IF_ERROR(check_pointer("q", t.q, kAlignment));
  out->q = {static_cast<const char*>(t.q), 0, or_default(t.q_stride_row, heads * p.head_dim_qk),
            or_default(t.q_stride_head, p.head_dim_qk)};
  ATTNFOLD_RETURN_IF_ERROR(extent_of("q", t.q, {1, rows, heads},
                                     {0, out->q.stride_token, out->q.stride_head}, p.head_dim_qk,
                                     dtype_bytes(static_cast<DType>(p.q_dtype)), &q));
  ATTNFOLD_RETURN_IF_ERROR(check_kv("k", p, e, t.k,
                                    {t.k_stride_page, t.k_stride_token, t.k_stride_head},
                                    p.head_dim_qk, &out->k, &k));
  if (p.v_in_k) {
    if (t.v) return invalid("v", "NULL (v_in_k is 1)", "a pointer");
    out->v = out->k;
    v = {"v"};
  } else {
    ATTNFOLD_RETURN_IF_ERROR(check_kv("v", p, e, t.v,
                                      {t.v_stride_page, t.v_stride_token, t.v_stride_head},
                                      p.head_dim_vo, &out->v, &v));
  }
  Extent k_scale, v_scale, o_scale;
  ATTNFOLD_RETURN_IF_ERROR(
      check_scale("k_scale", p, e, p.k_scale_kind, t.k_scale,
                  {t.k_scale_stride_page, t.k_scale_stride_token, t.k_scale_stride_head},
                  &out->k_scale, &k_scale));
  ATTNFOLD_RETURN_IF_ERROR(
      check_scale("v_scale", p, e, p.v_scale_kind, t.v_scale,
                  {t.v_scale_stride_page, t.v_scale_stride_token, t.v_scale_stride_head},
                  &out->v_scale, &v_scale));
  ATTNFOLD_RETURN_IF_ERROR(check_o_scale(p, t.o_scale, &o_scale));
  if (p.o_dtype == ATTNFOLD_E4M3) out->o_scale = t.o_scale;

  ATTNFOLD_RETURN_IF_ERROR(check_pointer("o", t.o, kAlignment));
  out->o = {static_cast<char*>(t.o), 0, or_default(t.o_stride_row, heads * p.head_dim_vo),
            or_default(t.o_stride_head, p.head_dim_vo)};
  ATTNFOLD_RETURN_IF_ERROR(check_output_strides("o", rows, out->o.stride_token, heads,
                                                out->o.stride_head, p.head_dim_vo));
  ATTNFOLD_RETURN_IF_ERROR(extent_of("o", t.o, {1, rows, heads},
                                     {0, out->o.stride_token, out->o.stride_head}, p.head_dim_vo,
                                     dtype_bytes(static_cast<DType>(p.o_dtype)), &o));
  if (!e.sizes_known) {
    for (Extent* extent : {&q, &k, &v, &o}) extent->end = extent->begin + 1;
  }
  Extent slopes, sinks;
  ATTNFOLD_RETURN_IF_ERROR(check_per_head("alibi_slopes", t.alibi_slopes, heads, &slopes));
  ATTNFOLD_RETURN_IF_ERROR(check_per_head("sink_logits", t.sink_logits, heads, &sinks));
  for (const Extent* input : {&q, &k, &v, &slopes, &sinks, &k_scale, &v_scale, &o_scale}) {
    ATTNFOLD_RETURN_IF_ERROR(check_apart(o, *input));
    ATTNFOLD_RETURN_IF_ERROR(check_apart(e.workspace, *input));
  }
  ATTNFOLD_RETURN_IF_ERROR(check_apart(e.workspace, o));
  out->alibi_slopes = t.alibi_slopes;
  out->sink_logits = t.sink_logits;
  if (!t.lse) return {};
  ATTNFOLD_RETURN_IF_ERROR(check_pointer("lse", t.lse, sizeof(float)));
  out->lse = t.lse;
  out->lse_stride_row = or_default(t.lse_stride_row, heads);
  out->lse_stride_head = or_default(t.lse_stride_head, 1);
  ATTNFOLD_RETURN_IF_ERROR(
      check_output_strides("lse", rows, out->lse_stride_row, heads, out->lse_stride_head, 1));
  ATTNFOLD_RETURN_IF_ERROR(extent_of("lse", t.lse, {1, rows, heads},
                                     {0, out->lse_stride_row, out->lse_stride_head}, 1,
                                     sizeof(float), &lse));
  if (!e.sizes_known) lse.end = lse.begin + 1;
  for (const Extent* other : {&q, &k, &v, &o, &slopes, &sinks, &k_scale, &v_scale, &o_scale})
    ATTNFOLD_RETURN_IF_ERROR(check_apart(lse, *other));
  return check_apart(e.workspace, lse);
}

}  // namespace attnfold
