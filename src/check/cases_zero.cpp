// Named cases: zero lengths, empty batches.
#include <algorithm>

#include "check/cases_util.h"

namespace attnfold::check::cases {
namespace {

std::string exhausted_prefix_chunk(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const Lengths suffix = {9, 4, 16, 2}, prefix = {20, 0, 7, 33};
  const auto one_batch = [&](const Lengths& own, const Lengths& before) -> std::string {
    Lengths kv_len;
    for (size_t r = 0; r < own.size(); ++r) kv_len.push_back(own[r] + before[r]);
    Call whole =
        zero_call(make_spec({16, 16, 192, 128}, DType::bf16, kRagged, kCausal, own, kv_len));
    whole.problem.o_dtype = ATTNFOLD_F32;
    fill_noise(whole, seed);
    const auto part = [&](attnfold_mask_kind mask, auto begin_of, auto len_of,
                          State& state) -> std::string {
      Lengths skip, length;
      for (int32_t r = 0; r < whole.batch; ++r) {
        skip.push_back(begin_of(r));
        length.push_back(len_of(r));
      }
      Call call = skip_keys(whole, skip, length);
      call.problem.mask = mask;
      Answer answer;
      ATTNFOLD_HOLD(run(call, execution(x), answer));
      state = state_of(call, answer);
      return "";
    };
    State total;
    ATTNFOLD_HOLD(part(
        kCausal, [&](int r) { return before[r]; }, [&](int r) { return own[r]; }, total));
    for (int32_t chunk = 0; chunk < 5;
         ++chunk) {  // chunks of 8: from the second on some request has none left
      State sides[2], merged;
      ATTNFOLD_HOLD(part(
          kNone, [&](int r) { return std::min(8 * chunk, before[r]); },
          [&](int r) { return std::min(8, std::max(0, before[r] - 8 * chunk)); }, sides[1]));
      sides[0] = std::move(total);
      ATTNFOLD_HOLD(merge(whole.num_rows(), 16, 128, sides, merged));
      total = std::move(merged);
    }
    return judge_state(whole, total, ref::answer(whole));
  };
  ATTNFOLD_HOLD(one_batch(suffix, prefix));
  return in("batch of 1", one_batch({16}, {7}));
}

std::string decode_empty_rows_written(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (int32_t q_len : {1, 4}) {
    Spec spec = make_spec({16, 1, 576, 512}, DType::bf16, 64, kNone, Lengths(3, q_len), {0, 65, 0});
    spec.problem.o_dtype = ATTNFOLD_F32;
    const Call call = generate(spec, seed);
    Answer answer;
    ATTNFOLD_HOLD(same_under(call, x, {1, 3}, answer));
    ATTNFOLD_HOLD(judge_answer(call, answer));
    for (int32_t i = 0; i < q_len; ++i) {
      ATTNFOLD_HOLD(row_is_empty(call, answer, i));
      ATTNFOLD_HOLD(row_is_empty(call, answer, 2 * q_len + i));
    }
    State sides[2] = {state_of(call, answer), state_of(call, answer)}, merged;
    for (float& lse : sides[1].lse) lse = 0.5f;  // another rank, with keys for all
    ATTNFOLD_HOLD(merge(call.num_rows(), 16, 512, sides, merged));
    for (float lse : merged.lse) {
      if (!std::isfinite(lse)) return "merged lse is " + text_of(lse);
    }
  }
  return "";
}

std::string all_kv_zero(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (const Lengths& qo_len : {Lengths{1, 1, 1, 1}, Lengths{8, 0, 3, 1}}) {
    for (int32_t page_size : {kRagged, 16}) {
      for (attnfold_mask_kind mask : {kNone, kCausal}) {
        Call call = zero_call(
            make_spec({8, 2, 128, 128}, DType::bf16, page_size, mask, qo_len, Lengths(4, 0)));
        fill_noise(call, seed);
        const Plan plan(call.problem, execution(x));
        if (plan.get() == nullptr) return plan.error();
        const attnfold_lengths lengths = call.lengths();
        if (attnfold_plan_update(plan.get(), &lengths, nullptr) != ATTNFOLD_OK) {
          return attnfold_last_error();
        }
        Answer answer;
        answer.o = Buffer(static_cast<size_t>(call.num_rows()) * 8 * 128 * 2);
        fill_buffer(answer.o, DType::bf16, kNaN);
        answer.lse.assign(static_cast<size_t>(call.num_rows()) * 8, kNaN);
        attnfold_tensors t = call.tensors();
        t.k = t.v = nullptr;
        t.o = answer.o.data();
        t.lse = answer.lse.data();
        Buffer workspace(attnfold_plan_workspace_bytes(plan.get()));
        if (attnfold_plan_run(plan.get(), &t, workspace.data(), workspace.size(), nullptr) !=
            ATTNFOLD_OK) {
          return attnfold_last_error();
        }
        for (int32_t row = 0; row < call.num_rows(); ++row)
          ATTNFOLD_HOLD(row_is_empty(call, answer, row));
      }
    }
  }
  return "";
}

std::string max_q_1_with_zero_q(uint64_t seed, const char* isa) {
  for (const auto& [qo_len, kv_len] : {std::pair{Lengths{1, 0, 1}, Lengths{3, 0, 5}},
                                       std::pair{Lengths{0, 1, 0}, Lengths{4, 2, 0}}}) {
    Spec spec = make_spec({9, 3, 64, 64}, DType::bf16, kRagged, kCausal, qo_len, kv_len);
    spec.problem.sm_scale = 1.0f;
    ATTNFOLD_HOLD(right_under(generate(spec, seed), {seed, isa}, {1, 2}));
  }
  return "";
}

std::string head_dim_256_zero_lengths(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t cut = is_fast(x) ? 1 : 8;
  for (attnfold_mask_kind mask : {kNone, kCausal}) {
    Call call = zero_call(make_spec({4, 1, 256, 256}, DType::bf16, kRagged, mask,
                                    {0, 1208 / cut, 840 / cut, 0, 3},
                                    {2538, 1742 / cut, 840 / cut, 3072, 0}));
    fill_noise(call, seed);
    ATTNFOLD_HOLD(right_on_sample(call, x, 9));
  }
  return "";
}

std::string batch_zero(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  for (int32_t page_size : {kRagged, 16}) {
    Call none = zero_call(make_spec({1, 1, 64, 64}, DType::f16, page_size, kNone, {}, {}));
    Answer answer;
    ATTNFOLD_HOLD(in("batch 0", run(none, execution(x), answer)));
    Call idle = generate(
        make_spec({1, 1, 64, 64}, DType::f16, page_size, kNone, {0, 0, 0}, {5, 0, 17}), seed);
    ATTNFOLD_HOLD(in("no tokens", run(idle, execution(x), answer)));
  }
  return "";
}

std::string cpu_empty_tensor_fpe(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Answer answer;
  const Spec no_rows = make_spec({2, 2, 8, 8}, DType::f32, kRagged, kNone, {0}, {4});
  ATTNFOLD_HOLD(in("no tokens", run(generate(no_rows, seed), execution(x), answer)));
  const Call no_keys =
      generate(make_spec({2, 2, 8, 8}, DType::f32, kRagged, kNone, {4}, {0}), seed);
  ATTNFOLD_HOLD(run(no_keys, execution(x), answer));
  for (int32_t row = 0; row < 4; ++row) ATTNFOLD_HOLD(row_is_empty(no_keys, answer, row));
  const Call full = generate(make_spec({2, 2, 8, 8}, DType::f32, kRagged, kNone, {4}, {4}), seed);
  for (int32_t attnfold_problem::*field :
       {&attnfold_problem::qo_heads, &attnfold_problem::kv_heads, &attnfold_problem::head_dim_qk,
        &attnfold_problem::head_dim_vo}) {
    attnfold_problem problem = full.problem;
    problem.*field = 0;
    attnfold_plan* plan = nullptr;
    const attnfold_execution e = execution(x);
    const attnfold_status status = attnfold_plan_create(&problem, &e, &plan);
    attnfold_plan_destroy(plan);
    if (status != ATTNFOLD_INVALID_ARGUMENT)
      return std::string("a zero gave ") + attnfold_status_name(status);
  }
  return "";
}

constexpr NamedCase kCases[] = {
    {"exhausted_prefix_chunk",
     "a running merge over prefix chunks, some of them empty, equals one pass",
     "sgl-project/sglang#22688", exhausted_prefix_chunk},
    {"decode_empty_rows_written",
     "rows without keys are written, and merge with another rank to finite results",
     "flashinfer-ai/flashinfer#4975", decode_empty_rows_written},
    {"all_kv_zero", "no keys at all: k and v may be NULL, every row is empty",
     "Dao-AILab/flash-attention#2470", all_kv_zero},
    {"max_q_1_with_zero_q", "decodes beside requests without tokens",
     "Dao-AILab/flash-attention#1537", max_q_1_with_zero_q},
    {"head_dim_256_zero_lengths", "zero lengths of either kind in a batch of width 256",
     "Dao-AILab/flash-attention#2568", head_dim_256_zero_lengths},
    {"batch_zero", "no requests, or none with tokens: nothing to do, no error",
     "PaddlePaddle/Paddle#78446", batch_zero},
    {"cpu_empty_tensor_fpe", "each dimension zero in turn: an empty answer or a clean error",
     "pytorch/pytorch#141219", cpu_empty_tensor_fpe},
};

}  // namespace

std::span<const NamedCase> zero_cases() { return kCases; }

}  // namespace attnfold::check::cases
