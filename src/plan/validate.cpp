#include "plan/validate.h"

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "attnfold/cache.h"
#include "core/fold.h"
#include "cpu/backend.h"

namespace attnfold {
namespace {

constexpr int32_t kMaxWorkers = 1024;

/** As many digits as tell it from other floats, and its exponent. */
std::string float_text(float x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", static_cast<double>(x));
  return text;
}

std::string range_text(int64_t low, int64_t high) {
  return std::to_string(low) + ".." + std::to_string(high);
}

Status check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) return invalid(name, range_text(low, high), value);
  return {};
}

Status check_head_dim(const char* name, int32_t value) {
  if (value < 8 || value > ATTNFOLD_MAX_HEAD_DIM || value % 8 != 0) {
    return invalid(name, "a multiple of 8, 8.." + std::to_string(ATTNFOLD_MAX_HEAD_DIM), value);
  }
  return {};
}

constexpr const char* kWideTypes = "ATTNFOLD_F32, _F16 or _BF16 (0..2)";

Status check_kv_dtype(int value) {
  if (value < 0 || value >= kNumDTypes)
    return invalid("kv_dtype", "ATTNFOLD_F32, _F16, _BF16, _E4M3, _E5M2 or _I8 (0..5)", value);
  return {};
}

Status check_o_dtype(const attnfold_problem& p) {
  if (p.o_dtype == p.q_dtype || p.o_dtype == ATTNFOLD_F32 || p.o_dtype == ATTNFOLD_E4M3) return {};
  const std::string expected =
      std::string("q's type (") + dtype_name(static_cast<DType>(p.q_dtype)) + "), f32 or e4m3";
  if (p.o_dtype < 0 || p.o_dtype >= kNumDTypes)
    return invalid("o_dtype", expected, static_cast<int>(p.o_dtype));
  return invalid("o_dtype", expected, dtype_name(static_cast<DType>(p.o_dtype)));
}

Status check_scale_kind(const char* name, int kind, DType kv_dtype) {
  const int least = is_8_bit(kv_dtype) ? ATTNFOLD_SCALE_PER_TENSOR : ATTNFOLD_SCALE_NONE;
  if (kind >= least && kind <= ATTNFOLD_SCALE_PER_TOKEN) return {};
  return invalid(
      name,
      range_text(least, ATTNFOLD_SCALE_PER_TOKEN) + " (kv_dtype is " + dtype_name(kv_dtype) + ")",
      kind);
}

Status check_window(const char* name, int32_t value) {
  if (value < -1) return invalid(name, "-1 (off) or more", value);
  return {};
}

constexpr int32_t kMaxBlocks = 1 << 30;

Status check_block_mask(const attnfold_problem& p) {
  ATTNFOLD_RETURN_IF_ERROR(check_range("sparse_block_size", p.sparse_block_size, 0, kMaxBlocks));
  const int32_t most = p.sparse_block_size > 0 ? kMaxBlocks : 0;
  const auto check = [&](const char* name, int32_t value, int32_t limit,
                         const char* why) -> Status {
    if (value >= 0 && value <= limit) return {};
    return invalid(name, range_text(0, limit) + (limit == 0 ? why : ""), value);
  };
  const char* off = " (sparse_block_size is 0)";
  ATTNFOLD_RETURN_IF_ERROR(check("sparse_local_blocks", p.sparse_local_blocks, most, off));
  ATTNFOLD_RETURN_IF_ERROR(check("sparse_vertical_stride", p.sparse_vertical_stride, most, off));
  return check("sparse_head_step", p.sparse_head_step, p.sparse_vertical_stride > 0 ? most : 0,
               " (sparse_vertical_stride is 0)");
}

}  // namespace

template <class T>
Status read_struct(const char* name, const T* given, const T& defaults, T* out) {
  if (!given) return invalid(name, "a pointer", "NULL");
  const size_t size = given->struct_size;
  if (size < sizeof(size_t) || size > (1u << 20)) {
    return invalid(std::string(name) + ".struct_size",
                   "the sizeof of its struct, " + std::to_string(sizeof(T)), size);
  }
  *out = defaults;
  std::memcpy(static_cast<void*>(out), given, std::min(size, sizeof(T)));
  for (size_t i = sizeof(T); i < size;
       ++i) {  // fields of a newer header: served only at their default, 0
    if (reinterpret_cast<const unsigned char*>(given)[i] != 0) {
      return {ATTNFOLD_UNSUPPORTED,
              std::string(name) +
                  ": expected 0 in the fields that this version does not know, got byte " +
                  std::to_string(i) + " set; the library is older than the header"};
    }
  }
  out->struct_size = sizeof(T);
  return {};
}

template Status read_struct(const char*, const attnfold_problem*, const attnfold_problem&,
                            attnfold_problem*);
template Status read_struct(const char*, const attnfold_execution*, const attnfold_execution&,
                            attnfold_execution*);
template Status read_struct(const char*, const attnfold_lengths*, const attnfold_lengths&,
                            attnfold_lengths*);
template Status read_struct(const char*, const attnfold_tensors*, const attnfold_tensors&,
                            attnfold_tensors*);
template Status read_struct(const char*, const attnfold_state*, const attnfold_state&,
                            attnfold_state*);
template Status read_struct(const char*, const attnfold_kv_pool*, const attnfold_kv_pool&,
                            attnfold_kv_pool*);
template Status read_struct(const char*, const attnfold_kv_rows*, const attnfold_kv_rows&,
                            attnfold_kv_rows*);

Status validate_problem(const attnfold_problem* given, attnfold_problem* p, Problem* out) {
  const attnfold_problem defaults = ATTNFOLD_PROBLEM_INIT;
  ATTNFOLD_RETURN_IF_ERROR(read_struct("problem", given, defaults, p));
  ATTNFOLD_RETURN_IF_ERROR(check_range("qo_heads", p->qo_heads, 1, 1 << 16));
  ATTNFOLD_RETURN_IF_ERROR(check_range("kv_heads", p->kv_heads, 1, 1 << 16));
  if (p->qo_heads % p->kv_heads != 0) {
    return invalid("kv_heads", "a divisor of qo_heads (" + std::to_string(p->qo_heads) + ")",
                   p->kv_heads);
  }
  ATTNFOLD_RETURN_IF_ERROR(check_head_dim("head_dim_qk", p->head_dim_qk));
  ATTNFOLD_RETURN_IF_ERROR(check_head_dim("head_dim_vo", p->head_dim_vo));
  if (p->q_dtype < 0 || p->q_dtype > ATTNFOLD_BF16)
    return invalid("q_dtype", kWideTypes, static_cast<int>(p->q_dtype));
  ATTNFOLD_RETURN_IF_ERROR(check_kv_dtype(p->kv_dtype));
  ATTNFOLD_RETURN_IF_ERROR(check_o_dtype(*p));
  const DType kv_dtype = static_cast<DType>(p->kv_dtype);
  ATTNFOLD_RETURN_IF_ERROR(check_scale_kind("k_scale_kind", p->k_scale_kind, kv_dtype));
  ATTNFOLD_RETURN_IF_ERROR(check_scale_kind("v_scale_kind", p->v_scale_kind, kv_dtype));
  ATTNFOLD_RETURN_IF_ERROR(check_range("v_in_k", p->v_in_k, 0, 1));
  if (p->v_in_k && p->head_dim_vo > p->head_dim_qk) {
    return invalid("head_dim_vo",
                   "at most head_dim_qk (" + std::to_string(p->head_dim_qk) + ") with v_in_k",
                   p->head_dim_vo);
  }
  ATTNFOLD_RETURN_IF_ERROR(check_range("kv_storage", p->kv_storage, 0, ATTNFOLD_KV_RAGGED));
  ATTNFOLD_RETURN_IF_ERROR(check_range("kv_layout", p->kv_layout, 0, ATTNFOLD_HND));
  if (p->kv_storage == ATTNFOLD_KV_PAGED) {
    ATTNFOLD_RETURN_IF_ERROR(check_range("page_size", p->page_size, 1, INT32_MAX));
    ATTNFOLD_RETURN_IF_ERROR(check_range("num_pages", p->num_pages, 0, INT64_MAX));
  }
  ATTNFOLD_RETURN_IF_ERROR(check_range("mask", p->mask, 0, ATTNFOLD_MASK_CAUSAL));
  ATTNFOLD_RETURN_IF_ERROR(check_window("window_left", p->window_left));
  ATTNFOLD_RETURN_IF_ERROR(check_window("window_right", p->window_right));
  if (p->sm_scale == ATTNFOLD_SM_SCALE_DEFAULT) {
    p->sm_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(p->head_dim_qk)));
  }
  if (!(p->sm_scale >= 0.0f) || std::isinf(p->sm_scale)) {
    return invalid("sm_scale", "a finite number >= 0, or ATTNFOLD_SM_SCALE_DEFAULT", p->sm_scale);
  }
  if (!(p->logits_softcap >= 0.0f) || std::isinf(p->logits_softcap)) {
    return invalid("logits_softcap", "a finite number >= 0 (0 = off)", p->logits_softcap);
  }
  const double log2e = 1.44269504088896340736;
  if (p->logits_softcap * log2e > FLT_MAX) {
    return invalid("logits_softcap", "at most FLT_MAX / log2(e), about 2.3587e38",
                   float_text(p->logits_softcap));
  }
  if (p->logits_softcap > 0.0f && static_cast<double>(p->sm_scale) / p->logits_softcap > FLT_MAX) {
    return invalid("logits_softcap",
                   "0 (off), or so much that sm_scale (" + float_text(p->sm_scale) +
                       ") / logits_softcap is at most FLT_MAX",
                   float_text(p->logits_softcap));
  }
  ATTNFOLD_RETURN_IF_ERROR(check_range("attention_chunk", p->attention_chunk, 0, INT32_MAX));
  ATTNFOLD_RETURN_IF_ERROR(check_range("sink_tokens", p->sink_tokens, 0, INT32_MAX));
  ATTNFOLD_RETURN_IF_ERROR(check_block_mask(*p));
  ATTNFOLD_RETURN_IF_ERROR(check_range("max_batch", p->max_batch, 0, 1 << 24));
  ATTNFOLD_RETURN_IF_ERROR(check_range("max_qo_rows", p->max_qo_rows, 0, 1 << 30));
  ATTNFOLD_RETURN_IF_ERROR(check_range("max_kv_len", p->max_kv_len, 0, 1 << 30));
  const double scale = p->sm_scale * log2e;
  float scale_high = static_cast<float>(scale);
  if (scale_high > scale) scale_high = std::nextafterf(scale_high, 0.0f);
  // Never 0: -inf times it must stay -inf.
  const float scale_low = std::max(static_cast<float>(scale - scale_high), FLT_MIN);
  *out = {p->qo_heads,
          p->kv_heads,
          p->qo_heads / p->kv_heads,
          p->head_dim_qk,
          p->head_dim_vo,
          static_cast<DType>(p->q_dtype),
          static_cast<DType>(p->kv_dtype),
          static_cast<DType>(p->o_dtype),
          p->kv_storage == ATTNFOLD_KV_RAGGED,
          p->page_size,
          {p->mask == ATTNFOLD_MASK_CAUSAL, p->window_left, p->window_right, p->attention_chunk,
           p->sink_tokens},
          scale_high,
          scale_low,
          p->logits_softcap,
          p->logits_softcap > 0.0f ? p->sm_scale / p->logits_softcap : 0.0f,
          static_cast<float>(p->logits_softcap * log2e),
          p->v_in_k,
          {p->sparse_block_size, p->sparse_local_blocks, p->sparse_vertical_stride,
           p->sparse_head_step}};
  return {};
}

Status validate_execution(const attnfold_execution* given, attnfold_execution* e) {
  const attnfold_execution defaults = ATTNFOLD_EXECUTION_INIT;
  if (!given) given = &defaults;
  ATTNFOLD_RETURN_IF_ERROR(read_struct("execution", given, defaults, e));
  ATTNFOLD_RETURN_IF_ERROR(check_range("num_threads", e->num_threads, 0, kMaxWorkers));
  ATTNFOLD_RETURN_IF_ERROR(
      check_range("prefix_use", e->prefix_use, ATTNFOLD_PREFIX_AUTO, ATTNFOLD_PREFIX_ALWAYS));
  ATTNFOLD_RETURN_IF_ERROR(check_range("num_workers", e->num_workers, 0, kMaxWorkers));
  ATTNFOLD_RETURN_IF_ERROR(check_range("backend", e->backend, 0, ATTNFOLD_CUDA));
  ATTNFOLD_RETURN_IF_ERROR(check_range("device", e->device, -1, INT32_MAX));
  if (e->stream && e->backend == ATTNFOLD_CPU)
    return invalid("stream", "NULL (backend is ATTNFOLD_CPU)", "a pointer");
  if (e->num_threads == 0 && e->backend == ATTNFOLD_CPU) return cpu::check_default_threads();
  return {};
}

namespace {

Status check_offsets(const char* name, const int32_t* indptr, int32_t batch, int64_t last_max,
                     const char* last_what) {
  if (!indptr) return invalid(name, "[batch + 1] offsets", "NULL");
  if (indptr[0] < 0) return invalid(indexed(name, 0), "0 or more", indptr[0]);
  for (int32_t r = 0; r < batch; ++r) {
    if (indptr[r + 1] < indptr[r]) {
      return invalid(indexed(name, r + 1),
                     "at least " + indexed(name, r) + " (" + std::to_string(indptr[r]) + ")",
                     indptr[r + 1]);
    }
  }
  if (indptr[batch] > last_max) {
    return invalid(indexed(name, batch),
                   "at most " + std::string(last_what) + " (" + std::to_string(last_max) + ")",
                   indptr[batch]);
  }
  return {};
}

/** The ids of the pages that hold keys [begin, end) of request r. */
Status check_page_ids(const attnfold_problem& p, const attnfold_lengths& l, int32_t r,
                      const int32_t* ids, int32_t begin, int32_t end) {
  if (begin >= end) return {};
  const int64_t first = begin / p.page_size, last = (end - 1) / p.page_size;
  // One pass without branches first: the sign bit of id is set if it is negative, that of limit -
  // id if it is too large.
  const uint32_t limit = static_cast<uint32_t>(std::min<int64_t>(p.num_pages - 1, INT32_MAX));
  uint32_t signs = p.num_pages > 0 ? 0u : 0x80000000u;
  for (int64_t i = first; i <= last; ++i) {
    const uint32_t id = static_cast<uint32_t>(ids[i]);
    signs |= id | (limit - id);
  }
  if (!(signs >> 31)) return {};
  for (int64_t i = first; i <= last; ++i) {
    if (ids[i] >= 0 && ids[i] < p.num_pages) continue;
    const std::string name = l.block_table
                                 ? indexed("block_table", r) + "[" + std::to_string(i) + "]"
                                 : indexed("kv_indices", l.kv_indptr[r] + i);
    return invalid(name,
                   p.num_pages > 0 ? "a page id, " + range_text(0, p.num_pages - 1)
                                   : "no page (num_pages is 0)",
                   ids[i]);
  }
  return {};
}

/** The pages of keys that lie in blocks which some row of request r sees. */
Status check_block_pages(const attnfold_problem& p, const Problem& problem,
                         const attnfold_lengths& l, int32_t r, const int32_t* ids,
                         const RequestShape& shape, const VisibleKeys& keys) {
  Lengths lists{};
  lists.block_indptr = l.block_indptr;
  lists.block_indices = l.block_indices;
  const int64_t first_local =
      first_local_key(problem.blocks, static_cast<int64_t>(shape.kv_len) - shape.qo_len);
  const int32_t ranges[2][2] = {{0, keys.sink}, {keys.begin, keys.end}};
  HeadBlocks last{};
  for (int32_t h = 0; h < problem.kv_heads; ++h) {
    const HeadBlocks blocks = head_blocks(problem.blocks, lists, problem.kv_heads, r, h);
    if (h > 0 && same_blocks(last, blocks)) continue;
    last = blocks;
    for (const auto& [begin, end] : ranges) {
      for (int64_t key = begin; key < end;) {
        const KeyStretch stretch = next_stretch(blocks, first_local, key);
        const int64_t stop = std::min<int64_t>(stretch.end, end);
        if (stretch.begin < stop) {
          ATTNFOLD_RETURN_IF_ERROR(check_page_ids(p, l, r, ids, static_cast<int32_t>(stretch.begin),
                                                  static_cast<int32_t>(stop)));
        }
        key = stop;
      }
    }
  }
  return {};
}

/** The page ids that some row of request r may read. */
Status check_pages(const attnfold_problem& p, const Problem& problem, const attnfold_lengths& l,
                   int32_t r, const RequestShape& shape) {
  const int64_t num_needed = (static_cast<int64_t>(l.kv_len[r]) + p.page_size - 1) / p.page_size;
  const int32_t* ids = nullptr;
  if (l.block_table) {
    if (num_needed > l.block_table_stride) {
      return invalid(indexed("kv_len", r),
                     range_text(0, l.block_table_stride * p.page_size) + " (block_table_stride " +
                         std::to_string(l.block_table_stride) + " x page_size " +
                         std::to_string(p.page_size) + ")",
                     l.kv_len[r]);
    }
    ids = l.block_table + r * l.block_table_stride;
  } else {
    const int64_t have = l.kv_indptr[r + 1] - static_cast<int64_t>(l.kv_indptr[r]);
    if (num_needed > have) {
      return invalid(indexed("kv_len", r),
                     range_text(0, have * p.page_size) + " (" + std::to_string(have) +
                         " pages in kv_indptr x page_size " + std::to_string(p.page_size) + ")",
                     l.kv_len[r]);
    }
    ids = l.kv_indices + l.kv_indptr[r];
  }
  if (shape.qo_len == 0) return {};
  const VisibleKeys keys = visible_keys(problem.mask, shape, 0, shape.qo_len);
  if (problem.blocks.block_size > 0) return check_block_pages(p, problem, l, r, ids, shape, keys);
  ATTNFOLD_RETURN_IF_ERROR(check_page_ids(p, l, r, ids, 0, keys.sink));
  return check_page_ids(p, l, r, ids, keys.begin, keys.end);
}

/** Either a list for each request and kv head, or no list. */
Status check_block_arrays(const Problem& problem, const attnfold_lengths& l) {
  const bool lists = has_lists(problem.blocks);
  if (!lists && (l.block_indptr || l.block_indices)) {
    return invalid(l.block_indptr ? "block_indptr" : "block_indices",
                   problem.blocks.block_size == 0
                       ? "NULL (sparse_block_size is 0)"
                       : "NULL (sparse_local_blocks and sparse_vertical_stride list the blocks)",
                   "a pointer");
  }
  if (!lists) return {};
  if (!l.block_indptr)
    return invalid("block_indptr",
                   "[batch * kv_heads + 1] offsets (sparse_block_size is " +
                       std::to_string(problem.blocks.block_size) + ")",
                   "NULL");
  const int64_t n = static_cast<int64_t>(l.batch) * problem.kv_heads;
  if (n > INT32_MAX) return invalid("batch", "less than 2^31 lists of blocks", l.batch);
  ATTNFOLD_RETURN_IF_ERROR(check_offsets("block_indptr", l.block_indptr, static_cast<int32_t>(n),
                                         INT32_MAX, "2^31 - 1"));
  if (l.block_indptr[n] > l.block_indptr[0] && !l.block_indices)
    return invalid("block_indices", "ids of blocks", "NULL");
  return {};
}

/** The lists of request r: ids of blocks that hold a key, rising. */
Status check_block_lists(const Problem& problem, const attnfold_lengths& l, int32_t r,
                         int32_t kv_len) {
  if (!has_lists(problem.blocks)) return {};
  const int64_t blocks =
      (static_cast<int64_t>(kv_len) + problem.blocks.block_size - 1) / problem.blocks.block_size;
  for (int32_t h = 0; h < problem.kv_heads; ++h) {
    const int32_t* offset = l.block_indptr + static_cast<int64_t>(r) * problem.kv_heads + h;
    int32_t last = -1;
    for (int32_t i = offset[0]; i < offset[1]; ++i) {
      const int32_t id = l.block_indices[i];
      if (id <= last || id >= blocks) {
        return invalid(indexed("block_indices", i),
                       last + 1 < blocks
                           ? range_text(last + 1, blocks - 1) + " (rising, blocks that hold a key)"
                           : "no further block (" + std::to_string(blocks) + " hold a key)",
                       id);
      }
      last = id;
    }
  }
  return {};
}

/** Either all three of the mask's arrays, or none. */
Status check_mask_arrays(const attnfold_lengths& l) {
  const bool any = l.mask_width || l.mask_indptr || l.mask_bits;
  if (any && !l.mask_width) return invalid("mask_width", "[batch] widths beside mask_bits", "NULL");
  if (any && !l.mask_indptr)
    return invalid("mask_indptr", "[batch + 1] offsets beside mask_width", "NULL");
  return {};
}

/** What the step says of request r beyond its lengths; fills `shape`. */
Status check_request_masks(const attnfold_lengths& l, int32_t r, RequestShape* shape) {
  if (l.mask_width) {
    const int32_t width = l.mask_width[r];
    const int32_t least = std::min(shape->qo_len, shape->kv_len);
    if (width != 0 && (width < least || width > shape->kv_len)) {
      return invalid(indexed("mask_width", r),
                     "0 (no mask), or " + range_text(least, shape->kv_len) +
                         " (the new tokens' keys, up to kv_len)",
                     width);
    }
    const int64_t begin = l.mask_indptr[r], row_bytes = mask_row_bytes(width);
    const int64_t bytes = shape->qo_len * row_bytes;
    if (begin < 0) return invalid(indexed("mask_indptr", r), "0 or more", begin);
    if (l.mask_indptr[r + 1] < begin || l.mask_indptr[r + 1] - begin < bytes) {
      return invalid(indexed("mask_indptr", r + 1),
                     "at least " + indexed("mask_indptr", r) + " (" + std::to_string(begin) +
                         ") + " + std::to_string(bytes) + " (" + std::to_string(shape->qo_len) +
                         " rows of " + std::to_string(row_bytes) + " bytes)",
                     l.mask_indptr[r + 1]);
    }
    if (bytes > 0 && !l.mask_bits) return invalid("mask_bits", "bits for mask_width", "NULL");
    shape->mask_width = width;
  }
  if (l.visible_prefix) {
    const int32_t limit = shape->kv_len - shape->mask_width;
    if (l.visible_prefix[r] < 0 || l.visible_prefix[r] > limit) {
      return invalid(indexed("visible_prefix", r),
                     range_text(0, limit) +
                         (shape->mask_width > 0 ? " (kv_len less mask_width)" : " (kv_len)"),
                     l.visible_prefix[r]);
    }
    shape->visible_prefix = l.visible_prefix[r];
  }
  return {};
}

}  // namespace

Status validate_lengths(const attnfold_problem& p, const Problem& problem,
                        const attnfold_lengths* given, attnfold_lengths* l) {
  const attnfold_lengths defaults = ATTNFOLD_LENGTHS_INIT;
  ATTNFOLD_RETURN_IF_ERROR(read_struct("lengths", given, defaults, l));
  const bool ragged = p.kv_storage == ATTNFOLD_KV_RAGGED;
  ATTNFOLD_RETURN_IF_ERROR(check_range("batch", l->batch, 0, p.max_batch));
  if (l->batch == 0) return {};
  ATTNFOLD_RETURN_IF_ERROR(
      check_offsets("qo_indptr", l->qo_indptr, l->batch, p.max_qo_rows, "max_qo_rows"));
  if (l->qo_indptr[0] != 0) return invalid(indexed("qo_indptr", 0), "0", l->qo_indptr[0]);
  if (!l->kv_len && !ragged) return invalid("kv_len", "[batch] lengths", "NULL");
  if (ragged) {
    if (l->block_table || l->kv_indices) {
      return invalid(l->block_table ? "block_table" : "kv_indices", "NULL (kv_storage is ragged)",
                     "a pointer");
    }
    ATTNFOLD_RETURN_IF_ERROR(check_range("num_kv_rows", l->num_kv_rows, 0, INT64_MAX));
    ATTNFOLD_RETURN_IF_ERROR(check_offsets("kv_indptr", l->kv_indptr, l->batch,
                                           l->num_kv_rows > 0 ? l->num_kv_rows : INT32_MAX,
                                           "num_kv_rows"));
    if (l->num_kv_rows == 0) l->num_kv_rows = l->kv_indptr[l->batch];
  } else if (l->block_table && l->kv_indices) {
    return invalid("kv_indices", "NULL (block_table is given)", "a pointer");
  } else if (l->block_table) {
    ATTNFOLD_RETURN_IF_ERROR(
        check_range("block_table_stride", l->block_table_stride, 0, INT32_MAX));
  } else {
    if (l->kv_indices || l->kv_indptr) {
      ATTNFOLD_RETURN_IF_ERROR(
          check_offsets("kv_indptr", l->kv_indptr, l->batch, INT32_MAX, "2^31 - 1"));
    }
    const bool needs_pages =
        std::any_of(l->kv_len, l->kv_len + l->batch, [](int32_t n) { return n > 0; });
    if (!l->kv_indices && needs_pages)
      return invalid("block_table", "a table, or kv_indptr with kv_indices", "NULL");
    if (!l->kv_indptr) {  // no request has a key: any table does
      static const int32_t kNoPage = 0;
      l->block_table = &kNoPage;
      l->block_table_stride = 0;
    }
  }
  ATTNFOLD_RETURN_IF_ERROR(check_mask_arrays(*l));
  ATTNFOLD_RETURN_IF_ERROR(check_block_arrays(problem, *l));
  for (int32_t r = 0; r < l->batch; ++r) {
    const int64_t have =
        ragged ? l->kv_indptr[r + 1] - static_cast<int64_t>(l->kv_indptr[r]) : p.max_kv_len;
    const int64_t kv_len = l->kv_len ? l->kv_len[r] : have;
    const int64_t limit = std::min<int64_t>(p.max_kv_len, have);
    if (!l->kv_len && kv_len > limit) {
      return invalid(indexed("kv_indptr", r + 1),
                     "at most " + indexed("kv_indptr", r) + " (" + std::to_string(l->kv_indptr[r]) +
                         ") + max_kv_len (" + std::to_string(p.max_kv_len) + ")",
                     l->kv_indptr[r + 1]);
    }
    if (kv_len < 0 || kv_len > limit) {
      const char* why = limit < p.max_kv_len ? " (rows in kv_indptr)" : " (max_kv_len)";
      return invalid(indexed("kv_len", r), range_text(0, limit) + why, kv_len);
    }
    RequestShape shape;
    shape.qo_len = l->qo_indptr[r + 1] - l->qo_indptr[r];
    shape.kv_len = static_cast<int32_t>(kv_len);
    ATTNFOLD_RETURN_IF_ERROR(check_request_masks(*l, r, &shape));
    ATTNFOLD_RETURN_IF_ERROR(check_block_lists(problem, *l, r, shape.kv_len));
    if (!ragged) ATTNFOLD_RETURN_IF_ERROR(check_pages(p, problem, *l, r, shape));
  }
  return {};
}

}  // namespace attnfold
