// Writes call files, packed, in the problem's own storage and layout.
#include <charconv>
#include <cmath>
#include <cstring>

#include "check/call_file.h"
#include "check/safetensors.h"

namespace attnfold::check {
namespace {

const char* const kDtypeNames[kNumDTypes] = {"F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8"};

class CallWriter {
 public:
  explicit CallWriter(const Call& call) : call_(call) {}

  /** `o` and `lse` packed; either may be NULL. */
  std::string write(const void* o, DType o_dtype, const float* lse, const std::string& recorded_by,
                    const std::string& path) {
    put_metadata(recorded_by);
    put_q();
    put_kv();
    put_scales("k_scale", call_.problem.k_scale_kind, call_.k_scale);
    put_scales("v_scale", call_.problem.v_scale_kind, call_.v_scale);
    put_tables();
    put_request_masks();
    put_per_head();
    const attnfold_problem& problem = call_.problem;
    const int64_t rows = call_.num_rows(), heads = problem.qo_heads;
    if (o != nullptr)
      put("o", kDtypeNames[static_cast<int>(o_dtype)], {rows, heads, problem.head_dim_vo}, o);
    if (lse != nullptr) put("lse", "F32", {rows, heads}, lse);
    return write_container(file_, path);
  }

 private:
  void put(const char* name, const char* dtype, std::vector<int64_t> shape, const void* data) {
    size_t bytes = 4;  // I32 and F32
    if (std::strcmp(dtype, "U8") == 0) bytes = 1;
    for (int type = 0; type < kNumDTypes; ++type) {
      if (std::strcmp(dtype, kDtypeNames[type]) == 0) bytes = dtype_bytes(static_cast<DType>(type));
    }
    for (int64_t dim : shape) bytes *= static_cast<size_t>(dim);
    file_.arrays[name] = {dtype, std::move(shape), static_cast<const std::byte*>(data), bytes};
  }

  /** The elements of a strided view, its axes in the order given, slowest first. */
  void put_strided(const char* name, DType dtype, const Buffer& from, int64_t offset,
                   const int64_t (&sizes)[3], const int64_t (&strides)[3], int64_t head_dim,
                   std::vector<int64_t> shape) {
    const int64_t element_bytes = dtype_bytes(dtype);
    const int64_t row_bytes = head_dim * element_bytes;
    packed_.emplace_back(sizes[0] * sizes[1] * sizes[2] * row_bytes);
    std::byte* to = packed_.back().data();
    for (int64_t a = 0; a < sizes[0]; ++a) {
      for (int64_t b = 0; b < sizes[1]; ++b) {
        for (int64_t c = 0; c < sizes[2]; ++c) {
          const int64_t at = offset + a * strides[0] + b * strides[1] + c * strides[2];
          std::memcpy(to, from.data() + at * element_bytes, row_bytes);
          to += row_bytes;
        }
      }
    }
    put(name, kDtypeNames[static_cast<int>(dtype)], std::move(shape), packed_.back().data());
  }

  void put_metadata(const std::string& recorded_by) {
    const attnfold_problem& problem = call_.problem;
    auto& metadata = file_.metadata;
    metadata["format"] = "attnfold-call-1";
    metadata["mask"] = problem.mask == ATTNFOLD_MASK_CAUSAL ? "causal" : "none";
    metadata["sm_scale"] = number(sm_scale());
    if (problem.window_left >= 0) metadata["window_left"] = std::to_string(problem.window_left);
    if (problem.window_right >= 0) metadata["window_right"] = std::to_string(problem.window_right);
    if (problem.attention_chunk > 0) {
      metadata["attention_chunk"] = std::to_string(problem.attention_chunk);
    }
    const std::pair<const char*, int32_t> blocks[] = {
        {"sparse_block_size", problem.sparse_block_size},
        {"sparse_local_blocks", problem.sparse_local_blocks},
        {"sparse_vertical_stride", problem.sparse_vertical_stride},
        {"sparse_head_step", problem.sparse_head_step}};
    for (const auto& [key, value] : blocks) {
      if (value > 0) metadata[key] = std::to_string(value);
    }
    if (problem.sink_tokens > 0) metadata["sink_tokens"] = std::to_string(problem.sink_tokens);
    if (problem.logits_softcap > 0) metadata["logits_softcap"] = number(problem.logits_softcap);
    const bool head_major = paged() && problem.kv_layout == ATTNFOLD_HND;
    metadata["kv_layout"] = head_major ? "HND" : "NHD";
    if (paged()) metadata["page_size"] = std::to_string(problem.page_size);
    if (problem.v_in_k) metadata["v_in_k"] = std::to_string(problem.head_dim_vo);
    if (problem.o_dtype == ATTNFOLD_E4M3) metadata["o_scale"] = number(call_.o_scale);
    if (!call_.origin.empty()) metadata["origin"] = call_.origin;
    if (!recorded_by.empty()) metadata["recorded_by"] = recorded_by;
  }

  bool paged() const { return call_.problem.kv_storage == ATTNFOLD_KV_PAGED; }

  float sm_scale() const {
    if (call_.problem.sm_scale != ATTNFOLD_SM_SCALE_DEFAULT) return call_.problem.sm_scale;
    return static_cast<float>(1.0 / std::sqrt(static_cast<double>(call_.problem.head_dim_qk)));
  }

  /** The shortest digits that read back as the same float. */
  static std::string number(float x) {
    char digits[64];
    const auto end = std::to_chars(digits, digits + sizeof(digits), x).ptr;
    return std::string(digits, end);
  }

  void put_q() {
    const attnfold_problem& problem = call_.problem;
    const int64_t rows = call_.num_rows(), heads = problem.qo_heads, dim = problem.head_dim_qk;
    put_strided("q", static_cast<DType>(problem.q_dtype), *call_.q, call_.q_offset,
                {1, rows, heads}, {0, call_.q_strides.token, call_.q_strides.head}, dim,
                {rows, heads, dim});
  }

  void put_kv() {
    const attnfold_problem& problem = call_.problem;
    const DType dtype = static_cast<DType>(problem.kv_dtype);
    put_kv_tensor(paged() ? "k_cache" : "k", dtype, *call_.k, call_.k_offset, call_.k_strides,
                  problem.head_dim_qk);
    if (problem.v_in_k) return;
    put_kv_tensor(paged() ? "v_cache" : "v", dtype, *call_.v, call_.v_offset, call_.v_strides,
                  problem.head_dim_vo);
  }

  void put_scales(const char* name, attnfold_scale_kind kind, const Scales& scales) {
    if (kind == ATTNFOLD_SCALE_PER_TENSOR) {
      file_.metadata[name] = number(load_f32(scales.values->data(), DType::f32, scales.offset));
    } else if (kind == ATTNFOLD_SCALE_PER_HEAD) {
      const int64_t heads = call_.problem.kv_heads;
      put_strided(name, DType::f32, *scales.values, scales.offset, {1, 1, heads},
                  {0, 0, scales.strides.head}, 1, {heads});
    } else if (kind == ATTNFOLD_SCALE_PER_TOKEN) {
      put_kv_tensor(name, DType::f32, *scales.values, scales.offset, scales.strides, 1);
      file_.arrays[name].shape.pop_back();  // of 1
    }
  }

  void put_kv_tensor(const char* name, DType dtype, const Buffer& from, int64_t offset,
                     const Strides& strides, int64_t dim) {
    const attnfold_problem& problem = call_.problem;
    const int64_t heads = problem.kv_heads, pages = problem.num_pages, slots = problem.page_size;
    if (!paged()) {
      const int64_t rows = num_kv_rows();
      put_strided(name, dtype, from, offset, {1, rows, heads}, {0, strides.token, strides.head},
                  dim, {rows, heads, dim});
    } else if (problem.kv_layout == ATTNFOLD_NHD) {
      put_strided(name, dtype, from, offset, {pages, slots, heads},
                  {strides.page, strides.token, strides.head}, dim, {pages, slots, heads, dim});
    } else {
      put_strided(name, dtype, from, offset, {pages, heads, slots},
                  {strides.page, strides.head, strides.token}, dim, {pages, heads, slots, dim});
    }
  }

  int64_t num_kv_rows() const {
    if (call_.num_kv_rows > 0 || call_.kv_indptr.empty()) return call_.num_kv_rows;
    return call_.kv_indptr.back();
  }

  /** Of a table with one entry for each request and one more; a call of no request may hold none.
   */
  void put_indptr(const char* name, const std::vector<int32_t>& indptr) {
    static constexpr int32_t kZero = 0;
    const void* data = indptr.empty() ? &kZero : indptr.data();
    put(name, "I32", {call_.batch + int64_t{1}}, data);
  }

  void put_tables() {
    const int64_t batch = call_.batch;
    put_indptr("qo_indptr", call_.qo_indptr);
    put("kv_len", "I32", {batch}, call_.kv_len.data());
    if (!paged()) {
      put_indptr("kv_indptr", call_.kv_indptr);
    } else if (call_.kv_indptr.empty()) {
      put("block_table", "I32", {batch, call_.block_table_stride}, call_.block_table.data());
    } else {
      put_indptr("kv_indptr", call_.kv_indptr);
      put("kv_indices", "I32", {static_cast<int64_t>(call_.kv_indices.size())},
          call_.kv_indices.data());
    }
  }

  void put_request_masks() {
    const int64_t batch = call_.batch;
    if (!call_.visible_prefix.empty()) {
      put("visible_prefix", "I32", {batch}, call_.visible_prefix.data());
    }
    if (!call_.block_indptr.empty()) {
      put("block_indptr", "I32", {static_cast<int64_t>(call_.block_indptr.size())},
          call_.block_indptr.data());
      put("block_indices", "I32", {static_cast<int64_t>(call_.block_indices.size())},
          call_.block_indices.data());
    }
    if (call_.mask_width.empty()) return;
    put("mask_width", "I32", {batch}, call_.mask_width.data());
    packed_.emplace_back(call_.mask_bits.size());
    std::byte* to = packed_.back().data();
    int64_t bytes = 0;  // without what lies between requests
    for (int64_t r = 0; r < batch; ++r) {
      const int64_t qo_len = call_.qo_indptr[r + 1] - call_.qo_indptr[r];
      const int64_t n = qo_len * ((int64_t{call_.mask_width[r]} + 7) / 8);
      if (n > 0) std::memcpy(to + bytes, call_.mask_bits.data() + call_.mask_indptr[r], n);
      bytes += n;
    }
    put("mask_bits", "U8", {bytes}, to);
  }

  void put_per_head() {
    const int64_t heads = call_.problem.qo_heads;
    if (!call_.alibi_slopes.empty()) put("alibi_slopes", "F32", {heads}, call_.alibi_slopes.data());
    if (!call_.sink_logits.empty()) put("sink_logits", "F32", {heads}, call_.sink_logits.data());
  }

  const Call& call_;
  Container file_;
  std::vector<Buffer> packed_;
};

}  // namespace

std::string save_call(const Call& call, const std::string& path) {
  const void* o = call.recorded_o == nullptr ? nullptr : call.recorded_o->data();
  const float* lse = call.recorded_lse.empty() ? nullptr : call.recorded_lse.data();
  return CallWriter(call).write(o, call.recorded_o_dtype, lse, call.recorded_by, path);
}

std::string by_line(const Answer& answer) {
  return "attnfold, " + answer.kernel + ", numerics " + answer.numerics_id;
}

std::string save_answer(const Call& call, const Answer& answer, const std::string& path) {
  return CallWriter(call).write(answer.o.data(), static_cast<DType>(call.problem.o_dtype),
                                answer.lse.data(), by_line(answer), path);
}

}  // namespace attnfold::check
