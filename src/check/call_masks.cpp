#include "check/call_masks.h"

#include <algorithm>
#include <cstring>

namespace attnfold::check {
namespace {

void require_range(const char* name, int64_t i, int64_t value, int64_t low, int64_t high,
                   const char* why) {
  if (value >= low && value <= high) return;
  fail(indexed(name, i), std::to_string(low) + ".." + std::to_string(high) + " " + why,
       std::to_string(value));
}

/** Bits of all requests, one after the other. */
void read_mask(const Fields& fields, Call* call) {
  call->mask_width = fields.list("mask_width", call->batch, "[batch]");
  call->mask_indptr.assign(1, 0);
  for (int32_t r = 0; r < call->batch; ++r) {
    const int32_t width = call->mask_width[r], kv_len = call->kv_len[r];
    const int64_t qo_len = call->qo_indptr[r + 1] - call->qo_indptr[r];
    if (width != 0) {
      require_range("mask_width", r, width, std::min<int64_t>(qo_len, kv_len), kv_len,
                    "(the new tokens' keys, up to kv_len), or 0");
    }
    call->mask_indptr.push_back(call->mask_indptr.back() + qo_len * ((int64_t{width} + 7) / 8));
  }
  const char* shape = "[sum of qo_len * ceil(mask_width / 8)]";
  const Array& bits = fields.array("mask_bits", 1, shape);
  require_dtype("mask_bits", bits, "U8");
  require_shape("mask_bits", bits, {call->mask_indptr.back()}, shape);
  call->mask_bits.resize(bits.bytes);
  if (bits.bytes > 0) std::memcpy(call->mask_bits.data(), bits.data, bits.bytes);
}

void read_visible_prefix(const Fields& fields, Call* call) {
  call->visible_prefix = fields.list("visible_prefix", call->batch, "[batch]");
  for (int32_t r = 0; r < call->batch; ++r) {
    const int32_t width = call->mask_width.empty() ? 0 : call->mask_width[r];
    require_range("visible_prefix", r, call->visible_prefix[r], 0, call->kv_len[r] - width,
                  width > 0 ? "(kv_len less mask_width)" : "(kv_len)");
  }
}

/** Ids of blocks for each request and kv head, rising, of blocks that hold a key. */
void read_block_lists(const Fields& fields, Call* call) {
  const attnfold_problem& p = call->problem;
  call->block_indptr =
      fields.list("block_indptr", int64_t{call->batch} * p.kv_heads + 1, "[batch * kv_heads + 1]");
  require_rising("block_indptr", call->block_indptr);
  call->block_indices = fields.list("block_indices", -1, "[block_indptr's last]");
  const int64_t n = static_cast<int64_t>(call->block_indptr.size()) - 1;
  if (static_cast<size_t>(call->block_indptr[n]) != call->block_indices.size()) {
    fail(indexed("block_indptr", n),
         "the length of block_indices, " + std::to_string(call->block_indices.size()),
         std::to_string(call->block_indptr[n]));
  }
  for (int64_t list = 0; list < n; ++list) {
    const int64_t kv_len = call->kv_len[list / p.kv_heads];
    const int64_t blocks = (kv_len + p.sparse_block_size - 1) / p.sparse_block_size;
    int64_t least = 0;
    for (int32_t i = call->block_indptr[list]; i < call->block_indptr[list + 1]; ++i) {
      require_range("block_indices", i, call->block_indices[i], least, blocks - 1,
                    "(rising, blocks that hold a key)");
      least = int64_t{call->block_indices[i]} + 1;
    }
  }
}

}  // namespace

void read_request_masks(const Fields& fields, Call* call) {
  if (fields.has("mask_width") || fields.has("mask_bits")) read_mask(fields, call);
  if (fields.has("visible_prefix")) read_visible_prefix(fields, call);
  if (has_block_lists(call->problem)) return read_block_lists(fields, call);
  for (const char* name : {"block_indptr", "block_indices"}) {
    if (!fields.has(name)) continue;
    fail(std::string("tensor ") + name,
         "none without a sparse_block_size, or beside local and vertical blocks", "one");
  }
}

}  // namespace attnfold::check
