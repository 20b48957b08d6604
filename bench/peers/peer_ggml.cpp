// ggml: keys and values contiguous, one request after the other; its flash attention or its plain
// operators.
//   peer_ggml BATCH QO_LEN KV_LEN QO_HEADS KV_HEADS HEAD_DIM THREADS bf16|f16 flash|plain
#include <cmath>
#include <string>

#include "ggml-cpu.h"
#include "ggml.h"
#include "peer.h"

namespace {

void fill(ggml_tensor* t, bool bf16, uint64_t seed) {
  if (t->type == GGML_TYPE_F32) {
    for (int64_t i = 0; i < ggml_nelements(t); ++i) {
      const uint16_t half = random_value(true, &seed);
      const uint32_t word = static_cast<uint32_t>(half) << 16;
      std::memcpy(static_cast<char*>(t->data) + i * 4, &word, 4);
    }
    return;
  }
  for (int64_t i = 0; i < ggml_nelements(t); ++i)
    static_cast<uint16_t*>(t->data)[i] = random_value(bf16, &seed);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 10) return 2;
  const Shape s = shape_of(argv);
  const bool flash = std::string(argv[9]) == "flash";
  const ggml_type type = s.bf16 ? GGML_TYPE_BF16 : GGML_TYPE_F16;
  const size_t kv = size_t{2} * s.batch * s.kv_len * s.kv_heads * s.head_dim * 2;
  const size_t scores = flash ? 0 : size_t{3} * 4 * s.batch * s.qo_len * s.qo_heads * s.kv_len;
  const size_t rows = size_t{8} * 4 * s.batch * s.qo_len * s.qo_heads * s.head_dim;
  const size_t mask = size_t{4} * (s.qo_len + 64) * s.kv_len;
  ggml_init_params params = {kv + scores + rows + mask + (size_t{64} << 20), nullptr, false};
  ggml_context* c = ggml_init(params);
  ggml_tensor* q = ggml_new_tensor_4d(c, GGML_TYPE_F32, s.head_dim, s.qo_len, s.qo_heads, s.batch);
  ggml_tensor* k = ggml_new_tensor_4d(c, type, s.head_dim, s.kv_len, s.kv_heads, s.batch);
  ggml_tensor* v = flash ? ggml_new_tensor_4d(c, type, s.head_dim, s.kv_len, s.kv_heads, s.batch)
                         : ggml_new_tensor_4d(c, type, s.kv_len, s.head_dim, s.kv_heads, s.batch);
  fill(q, s.bf16, 1);
  fill(k, s.bf16, 2);
  fill(v, s.bf16, 3);
  ggml_tensor* m = nullptr;
  if (s.qo_len > 1) {  // causal
    m = ggml_new_tensor_2d(c, GGML_TYPE_F16, s.kv_len, (s.qo_len + 63) / 64 * 64);
    for (int i = 0; i < (s.qo_len + 63) / 64 * 64; ++i) {
      for (int j = 0; j < s.kv_len; ++j) {
        static_cast<uint16_t*>(m->data)[static_cast<size_t>(i) * s.kv_len + j] =
            j <= s.kv_len - s.qo_len + i ? 0 : 0xfc00;
      }
    }
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  ggml_tensor* out;
  if (flash) {
    out = ggml_flash_attn_ext(c, q, k, v, m, scale, 0, 0);
  } else {
    ggml_tensor* p = ggml_soft_max_ext(c, ggml_mul_mat(c, k, q), m, scale, 0);
    out = ggml_mul_mat(c, v, p);
  }
  ggml_cgraph* graph = ggml_new_graph(c);
  ggml_build_forward_expand(graph, out);
  ggml_threadpool_params pool_params = ggml_threadpool_params_default(s.threads);
  ggml_threadpool* pool = ggml_threadpool_new(&pool_params);
  ggml_cplan plan = ggml_graph_plan(graph, s.threads, pool);
  std::vector<uint8_t> work(plan.work_size);
  plan.work_data = work.data();
  return serve(s.threads, [&] {
    ggml_threadpool_resume(pool);
    ggml_graph_compute(graph, &plan);
    ggml_threadpool_pause(pool);
  });
}
