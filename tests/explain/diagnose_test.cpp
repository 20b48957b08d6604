// Faults put into answers by an implementation of its own, named by the diagnosis.
#include "diagnose/diagnose.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "check/call_file.h"
#include "check/generate.h"
#include "check/judge.h"
#include "ref/oracle.h"

namespace attnfold::diagnose {
namespace {

enum class Injected {
  none,
  lse_base_2,
  lse_transposed,
  empty_inf,
  top_left,
  left_short,
  left_long,
  no_scale,
  scale_twice,
  cap_first,
  interleaved,
  page_dropped,
  tail_read,
  len_short,
  len_long,
  pages_swapped,
  no_sink,
  sink_per_split,
  not_rescaled,
  no_k_scales,
  no_v_scales,
  nonsense,
  count
};

/** What the diagnosis should say; "" if it should find nothing. */
const char* words_of(Injected fault) {
  switch (fault) {
    case Injected::lse_base_2: return "lse is in base 2";
    case Injected::lse_transposed: return "lse is transposed";
    case Injected::empty_inf: return "empty rows have lse +inf";
    case Injected::top_left: return "the causal mask is top-left";
    case Injected::left_short: return "the window reaches left by one too few";
    case Injected::left_long: return "the window reaches left by one too many";
    case Injected::no_scale: return "the scale is missing";
    case Injected::scale_twice: return "the scale is applied twice";
    case Injected::cap_first: return "the soft-cap comes before the scale";
    case Injected::interleaved: return "query heads take kv heads in turn";
    case Injected::page_dropped: return "the last, partial page is dropped";
    case Injected::tail_read: return "slots after the last key of its page are read";
    case Injected::len_short: return "kv_len is by one too few";
    case Injected::len_long: return "kv_len is by one too many";
    case Injected::pages_swapped: return "pages 0 and 1 are swapped";
    case Injected::no_sink: return "the sink is missing";
    case Injected::sink_per_split: return "the sink is counted 3 times, once per split";
    case Injected::not_rescaled: return "partial states are merged without rescaling";
    case Injected::no_k_scales: return "the scales of k are missing";
    case Injected::no_v_scales: return "the scales of v are missing";
    default: return "";
  }
}

/** K and V of one request and kv head in the order of the keys, slots past the end included. */
struct Cache {
  std::vector<std::vector<double>> k, v;
};

/** The scale of a key, from the words of attnfold.h; `page` is the slot's page, or its first row.
 */
double scale_of(const check::Scales& s, int64_t page, int64_t token, int32_t kv_head) {
  if (s.values == nullptr) return 1;
  return load_f32(
      s.values->data(), DType::f32,
      s.offset + page * s.strides.page + token * s.strides.token + kv_head * s.strides.head);
}

Cache cache_of(const check::Call& call, int32_t r, int32_t kv_head, Injected fault) {
  const attnfold_problem& p = call.problem;
  const DType type = static_cast<DType>(p.kv_dtype);
  const bool paged = p.kv_storage == ATTNFOLD_KV_PAGED;
  const int32_t n = call.kv_len[r];
  const int32_t slots = paged ? (n + p.page_size - 1) / p.page_size * p.page_size
                              : std::min(n + 1, call.kv_indptr[r + 1] - call.kv_indptr[r]);
  Cache cache;
  for (int32_t j = 0; j < slots; ++j) {
    const int64_t page = !paged ? 0
                         : call.block_table.empty()
                             ? call.kv_indices[call.kv_indptr[r] + j / p.page_size]
                             : call.block_table[r * call.block_table_stride + j / p.page_size];
    if (paged && (page < 0 || page >= p.num_pages)) {  // no row may see it
      cache.k.emplace_back(p.head_dim_qk, std::nan(""));
      cache.v.emplace_back(p.head_dim_vo, std::nan(""));
      continue;
    }
    const int64_t at_k = call.kv_element_offset(r, j, call.k_strides, call.k_offset),
                  at_v = call.kv_element_offset(r, j, call.v_strides, call.v_offset);
    const int64_t token = paged ? j % p.page_size : call.kv_indptr[r] + j;
    const double k_scale =
        fault == Injected::no_k_scales ? 1 : scale_of(call.k_scale, page, token, kv_head);
    const double v_scale =
        fault == Injected::no_v_scales ? 1 : scale_of(call.v_scale, page, token, kv_head);
    std::vector<double> k, v;
    for (int32_t d = 0; d < p.head_dim_qk; ++d) {
      k.push_back(k_scale *
                  load_f32(call.k->data(), type, at_k + kv_head * call.k_strides.head + d));
    }
    for (int32_t d = 0; d < p.head_dim_vo; ++d) {
      v.push_back(v_scale *
                  load_f32(call.v->data(), type, at_v + kv_head * call.v_strides.head + d));
    }
    cache.k.push_back(k);
    cache.v.push_back(v);
  }
  return cache;
}

/** Whether token i sees key j, from the words of attnfold.h, with a window `longer` to the left. */
bool sees(const attnfold_problem& p, int32_t position, int32_t j, int32_t longer) {
  if (p.mask == ATTNFOLD_MASK_CAUSAL && j > position) return false;
  if (p.window_right >= 0 && j > position + p.window_right) return false;
  bool near = p.window_left < 0 || j >= position - p.window_left - longer;
  if (p.attention_chunk > 0) {
    const int32_t chunk = std::max(position, 0) / p.attention_chunk;
    if (j / p.attention_chunk > chunk) return false;
    near = near && j / p.attention_chunk == chunk;
  }
  return near || j < p.sink_tokens;
}

/** Every row with the fault in it, rounded as an engine would round it. */
void inject(check::Call& call, Injected fault) {
  const attnfold_problem& p = call.problem;
  const double inf = std::numeric_limits<double>::infinity();
  const double scale =
      p.sm_scale < 0 ? 1 / std::sqrt(double{1.0} * p.head_dim_qk) : double{p.sm_scale};
  const int32_t rows = call.num_rows(), heads = p.qo_heads, width = p.head_dim_vo;
  call.recorded_o_dtype = DType::f32;
  call.recorded_o = std::make_shared<check::Buffer>(static_cast<size_t>(rows) * heads * width * 4);
  call.recorded_lse.assign(static_cast<size_t>(rows) * heads, 0);
  for (int32_t r = 0; r < call.batch; ++r) {
    const int32_t q_len = call.qo_indptr[r + 1] - call.qo_indptr[r], given = call.kv_len[r];
    for (int32_t head = 0; head < heads; ++head) {
      const int32_t kv_head =
          fault == Injected::interleaved ? head % p.kv_heads : head * p.kv_heads / heads;
      Cache cache = cache_of(call, r, kv_head, fault);
      int32_t n = given + (fault == Injected::len_long) - (fault == Injected::len_short);
      n = std::clamp(n, 0, static_cast<int32_t>(cache.k.size()));
      if (fault == Injected::pages_swapped && given >= 2 * p.page_size) {
        for (int32_t j = 0; j < p.page_size; ++j) {
          std::swap(cache.k[j], cache.k[j + p.page_size]);
          std::swap(cache.v[j], cache.v[j + p.page_size]);
        }
      }
      const int32_t end =
          fault == Injected::tail_read && q_len == 1 ? static_cast<int32_t>(cache.k.size()) : n;
      for (int32_t i = 0; i < q_len; ++i) {
        const int64_t row = call.qo_indptr[r] + i;
        const int32_t position = (fault == Injected::top_left ? q_len : n) - q_len + i;
        std::vector<double> x(static_cast<size_t>(end), -inf);
        for (int32_t j = 0; j < end; ++j) {
          const int32_t longer = (fault == Injected::left_long) - (fault == Injected::left_short);
          bool visible = j >= n || sees(p, position, j, longer);
          if (fault == Injected::page_dropped && j >= n / p.page_size * p.page_size)
            visible = false;
          if (fault == Injected::top_left && j >= q_len) visible = false;
          if (!visible) continue;
          double dot = 0;
          for (int32_t d = 0; d < p.head_dim_qk; ++d) {
            dot += load_f32(call.q->data(), static_cast<DType>(p.q_dtype),
                            call.q_offset + row * call.q_strides.token +
                                head * call.q_strides.head + d) *
                   cache.k[j][d];
          }
          const double c = double{p.logits_softcap};
          double score = fault == Injected::no_scale      ? dot
                         : fault == Injected::scale_twice ? dot * scale * scale
                                                          : dot * scale;
          if (c > 0)
            score = fault == Injected::cap_first ? scale * c * std::tanh(dot / c)
                                                 : c * std::tanh(score / c);
          if (!call.alibi_slopes.empty()) score += double{call.alibi_slopes[head]} * (j - position);
          x[j] = score;
        }
        double m = -inf;
        bool nan = false, any = false;
        for (const double value : x) {
          nan = nan || std::isnan(value);
          any = any || value != -inf;
          m = std::max(m, value);
        }
        if (nan) m = std::nan("");
        std::vector<double> o(static_cast<size_t>(width), 0.0);
        double l = 0;
        const int32_t half = (given + 1) / 2;
        double part_m[2] = {-inf, -inf};
        for (int32_t j = 0; j < end; ++j) part_m[j >= half] = std::max(part_m[j >= half], x[j]);
        for (int32_t j = 0; j < end; ++j) {
          if (x[j] == -inf) continue;
          const double reference = fault == Injected::not_rescaled ? part_m[j >= half] : m;
          const double w = std::exp(x[j] - reference);
          l += w;
          for (int32_t d = 0; d < width; ++d) o[d] += w * cache.v[j][d];
        }
        double total = l, lse_m = m;
        if (!call.sink_logits.empty() && fault != Injected::no_sink) {
          const double sink = double{call.sink_logits[head]};
          const double top = std::max(m, sink);
          const double shrink = any ? std::exp(m - top) : 0;
          l *= shrink;
          for (double& value : o) value *= shrink;
          total = l + (fault == Injected::sink_per_split ? 3 : 1) * std::exp(sink - top);
          lse_m = top;
        }
        double lse = total > 0 || nan ? std::log(total) + lse_m : -inf;
        if (!any && fault == Injected::empty_inf) lse = inf;
        if (fault == Injected::lse_base_2) lse *= std::log2(std::exp(1.0));
        const int64_t index = row * heads + head;
        for (int32_t d = 0; d < width; ++d) {
          double value = total > 0 || nan ? o[d] / total : 0;
          if (fault == Injected::nonsense) value = value * 1.3 + 0.1;
          store_f32(call.recorded_o->data(), DType::f32, index * width + d,
                    static_cast<float>(any ? value : 0));
        }
        const int64_t at = fault == Injected::lse_transposed ? head * int64_t{rows} + row : index;
        call.recorded_lse[at] = static_cast<float>(lse);
      }
    }
  }
}

/** Whether the fault is one of this call's rules, and reads only what the call holds. */
bool has_meaning(const check::Call& call, Injected fault) {
  const attnfold_problem& p = call.problem;
  if (fault == Injected::top_left) return p.mask == ATTNFOLD_MASK_CAUSAL;
  if (fault == Injected::left_short) return p.window_left > 0;
  if (fault == Injected::no_k_scales) return p.k_scale_kind != ATTNFOLD_SCALE_NONE;
  if (fault == Injected::no_v_scales) return p.v_scale_kind != ATTNFOLD_SCALE_NONE;
  if (fault != Injected::left_long) return true;
  // One key more to the left may lie in a page that the table does not name.
  return p.window_left >= 0 && p.kv_storage == ATTNFOLD_KV_RAGGED;
}

bool named(const Diagnosis& diagnosis, const std::string& words) {
  for (const Finding& finding : diagnosis.findings) {
    for (const std::string& name : finding.faults) {
      if (name.find(words) == 0) return true;
    }
  }
  return false;
}

/** A random call, short enough for hundreds of them. */
check::Call small_call(uint64_t seed) {
  std::mt19937_64 random(seed);
  check::Spec spec = check::random_spec(random);
  for (size_t r = 0; r < spec.kv_len.size(); ++r) {
    spec.kv_len[r] = std::min(spec.kv_len[r], 60 + static_cast<int32_t>(seed % 64));
    spec.qo_len[r] = std::min(spec.qo_len[r], 4);
  }
  spec.visible_prefix.clear();  // of these no faults are known: why_not says so
  spec.mask_width.clear();
  spec.problem.v_in_k = 0;
  spec.problem.sparse_block_size = spec.problem.sparse_local_blocks = 0;
  spec.problem.sparse_vertical_stride = spec.problem.sparse_head_step = 0;
  if (spec.problem.o_dtype == ATTNFOLD_E4M3) spec.problem.o_dtype = ATTNFOLD_F32;
  spec.q_range = std::min(spec.q_range, 2.0f);  // docs/numerics.md: P1 on few, peaked rows
  spec.poison = false;                          // NaN would hide which slot it came from
  return check::generate(spec, seed);
}

bool is_wrong(const check::Call& call) {
  return !check::judge(call, ref::answer(call), call.recorded_o->data(), DType::f32,
                       call.recorded_lse.data(), 1)
              .right;
}

TEST(Diagnose, SaysOfWhatItKnowsNoFaults) {
  check::Call call = small_call(3);
  EXPECT_EQ(why_not(call), "it has no recorded answer");
  inject(call, Injected::nonsense);
  EXPECT_EQ(why_not(call), "");
  check::Call masked = call, prefixed = call, inside = call, sparse = call;
  masked.mask_width.assign(static_cast<size_t>(call.batch), 0);
  prefixed.visible_prefix.assign(static_cast<size_t>(call.batch), 0);
  inside.problem.v_in_k = 1;
  sparse.problem.sparse_block_size = 64;
  for (const check::Call& other : {masked, prefixed, inside, sparse}) EXPECT_NE(why_not(other), "");
}

TEST(Diagnose, NamesInjectedFaults) {
  int wrong = 0, right_name = 0, nonsense = 0, nonsense_named = 0;
  std::string missed;
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    check::Call call = small_call(seed);
    const Injected fault =
        static_cast<Injected>(1 + seed % (static_cast<uint64_t>(Injected::count) - 1));
    if (!has_meaning(call, fault)) continue;
    inject(call, fault);
    if (!is_wrong(call)) continue;
    const Diagnosis diagnosis = diagnose(call);
    EXPECT_FALSE(diagnosis.right()) << "seed " << seed;
    if (fault == Injected::nonsense) {
      ++nonsense;
      nonsense_named += diagnosis.findings.empty() ? 0 : 1;
      if (!diagnosis.findings.empty()) {
        missed += "seed " + std::to_string(seed) +
                  " (none of these): " + diagnosis.findings[0].faults[0] + "\n";
      }
      continue;
    }
    ++wrong;
    if (named(diagnosis, words_of(fault))) {
      ++right_name;
    } else {
      missed += "seed " + std::to_string(seed) + " (" + words_of(fault) + "): " +
                (diagnosis.findings.empty() ? "none of these" : diagnosis.findings[0].faults[0]) +
                "\n";
    }
  }
  std::printf("%d of %d faults named; %d of %d unknown ones given a name\n", right_name, wrong,
              nonsense_named, nonsense);
  EXPECT_GE(wrong, 150);
  EXPECT_GE(right_name, 0.95 * wrong) << missed;
  EXPECT_EQ(nonsense_named, 0) << missed;
}

// A thousand calls of the engine; a minute or more.
TEST(DiagnoseSlow, NoFalseAlarms) {
  for (uint64_t seed = 1; seed <= 1000; ++seed) {
    check::Call call = small_call(seed);
    const check::RunResult result = check::run_engine(call, ATTNFOLD_EXECUTION_INIT);
    ASSERT_EQ(result.status, ATTNFOLD_OK) << result.error;
    call.recorded_o = std::make_shared<check::Buffer>(result.answer.o.size());
    if (result.answer.o.size() > 0) {
      std::memcpy(call.recorded_o->data(), result.answer.o.data(), result.answer.o.size());
    }
    call.recorded_o_dtype = static_cast<DType>(call.problem.o_dtype);
    call.recorded_lse = result.answer.lse;
    call.recorded_by = check::by_line(result.answer);
    const Diagnosis diagnosis = diagnose(call);
    EXPECT_TRUE(diagnosis.right()) << "seed " << seed;
    EXPECT_TRUE(diagnosis.findings.empty()) << "seed " << seed;
  }
}

TEST(Diagnose, TwoFaultsAtOnce) {
  check::Spec spec;
  spec.problem.qo_heads = 4;
  spec.problem.kv_heads = 2;
  spec.problem.head_dim_qk = spec.problem.head_dim_vo = 32;
  spec.problem.page_size = 8;
  spec.qo_len = {1, 3};
  spec.kv_len = {50, 61};
  check::Call call = check::generate(spec, 1);
  inject(call, Injected::no_scale);
  for (float& lse : call.recorded_lse) lse *= std::log2(std::exp(1.0f));
  const Diagnosis diagnosis = diagnose(call);
  ASSERT_EQ(diagnosis.findings.size(), 1u);
  EXPECT_TRUE(named(diagnosis, "lse is in base 2 and the scale is missing"));
  EXPECT_EQ(diagnosis.findings[0].requests, (std::vector<int32_t>{0, 1}));
}

TEST(Diagnose, EachRequestHasItsOwnFault) {
  check::Spec spec;
  spec.problem.qo_heads = spec.problem.kv_heads = 2;
  spec.problem.head_dim_qk = spec.problem.head_dim_vo = 32;
  spec.problem.page_size = 8;
  spec.problem.window_left = 20;  // else the order of pages would not matter to a decode
  spec.poison = false;
  spec.qo_len = {1, 1, 1};
  spec.kv_len = {50, 30, 30};
  check::Call call = check::generate(spec, 2), other = call, right = call;
  inject(call, Injected::len_short);
  inject(other, Injected::pages_swapped);
  inject(right, Injected::none);
  const size_t row = 2 * 32 * 4;  // bytes of o of a request
  std::memcpy(call.recorded_o->data() + row, other.recorded_o->data() + row, row);
  std::memcpy(call.recorded_o->data() + 2 * row, right.recorded_o->data() + 2 * row, row);
  for (size_t i = 2; i < 4; ++i) call.recorded_lse[i] = other.recorded_lse[i];
  for (size_t i = 4; i < 6; ++i) call.recorded_lse[i] = right.recorded_lse[i];
  const Diagnosis diagnosis = diagnose(call);
  std::string all;
  for (const Finding& f : diagnosis.findings) {
    for (const std::string& name : f.faults) all += name + "; ";
  }
  ASSERT_EQ(diagnosis.findings.size(), 2u) << all;
  EXPECT_TRUE(named(diagnosis, "kv_len is by one too few"));
  EXPECT_TRUE(named(diagnosis, "pages 0 and 1 are swapped"));
  EXPECT_TRUE(diagnosis.unexplained.empty());
}

}  // namespace
}  // namespace attnfold::diagnose
