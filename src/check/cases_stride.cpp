// Named cases: strides of inputs and outputs, threads, instruction sets.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "check/cases_util.h"

namespace attnfold::check::cases {
namespace {

std::string interleaved_kv_block_stride(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Call call =
      zero_call(make_spec({8, 2, 128, 128}, DType::bf16, 16, kNone, {1, 1, 1}, {100, 16, 1}));
  fill_noise(call, seed);
  Call interleaved = call;  // [pages, 2, 16, heads, d]
  const int64_t span = call.k_strides.page, pages = call.problem.num_pages;
  auto cache = std::make_shared<Buffer>(static_cast<size_t>(2 * span * pages) * 2);
  for (int64_t page = 0; page < pages; ++page) {
    std::memcpy(cache->data() + 4 * span * page, call.k->data() + 2 * span * page,
                static_cast<size_t>(span) * 2);
    std::memcpy(cache->data() + 4 * span * page + 2 * span, call.v->data() + 2 * span * page,
                static_cast<size_t>(span) * 2);
  }
  interleaved.k = interleaved.v = cache;
  interleaved.k_strides.page = interleaved.v_strides.page = 2 * span;
  interleaved.v_offset = span;
  Answer a, b;
  ATTNFOLD_HOLD(run(call, execution(x), a));
  ATTNFOLD_HOLD(judge_answer(call, a));
  ATTNFOLD_HOLD(run(interleaved, execution(x), b));
  return same_bytes(call, a, b, "K and V interleaved");
}

/** The tensor [tokens, heads, width], packed, copied to [heads, tokens, width]; `s` becomes the new
 * strides. */
std::shared_ptr<Buffer> head_major(const Buffer& packed, int64_t tokens, int64_t heads,
                                   int64_t width, Strides& s) {
  auto out = std::make_shared<Buffer>(packed.size());
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      std::memcpy(out->data() + (h * tokens + t) * width * 2,
                  packed.data() + (t * heads + h) * width * 2, static_cast<size_t>(width) * 2);
    }
  }
  s.token = width;
  s.head = tokens * width;
  return out;
}

std::string transposed_value_view(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Call call = zero_call(make_spec({16, 4, 256, 256}, DType::f16, kRagged, kCausal, {13}, {13}));
  fill_noise(call, seed);
  Answer want;
  ATTNFOLD_HOLD(run(call, execution(x), want));
  ATTNFOLD_HOLD(judge_answer(call, want));
  for (int which : {1, 2, 4, 7}) {  // bits: q, k, v
    Call view = call;
    if (which & 1) view.q = head_major(*call.q, 13, 16, 256, view.q_strides);
    if (which & 2) view.k = head_major(*call.k, 13, 4, 256, view.k_strides);
    if (which & 4) view.v = head_major(*call.v, 13, 4, 256, view.v_strides);
    Answer got;
    ATTNFOLD_HOLD(run(view, execution(x), got));
    ATTNFOLD_HOLD(same_bytes(call, want, got, "transposed tensors " + std::to_string(which)));
  }
  return "";
}

std::string combine_row_stride(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Call call = zero_call(make_spec({8, 8, 64, 64}, DType::f16, kRagged, kNone, {4}, {2048}));
  fill_noise(call, seed);
  Answer packed;
  ATTNFOLD_HOLD(run(call, execution(x, 1), packed));
  ATTNFOLD_HOLD(judge_answer(call, packed));
  for (int32_t workers : {1, 2, 5, 8}) {
    Answer spaced;
    const std::string where = std::to_string(workers) + " workers";
    ATTNFOLD_HOLD(in(where, run_spaced(call, execution(x, workers), spaced)));
    ATTNFOLD_HOLD(same_bytes(call, packed, spaced, where));
  }
  return "";
}

std::string merge_mask_stride(uint64_t seed, const char*) {
  const auto draw = [&](int64_t salt) {
    State s;
    for (int64_t i = 0; i < 4 * 2 * 64; ++i) s.o.push_back(noise(seed, i, salt, 0, 0));
    for (int64_t i = 0; i < 4 * 2; ++i) s.lse.push_back(noise(seed, i, salt, 1, 0));
    return s;
  };
  State a = draw(0), b = draw(1), all;
  State both[2] = {a, b};
  ATTNFOLD_HOLD(merge(4, 2, 64, both, all));
  const uint8_t mask[8] = {1, 0, 0, 1, 1, 0, 0, 1};  // at stride 2: 1 0 1 0
  for (int64_t stride : {2, 0}) {
    for (uint8_t shift : {uint8_t{0}, uint8_t{1}}) {  // at stride 0: all rows, then none
      if (stride == 2 && shift == 1) continue;
      State out = a;
      attnfold_state sides[2] = {view(out), view(b)};
      if (attnfold_merge(4, 2, 64, sides, 2, &sides[0], mask + shift, stride) != ATTNFOLD_OK)
        return attnfold_last_error();
      for (int64_t row = 0; row < 4; ++row) {
        const State& want = mask[shift + row * stride] ? all : a;
        if (std::memcmp(&want.o[row * 128], &out.o[row * 128], 512) != 0 ||
            std::memcmp(&want.lse[row * 2], &out.lse[row * 2], 8) != 0) {
          return "stride " + std::to_string(stride) + ": row " + std::to_string(row) + " is wrong";
        }
      }
    }
  }
  return "";
}

std::string cpu_thread_race_scores(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Call call = zero_call(make_spec({32, 8, 64, 64}, DType::f32, 32, kNone, {1}, {70}));
  fill_noise(call, seed);
  std::vector<std::unique_ptr<Plan>> plans;
  const int32_t threads[] = {1, 2, 7, 16, 64};
  for (int32_t n : threads)
    plans.push_back(std::make_unique<Plan>(call.problem, execution(x, 0, 0, n)));
  for (int32_t kv_len = 1; kv_len <= 70; ++kv_len) {
    call.kv_len = {kv_len};
    Answer first;
    ATTNFOLD_HOLD(run(call, execution(x), first));
    if (kv_len % 10 == 1) ATTNFOLD_HOLD(judge_answer(call, first));
    for (size_t i = 0; i < plans.size(); ++i) {
      ATTNFOLD_HOLD(plans[i]->update(call));
      const int32_t repeats = kv_len == 70 && is_fast(x) ? 50 : 1;
      for (int32_t repeat = 0; repeat < repeats; ++repeat) {
        Answer again;
        ATTNFOLD_HOLD(plans[i]->run(call, again));
        ATTNFOLD_HOLD(same_bytes(
            call, first, again,
            std::to_string(threads[i]) + " threads, " + std::to_string(kv_len) + " keys"));
      }
    }
  }
  return "";
}

/** A host's pool, as far as a limit is concerned: notes the largest number of bodies asked for at
 * once. */
void counting_parallel_for(void* user, int32_t n, void (*body)(void*, int32_t), void* context) {
  auto& most = *static_cast<std::atomic<int32_t>*>(user);
  for (int32_t seen = most; n > seen && !most.compare_exchange_weak(seen, n);) {
  }
  for (int32_t i = 0; i < n; ++i) body(context, i);
}

std::string cpu_thread_oversubscription(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Call call = zero_call(make_spec({32, 8, 128, 128}, DType::f32, 16, kNone, {1}, {2048}));
  fill_noise(call, seed);
  Answer want;
  ATTNFOLD_HOLD(run(call, execution(x), want));
  ATTNFOLD_HOLD(judge_answer(call, want));
  std::atomic<int32_t> most{0};
  attnfold_execution e = execution(x, 0, 0, 4);
  e.parallel_for = counting_parallel_for;
  e.parallel_user = &most;
  std::string wrong[4];
  std::vector<std::thread> callers;
  for (int32_t caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      Plan plan(call.problem, e);
      wrong[caller] = plan.update(call);
      for (int32_t repeat = 0; repeat < 3 && wrong[caller].empty(); ++repeat) {
        Answer got;
        wrong[caller] = plan.run(call, got);
        if (wrong[caller].empty())
          wrong[caller] = same_bytes(call, want, got, "caller " + std::to_string(caller));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const std::string& text : wrong) ATTNFOLD_HOLD(text);
  if (most < 1) return "the host's parallel_for was not used";
  return most <= 4 ? "" : "a limit of 4 threads, but " + std::to_string(most) + " bodies at once";
}

std::string cpu_isa_not_used(uint64_t seed, const char*) {
  Call call = zero_call(make_spec({8, 2, 128, 128}, DType::bf16, 16, kNone, {1}, {1024}));
  fill_noise(call, seed);
  const ref::Truth truth = ref::answer(call);
  std::vector<Answer> answers;
  for (int32_t i = 0; i < attnfold_num_kernels(); ++i) {
    attnfold_kernel_info info{};
    info.struct_size = sizeof(info);
    if (attnfold_get_kernel(i, &info) != ATTNFOLD_OK) return attnfold_last_error();
    if (!info.available || attnfold_kernel_serves(i, &call.problem) != ATTNFOLD_OK) continue;
    Answer answer;
    ATTNFOLD_HOLD(in(info.name, run(call, execution({seed, info.isa}), answer)));
    if (answer.kernel.rfind(std::string("cpu_") + info.isa + "/", 0) != 0) {
      return std::string("forced ") + info.isa + ", got " + answer.kernel;
    }
    const Judgement j = judge(call, truth, answer.o.data(), DType::bf16, answer.lse.data(), 1,
                              bound_of(answer.numerics_id));
    if (!j.right) return std::string(info.name) + ": " + j.text;
    for (const Answer& other : answers) {
      if (other.numerics_id == answer.numerics_id) {
        ATTNFOLD_HOLD(same_bytes(call, other, answer, other.kernel + " and " + answer.kernel));
      }
    }
    answers.push_back(std::move(answer));
  }
  return answers.empty() ? "no kernel row serves the call" : "";
}

constexpr NamedCase kCases[] = {
    {"interleaved_kv_block_stride", "K and V as views of one cache have the bits of copies",
     "ROCm/aiter#3498", interleaved_kv_block_stride},
    {"transposed_value_view", "head-major views of q, k and v have the bits of copies",
     "flagos-ai/FlagGems#5896", transposed_value_view},
    {"combine_row_stride", "strided outputs of several workers leave everything round them alone",
     "flagos-ai/FlagGems#5235", combine_row_stride},
    {"merge_mask_stride", "a row mask is read at its stride, 0 too",
     "flashinfer-ai/flashinfer#5055", merge_mask_stride},
    {"cpu_thread_race_scores", "repeats and thread counts do not change a bit",
     "openvinotoolkit/openvino#30692", cpu_thread_race_scores},
    {"cpu_thread_oversubscription",
     "concurrent callers with a pool of their own keep the limit and the bits",
     "microsoft/onnxruntime#2512", cpu_thread_oversubscription},
    {"cpu_isa_not_used", "each available instruction set can be forced, is reported, and is right",
     "vllm-project/vllm#14701", cpu_isa_not_used},
};

}  // namespace

std::span<const NamedCase> stride_cases() { return kCases; }

}  // namespace attnfold::check::cases
