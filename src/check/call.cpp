#include "check/call.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "check/device_call.h"

namespace attnfold::check {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kCanaryBytes = 64;
constexpr int kCanary = 0xc5;
constexpr int32_t kNothing = 0;  // something to point at where a table has no entry

/** A finite value in every storage type that no test expects: what a row holds that the engine
 * forgot to write. */
constexpr uint16_t kUnwritten = 0xdead;

struct PlanDestroyer {
  void operator()(attnfold_plan* plan) const { attnfold_plan_destroy(plan); }
};

/** Bytes for the engine to write, between two canaries. */
class Guarded {
 public:
  explicit Guarded(size_t bytes) : bytes_(bytes), buffer_(bytes + 2 * kCanaryBytes) {
    std::memset(buffer_.data(), kCanary, buffer_.size());
    for (size_t i = 0; i + 2 <= bytes; i += 2) std::memcpy(data() + i, &kUnwritten, 2);
  }
  std::byte* data() { return buffer_.data() + kCanaryBytes; }
  size_t size() const { return bytes_; }

  bool canaries_whole() const {
    const auto is_canary = [](std::byte b) { return b == std::byte{kCanary}; };
    const std::byte* end = buffer_.data() + buffer_.size();
    return std::all_of(buffer_.data(), buffer_.data() + kCanaryBytes, is_canary) &&
           std::all_of(end - kCanaryBytes, end, is_canary);
  }

  bool untouched() {
    for (size_t i = 0; i + 2 <= bytes_; i += 2) {
      if (std::memcmp(data() + i, &kUnwritten, 2) != 0) return false;
    }
    return true;
  }

 private:
  size_t bytes_;
  Buffer buffer_;
};

const float* first_scale(const Scales& scales) {
  return reinterpret_cast<const float*>(scales.values->data()) + scales.offset;
}

RunResult failure(attnfold_status status, std::string text) {
  RunResult result;
  result.status = status;
  result.error = std::move(text);
  return result;
}

RunResult engine_failure(attnfold_status status) { return failure(status, attnfold_last_error()); }

/** Fills the parts of the answer that the plan knows. */
attnfold_status describe(const attnfold_plan* plan, Answer* answer) {
  answer->report.struct_size = sizeof(answer->report);
  const attnfold_status status = attnfold_plan_get_report(plan, &answer->report);
  if (status != ATTNFOLD_OK) return status;
  answer->kernel = attnfold_plan_kernel(plan);
  answer->numerics_id = attnfold_plan_numerics_id(plan);
  return ATTNFOLD_OK;
}

/** Runs a planned call into guarded memory. */
RunResult run_planned(const Call& call, const attnfold_plan* plan) {
  const size_t rows = static_cast<size_t>(call.num_rows()) * call.problem.qo_heads;
  const int o_bytes = dtype_bytes(static_cast<DType>(call.problem.o_dtype));
  Guarded o(rows * call.problem.head_dim_vo * o_bytes);
  Guarded lse(rows * sizeof(float));

  // One byte more than asked, so that the workspace can begin at an odd address.
  const size_t workspace_bytes = attnfold_plan_workspace_bytes(plan);
  Guarded workspace(workspace_bytes + 1);
  std::memset(workspace.data(), 0xff, workspace.size());
  workspace.data()[0] = std::byte{kCanary};

  attnfold_tensors tensors = call.tensors();
  tensors.o = o.data();
  tensors.lse = reinterpret_cast<float*>(lse.data());
  const attnfold_status status =
      attnfold_plan_run(plan, &tensors, workspace.data() + 1, workspace_bytes, nullptr);

  const bool workspace_whole =
      workspace.canaries_whole() && workspace.data()[0] == std::byte{kCanary};
  if (!o.canaries_whole()) return failure(ATTNFOLD_INTERNAL, "o: canary beside it is broken");
  if (!lse.canaries_whole()) return failure(ATTNFOLD_INTERNAL, "lse: canary beside it is broken");
  if (!workspace_whole) return failure(ATTNFOLD_INTERNAL, "workspace: canary beside it is broken");
  if (status != ATTNFOLD_OK) {
    RunResult result = engine_failure(status);
    if (o.untouched() && lse.untouched()) return result;
    return failure(ATTNFOLD_INTERNAL,
                   "o or lse: expected untouched by a failing run; it said: " + result.error);
  }

  RunResult result;
  result.answer.o = Buffer(o.size());
  if (o.size() > 0) std::memcpy(result.answer.o.data(), o.data(), o.size());
  result.answer.lse.resize(rows);
  if (rows > 0) std::memcpy(result.answer.lse.data(), lse.data(), lse.size());
  return result;
}

}  // namespace

Buffer::Buffer(size_t bytes) : size_(bytes) {
  void* p = nullptr;
  if (posix_memalign(&p, kAlignment, std::max<size_t>(bytes, 1)) != 0) throw std::bad_alloc();
  data_.reset(static_cast<std::byte*>(p));
}

KeyRange seen_keys(const attnfold_problem& problem, int32_t qo_len, int32_t kv_len) {
  // The last token stands at the last key and sees it; the first token sees furthest back.
  if (qo_len <= 0 || kv_len <= 0) return {};
  const int64_t first_position = int64_t{kv_len} - qo_len;
  int64_t begin = 0;
  if (problem.window_left >= 0) begin = std::max(begin, first_position - problem.window_left);
  if (problem.attention_chunk > 0) {
    const int64_t n = problem.attention_chunk;
    begin = std::max(begin, std::max<int64_t>(first_position, 0) / n * n);
  }
  if (problem.sink_tokens >= begin) return {0, kv_len, 0};
  return {begin, kv_len, problem.sink_tokens};
}

namespace {

/** Keys of request r whose block some query under some kv head sees. */
std::vector<bool> listed_keys(const Call& call, int32_t r) {
  const attnfold_problem& p = call.problem;
  const int64_t size = p.sparse_block_size, kv_len = call.kv_len[r];
  std::vector<bool> blocks(static_cast<size_t>((kv_len + size - 1) / size));
  const int64_t qo_len = call.qo_indptr[r + 1] - call.qo_indptr[r];
  const int64_t nearest = std::max<int64_t>(kv_len - qo_len, 0) / size - p.sparse_local_blocks + 1;
  for (int32_t h = 0; h < p.kv_heads; ++h) {
    for (size_t b = 0; b < blocks.size() && !has_block_lists(p); ++b) {
      const int64_t block = static_cast<int64_t>(b);
      const bool is_vertical =
          p.sparse_vertical_stride > 0 &&
          (block + int64_t{h} * p.sparse_head_step + 1) % p.sparse_vertical_stride == 0;
      if (is_vertical || (p.sparse_local_blocks > 0 && block >= nearest)) blocks[b] = true;
    }
    if (!has_block_lists(p)) continue;
    const size_t list = static_cast<size_t>(r) * p.kv_heads + h;
    for (int32_t i = call.block_indptr[list]; i < call.block_indptr[list + 1]; ++i)
      blocks[call.block_indices[i]] = true;
  }
  std::vector<bool> keys(static_cast<size_t>(kv_len));
  for (int64_t j = 0; j < kv_len; ++j) keys[j] = blocks[j / size];
  return keys;
}

}  // namespace

KeyRange seen_keys(const Call& call, int32_t r) {
  const int32_t qo_len = call.qo_indptr[r + 1] - call.qo_indptr[r], kv_len = call.kv_len[r];
  KeyRange keys = seen_keys(call.problem, qo_len, kv_len);
  if (qo_len <= 0 || kv_len <= 0) return keys;
  if (!call.mask_width.empty() && call.mask_width[r] > 0) {
    keys.begin = std::min<int64_t>(keys.begin, kv_len - call.mask_width[r]);
  }
  if (!call.visible_prefix.empty()) {
    keys.sink_end = std::max<int64_t>(keys.sink_end, call.visible_prefix[r]);
  }
  if (keys.sink_end >= keys.begin) keys.begin = keys.sink_end = 0;
  if (call.problem.sparse_block_size > 0) keys.listed = listed_keys(call, r);
  return keys;
}

int64_t Call::kv_element_offset(int32_t r, int32_t token, const Strides& s, int64_t offset) const {
  if (problem.kv_storage == ATTNFOLD_KV_RAGGED) {
    return offset + (int64_t{kv_indptr[r]} + token) * s.token;
  }
  const int32_t page_in_request = token / problem.page_size;
  const int32_t slot = token % problem.page_size;
  const int64_t page = block_table.empty() ? kv_indices[int64_t{kv_indptr[r]} + page_in_request]
                                           : block_table[r * block_table_stride + page_in_request];
  return offset + page * s.page + slot * s.token;
}

float Call::scale_at(const Scales& scales, int32_t r, int32_t token, int32_t kv_head) const {
  if (scales.values == nullptr) return 1.0f;
  const int64_t at = kv_element_offset(r, token, scales.strides, scales.offset);
  return load_f32(scales.values->data(), DType::f32, at + kv_head * scales.strides.head);
}

attnfold_lengths Call::lengths() const {
  const auto pointer = [](const std::vector<int32_t>& v) {
    return v.empty() ? &kNothing : v.data();
  };
  attnfold_lengths lengths = ATTNFOLD_LENGTHS_INIT;
  lengths.batch = batch;
  lengths.qo_indptr = pointer(qo_indptr);
  lengths.kv_len = pointer(kv_len);
  if (!visible_prefix.empty()) lengths.visible_prefix = visible_prefix.data();
  if (!mask_width.empty()) {
    lengths.mask_width = mask_width.data();
    lengths.mask_indptr = mask_indptr.data();
    lengths.mask_bits = mask_bits.data();
  }
  if (!block_indptr.empty()) {
    lengths.block_indptr = block_indptr.data();
    lengths.block_indices = pointer(block_indices);
  }
  if (problem.kv_storage == ATTNFOLD_KV_RAGGED) {
    lengths.kv_indptr = pointer(kv_indptr);
    lengths.num_kv_rows = num_kv_rows;
  } else if (kv_indptr.empty()) {
    lengths.block_table = pointer(block_table);
    lengths.block_table_stride = block_table_stride;
  } else {
    lengths.kv_indptr = kv_indptr.data();
    lengths.kv_indices = pointer(kv_indices);
  }
  lengths.num_prefix_groups = static_cast<int32_t>(prefix_keys.size());
  lengths.prefix_keys = pointer(prefix_keys);
  lengths.prefix_indptr = pointer(prefix_indptr);
  lengths.prefix_requests = pointer(prefix_requests);
  return lengths;
}

attnfold_tensors Call::tensors() const {
  const int q_bytes = dtype_bytes(static_cast<DType>(problem.q_dtype));
  const int kv_bytes = dtype_bytes(static_cast<DType>(problem.kv_dtype));
  attnfold_tensors tensors = ATTNFOLD_TENSORS_INIT;
  tensors.q = q->data() + q_offset * q_bytes;
  tensors.q_stride_row = q_strides.token;
  tensors.q_stride_head = q_strides.head;
  tensors.k = k->data() + k_offset * kv_bytes;
  tensors.k_stride_page = k_strides.page;
  tensors.k_stride_token = k_strides.token;
  tensors.k_stride_head = k_strides.head;
  if (!problem.v_in_k) {
    tensors.v = v->data() + v_offset * kv_bytes;
    tensors.v_stride_page = v_strides.page;
    tensors.v_stride_token = v_strides.token;
    tensors.v_stride_head = v_strides.head;
  }
  if (k_scale.values != nullptr) {
    tensors.k_scale = first_scale(k_scale);
    tensors.k_scale_stride_page = k_scale.strides.page;
    tensors.k_scale_stride_token = k_scale.strides.token;
    tensors.k_scale_stride_head = k_scale.strides.head;
  }
  if (v_scale.values != nullptr) {
    tensors.v_scale = first_scale(v_scale);
    tensors.v_scale_stride_page = v_scale.strides.page;
    tensors.v_scale_stride_token = v_scale.strides.token;
    tensors.v_scale_stride_head = v_scale.strides.head;
  }
  if (problem.o_dtype == ATTNFOLD_E4M3) tensors.o_scale = &o_scale;
  if (!alibi_slopes.empty()) tensors.alibi_slopes = alibi_slopes.data();
  if (!sink_logits.empty()) tensors.sink_logits = sink_logits.data();
  return tensors;
}

RunResult run_engine(const Call& call, const attnfold_execution& execution) {
  if (execution.backend == ATTNFOLD_CUDA) return run_on_device(call, execution);
  attnfold_plan* created = nullptr;
  attnfold_status status = attnfold_plan_create(&call.problem, &execution, &created);
  const std::unique_ptr<attnfold_plan, PlanDestroyer> plan(created);
  if (status != ATTNFOLD_OK) return engine_failure(status);

  const attnfold_lengths lengths = call.lengths();
  status = attnfold_plan_update(plan.get(), &lengths, nullptr);
  if (status != ATTNFOLD_OK) return engine_failure(status);

  RunResult result = run_planned(call, plan.get());
  if (result.status != ATTNFOLD_OK) return result;
  status = describe(plan.get(), &result.answer);
  return status == ATTNFOLD_OK ? std::move(result) : engine_failure(status);
}

}  // namespace attnfold::check
