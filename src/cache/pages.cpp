// attnfold_copy_pages: whole pages, within a pool or from one to another.
//
// Every share carries out all pairs in order, each for its own part of a page.  So pairs may chain,
// and the bytes do not depend on the number of shares.
#include <algorithm>
#include <cstring>

#include "cache/cache.h"
#include "cache/pool.h"
#include "core/cache.h"
#include "cuda/backend.h"

namespace attnfold::cache {
namespace {

struct CopyPages {
  Pool from, to;
  const int32_t* pairs;  // [num_pairs, 2]
  int64_t num_pairs;
  int32_t num_shares;
};

bool same_memory(const View<char>& a, const View<char>& b) {
  return a.data == b.data && a.stride_page == b.stride_page && a.stride_token == b.stride_token &&
         a.stride_head == b.stride_head;
}

Status check_equal(const char* field, int64_t from, int64_t to) {
  if (from == to) return {};
  return invalid(Name{"to", field}.text(), "that of from, " + std::to_string(from), to);
}

/** The same pool, or memory apart; and what a page is, in both. */
Status check_pools(const Pool& from, const Pool& to) {
  ATTNFOLD_RETURN_IF_ERROR(
      check_equal("kv_dtype", static_cast<int64_t>(from.dtype), static_cast<int64_t>(to.dtype)));
  ATTNFOLD_RETURN_IF_ERROR(check_equal("kv_heads", from.kv_heads, to.kv_heads));
  ATTNFOLD_RETURN_IF_ERROR(check_equal("page_size", from.page_size, to.page_size));
  ATTNFOLD_RETURN_IF_ERROR(check_equal("head_dim_qk", from.k().width, to.k().width));
  if ((from.v().width == 0) != (to.v().width == 0)) {
    return invalid("to.v", from.v().width ? "a pointer (from has v)" : "NULL (from has no v)",
                   to.v().width ? "a pointer" : "NULL");
  }
  ATTNFOLD_RETURN_IF_ERROR(check_equal("head_dim_vo", from.v().width, to.v().width));
  bool is_same = true;
  for (int i = 0; i < kNumParts; ++i)
    is_same = is_same && same_memory(from.part[i].view, to.part[i].view);
  if (is_same) return {};
  for (const Rows<char>& written : to.part) {
    if (written.width == 0) continue;
    for (const Rows<char>& read : from.part) {
      if (read.width == 0 || !overlap(written.extent, read.extent)) continue;
      return invalid(
          written.extent.name,
          std::string("memory apart from ") + read.extent.name + ", or the pool from itself",
          "memory that overlaps it");
    }
  }
  return {};
}

/** Scales per token move with their pages; others are the pools' own, but of one kind: what lies in
 * a page is of no use where scales mean something else. */
Status check_scale_kinds(const Pool& from, const Pool& to) {
  static constexpr const char* kKinds[] = {"k_scale_kind", "v_scale_kind"};
  const int num_tensors = from.v().width > 0 ? 2 : 1;
  for (int t = 0; t < num_tensors; ++t)
    ATTNFOLD_RETURN_IF_ERROR(check_equal(kKinds[t], from.scale_kind[t], to.scale_kind[t]));
  return {};
}

/** Their memory alone, if it is a device's. */
Status check_pairs(const CopyPages& c, bool on_device) {
  if (c.num_pairs == 0) return {};
  ATTNFOLD_RETURN_IF_ERROR(check_array("pairs", c.pairs, sizeof(int32_t)));
  if (on_device) return {};
  for (int64_t i = 0; i < 2 * c.num_pairs; ++i) {
    const int64_t num_pages = i % 2 == 0 ? c.from.num_pages : c.to.num_pages;
    if (c.pairs[i] >= 0 && c.pairs[i] < num_pages) continue;
    const char* pool = i % 2 == 0 ? "from" : "to";
    return invalid(indexed("pairs", i / 2) + "[" + std::to_string(i % 2) + "]",
                   num_pages > 0
                       ? std::string("a page of ") + pool + ", 0.." + std::to_string(num_pages - 1)
                       : std::string("no page (") + pool + ".num_pages is 0)",
                   c.pairs[i]);
  }
  return {};
}

/** Whether a page lies in memory without gaps, in the same order in both. */
bool are_dense(const Pool& pool, const View<char>& a, const View<char>& b, int32_t width) {
  if (a.stride_token != b.stride_token || a.stride_head != b.stride_head) return false;
  const bool by_token =
      a.stride_head == width && a.stride_token == static_cast<int64_t>(pool.kv_heads) * width;
  const bool by_head =
      a.stride_token == width && a.stride_head == static_cast<int64_t>(pool.page_size) * width;
  return by_token || by_head;
}

/** Elements [begin, end) of a page, counted along its rows. */
void copy_part(const CopyPages& c, const Rows<char>& from, const Rows<char>& to, int32_t source,
               int32_t target, int64_t begin, int64_t end) {
  const int bytes = from.bytes;
  const char* const in = from.view.data + source * from.view.stride_page * bytes;
  char* const out = to.view.data + target * to.view.stride_page * bytes;
  if (are_dense(c.from, from.view, to.view, from.width)) {
    std::memcpy(out + begin * bytes, in + begin * bytes,
                static_cast<size_t>((end - begin) * bytes));
    return;
  }
  while (begin < end) {
    const int64_t row = begin / from.width, element = begin - row * from.width;
    const int64_t n = std::min<int64_t>(end - begin, from.width - element);
    const int64_t token = row / c.from.kv_heads, head = row - token * c.from.kv_heads;
    const auto at = [&](const View<char>& v) {
      return (token * v.stride_token + head * v.stride_head + element) * bytes;
    };
    std::memcpy(out + at(to.view), in + at(from.view), static_cast<size_t>(n * bytes));
    begin += n;
  }
}

void copy_share(void* context, int32_t share) {
  const CopyPages& c = *static_cast<const CopyPages*>(context);
  const bool within = c.from.k().view.data == c.to.k().view.data;
  const int64_t rows = static_cast<int64_t>(c.from.page_size) * c.from.kv_heads;
  for (int64_t i = 0; i < c.num_pairs; ++i) {
    const int32_t source = c.pairs[2 * i], target = c.pairs[2 * i + 1];
    if (within && source == target) continue;
    for (int part = 0; part < kNumParts; ++part) {
      const int64_t n = rows * c.from.part[part].width;
      const int64_t lines = (n + 31) / 32;  // of 32 elements; heads of 8 leave the last short
      const int64_t begin = lines * share / c.num_shares * 32;
      const int64_t end = std::min(lines * (share + 1) / c.num_shares * 32, n);
      if (begin < end) copy_part(c, c.from.part[part], c.to.part[part], source, target, begin, end);
    }
  }
}

/** What a device needs to know. */
CopyWork device_work(const CopyPages& c) {
  CopyWork w{};
  for (int i = 0; i < kNumParts; ++i) {
    w.from[i] = c.from.part[i].view;
    w.to[i] = c.to.part[i].view;
    w.width[i] = c.from.part[i].width;
    w.element_bytes[i] = c.from.part[i].bytes;
  }
  w.kv_heads = c.from.kv_heads;
  w.page_size = c.from.page_size;
  w.from_pages = c.from.num_pages;
  w.to_pages = c.to.num_pages;
  w.within = c.from.k().view.data == c.to.k().view.data;
  w.pairs = c.pairs;
  w.num_pairs = c.num_pairs;
  return w;
}

}  // namespace

Status copy_pages(const attnfold_kv_pool* from, const attnfold_kv_pool* to, const int32_t* pairs,
                  int64_t num_pairs, const attnfold_execution* execution) {
  CopyPages c{};
  attnfold_execution e;
  ATTNFOLD_RETURN_IF_ERROR(validate_execution(execution, &e));
  const bool on_device = e.backend == ATTNFOLD_CUDA;
  ATTNFOLD_RETURN_IF_ERROR(
      resolve_pool({"from", {"from.k", "from.v", "from.k_scale", "from.v_scale"}}, from, &c.from));
  ATTNFOLD_RETURN_IF_ERROR(
      resolve_pool({"to", {"to.k", "to.v", "to.k_scale", "to.v_scale"}}, to, &c.to));
  ATTNFOLD_RETURN_IF_ERROR(check_scale_kinds(c.from, c.to));
  ATTNFOLD_RETURN_IF_ERROR(check_pools(c.from, c.to));
  if (num_pairs < 0 || num_pairs > INT32_MAX)
    return invalid("num_pairs", "0.." + std::to_string(INT32_MAX), num_pairs);
  c.pairs = pairs;
  c.num_pairs = num_pairs;
  ATTNFOLD_RETURN_IF_ERROR(check_pairs(c, on_device));
  const Extent read = extent_of_array("pairs", pairs, num_pairs * 2 * int64_t{sizeof(int32_t)});
  for (const Rows<char>& written : c.to.part) {
    if (written.width > 0) ATTNFOLD_RETURN_IF_ERROR(check_apart(written.extent, read));
  }
  if (on_device) return cuda::copy_pages(device_work(c), e);
  const __int128 bytes = static_cast<__int128>(c.from.page_bytes()) * num_pairs;
  const cpu::Threads threads =
      threads_for(e, static_cast<int64_t>(std::min<__int128>(bytes, INT64_MAX)), &c.num_shares);
  if (num_pairs > 0) cpu::run_parallel(threads, {{c.num_shares, copy_share, &c}});
  return {};
}

}  // namespace attnfold::cache
