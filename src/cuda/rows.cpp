// The CUDA backend's kernel table: known to every build, so that the matrix of what is served does
// not depend on it.
#include "cuda/backend.h"

namespace attnfold::cuda {
namespace {

constexpr KernelRow kRows[kNumKernelRows] = {{"cuda/bf16", DType::bf16, "cuda-mma-1/bf16"},
                                             {"cuda/f16", DType::f16, "cuda-mma-1/f16"}};
constexpr int32_t kMaxHeadDim = 256;

}  // namespace

const KernelRow& kernel_row(int index) { return kRows[index]; }

std::string why_row_rejects(const KernelRow& row, const attnfold_problem& p) {
  const auto served = [](const std::string& field, const std::string& serves,
                         const std::string& needs) {
    return field + ": serves " + serves + ", needs " + needs;
  };
  const std::string type = dtype_name(row.dtype);
  const auto name = [](attnfold_dtype t) { return dtype_name(static_cast<DType>(t)); };
  if (name(p.kv_dtype) != type) return served("kv_dtype", type, name(p.kv_dtype));
  if (name(p.q_dtype) != type) return served("q_dtype", type, name(p.q_dtype));
  if (name(p.o_dtype) != type && p.o_dtype != ATTNFOLD_F32)
    return served("o_dtype", type + " or f32", name(p.o_dtype));
  if (p.head_dim_qk > kMaxHeadDim) {
    return served("head_dim_qk", "8.." + std::to_string(kMaxHeadDim),
                  std::to_string(p.head_dim_qk));
  }
  if (p.head_dim_vo != p.head_dim_qk)
    return served("head_dim_vo", "head_dim_qk", std::to_string(p.head_dim_vo));
  if (p.v_in_k) return served("v_in_k", "0", std::to_string(p.v_in_k));
  if (p.k_scale_kind) return served("k_scale_kind", "no scales", std::to_string(p.k_scale_kind));
  if (p.v_scale_kind) return served("v_scale_kind", "no scales", std::to_string(p.v_scale_kind));
  if (p.sparse_block_size)
    return served("sparse_block_size", "0", std::to_string(p.sparse_block_size));
  return "";
}

#if !defined(ATTNFOLD_WITH_CUDA)

std::string why_not_here() { return "this build has no CUDA backend (ATTNFOLD_CUDA is OFF)"; }

namespace {

Status not_in_this_build() {
  return {ATTNFOLD_UNSUPPORTED,
          "backend: expected one that this build has, got ATTNFOLD_CUDA; " + why_not_here()};
}

}  // namespace

Status create_plan(const attnfold_problem*, const attnfold_execution&, std::unique_ptr<AnyPlan>*) {
  return not_in_this_build();
}
Status merge(const MergeWork&, const attnfold_execution&) { return not_in_this_build(); }
Status append(const AppendWork&, const attnfold_execution&) { return not_in_this_build(); }
Status copy_pages(const CopyWork&, const attnfold_execution&) { return not_in_this_build(); }
Status map_slots(const SlotWork&, const attnfold_execution&) { return not_in_this_build(); }

#endif

}  // namespace attnfold::cuda
