#include "cuda/tensor_map.h"

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <string>

namespace attnfold::cuda {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

/** From the driver: the library does not link to it. */
EncodeTiled find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &result);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<EncodeTiled>(function);
}

EncodeTiled encode() {
  static const EncodeTiled function = find_encode();
  return function;
}

/** Sizes and strides of the dimensions after the first, strides in bytes, and the box. */
struct MapShape {
  cuuint32_t rank;
  cuuint64_t size[5], stride[4];
  cuuint32_t box[5];
};

Status encode_map(const char* name, DType type, const char* data, const MapShape& s,
                  CUtensorMap* map) {
  constexpr cuuint32_t kOnes[5] = {1, 1, 1, 1, 1};
  const CUresult result = encode()(
      map, type == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      s.rank, const_cast<char*>(data), s.size, s.stride, s.box, kOnes,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {ATTNFOLD_UNSUPPORTED,
          std::string(name) +
              ": expected strides that the tensor copy engine takes, got others (CUresult " +
              std::to_string(static_cast<int>(result)) + ")"};
}

}  // namespace

bool has_tensor_maps() { return encode() != nullptr; }

Status make_key_places(const char* name, const Problem& p, const View<const char>& view,
                       int64_t num_pages, int64_t num_rows, KeyPlaces* out) {
  const cuuint64_t columns = static_cast<cuuint64_t>(p.head_dim_vo / 64);
  const cuuint32_t box_columns = static_cast<cuuint32_t>(columns);
  const int64_t token = view.stride_token, head = view.stride_head;
  // Of a head whose stride is negative the last one is the first in memory.
  const int64_t lowest = head < 0 ? head * (p.kv_heads - 1) : 0;
  const char* data = view.data + 2 * lowest;
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(2 * elements); };
  if (p.ragged) {
    // [heads, columns, rows, 64]
    *out = {{}, 0, 0, head < 0 ? -1 : 1, head < 0 ? p.kv_heads - 1 : 0};
    const int64_t head_step = p.kv_heads > 1 ? std::abs(head) : 8;
    return encode_map(
        name, p.kv_dtype, data,
        {4,
         {64, static_cast<cuuint64_t>(num_rows), columns, static_cast<cuuint64_t>(p.kv_heads), 1},
         {bytes(token), 128, bytes(head_step), 0},
         {64, kBoxKeys / 2, box_columns, 1, 1}},
        &out->map);
  }
  // [places, 2, columns, 8, 64]: a box is 16 keys of a page, from a place that page, token and head
  // give together; places overlap.
  const int64_t page = view.stride_page;
  int64_t unit = std::gcd(std::gcd(page, token * kBoxKeys), head);
  if (unit == 0) unit = 8;
  const int64_t last = page / unit * (num_pages - 1) + token * (p.page_size - kBoxKeys) / unit +
                       std::abs(head) / unit * (p.kv_heads - 1);
  if (last >= INT32_MAX || page / unit > INT32_MAX || token * kBoxKeys / unit > INT32_MAX) {
    return {ATTNFOLD_UNSUPPORTED, std::string(name) +
                                      ": expected strides whose multiples count every 16 keys in "
                                      "31 bits, got " +
                                      std::to_string(page) + ", " + std::to_string(token) +
                                      " and " + std::to_string(head)};
  }
  *out = {{},
          static_cast<int32_t>(page / unit),
          static_cast<int32_t>(token * kBoxKeys / unit),
          static_cast<int32_t>(head / unit),
          static_cast<int32_t>(-lowest / unit)};
  return encode_map(name, p.kv_dtype, data,
                    {5,
                     {64, 8, columns, 2, static_cast<cuuint64_t>(last + 1)},
                     {bytes(token), 128, bytes(8 * token), bytes(unit)},
                     {64, 8, box_columns, 2, 1}},
                    &out->map);
}

}  // namespace attnfold::cuda
