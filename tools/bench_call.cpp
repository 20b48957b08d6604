#include "bench_call.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "check/generate.h"

namespace attnfold::tools {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

/** A buffer whose element `offset` lies on a huge page, filled with values of [-1, 1]. */
struct Filled {
  std::shared_ptr<check::Buffer> buffer;
  int64_t offset;
};

Filled fill(int64_t num_elements, DType type, uint64_t seed) {
  const size_t element_bytes = static_cast<size_t>(dtype_bytes(type));
  auto buffer = std::make_shared<check::Buffer>(static_cast<size_t>(num_elements) * element_bytes +
                                                2 * kHugePageBytes);
  advise_huge_pages(buffer->data(), buffer->size());
  const uintptr_t start = reinterpret_cast<uintptr_t>(buffer->data());
  const uintptr_t aligned = (start + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  std::byte* data = buffer->data() + (aligned - start);
  const float unit = type == DType::i8 ? 127 * 0x1p-31f : 0x1p-31f;
  uint64_t state = seed * 2 + 1;
  for (int64_t i = 0; i < num_elements; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    store_f32(data, type, i, static_cast<float>(static_cast<int32_t>(state >> 32)) * unit);
  }
  return {std::move(buffer), static_cast<int64_t>((aligned - start) / element_bytes)};
}

void set_q(check::Call& call) {
  const attnfold_problem& p = call.problem;
  const int64_t row = int64_t{p.qo_heads} * p.head_dim_qk;
  Filled q = fill(call.num_rows() * row, static_cast<DType>(p.q_dtype), 3);
  call.q = std::move(q.buffer);
  call.q_offset = q.offset;
  call.q_strides = {0, row, p.head_dim_qk};
}

/** Queries in bf16, over keys and values of one scale. */
void set_scales(check::Call& call, float scale) {
  attnfold_problem& p = call.problem;
  p.q_dtype = p.o_dtype = ATTNFOLD_BF16;
  p.k_scale_kind = p.v_scale_kind = ATTNFOLD_SCALE_PER_TENSOR;
  call.k_scale.values = std::make_shared<check::Buffer>(sizeof(float));
  store_f32(call.k_scale.values->data(), DType::f32, 0, scale);
  call.v_scale = call.k_scale;
}

/** Page tables over a pool whose pages are handed out in random order. */
void set_pages(check::Call& call) {
  const int32_t page_size = call.problem.page_size;
  auto pages_of = [&](int32_t kv_len) { return (kv_len + page_size - 1) / page_size; };
  int32_t most = 0, num_pages = 0;
  for (const int32_t kv_len : call.kv_len) {
    most = std::max(most, pages_of(kv_len));
    num_pages += pages_of(kv_len);
  }
  std::vector<int32_t> ids(static_cast<size_t>(num_pages));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937_64(7));
  call.problem.num_pages = num_pages;
  call.block_table_stride = most;
  call.block_table.assign(call.kv_len.size() * static_cast<size_t>(most), 0);
  auto id = ids.begin();
  for (size_t r = 0; r < call.kv_len.size(); ++r) {
    const int32_t count = pages_of(call.kv_len[r]);
    std::copy_n(id, count, call.block_table.begin() + static_cast<int64_t>(r) * most);
    id += count;
  }
}

}  // namespace

BenchShape decode_shape(int32_t batch, int32_t kv_len, int32_t qo_heads, int32_t kv_heads) {
  const size_t n = static_cast<size_t>(batch);
  return {fmt::format("{} x {}", batch, kv_len), qo_heads, kv_heads, std::vector<int32_t>(n, 1),
          std::vector<int32_t>(n, kv_len)};
}

BenchShape ragged_shape(int32_t qo_heads, int32_t kv_heads) {
  constexpr int32_t kBatch = 64;
  std::mt19937_64 random(64);
  BenchShape shape{"ragged 64", qo_heads, kv_heads, std::vector<int32_t>(kBatch, 1), {}};
  for (int32_t r = 0; r < kBatch; ++r) {
    // Sum of 12 uniforms: a normal draw that is the same with every C++ library.
    double normal = -6;
    for (int i = 0; i < 12; ++i) normal += static_cast<double>(random() >> 11) * 0x1p-53;
    shape.kv_len.push_back(std::clamp(static_cast<int32_t>(512 * std::exp(normal)), 1, 8192));
  }
  return shape;
}

BenchShape mla_shape(int32_t kv_len) {
  BenchShape shape = decode_shape(1, kv_len, 128, 1);
  shape.name += " mla";
  shape.head_dim = 576;
  shape.head_dim_in_k = 512;
  return shape;
}

BenchShape prefill_shape(int32_t qo_len, int32_t kv_len, int32_t qo_heads, int32_t kv_heads) {
  const std::string name =
      qo_len == kv_len ? fmt::format("causal {}", qo_len) : fmt::format("{} on {}", qo_len, kv_len);
  return {name, qo_heads, kv_heads, {qo_len}, {kv_len}};
}

check::Call make_call(const BenchShape& shape) {
  check::Call call;
  attnfold_problem& p = call.problem;
  p.qo_heads = shape.qo_heads;
  p.kv_heads = shape.kv_heads;
  p.head_dim_qk = p.head_dim_vo = shape.head_dim;
  p.kv_dtype = p.q_dtype = p.o_dtype = shape.dtype;
  const DType type = static_cast<DType>(shape.dtype);
  if (is_8_bit(type)) set_scales(call, type == DType::i8 ? 1.0f / 127 : 1.0f);
  p.page_size = shape.page_size;
  call.batch = static_cast<int32_t>(shape.qo_len.size());
  call.kv_len = shape.kv_len;
  call.qo_indptr.assign(1, 0);
  for (const int32_t qo_len : shape.qo_len)
    call.qo_indptr.push_back(call.qo_indptr.back() + qo_len);
  p.max_batch = call.batch;
  p.max_qo_rows = call.num_rows();
  p.max_kv_len = *std::max_element(shape.kv_len.begin(), shape.kv_len.end());
  set_pages(call);
  set_q(call);

  const int64_t token = int64_t{p.kv_heads} * shape.head_dim;
  const int64_t pool = p.num_pages * p.page_size * token;
  Filled k = fill(pool, type, 1);
  call.k = std::move(k.buffer);
  call.k_offset = k.offset;
  call.k_strides = {p.page_size * token, token, shape.head_dim};
  if (shape.head_major)
    call.k_strides = {p.page_size * token, shape.head_dim, int64_t{p.page_size} * shape.head_dim};
  call.v_strides = call.k_strides;
  if (shape.head_dim_in_k > 0) {
    p.head_dim_vo = shape.head_dim_in_k;
    p.v_in_k = 1;
    call.v = call.k;
    call.v_offset = call.k_offset;
    return call;
  }
  Filled v = fill(pool, type, 2);
  call.v = std::move(v.buffer);
  call.v_offset = v.offset;
  return call;
}

check::Call prefix_call(int32_t batch, int32_t prefix, int32_t own, int32_t qo_heads,
                        int32_t kv_heads) {
  check::Call call = make_call(decode_shape(batch, prefix + own, qo_heads, kv_heads));
  for (int32_t r = 1; r < batch; ++r) check::share_prefix(&call, 0, r, prefix);
  return call;
}

check::Call with_qo_heads(const check::Call& call, int32_t qo_heads) {
  check::Call other = call;
  other.problem.qo_heads = qo_heads;
  set_q(other);
  return other;
}

std::vector<Piece> table_pieces(const check::Call& call) {
  const int64_t element_bytes = dtype_bytes(static_cast<DType>(call.problem.kv_dtype));
  const int32_t page_size = call.problem.page_size;
  const int64_t token_bytes =
      int64_t{call.problem.kv_heads} * call.problem.head_dim_qk * element_bytes;
  std::vector<Piece> pieces;
  for (int32_t r = 0; r < call.batch; ++r) {
    const int32_t kv_len = call.kv_len[static_cast<size_t>(r)];
    for (int32_t token = 0; token < kv_len; token += page_size) {
      const int64_t bytes = std::min(page_size, kv_len - token) * token_bytes;
      const int64_t k = call.kv_element_offset(r, token, call.k_strides, call.k_offset);
      const int64_t v = call.kv_element_offset(r, token, call.v_strides, call.v_offset);
      pieces.push_back({call.k->data() + k * element_bytes, bytes});
      if (!call.problem.v_in_k) pieces.push_back({call.v->data() + v * element_bytes, bytes});
    }
  }
  return pieces;
}

std::vector<Piece> pool_pieces(const check::Call& call) {
  const int64_t element_bytes = dtype_bytes(static_cast<DType>(call.problem.kv_dtype));
  const int64_t bytes = call.problem.num_pages * call.k_strides.page * element_bytes;
  std::vector<Piece> pieces = {{call.k->data() + call.k_offset * element_bytes, bytes}};
  if (!call.problem.v_in_k)
    pieces.push_back({call.v->data() + call.v_offset * element_bytes, bytes});
  return pieces;
}

}  // namespace attnfold::tools
