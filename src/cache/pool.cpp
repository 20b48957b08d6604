#include "cache/pool.h"

#include <algorithm>
#include <span>
#include <utility>

namespace attnfold::cache {
namespace {

constexpr int64_t kBytesPerShare = 64 << 10;  // less is not worth waking a thread for

/** An axis of a tensor: steps and stride, in bytes. */
struct Axis {
  int64_t n;
  __int128 stride;
};

__int128 magnitude(__int128 x) { return x < 0 ? -x : x; }

/** The axes with more than one step, outermost first. */
struct Axes {
  Axis axis[3];
  int count = 0;

  std::span<const Axis> all() const { return {axis, static_cast<size_t>(count)}; }
  void add(int64_t n, int64_t stride, int bytes) {
    if (n > 1) axis[count++] = {n, magnitude(static_cast<__int128>(stride) * bytes)};
    for (int i = count - 1; i > 0 && axis[i].stride > axis[i - 1].stride; --i)
      std::swap(axis[i], axis[i - 1]);
  }
  /** Bytes from the first to the last of axes [i, count), with rows of `width`. */
  __int128 reach(int i, __int128 width) const {
    for (int j = count - 1; j >= i; --j) width += (axis[j].n - 1) * axis[j].stride;
    return width;
  }
  /** Whether each axis steps over all that lies inside it: then no two rows overlap. */
  bool are_nested(__int128 width) const {
    for (int i = 0; i < count; ++i) {
      if (axis[i].stride < reach(i + 1, width)) return false;
    }
    return true;
  }
};

/**
 * Whether rows of [0, width_a) and [delta, delta + width_b), stepped along the same nested axes,
 * share a byte.
 */
bool share_bytes(std::span<const Axis> axes, __int128 delta, __int128 width_a, __int128 width_b) {
  if (axes.empty()) return delta < width_a && -delta < width_b;
  const auto& [n, stride] = axes.front();
  const __int128 nearest = delta / stride;  // what lies inside is shorter than a step
  for (__int128 step = nearest - 1; step <= nearest + 1; ++step) {
    if (magnitude(step) < n &&
        share_bytes(axes.subspan(1), delta - step * stride, width_a, width_b))
      return true;
  }
  return false;
}

Axes axes_of(const Pool& pool, const View<char>& view, int bytes) {
  Axes axes;
  axes.add(pool.num_pages, view.stride_page, bytes);
  axes.add(pool.page_size, view.stride_token, bytes);
  axes.add(pool.kv_heads, view.stride_head, bytes);
  return axes;
}

/** First byte of a page relative to the view's data, and bytes from there. */
struct Span {
  __int128 begin, bytes;
};

Span page_span(const Pool& pool, const Rows<char>& t, int bytes) {
  Span s{0, static_cast<__int128>(t.width) * bytes};
  for (const auto& [n, stride] : {std::pair<int64_t, int64_t>{pool.page_size, t.view.stride_token},
                                  {pool.kv_heads, t.view.stride_head}}) {
    const __int128 far = static_cast<__int128>(n - 1) * stride * bytes;
    if (far < 0) s.begin += far;
    s.bytes += magnitude(far);
  }
  return s;
}

/** Whether k and v, whose extents overlap, are known to share no element. */
bool are_interleaved(const Pool& pool, int bytes) {
  const View<char>&k = pool.k.view, &v = pool.v.view;
  if (k.stride_page != v.stride_page) return false;
  const __int128 delta = static_cast<__int128>(reinterpret_cast<intptr_t>(v.data)) -
                         reinterpret_cast<intptr_t>(k.data);
  if (k.stride_token == v.stride_token && k.stride_head == v.stride_head) {
    return !share_bytes(axes_of(pool, k, bytes).all(), delta, pool.k.width * bytes,
                        pool.v.width * bytes);
  }
  // Pages of one stride, each with its own order inside: then a page counts as one row.
  const Span a = page_span(pool, pool.k, bytes), b = page_span(pool, pool.v, bytes);
  Axes pages;
  pages.add(pool.num_pages, k.stride_page, bytes);
  return pages.are_nested(std::max(a.bytes, b.bytes)) &&
         !share_bytes(pages.all(), delta + b.begin - a.begin, a.bytes, b.bytes);
}

Status resolve_rows(const char* name, const attnfold_kv_pool& p, const Pool& pool, void* data,
                    const int64_t (&given)[3], int32_t width, Rows<char>* out) {
  const bool by_head = p.kv_layout == ATTNFOLD_HND;
  const __int128 page = static_cast<__int128>(pool.page_size) * pool.kv_heads * width;
  const int64_t packed[3] = {page > INT64_MAX ? INT64_MAX : static_cast<int64_t>(page),
                             by_head ? width : static_cast<int64_t>(pool.kv_heads) * width,
                             by_head ? static_cast<int64_t>(pool.page_size) * width : width};
  int64_t stride[3];
  for (int i = 0; i < 3; ++i) stride[i] = given[i] ? given[i] : packed[i];
  *out = {{static_cast<char*>(data), stride[0], stride[1], stride[2]}, width, {name}};
  if (pool.num_pages == 0) return {};
  const int bytes = dtype_bytes(pool.dtype);
  ATTNFOLD_RETURN_IF_ERROR(check_array(name, data, static_cast<size_t>(bytes)));
  ATTNFOLD_RETURN_IF_ERROR(extent_of(name, data, {pool.num_pages, pool.page_size, pool.kv_heads},
                                     stride, width, bytes, &out->extent));
  if (axes_of(pool, out->view, bytes).are_nested(width * bytes)) return {};
  return invalid(name,
                 "strides whose rows of " + std::to_string(width) + " elements do not overlap",
                 "page " + std::to_string(stride[0]) + ", token " + std::to_string(stride[1]) +
                     ", head " + std::to_string(stride[2]));
}

Status check_head_dim(Name name, int32_t value) {
  if (value >= 8 && value <= ATTNFOLD_MAX_HEAD_DIM && value % 8 == 0) return {};
  return invalid(name.text(), "a multiple of 8, 8.." + std::to_string(ATTNFOLD_MAX_HEAD_DIM),
                 value);
}

}  // namespace

Status check_range(Name name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return {};
  return invalid(name.text(), std::to_string(low) + ".." + std::to_string(high), value);
}

Status check_array(const char* name, const void* p, size_t alignment) {
  if (!p) return invalid(name, "a pointer", "NULL");
  const size_t past = reinterpret_cast<uintptr_t>(p) % alignment;
  if (past == 0) return {};
  return invalid(name, "an address that is a multiple of " + std::to_string(alignment),
                 "one that is " + std::to_string(past) + " past it");
}

Status check_apart(const Extent& written, const Extent& other) {
  if (!overlap(written, other)) return {};
  return invalid(written.name, std::string("memory apart from ") + other.name,
                 "memory that overlaps it");
}

Extent extent_of_array(const char* name, const void* p, int64_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(p);
  return {name, begin, p && bytes > 0 ? begin + static_cast<uintptr_t>(bytes) : begin};
}

Status resolve_pool(const PoolNames& names, const attnfold_kv_pool* given, Pool* out) {
  const attnfold_kv_pool defaults = ATTNFOLD_KV_POOL_INIT;
  attnfold_kv_pool p;
  ATTNFOLD_RETURN_IF_ERROR(read_struct(names.pool, given, defaults, &p));
  ATTNFOLD_RETURN_IF_ERROR(check_range({names.pool, "kv_dtype"}, p.kv_dtype, 0, kNumDTypes - 1));
  ATTNFOLD_RETURN_IF_ERROR(check_range({names.pool, "kv_layout"}, p.kv_layout, 0, ATTNFOLD_HND));
  ATTNFOLD_RETURN_IF_ERROR(check_range({names.pool, "kv_heads"}, p.kv_heads, 1, 1 << 16));
  ATTNFOLD_RETURN_IF_ERROR(check_head_dim({names.pool, "head_dim_qk"}, p.head_dim_qk));
  if (p.v) ATTNFOLD_RETURN_IF_ERROR(check_head_dim({names.pool, "head_dim_vo"}, p.head_dim_vo));
  ATTNFOLD_RETURN_IF_ERROR(check_range({names.pool, "page_size"}, p.page_size, 1, INT32_MAX));
  ATTNFOLD_RETURN_IF_ERROR(
      check_range({names.pool, "num_pages"}, p.num_pages, 0, INT64_MAX / p.page_size));
  *out = {static_cast<DType>(p.kv_dtype), p.kv_heads, p.page_size, p.num_pages, {}, {}};
  ATTNFOLD_RETURN_IF_ERROR(resolve_rows(names.k, p, *out, p.k,
                                        {p.k_stride_page, p.k_stride_token, p.k_stride_head},
                                        p.head_dim_qk, &out->k));
  if (!p.v) return {};
  ATTNFOLD_RETURN_IF_ERROR(resolve_rows(names.v, p, *out, p.v,
                                        {p.v_stride_page, p.v_stride_token, p.v_stride_head},
                                        p.head_dim_vo, &out->v));
  if (!overlap(out->k.extent, out->v.extent) || are_interleaved(*out, dtype_bytes(out->dtype)))
    return {};
  return invalid(names.v,
                 std::string("memory apart from ") + names.k + ", or pages between its own",
                 "memory that overlaps it");
}

Status threads_for(const attnfold_execution* execution, int64_t bytes, cpu::Threads* threads,
                   int32_t* num_shares) {
  attnfold_execution e;
  ATTNFOLD_RETURN_IF_ERROR(validate_execution(execution, &e));
  *threads = cpu::threads_of(e);
  const int64_t shares = bytes / kBytesPerShare;
  *num_shares = static_cast<int32_t>(
      std::clamp<int64_t>(shares, 1, std::max<int32_t>(threads->num_threads, 1)));
  return {};
}

}  // namespace attnfold::cache
