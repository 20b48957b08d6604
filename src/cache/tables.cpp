// attnfold_slot_mapping and attnfold_map_to_kernel_pages: integer work on page tables.
#include <algorithm>

#include "cache/cache.h"
#include "cache/pool.h"
#include "core/cache.h"
#include "core/problem.h"
#include "cuda/backend.h"

namespace attnfold::cache {
namespace {

constexpr int32_t kMaxBatch = 1 << 24;  // as attnfold_problem.max_batch

Status check_row_offsets(const int32_t* qo_indptr, int32_t batch, int64_t num_slots) {
  ATTNFOLD_RETURN_IF_ERROR(check_array("qo_indptr", qo_indptr, sizeof(int32_t)));
  if (qo_indptr[0] != 0) return invalid(indexed("qo_indptr", 0), "0", qo_indptr[0]);
  for (int32_t r = 0; r < batch; ++r) {
    if (qo_indptr[r + 1] >= qo_indptr[r]) continue;
    return invalid(
        indexed("qo_indptr", r + 1),
        "at least " + indexed("qo_indptr", r) + " (" + std::to_string(qo_indptr[r]) + ")",
        qo_indptr[r + 1]);
  }
  if (qo_indptr[batch] <= num_slots) return {};
  return invalid(
      "num_slots",
      "at least " + indexed("qo_indptr", batch) + " (" + std::to_string(qo_indptr[batch]) + ")",
      num_slots);
}

Status check_tables(const attnfold_lengths& l, bool on_device) {
  if (l.block_table && l.kv_indices)
    return invalid("kv_indices", "NULL (block_table is given)", "a pointer");
  if (l.block_table) {
    ATTNFOLD_RETURN_IF_ERROR(check_array("block_table", l.block_table, sizeof(int32_t)));
    if (l.block_table_stride >= 0 && l.block_table_stride <= INT32_MAX) return {};
    return invalid("block_table_stride", "0.." + std::to_string(INT32_MAX), l.block_table_stride);
  }
  if (!l.kv_indices) return invalid("block_table", "a table, or kv_indptr with kv_indices", "NULL");
  ATTNFOLD_RETURN_IF_ERROR(check_array("kv_indices", l.kv_indices, sizeof(int32_t)));
  ATTNFOLD_RETURN_IF_ERROR(check_array("kv_indptr", l.kv_indptr, sizeof(int32_t)));
  if (on_device) return {};
  if (l.kv_indptr[0] < 0) return invalid(indexed("kv_indptr", 0), "0 or more", l.kv_indptr[0]);
  for (int32_t r = 0; r < l.batch; ++r) {
    if (l.kv_indptr[r + 1] >= l.kv_indptr[r]) continue;
    return invalid(
        indexed("kv_indptr", r + 1),
        "at least " + indexed("kv_indptr", r) + " (" + std::to_string(l.kv_indptr[r]) + ")",
        l.kv_indptr[r + 1]);
  }
  return {};
}

/** A token that stands past the request's pages, or past its kv_len. */
Status position_error(const SlotWork& m, int32_t r, int32_t row, int64_t position) {
  const int64_t have = num_pages_of(m.lengths, r);
  const std::string pages =
      " (" + std::to_string(have) + " pages x page_size " + std::to_string(m.page_size) + ")";
  if (!m.positions) {
    return invalid(indexed("kv_len", r), "0.." + std::to_string(have * m.page_size) + pages,
                   m.lengths.kv_len[r]);
  }
  if (m.lengths.kv_len && position >= m.lengths.kv_len[r]) {
    return invalid(indexed("positions", row),
                   "below " + indexed("kv_len", r) + " (" + std::to_string(m.lengths.kv_len[r]) +
                       "), or -1 for padding",
                   position);
  }
  return invalid(indexed("positions", row),
                 "-1 (padding) or more, and below " + std::to_string(have * m.page_size) + pages,
                 position);
}

Status page_error(const SlotWork& m, int32_t r, int64_t i, int32_t id) {
  const std::string name = m.lengths.block_table
                               ? indexed("block_table", r) + "[" + std::to_string(i) + "]"
                               : indexed("kv_indices", m.lengths.kv_indptr[r] + i);
  return invalid(name,
                 m.num_pages > 0 ? "a page id, 0.." + std::to_string(m.num_pages - 1)
                                 : "no page (num_pages is 0)",
                 id);
}

/** Whether some token is not padding. */
bool places_tokens(const SlotWork& m) {
  const Lengths& l = m.lengths;
  for (int32_t r = 0; r < l.batch; ++r) {
    for (int32_t row = l.qo_indptr[r]; row < l.qo_indptr[r + 1]; ++row) {
      if (position_of_token(m, r, row) != -1) return true;
    }
  }
  return false;
}

/** The positions of request r, and the pages that hold them. */
Status check_request(const SlotWork& m, int32_t r) {
  const Lengths& l = m.lengths;
  const int32_t first = l.qo_indptr[r], last = l.qo_indptr[r + 1];
  if (!m.positions && l.kv_len[r] != 0 && l.kv_len[r] < last - first) {
    return invalid(indexed("kv_len", r),
                   "at least qo_len (" + std::to_string(last - first) +
                       "), whose keys it counts, or 0 for padding",
                   l.kv_len[r]);
  }
  const int64_t capacity = num_pages_of(l, r) * m.page_size;
  const int64_t limit = l.kv_len ? std::min<int64_t>(l.kv_len[r], capacity) : capacity;
  for (int32_t row = first; row < last; ++row) {
    const int64_t position = position_of_token(m, r, row);
    if (position == -1) continue;
    if (position < -1 || position >= limit) return position_error(m, r, row, position);
    const int64_t i = position / m.page_size;
    const int32_t id = pages_of(l, r)[i];
    if (id < 0 || id >= m.num_pages) return page_error(m, r, i, id);
  }
  return {};
}

Status check_kv_len(const attnfold_lengths& l, bool is_needed) {
  if (!l.kv_len && !is_needed) return {};
  ATTNFOLD_RETURN_IF_ERROR(check_array("kv_len", l.kv_len, sizeof(int32_t)));
  for (int32_t r = 0; r < l.batch; ++r) {
    if (l.kv_len[r] < 0) return invalid(indexed("kv_len", r), "0 or more", l.kv_len[r]);
  }
  return {};
}

Status check_slots_apart(const attnfold_lengths& l, const int64_t* positions, int64_t num_slots,
                         const int64_t* slots) {
  const int64_t n = l.batch, tokens = l.qo_indptr[l.batch], word = sizeof(int32_t);
  const Extent written = extent_of_array("slots", slots, num_slots * int64_t{sizeof(int64_t)});
  const Extent inputs[] = {
      extent_of_array("qo_indptr", l.qo_indptr, (n + 1) * word),
      extent_of_array("kv_len", l.kv_len, n * word),
      extent_of_array("positions", positions, tokens * int64_t{sizeof(int64_t)}),
      extent_of_array("block_table", l.block_table,
                      n * std::clamp<int64_t>(l.block_table_stride, 0, INT32_MAX) * word),
      extent_of_array("kv_indptr", l.kv_indptr, l.kv_indptr ? (n + 1) * word : 0),
      extent_of_array("kv_indices", l.kv_indices,
                      l.kv_indices && l.kv_indptr ? l.kv_indptr[n] * word : 0)};
  for (const Extent& input : inputs) ATTNFOLD_RETURN_IF_ERROR(check_apart(written, input));
  return {};
}

/** What the host can see of arrays on a device. */
Status check_device_arrays(const attnfold_lengths& l, const int64_t* positions) {
  if (l.batch == 0) return {};
  ATTNFOLD_RETURN_IF_ERROR(check_array("qo_indptr", l.qo_indptr, sizeof(int32_t)));
  if (positions) ATTNFOLD_RETURN_IF_ERROR(check_array("positions", positions, sizeof(int64_t)));
  if (l.kv_len || !positions)
    ATTNFOLD_RETURN_IF_ERROR(check_array("kv_len", l.kv_len, sizeof(int32_t)));
  return check_tables(l, true);
}

}  // namespace

Status slot_mapping(const attnfold_lengths* lengths, int32_t page_size, int64_t num_pages,
                    const int64_t* positions, int64_t num_slots, int64_t* slots,
                    const attnfold_execution* execution) {
  attnfold_execution e;
  ATTNFOLD_RETURN_IF_ERROR(validate_execution(execution, &e));
  const attnfold_lengths defaults = ATTNFOLD_LENGTHS_INIT;
  attnfold_lengths l;
  ATTNFOLD_RETURN_IF_ERROR(read_struct("lengths", lengths, defaults, &l));
  if (page_size < 1) return invalid("page_size", "1 or more", page_size);
  if (num_pages < 0 || num_pages > INT64_MAX / page_size)
    return invalid("num_pages", "0.." + std::to_string(INT64_MAX / page_size), num_pages);
  if (l.batch < 0 || l.batch > kMaxBatch)
    return invalid("batch", "0.." + std::to_string(kMaxBatch), l.batch);
  if (num_slots < 0 || num_slots > INT32_MAX)
    return invalid("num_slots", "0.." + std::to_string(INT32_MAX), num_slots);
  if (num_slots > 0) ATTNFOLD_RETURN_IF_ERROR(check_array("slots", slots, sizeof(int64_t)));
  const SlotWork m{{l.batch, l.qo_indptr, l.kv_len, l.block_table, l.block_table_stride,
                    l.kv_indptr, l.kv_indices},
                   page_size,
                   num_pages,
                   positions,
                   num_slots,
                   slots};
  if (e.backend == ATTNFOLD_CUDA) {
    ATTNFOLD_RETURN_IF_ERROR(check_device_arrays(l, positions));
    return cuda::map_slots(m, e);
  }
  int64_t tokens = 0;
  if (l.batch > 0) {
    ATTNFOLD_RETURN_IF_ERROR(check_row_offsets(l.qo_indptr, l.batch, num_slots));
    tokens = l.qo_indptr[l.batch];
    ATTNFOLD_RETURN_IF_ERROR(check_slots_apart(l, positions, num_slots, slots));
  }
  if (tokens > 0) {
    if (positions) ATTNFOLD_RETURN_IF_ERROR(check_array("positions", positions, sizeof(int64_t)));
    ATTNFOLD_RETURN_IF_ERROR(check_kv_len(l, !positions));
  }
  if (tokens == 0 || !places_tokens(m)) {
    std::fill(slots, slots + num_slots, int64_t{ATTNFOLD_NO_SLOT});
    return {};
  }
  ATTNFOLD_RETURN_IF_ERROR(check_tables(l, false));
  for (int32_t r = 0; r < l.batch; ++r) ATTNFOLD_RETURN_IF_ERROR(check_request(m, r));
  for (int32_t r = 0; r < l.batch; ++r) {
    for (int32_t row = l.qo_indptr[r]; row < l.qo_indptr[r + 1]; ++row) {
      const int64_t position = position_of_token(m, r, row);
      slots[row] = position < 0 ? ATTNFOLD_NO_SLOT
                                : slot_of_position(pages_of(m.lengths, r), position, page_size);
    }
  }
  std::fill(slots + tokens, slots + num_slots, int64_t{ATTNFOLD_NO_SLOT});
  return {};
}

namespace {

int32_t num_used(const BlockTables& t, int32_t r) { return t.used ? t.used[r] : t.width; }

Status check_blocks(const BlockTables& t) {
  if (t.used) ATTNFOLD_RETURN_IF_ERROR(check_array("used", t.used, sizeof(int32_t)));
  for (int32_t r = 0; r < t.batch; ++r) {
    const int32_t used = num_used(t, r);
    if (used < 0 || used > t.width)
      return invalid(indexed("used", r), "0.." + std::to_string(t.width) + " (width)", used);
    for (int32_t i = 0; i < used; ++i) {
      const int32_t id = t.block_table[r * t.block_table_stride + i];
      if (id >= ATTNFOLD_NO_PAGE && id < t.num_blocks) continue;
      return invalid(indexed("block_table", r) + "[" + std::to_string(i) + "]",
                     t.num_blocks > 0 ? "a block id, 0.." + std::to_string(t.num_blocks - 1) +
                                            ", or -1 for padding"
                                      : "-1 (num_blocks is 0)",
                     id);
    }
  }
  return {};
}

Status check_stride(const char* name, int64_t stride, int64_t width) {
  if (stride >= width && stride <= INT32_MAX) return {};
  return invalid(name, std::to_string(width) + ".." + std::to_string(INT32_MAX), stride);
}

}  // namespace

Status map_to_kernel_pages(const BlockTables& t) {
  if (t.batch < 0 || t.batch > kMaxBatch)
    return invalid("batch", "0.." + std::to_string(kMaxBatch), t.batch);
  if (t.block_size < 1) return invalid("block_size", "1 or more", t.block_size);
  if (t.page_size < 1 || t.block_size % t.page_size != 0) {
    return invalid("page_size", "a divisor of block_size (" + std::to_string(t.block_size) + ")",
                   t.page_size);
  }
  const int32_t n = t.block_size / t.page_size;
  if (t.width < 0 || t.width > INT32_MAX / n)
    return invalid("width", "0.." + std::to_string(INT32_MAX / n), t.width);
  const int64_t max_blocks = (int64_t{INT32_MAX} + 1) / n;
  if (t.num_blocks < 0 || t.num_blocks > max_blocks)
    return invalid("num_blocks", "0.." + std::to_string(max_blocks), t.num_blocks);
  if (t.batch == 0 || t.width == 0) return {};
  ATTNFOLD_RETURN_IF_ERROR(check_stride("block_table_stride", t.block_table_stride, t.width));
  ATTNFOLD_RETURN_IF_ERROR(
      check_stride("page_table_stride", t.page_table_stride, int64_t{t.width} * n));
  ATTNFOLD_RETURN_IF_ERROR(check_array("block_table", t.block_table, sizeof(int32_t)));
  ATTNFOLD_RETURN_IF_ERROR(check_array("page_table", t.page_table, sizeof(int32_t)));
  const int64_t word = sizeof(int32_t), last = t.batch - 1;
  const Extent written = extent_of_array(
      "page_table", t.page_table, (last * t.page_table_stride + int64_t{t.width} * n) * word);
  ATTNFOLD_RETURN_IF_ERROR(
      check_apart(written, extent_of_array("block_table", t.block_table,
                                           (last * t.block_table_stride + t.width) * word)));
  ATTNFOLD_RETURN_IF_ERROR(check_apart(written, extent_of_array("used", t.used, t.batch * word)));
  ATTNFOLD_RETURN_IF_ERROR(check_blocks(t));
  for (int32_t r = 0; r < t.batch; ++r) {
    const int32_t* blocks = t.block_table + r * t.block_table_stride;
    int32_t* pages = t.page_table + r * t.page_table_stride;
    const int32_t used = num_used(t, r);
    for (int32_t i = 0; i < t.width; ++i) {
      const int32_t block = i < used ? blocks[i] : ATTNFOLD_NO_PAGE;
      for (int32_t j = 0; j < n; ++j) pages[i * n + j] = kernel_page(block, n, j);
    }
  }
  return {};
}

}  // namespace attnfold::cache
