// Named cases: offsets beyond 31 and 32 bits.  Pools are sparse: only the pages that a call touches
// take memory.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "check/cases_util.h"

namespace attnfold::check::cases {
namespace {

/** Address space of a pool, all zeros until written. */
class SparsePool {
 public:
  explicit SparsePool(size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~SparsePool() {
    if (ok()) munmap(data_, bytes_);
  }
  SparsePool(const SparsePool&) = delete;
  SparsePool& operator=(const SparsePool&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  std::byte* data() { return static_cast<std::byte*>(data_); }

 private:
  void* data_;
  size_t bytes_;
};

/** The pages of `near`, a call from zero_call, moved to `ids` of a pool where k and v of a page lie
 * `k_span` + `v_span` elements apart: [page][k, v].  Its answer must have the bytes of the answer
 * to `near`. */
std::string same_far_away(const Call& near, const std::vector<int32_t>& ids, const Context& x) {
  const int64_t k_span = near.k_strides.page, v_span = near.v_strides.page;
  const int64_t stride = k_span + v_span;
  const int64_t num_pages = *std::max_element(ids.begin(), ids.end()) + int64_t{1};
  SparsePool pool(static_cast<size_t>(num_pages * stride * 2));
  if (!pool.ok()) return "no address space for the pool";
  for (size_t i = 0; i < ids.size(); ++i) {
    std::byte* page = pool.data() + ids[i] * stride * 2;
    std::memcpy(page, near.k->data() + static_cast<int64_t>(i) * k_span * 2,
                static_cast<size_t>(k_span) * 2);
    std::memcpy(page + k_span * 2, near.v->data() + static_cast<int64_t>(i) * v_span * 2,
                static_cast<size_t>(v_span) * 2);
  }
  Call far = near;  // lengths and q; k and v are replaced below
  far.problem.num_pages = num_pages;
  for (int32_t& id : far.block_table) {
    if (id >= 0 && static_cast<size_t>(id) < ids.size()) id = ids[id];
  }
  Answer want;
  ATTNFOLD_HOLD(run(near, execution(x), want));
  ATTNFOLD_HOLD(judge_answer(near, want));

  const attnfold_execution e = execution(x);
  const Plan plan(far.problem, e);
  if (plan.get() == nullptr) return plan.error();
  const attnfold_lengths lengths = far.lengths();
  if (attnfold_plan_update(plan.get(), &lengths, nullptr) != ATTNFOLD_OK) {
    return attnfold_last_error();
  }
  Answer got;
  got.o = Buffer(want.o.size());
  got.lse.assign(want.lse.size(), kNaN);
  attnfold_tensors t = far.tensors();
  t.k = pool.data();
  t.v = pool.data() + k_span * 2;
  t.k_stride_page = t.v_stride_page = stride;
  t.o = got.o.data();
  t.lse = got.lse.data();
  Buffer workspace(attnfold_plan_workspace_bytes(plan.get()));
  if (attnfold_plan_run(plan.get(), &t, workspace.data(), workspace.size(), nullptr) !=
      ATTNFOLD_OK) {
    return attnfold_last_error();
  }
  return same_bytes(near, want, got, "pages at " + std::to_string(ids.front()) + "..");
}

std::string block_offset_2_31(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Call near = zero_call(make_spec({8, 8, 128, 128}, DType::bf16, 16, kNone, {1}, {16}));
  fill_noise(near, seed);
  ATTNFOLD_HOLD(same_far_away(near, {65535}, x));
  return same_far_away(near, {65536}, x);  // 32768 elements a page: element 2^31
}

std::string mla_page_offset_2_31(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Call near = zero_call(make_spec({16, 1, 576, 512}, DType::bf16, 480, kNone, {1}, {480}));
  fill_noise(near, seed);
  // 480 x (576 + 512) elements a page here: element 2^31 lies in page 4112; 7767 is where 480 x 576
  // passes it.
  for (int32_t id : {4111, 4112, 4113, 7766, 7767, 7768, 9000})
    ATTNFOLD_HOLD(same_far_away(near, {id}, x));
  return "";
}

std::string mla_page_offset_2_32(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  Call near = zero_call(make_spec({16, 1, 576, 512}, DType::bf16, 32, kNone, {1}, {64}));
  fill_noise(near, seed);
  // 34816 elements a page: element 2^32 lies in page 123361.
  for (int32_t id : {123360, 123361, 262142, 262143, 262144, 1000000})
    ATTNFOLD_HOLD(same_far_away(near, {id, id + 1}, x));
  return "";
}

std::string ragged_total_16384(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t group = is_fast(x) ? 4 : 1, each = is_fast(x) ? 1024 : 16;
  const int32_t width = is_fast(x) ? 64 : 16;
  for (int32_t total : {16383, 16384, 16385, 32768}) {
    Lengths lengths(static_cast<size_t>(total / each), each);
    if (total % each != 0) lengths.push_back(total % each);
    // The totals of rows and keys are what matters, not the heads and their widths.
    // what matters.
    Call call = zero_call(
        make_spec({group, 1, width, width}, DType::bf16, kRagged, kCausal, lengths, lengths));
    fill_noise(call, seed);
    Answer answer;
    ATTNFOLD_HOLD(run(call, execution(x), answer));
    std::vector<TokenRef> tokens;
    for (int32_t r : {0, call.batch / 2, call.batch - 2, call.batch - 1}) {
      const int32_t n = call.qo_indptr[r + 1] - call.qo_indptr[r];
      for (int32_t i : {0, n / 3, n - 1}) tokens.push_back({r, i});
    }
    ATTNFOLD_HOLD(in(std::to_string(total) + " rows", judge_tokens(call, answer, tokens)));
  }
  return "";
}

constexpr NamedCase kCases[] = {
    {"block_offset_2_31", "pages on both sides of element 2^31 of an interleaved cache",
     "vllm-project/vllm#50427", block_offset_2_31},
    {"mla_page_offset_2_31", "pages of 480 x 576 on both sides of element 2^31",
     "vllm-project/vllm#47671", mla_page_offset_2_31},
    {"mla_page_offset_2_32", "page ids whose element offsets pass 2^32",
     "flashinfer-ai/flashinfer#3136", mla_page_offset_2_32},
    {"ragged_total_16384", "totals of rows around 16384 and at 32768",
     "flashinfer-ai/flashinfer#1419", ragged_total_16384},
};

}  // namespace

std::span<const NamedCase> overflow_cases() { return kCases; }

}  // namespace attnfold::check::cases
