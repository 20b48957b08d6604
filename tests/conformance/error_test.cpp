// Promise P7: a bad argument is named, with what was expected and what came, before anything is
// written.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>

#include "conformance/suite.h"

namespace attnfold::check {
namespace {

using cases::kCausal;

std::string argument_error(attnfold_status status, const std::string& name) {
  const std::string text = attnfold_last_error();
  if (status != ATTNFOLD_INVALID_ARGUMENT)
    return name + ": status is " + attnfold_status_name(status);
  if (text.rfind(name, 0) != 0) return name + ": the text does not start with it: " + text;
  if (text.find("expected ") == std::string::npos)
    return name + ": the text does not say what was expected: " + text;
  if (text.find(", got ") == std::string::npos)
    return name + ": the text does not say what came: " + text;
  return "";
}

Call paged_call() {
  return generate(
      cases::make_spec({8, 2, 64, 64}, DType::bf16, 16, kCausal, {1, 3, 0}, {70, 40, 5}), 7);
}

/** Every request with a visible prefix of 0 and bits over one key more than its new tokens'. */
Call masked_call() {
  Call call = paged_call();
  cases::Lengths width;
  for (int32_t r = 0; r < call.batch; ++r)
    width.push_back(std::min(call.kv_len[r], call.qo_indptr[r + 1] - call.qo_indptr[r] + 1));
  cases::set_mask(call, width, [](int32_t, int32_t, int32_t) { return true; });
  call.visible_prefix.assign(call.kv_len.size(), 0);
  return call;
}

Call csr_call() {
  Spec spec = cases::make_spec({8, 2, 64, 64}, DType::bf16, 16, kCausal, {1, 3, 0}, {70, 40, 5});
  spec.csr = true;
  return generate(spec, 7);
}

Call ragged_call() {
  return generate(cases::make_spec({8, 2, 64, 64}, DType::bf16, cases::kRagged, kCausal, {1, 3, 0},
                                   {70, 40, 5}),
                  7);
}

// ------------------------------------------------ create

template <typename Struct>
struct Mutation {
  const char* name;  // how the text must start
  std::function<void(Struct&)> apply;
};

TEST(Errors, EveryFieldOfTheProblem) {
  using P = attnfold_problem;
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              inf = std::numeric_limits<float>::infinity();
  const Mutation<P> mutations[] = {
      {"problem.struct_size", [](P& p) { p.struct_size = 0; }},
      {"problem.struct_size", [](P& p) { p.struct_size = 3; }},
      {"qo_heads", [](P& p) { p.qo_heads = 0; }},
      {"qo_heads", [](P& p) { p.qo_heads = -8; }},
      {"kv_heads", [](P& p) { p.kv_heads = 0; }},
      {"kv_heads", [](P& p) { p.kv_heads = 3; }},
      {"kv_heads", [](P& p) { p.kv_heads = 16; }},
      {"head_dim_qk", [](P& p) { p.head_dim_qk = 0; }},
      {"head_dim_qk", [](P& p) { p.head_dim_qk = 63; }},
      {"head_dim_qk", [](P& p) { p.head_dim_qk = 584; }},
      {"head_dim_qk", [](P& p) { p.head_dim_qk = -64; }},
      {"head_dim_vo", [](P& p) { p.head_dim_vo = 4; }},
      {"head_dim_vo", [](P& p) { p.head_dim_vo = INT32_MAX; }},
      {"q_dtype", [](P& p) { p.q_dtype = static_cast<attnfold_dtype>(3); }},
      {"q_dtype", [](P& p) { p.q_dtype = static_cast<attnfold_dtype>(1000); }},
      {"kv_dtype", [](P& p) { p.kv_dtype = static_cast<attnfold_dtype>(77); }},
      {"o_dtype", [](P& p) { p.o_dtype = static_cast<attnfold_dtype>(9); }},
      {"o_dtype", [](P& p) { p.o_dtype = ATTNFOLD_F16; }},
      {"kv_storage", [](P& p) { p.kv_storage = static_cast<attnfold_kv_storage>(2); }},
      {"kv_layout", [](P& p) { p.kv_layout = static_cast<attnfold_kv_layout>(5); }},
      {"page_size", [](P& p) { p.page_size = 0; }},
      {"page_size", [](P& p) { p.page_size = -1; }},
      {"num_pages", [](P& p) { p.num_pages = -1; }},
      {"mask", [](P& p) { p.mask = static_cast<attnfold_mask_kind>(2); }},
      {"window_left", [](P& p) { p.window_left = -2; }},
      {"window_right", [](P& p) { p.window_right = INT32_MIN; }},
      {"sm_scale", [](P& p) { p.sm_scale = -0.5f; }},
      {"sm_scale", [nan](P& p) { p.sm_scale = nan; }},
      {"sm_scale", [inf](P& p) { p.sm_scale = inf; }},
      {"max_batch", [](P& p) { p.max_batch = -1; }},
      {"max_qo_rows", [](P& p) { p.max_qo_rows = -1; }},
      {"max_kv_len", [](P& p) { p.max_kv_len = -1; }},
  };
  const Call call = paged_call();
  const attnfold_execution execution = cases::execution(test::context());
  for (const Mutation<P>& mutation : mutations) {
    P problem = call.problem;
    mutation.apply(problem);
    auto* plan = reinterpret_cast<attnfold_plan*>(0x1234);
    EXPECT_EQ(argument_error(attnfold_plan_create(&problem, &execution, &plan), mutation.name), "");
    EXPECT_EQ(plan, reinterpret_cast<attnfold_plan*>(0x1234))
        << mutation.name << ": plan was written";
    EXPECT_EQ(argument_error(attnfold_kernel_serves(0, &problem), mutation.name), "");
  }
}

TEST(Errors, EveryFieldOfTheExecution) {
  using E = attnfold_execution;
  const Mutation<E> mutations[] = {
      {"execution.struct_size", [](E& e) { e.struct_size = 1; }},
      {"num_threads", [](E& e) { e.num_threads = -1; }},
      {"num_threads", [](E& e) { e.num_threads = 1025; }},
      {"num_workers", [](E& e) { e.num_workers = -1; }},
      {"num_workers", [](E& e) { e.num_workers = 1025; }},
  };
  const Call call = paged_call();
  for (const Mutation<E>& mutation : mutations) {
    E execution = cases::execution(test::context());
    mutation.apply(execution);
    attnfold_plan* plan = nullptr;
    EXPECT_EQ(argument_error(attnfold_plan_create(&call.problem, &execution, &plan), mutation.name),
              "");
    EXPECT_EQ(plan, nullptr);
  }
}

TEST(Errors, NullArguments) {
  const Call call = paged_call();
  const attnfold_execution execution = cases::execution(test::context());
  attnfold_plan* plan = nullptr;
  EXPECT_EQ(argument_error(attnfold_plan_create(nullptr, &execution, &plan), "problem"), "");
  EXPECT_EQ(argument_error(attnfold_plan_create(&call.problem, &execution, nullptr), "plan"), "");
  const attnfold_lengths lengths = call.lengths();
  EXPECT_EQ(argument_error(attnfold_plan_update(nullptr, &lengths, nullptr), "plan"), "");
  const attnfold_tensors tensors = call.tensors();
  EXPECT_EQ(argument_error(attnfold_plan_run(nullptr, &tensors, nullptr, 0, nullptr), "plan"), "");
  cases::Plan good(call.problem, execution);
  ASSERT_NE(good.get(), nullptr);
  EXPECT_EQ(argument_error(attnfold_plan_update(good.get(), nullptr, nullptr), "lengths"), "");
  int stream = 0;
  EXPECT_EQ(argument_error(attnfold_plan_update(good.get(), &lengths, &stream), "stream"), "");
  attnfold_plan_report report{};
  report.struct_size = sizeof report;
  EXPECT_EQ(attnfold_plan_get_report(good.get(), &report), ATTNFOLD_INVALID_ARGUMENT)
      << "never updated";
  EXPECT_EQ(attnfold_plan_run(good.get(), &tensors, nullptr, 0, nullptr), ATTNFOLD_INVALID_ARGUMENT)
      << "never updated";
  ASSERT_EQ(good.update(call), "");
  EXPECT_EQ(argument_error(attnfold_plan_get_report(good.get(), nullptr), "report"), "");
  attnfold_plan_item item{};
  item.struct_size = sizeof item;
  EXPECT_EQ(argument_error(attnfold_plan_get_item(good.get(), -1, &item), "index"), "");
  EXPECT_EQ(argument_error(attnfold_plan_get_item(good.get(), 1 << 30, &item), "index"), "");
  EXPECT_EQ(argument_error(attnfold_plan_get_item(good.get(), 0, nullptr), "item"), "");
  attnfold_kernel_info info{};
  info.struct_size = sizeof info;
  EXPECT_EQ(argument_error(attnfold_get_kernel(-1, &info), "index"), "");
  EXPECT_EQ(argument_error(attnfold_get_kernel(attnfold_num_kernels(), &info), "index"), "");
  attnfold_plan_destroy(nullptr);
}

// ------------------------------------------------ update

/** Bad lengths are refused by name, and the plan keeps its last good schedule. */
void expect_refused_lengths(const Call& good, const std::vector<Mutation<Call>>& mutations) {
  cases::Plan plan(good.problem, cases::execution(test::context()));
  ASSERT_EQ(plan.update(good), "");
  Answer before, after;
  ASSERT_EQ(plan.run(good, before), "");
  for (const Mutation<Call>& mutation : mutations) {
    Call bad = good;
    mutation.apply(bad);
    const attnfold_lengths lengths = bad.lengths();
    EXPECT_EQ(argument_error(attnfold_plan_update(plan.get(), &lengths, nullptr), mutation.name),
              "");
    ASSERT_EQ(plan.run(good, after), "") << mutation.name;
    EXPECT_EQ(cases::same_bytes(good, before, after, "after a refused update"), "")
        << mutation.name;
  }
}

TEST(Errors, ContentsOfPagedLengths) {
  expect_refused_lengths(
      paged_call(),
      {
          {"batch", [](Call& c) { c.batch = -1; }},
          {"batch", [](Call& c) { c.batch = 1000; }},
          {"qo_indptr[0]", [](Call& c) { c.qo_indptr[0] = 1; }},
          {"qo_indptr[2]", [](Call& c) { c.qo_indptr[2] = 0; }},
          {"qo_indptr[3]", [](Call& c) { c.qo_indptr[3] = 100000; }},
          {"qo_indptr[1]", [](Call& c) { c.qo_indptr[1] = -5; }},
          {"kv_len[0]", [](Call& c) { c.kv_len[0] = -1; }},
          {"kv_len[1]", [](Call& c) { c.kv_len[1] = c.problem.max_kv_len + 1; }},
          {"kv_len[2]", [](Call& c) { c.kv_len[2] = INT32_MAX; }},
          {"kv_len[0]", [](Call& c) { c.block_table_stride = 4; }},
          {"block_table_stride", [](Call& c) { c.block_table_stride = -1; }},
          {"block_table[0][0]", [](Call& c) { c.block_table[0] = -1; }},
          {"block_table[0][4]",
           [](Call& c) { c.block_table[4] = static_cast<int32_t>(c.problem.num_pages); }},
          {"block_table[1][2]",
           [](Call& c) { c.block_table[c.block_table_stride + 2] = 0x7ffffff0; }},
      });
}

TEST(Errors, ContentsOfCsrLengths) {
  expect_refused_lengths(csr_call(),
                         {
                             {"kv_indptr[0]", [](Call& c) { c.kv_indptr[0] = -1; }},
                             {"kv_indptr[2]", [](Call& c) { c.kv_indptr[2] = 0; }},
                             {"kv_len[0]", [](Call& c) { c.kv_indptr[1] = 4; }},
                             {"kv_indices[0]", [](Call& c) { c.kv_indices[0] = -7; }},
                             {"kv_indices[6]", [](Call& c) { c.kv_indices[6] = 1 << 20; }},
                         });
}

TEST(Errors, ContentsOfRaggedLengths) {
  expect_refused_lengths(ragged_call(),
                         {
                             {"kv_indptr[1]", [](Call& c) { c.kv_indptr[1] = -1; }},
                             {"kv_indptr[3]", [](Call& c) { c.num_kv_rows = c.kv_indptr[3] - 1; }},
                             {"num_kv_rows", [](Call& c) { c.num_kv_rows = -1; }},
                             {"kv_len[0]", [](Call& c) { c.kv_len[0] = c.kv_indptr[1] + 1; }},
                             {"kv_len[1]", [](Call& c) { c.kv_len[1] = -3; }},
                         });
}

TEST(Errors, MoreRaggedRowsThanMemoryHolds) {
  Call call = ragged_call();
  for (const int64_t num_rows : {INT64_MAX, INT64_MAX / 64, int64_t{1} << 60, int64_t{1} << 56}) {
    call.num_kv_rows = num_rows;
    attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
    const RunResult result = run_engine(call, execution);
    EXPECT_EQ(result.status, ATTNFOLD_INVALID_ARGUMENT) << num_rows;
    EXPECT_EQ(result.error.rfind("k: expected", 0), 0u) << result.error;
  }
}

TEST(Errors, MasksOfRequests) {
  expect_refused_lengths(
      masked_call(), {
                         {"visible_prefix[0]", [](Call& c) { c.visible_prefix[0] = -1; }},
                         {"visible_prefix[1]", [](Call& c) { c.visible_prefix[1] = c.kv_len[1]; }},
                         {"mask_width[0]", [](Call& c) { c.mask_width[0] = c.kv_len[0] + 1; }},
                         {"mask_width[0]", [](Call& c) { c.mask_width[0] = -1; }},
                         {"mask_width[1]", [](Call& c) { c.mask_width[1] -= 2; }},
                         {"mask_indptr[0]", [](Call& c) { c.mask_indptr[0] = -1; }},
                         {"mask_indptr[1]", [](Call& c) { c.mask_indptr[1] = 0; }},
                         {"mask_indptr[2]", [](Call& c) { --c.mask_indptr[2]; }},
                     });
}

TEST(Errors, PointersOfLengths) {
  using L = attnfold_lengths;
  struct Entry {
    Call call;
    Mutation<L> mutation;
  };
  static const int32_t kSome = 0;
  const Entry entries[] = {
      {paged_call(), {"lengths.struct_size", [](L& l) { l.struct_size = 2; }}},
      {paged_call(), {"qo_indptr", [](L& l) { l.qo_indptr = nullptr; }}},
      {paged_call(), {"kv_len", [](L& l) { l.kv_len = nullptr; }}},
      {paged_call(), {"block_table", [](L& l) { l.block_table = nullptr; }}},
      {paged_call(), {"kv_indices", [](L& l) { l.kv_indices = &kSome; }}},
      {csr_call(), {"kv_indptr", [](L& l) { l.kv_indptr = nullptr; }}},
      {masked_call(), {"mask_width", [](L& l) { l.mask_width = nullptr; }}},
      {masked_call(), {"mask_indptr", [](L& l) { l.mask_indptr = nullptr; }}},
      {masked_call(), {"mask_bits", [](L& l) { l.mask_bits = nullptr; }}},
      {ragged_call(), {"kv_indptr", [](L& l) { l.kv_indptr = nullptr; }}},
      // Lengths that come from the offsets: the end of the request at fault is named.
      {ragged_call(),
       {"kv_indptr[2]",
        [](L& l) {
          static constexpr int32_t kFar[] = {0, 70, 1 << 30, 1 << 30};
          l.kv_len = nullptr;
          l.kv_indptr = kFar;
          l.num_kv_rows = 1 << 30;
        }}},
      {ragged_call(), {"block_table", [](L& l) { l.block_table = &kSome; }}},
      {ragged_call(), {"kv_indices", [](L& l) { l.kv_indices = &kSome; }}},
  };
  for (const Entry& entry : entries) {
    cases::Plan plan(entry.call.problem, cases::execution(test::context()));
    L lengths = entry.call.lengths();
    entry.mutation.apply(lengths);
    EXPECT_EQ(
        argument_error(attnfold_plan_update(plan.get(), &lengths, nullptr), entry.mutation.name),
        "");
  }
}

// ------------------------------------------------ run

TEST(Errors, TensorsOfARunAndNothingWritten) {
  using T = attnfold_tensors;
  const Call call = paged_call();
  cases::Plan plan(call.problem, cases::execution(test::context()));
  ASSERT_EQ(plan.update(call), "");
  const size_t o_bytes = 4 * 8 * 64 * 2, lse_count = 4 * 8;
  Buffer o(o_bytes + 64), workspace(attnfold_plan_workspace_bytes(plan.get()));
  std::vector<float> lse(lse_count + 4);
  const auto shift = [](const void* p, int n) { return static_cast<const std::byte*>(p) + n; };
  const Mutation<T> mutations[] = {
      {"tensors.struct_size", [](T& t) { t.struct_size = 5; }},
      {"q", [](T& t) { t.q = nullptr; }},
      {"q", [&](T& t) { t.q = shift(t.q, 2); }},
      {"k", [](T& t) { t.k = nullptr; }},
      {"k", [&](T& t) { t.k = shift(t.k, 8); }},
      {"v", [](T& t) { t.v = nullptr; }},
      {"v", [&](T& t) { t.v = shift(t.v, 4); }},
      {"o", [](T& t) { t.o = nullptr; }},
      {"o", [&](T& t) { t.o = o.data() + 2; }},
      {"o", [](T& t) { t.o = const_cast<void*>(t.q); }},
      {"o", [](T& t) { t.o = const_cast<void*>(t.k); }},
      {"o", [](T& t) { t.o = const_cast<void*>(t.v); }},
      {"o_stride_row", [](T& t) { t.o_stride_row = 8; }},
      {"o_stride_row", [](T& t) { t.o_stride_head = 16; }},
      {"lse", [](T& t) { t.lse = reinterpret_cast<float*>(reinterpret_cast<char*>(t.lse) + 1); }},
      {"lse", [](T& t) { t.lse = static_cast<float*>(t.o); }},
      {"lse", [](T& t) { t.lse = static_cast<float*>(const_cast<void*>(t.q)); }},
      {"lse_stride_row", [](T& t) { t.lse_stride_row = 1; }},
      {"q", [](T& t) { t.q_stride_row = INT64_MAX / 2; }},
      {"k", [](T& t) { t.k_stride_page = INT64_MIN; }},
      {"v", [](T& t) { t.v_stride_token = INT64_MAX; }},
      {"o", [](T& t) { t.o_stride_row = INT64_MAX / 2; }},
      {"o", [](T& t) { t.o_stride_row = INT64_MAX / 4; }},
      {"o", [](T& t) { t.o_stride_row = INT64_MIN; }},
  };
  for (const Mutation<T>& mutation : mutations) {
    T tensors = call.tensors();
    tensors.o = o.data();
    tensors.lse = lse.data();
    std::memset(o.data(), 0x5c, o.size());
    std::fill(lse.begin(), lse.end(), 12345.0f);
    const Call before = cases::deep_copy(call);
    mutation.apply(tensors);
    const attnfold_status status =
        attnfold_plan_run(plan.get(), &tensors, workspace.data(), workspace.size(), nullptr);
    EXPECT_EQ(argument_error(status, mutation.name), "");
    for (size_t i = 0; i < o.size(); ++i)
      ASSERT_EQ(o.data()[i], std::byte{0x5c}) << mutation.name << ": o was written";
    for (float f : lse) ASSERT_EQ(f, 12345.0f) << mutation.name << ": lse was written";
    ASSERT_EQ(std::memcmp(before.q->data(), call.q->data(), call.q->size()), 0) << mutation.name;
  }
  T tensors = call.tensors();
  tensors.o = o.data();
  int stream = 0;
  EXPECT_EQ(argument_error(
                attnfold_plan_run(plan.get(), nullptr, workspace.data(), workspace.size(), nullptr),
                "tensors"),
            "");
  EXPECT_EQ(argument_error(attnfold_plan_run(plan.get(), &tensors, workspace.data(),
                                             workspace.size(), &stream),
                           "stream"),
            "");
  EXPECT_EQ(
      attnfold_plan_run(plan.get(), &tensors, workspace.data(), workspace.size() - 1, nullptr),
      ATTNFOLD_OUT_OF_WORKSPACE);
  EXPECT_EQ(attnfold_plan_run(plan.get(), &tensors, nullptr, workspace.size(), nullptr),
            ATTNFOLD_OUT_OF_WORKSPACE);
  EXPECT_EQ(attnfold_plan_run(plan.get(), &tensors, workspace.data(), workspace.size(), nullptr),
            ATTNFOLD_OK)
      << "lse may be NULL";
}

// ------------------------------------------------ merge

TEST(Errors, EveryFieldOfAMerge) {
  using S = attnfold_state;
  std::vector<float> a(64, 1.0f), b(64, 2.0f), out(64, 7.0f), a_lse(8), b_lse(8), out_lse(8, 7.0f);
  const auto state = [](std::vector<float>& o, std::vector<float>& lse) {
    S s = ATTNFOLD_STATE_INIT;
    s.o = o.data();
    s.lse = lse.data();
    return s;
  };
  struct Entry {
    const char* field;
    std::function<void(S&)> apply;
  };
  const Entry entries[] = {
      {".struct_size", [](S& s) { s.struct_size = 1; }},
      {".o", [](S& s) { s.o = nullptr; }},
      {".o_dtype", [](S& s) { s.o_dtype = static_cast<attnfold_dtype>(4); }},
      {".lse", [](S& s) { s.lse = nullptr; }},
      {".lse_layout", [](S& s) { s.lse_layout = static_cast<attnfold_lse_layout>(2); }},
      {".log_base", [](S& s) { s.log_base = static_cast<attnfold_log_base>(3); }},
      {".empty", [](S& s) { s.empty = static_cast<attnfold_empty_kind>(8); }},
      {".sink_included", [](S& s) { s.sink_included = 2; }},
      {".normalised", [](S& s) { s.normalised = -1; }},
  };
  const auto untouched = [&] {
    return out == std::vector<float>(64, 7.0f) && out_lse == std::vector<float>(8, 7.0f);
  };
  for (const Entry& entry : entries) {
    for (const std::string& which :
         {std::string("states[0]"), std::string("states[1]"), std::string("out")}) {
      S sides[2] = {state(a, a_lse), state(b, b_lse)};
      S to = state(out, out_lse);
      entry.apply(which == "out" ? to : sides[which == "states[1]"]);
      EXPECT_EQ(
          argument_error(attnfold_merge(4, 2, 8, sides, 2, &to, nullptr, 0), which + entry.field),
          "");
      EXPECT_TRUE(untouched()) << which << entry.field;
    }
  }
  S sides[2] = {state(a, a_lse), state(b, b_lse)};
  S to = state(out, out_lse);
  EXPECT_EQ(argument_error(attnfold_merge(-1, 2, 8, sides, 2, &to, nullptr, 0), "rows"), "");
  EXPECT_EQ(argument_error(attnfold_merge(4, -1, 8, sides, 2, &to, nullptr, 0), "heads"), "");
  EXPECT_EQ(argument_error(attnfold_merge(4, 2, 0, sides, 2, &to, nullptr, 0), "head_dim_vo"), "");
  EXPECT_EQ(argument_error(attnfold_merge(4, 2, 8, sides, -1, &to, nullptr, 0), "n"), "");
  EXPECT_EQ(argument_error(attnfold_merge(4, 2, 8, nullptr, 2, &to, nullptr, 0), "states"), "");
  EXPECT_EQ(argument_error(attnfold_merge(4, 2, 8, sides, 2, nullptr, nullptr, 0), "out"), "");
  S raw = sides[1];
  raw.normalised = 0;
  S with_raw[2] = {sides[0], raw};
  EXPECT_EQ(argument_error(attnfold_merge(4, 2, 8, with_raw, 2, &to, nullptr, 0), "states[1].l"),
            "");
  S sinks[2] = {sides[0], sides[1]};
  sinks[0].sink_included = sinks[1].sink_included = 1;
  EXPECT_EQ(
      argument_error(attnfold_merge(4, 2, 8, sinks, 2, &to, nullptr, 0), "states[1].sink_included"),
      "");
  to.normalised = 0;
  to.l = b_lse.data();
  EXPECT_EQ(argument_error(attnfold_merge(4, 2, 8, sides, 2, &to, nullptr, 0), "out.normalised"),
            "");
  to = state(a, out_lse);
  to.o = a.data() + 4;
  EXPECT_EQ(argument_error(attnfold_merge(3, 2, 8, sides, 2, &to, nullptr, 0), "out.o"), "");
  to = state(out, a_lse);
  to.lse = a_lse.data() + 1;
  EXPECT_EQ(argument_error(attnfold_merge(3, 2, 8, sides, 2, &to, nullptr, 0), "out.lse"), "");
  EXPECT_TRUE(untouched());
}

}  // namespace
}  // namespace attnfold::check
