// Named cases: empty or fully masked rows, merges of empty states.
#include <cstring>

#include "check/cases_util.h"

namespace attnfold::check::cases {
namespace {

constexpr DType kAllTypes[] = {DType::f32, DType::f16, DType::bf16};

struct TypedState {
  std::vector<float> o_f32;  // what `o` holds, after rounding to its type
  Buffer o;
  std::vector<float> lse;
};

TypedState typed(const std::vector<float>& o, const std::vector<float>& lse, DType type) {
  TypedState s;
  s.lse = lse;
  s.o = Buffer(o.size() * dtype_bytes(type) + 1);
  s.o_f32.resize(o.size());
  for (size_t i = 0; i < o.size(); ++i) {
    store_f32(s.o.data(), type, static_cast<int64_t>(i), o[i]);
    s.o_f32[i] = load_f32(s.o.data(), type, static_cast<int64_t>(i));
  }
  return s;
}

attnfold_state view(TypedState& s, DType type) {
  attnfold_state v = ATTNFOLD_STATE_INIT;
  v.o = s.o.data();
  v.o_dtype = static_cast<attnfold_dtype>(type);
  v.lse = s.lse.data();
  return v;
}

/** One width and type of merge_pair_both_empty. */
std::string pair_both_empty(const Context& x, DType type, int32_t width, float empty_o) {
  constexpr int32_t kTokens = 64, kHeads = 8;
  constexpr size_t kRows = static_cast<size_t>(kTokens) * kHeads;
  std::vector<float> o[2], lse[2];
  std::vector<int> empties(kRows);  // bit s: side s is empty
  for (int side = 0; side < 2; ++side) {
    for (size_t row = 0; row < kRows; ++row) {
      const float draw = noise(x.seed, static_cast<int64_t>(row), 0, 0, 0);  // both sides together
      const float own = noise(x.seed, static_cast<int64_t>(row), side + 1, 0, 0);
      const bool both = draw<-0.5f, plus = own> 0.8f, minus = own < -0.8f;
      const bool is_empty = both || plus || minus;
      lse[side].push_back(is_empty ? (plus ? kInf : -kInf) : 4.0f * own);
      if (is_empty) empties[row] |= 1 << side;
      for (int32_t e = 0; e < width; ++e) {
        o[side].push_back(is_empty ? empty_o
                                   : noise(x.seed + 3, static_cast<int64_t>(row), side, e, 0));
      }
    }
  }
  TypedState a = typed(o[0], lse[0], type), b = typed(o[1], lse[1], type);
  TypedState out =
      typed(std::vector<float>(kRows * width, kNaN), std::vector<float>(kRows, kNaN), type);
  const attnfold_state sides[2] = {view(a, type), view(b, type)};
  const attnfold_state to = view(out, type);
  if (attnfold_merge(kTokens, kHeads, width, sides, 2, &to, nullptr, 0) != ATTNFOLD_OK)
    return attnfold_last_error();
  for (size_t row = 0; row < kRows; ++row) {
    const std::string where = "row " + std::to_string(row) + ": ";
    if (empties[row] == 3) {
      if (out.lse[row] != -kInf) return where + "both sides empty, lse is " + text_of(out.lse[row]);
    } else if (empties[row] != 0) {
      const float kept = empties[row] == 1 ? b.lse[row] : a.lse[row];
      if (bits_of(out.lse[row]) != bits_of(kept)) return where + "one side empty, lse changed";
    } else if (std::isnan(out.lse[row])) {
      return where + "lse is NaN";
    }
    for (int32_t e = 0; e < width; ++e) {
      const int64_t at = static_cast<int64_t>(row) * width + e;
      const float got = load_f32(out.o.data(), type, at);
      if (empties[row] == 3 && got != 0.0f) return where + "both sides empty, o is " + text_of(got);
      if (empties[row] == 1 && bits_of(got) != bits_of(b.o_f32[at]))
        return where + "one side empty, o changed";
      if (empties[row] == 2 && bits_of(got) != bits_of(a.o_f32[at]))
        return where + "one side empty, o changed";
      if (std::isnan(got)) return where + "o is NaN";
    }
  }
  return "";
}

std::string merge_pair_both_empty(uint64_t seed, const char* isa) {
  for (DType type : kAllTypes) {
    for (int32_t width : {32, 128}) {
      for (float empty_o : {0.0f, kNaN}) {
        ATTNFOLD_HOLD(in(std::string(dtype_name(type)) + " width " + std::to_string(width),
                         pair_both_empty({seed, isa}, type, width, empty_o)));
      }
    }
  }
  return "";
}

/** `n` empty states, the one at `finite_at` (-1 = none) holding numbers under `finite_lse`. */
std::string nway(const Context& x, int64_t tokens, int32_t heads, int32_t n, int32_t finite_at,
                 float finite_lse) {
  constexpr int32_t kWidth = 64;
  const size_t rows = static_cast<size_t>(tokens) * heads;
  std::vector<TypedState> sides;
  for (int32_t s = 0; s < n; ++s) {
    std::vector<float> o(rows * kWidth, s == finite_at ? 0.0f : kNaN);
    if (s == finite_at) {
      for (size_t i = 0; i < o.size(); ++i) o[i] = noise(x.seed, static_cast<int64_t>(i), s, 0, 0);
    }
    sides.push_back(
        typed(o, std::vector<float>(rows, s == finite_at ? finite_lse : -kInf), DType::f16));
  }
  std::vector<attnfold_state> views;
  for (TypedState& s : sides) views.push_back(view(s, DType::f16));
  TypedState out =
      typed(std::vector<float>(rows * kWidth, kNaN), std::vector<float>(rows, kNaN), DType::f16);
  const attnfold_state to = view(out, DType::f16);
  if (attnfold_merge(tokens, heads, kWidth, views.data(), n, &to, nullptr, 0) != ATTNFOLD_OK)
    return attnfold_last_error();
  for (size_t row = 0; row < rows; ++row) {
    const float want = finite_at < 0 ? -kInf : finite_lse;
    if (out.lse[row] != want)
      return "expected lse " + text_of(want) + ", got " + text_of(out.lse[row]);
  }
  for (size_t i = 0; i < rows * kWidth; ++i) {
    const float want = finite_at < 0 ? 0.0f : sides[finite_at].o_f32[i];
    const float got = load_f32(out.o.data(), DType::f16, static_cast<int64_t>(i));
    if (!(got == want)) return "expected o " + text_of(want) + ", got " + text_of(got);
  }
  return "";
}

/** In place over side 0, only where the mask is 1: masked rows keep their bytes, NaN included. */
std::string nway_in_place(const Context& x) {
  constexpr int64_t kTokens = 37;
  constexpr int32_t kHeads = 8, kWidth = 64;
  const size_t rows = kTokens * kHeads;
  TypedState a =
      typed(std::vector<float>(rows * kWidth, kNaN), std::vector<float>(rows, -kInf), DType::f16);
  std::vector<float> o(rows * kWidth);
  for (size_t i = 0; i < o.size(); ++i) o[i] = noise(x.seed, static_cast<int64_t>(i), 0, 0, 0);
  TypedState b = typed(o, std::vector<float>(rows, 1.5f), DType::f16);
  std::vector<uint8_t> mask(kTokens);
  for (int64_t t = 0; t < kTokens; ++t) mask[t] = t % 3 != 0;
  const attnfold_state sides[2] = {view(a, DType::f16), view(b, DType::f16)};
  if (attnfold_merge(kTokens, kHeads, kWidth, sides, 2, &sides[0], mask.data(), 1) != ATTNFOLD_OK) {
    return attnfold_last_error();
  }
  for (int64_t t = 0; t < kTokens; ++t) {
    const size_t first = static_cast<size_t>(t) * kHeads;
    const float want = mask[t] ? 1.5f : -kInf;
    if (a.lse[first] != want)
      return "token " + std::to_string(t) + ": lse is " + text_of(a.lse[first]);
    const float got = load_f32(a.o.data(), DType::f16, static_cast<int64_t>(first) * kWidth);
    if (mask[t] ? got != b.o_f32[first * kWidth] : !std::isnan(got))
      return "token " + std::to_string(t) + ": wrong o";
  }
  return "";
}

std::string merge_nway_all_empty(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (int64_t tokens : {int64_t{1}, int64_t{37}}) {
    for (int32_t heads : {1, 8}) {
      for (int32_t n : {0, 1, 2, 5, 17}) {
        for (int32_t at = -1; at < n; ++at) {
          for (float lse : {0.75f, -1e30f}) {
            ATTNFOLD_HOLD(in(std::to_string(n) + " states, finite one " + std::to_string(at),
                             nway(x, tokens, heads, n, at, lse)));
          }
        }
      }
    }
  }
  return in("in place", nway_in_place(x));
}

std::string causal_rows_above_diagonal_lse(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const Spec specs[] = {
      make_spec({4, 1, 128, 128}, DType::bf16, 16, kCausal, {5}, {2}),
      make_spec({4, 1, 128, 128}, DType::bf16, 16, kCausal, {5, 130, 2}, {2, 1, 2}),
  };
  for (const Spec& spec : specs) {
    const Call call = generate(spec, seed);
    ATTNFOLD_HOLD(right_under(call, x, {1, 2, 5}));
    Answer answer;
    ATTNFOLD_HOLD(run(call, execution(x), answer));
    for (int32_t r = 0; r < call.batch; ++r) {
      for (int32_t i = 0; i < spec.qo_len[r] - spec.kv_len[r]; ++i) {
        ATTNFOLD_HOLD(row_is_empty(call, answer, call.qo_indptr[r] + i));
      }
    }
  }
  return "";
}

// The band i-9..i is a causal window of 9 to the left; head dims 2 and 4 are run as 8, the smallest
// served.
std::string band_mask_leading_block_all_masked(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (int32_t n : {600, 640}) {
    Spec spec = make_spec({1, 1, 8, 8}, DType::f32, kRagged, kCausal, {n}, {n});
    spec.problem.window_left = 9;
    Call call = zero_call(spec);
    fill_buffer(*call.q, DType::f32, 1.0f);
    fill_buffer(*call.k, DType::f32, 1.0f);
    fill_buffer(*call.v, DType::f32, 1.0f);
    Answer answer;
    ATTNFOLD_HOLD(same_under(call, x, {1, 3}, answer));
    ATTNFOLD_HOLD(judge_answer(call, answer));
    for (int32_t row = 0; row < n; ++row) {
      for (int32_t e = 0; e < 8; ++e) {
        const float got = o_at(call, answer, row, 0, e);
        if (std::abs(got - 1.0f) > 0x1p-20f)
          return "row " + std::to_string(row) + ": expected 1, got " + text_of(got);
      }
    }
  }
  return "";
}

std::string nan_query_not_swallowed(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const Spec spec = make_spec({4, 4, 8, 8}, DType::f32, kRagged, kNone, {16, 16}, {16, 16});
  for (bool nan_in_key : {false, true}) {
    Call call = deep_copy(generate(spec, seed));
    if (nan_in_key) {
      fill_k(call, [&](int r, int t, int h, int e) {
        return t == 5 && r == 1 ? kNaN : noise(seed, r, t, h, e);
      });
    } else {
      fill_q(call, [](int, int, int, int) { return kNaN; });
    }
    Answer answer;
    ATTNFOLD_HOLD(same_under(call, x, {1, 2}, answer));
    ATTNFOLD_HOLD(judge_answer(call, answer));
    for (int32_t row = nan_in_key ? 16 : 0; row < 32; ++row) {
      for (int32_t h = 0; h < 4; ++h) {
        if (!std::isnan(lse_at(call, answer, row, h)) ||
            !std::isnan(o_at(call, answer, row, h, 7))) {
          return "row " + std::to_string(row) + ": NaN that is visible did not reach the output";
        }
      }
    }
  }
  return "";
}

constexpr NamedCase kCases[] = {
    {"merge_pair_both_empty",
     "empty with empty is o = 0, lse = -inf; +inf is empty too; the other entries keep their bits",
     "vllm-project/vllm#39148", merge_pair_both_empty},
    {"merge_nway_all_empty",
     "one state among empties comes back bit for bit; -1e30 is a result, not an empty",
     "flashinfer-ai/flashinfer#4051", merge_nway_all_empty},
    {"causal_rows_above_diagonal_lse", "rows that precede every key are empty, the others right",
     "flashinfer-ai/flashinfer#4452", causal_rows_above_diagonal_lse},
    {"band_mask_leading_block_all_masked",
     "leaves that a row sees nothing of do not poison later ones", "pytorch/pytorch#127055",
     band_mask_leading_block_all_masked},
    {"nan_query_not_swallowed",
     "NaN in the query or in a visible key reaches the output, never a zero row",
     "pytorch/pytorch#141128", nan_query_not_swallowed},
};

}  // namespace

std::span<const NamedCase> empty_cases() { return kCases; }

}  // namespace attnfold::check::cases
