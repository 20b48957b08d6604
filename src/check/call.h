// One attention call in host memory: what a call file holds, what tests draw, what the oracle and
// the engine both answer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attnfold/attnfold.h"
#include "core/dtype.h"

namespace attnfold::check {

/** Bytes aligned to 64, uninitialised unless said. */
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);
  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte[], Free> data_;
  size_t size_ = 0;
};

/** A 3D view of (row, head, element) for q and o, or (page or 0, token, head, element) for k and v;
 * strides in elements. */
struct Strides {
  int64_t page = 0, token = 0, head = 0;  // q, o, lse: token is the row
};

/** Scales of k or v, float32 at (page, token, kv head); strides in floats, 0 along axes that the kind
 * of scale does not have. */
struct Scales {
  std::shared_ptr<Buffer> values;  // or null: every scale is 1
  Strides strides;
  int64_t offset = 0;
};

/**
 * A call owns its tensors.  Every stride is set (never 0 = packed), so that the oracle needs no
 * defaults. The problem's maxima are at least the call's own sizes.
 */
struct Call {
  attnfold_problem problem = ATTNFOLD_PROBLEM_INIT;

  int32_t batch = 0;
  std::vector<int32_t> qo_indptr;    // [batch + 1]
  std::vector<int32_t> kv_len;       // [batch]
  std::vector<int32_t> block_table;  // [batch, block_table_stride], or empty
  int64_t block_table_stride = 0;
  std::vector<int32_t> kv_indptr;   // [batch + 1]: CSR pages, or ragged rows; or empty
  std::vector<int32_t> kv_indices;  // CSR page ids; or empty
  int64_t num_kv_rows = 0;          // ragged only
  std::vector<int32_t> prefix_keys, prefix_indptr, prefix_requests;  // groups, named; or empty

  std::vector<int32_t> visible_prefix;  // [batch], or empty
  std::vector<int32_t> mask_width;      // [batch], or empty
  std::vector<int64_t> mask_indptr;     // [batch + 1] byte offsets, with mask_width
  std::vector<uint8_t> mask_bits;       // per request [qo_len, ceil(mask_width / 8)]

  std::vector<int32_t> block_indptr;   // [batch * kv_heads + 1], or empty: lists of blocks
  std::vector<int32_t> block_indices;  // rising in each list

  std::shared_ptr<Buffer> q, k,
      v;  // shared, so that variants of a call (page size, order) are cheap to make
  Strides q_strides, k_strides, v_strides;
  int64_t q_offset = 0, k_offset = 0,
          v_offset = 0;  // elements from the buffer's start to element (0, 0, 0)
  // With problem.v_in_k, v is k's buffer under k's strides.

  Scales k_scale, v_scale;  // of the problem's kinds
  float o_scale = 1.0f;     // of an o in e4m3

  std::vector<float> alibi_slopes;  // [qo_heads], or empty
  std::vector<float> sink_logits;   // [qo_heads], or empty

  // What a recording engine answered, if known: packed [qo_rows, qo_heads, head_dim_vo], [qo_rows,
  // qo_heads].
  std::shared_ptr<Buffer> recorded_o;
  DType recorded_o_dtype = DType::f32;
  std::vector<float> recorded_lse;  // natural log, rows x heads whatever the file's base and
                                    // layout; empty if not recorded
  std::string origin;               // for people
  std::string recorded_by;          // which engine answered, for people

  int32_t num_rows() const { return qo_indptr.empty() ? 0 : qo_indptr.back(); }
  int32_t group_size() const { return problem.qo_heads / problem.kv_heads; }

  /** Page id or row base and offset of key `token` of request `r`: element offset of (token, head
   * 0) in k or v. */
  int64_t kv_element_offset(int32_t r, int32_t token, const Strides& s, int64_t offset) const;

  float scale_at(const Scales& scales, int32_t r, int32_t token, int32_t kv_head) const;

  attnfold_lengths lengths() const;  // views into this call
  attnfold_tensors tensors() const;  // o and lse left NULL
};

/** Keys [0, sink_end) and [begin, end) of a request, those of them that are listed: what at least
 * one of its rows sees. Empty if it has no new token. */
struct KeyRange {
  int64_t begin = 0, end = 0;
  int64_t sink_end = 0;        // < begin, or 0
  std::vector<bool> listed{};  // [kv_len] with a block-sparse mask; empty: all

  /** Whether any key of [from, to) is among them. */
  bool meets(int64_t from, int64_t to) const {
    if (listed.empty()) return (from < end && to > begin && begin < end) || from < sink_end;
    for (int64_t key = from; key < std::min<int64_t>(to, end); ++key) {
      if (listed[static_cast<size_t>(key)] && (key < sink_end || key >= begin)) return true;
    }
    return false;
  }
};

/** Whether the problem's block-sparse mask comes as lists. */
inline bool has_block_lists(const attnfold_problem& p) {
  return p.sparse_block_size > 0 && p.sparse_local_blocks == 0 && p.sparse_vertical_stride == 0;
}

/** By the problem's masks alone, without the block-sparse one. */
KeyRange seen_keys(const attnfold_problem& problem, int32_t qo_len, int32_t kv_len);

/** The same for request r, with its visible prefix and listed blocks; keys that its mask has bits
 * for all count. */
KeyRange seen_keys(const Call& call, int32_t r);

/** An answer in the call's o_dtype, packed. */
struct Answer {
  Buffer o;                // [qo_rows, qo_heads, head_dim_vo]
  std::vector<float> lse;  // [qo_rows, qo_heads]
  attnfold_plan_report report{};
  std::string kernel, numerics_id;
};

/** Runs the engine through its public API.  o and lse are poisoned before the run.  On failure
 * `error` is set. */
struct RunResult {
  attnfold_status status = ATTNFOLD_OK;
  std::string error;
  Answer answer;
};
RunResult run_engine(const Call& call, const attnfold_execution& execution);

}  // namespace attnfold::check
