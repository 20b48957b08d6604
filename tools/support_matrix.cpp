#include "support_matrix.h"

#include <fmt/format.h>

#include <functional>
#include <vector>

#include "command.h"
#include "core/dtype.h"

namespace attnfold::tools {
namespace {

using Change = std::function<void(attnfold_problem&)>;

/** A line of the matrix: yes or no for each row. */
struct Feature {
  const char* name;
  Change change;
};

attnfold_dtype dtype_of(const std::string& name) {
  int type = 0;
  while (type < kNumDTypes - 1 && name != dtype_name(static_cast<DType>(type))) ++type;
  return static_cast<attnfold_dtype>(type);
}

bool serves(int32_t row, const attnfold_problem& problem) {
  return attnfold_kernel_serves(row, &problem) == ATTNFOLD_OK;
}

/** A CPU row that the machine lacks serves nothing there; what CUDA rows serve, any machine says.
 */
bool can_be_asked(const attnfold_kernel_info& row) {
  return row.available != 0 || std::string(row.isa) == "cuda";
}

/** "8..576 by 8", or the runs of head dims that row serves. */
std::string head_dims(int32_t row, const attnfold_problem& plain) {
  std::string text;
  for (int32_t d = 8; d <= ATTNFOLD_MAX_HEAD_DIM; d += 8) {
    auto serves_dim = [&](int32_t dim) {
      attnfold_problem p = plain;
      p.head_dim_qk = p.head_dim_vo = dim;
      return dim >= 8 && dim <= ATTNFOLD_MAX_HEAD_DIM && serves(row, p);
    };
    if (!serves_dim(d)) continue;
    int32_t last = d;
    while (serves_dim(last + 8)) last += 8;
    text += text.empty() ? "" : ", ";
    text += last == d ? fmt::format("{}", d) : fmt::format("{}..{} by 8", d, last);
    d = last;
  }
  return text.empty() ? "none" : text;
}

const std::vector<Feature>& features() {
  static const std::vector<Feature> kFeatures = {
      {"o in f32", [](attnfold_problem& p) { p.o_dtype = ATTNFOLD_F32; }},
      {"o in e4m3 with a scale", [](attnfold_problem& p) { p.o_dtype = ATTNFOLD_E4M3; }},
      {"scales of k and v per tensor",
       [](attnfold_problem& p) { p.k_scale_kind = p.v_scale_kind = ATTNFOLD_SCALE_PER_TENSOR; }},
      {"scales per kv head",
       [](attnfold_problem& p) { p.k_scale_kind = p.v_scale_kind = ATTNFOLD_SCALE_PER_HEAD; }},
      {"scales per token and kv head",
       [](attnfold_problem& p) { p.k_scale_kind = p.v_scale_kind = ATTNFOLD_SCALE_PER_TOKEN; }},
      {"v in the first columns of k (MLA)",
       [](attnfold_problem& p) {
         p.qo_heads = 128;
         p.kv_heads = 1;
         p.head_dim_qk = 576;
         p.head_dim_vo = 512;
         p.v_in_k = 1;
       }},
      {"head_dim_qk != head_dim_vo",
       [](attnfold_problem& p) {
         p.head_dim_qk = 192;
         p.head_dim_vo = 128;
       }},
      {"group size 1", [](attnfold_problem& p) { p.qo_heads = p.kv_heads = 8; }},
      {"group size 71 (any)",
       [](attnfold_problem& p) {
         p.qo_heads = 71;
         p.kv_heads = 1;
       }},
      {"causal (bottom-right)", [](attnfold_problem& p) { p.mask = ATTNFOLD_MASK_CAUSAL; }},
      {"no mask", [](attnfold_problem& p) { p.mask = ATTNFOLD_MASK_NONE; }},
      {"window left and right",
       [](attnfold_problem& p) {
         p.window_left = 100;
         p.window_right = 3;
       }},
      {"attention chunks", [](attnfold_problem& p) { p.attention_chunk = 256; }},
      {"sink tokens",
       [](attnfold_problem& p) {
         p.window_left = 100;
         p.sink_tokens = 4;
       }},
      {"block-sparse: lists of blocks per request and kv head",
       [](attnfold_problem& p) { p.sparse_block_size = 64; }},
      {"block-sparse: local and vertical blocks",
       [](attnfold_problem& p) {
         p.sparse_block_size = 64;
         p.sparse_local_blocks = 16;
         p.sparse_vertical_stride = 8;
         p.sparse_head_step = 1;
       }},
      {"soft-cap", [](attnfold_problem& p) { p.logits_softcap = 30.0f; }},
      {"pages of 1 token",
       [](attnfold_problem& p) {
         p.page_size = 1;
         p.num_pages = 4096;
       }},
      {"pages of any size", [](attnfold_problem& p) { p.page_size = 37; }},
      {"token-major pages (NHD)", [](attnfold_problem& p) { p.kv_layout = ATTNFOLD_NHD; }},
      {"head-major pages (HND)", [](attnfold_problem& p) { p.kv_layout = ATTNFOLD_HND; }},
      {"ragged and contiguous KV", [](attnfold_problem& p) { p.kv_storage = ATTNFOLD_KV_RAGGED; }},
  };
  return kFeatures;
}

}  // namespace

attnfold_problem plain_problem(const attnfold_kernel_info& row) {
  attnfold_problem p = ATTNFOLD_PROBLEM_INIT;
  p.qo_heads = 8;
  p.kv_heads = 2;
  p.kv_dtype = dtype_of(row.kv_dtype);
  if (is_8_bit(static_cast<DType>(p.kv_dtype)))  // which have to have some
    p.k_scale_kind = p.v_scale_kind = ATTNFOLD_SCALE_PER_TENSOR;
  const std::string q_dtypes = row.q_dtypes;
  p.q_dtype = dtype_of(q_dtypes.substr(0, q_dtypes.find(' ')));
  p.o_dtype = p.q_dtype;
  p.num_pages = 64;
  p.max_batch = 4;
  p.max_qo_rows = 64;
  p.max_kv_len = 1024;
  return p;
}

std::string support_matrix() {
  const std::vector<attnfold_kernel_info> rows = kernel_table();
  std::string text =
      "| kernel row | q | kv | head dim | numerics id |\n| --- | --- | --- | --- | --- |\n";
  for (size_t i = 0; i < rows.size(); ++i) {
    const attnfold_kernel_info& row = rows[i];
    const std::string dims = can_be_asked(row)
                                 ? head_dims(static_cast<int32_t>(i), plain_problem(row))
                                 : "not on this machine";
    text += fmt::format("| `{}` | {} | {} | {} | `{}` |\n", row.name, row.q_dtypes, row.kv_dtype,
                        dims, row.numerics_id);
  }
  text += "\n| feature | rows that serve it |\n| --- | --- |\n";
  for (const Feature& feature : features()) {
    std::string cpu, cuda, without;
    bool any_cpu = false;
    const auto add = [](std::string& names, const char* name) {
      names += fmt::format("{}`{}`", names.empty() ? "" : ", ", name);
    };
    for (size_t i = 0; i < rows.size(); ++i) {
      if (!can_be_asked(rows[i])) continue;
      const bool on_cpu = std::string(rows[i].isa) != "cuda";
      attnfold_problem problem = plain_problem(rows[i]);
      feature.change(problem);
      if (serves(static_cast<int32_t>(i), problem)) {
        any_cpu = any_cpu || on_cpu;
        add(on_cpu ? cpu : cuda, rows[i].name);
      } else if (on_cpu) {
        add(without, rows[i].name);
      }
    }
    if (any_cpu && without.empty()) cpu = "every CPU row";
    const std::string names = cpu.empty() || cuda.empty() ? cpu + cuda : cpu + ", " + cuda;
    text += fmt::format("| {} | {} |\n", feature.name, names.empty() ? "none" : names);
  }
  return text;
}

}  // namespace attnfold::tools
