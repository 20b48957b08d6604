// Storage formats: 8-bit keys and values with their scales, values that lie in the keys, a
// quantised o.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "conformance/suite.h"

namespace attnfold::check {
namespace {

using cases::kCausal;
using cases::kInf;
using cases::kNaN;
using cases::kNone;
using cases::same_bytes;

constexpr DType kByteTypes[] = {DType::e4m3, DType::e5m2, DType::i8};
constexpr attnfold_scale_kind kKinds[] = {ATTNFOLD_SCALE_PER_TENSOR, ATTNFOLD_SCALE_PER_HEAD,
                                          ATTNFOLD_SCALE_PER_TOKEN};

/** A decode, a verify step, a prefill and a request with more tokens than keys. */
Spec small_spec(cases::Shape shape, DType type, attnfold_scale_kind k_kind,
                attnfold_scale_kind v_kind, int32_t page_size = 16) {
  Spec spec = cases::make_spec(shape, type, page_size, kCausal, {1, 3, 33, 4}, {300, 129, 33, 2});
  spec.problem.k_scale_kind = k_kind;
  spec.problem.v_scale_kind = v_kind;
  return spec;
}

// ------------------------------------------------ codes

/** 256 codes, as the only key of 256 requests: the first element of k, every element of v.  The
 * score is q0 times the first. */
Call call_of_all_codes(DType type, int32_t head_dim, float q0) {
  const cases::Lengths ones(256, 1);
  Spec spec = cases::make_spec({1, 1, head_dim, head_dim}, type, 4, kNone, ones, ones);
  spec.problem.q_dtype = spec.problem.o_dtype = ATTNFOLD_F32;
  spec.problem.sm_scale = 1.0f;
  Call call = cases::zero_call(spec);
  cases::fill_q(call, [&](int, int, int, int e) { return e == 0 ? q0 : 0.0f; });
  for (int32_t r = 0; r < 256; ++r) {
    const int64_t k = call.kv_element_offset(r, 0, call.k_strides, 0);
    const int64_t v = call.kv_element_offset(r, 0, call.v_strides, 0);
    call.k->data()[k] = static_cast<std::byte>(r);
    std::memset(call.v->data() + v, r, static_cast<size_t>(head_dim));
  }
  return call;
}

float value_of(DType type, int32_t code) {
  const uint32_t bytes = static_cast<uint32_t>(code);
  return load_f32(&bytes, type, 0);
}

/** The dims take the widest loads, single chunks and the padded tail. */
constexpr int32_t kCodeDims[] = {8, 24, 32, 64, 72, 128, 200};

TEST(Formats, EveryCodeOfVCountsAsItsValue) {
  const cases::Context x = test::context();
  for (DType type : kByteTypes) {
    for (int32_t head_dim : kCodeDims) {
      Call call = call_of_all_codes(type, head_dim, 0.0f);
      std::memset(call.k->data(), 0, call.k->size());
      Answer answer;
      ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), answer));
      for (int32_t r = 0; r < 256; ++r) {
        const float value = value_of(type, r);
        for (int32_t e = 0; e < head_dim; ++e) {
          const float o = cases::o_at(call, answer, r, 0, e);
          ASSERT_TRUE(std::isnan(value) ? std::isnan(o) : o == value)
              << dtype_name(type) << " " << r << " element " << e << ": " << o;
        }
      }
    }
  }
}

TEST(Formats, EveryCodeOfKCountsAsItsValue) {
  const cases::Context x = test::context();
  for (DType type : kByteTypes) {
    for (int32_t head_dim : kCodeDims) {
      const Call call = call_of_all_codes(type, head_dim, 1.0f);
      Answer answer;
      ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), answer));
      ATTNFOLD_EXPECT_HOLDS(cases::judge_answer(call, answer)) << dtype_name(type) << head_dim;
      for (int32_t r = 0; r < 256; ++r) {
        const float value = value_of(type, r), lse = cases::lse_at(call, answer, r, 0);
        const bool bad = std::isnan(value) || value == kInf;
        EXPECT_TRUE(bad ? std::isnan(lse)
                        : lse == value || std::fabs(lse - value) <= 1e-6f * std::fabs(value))
            << dtype_name(type) << " " << r << ": " << lse << " for " << value;
      }
    }
  }
}

// ------------------------------------------------ scales

TEST(Formats, EveryTypeUnderEveryKindOfScale) {
  const cases::Context x = test::context();
  int32_t turn = 0;
  for (DType type : {DType::e4m3, DType::e5m2, DType::i8, DType::bf16, DType::f16, DType::f32}) {
    for (attnfold_scale_kind k_kind : kKinds) {
      for (attnfold_scale_kind v_kind : kKinds) {
        const int32_t group = 1 + turn % 5, page_size = turn % 3 ? 5 + turn % 7 : cases::kRagged;
        Spec spec = small_spec({2 * group, 2, 72, 40}, type, k_kind, v_kind, page_size);
        spec.problem.q_dtype = static_cast<attnfold_dtype>(turn % 3);
        spec.problem.o_dtype = turn % 2 ? ATTNFOLD_F32 : spec.problem.q_dtype;
        spec.problem.kv_layout = turn % 4 ? ATTNFOLD_NHD : ATTNFOLD_HND;
        spec.odd_strides = turn % 5 == 0;
        spec.q_range = turn % 4 == 1 ? 20.0f : 1.0f;
        ++turn;
        ATTNFOLD_EXPECT_HOLDS(cases::right_under(generate(spec, x.seed), x, {1, 3}))
            << dtype_name(type) << " k kind " << k_kind << " v kind " << v_kind;
      }
    }
  }
}

/** Sets every scale: value(kv head) at each place of the kind. */
template <typename Value>
void set_scales(const Scales& scales, int32_t kv_heads, Value value) {
  const int64_t n = static_cast<int64_t>(scales.values->size()) / 4;
  for (int64_t i = 0; i < n; ++i)
    store_f32(scales.values->data(), DType::f32, i, value(static_cast<int32_t>(i % kv_heads)));
}

/** Answers of the same codes under one scale, stated in each kind. */
TEST(Formats, OneScaleHasTheSameBitsInEveryKind) {
  const cases::Context x = test::context();
  for (DType type : kByteTypes) {
    for (float softcap : {0.0f, 20.0f}) {
      Answer first;
      for (attnfold_scale_kind kind : kKinds) {
        Spec spec = cases::make_spec({6, 2, 80, 48}, type, 16, kCausal, {1, 20}, {2300, 150});
        spec.problem.k_scale_kind = spec.problem.v_scale_kind = kind;
        spec.problem.logits_softcap = softcap;
        Call call = cases::zero_call(spec);
        const float range = type == DType::i8 ? 60.0f : 2.0f;
        cases::fill_noise(call, x.seed);
        cases::fill_k(call, [&](int r, int t, int h, int e) {
          return range * cases::noise(x.seed, r, t, h, e);
        });
        set_scales(call.k_scale, 2, [](int32_t) { return 0.37f; });
        set_scales(call.v_scale, 2, [](int32_t) { return -1.9f; });
        Answer answer;
        ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x, 3), answer));
        if (kind == ATTNFOLD_SCALE_PER_TENSOR) {
          ATTNFOLD_EXPECT_HOLDS(cases::judge_answer(call, answer)) << dtype_name(type);
          first = std::move(answer);
        } else {
          ATTNFOLD_EXPECT_HOLDS(same_bytes(call, first, answer, "kind " + std::to_string(kind)))
              << dtype_name(type);
        }
      }
    }
  }
}

TEST(Formats, AScaleOfOneHasTheBitsOfNone) {
  const cases::Context x = test::context();
  for (DType type : {DType::bf16, DType::f16, DType::f32}) {
    for (float q_range : {0.5f, 30.0f, 1e8f}) {  // the last: scores too large for the exact path
      Spec spec = small_spec({6, 2, 64, 64}, type, ATTNFOLD_SCALE_NONE, ATTNFOLD_SCALE_NONE);
      spec.problem.q_dtype = ATTNFOLD_F32;
      spec.problem.o_dtype = ATTNFOLD_F32;
      spec.q_range = q_range;
      Call call = generate(spec, x.seed);
      Answer plain, scaled;
      ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), plain));
      call.problem.k_scale_kind = call.problem.v_scale_kind = ATTNFOLD_SCALE_PER_HEAD;
      for (Scales* scales : {&call.k_scale, &call.v_scale}) {
        scales->values = std::make_shared<Buffer>(2 * sizeof(float));
        scales->strides.head = 1;
        set_scales(*scales, 2, [](int32_t) { return 1.0f; });
      }
      ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), scaled));
      ATTNFOLD_EXPECT_HOLDS(same_bytes(call, plain, scaled, dtype_name(type)));
    }
  }
}

TEST(Formats, NegativeZeroAndHugeScales) {
  const cases::Context x = test::context();
  constexpr float kValues[] = {-3.0f, 0.0f, 1e-30f, 1e20f, -1e-3f};
  for (float k_value : kValues) {
    for (float v_value : kValues) {
      Spec spec =
          small_spec({4, 2, 32, 32}, DType::i8, ATTNFOLD_SCALE_PER_HEAD, ATTNFOLD_SCALE_PER_HEAD);
      spec.problem.o_dtype = ATTNFOLD_F32;
      Call call = generate(spec, x.seed);
      set_scales(call.k_scale, 2, [&](int32_t h) { return h ? k_value : 0.02f; });
      set_scales(call.v_scale, 2, [&](int32_t h) { return h ? v_value : 0.02f; });
      ATTNFOLD_EXPECT_HOLDS(cases::right(call, x)) << k_value << " " << v_value;
    }
  }
}

/** A bad scale of one key of request 0, under kv head 1. */
std::string bad_scale_reaches_only_its_rows(const Call& clean, const Answer& want, int32_t key,
                                            bool of_k, float value, const cases::Context& x) {
  Call call = cases::deep_copy(clean);
  const Scales& scales = of_k ? call.k_scale : call.v_scale;
  const int64_t at = call.kv_element_offset(0, key, scales.strides, scales.offset);
  store_f32(scales.values->data(), DType::f32, at + scales.strides.head, value);
  Answer got;
  ATTNFOLD_HOLD(cases::run(call, cases::execution(x, 1 + key % 3), got));
  const int32_t qo_len = clean.num_rows(), group = clean.group_size();
  for (int32_t i = 0; i < qo_len; ++i) {
    const bool sees = ref::visible(clean.problem, qo_len, clean.kv_len[0], i, key);
    for (int32_t head = 0; head < clean.problem.qo_heads; ++head) {
      const std::string where = "token " + std::to_string(i) + ", head " + std::to_string(head);
      const float lse = cases::lse_at(call, got, i, head), o = cases::o_at(call, got, i, head, 5);
      if (sees && head / group == 1) {
        if (!std::isnan(o)) return where + ": a bad scale was swallowed";
        if (std::isnan(lse) != of_k) return where + ": lse is " + cases::text_of(lse);
      } else if (lse != cases::lse_at(clean, want, i, head) ||
                 o != cases::o_at(clean, want, i, head, 5)) {
        return where + ": a scale that it does not see reached it";
      }
    }
  }
  return cases::judge_answer(call, got);
}

TEST(Formats, ANonFiniteScaleReachesTheRowsThatSeeItAndNoOther) {
  const cases::Context x = test::context();
  for (float softcap : {0.0f, 30.0f}) {
    Spec spec = cases::make_spec({6, 2, 24, 24}, DType::e4m3, 16, kCausal, {18}, {140});
    spec.problem.k_scale_kind = spec.problem.v_scale_kind = ATTNFOLD_SCALE_PER_TOKEN;
    spec.problem.o_dtype = ATTNFOLD_F32;
    spec.problem.q_dtype = ATTNFOLD_F32;
    spec.problem.window_left = 30;
    spec.problem.logits_softcap = softcap;
    spec.poison = false;
    const Call clean = generate(spec, x.seed);
    Answer want;
    ATTNFOLD_ASSERT_HOLDS(cases::run(clean, cases::execution(x), want));
    ATTNFOLD_ASSERT_HOLDS(cases::judge_answer(clean, want));
    for (int32_t key = 88; key < 140; ++key) {
      const float value = key % 3 == 0 ? kNaN : key % 3 == 1 ? kInf : -kInf;
      for (bool of_k : {true, false}) {
        ATTNFOLD_EXPECT_HOLDS(bad_scale_reaches_only_its_rows(clean, want, key, of_k, value, x))
            << "key " << key << (of_k ? " of k" : " of v") << ", soft-cap " << softcap;
      }
    }
  }
}

/** A token's row has the same bits from a prefill, a chunk of it and a decode, whatever the scales.
 */
TEST(Formats, OneTokenHasOneAnswerUnderScalesPerToken) {
  const cases::Context x = test::context();
  for (DType type : kByteTypes) {
    Spec spec = cases::make_spec({6, 2, 72, 64}, type, 16, kCausal, {50}, {2200});
    spec.problem.k_scale_kind = spec.problem.v_scale_kind = ATTNFOLD_SCALE_PER_TOKEN;
    const Call call = generate(spec, x.seed);
    Answer whole;
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), whole));
    ATTNFOLD_EXPECT_HOLDS(cases::judge_tokens(call, whole, cases::sample_tokens(call, 3)));
    for (int32_t begin : {0, 7, 31, 49}) {
      const int32_t end = std::min(50, begin + 1 + begin % 4);
      const Call chunk = chunk_of(call, 0, begin, end);
      Answer part;
      ATTNFOLD_ASSERT_HOLDS(cases::run(chunk, cases::execution(x, 1 + begin % 3), part));
      ATTNFOLD_EXPECT_HOLDS(
          cases::same_rows(chunk, part, 0, whole, begin, end - begin, dtype_name(type)));
    }
    Answer repaged;
    ATTNFOLD_ASSERT_HOLDS(cases::run(repage(call, 3, ATTNFOLD_HND, true, x.seed + 1),
                                     cases::execution(x, 2), repaged));
    ATTNFOLD_EXPECT_HOLDS(same_bytes(call, whole, repaged, "repaged"));
    ATTNFOLD_ASSERT_HOLDS(cases::run(to_ragged(call), cases::execution(x, 5), repaged));
    ATTNFOLD_EXPECT_HOLDS(same_bytes(call, whole, repaged, "ragged"));
  }
}

// ------------------------------------------------ values that lie in the keys

struct Widths {
  int32_t qo_heads, kv_heads, qk, vo;
};

TEST(Formats, ValuesInKeysHaveTheBitsOfAStridedView) {
  const cases::Context x = test::context();
  constexpr Widths kWidths[] = {{16, 1, 576, 512}, {3, 1, 64, 64}, {4, 2, 96, 8}, {2, 2, 40, 24}};
  for (DType type : {DType::bf16, DType::f32, DType::e4m3, DType::i8}) {
    for (const Widths& w : kWidths) {
      for (int32_t page_size : {16, cases::kRagged}) {
        Spec spec = cases::make_spec({w.qo_heads, w.kv_heads, w.qk, w.vo}, type, page_size, kCausal,
                                     {1, 5, 1}, {2100, 140, 0});
        spec.problem.v_in_k = 1;
        const Call call = generate(spec, x.seed);
        ASSERT_EQ(call.tensors().v, nullptr);
        Call view = call;  // the same memory, as two tensors
        view.problem.v_in_k = 0;
        Answer in_k, as_view;
        ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), in_k));
        ATTNFOLD_ASSERT_HOLDS(cases::run(view, cases::execution(x, 3), as_view));
        ATTNFOLD_EXPECT_HOLDS(same_bytes(call, in_k, as_view, dtype_name(type)));
        ATTNFOLD_EXPECT_HOLDS(cases::judge_answer(call, in_k));
        const int64_t heads_bytes = w.kv_heads * dtype_bytes(type);
        EXPECT_EQ(in_k.report.kv_bytes, (2100 + 140) * heads_bytes * w.qk);
        EXPECT_EQ(as_view.report.kv_bytes, (2100 + 140) * heads_bytes * (w.qk + w.vo));
      }
    }
  }
}

TEST(Formats, ScalesPerTokenAreCountedAmongTheBytes) {
  const cases::Context x = test::context();
  Spec spec = cases::make_spec({4, 2, 64, 32}, DType::e4m3, 16, kCausal, {1}, {1000});
  spec.problem.k_scale_kind = ATTNFOLD_SCALE_PER_TOKEN;
  Answer answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run(generate(spec, x.seed), cases::execution(x), answer));
  EXPECT_EQ(answer.report.kv_bytes, 1000 * 2 * (64 + 32 + 4));
}

// ------------------------------------------------ a quantised o

/** o in e4m3 is o in f32 over its scale, rounded once more. */
std::string is_quantised(const Call& call, const Answer& narrow, const Answer& wide) {
  const int64_t n = int64_t{call.num_rows()} * call.problem.qo_heads * call.problem.head_dim_vo;
  for (int64_t i = 0; i < n; ++i) {
    const float o = load_f32(wide.o.data(), DType::f32, i);
    const uint8_t want = f32_to_e4m3(o / call.o_scale);
    if (narrow.o.data()[i] != std::byte{want})
      return "element " + std::to_string(i) + " of " + cases::text_of(o) + " is wrong";
  }
  return narrow.lse.size() == wide.lse.size() &&
                 std::memcmp(narrow.lse.data(), wide.lse.data(), wide.lse.size() * 4) == 0
             ? ""
             : "lse depends on the type of o";
}

TEST(Formats, AQuantisedOIsTheWideOneRounded) {
  const cases::Context x = test::context();
  for (DType type : {DType::bf16, DType::e4m3, DType::f32}) {
    for (float o_scale : {1.0f, 0.004f, 3e-5f, 1e6f, 1e-42f}) {  // saturated, vanished, subnormal
      Spec spec = cases::make_spec({6, 2, 72, 56}, type, 16, kCausal, {1, 40, 2}, {2300, 90, 0});
      spec.o_scale = o_scale;
      spec.problem.o_dtype = ATTNFOLD_F32;
      Call call = generate(spec, x.seed);
      Answer wide, narrow, spaced;
      ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), wide));
      call.problem.o_dtype = ATTNFOLD_E4M3;
      ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x, 3), narrow));
      // By default a narrow o may be of a row that rounds weights, which a wide one is not.
      if (narrow.numerics_id == wide.numerics_id)
        ATTNFOLD_EXPECT_HOLDS(is_quantised(call, narrow, wide)) << o_scale;
      else
        EXPECT_EQ(std::getenv("ATTNFOLD_ISA"), nullptr) << narrow.kernel;
      ATTNFOLD_EXPECT_HOLDS(cases::judge_answer(call, narrow)) << o_scale;
      ATTNFOLD_ASSERT_HOLDS(cases::run_spaced(call, cases::execution(x), spaced));
      ATTNFOLD_EXPECT_HOLDS(same_bytes(call, narrow, spaced, "with gaps"));
    }
  }
}

TEST(Formats, NaNStaysNaNInAQuantisedO) {
  const cases::Context x = test::context();
  Spec spec = cases::make_spec({2, 1, 32, 32}, DType::bf16, 16, kCausal, {2}, {50});
  spec.problem.o_dtype = ATTNFOLD_E4M3;
  spec.poison = false;
  Call call = generate(spec, x.seed);
  const int64_t v = call.kv_element_offset(0, 3, call.v_strides, call.v_offset);
  store_f32(call.v->data(), DType::bf16, v + 7, kNaN);
  store_f32(call.v->data(), DType::bf16, v + 8, kInf);
  store_f32(call.v->data(), DType::bf16, v + 9, -kInf);
  Answer answer;
  ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(x), answer));
  ATTNFOLD_EXPECT_HOLDS(cases::judge_answer(call, answer));
  EXPECT_TRUE(std::isnan(cases::o_at(call, answer, 0, 0, 7)));
  EXPECT_EQ(cases::o_at(call, answer, 0, 0, 8), 448.0f);
  EXPECT_EQ(cases::o_at(call, answer, 0, 0, 9), -448.0f);
}

}  // namespace
}  // namespace attnfold::check
