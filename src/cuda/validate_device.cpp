// Checks of what can be checked without reading the device's memory.
#include <cstdint>

#include "cuda/cuda_validate.h"
#include "plan/validate.h"

namespace attnfold::cuda {
namespace {

constexpr int64_t kElementsOf16Bytes = 8;

Status check_multiple(const char* name, int64_t stride) {
  if (stride % kElementsOf16Bytes == 0) return {};
  return invalid(name, "a multiple of 8 elements", stride);
}

Status check_present(const char* name, const void* p, const char* expected) {
  if (p) return {};
  return invalid(name, expected, "NULL");
}

}  // namespace

Status validate_device_lengths(const attnfold_problem& p, const attnfold_lengths& l) {
  if (l.batch < 0 || l.batch > p.max_batch) {
    return invalid("batch", "0..max_batch (" + std::to_string(p.max_batch) + ")", l.batch);
  }
  for (const auto& [name, given] :
       {std::pair<const char*, const void*>{"visible_prefix", l.visible_prefix},
        {"mask_width", l.mask_width}}) {
    if (given)
      return {ATTNFOLD_UNSUPPORTED,
              std::string(name) + ": expected NULL, as it is not served on CUDA, got a pointer"};
  }
  if (l.batch == 0) return {};
  ATTNFOLD_RETURN_IF_ERROR(
      check_present("qo_indptr", l.qo_indptr, "[batch + 1] offsets on the device"));
  if (p.kv_storage == ATTNFOLD_KV_RAGGED) {
    ATTNFOLD_RETURN_IF_ERROR(
        check_present("kv_indptr", l.kv_indptr, "[batch + 1] offsets on the device"));
    if (p.kv_layout == ATTNFOLD_HND && l.num_kv_rows <= 0) {
      return invalid("num_kv_rows",
                     "the rows that ragged k and v hold (the offsets are not read on the host)",
                     l.num_kv_rows);
    }
    return {};
  }
  ATTNFOLD_RETURN_IF_ERROR(check_present("kv_len", l.kv_len, "[batch] lengths on the device"));
  if (l.block_table && l.kv_indices)
    return invalid("kv_indices", "NULL beside a block_table", "a pointer");
  if (l.block_table) {
    const int64_t pages = (static_cast<int64_t>(p.max_kv_len) + p.page_size - 1) / p.page_size;
    if (l.block_table_stride < 0 || (l.batch > 1 && l.block_table_stride == 0 && pages > 0)) {
      return invalid("block_table_stride", "entries from one request's pages to the next one's",
                     l.block_table_stride);
    }
    return {};
  }
  ATTNFOLD_RETURN_IF_ERROR(
      check_present("kv_indices", l.kv_indices, "page ids on the device, or a block_table"));
  return check_present("kv_indptr", l.kv_indptr,
                       "[batch + 1] offsets into kv_indices, on the device");
}

Status validate_device_tensors(const attnfold_problem& p, int64_t num_kv_rows,
                               const Extent& workspace, const attnfold_tensors* given,
                               Tensors* out) {
  // How many rows there are is known on the device alone.
  const bool ragged = p.kv_storage == ATTNFOLD_KV_RAGGED;
  const bool reads_kv = p.max_kv_len > 0 && (ragged || p.num_pages > 0);
  const TensorExtents extents{1, ragged ? num_kv_rows : p.page_size, 1, reads_kv, false, workspace};
  ATTNFOLD_RETURN_IF_ERROR(validate_tensors(p, extents, given, out));
  ATTNFOLD_RETURN_IF_ERROR(check_multiple("q_stride_row", out->q.stride_token));
  ATTNFOLD_RETURN_IF_ERROR(check_multiple("q_stride_head", out->q.stride_head));
  ATTNFOLD_RETURN_IF_ERROR(check_multiple("k_stride_page", ragged ? 0 : out->k.stride_page));
  ATTNFOLD_RETURN_IF_ERROR(check_multiple("k_stride_token", out->k.stride_token));
  ATTNFOLD_RETURN_IF_ERROR(check_multiple("k_stride_head", out->k.stride_head));
  ATTNFOLD_RETURN_IF_ERROR(check_multiple("v_stride_page", ragged ? 0 : out->v.stride_page));
  ATTNFOLD_RETURN_IF_ERROR(check_multiple("v_stride_token", out->v.stride_token));
  ATTNFOLD_RETURN_IF_ERROR(check_multiple("v_stride_head", out->v.stride_head));
  ATTNFOLD_RETURN_IF_ERROR(check_multiple("o_stride_row", out->o.stride_token));
  ATTNFOLD_RETURN_IF_ERROR(check_multiple("o_stride_head", out->o.stride_head));
  ATTNFOLD_RETURN_IF_ERROR(check_output_strides("o", p.max_qo_rows, out->o.stride_token, p.qo_heads,
                                                out->o.stride_head, p.head_dim_vo));
  if (!out->lse) return {};
  return check_output_strides("lse", p.max_qo_rows, out->lse_stride_row, p.qo_heads,
                              out->lse_stride_head, 1);
}

}  // namespace attnfold::cuda
