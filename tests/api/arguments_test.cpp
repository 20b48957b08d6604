// Bad arguments of create, update and run: each is named, with what was expected and what came, and
// nothing is written.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>

#include "api/small_call.h"

namespace attnfold::api_test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

template <class T>
struct Fault {
  const char* argument;  // as the message must name it
  std::function<void(T&)> make;
};

template <class E>
E enumerator(int value) {  // a value that a C caller can pass
  E e;
  std::memcpy(&e, &value, sizeof(e));
  return e;
}

TEST(CreateArguments, EveryBadFieldOfTheProblemIsNamed) {
  using P = attnfold_problem;
  const Fault<P> faults[] = {
      {"qo_heads", [](P& p) { p.qo_heads = 0; }},
      {"qo_heads", [](P& p) { p.qo_heads = -4; }},
      {"qo_heads", [](P& p) { p.qo_heads = INT32_MAX; }},
      {"kv_heads", [](P& p) { p.kv_heads = 0; }},
      {"kv_heads", [](P& p) { p.kv_heads = INT32_MIN; }},
      {"kv_heads", [](P& p) { p.kv_heads = 3; }},
      {"kv_heads", [](P& p) { p.kv_heads = 8; }},  // more than qo_heads
      {"head_dim_qk", [](P& p) { p.head_dim_qk = 0; }},
      {"head_dim_qk", [](P& p) { p.head_dim_qk = 12; }},
      {"head_dim_qk", [](P& p) { p.head_dim_qk = 584; }},
      {"head_dim_qk", [](P& p) { p.head_dim_qk = -8; }},
      {"head_dim_vo", [](P& p) { p.head_dim_vo = 20; }},
      {"head_dim_vo", [](P& p) { p.head_dim_vo = INT32_MAX; }},
      {"q_dtype", [](P& p) { p.q_dtype = enumerator<attnfold_dtype>(3); }},
      {"q_dtype", [](P& p) { p.q_dtype = p.o_dtype = ATTNFOLD_E4M3; }},
      {"kv_dtype", [](P& p) { p.kv_dtype = enumerator<attnfold_dtype>(-1); }},
      {"kv_dtype", [](P& p) { p.kv_dtype = enumerator<attnfold_dtype>(6); }},
      {"k_scale_kind", [](P& p) { p.kv_dtype = ATTNFOLD_E4M3; }},  // 8 bits without a scale
      {"k_scale_kind", [](P& p) { p.k_scale_kind = enumerator<attnfold_scale_kind>(4); }},
      {"v_scale_kind", [](P& p) { p.v_scale_kind = enumerator<attnfold_scale_kind>(-1); }},
      {"v_scale_kind",
       [](P& p) {
         p.kv_dtype = ATTNFOLD_I8;
         p.k_scale_kind = ATTNFOLD_SCALE_PER_TENSOR;
       }},
      {"o_dtype", [](P& p) { p.o_dtype = ATTNFOLD_I8; }},
      {"o_dtype", [](P& p) { p.o_dtype = ATTNFOLD_E5M2; }},
      {"v_in_k", [](P& p) { p.v_in_k = 2; }},
      {"head_dim_vo",
       [](P& p) {
         p.v_in_k = 1;
         p.head_dim_vo = 24;  // wider than k
       }},
      {"o_dtype", [](P& p) { p.o_dtype = enumerator<attnfold_dtype>(99); }},
      {"o_dtype", [](P& p) { p.o_dtype = ATTNFOLD_BF16; }},  // neither q's nor f32
      {"kv_storage", [](P& p) { p.kv_storage = enumerator<attnfold_kv_storage>(2); }},
      {"kv_layout", [](P& p) { p.kv_layout = enumerator<attnfold_kv_layout>(-5); }},
      {"page_size", [](P& p) { p.page_size = 0; }},
      {"page_size", [](P& p) { p.page_size = -16; }},
      {"num_pages", [](P& p) { p.num_pages = -1; }},
      {"num_pages", [](P& p) { p.num_pages = INT64_MIN; }},
      {"mask", [](P& p) { p.mask = enumerator<attnfold_mask_kind>(7); }},
      {"window_left", [](P& p) { p.window_left = -2; }},
      {"window_right", [](P& p) { p.window_right = INT32_MIN; }},
      {"sm_scale", [](P& p) { p.sm_scale = kNaN; }},
      {"sm_scale", [](P& p) { p.sm_scale = kInf; }},
      {"sm_scale", [](P& p) { p.sm_scale = -0.5f; }},
      {"sm_scale", [](P& p) { p.sm_scale = -kInf; }},
      {"max_batch", [](P& p) { p.max_batch = -1; }},
      {"max_batch", [](P& p) { p.max_batch = INT32_MAX; }},
      {"max_qo_rows", [](P& p) { p.max_qo_rows = -1; }},
      {"max_qo_rows", [](P& p) { p.max_qo_rows = INT32_MAX; }},
      {"max_kv_len", [](P& p) { p.max_kv_len = INT32_MIN; }},
      {"max_kv_len", [](P& p) { p.max_kv_len = INT32_MAX; }},
      {"logits_softcap", [](P& p) { p.logits_softcap = -1.0f; }},
      {"logits_softcap", [](P& p) { p.logits_softcap = kNaN; }},
      {"logits_softcap", [](P& p) { p.logits_softcap = kInf; }},
      // c * log2(e), and sm_scale / c, are floats of the kernels.
      {"logits_softcap", [](P& p) { p.logits_softcap = 2.36e38f; }},
      {"logits_softcap", [](P& p) { p.logits_softcap = 3.4028234e38f; }},
      {"logits_softcap", [](P& p) { p.logits_softcap = 1e-45f; }},
      {"logits_softcap", [](P& p) { p.sm_scale = 1e30f, p.logits_softcap = 1e-20f; }},
      {"attention_chunk", [](P& p) { p.attention_chunk = -1; }},
      {"sink_tokens", [](P& p) { p.sink_tokens = INT32_MIN; }},
      {"sparse_block_size", [](P& p) { p.sparse_block_size = -1; }},
      {"sparse_block_size", [](P& p) { p.sparse_block_size = INT32_MAX; }},
      {"sparse_local_blocks", [](P& p) { p.sparse_local_blocks = 1; }},
      {"sparse_vertical_stride", [](P& p) { p.sparse_vertical_stride = 1; }},
      {"sparse_head_step", [](P& p) { p.sparse_head_step = 1; }},
  };
  for (const auto& [argument, make] : faults) {
    SmallCall call;
    make(call.problem);
    attnfold_plan* const untouched = reinterpret_cast<attnfold_plan*>(0x5a5a);
    attnfold_plan* plan = untouched;
    EXPECT_EQ(attnfold_plan_create(&call.problem, nullptr, &plan), ATTNFOLD_INVALID_ARGUMENT)
        << argument;
    EXPECT_EQ(plan, untouched) << argument;
    EXPECT_TRUE(names_argument(attnfold_last_error(), argument));
    for (int32_t i = 0; i < attnfold_num_kernels(); ++i) {
      EXPECT_EQ(attnfold_kernel_serves(i, &call.problem), ATTNFOLD_INVALID_ARGUMENT) << argument;
    }
  }
}

TEST(CreateArguments, EveryBadFieldOfTheExecutionIsNamed) {
  using E = attnfold_execution;
  const Fault<E> faults[] = {
      {"num_threads", [](E& e) { e.num_threads = -1; }},
      {"num_threads", [](E& e) { e.num_threads = 1025; }},
      {"num_workers", [](E& e) { e.num_workers = INT32_MIN; }},
      {"num_workers", [](E& e) { e.num_workers = INT32_MAX; }},
      {"isa", [](E& e) { e.isa = "sse9"; }},
      {"isa", [](E& e) { e.isa = "AVX2"; }},
      {"isa", [](E& e) { e.isa = "avx2 "; }},
      {"isa", [](E& e) { e.isa = "avx512_bf16_p61"; }},
      {"isa", [](E& e) { e.isa = "my_bf16"; }},
      {"prefix_use", [](E& e) { e.prefix_use = static_cast<attnfold_prefix_use>(3); }},
      {"prefix_use", [](E& e) { e.prefix_use = static_cast<attnfold_prefix_use>(-1); }},
  };
  for (const auto& [argument, make] : faults) {
    SmallCall call;
    attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
    make(e);
    attnfold_plan* plan = nullptr;
    EXPECT_EQ(attnfold_plan_create(&call.problem, &e, &plan), ATTNFOLD_INVALID_ARGUMENT)
        << argument;
    EXPECT_EQ(plan, nullptr);
    EXPECT_TRUE(names_argument(attnfold_last_error(), argument));
  }
}

TEST(CreateArguments, NullPointersAreNamed) {
  SmallCall call;
  attnfold_plan* plan = nullptr;
  EXPECT_EQ(attnfold_plan_create(nullptr, nullptr, &plan), ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_TRUE(names_argument(attnfold_last_error(), "problem"));
  EXPECT_EQ(attnfold_plan_create(&call.problem, nullptr, nullptr), ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_TRUE(names_argument(attnfold_last_error(), "plan"));
  attnfold_plan_destroy(nullptr);
}

TEST(UpdateArguments, EveryBadLengthIsNamedAndTheLastGoodScheduleStays) {
  using C = SmallCall;
  const Fault<C> faults[] = {
      {"batch", [](C& c) { c.lengths.batch = -1; }},
      {"batch", [](C& c) { c.lengths.batch = 3; }},
      {"batch", [](C& c) { c.lengths.batch = INT32_MAX; }},
      {"qo_indptr", [](C& c) { c.lengths.qo_indptr = nullptr; }},
      {"qo_indptr[0]", [](C& c) { c.qo_indptr[0] = 1; }},
      {"qo_indptr[1]", [](C& c) { c.qo_indptr[1] = -1; }},
      {"qo_indptr[2]", [](C& c) { c.qo_indptr[2] = 0; }},
      {"qo_indptr[2]", [](C& c) { c.qo_indptr[2] = 7; }},  // past max_qo_rows
      {"kv_len", [](C& c) { c.lengths.kv_len = nullptr; }},
      {"kv_len[0]", [](C& c) { c.kv_len[0] = -1; }},
      {"kv_len[1]", [](C& c) { c.kv_len[1] = 301; }},
      {"kv_len[1]", [](C& c) { c.kv_len[1] = INT32_MAX; }},
      {"kv_len[0]", [](C& c) { c.lengths.block_table_stride = 18; }},  // 300 keys need 19 pages
      {"block_table", [](C& c) { c.lengths.block_table = nullptr; }},
      {"block_table_stride", [](C& c) { c.lengths.block_table_stride = -1; }},
      {"block_table[0][0]", [](C& c) { c.block_table[0] = -1; }},
      {"block_table[0][18]", [](C& c) { c.block_table[18] = 22; }},
      {"block_table[1][2]", [](C& c) { c.block_table[19 + 2] = INT32_MIN; }},
      {"kv_indices", [](C& c) { c.lengths.kv_indices = c.block_table.data(); }},
      {"kv_indptr",
       [](C& c) {
         c.lengths.kv_indices = c.block_table.data();
         c.lengths.block_table = nullptr;
       }},
      {"kv_len[0]",
       [](C& c) {
         static const int32_t kFirstHasOnePage[] = {0, 1, 22};
         c.lengths.kv_indices = c.block_table.data();
         c.lengths.kv_indptr = kFirstHasOnePage;
         c.lengths.block_table = nullptr;
       }},
  };
  for (const auto& [argument, make] : faults) {
    SmallCall call, bad;
    const PlanPtr plan = make_plan(call, execution(1, 3));
    ASSERT_NE(plan, nullptr);
    call.poison_outputs();
    ASSERT_EQ(run(plan.get(), call.tensors), ATTNFOLD_OK);
    const Bytes before = call.output_bytes();

    make(bad);
    EXPECT_EQ(attnfold_plan_update(plan.get(), &bad.lengths, nullptr), ATTNFOLD_INVALID_ARGUMENT)
        << argument;
    EXPECT_TRUE(names_argument(attnfold_last_error(), argument));

    call.poison_outputs();
    EXPECT_EQ(run(plan.get(), call.tensors), ATTNFOLD_OK) << attnfold_last_error();
    EXPECT_TRUE(same_bytes(call.output_bytes(), before)) << "after a failed update: " << argument;
  }
}

TEST(UpdateArguments, NullsAndStreamsAreNamed) {
  SmallCall call;
  const PlanPtr plan = make_plan(call, execution(1, 1));
  EXPECT_EQ(attnfold_plan_update(nullptr, &call.lengths, nullptr), ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_TRUE(names_argument(attnfold_last_error(), "plan"));
  EXPECT_EQ(attnfold_plan_update(plan.get(), nullptr, nullptr), ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_TRUE(names_argument(attnfold_last_error(), "lengths"));
  EXPECT_EQ(attnfold_plan_update(plan.get(), &call.lengths, &call), ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_TRUE(names_argument(attnfold_last_error(), "stream"));
}

TEST(UpdateArguments, AnEmptyBatchNeedsNoPointers) {
  SmallCall call;
  const PlanPtr plan = make_plan(call, execution(2, 4));
  const attnfold_lengths none = ATTNFOLD_LENGTHS_INIT;
  const attnfold_tensors no_tensors = ATTNFOLD_TENSORS_INIT;
  ASSERT_EQ(attnfold_plan_update(plan.get(), &none, nullptr), ATTNFOLD_OK) << attnfold_last_error();
  EXPECT_EQ(run(plan.get(), no_tensors), ATTNFOLD_OK) << attnfold_last_error();
}

TEST(UpdateArguments, RequestsWithoutKeysNeedNoPages) {
  SmallCall call({{1, 0}, {3, 0}});
  call.lengths.block_table = nullptr;
  call.tensors.k = call.tensors.v = nullptr;
  static const int32_t kOffsets[] = {0, 5, 9};  // pages that hold nothing yet
  call.lengths.kv_indptr = kOffsets;
  const Bytes bytes = answer(call, execution(1, 2));
  ASSERT_FALSE(bytes.empty());
  for (size_t i = 0; i < call.o.size(); ++i) EXPECT_EQ(call.o.data()[i], 0.0f);
  for (size_t i = 0; i < call.lse.size(); ++i) EXPECT_EQ(call.lse.data()[i], -kInf);
}

TEST(RunArguments, EveryBadTensorIsNamedAndNothingIsWritten) {
  using C = SmallCall;
  const auto shifted = [](const void* p, int bytes) {
    return const_cast<char*>(static_cast<const char*>(p)) + bytes;
  };
  const Fault<C> faults[] = {
      {"q", [](C& c) { c.tensors.q = nullptr; }},
      {"k", [](C& c) { c.tensors.k = nullptr; }},
      {"v", [](C& c) { c.tensors.v = nullptr; }},
      {"o", [](C& c) { c.tensors.o = nullptr; }},
      {"q", [&](C& c) { c.tensors.q = shifted(c.tensors.q, 4); }},
      {"k", [&](C& c) { c.tensors.k = shifted(c.tensors.k, 8); }},
      {"v", [&](C& c) { c.tensors.v = shifted(c.tensors.v, 15); }},
      {"o", [&](C& c) { c.tensors.o = shifted(c.tensors.o, 4); }},
      {"lse", [&](C& c) { c.tensors.lse = reinterpret_cast<float*>(shifted(c.lse.data(), 2)); }},
      {"o", [](C& c) { c.tensors.o = const_cast<void*>(c.tensors.q); }},
      {"o", [](C& c) { c.tensors.o = const_cast<void*>(c.tensors.k); }},
      {"o", [](C& c) { c.tensors.o = c.v.data() + c.v.size() - 4; }},
      {"lse", [](C& c) { c.tensors.lse = c.o.data() + c.o.size() - 1; }},
      {"lse", [](C& c) { c.tensors.lse = c.q.data(); }},
      {"o_stride_row", [](C& c) { c.tensors.o_stride_row = 8; }},
      {"o_stride_row", [](C& c) { c.tensors.o_stride_head = 15; }},
      {"lse_stride_row", [](C& c) { c.tensors.lse_stride_row = 1; }},
      {"q", [](C& c) { c.tensors.q_stride_row = INT64_MAX; }},
      {"q", [](C& c) { c.tensors.q_stride_head = INT64_MIN; }},
      {"k", [](C& c) { c.tensors.k_stride_page = INT64_MAX; }},
      {"v", [](C& c) { c.tensors.v_stride_token = INT64_MIN; }},
      {"o", [](C& c) { c.tensors.o_stride_row = INT64_MAX; }},
      {"o", [](C& c) { c.tensors.o_stride_row = INT64_MIN; }},
      {"o", [](C& c) { c.tensors.o_stride_head = INT64_MAX / 2; }},
      {"lse", [](C& c) { c.tensors.lse_stride_head = INT64_MIN; }},
      {"alibi_slopes",
       [&](C& c) { c.tensors.alibi_slopes = reinterpret_cast<float*>(shifted(c.q.data(), 2)); }},
      {"sink_logits",
       [&](C& c) { c.tensors.sink_logits = reinterpret_cast<float*>(shifted(c.q.data(), 1)); }},
      {"o", [](C& c) { c.tensors.alibi_slopes = c.o.data() + 4; }},
      {"lse", [](C& c) { c.tensors.sink_logits = c.lse.data(); }},
  };
  int index = 0;
  for (const auto& [argument, make] : faults) {
    SmallCall call;
    const PlanPtr plan = make_plan(call, execution(1, 2));
    ASSERT_NE(plan, nullptr);
    const Bytes q(reinterpret_cast<char*>(call.q.data()),
                  reinterpret_cast<char*>(call.q.data()) + call.q.bytes());
    make(call);
    call.poison_outputs();
    EXPECT_EQ(run(plan.get(), call.tensors), ATTNFOLD_INVALID_ARGUMENT)
        << "fault " << index << ", of " << argument;
    const std::string text = attnfold_last_error();
    EXPECT_EQ(text.rfind(argument, 0), 0u) << "fault " << index << ": " << text;
    EXPECT_NE(text.find(": expected "), std::string::npos) << text;
    EXPECT_NE(text.find(", got "), std::string::npos) << text;
    EXPECT_TRUE(call.outputs_untouched()) << "fault " << index << ": " << text;
    EXPECT_EQ(std::memcmp(q.data(), call.q.data(), q.size()), 0) << "fault " << index;
    ++index;
  }
}

/** A call with scales of every kind in turn, and o in e4m3. */
TEST(RunArguments, EveryBadScaleIsNamedAndNothingIsWritten) {
  static float scales[4096] = {0.5f, 2.0f};
  struct ScaleFault {
    const char* argument;
    attnfold_scale_kind kind;
    std::function<void(SmallCall&)> make;
  };
  using C = SmallCall;
  const auto at = [](int bytes) {
    return reinterpret_cast<float*>(reinterpret_cast<char*>(scales) + bytes);
  };
  const ScaleFault faults[] = {
      {"k_scale", ATTNFOLD_SCALE_NONE, [&](C& c) { c.tensors.k_scale = scales; }},
      {"v_scale", ATTNFOLD_SCALE_NONE, [&](C& c) { c.tensors.v_scale = scales; }},
      {"k_scale", ATTNFOLD_SCALE_PER_TENSOR, [&](C& c) { c.tensors.k_scale = nullptr; }},
      {"v_scale", ATTNFOLD_SCALE_PER_HEAD, [&](C& c) { c.tensors.v_scale = nullptr; }},
      {"k_scale", ATTNFOLD_SCALE_PER_HEAD, [&](C& c) { c.tensors.k_scale = at(2); }},
      {"v_scale", ATTNFOLD_SCALE_PER_TOKEN, [&](C& c) { c.tensors.v_scale = at(5); }},
      {"k_scale", ATTNFOLD_SCALE_PER_TOKEN,
       [](C& c) { c.tensors.k_scale_stride_page = INT64_MAX; }},
      {"v_scale", ATTNFOLD_SCALE_PER_HEAD,
       [](C& c) { c.tensors.v_scale_stride_head = INT64_MIN; }},
      {"o", ATTNFOLD_SCALE_PER_TOKEN, [](C& c) { c.tensors.k_scale = c.o.data(); }},
      {"lse", ATTNFOLD_SCALE_PER_TENSOR, [](C& c) { c.tensors.v_scale = c.lse.data(); }},
      {"o_scale", ATTNFOLD_SCALE_NONE, [&](C& c) { c.tensors.o_scale = nullptr; }},
      {"o_scale", ATTNFOLD_SCALE_NONE, [&](C& c) { c.tensors.o_scale = at(1); }},
      {"o_scale", ATTNFOLD_SCALE_NONE, [&](C& c) { c.tensors.o_scale = at(8); }},  // 0
  };
  int index = 0;
  for (const auto& [argument, kind, make] : faults) {
    SmallCall call;
    call.problem.k_scale_kind = call.problem.v_scale_kind = kind;
    call.problem.o_dtype = ATTNFOLD_E4M3;
    if (kind != ATTNFOLD_SCALE_NONE) call.tensors.k_scale = call.tensors.v_scale = scales;
    call.tensors.o_scale = scales;
    const PlanPtr plan = make_plan(call, execution(1, 2));
    ASSERT_NE(plan, nullptr);
    EXPECT_EQ(run(plan.get(), call.tensors), ATTNFOLD_OK) << attnfold_last_error();
    make(call);
    call.poison_outputs();
    EXPECT_EQ(run(plan.get(), call.tensors), ATTNFOLD_INVALID_ARGUMENT)
        << "fault " << index << ", of " << argument;
    EXPECT_TRUE(names_argument(attnfold_last_error(), argument)) << "fault " << index;
    EXPECT_TRUE(call.outputs_untouched()) << "fault " << index;
    ++index;
  }
}

TEST(RunArguments, AnOScaleWithoutAQuantisedOAndAVBesideKAreNamed) {
  SmallCall call;
  const float scale = 1.0f;
  call.tensors.o_scale = &scale;
  const PlanPtr plain = make_plan(call, execution(1, 1));
  EXPECT_EQ(run(plain.get(), call.tensors), ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_TRUE(names_argument(attnfold_last_error(), "o_scale"));
  call.tensors.o_scale = nullptr;
  call.problem.v_in_k = 1;
  const PlanPtr in_k = make_plan(call, execution(1, 1));
  EXPECT_EQ(run(in_k.get(), call.tensors), ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_TRUE(names_argument(attnfold_last_error(), "v"));
  call.tensors.v = nullptr;
  EXPECT_EQ(run(in_k.get(), call.tensors), ATTNFOLD_OK) << attnfold_last_error();
}

TEST(RunArguments, AWorkspaceThatIsShortOrMissingIsNamedAndNothingIsWritten) {
  SmallCall call;
  const PlanPtr plan = make_plan(call, execution(2, 4));
  const size_t bytes = attnfold_plan_workspace_bytes(plan.get());
  ASSERT_GT(bytes, 64u);
  std::vector<char> workspace(bytes);
  call.poison_outputs();
  for (const size_t given : {bytes - 1, size_t{1}, size_t{0}}) {
    EXPECT_EQ(attnfold_plan_run(plan.get(), &call.tensors, workspace.data(), given, nullptr),
              ATTNFOLD_OUT_OF_WORKSPACE);
    EXPECT_TRUE(names_argument(attnfold_last_error(), "workspace_bytes"));
  }
  EXPECT_EQ(attnfold_plan_run(plan.get(), &call.tensors, nullptr, bytes, nullptr),
            ATTNFOLD_OUT_OF_WORKSPACE);
  EXPECT_TRUE(names_argument(attnfold_last_error(), "workspace"));
  EXPECT_TRUE(call.outputs_untouched());
}
TEST(RunArguments, AWorkspaceThatOverlapsATensorIsNamedAndNothingIsWritten) {
  alignas(64) static float few[64];
  SmallCall call;
  call.tensors.alibi_slopes = few;
  call.tensors.sink_logits = few + 32;
  const PlanPtr plan = make_plan(call, execution(2, 4));
  const size_t bytes = attnfold_plan_workspace_bytes(plan.get());
  const struct {
    const char* with;
    const void* begin;
    size_t bytes;
  } tensors[] = {{"q", call.q.data(), call.q.bytes()},
                 {"k", call.k.data(), call.k.bytes()},
                 {"v", call.v.data(), call.v.bytes()},
                 {"o", call.o.data(), call.o.bytes()},
                 {"lse", call.lse.data(), call.lse.bytes()},
                 {"alibi_slopes", few, 4 * static_cast<size_t>(call.problem.qo_heads)},
                 {"sink_logits", few + 32, 4 * static_cast<size_t>(call.problem.qo_heads)}};
  call.poison_outputs();
  for (const auto& tensor : tensors) {
    // Its first bytes over the tensor's last ones, and its last ones over the first.
    const uintptr_t begin = reinterpret_cast<uintptr_t>(tensor.begin);
    for (const uintptr_t at : {begin + tensor.bytes - 1, begin - bytes + 1}) {
      EXPECT_EQ(
          attnfold_plan_run(plan.get(), &call.tensors, reinterpret_cast<void*>(at), bytes, nullptr),
          ATTNFOLD_INVALID_ARGUMENT)
          << tensor.with;
      EXPECT_TRUE(names_argument(attnfold_last_error(), "workspace")) << tensor.with;
    }
    EXPECT_TRUE(call.outputs_untouched()) << tensor.with;
  }
  // Bytes of it that no run needs may lie anywhere.
  std::vector<char> arena(bytes + 64 + call.q.bytes());
  char* q = arena.data() + bytes;
  q += (64 - reinterpret_cast<uintptr_t>(q) % 64) % 64;
  std::memcpy(q, call.q.data(), call.q.bytes());
  call.tensors.q = q;
  EXPECT_EQ(attnfold_plan_run(plan.get(), &call.tensors, arena.data(), arena.size(), nullptr),
            ATTNFOLD_OK)
      << attnfold_last_error();
}


TEST(RunArguments, TheStatedWorkspaceIsEnoughAtAnyAlignment) {
  SmallCall call({{1, 5000}, {5, 3000}});
  const Bytes expected = answer(call, execution(1, 1));
  const PlanPtr plan = make_plan(call, execution(2, 5));
  const size_t bytes = attnfold_plan_workspace_bytes(plan.get());
  for (const int shift : {0, 1, 17, 63}) {
    std::vector<char> workspace(bytes + 64 + 32, 0x6c);
    char* begin = workspace.data() + shift;
    call.poison_outputs();
    ASSERT_EQ(attnfold_plan_run(plan.get(), &call.tensors, begin, bytes, nullptr), ATTNFOLD_OK)
        << attnfold_last_error();
    EXPECT_TRUE(same_bytes(call.output_bytes(), expected));
    for (int i = 0; i < shift; ++i) ASSERT_EQ(workspace[i], 0x6c) << "before the workspace";
    for (size_t i = shift + bytes; i < workspace.size(); ++i) ASSERT_EQ(workspace[i], 0x6c);
  }
}

TEST(RunArguments, APlanThatWasNeverUpdatedSaysSo) {
  SmallCall call;
  attnfold_plan* raw = nullptr;
  ASSERT_EQ(attnfold_plan_create(&call.problem, nullptr, &raw), ATTNFOLD_OK);
  const PlanPtr plan(raw);
  call.poison_outputs();
  EXPECT_EQ(run(plan.get(), call.tensors), ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_TRUE(names_argument(attnfold_last_error(), "plan"));
  attnfold_plan_report report{};
  report.struct_size = sizeof(report);
  EXPECT_EQ(attnfold_plan_get_report(plan.get(), &report), ATTNFOLD_INVALID_ARGUMENT);
  attnfold_plan_item item{};
  item.struct_size = sizeof(item);
  EXPECT_EQ(attnfold_plan_get_item(plan.get(), 0, &item), ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_TRUE(call.outputs_untouched());
}

TEST(RunArguments, NullsAndStreamsAreNamed) {
  SmallCall call;
  const PlanPtr plan = make_plan(call, execution(1, 1));
  char workspace[1];
  EXPECT_EQ(attnfold_plan_run(nullptr, &call.tensors, workspace, 1, nullptr),
            ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_TRUE(names_argument(attnfold_last_error(), "plan"));
  EXPECT_EQ(attnfold_plan_run(plan.get(), nullptr, workspace, 1, nullptr),
            ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_TRUE(names_argument(attnfold_last_error(), "tensors"));
  EXPECT_EQ(attnfold_plan_run(plan.get(), &call.tensors, workspace, 1, &call),
            ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_TRUE(names_argument(attnfold_last_error(), "stream"));
  EXPECT_EQ(attnfold_plan_workspace_bytes(nullptr), 0u);
  EXPECT_NE(attnfold_plan_kernel(nullptr), nullptr);
  EXPECT_NE(attnfold_plan_numerics_id(nullptr), nullptr);
}

TEST(Information, AnIndexOutOfRangeIsNamed) {
  SmallCall call;
  const PlanPtr plan = make_plan(call, execution(1, 1));
  attnfold_plan_item item{};
  item.struct_size = sizeof(item);
  attnfold_kernel_info info{};
  info.struct_size = sizeof(info);
  for (const int32_t index : {-1, INT32_MIN, INT32_MAX}) {
    EXPECT_EQ(attnfold_plan_get_item(plan.get(), index, &item), ATTNFOLD_INVALID_ARGUMENT);
    EXPECT_TRUE(names_argument(attnfold_last_error(), "index"));
    EXPECT_EQ(attnfold_get_kernel(index, &info), ATTNFOLD_INVALID_ARGUMENT);
    EXPECT_TRUE(names_argument(attnfold_last_error(), "index"));
    EXPECT_EQ(attnfold_kernel_serves(index, &call.problem), ATTNFOLD_INVALID_ARGUMENT);
    EXPECT_TRUE(names_argument(attnfold_last_error(), "index"));
  }
  EXPECT_EQ(attnfold_plan_get_report(plan.get(), nullptr), ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_EQ(attnfold_plan_get_item(plan.get(), 0, nullptr), ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_EQ(attnfold_get_kernel(0, nullptr), ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_EQ(attnfold_kernel_serves(0, nullptr), ATTNFOLD_INVALID_ARGUMENT);
}

TEST(Information, EveryKernelRowDescribesItselfAndSomeRowServesEverySoundProblem) {
  ASSERT_GE(attnfold_num_kernels(), 1);
  SmallCall call;
  call.problem.k_scale_kind = call.problem.v_scale_kind = ATTNFOLD_SCALE_PER_TENSOR;
  for (const attnfold_dtype q : {ATTNFOLD_F32, ATTNFOLD_F16, ATTNFOLD_BF16}) {
    for (const attnfold_dtype kv : {ATTNFOLD_F32, ATTNFOLD_F16, ATTNFOLD_BF16, ATTNFOLD_E4M3,
                                    ATTNFOLD_E5M2, ATTNFOLD_I8}) {
      call.problem.q_dtype = call.problem.o_dtype = q;
      call.problem.kv_dtype = kv;
      int served = 0;
      for (int32_t i = 0; i < attnfold_num_kernels(); ++i) {
        const attnfold_status status = attnfold_kernel_serves(i, &call.problem);
        served += status == ATTNFOLD_OK;
        if (status != ATTNFOLD_OK) {
          EXPECT_EQ(status, ATTNFOLD_UNSUPPORTED);
          EXPECT_GT(std::strlen(attnfold_last_error()), 0u);
        }
      }
      EXPECT_GE(served, 1) << "q " << q << ", kv " << kv;
    }
  }
  for (int32_t i = 0; i < attnfold_num_kernels(); ++i) {
    attnfold_kernel_info info{};
    info.struct_size = sizeof(info);
    ASSERT_EQ(attnfold_get_kernel(i, &info), ATTNFOLD_OK);
    for (const char* text : {info.name, info.isa, info.q_dtypes, info.kv_dtype, info.numerics_id}) {
      EXPECT_GT(std::strlen(text), 0u);
    }
    EXPECT_EQ(info.available == 1, std::strlen(info.why_not) == 0);
  }
}

}  // namespace
}  // namespace attnfold::api_test
