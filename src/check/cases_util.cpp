#include "check/cases_util.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace attnfold::check::cases {

bool is_fast(const Context& context) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
  (void)context;
  return false;
#else
  attnfold_problem problem = ATTNFOLD_PROBLEM_INIT;
  problem.num_pages = 1;
  problem.max_batch = problem.max_qo_rows = problem.max_kv_len = 1;
  const Plan plan(problem, execution(context));
  return plan.get() != nullptr &&
         std::string(attnfold_plan_kernel(plan.get())).find("scalar") == std::string::npos;
#endif
}

Spec make_spec(Shape shape, DType dtype, int32_t page_size, attnfold_mask_kind mask, Lengths qo_len,
               Lengths kv_len) {
  Spec spec;
  attnfold_problem& p = spec.problem;
  p.qo_heads = shape.qo_heads;
  p.kv_heads = shape.kv_heads;
  p.head_dim_qk = shape.head_dim_qk;
  p.head_dim_vo = shape.head_dim_vo;
  p.kv_dtype = static_cast<attnfold_dtype>(dtype);
  p.q_dtype = p.o_dtype = is_8_bit(dtype) ? ATTNFOLD_BF16 : p.kv_dtype;
  if (is_8_bit(dtype)) p.k_scale_kind = p.v_scale_kind = ATTNFOLD_SCALE_PER_TENSOR;
  p.kv_storage = page_size == kRagged ? ATTNFOLD_KV_RAGGED : ATTNFOLD_KV_PAGED;
  p.page_size = page_size == kRagged ? 16 : page_size;
  p.mask = mask;
  spec.qo_len = std::move(qo_len);
  spec.kv_len = std::move(kv_len);
  return spec;
}

namespace {

std::shared_ptr<Buffer> zeros(int64_t elements, attnfold_dtype dtype) {
  const size_t bytes =
      static_cast<size_t>(std::max<int64_t>(elements, 1)) * dtype_bytes(static_cast<DType>(dtype));
  auto buffer = std::make_shared<Buffer>(bytes);
  std::memset(buffer->data(), 0, bytes);
  return buffer;
}

/** Packed strides of k or v, and the elements that they span. */
int64_t pack(const attnfold_problem& p, int32_t width, int64_t tokens, Strides& s) {
  s.head = width;
  s.token = static_cast<int64_t>(p.kv_heads) * width;
  s.page = p.page_size * s.token;
  return tokens * s.token;
}

/** Scales of 1. */
Scales unit_scales(const attnfold_problem& p, attnfold_scale_kind kind, int64_t tokens) {
  Scales scales;
  if (kind == ATTNFOLD_SCALE_NONE) return scales;
  int64_t n = p.kv_heads;
  if (kind == ATTNFOLD_SCALE_PER_TOKEN) n = pack(p, 1, tokens, scales.strides);
  scales.strides.head = kind == ATTNFOLD_SCALE_PER_TENSOR ? 0 : 1;
  scales.values = zeros(n, ATTNFOLD_F32);
  for (int64_t i = 0; i < n; ++i) store_f32(scales.values->data(), DType::f32, i, 1.0f);
  return scales;
}

}  // namespace

Call zero_call(const Spec& spec) {
  Call call;
  call.problem = spec.problem;
  attnfold_problem& p = call.problem;
  p.kv_layout = ATTNFOLD_NHD;
  call.batch = static_cast<int32_t>(spec.qo_len.size());
  call.kv_len = spec.kv_len;
  call.qo_indptr.assign(1, 0);
  for (int32_t n : spec.qo_len) call.qo_indptr.push_back(call.qo_indptr.back() + n);
  p.max_batch = call.batch;
  p.max_qo_rows = call.num_rows();
  p.max_kv_len = call.batch == 0 ? 0 : *std::max_element(call.kv_len.begin(), call.kv_len.end());
  int64_t tokens = 0;
  if (p.kv_storage == ATTNFOLD_KV_RAGGED) {
    call.kv_indptr.assign(1, 0);
    for (int32_t n : spec.kv_len) call.kv_indptr.push_back(call.kv_indptr.back() + n);
    tokens = call.num_kv_rows = call.kv_indptr.back();
  } else {
    call.block_table_stride = std::max<int64_t>(1, (p.max_kv_len + p.page_size - 1) / p.page_size);
    call.block_table.assign(static_cast<size_t>(call.batch * call.block_table_stride), 0x7ffffff0);
    int32_t next = 0;
    for (int32_t r = 0; r < call.batch; ++r) {
      for (int32_t i = 0; i * static_cast<int64_t>(p.page_size) < call.kv_len[r]; ++i) {
        call.block_table[r * call.block_table_stride + i] = next++;
      }
    }
    p.num_pages = next;
    tokens = static_cast<int64_t>(next) * p.page_size;
  }
  call.q_strides.head = p.head_dim_qk;
  call.q_strides.token = static_cast<int64_t>(p.qo_heads) * p.head_dim_qk;
  call.q = zeros(call.num_rows() * call.q_strides.token, p.q_dtype);
  call.k = zeros(pack(p, p.head_dim_qk, tokens, call.k_strides), p.kv_dtype);
  if (p.v_in_k) {
    call.v = call.k;
    call.v_strides = call.k_strides;
  } else {
    call.v = zeros(pack(p, p.head_dim_vo, tokens, call.v_strides), p.kv_dtype);
  }
  call.k_scale = unit_scales(p, p.k_scale_kind, tokens);
  call.v_scale = unit_scales(p, p.v_scale_kind, tokens);
  return call;
}

float noise(uint64_t seed, int64_t a, int64_t b, int64_t c, int64_t d) {
  uint64_t x = seed * 0x9e3779b97f4a7c15u + 1;
  for (int64_t part : {a, b, c, d}) {
    x = (x ^ static_cast<uint64_t>(part)) * 0xbf58476d1ce4e5b9u;
    x ^= x >> 29;
  }
  x *= 0x94d049bb133111ebu;
  return static_cast<float>(static_cast<int64_t>(x) >> 40) * 0x1p-23f;
}

void fill_buffer(Buffer& buffer, DType dtype, float value) {
  const int64_t n = static_cast<int64_t>(buffer.size()) / dtype_bytes(dtype);
  for (int64_t i = 0; i < n; ++i) store_f32(buffer.data(), dtype, i, value);
}

void fill_noise(Call& call, uint64_t seed) {
  fill_q(call, [&](int r, int t, int h, int e) { return 1.7f * noise(seed, r, t, h, e); });
  fill_k(call, [&](int r, int t, int h, int e) { return 1.7f * noise(seed + 1, r, t, h, e); });
  fill_v(call, [&](int r, int t, int h, int e) { return 1.7f * noise(seed + 2, r, t, h, e); });
}

void fill_page(Call& call, int32_t page, float value) {
  const auto fill = [&](Buffer& buffer, const Strides& s, int64_t offset, int32_t width) {
    for (int32_t t = 0; t < call.problem.page_size; ++t) {
      for (int32_t h = 0; h < call.problem.kv_heads; ++h) {
        const int64_t at = offset + page * s.page + t * s.token + h * s.head;
        for (int32_t e = 0; e < width; ++e) {
          store_f32(buffer.data(), static_cast<DType>(call.problem.kv_dtype), at + e, value);
        }
      }
    }
  };
  fill(*call.k, call.k_strides, call.k_offset, call.problem.head_dim_qk);
  fill(*call.v, call.v_strides, call.v_offset, call.problem.head_dim_vo);
}

Call with_extra_pages(const Call& call, int32_t extra, float value) {
  Call out = call;
  const int64_t bytes = dtype_bytes(static_cast<DType>(call.problem.kv_dtype));
  const auto grow = [&](std::shared_ptr<Buffer>& buffer, const Strides& s, int64_t offset) {
    const size_t need =
        static_cast<size_t>((offset + (call.problem.num_pages + extra) * s.page) * bytes);
    auto grown = std::make_shared<Buffer>(std::max(need, buffer->size()));
    fill_buffer(*grown, static_cast<DType>(call.problem.kv_dtype), value);
    std::memcpy(grown->data(), buffer->data(),
                std::min(buffer->size(),
                         static_cast<size_t>((offset + call.problem.num_pages * s.page) * bytes)));
    buffer = std::move(grown);
  };
  grow(out.k, out.k_strides, out.k_offset);
  if (out.problem.v_in_k) {
    out.v = out.k;
  } else {
    grow(out.v, out.v_strides, out.v_offset);
  }
  out.problem.num_pages += extra;
  return out;
}

Call deep_copy(const Call& call) {
  Call out = call;
  for (std::shared_ptr<Buffer>* b : {&out.q, &out.k, &out.v}) {
    auto copy = std::make_shared<Buffer>((*b)->size());
    std::memcpy(copy->data(), (*b)->data(), (*b)->size());
    *b = std::move(copy);
  }
  if (out.problem.v_in_k) out.v = out.k;
  for (Scales* scales : {&out.k_scale, &out.v_scale}) {
    if (scales->values == nullptr) continue;
    auto copy = std::make_shared<Buffer>(scales->values->size());
    std::memcpy(copy->data(), scales->values->data(), copy->size());
    scales->values = std::move(copy);
  }
  return out;
}

attnfold_kv_pool pool_of(Call& call) {
  const attnfold_problem& p = call.problem;
  const int64_t bytes = dtype_bytes(static_cast<DType>(p.kv_dtype));
  attnfold_kv_pool pool = ATTNFOLD_KV_POOL_INIT;
  pool.k = call.k->data() + call.k_offset * bytes;
  pool.k_stride_page = call.k_strides.page;
  pool.k_stride_token = call.k_strides.token;
  pool.k_stride_head = call.k_strides.head;
  if (!p.v_in_k) {
    pool.v = call.v->data() + call.v_offset * bytes;
    pool.v_stride_page = call.v_strides.page;
    pool.v_stride_token = call.v_strides.token;
    pool.v_stride_head = call.v_strides.head;
  }
  pool.kv_dtype = p.kv_dtype;
  pool.kv_heads = p.kv_heads;
  pool.head_dim_qk = p.head_dim_qk;
  pool.head_dim_vo = p.head_dim_vo;
  pool.page_size = p.page_size;
  pool.num_pages = p.num_pages;
  return pool;
}

namespace {

/** Keys [begin[r], end[r]) of each request, one row after the other, and two rows of NaN. */
std::vector<std::byte> new_rows(const Call& from, const Buffer& buffer, const Strides& strides,
                                int64_t offset, int32_t width, const Lengths& begin,
                                const Lengths& end) {
  const DType type = static_cast<DType>(from.problem.kv_dtype);
  const size_t head_bytes = static_cast<size_t>(width * dtype_bytes(type));
  std::vector<std::byte> rows;
  for (int32_t r = 0; r < from.batch; ++r) {
    for (int32_t token = begin[r]; token < end[r]; ++token) {
      const int64_t at = from.kv_element_offset(r, token, strides, offset);
      for (int32_t h = 0; h < from.problem.kv_heads; ++h) {
        const std::byte* head = buffer.data() + (at + h * strides.head) * dtype_bytes(type);
        rows.insert(rows.end(), head, head + head_bytes);
      }
    }
  }
  const size_t real = rows.size();
  rows.resize(real + 2 * static_cast<size_t>(from.problem.kv_heads) * head_bytes);
  for (size_t at = real; at < rows.size(); at += static_cast<size_t>(dtype_bytes(type)))
    store_f32(rows.data() + at, type, 0, kNaN);
  return rows;
}

}  // namespace

std::string append_keys(const Call& from, const Lengths& begin, const Lengths& end, Call& to) {
  Lengths qo_indptr = {0};
  for (int32_t r = 0; r < from.batch; ++r)
    qo_indptr.push_back(qo_indptr.back() + end[r] - begin[r]);
  attnfold_lengths lengths = to.lengths();
  lengths.qo_indptr = qo_indptr.data();
  lengths.kv_len = end.data();
  std::vector<int64_t> slots(static_cast<size_t>(qo_indptr.back()) + 2);
  if (attnfold_slot_mapping(&lengths, to.problem.page_size, to.problem.num_pages, nullptr,
                            static_cast<int64_t>(slots.size()), slots.data()) != ATTNFOLD_OK)
    return std::string("attnfold_slot_mapping: ") + attnfold_last_error();
  const std::vector<std::byte> k =
      new_rows(from, *from.k, from.k_strides, from.k_offset, from.problem.head_dim_qk, begin, end);
  const std::vector<std::byte> v =
      new_rows(from, *from.v, from.v_strides, from.v_offset, from.problem.head_dim_vo, begin, end);
  attnfold_kv_rows rows = ATTNFOLD_KV_ROWS_INIT;
  rows.num_tokens = static_cast<int64_t>(slots.size());
  rows.k = k.data();
  if (!to.problem.v_in_k) rows.v = v.data();
  rows.dtype = from.problem.kv_dtype;
  rows.slots = slots.data();
  const attnfold_kv_pool pool = pool_of(to);
  if (attnfold_append(&pool, &rows, nullptr) != ATTNFOLD_OK)
    return std::string("attnfold_append: ") + attnfold_last_error();
  return "";
}

namespace {

/** Ragged keys begin n rows later. */
void move_keys(Call* call, int64_t n) {
  call->k_offset += n * call->k_strides.token;
  call->v_offset += n * call->v_strides.token;
  call->k_scale.offset += n * call->k_scale.strides.token;
  call->v_scale.offset += n * call->v_scale.strides.token;
}

}  // namespace

Call token_call(const Call& call, int32_t r, int32_t i, int32_t kv_len) {
  Call out = call;
  out.recorded_o.reset();
  out.recorded_lse.clear();
  out.batch = 1;
  out.qo_indptr = {0, 1};
  out.kv_len = {kv_len};
  if (!call.visible_prefix.empty()) out.visible_prefix = {std::min(call.visible_prefix[r], kv_len)};
  out.q_offset += (call.qo_indptr[r] + i) * call.q_strides.token;
  if (!call.block_table.empty()) {
    const auto begin = call.block_table.begin() + r * call.block_table_stride;
    out.block_table.assign(begin, begin + call.block_table_stride);
  } else if (!call.kv_indices.empty()) {
    out.kv_indices.assign(call.kv_indices.begin() + call.kv_indptr[r],
                          call.kv_indices.begin() + call.kv_indptr[r + 1]);
    out.kv_indptr = {0, static_cast<int32_t>(out.kv_indices.size())};
  } else if (!call.kv_indptr.empty()) {
    move_keys(&out, call.kv_indptr[r]);
    out.kv_indptr = {0, call.kv_indptr[r + 1] - call.kv_indptr[r]};
    out.num_kv_rows = out.kv_indptr[1];
  }
  return out;
}

Call skip_keys(const Call& call, const Lengths& skip, const Lengths& kv_len) {
  Call out = call;
  out.kv_len = kv_len;
  if (call.batch == 0) return out;
  const int32_t first = skip[0];  // offsets stay from 0: the first goes into the addresses
  for (int32_t r = 0; r <= call.batch; ++r)
    out.kv_indptr[r] += (r < call.batch ? skip[r] : 0) - first;
  move_keys(&out, first);
  out.num_kv_rows -= first;
  return out;
}

attnfold_execution execution(const Context& context, int32_t num_workers, uint64_t cut_seed,
                             int32_t num_threads) {
  attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
  e.isa = context.isa;
  e.num_workers = num_workers;
  e.cut_seed = cut_seed;
  e.num_threads = num_threads;
  return e;
}

std::string run(const Call& call, const attnfold_execution& execution, Answer& out) {
  RunResult result = run_engine(call, execution);
  if (result.status != ATTNFOLD_OK) {
    return std::string("the engine said ") + attnfold_status_name(result.status) + ": " +
           result.error;
  }
  out = std::move(result.answer);
  return "";
}

std::string in(const std::string& heading, const std::string& text) {
  return text.empty() ? "" : heading + ": " + text;
}

std::string text_of(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

namespace {

std::string judge_with(const Call& call, const ref::Truth& truth, const std::byte* o,
                       const float* lse, Bound bound) {
  const DType type = static_cast<DType>(call.problem.o_dtype);
  const Judgement j = judge(call, truth, o, type, lse, type == DType::f32 ? 0 : 1, bound);
  return j.right ? "" : j.text;
}

}  // namespace

std::string judge_answer(const Call& call, const Answer& answer) {
  return judge_with(call, ref::answer(call), answer.o.data(), answer.lse.data(),
                    bound_of(answer.numerics_id));
}

std::string judge_tokens(const Call& call, const Answer& answer, std::span<const TokenRef> tokens) {
  return judge_tokens(call, answer, tokens, bound_of(answer.numerics_id));
}

std::string judge_tokens(const Call& call, const Answer& answer, std::span<const TokenRef> tokens,
                         Bound bound) {
  const attnfold_problem& p = call.problem;
  const int64_t row_bytes =
      static_cast<int64_t>(p.qo_heads) * p.head_dim_vo * dtype_bytes(static_cast<DType>(p.o_dtype));
  for (const TokenRef& t : tokens) {
    const int32_t qo_len = call.qo_indptr[t.request + 1] - call.qo_indptr[t.request];
    const int32_t kv_len = call.kv_len[t.request];
    const int32_t seen = p.mask == kCausal ? std::max(0, kv_len - qo_len + t.token + 1) : kv_len;
    const int64_t row = call.qo_indptr[t.request] + t.token;
    const Call one = token_call(call, t.request, t.token, seen);
    ATTNFOLD_HOLD(in("request " + std::to_string(t.request) + " token " + std::to_string(t.token),
                     judge_with(one, ref::answer(one), answer.o.data() + row * row_bytes,
                                answer.lse.data() + row * p.qo_heads, bound)));
  }
  return "";
}

std::vector<TokenRef> sample_tokens(const Call& call, int32_t per_request) {
  std::vector<TokenRef> tokens;
  for (int32_t r = 0; r < call.batch; ++r) {
    const int32_t n = call.qo_indptr[r + 1] - call.qo_indptr[r];
    int32_t last = -1;
    for (int32_t i = 0; i < per_request && n > 0; ++i) {
      const int32_t token =
          per_request == 1
              ? n - 1
              : static_cast<int32_t>(static_cast<int64_t>(n - 1) * i / (per_request - 1));
      if (token != last) tokens.push_back({r, token});
      last = token;
    }
  }
  return tokens;
}

std::string right(const Call& call, const Context& context) {
  Answer answer;
  ATTNFOLD_HOLD(run(call, execution(context), answer));
  return judge_answer(call, answer);
}

std::string right_on_sample(const Call& call, const Context& context, int32_t per_request) {
  Answer answer;
  ATTNFOLD_HOLD(run(call, execution(context), answer));
  return judge_tokens(call, answer, sample_tokens(call, per_request));
}

std::string same_under(const Call& call, const Context& context,
                       std::initializer_list<int32_t> workers, Answer& out) {
  bool first = true;
  for (int32_t n : workers) {
    for (uint64_t cut_seed : {uint64_t{0}, context.seed + 17}) {
      Answer answer;
      ATTNFOLD_HOLD(
          in(std::to_string(n) + " workers", run(call, execution(context, n, cut_seed), answer)));
      if (first) {
        out = std::move(answer);
        first = false;
      } else {
        ATTNFOLD_HOLD(
            same_bytes(call, out, answer,
                       std::to_string(n) + " workers, cut seed " + std::to_string(cut_seed)));
      }
    }
  }
  return "";
}

std::string right_under(const Call& call, const Context& context,
                        std::initializer_list<int32_t> workers) {
  Answer answer;
  ATTNFOLD_HOLD(same_under(call, context, workers, answer));
  return judge_answer(call, answer);
}

std::string same_bytes(const Call& call, const Answer& a, const Answer& b,
                       const std::string& what) {
  return in(what, first_difference(call, a, b));
}

std::string same_rows(const Call& part_call, const Answer& part, int32_t part_row,
                      const Answer& whole, int32_t whole_row, int32_t n, const std::string& what) {
  const attnfold_problem& p = part_call.problem;
  const size_t row_bytes =
      static_cast<size_t>(p.qo_heads) * p.head_dim_vo * dtype_bytes(static_cast<DType>(p.o_dtype));
  for (int32_t i = 0; i < n; ++i) {
    const bool o_same = std::memcmp(part.o.data() + (part_row + i) * row_bytes,
                                    whole.o.data() + (whole_row + i) * row_bytes, row_bytes) == 0;
    const bool lse_same = std::memcmp(&part.lse[static_cast<size_t>(part_row + i) * p.qo_heads],
                                      &whole.lse[static_cast<size_t>(whole_row + i) * p.qo_heads],
                                      sizeof(float) * p.qo_heads) == 0;
    if (!o_same || !lse_same) {
      return what + ": row " + std::to_string(part_row + i) + " differs from row " +
             std::to_string(whole_row + i) + (o_same ? " in lse" : " in o");
    }
  }
  return "";
}

float o_at(const Call& call, const Answer& answer, int32_t row, int32_t head, int32_t e) {
  const attnfold_problem& p = call.problem;
  return load_f32(answer.o.data(), static_cast<DType>(p.o_dtype),
                  (static_cast<int64_t>(row) * p.qo_heads + head) * p.head_dim_vo + e);
}

float lse_at(const Call& call, const Answer& answer, int32_t row, int32_t head) {
  return answer.lse[static_cast<size_t>(row) * call.problem.qo_heads + head];
}

std::string row_is_empty(const Call& call, const Answer& answer, int32_t row, int32_t head) {
  for (int32_t h = 0; h < call.problem.qo_heads; ++h) {
    if (head >= 0 && h != head) continue;
    const std::string where = "row " + std::to_string(row) + " head " + std::to_string(h) + ": ";
    const float empty = call.sink_logits.empty() ? -kInf : call.sink_logits[h];
    if (lse_at(call, answer, row, h) != empty) {
      return where + "expected lse " + text_of(empty) + ", got " +
             text_of(lse_at(call, answer, row, h));
    }
    for (int32_t e = 0; e < call.problem.head_dim_vo; ++e) {
      const float x = o_at(call, answer, row, h, e);
      if (x != 0.0f) return where + "expected o 0, got " + text_of(x);
    }
  }
  return "";
}

std::string all_finite(const Call& call, const Answer& answer) {
  for (int32_t row = 0; row < call.num_rows(); ++row) {
    for (int32_t h = 0; h < call.problem.qo_heads; ++h) {
      bool finite = std::isfinite(lse_at(call, answer, row, h));
      for (int32_t e = 0; e < call.problem.head_dim_vo && finite; ++e) {
        finite = std::isfinite(o_at(call, answer, row, h, e));
      }
      if (!finite)
        return "row " + std::to_string(row) + " head " + std::to_string(h) + " is not finite";
    }
  }
  return "";
}

}  // namespace attnfold::check::cases
