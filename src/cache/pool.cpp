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

Axes axes_of(const Pool& pool, const Rows<char>& r) {
  Axes axes;
  axes.add(pool.num_pages, r.view.stride_page, r.bytes);
  axes.add(pool.page_size, r.view.stride_token, r.bytes);
  axes.add(pool.kv_heads, r.view.stride_head, r.bytes);
  return axes;
}

/** First byte of a page relative to the view's data, and bytes from there. */
struct Span {
  __int128 begin, bytes;
};

Span page_span(const Pool& pool, const Rows<char>& r) {
  Span s{0, static_cast<__int128>(r.width) * r.bytes};
  for (const auto& [n, stride] : {std::pair<int64_t, int64_t>{pool.page_size, r.view.stride_token},
                                  {pool.kv_heads, r.view.stride_head}}) {
    const __int128 far = static_cast<__int128>(n - 1) * stride * r.bytes;
    if (far < 0) s.begin += far;
    s.bytes += magnitude(far);
  }
  return s;
}

/** Whether two parts, whose extents overlap, are known to share no byte. */
bool are_interleaved(const Pool& pool, const Rows<char>& a, const Rows<char>& b) {
  const auto same = [&](int64_t x, int64_t y) {
    return static_cast<__int128>(x) * a.bytes == static_cast<__int128>(y) * b.bytes;
  };
  if (!same(a.view.stride_page, b.view.stride_page)) return false;
  const __int128 delta = static_cast<__int128>(reinterpret_cast<intptr_t>(b.view.data)) -
                         reinterpret_cast<intptr_t>(a.view.data);
  if (same(a.view.stride_token, b.view.stride_token) &&
      same(a.view.stride_head, b.view.stride_head)) {
    return !share_bytes(axes_of(pool, a).all(), delta, a.width * a.bytes, b.width * b.bytes);
  }
  // Pages of one stride, each with its own order inside: then a page counts as one row.
  const Span in_a = page_span(pool, a), in_b = page_span(pool, b);
  Axes pages;
  pages.add(pool.num_pages, a.view.stride_page, a.bytes);
  return pages.are_nested(std::max(in_a.bytes, in_b.bytes)) &&
         !share_bytes(pages.all(), delta + in_b.begin - in_a.begin, in_a.bytes, in_b.bytes);
}

struct GivenRows {
  void* data;
  int64_t stride[3];
  int32_t width;
  int bytes;
};

Status resolve_rows(const char* name, const attnfold_kv_pool& p, const Pool& pool,
                    const GivenRows& given, Rows<char>* out) {
  const bool by_head = p.kv_layout == ATTNFOLD_HND;
  const int32_t width = given.width;
  const __int128 page = static_cast<__int128>(pool.page_size) * pool.kv_heads * width;
  const int64_t packed[3] = {page > INT64_MAX ? INT64_MAX : static_cast<int64_t>(page),
                             by_head ? width : static_cast<int64_t>(pool.kv_heads) * width,
                             by_head ? static_cast<int64_t>(pool.page_size) * width : width};
  int64_t stride[3];
  for (int i = 0; i < 3; ++i) stride[i] = given.stride[i] ? given.stride[i] : packed[i];
  *out = {{static_cast<char*>(given.data), stride[0], stride[1], stride[2]},
          width,
          given.bytes,
          {name}};
  if (pool.num_pages == 0) return {};
  ATTNFOLD_RETURN_IF_ERROR(check_array(name, given.data, static_cast<size_t>(given.bytes)));
  ATTNFOLD_RETURN_IF_ERROR(extent_of(name, given.data,
                                     {pool.num_pages, pool.page_size, pool.kv_heads}, stride, width,
                                     given.bytes, &out->extent));
  if (axes_of(pool, *out).are_nested(width * given.bytes)) return {};
  return invalid(name,
                 "strides whose rows of " + std::to_string(width) + " elements do not overlap",
                 "page " + std::to_string(stride[0]) + ", token " + std::to_string(stride[1]) +
                     ", head " + std::to_string(stride[2]));
}

/** Scales per token are rows of one float; others are the caller's. */
Status resolve_scales(const PoolNames& names, Part part, attnfold_scale_kind kind,
                      const attnfold_kv_pool& p, const GivenRows& given, Pool* out) {
  const bool is_k = part == kKScale;
  const Name kind_name{names.pool, is_k ? "k_scale_kind" : "v_scale_kind"};
  if (!is_8_bit(out->dtype) && kind != ATTNFOLD_SCALE_NONE)
    return invalid(kind_name.text(), std::string("0 (kv_dtype is ") + dtype_name(out->dtype) + ")",
                   int{kind});
  ATTNFOLD_RETURN_IF_ERROR(check_range(kind_name, kind, 0, ATTNFOLD_SCALE_PER_TOKEN));
  if (kind == ATTNFOLD_SCALE_NONE || out->num_pages == 0) return {};
  if (kind == ATTNFOLD_SCALE_PER_TOKEN)
    return resolve_rows(names.part[part], p, *out, given, &out->part[part]);
  ATTNFOLD_RETURN_IF_ERROR(check_array(names.part[part], given.data, sizeof(float)));
  GivenScales& scales = out->given[is_k ? 0 : 1];
  scales.data = static_cast<const float*>(given.data);
  if (kind == ATTNFOLD_SCALE_PER_HEAD) scales.stride_head = given.stride[2] ? given.stride[2] : 1;
  return extent_of(names.part[part], given.data, {1, 1, out->kv_heads}, {0, 0, scales.stride_head},
                   1, sizeof(float), &out->part[part].extent);
}

/** Everything that is written is apart from everything else of the pool. */
Status check_parts_apart(const PoolNames& names, const Pool& pool) {
  for (int b = 1; b < kNumParts; ++b) {
    for (int a = 0; a < b; ++a) {
      const Rows<char>&first = pool.part[a], &second = pool.part[b];
      if (!overlap(first.extent, second.extent)) continue;
      if (first.width == 0 && second.width == 0) continue;  // scales that are read alone
      if (first.width > 0 && second.width > 0 && are_interleaved(pool, first, second)) continue;
      return invalid(
          names.part[b],
          std::string("memory apart from ") + names.part[a] + ", or pages between its own",
          "memory that overlaps it");
    }
  }
  return {};
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
  *out = {static_cast<DType>(p.kv_dtype),  p.kv_heads, p.page_size, p.num_pages, {}, {},
          {p.k_scale_kind, p.v_scale_kind}};
  const int bytes = dtype_bytes(out->dtype);
  ATTNFOLD_RETURN_IF_ERROR(resolve_rows(
      names.part[kK], p, *out,
      {p.k, {p.k_stride_page, p.k_stride_token, p.k_stride_head}, p.head_dim_qk, bytes},
      &out->part[kK]));
  if (p.v) {
    ATTNFOLD_RETURN_IF_ERROR(resolve_rows(
        names.part[kV], p, *out,
        {p.v, {p.v_stride_page, p.v_stride_token, p.v_stride_head}, p.head_dim_vo, bytes},
        &out->part[kV]));
  }
  ATTNFOLD_RETURN_IF_ERROR(resolve_scales(
      names, kKScale, p.k_scale_kind, p,
      {p.k_scale, {p.k_scale_stride_page, p.k_scale_stride_token, p.k_scale_stride_head}, 1, 4},
      out));
  if (p.v) {
    ATTNFOLD_RETURN_IF_ERROR(resolve_scales(
        names, kVScale, p.v_scale_kind, p,
        {p.v_scale, {p.v_scale_stride_page, p.v_scale_stride_token, p.v_scale_stride_head}, 1, 4},
        out));
  }
  return check_parts_apart(names, *out);
}

cpu::Threads threads_for(const attnfold_execution& execution, int64_t bytes, int32_t* num_shares) {
  const cpu::Threads threads = cpu::threads_of(execution);
  const int64_t shares = bytes / kBytesPerShare;
  *num_shares = static_cast<int32_t>(
      std::clamp<int64_t>(shares, 1, std::max<int32_t>(threads.num_threads, 1)));
  return threads;
}

}  // namespace attnfold::cache
