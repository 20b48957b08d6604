// Reads call files.  docs/call-format.md is the format; this file holds a file to it, line by line.
#include "check/call_file.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <memory>
#include <set>

#include "check/call_masks.h"
#include "check/call_scales.h"
#include "check/fields.h"
#include "check/safetensors.h"

namespace attnfold::check {
namespace {

constexpr const char* kFormat = "attnfold-call-1";
constexpr const char* kFormatFamily = "attnfold-call-";
constexpr int64_t kHeadDimStep = 8;
constexpr const char* kTypeNames[kNumDTypes] = {"F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8"};
constexpr double kLn2 = 0.693147180559945309417;

const std::set<std::string> kTensors = {"q",
                                        "qo_indptr",
                                        "k_cache",
                                        "v_cache",
                                        "block_table",
                                        "kv_len",
                                        "o",
                                        "lse",
                                        "kv_indptr",
                                        "kv_indices",
                                        "k",
                                        "v",
                                        "alibi_slopes",
                                        "sink_logits",
                                        "visible_prefix",
                                        "mask_width",
                                        "mask_bits",
                                        "k_scale",
                                        "v_scale",
                                        "block_indptr",
                                        "block_indices"};
const std::set<std::string> kMetadata = {"format",
                                         "mask",
                                         "sm_scale",
                                         "page_size",
                                         "kv_layout",
                                         "window_left",
                                         "window_right",
                                         "k_scale",
                                         "v_scale",
                                         "logits_softcap",
                                         "sink_tokens",
                                         "lse_base",
                                         "lse_layout",
                                         "origin",
                                         "recorded_by",
                                         "attention_chunk",
                                         "o_scale",
                                         "v_in_k",
                                         "sparse_block_size",
                                         "sparse_local_blocks",
                                         "sparse_vertical_stride",
                                         "sparse_head_step"};

bool is_note(const std::string& name) { return name.rfind("x_", 0) == 0; }

/** Builds a call from a container, checking everything on the way. */
class CallReader : private Fields {
 public:
  explicit CallReader(const Container& file) : Fields(file) {}

  /** The call; `unsupported` is the first sound feature that is not served, or "". */
  Call read(std::string* unsupported) {
    if (check_format()) read_all();
    *unsupported = unsupported_;
    return std::move(call_);
  }

  /** Format and names, before any data. */
  void check_header(std::string* unsupported) {
    if (check_format()) check_names();
    *unsupported = unsupported_;
  }

 private:
  void read_all() {
    check_names();
    read_masks_and_scale();
    read_q();
    if (has("k_cache") || has("v_cache")) {
      read_pool();
    } else {
      read_ragged();
    }
    read_scales(*this, "k_scale", &call_, &call_.problem.k_scale_kind, &call_.k_scale);
    read_scales(*this, "v_scale", &call_, &call_.problem.v_scale_kind, &call_.v_scale);
    read_o_scale(*this, &call_);
    read_per_head_terms();
    read_recorded();
    set_maxima();
  }

  // ------------------------------------------------ names and metadata

  void not_served(const std::string& text) {
    if (unsupported_.empty()) unsupported_ = text;
  }

  /** False for another version of the format, which cannot be judged by this one's rules. */
  bool check_format() {
    const std::string format = text("format");
    if (format == kFormat) return true;
    if (format.rfind(kFormatFamily, 0) != 0) fail("metadata format", kFormat, shown(format));
    not_served("metadata format: " + shown(format) + " is not served; the nearest is " + kFormat);
    return false;
  }

  void check_names() {
    for (const auto& [name, array] : file().arrays) {
      if (is_note(name) || kTensors.count(name) > 0) continue;
      fail("tensor " + shown(name), "a name of " + std::string(kFormat) + " or x_..",
           "one that it does not have");
    }
    for (const auto& [key, value] : file().metadata) {
      if (is_note(key) || kMetadata.count(key) > 0) continue;
      fail("metadata " + shown(key), "a key of " + std::string(kFormat) + " or x_..",
           "one that it does not have");
    }
    call_.origin = text("origin", "");
    call_.recorded_by = text("recorded_by", "");
  }

  /** The type of `array`, one of the first `num` that the format has. */
  DType type_of(const char* name, const Array& array, int num, const char* expected) const {
    for (int type = 0; type < num; ++type) {
      if (array.dtype == kTypeNames[type]) return static_cast<DType>(type);
    }
    fail(std::string("tensor ") + name, std::string("dtype ") + expected, array.dtype);
  }

  DType wide_type(const char* name, const Array& array) const {
    return type_of(name, array, 3, "F32, F16 or BF16");
  }

  DType kv_type(const char* name, const Array& array) const {
    return type_of(name, array, kNumDTypes, "F32, F16, BF16, F8_E4M3, F8_E5M2 or I8");
  }

  // ------------------------------------------------ the problem

  void read_masks_and_scale() {
    attnfold_problem& problem = call_.problem;
    const bool causal = is("mask", text("mask"), "causal", "none");
    problem.mask = causal ? ATTNFOLD_MASK_CAUSAL : ATTNFOLD_MASK_NONE;
    problem.sm_scale = number("sm_scale", text("sm_scale"), 0.0f);
    problem.window_left = integer("window_left", text("window_left", "-1"), -1);
    problem.window_right = integer("window_right", text("window_right", "-1"), -1);
    problem.attention_chunk = integer("attention_chunk", text("attention_chunk", "0"), 0);
    problem.sink_tokens = integer("sink_tokens", text("sink_tokens", "0"), 0);
    problem.sparse_block_size = block_field("sparse_block_size", true);
    const bool blocks = problem.sparse_block_size > 0;
    problem.sparse_local_blocks = block_field("sparse_local_blocks", blocks);
    problem.sparse_vertical_stride = block_field("sparse_vertical_stride", blocks);
    problem.sparse_head_step = block_field("sparse_head_step", problem.sparse_vertical_stride > 0);
    problem.logits_softcap = number("logits_softcap", text("logits_softcap", "0"), 0.0f);
  }

  /** A field of the block-sparse mask; 0 where it has no meaning. */
  int32_t block_field(const char* key, bool may_be_set) {
    const int32_t value = integer(key, text(key, "0"), 0);
    if (value > (may_be_set ? 1 << 30 : 0)) {
      fail(std::string("metadata ") + key,
           may_be_set ? "at most 2^30" : "0 (no blocks that it could speak of)",
           std::to_string(value));
    }
    return value;
  }

  void read_head_dim(const char* name, int64_t head_dim, int32_t* field) {
    require_positive(name, head_dim, "head_dim");
    if (head_dim % kHeadDimStep != 0 || head_dim > ATTNFOLD_MAX_HEAD_DIM) {
      not_served(std::string("tensor ") + name + ": head_dim " + std::to_string(head_dim) +
                 " is not served; multiples of " + std::to_string(kHeadDimStep) + " up to " +
                 std::to_string(ATTNFOLD_MAX_HEAD_DIM) + " are");
    }
    *field = static_cast<int32_t>(head_dim);
  }

  void read_q() {
    const Array& q = array("q", 3, "[qo_rows, qo_heads, head_dim_qk]");
    attnfold_problem& problem = call_.problem;
    problem.q_dtype = static_cast<attnfold_dtype>(wide_type("q", q));
    problem.o_dtype = problem.q_dtype;
    require_positive("q", q.shape[1], "number of heads");
    problem.qo_heads = static_cast<int32_t>(q.shape[1]);
    read_head_dim("q", q.shape[2], &problem.head_dim_qk);
    call_.q = copy_of(q);
    call_.q_strides = {0, q.shape[1] * q.shape[2], q.shape[2]};

    call_.qo_indptr = list("qo_indptr", -1, "[batch + 1]");
    if (call_.qo_indptr.empty()) fail("tensor qo_indptr", "shape [batch + 1]", "[0]");
    call_.batch = static_cast<int32_t>(call_.qo_indptr.size() - 1);
    if (call_.qo_indptr[0] != 0) {
      fail("tensor qo_indptr[0]", "0", std::to_string(call_.qo_indptr[0]));
    }
    require_rising("qo_indptr", call_.qo_indptr);
    if (call_.num_rows() != q.shape[0]) {
      fail(indexed("qo_indptr", call_.batch), "the rows of q, " + std::to_string(q.shape[0]),
           std::to_string(call_.num_rows()));
    }
  }

  /** Axes that k and v share, and their head dims. */
  void read_k_and_v(const char* k_name, const Array& k, const char* v_name, const char* shape,
                    size_t heads_axis) {
    attnfold_problem& problem = call_.problem;
    problem.kv_dtype = static_cast<attnfold_dtype>(kv_type(k_name, k));
    const int64_t kv_heads = k.shape[heads_axis];
    require_positive(k_name, kv_heads, "number of heads");
    if (problem.qo_heads % kv_heads != 0) {
      fail(std::string("tensor ") + k_name,
           "kv_heads that divide qo_heads, " + std::to_string(problem.qo_heads),
           std::to_string(kv_heads));
    }
    problem.kv_heads = static_cast<int32_t>(kv_heads);
    if (k.shape.back() != problem.head_dim_qk) {
      fail(std::string("tensor ") + k_name,
           "the head_dim of q, " + std::to_string(problem.head_dim_qk),
           std::to_string(k.shape.back()));
    }
    call_.k = copy_of(k);
    if (text("v_in_k", "0") == "0") {
      read_v(k_name, k, v_name, shape);
    } else {
      read_v_in_k(v_name);
    }
  }

  void read_v(const char* k_name, const Array& k, const char* v_name, const char* shape) {
    const Array& v = array(v_name, k.shape.size(), shape);
    kv_type(v_name, v);
    if (v.dtype != k.dtype) {
      fail(std::string("tensor ") + v_name, "dtype " + k.dtype + " as " + k_name, v.dtype);
    }
    std::vector<int64_t> v_shape = k.shape;
    v_shape.back() = v.shape.back();
    require_shape(v_name, v, v_shape, "as the keys, head_dim aside");
    read_head_dim(v_name, v.shape.back(), &call_.problem.head_dim_vo);
    call_.v = copy_of(v);
  }

  /** v is the first columns of k. */
  void read_v_in_k(const char* v_name) {
    require_absent(v_name, "metadata v_in_k");
    const int32_t width = integer("v_in_k", text("v_in_k"), 1);
    if (width > call_.problem.head_dim_qk) {
      fail("metadata v_in_k", "at most head_dim_qk, " + std::to_string(call_.problem.head_dim_qk),
           std::to_string(width));
    }
    read_head_dim("v, in k", width, &call_.problem.head_dim_vo);
    call_.problem.v_in_k = 1;
    call_.v = call_.k;
  }

  void require_absent(const char* name, const char* beside) const {
    if (has(name)) fail(std::string("tensor ") + name, std::string("none beside ") + beside, "one");
  }

  // ------------------------------------------------ paged KV

  void read_pool() {
    require_absent("k", "k_cache and v_cache");
    require_absent("v", "k_cache and v_cache");
    const bool nhd = is("kv_layout", text("kv_layout"), "NHD", "HND");
    const char* shape = nhd ? "[num_pages, page_size, kv_heads, head_dim]"
                            : "[num_pages, kv_heads, page_size, head_dim]";
    const Array& k = array("k_cache", 4, shape);
    const size_t token_axis = nhd ? 1 : 2, heads_axis = nhd ? 2 : 1;

    attnfold_problem& problem = call_.problem;
    problem.kv_storage = ATTNFOLD_KV_PAGED;
    problem.kv_layout = nhd ? ATTNFOLD_NHD : ATTNFOLD_HND;
    problem.page_size = integer("page_size", text("page_size"), 1);
    if (k.shape[token_axis] != problem.page_size) {
      fail("tensor k_cache", "pages of page_size, " + std::to_string(problem.page_size),
           std::to_string(k.shape[token_axis]));
    }
    problem.num_pages = k.shape[0];
    read_k_and_v("k_cache", k, "v_cache", shape, heads_axis);
    call_.k_strides = pool_strides(nhd, problem.head_dim_qk);
    call_.v_strides = problem.v_in_k ? call_.k_strides : pool_strides(nhd, problem.head_dim_vo);

    call_.kv_len = list("kv_len", call_.batch, "[batch]");
    for (int32_t r = 0; r < call_.batch; ++r) {
      if (call_.kv_len[r] < 0) {
        fail(indexed("kv_len", r), "at least 0", std::to_string(call_.kv_len[r]));
      }
    }
    read_request_masks(*this, &call_);
    if (has("block_table")) {
      read_block_table();
    } else {
      read_csr();
    }
  }

  Strides pool_strides(bool nhd, int64_t head_dim) const {
    const attnfold_problem& problem = call_.problem;
    const int64_t page = head_dim * problem.kv_heads * problem.page_size;
    if (nhd) return {page, head_dim * problem.kv_heads, head_dim};
    return {page, head_dim, head_dim * problem.page_size};
  }

  void read_block_table() {
    require_absent("kv_indptr", "block_table");
    require_absent("kv_indices", "block_table");
    const Array& table = array("block_table", 2, "[batch, max_pages]");
    require_shape("block_table", table, {call_.batch, table.shape[1]}, "[batch, max_pages]");
    call_.block_table_stride = table.shape[1];
    call_.block_table = values_i32("block_table", table);
    for (int32_t r = 0; r < call_.batch; ++r) {
      check_pages("block_table", r, r * call_.block_table_stride, call_.block_table_stride,
                  call_.block_table);
    }
  }

  void read_csr() {
    if (!has("kv_indptr") && !has("kv_indices")) {
      fail("tensor block_table", "one, or kv_indptr and kv_indices", "none");
    }
    call_.kv_indptr = list("kv_indptr", call_.batch + int64_t{1}, "[batch + 1]");
    require_rising("kv_indptr", call_.kv_indptr);
    call_.kv_indices = list("kv_indices", -1, "[kv_indptr[batch]]");
    if (static_cast<size_t>(call_.kv_indptr.back()) != call_.kv_indices.size()) {
      fail(indexed("kv_indptr", call_.batch),
           "the length of kv_indices, " + std::to_string(call_.kv_indices.size()),
           std::to_string(call_.kv_indptr.back()));
    }
    for (int32_t r = 0; r < call_.batch; ++r) {
      check_pages("kv_indices", r, call_.kv_indptr[r], call_.kv_indptr[r + 1] - call_.kv_indptr[r],
                  call_.kv_indices);
    }
  }

  /**
   * Request r has `num_pages` entries of `table` from `first` on: enough for its keys, and page ids
   * wherever a row may look.
   */
  void check_pages(const char* name, int32_t r, int64_t first, int64_t num_pages,
                   const std::vector<int32_t>& table) const {
    const int64_t page_size = call_.problem.page_size;
    const int64_t kv_len = call_.kv_len[r];
    if (kv_len > num_pages * page_size) {
      fail(indexed("kv_len", r),
           "0.." + std::to_string(num_pages * page_size) + " (" + std::to_string(num_pages) +
               " pages in " + name + " x page_size " + std::to_string(page_size) + ")",
           std::to_string(kv_len));
    }
    const KeyRange seen = seen_keys(call_, r);
    for (int64_t page = 0; page * page_size < seen.end; ++page) {
      if (!seen.meets(page * page_size, (page + 1) * page_size)) continue;
      const int32_t id = table[first + page];
      if (id >= 0 && id < call_.problem.num_pages) continue;
      fail(indexed(name, first + page) + " (request " + std::to_string(r) + ", page " +
               std::to_string(page) + ")",
           "a page id from 0 to " + std::to_string(call_.problem.num_pages - 1),
           std::to_string(id));
    }
  }

  // ------------------------------------------------ ragged KV

  void read_ragged() {
    if (!has("k") && !has("v")) fail("tensor k_cache", "a pool, or k and v", "neither");
    require_absent("block_table", "k and v");
    require_absent("kv_indices", "k and v");
    const Array& k = array("k", 3, "[kv_rows, kv_heads, head_dim_qk]");
    attnfold_problem& problem = call_.problem;
    problem.kv_storage = ATTNFOLD_KV_RAGGED;
    problem.kv_layout = ATTNFOLD_NHD;
    if (text("kv_layout", "NHD") != "NHD") {
      fail("metadata kv_layout", "NHD with k and v", shown(text("kv_layout")));
    }
    integer("page_size", text("page_size", "1"), 1);
    read_k_and_v("k", k, "v", "[kv_rows, kv_heads, head_dim_vo]", 1);
    call_.num_kv_rows = k.shape[0];
    call_.k_strides = {0, k.shape[1] * k.shape[2], k.shape[2]};
    const int64_t v_width = problem.head_dim_vo;
    call_.v_strides = problem.v_in_k ? call_.k_strides : Strides{0, k.shape[1] * v_width, v_width};

    call_.kv_indptr = list("kv_indptr", call_.batch + int64_t{1}, "[batch + 1]");
    require_rising("kv_indptr", call_.kv_indptr);
    if (call_.kv_indptr.back() > k.shape[0]) {
      fail(indexed("kv_indptr", call_.batch),
           "at most the rows of k, " + std::to_string(k.shape[0]),
           std::to_string(call_.kv_indptr.back()));
    }
    if (has("kv_len")) call_.kv_len = list("kv_len", call_.batch, "[batch]");
    for (int32_t r = 0; r < call_.batch; ++r) {
      const int32_t num_rows = call_.kv_indptr[r + 1] - call_.kv_indptr[r];
      if (!has("kv_len")) call_.kv_len.push_back(num_rows);
      if (call_.kv_len[r] >= 0 && call_.kv_len[r] <= num_rows) continue;
      fail(indexed("kv_len", r), "0.." + std::to_string(num_rows) + " (rows in kv_indptr)",
           std::to_string(call_.kv_len[r]));
    }
    read_request_masks(*this, &call_);
  }

  // ------------------------------------------------ the recorded answer, and the rest

  void read_recorded_o() {
    const attnfold_problem& problem = call_.problem;
    const Array& o = array("o", 3, "[qo_rows, qo_heads, head_dim_vo]");
    require_shape("o", o, {call_.num_rows(), problem.qo_heads, problem.head_dim_vo},
                  "[qo_rows, qo_heads, head_dim_vo]");
    const std::string& q_dtype = file().arrays.at("q").dtype;
    if (problem.o_dtype == ATTNFOLD_E4M3) {
      if (o.dtype != "F8_E4M3") fail("tensor o", "dtype F8_E4M3, for o_scale is given", o.dtype);
    } else if (o.dtype != q_dtype && o.dtype != "F32") {
      fail("tensor o", "dtype " + q_dtype + " as q, or F32, or F8_E4M3 with o_scale", o.dtype);
    }
    call_.recorded_o_dtype = kv_type("o", o);
    call_.problem.o_dtype = static_cast<attnfold_dtype>(call_.recorded_o_dtype);
    call_.recorded_o = copy_of(o);
  }

  void read_recorded_lse(bool base_e, bool rows_heads) {
    const int64_t rows = call_.num_rows(), heads = call_.problem.qo_heads;
    const char* axes = rows_heads ? "[qo_rows, qo_heads]" : "[qo_heads, qo_rows]";
    const Array& lse = array("lse", 2, axes);
    require_dtype("lse", lse, "F32");
    require_shape(
        "lse", lse,
        rows_heads ? std::vector<int64_t>{rows, heads} : std::vector<int64_t>{heads, rows}, axes);
    call_.recorded_lse.resize(rows * heads);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t from = rows_heads ? row * heads + head : head * rows + row;
        float value;
        std::memcpy(&value, lse.data + from * sizeof(float), sizeof(float));
        if (!base_e) value = static_cast<float>(value * kLn2);
        call_.recorded_lse[row * heads + head] = value;
      }
    }
  }

  void read_recorded() {
    const bool base_e = is("lse_base", text("lse_base", "e"), "e", "2");
    const bool rows_heads =
        is("lse_layout", text("lse_layout", "rows_heads"), "rows_heads", "heads_rows");
    if (has("o")) read_recorded_o();
    if (has("lse")) read_recorded_lse(base_e, rows_heads);
  }

  /** One float for each query head, or nothing. */
  std::vector<float> read_per_head(const char* name) {
    if (!has(name)) return {};
    const Array& per_head = array(name, 1, "[qo_heads]");
    require_shape(name, per_head, {call_.problem.qo_heads}, "[qo_heads]");
    require_dtype(name, per_head, "F32");
    const auto bytes = copy_of(per_head);
    std::vector<float> values(call_.problem.qo_heads);
    std::memcpy(values.data(), bytes->data(), values.size() * sizeof(float));
    return values;
  }

  void read_per_head_terms() {
    call_.alibi_slopes = read_per_head("alibi_slopes");
    call_.sink_logits = read_per_head("sink_logits");
  }

  void set_maxima() {
    attnfold_problem& problem = call_.problem;
    problem.max_batch = std::max(call_.batch, 1);
    problem.max_qo_rows = std::max(call_.num_rows(), 1);
    problem.max_kv_len = 1;
    for (int32_t len : call_.kv_len) problem.max_kv_len = std::max(problem.max_kv_len, len);
  }

  Call call_;
  std::string unsupported_;
};

LoadResult refusal(std::string text) {
  LoadResult result;
  result.error = std::move(text);
  return result;
}

/** A call, or with `header_alone` only whether its header is one of a call: bytes after the header
 * are then not looked at. */
LoadResult parse(const void* bytes, size_t size, const std::string& name, bool header_alone) {
  const std::string at = name + ": ";
  try {
    Container container;
    const std::string fault = parse_container(bytes, size, &container);
    if (!fault.empty()) return refusal(at + fault);
    LoadResult result;
    std::string unsupported;
    CallReader reader(container);
    if (header_alone) {
      reader.check_header(&unsupported);
    } else {
      result.call = reader.read(&unsupported);
    }
    if (unsupported.empty()) {
      result.ok = true;
      return result;
    }
    result = refusal(at + unsupported);
    result.unsupported = true;
    return result;
  } catch (const Malformed& fault) {
    return refusal(at + fault.text);
  } catch (const std::exception& fault) {
    return refusal(at + "cannot be read: " + fault.what());
  }
}

/** Reads `size` bytes of `file` on from where it stands; "" or what is wrong. */
std::string read_bytes(std::FILE* file, void* to, size_t size) {
  const size_t got = std::fread(to, 1, size, file);
  if (got == size) return "";
  return "expected " + std::to_string(size) + " bytes more, got " + std::to_string(got);
}

/** The header alone first: what is no call is not read whole. */
LoadResult read_call(std::FILE* file, size_t size, const std::string& path) {
  const std::string at = path + ": ";
  unsigned char length[kLengthBytes] = {};
  if (const std::string fault = read_bytes(file, length, std::min(size, kLengthBytes));
      !fault.empty())
    return refusal(at + fault);
  uint64_t header_bytes = 0;
  for (size_t i = kLengthBytes; i-- > 0;) header_bytes = header_bytes << 8 | length[i];
  // One that is too long is refused by its length.
  if (size < kLengthBytes || header_bytes > std::min(size - kLengthBytes, kMaxHeaderBytes))
    return parse(length, size, path, true);
  Buffer header(kLengthBytes + header_bytes);
  std::memcpy(header.data(), length, kLengthBytes);
  if (const std::string fault = read_bytes(file, header.data() + kLengthBytes, header_bytes);
      !fault.empty())
    return refusal(at + fault);
  LoadResult judged = parse(header.data(), size, path, true);
  if (!judged.ok) return judged;
  Buffer bytes(size);
  std::memcpy(bytes.data(), header.data(), header.size());
  if (const std::string fault =
          read_bytes(file, bytes.data() + header.size(), size - header.size());
      !fault.empty())
    return refusal(at + fault);
  return parse_call(bytes.data(), bytes.size(), path);
}

}  // namespace

LoadResult parse_call(const void* bytes, size_t size, const std::string& name_for_messages) {
  return parse(bytes, size, name_for_messages, false);
}

LoadResult load_call(const std::string& path) {
  std::error_code error;
  const bool regular = std::filesystem::is_regular_file(path, error);
  if (error) return refusal(path + ": expected a file, got: " + error.message());
  if (!regular) return refusal(path + ": expected a file, got something else");
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (error) return refusal(path + ": size cannot be read: " + error.message());
  try {
    const auto close = [](std::FILE* f) { std::fclose(f); };
    std::unique_ptr<std::FILE, decltype(close)> file(std::fopen(path.c_str(), "rb"), close);
    if (file == nullptr) return refusal(path + ": expected a readable file, got an error on open");
    return read_call(file.get(), size, path);
  } catch (const std::exception& fault) {
    return refusal(path + ": cannot be read: " + fault.what());
  }
}

}  // namespace attnfold::check
