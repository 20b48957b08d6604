#include "check/layouts.h"

#include <algorithm>
#include <cstring>

#include "check/random.h"

namespace attnfold::check {
namespace {

constexpr int32_t kWildPage = 0x7ffffff0;
constexpr int32_t kSparePages = 3;       // pages of the pool that belong to no request
constexpr int64_t kOffsetMultiple = 16;  // elements: 16 bytes or more of any type
constexpr int kPages = 4;                // of a seed's draws

/** One axis of a tensor: its size, elements between one entry's end and the next, and direction. */
struct Axis {
  int64_t size;
  int64_t gap = 0;
  bool backwards = false;
  int64_t stride = 0;  // result
};

/** Strides of axes in the order given, slowest first, over rows of `dim` elements. */
struct Layout {
  int64_t offset = 0;    // of element (0, 0, ..)
  int64_t elements = 0;  // in all
};
Layout lay_out(std::initializer_list<Axis*> axes, int64_t dim) {
  Layout layout{0, dim};
  for (auto it = std::rbegin(axes); it != std::rend(axes); ++it) {
    Axis& axis = **it;
    axis.stride = layout.elements + axis.gap;
    layout.elements = axis.stride * std::max<int64_t>(axis.size, 1);
    if (!axis.backwards || axis.size == 0) continue;
    layout.offset += axis.stride * (axis.size - 1);
    axis.stride = -axis.stride;
  }
  const int64_t shift = (kOffsetMultiple - layout.offset % kOffsetMultiple) % kOffsetMultiple;
  layout.offset += shift;
  layout.elements += shift;
  return layout;
}

std::shared_ptr<Buffer> filled(int64_t elements, attnfold_dtype dtype, int byte) {
  auto buffer = std::make_shared<Buffer>(elements * dtype_bytes(static_cast<DType>(dtype)));
  if (buffer->size() > 0) std::memset(buffer->data(), byte, buffer->size());
  return buffer;
}

/** Allocates k or v, or their scales per token; with `odd`, pages of k and heads of v run
 * backwards. */
std::shared_ptr<Buffer> allocate_kv(const Call& call, int64_t dim, attnfold_dtype dtype, bool odd,
                                    bool is_v, int gap_byte, Strides* strides, int64_t* offset) {
  const attnfold_problem& p = call.problem;
  const bool ragged = p.kv_storage == ATTNFOLD_KV_RAGGED;
  Axis pages{ragged ? 1 : p.num_pages, odd ? 7 : 0, odd && !is_v};
  Axis tokens{ragged ? call.num_kv_rows : p.page_size, odd ? 5 : 0, false};
  Axis heads{p.kv_heads, odd ? (is_v ? 1 : 3) : 0, odd && is_v};
  const Layout layout = p.kv_layout == ATTNFOLD_NHD ? lay_out({&pages, &tokens, &heads}, dim)
                                                    : lay_out({&pages, &heads, &tokens}, dim);
  *strides = {ragged ? 0 : pages.stride, tokens.stride, heads.stride};
  *offset = layout.offset;
  return filled(layout.elements, dtype, gap_byte);
}

/** Scales per token lie as their tensor does; those of other kinds are one for each head, and need
 * no new place. */
void allocate_scales(Call* call, attnfold_scale_kind kind, bool odd, bool is_v, int gap_byte,
                     Scales* scales) {
  if (kind == ATTNFOLD_SCALE_PER_TOKEN) {
    scales->values =
        allocate_kv(*call, 1, ATTNFOLD_F32, odd, is_v, gap_byte, &scales->strides, &scales->offset);
  } else if (kind != ATTNFOLD_SCALE_NONE && scales->values == nullptr) {
    scales->values = filled(call->problem.kv_heads, ATTNFOLD_F32, gap_byte);
    scales->strides.head = kind == ATTNFOLD_SCALE_PER_HEAD ? 1 : 0;
  }
}

/** Where v lies in k, it is k. */
void share_k(Call* call) {
  call->v = call->k;
  call->v_strides = call->k_strides;
  call->v_offset = call->k_offset;
}

}  // namespace

void allocate_q(Call* call, bool odd, int gap_byte) {
  const attnfold_problem& p = call->problem;
  Axis tokens{call->num_rows(), odd ? 5 : 0, odd};
  Axis heads{p.qo_heads, odd ? 3 : 0, false};
  const Layout layout = lay_out({&tokens, &heads}, p.head_dim_qk);
  call->q_strides = {0, tokens.stride, heads.stride};
  call->q_offset = layout.offset;
  call->q = filled(layout.elements, p.q_dtype, gap_byte);
}

void allocate_kv_pair(Call* call, bool odd, int gap_byte) {
  const attnfold_problem& p = call->problem;
  call->k = allocate_kv(*call, p.head_dim_qk, p.kv_dtype, odd, false, gap_byte, &call->k_strides,
                        &call->k_offset);
  if (p.v_in_k) {
    share_k(call);
  } else {
    call->v = allocate_kv(*call, p.head_dim_vo, p.kv_dtype, odd, true, gap_byte, &call->v_strides,
                          &call->v_offset);
  }
  allocate_scales(call, p.k_scale_kind, odd, false, gap_byte, &call->k_scale);
  allocate_scales(call, p.v_scale_kind, odd, true, gap_byte, &call->v_scale);
}

void make_tables(Call* call, const TableOptions& options) {
  attnfold_problem& p = call->problem;
  const int64_t page_size = p.page_size;
  const auto pages_of = [&](int32_t r) { return (call->kv_len[r] + page_size - 1) / page_size; };
  std::vector<KeyRange> seen;
  for (int32_t r = 0; r < call->batch; ++r) seen.push_back(seen_keys(*call, r));
  const auto has_page = [&](int32_t r, int64_t i) {
    return !options.poison || seen[r].meets(i * page_size, (i + 1) * page_size);
  };
  int64_t widest = 0, used = 0;
  for (int32_t r = 0; r < call->batch; ++r) {
    widest = std::max(widest, pages_of(r));
    for (int64_t i = 0; i < pages_of(r); ++i) used += has_page(r, i);
  }
  p.num_pages = used + kSparePages;
  std::vector<int32_t> ids =
      permutation(static_cast<int32_t>(p.num_pages), hash_of(options.seed, kPages));
  if (!options.permute) std::sort(ids.begin(), ids.end());

  const int32_t unused = options.poison ? kWildPage : 0;
  call->block_table.clear();
  call->kv_indptr.clear();
  call->kv_indices.clear();
  call->block_table_stride = options.csr ? 0 : widest + 1;
  if (options.csr) call->kv_indptr.push_back(0);
  size_t next = 0;
  for (int32_t r = 0; r < call->batch; ++r) {
    std::vector<int32_t> row;
    for (int64_t i = 0; i < pages_of(r); ++i) row.push_back(has_page(r, i) ? ids[next++] : unused);
    if (options.csr) {
      call->kv_indices.insert(call->kv_indices.end(), row.begin(), row.end());
      call->kv_indptr.push_back(static_cast<int32_t>(call->kv_indices.size()));
    } else {
      row.resize(call->block_table_stride, unused);
      call->block_table.insert(call->block_table.end(), row.begin(), row.end());
    }
  }
}

void make_ragged(Call* call, int32_t slack) {
  call->block_table.clear();
  call->block_table_stride = 0;
  call->kv_indices.clear();
  call->kv_indptr.assign(1, 0);
  for (int32_t n : call->kv_len) {
    call->kv_indptr.push_back(call->kv_indptr.back() + n + slack);
  }
  call->num_kv_rows = call->kv_indptr.back() + slack;
}

}  // namespace attnfold::check
