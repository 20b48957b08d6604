// A small batch of its own for the API tests: requests of given lengths over a paged f32 cache, with outputs that are
// poisoned before each run.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "attnfold/attnfold.h"

namespace attnfold::api_test {

struct PlanDestroyer {
  void operator()(attnfold_plan* plan) const { attnfold_plan_destroy(plan); }
};
using PlanPtr = std::unique_ptr<attnfold_plan, PlanDestroyer>;

/** Floats at an address that is a multiple of 64. */
class Floats {
 public:
  explicit Floats(size_t n) : n_(n), data_(static_cast<float*>(std::aligned_alloc(64, (n * 4 + 127) / 64 * 64))) {}
  float* data() const { return data_.get(); }
  size_t size() const { return n_; }
  size_t bytes() const { return n_ * sizeof(float); }
  void poison() { std::memset(data_.get(), kPoison, bytes()); }
  bool is_poisoned() const {
    const unsigned char* p = reinterpret_cast<const unsigned char*>(data_.get());
    for (size_t i = 0; i < bytes(); ++i) {
      if (p[i] != kPoison) return false;
    }
    return true;
  }

 private:
  static constexpr unsigned char kPoison = 0xa7;
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  size_t n_;
  std::unique_ptr<float[], Free> data_;
};

/** The answer's bytes. */
using Bytes = std::vector<char>;

/** That two answers are the same; else where they part. */
inline ::testing::AssertionResult same_bytes(const Bytes& got, const Bytes& expected) {
  if (got == expected && !got.empty()) return ::testing::AssertionSuccess();
  if (got.empty() || got.size() != expected.size()) {
    return ::testing::AssertionFailure() << "expected " << expected.size() << " bytes, got " << got.size();
  }
  size_t at = 0, num_different = 0;
  for (size_t i = got.size() / 4; i-- > 0;) {
    if (std::memcmp(&got[4 * i], &expected[4 * i], 4) == 0) continue;
    at = i;
    ++num_different;
  }
  float a, b;
  std::memcpy(&a, &expected[4 * at], 4);
  std::memcpy(&b, &got[4 * at], 4);
  return ::testing::AssertionFailure() << num_different << " of " << got.size() / 4 << " floats differ; the first is "
                                       << at << ": expected " << a << ", got " << b;
}

inline attnfold_execution on_backend(attnfold_backend backend) {
  attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
  e.backend = backend;
  return e;
}

struct SmallCall {
  struct Request {
    int32_t qo_len, kv_len;
  };

  explicit SmallCall(const std::vector<Request>& requests = {{1, 300}, {5, 37}});

  attnfold_problem problem = ATTNFOLD_PROBLEM_INIT;
  attnfold_lengths lengths = ATTNFOLD_LENGTHS_INIT;
  attnfold_tensors tensors = ATTNFOLD_TENSORS_INIT;
  std::vector<int32_t> qo_indptr, kv_len, block_table;
  Floats q, k, v, o, lse;

  void poison_outputs() {
    o.poison();
    lse.poison();
  }
  bool outputs_untouched() const { return o.is_poisoned() && lse.is_poisoned(); }
  Bytes output_bytes() const;

 private:
  struct Sizes {
    int64_t rows, pages;
  };
  SmallCall(const std::vector<Request>& requests, Sizes sizes);
  static Sizes sizes_of(const std::vector<Request>& requests);
};

inline attnfold_execution execution(int32_t num_threads, int32_t num_workers) {
  attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
  e.num_threads = num_threads;
  e.num_workers = num_workers;
  return e;
}

/** A plan, updated; a failure fails the test. */
inline PlanPtr make_plan(const SmallCall& call, const attnfold_execution& e) {
  attnfold_plan* plan = nullptr;
  EXPECT_EQ(attnfold_plan_create(&call.problem, &e, &plan), ATTNFOLD_OK) << attnfold_last_error();
  if (plan == nullptr) return nullptr;
  EXPECT_EQ(attnfold_plan_update(plan, &call.lengths, nullptr), ATTNFOLD_OK)
      << attnfold_last_error();
  return PlanPtr(plan);
}

/** Runs into `tensors`' outputs with a workspace of its own. */
inline attnfold_status run(const attnfold_plan* plan, const attnfold_tensors& tensors) {
  std::vector<char> workspace(attnfold_plan_workspace_bytes(plan));
  return attnfold_plan_run(plan, &tensors, workspace.data(), workspace.size(), nullptr);
}

/** The bytes of o and lse from a fresh plan. */
inline Bytes answer(SmallCall& call, const attnfold_execution& e) {
  const PlanPtr plan = make_plan(call, e);
  if (!plan) return {};
  call.poison_outputs();
  EXPECT_EQ(run(plan.get(), call.tensors), ATTNFOLD_OK) << attnfold_last_error();
  return call.output_bytes();
}

/** A number in (-1, 1) that follows from `i` alone, in every floating-point mode. */
inline float noise(uint64_t i) {
  uint64_t z = (i + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<float>(static_cast<int32_t>((z >> 40) & 0xffffff) - 0x800000) * 0x1p-23f;
}

/** That `text` is `<argument>: expected <what>, got <value>` for this argument. */
inline ::testing::AssertionResult names_argument(std::string_view text, std::string_view argument) {
  const std::string start = std::string(argument) + ": expected ";
  if (text.substr(0, start.size()) == start && text.find(", got ") != std::string_view::npos) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "expected \"" << start << "<what>, got <value>\", got \"" << text << '"';
}

// ------------------------------------------------------------------------------------------------------------------

inline constexpr int32_t kPageSize = 16;
inline constexpr int32_t kQoHeads = 4, kKvHeads = 2, kHeadDim = 16;

inline SmallCall::Sizes SmallCall::sizes_of(const std::vector<Request>& requests) {
  Sizes s{0, 0};
  for (const Request& r : requests) {
    s.rows += r.qo_len;
    s.pages += (r.kv_len + kPageSize - 1) / kPageSize;
  }
  return s;
}

inline SmallCall::SmallCall(const std::vector<Request>& requests)
    : SmallCall(requests, sizes_of(requests)) {}

inline SmallCall::SmallCall(const std::vector<Request>& requests, Sizes s)
    : q(s.rows * kQoHeads * kHeadDim),
      k(s.pages * kPageSize * kKvHeads * kHeadDim),
      v(k.size()),
      o(q.size()),
      lse(s.rows * kQoHeads) {
  for (size_t i = 0; i < q.size(); ++i) q.data()[i] = 4 * noise(i);
  for (size_t i = 0; i < k.size(); ++i) {
    k.data()[i] = noise(1000000 + i);
    v.data()[i] = noise(3000000 + i);
  }
  int32_t max_kv_len = 0, max_pages = 0;
  qo_indptr.push_back(0);
  for (const Request& r : requests) {
    qo_indptr.push_back(qo_indptr.back() + r.qo_len);
    kv_len.push_back(r.kv_len);
    max_kv_len = r.kv_len > max_kv_len ? r.kv_len : max_kv_len;
  }
  max_pages = (max_kv_len + kPageSize - 1) / kPageSize;
  int32_t next_page = static_cast<int32_t>(s.pages);  // handed out from the end
  for (const Request& r : requests) {
    for (int32_t i = 0; i < max_pages; ++i) {
      block_table.push_back(i * kPageSize < r.kv_len ? --next_page : 0x7ffffff0);
    }
  }

  problem.qo_heads = kQoHeads;
  problem.kv_heads = kKvHeads;
  problem.head_dim_qk = problem.head_dim_vo = kHeadDim;
  problem.q_dtype = problem.kv_dtype = problem.o_dtype = ATTNFOLD_F32;
  problem.page_size = kPageSize;
  problem.num_pages = s.pages;
  problem.max_batch = static_cast<int32_t>(requests.size());
  problem.max_qo_rows = static_cast<int32_t>(s.rows);
  problem.max_kv_len = max_kv_len;

  lengths.batch = problem.max_batch;
  lengths.qo_indptr = qo_indptr.data();
  lengths.kv_len = kv_len.data();
  lengths.block_table = block_table.data();
  lengths.block_table_stride = max_pages;

  tensors.q = q.data();
  tensors.k = k.data();
  tensors.v = v.data();
  tensors.o = o.data();
  tensors.lse = lse.data();
}

inline Bytes SmallCall::output_bytes() const {
  Bytes bytes(o.bytes() + lse.bytes());
  std::memcpy(bytes.data(), o.data(), o.bytes());
  std::memcpy(bytes.data() + o.bytes(), lse.data(), lse.bytes());
  return bytes;
}

}  // namespace attnfold::api_test
