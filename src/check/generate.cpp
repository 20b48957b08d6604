#include "check/generate.h"

#include <algorithm>
#include <cstring>

#include "check/layouts.h"
#include "check/random.h"

namespace attnfold::check {
namespace {

constexpr int kPoison = 0xff;  // a NaN in every storage type

/** What a hash of the seed draws; 4 draws page ids (layouts.cpp). */
enum Tensor : int { kQ = 1, kK = 2, kV = 3, kMask = 5, kKScale = 6, kVScale = 7, kBlocks = 8 };

int32_t qo_len_of(const Call& call, int32_t r) { return call.qo_indptr[r + 1] - call.qo_indptr[r]; }

KeyRange seen_of(const Call& call, int32_t r) { return seen_keys(call, r); }

/** The maxima are at least the call's own sizes. */
void fit_maxima(Call* call, bool keep_larger) {
  attnfold_problem& p = call->problem;
  if (!keep_larger) p.max_batch = p.max_qo_rows = p.max_kv_len = 1;
  p.max_batch = std::max({p.max_batch, call->batch, 1});
  p.max_qo_rows = std::max({p.max_qo_rows, call->num_rows(), 1});
  p.max_kv_len = std::max(p.max_kv_len, 1);
  for (int32_t n : call->kv_len) p.max_kv_len = std::max(p.max_kv_len, n);
}

// ------------------------------------------------ values

void draw_row(void* to, attnfold_dtype dtype, int64_t at, int32_t dim, uint64_t word, bool uniform,
              double range) {
  for (int32_t d = 0; d < dim; d += 2) {
    const uint64_t draw = hash_of(word, d);
    const auto [a, b] = uniform ? uniforms_of(draw) : normals_of(draw);
    store_f32(to, static_cast<DType>(dtype), at + d, static_cast<float>(a * range));
    store_f32(to, static_cast<DType>(dtype), at + d + 1, static_cast<float>(b * range));
  }
}

/** A scale that spreads normal draws of `range` over the codes of an 8-bit type. */
float typical_scale(attnfold_dtype kv_dtype, float range) {
  const float spread = kv_dtype == ATTNFOLD_I8     ? 30.0f
                       : kv_dtype == ATTNFOLD_E4M3 ? 90.0f
                       : kv_dtype == ATTNFOLD_E5M2 ? 9000.0f
                                                   : 1.3f;
  return (range > 0 ? range : 1.0f) / spread;
}

void draw_scale(Scales* scales, int64_t at, uint64_t word, float typical) {
  const float factor = 0.75f + static_cast<float>(word >> 40) * 0x1p-25f;
  store_f32(scales->values->data(), DType::f32, at, typical * factor);
}

/** Scales of k or v, of every head and of the keys that are drawn. */
void draw_scales(Call* call, Tensor tensor, uint64_t seed, float range, bool only_seen) {
  const attnfold_problem& p = call->problem;
  const attnfold_scale_kind kind = tensor == kKScale ? p.k_scale_kind : p.v_scale_kind;
  Scales* scales = tensor == kKScale ? &call->k_scale : &call->v_scale;
  const float typical = typical_scale(p.kv_dtype, range);
  if (kind == ATTNFOLD_SCALE_NONE) return;
  if (kind != ATTNFOLD_SCALE_PER_TOKEN) {
    for (int32_t head = 0; head < p.kv_heads; ++head)
      draw_scale(scales, head, hash_of(seed, tensor, head), typical);
    return;
  }
  for (int32_t r = 0; r < call->batch; ++r) {
    const KeyRange keys = only_seen ? seen_of(*call, r) : KeyRange{0, call->kv_len[r], 0};
    for (int64_t j = 0; j < keys.end; ++j) {
      if (!keys.meets(j, j + 1)) continue;
      const int64_t at =
          call->kv_element_offset(r, static_cast<int32_t>(j), scales->strides, scales->offset);
      for (int32_t head = 0; head < p.kv_heads; ++head) {
        draw_scale(scales, at + head * scales->strides.head, hash_of(seed, tensor, r, j, head),
                   typical);
      }
    }
  }
}

void draw_q(Call* call, uint64_t seed, bool uniform, float range) {
  const attnfold_problem& p = call->problem;
  for (int32_t r = 0; r < call->batch; ++r) {
    for (int32_t i = 0; i < qo_len_of(*call, r); ++i) {
      const int64_t position = int64_t{call->kv_len[r]} - qo_len_of(*call, r) + i;
      const int64_t row =
          call->q_offset + (int64_t{call->qo_indptr[r]} + i) * call->q_strides.token;
      for (int32_t head = 0; head < p.qo_heads; ++head) {
        draw_row(call->q->data(), p.q_dtype, row + head * call->q_strides.head, p.head_dim_qk,
                 hash_of(seed, kQ, r, position, head), uniform, range);
      }
    }
  }
}

void draw_kv(Call* call, Tensor tensor, uint64_t seed, bool uniform, float range, bool only_seen) {
  const attnfold_problem& p = call->problem;
  Buffer& to = tensor == kK ? *call->k : *call->v;
  const Strides& strides = tensor == kK ? call->k_strides : call->v_strides;
  const int64_t offset = tensor == kK ? call->k_offset : call->v_offset;
  const int32_t dim = tensor == kK ? p.head_dim_qk : p.head_dim_vo;
  const Scales& scales = tensor == kK ? call->k_scale : call->v_scale;
  for (int32_t r = 0; r < call->batch; ++r) {
    const KeyRange keys = only_seen ? seen_of(*call, r) : KeyRange{0, call->kv_len[r], 0};
    for (int64_t j = 0; j < keys.end; ++j) {
      if (!keys.meets(j, j + 1)) continue;
      const int64_t at = call->kv_element_offset(r, static_cast<int32_t>(j), strides, offset);
      for (int32_t head = 0; head < p.kv_heads; ++head) {
        const double scale = call->scale_at(scales, r, static_cast<int32_t>(j), head);
        draw_row(to.data(), p.kv_dtype, at + head * strides.head, dim,
                 hash_of(seed, tensor, r, j, head), uniform, range / scale);
      }
    }
  }
}

// ------------------------------------------------ masks

int64_t row_bytes_of(int32_t mask_width) { return (int64_t{mask_width} + 7) / 8; }

/** Offsets of the requests' bits, `gap` bytes between them; all bits 0. */
void allocate_mask(Call* call, int64_t gap) {
  call->mask_indptr.assign(1, gap);
  for (int32_t r = 0; r < call->batch; ++r) {
    const int64_t bytes = qo_len_of(*call, r) * row_bytes_of(call->mask_width[r]);
    call->mask_indptr.push_back(call->mask_indptr.back() + bytes + gap);
  }
  call->mask_bits.assign(static_cast<size_t>(call->mask_indptr.back()), 0);
}

/** Draws what request r's bits are: bit(i, key) for query i and a key's position. */
template <typename Bit>
void fill_mask(Call* call, int32_t r, Bit bit) {
  const int32_t width = call->mask_width[r], first = call->kv_len[r] - width;
  for (int32_t i = 0; i < qo_len_of(*call, r); ++i) {
    uint8_t* row = call->mask_bits.data() + call->mask_indptr[r] + i * row_bytes_of(width);
    for (int32_t b = 0; b < width; ++b) {
      const bool is_set = bit(i, first + b);
      row[b / 8] = static_cast<uint8_t>(row[b / 8] | is_set << (b % 8));
    }
    // bits behind the last key mean nothing
    for (int32_t b = width; b < 8 * row_bytes_of(width); ++b)
      row[b / 8] = static_cast<uint8_t>(row[b / 8] | 1 << (b % 8));
  }
}

void draw_mask(Call* call, MaskBits kind, uint64_t seed) {
  allocate_mask(call, 3);
  for (int32_t r = 0; r < call->batch; ++r) {
    const int64_t first_position = int64_t{call->kv_len[r]} - qo_len_of(*call, r);
    const auto draw = [&](int64_t position, int64_t key) {
      return hash_of(seed, kMask, r, position, key);
    };
    if (kind == MaskBits::causal) {
      fill_mask(call, r, [&](int32_t i, int32_t key) { return key <= first_position + i; });
    } else if (kind == MaskBits::tree) {
      const auto parent = [&](int64_t position) {  // -1: a root
        const int64_t nodes = position - std::max<int64_t>(first_position, 0);
        return nodes <= 0 ? -1 : position - 1 - static_cast<int64_t>(draw(position, -1) % nodes);
      };
      fill_mask(call, r, [&](int32_t i, int32_t key) {
        if (key < first_position) return draw(key, -2) % 4 != 0;
        int64_t at = first_position + i;
        while (at > key) at = parent(at);
        return at == key;
      });
    } else {
      fill_mask(call, r, [&](int32_t i, int32_t key) {
        return draw(first_position + i, -3) % 4 != 0 && draw(first_position + i, key) % 2 == 0;
      });
    }
  }
}

/** Lists of blocks: of some requests none or all, of others a third, the same for pairs of heads or
 * each its own. */
void draw_blocks(Call* call, uint64_t seed) {
  const attnfold_problem& p = call->problem;
  call->block_indptr.assign(1, 0);
  for (int32_t r = 0; r < call->batch; ++r) {
    const uint64_t kind = hash_of(seed, kBlocks, r);
    for (int32_t head = 0; head < p.kv_heads; ++head) {
      const int32_t drawn_head = kind & 8 ? head / 2 : head;
      for (int64_t b = 0; b * p.sparse_block_size < call->kv_len[r]; ++b) {
        const bool third = hash_of(seed, kBlocks, r, drawn_head, b) % 3 == 0;
        if (kind % 8 == 0 || (kind % 8 != 1 && !third)) continue;
        call->block_indices.push_back(static_cast<int32_t>(b));
      }
      call->block_indptr.push_back(static_cast<int32_t>(call->block_indices.size()));
    }
  }
}

// ------------------------------------------------ copies

/** The lists of requests `pick`, without blocks that hold no key of `to`. */
void copy_blocks(const Call& from, const std::vector<int32_t>& pick, Call* to) {
  const attnfold_problem& p = from.problem;
  if (from.block_indptr.empty()) return;
  to->block_indptr.assign(1, 0);
  to->block_indices.clear();
  for (size_t i = 0; i < pick.size(); ++i) {
    for (int32_t head = 0; head < p.kv_heads; ++head) {
      const size_t list = static_cast<size_t>(pick[i]) * p.kv_heads + head;
      for (int32_t at = from.block_indptr[list]; at < from.block_indptr[list + 1]; ++at) {
        const int32_t block = from.block_indices[at];
        if (int64_t{block} * p.sparse_block_size < to->kv_len[i])
          to->block_indices.push_back(block);
      }
      to->block_indptr.push_back(static_cast<int32_t>(to->block_indices.size()));
    }
  }
}

/** Bits of queries [begin, end) of request r_from about their first keys, for request r_to. */
void copy_mask(const Call& from, int32_t r_from, int32_t begin, Call* to, int32_t r_to) {
  const int32_t width = to->mask_width[r_to];
  for (int32_t i = 0; i < qo_len_of(*to, r_to); ++i) {
    const auto row = from.mask_bits.begin() + from.mask_indptr[r_from] +
                     (begin + i) * row_bytes_of(from.mask_width[r_from]);
    std::copy_n(row, row_bytes_of(width),
                to->mask_bits.begin() + to->mask_indptr[r_to] + i * row_bytes_of(width));
  }
}

void copy_scales(const Call& from, const Scales& scales_from, int32_t r_from, int32_t r_to,
                 int32_t j, const Call& to, Scales* scales_to) {
  const int64_t at = to.kv_element_offset(r_to, j, scales_to->strides, scales_to->offset);
  for (int32_t head = 0; head < from.problem.kv_heads; ++head) {
    store_f32(scales_to->values->data(), DType::f32, at + head * scales_to->strides.head,
              from.scale_at(scales_from, r_from, j, head));
  }
}

/** k and v, and their scales per token, of the keys of request `r_from` that some row of request
 * `r_to` sees. */
void copy_keys(const Call& from, int32_t r_from, Call* to, int32_t r_to) {
  const attnfold_problem& p = from.problem;
  const int64_t bytes = dtype_bytes(static_cast<DType>(p.kv_dtype));
  const KeyRange seen = seen_of(*to, r_to);
  for (int64_t key = 0; key < seen.end; ++key) {
    if (!seen.meets(key, key + 1)) continue;
    const int32_t j = static_cast<int32_t>(key);
    if (p.k_scale_kind == ATTNFOLD_SCALE_PER_TOKEN)
      copy_scales(from, from.k_scale, r_from, r_to, j, *to, &to->k_scale);
    if (p.v_scale_kind == ATTNFOLD_SCALE_PER_TOKEN)
      copy_scales(from, from.v_scale, r_from, r_to, j, *to, &to->v_scale);
    const int64_t k_from = from.kv_element_offset(r_from, j, from.k_strides, from.k_offset);
    const int64_t v_from = from.kv_element_offset(r_from, j, from.v_strides, from.v_offset);
    const int64_t k_to = to->kv_element_offset(r_to, j, to->k_strides, to->k_offset);
    const int64_t v_to = to->kv_element_offset(r_to, j, to->v_strides, to->v_offset);
    for (int32_t head = 0; head < p.kv_heads; ++head) {
      std::memcpy(to->k->data() + (k_to + head * to->k_strides.head) * bytes,
                  from.k->data() + (k_from + head * from.k_strides.head) * bytes,
                  p.head_dim_qk * bytes);
      if (p.v_in_k) continue;
      std::memcpy(to->v->data() + (v_to + head * to->v_strides.head) * bytes,
                  from.v->data() + (v_from + head * from.v_strides.head) * bytes,
                  p.head_dim_vo * bytes);
    }
  }
}

/** Rows of q and of the recorded answer: `rows[i]` of `from` becomes row i. */
void copy_rows(const Call& from, const std::vector<int32_t>& rows, Call* to) {
  const attnfold_problem& p = from.problem;
  allocate_q(to, false, 0);
  const int64_t q_bytes = dtype_bytes(static_cast<DType>(p.q_dtype));
  for (size_t i = 0; i < rows.size(); ++i) {
    for (int32_t head = 0; head < p.qo_heads; ++head) {
      const int64_t at =
          from.q_offset + rows[i] * from.q_strides.token + head * from.q_strides.head;
      const int64_t row = static_cast<int64_t>(i) * to->q_strides.token;
      std::memcpy(to->q->data() + (to->q_offset + row + head * to->q_strides.head) * q_bytes,
                  from.q->data() + at * q_bytes, p.head_dim_qk * q_bytes);
    }
  }
  if (from.recorded_o != nullptr) {
    const int64_t bytes = int64_t{p.qo_heads} * p.head_dim_vo * dtype_bytes(from.recorded_o_dtype);
    to->recorded_o = std::make_shared<Buffer>(rows.size() * bytes);
    for (size_t i = 0; i < rows.size(); ++i) {
      std::memcpy(to->recorded_o->data() + i * bytes, from.recorded_o->data() + rows[i] * bytes,
                  bytes);
    }
  }
  to->recorded_lse.clear();
  if (from.recorded_lse.empty()) return;
  for (int32_t row : rows) {
    const auto begin = from.recorded_lse.begin() + int64_t{row} * p.qo_heads;
    to->recorded_lse.insert(to->recorded_lse.end(), begin, begin + p.qo_heads);
  }
}

std::vector<int32_t> iota(int32_t begin, int32_t end) {
  std::vector<int32_t> values;
  for (int32_t x = begin; x < end; ++x) values.push_back(x);
  return values;
}

}  // namespace

Call generate(const Spec& spec, uint64_t seed) {
  Call call;
  call.problem = spec.problem;
  call.batch = static_cast<int32_t>(spec.qo_len.size());
  call.kv_len = spec.kv_len;
  call.qo_indptr.assign(1, 0);
  for (int32_t n : spec.qo_len) call.qo_indptr.push_back(call.qo_indptr.back() + n);
  call.visible_prefix = spec.visible_prefix;
  call.mask_width = spec.mask_width;
  if (!call.mask_width.empty()) draw_mask(&call, spec.mask_bits, seed);
  if (has_block_lists(call.problem)) draw_blocks(&call, seed);
  if (spec.problem.kv_storage == ATTNFOLD_KV_RAGGED) {
    make_ragged(&call, spec.poison ? 2 : 0);
  } else {
    make_tables(&call, {spec.csr, spec.permute_pages, spec.poison, seed});
  }
  fit_maxima(&call, true);
  const int gap_byte = spec.poison ? kPoison : 0;
  allocate_q(&call, spec.odd_strides, gap_byte);
  allocate_kv_pair(&call, spec.odd_strides, gap_byte);
  draw_q(&call, seed, spec.uniform, spec.q_range);
  call.alibi_slopes = spec.alibi_slopes;
  call.sink_logits = spec.sink_logits;
  call.o_scale = spec.o_scale;
  draw_scales(&call, kKScale, seed, spec.k_range, spec.poison);
  draw_scales(&call, kVScale, seed, spec.v_range, spec.poison);
  draw_kv(&call, kK, seed, spec.uniform, spec.k_range, spec.poison);
  if (!call.problem.v_in_k) draw_kv(&call, kV, seed, spec.uniform, spec.v_range, spec.poison);
  call.origin = "generated, seed " + std::to_string(seed);
  return call;
}

Call select_requests(const Call& call, const std::vector<int32_t>& pick) {
  Call out = call;
  out.batch = static_cast<int32_t>(pick.size());
  out.qo_indptr.assign(1, 0);
  out.kv_len.clear();
  std::vector<int32_t> rows;
  for (int32_t r : pick) {
    for (int32_t row : iota(call.qo_indptr[r], call.qo_indptr[r + 1])) rows.push_back(row);
    out.qo_indptr.push_back(static_cast<int32_t>(rows.size()));
    out.kv_len.push_back(call.kv_len[r]);
  }
  out.visible_prefix.clear();
  out.mask_width.clear();
  for (int32_t r : pick) {
    if (!call.visible_prefix.empty()) out.visible_prefix.push_back(call.visible_prefix[r]);
    if (!call.mask_width.empty()) out.mask_width.push_back(call.mask_width[r]);
  }
  if (!out.mask_width.empty()) {
    allocate_mask(&out, 1);
    for (int32_t i = 0; i < out.batch; ++i) copy_mask(call, pick[i], 0, &out, i);
  }
  copy_blocks(call, pick, &out);
  if (call.problem.kv_storage == ATTNFOLD_KV_RAGGED) {
    make_ragged(&out, 1);
    allocate_kv_pair(&out, false, kPoison);
    for (int32_t i = 0; i < out.batch; ++i) copy_keys(call, pick[i], &out, i);
  } else if (call.kv_indptr.empty()) {
    out.block_table.clear();
    for (int32_t r : pick) {
      const auto row = call.block_table.begin() + r * call.block_table_stride;
      out.block_table.insert(out.block_table.end(), row, row + call.block_table_stride);
    }
  } else {
    out.kv_indices.clear();
    out.kv_indptr.assign(1, 0);
    for (int32_t r : pick) {
      out.kv_indices.insert(out.kv_indices.end(), call.kv_indices.begin() + call.kv_indptr[r],
                            call.kv_indices.begin() + call.kv_indptr[r + 1]);
      out.kv_indptr.push_back(static_cast<int32_t>(out.kv_indices.size()));
    }
  }
  copy_rows(call, rows, &out);
  fit_maxima(&out, false);
  return out;
}

Call repage(const Call& call, int32_t page_size, attnfold_kv_layout layout, bool csr,
            uint64_t page_seed) {
  Call out = call;
  out.problem.kv_storage = ATTNFOLD_KV_PAGED;
  out.problem.kv_layout = layout;
  out.problem.page_size = page_size;
  out.num_kv_rows = 0;
  make_tables(&out, {csr, true, true, page_seed});
  allocate_kv_pair(&out, false, kPoison);
  for (int32_t r = 0; r < out.batch; ++r) copy_keys(call, r, &out, r);
  return out;
}

Call to_ragged(const Call& call) {
  Call out = call;
  out.problem.kv_storage = ATTNFOLD_KV_RAGGED;
  out.problem.kv_layout = ATTNFOLD_NHD;
  make_ragged(&out, 0);
  allocate_kv_pair(&out, false, kPoison);
  for (int32_t r = 0; r < out.batch; ++r) copy_keys(call, r, &out, r);
  return out;
}

int32_t share_prefix(Call* call, int32_t from, int32_t to, int32_t keys) {
  const KeyRange seen = seen_of(*call, from);
  const int64_t page_size = call->problem.page_size;
  if (seen.begin > 0) return 0;
  const int64_t pages =
      std::min({int64_t{keys}, seen.end, int64_t{call->kv_len[from]}, int64_t{call->kv_len[to]}}) /
      page_size;
  const auto table = [&](int32_t r) {
    return call->kv_indices.empty() ? call->block_table.begin() + r * call->block_table_stride
                                    : call->kv_indices.begin() + call->kv_indptr[r];
  };
  std::copy_n(table(from), pages, table(to));
  return static_cast<int32_t>(pages * page_size);
}

void share_prefixes(Call* call, std::mt19937_64& rng) {
  if (call->problem.kv_storage == ATTNFOLD_KV_RAGGED) return;
  for (int32_t r = 1; r < call->batch; ++r) {
    const int32_t from = static_cast<int32_t>(rng() % static_cast<uint64_t>(r));
    const uint64_t most = static_cast<uint64_t>(std::min(call->kv_len[from], call->kv_len[r]));
    const int32_t some = static_cast<int32_t>(rng() % (most + 1));
    if (rng() % 4 == 0) continue;
    share_prefix(call, from, r, rng() % 2 == 0 ? static_cast<int32_t>(most) : some);
  }
}

Call chunk_of(const Call& call, int32_t r, int32_t begin, int32_t end) {
  const int32_t after = qo_len_of(call, r) - end;  // new tokens that this chunk does not have yet
  Call out = select_requests(call, {r});
  out.qo_indptr = {0, end - begin};
  copy_rows(call, iota(call.qo_indptr[r] + begin, call.qo_indptr[r] + end), &out);
  out.kv_len[0] = std::max(0, call.kv_len[r] - after);
  if (!out.visible_prefix.empty())
    out.visible_prefix[0] = std::min(out.visible_prefix[0], out.kv_len[0]);
  if (!out.mask_width.empty() && out.mask_width[0] > 0) {
    out.mask_width[0] = std::max(0, call.mask_width[r] - after);
    allocate_mask(&out, 2);
    copy_mask(call, r, begin, &out, 0);
  }
  copy_blocks(call, {r}, &out);
  fit_maxima(&out, false);
  return out;
}

}  // namespace attnfold::check
