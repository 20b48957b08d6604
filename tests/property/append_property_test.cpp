// What attnfold_append must write, against a copy of the pool that is filled one element at a time.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <limits>
#include <map>
#include <string>

#include "property/cache_pool.h"

namespace attnfold::property {
namespace {

double value_of(DType t, uint32_t code) {
  const uint16_t half = static_cast<uint16_t>(code);
  return t == DType::f16 ? f16_to_f32(half) : bf16_to_f32(half);
}

/**
 * The code of a 16-bit type nearest to x >= 0, by search among all its values: the even code of two
 * that are equally near.  The code of Inf stands for the next power of two.
 */
uint32_t nearest_code(DType t, double x) {
  const uint32_t inf = t == DType::f16 ? 0x7c00u : 0x7f80u;
  const double beyond = t == DType::f16 ? 0x1p16 : 0x1p128;
  const auto value = [&](uint32_t code) { return code == inf ? beyond : value_of(t, code); };
  if (x >= beyond) return inf;
  uint32_t low = 0, high = inf;  // value(low) <= x < value(high)
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (value(middle) <= x ? low : high) = middle;
  }
  const double below = x - value(low), above = value(high) - x;
  if (below == above) return low % 2 == 0 ? low : high;
  return below < above ? low : high;
}

/** Stores what `from` holds as `to` should: the same bits if the types are the same. */
void store_expected(const char* from, DType from_type, char* to, DType to_type) {
  if (from_type == to_type) {
    std::memcpy(to, from, static_cast<size_t>(dtype_bytes(to_type)));
    return;
  }
  float x = load_f32(from, from_type, 0);
  if (to_type == DType::f32) {
    std::memcpy(to, &x, 4);
    return;
  }
  uint32_t code = std::isnan(x) ? 0x7fffu : nearest_code(to_type, std::abs(double{x}));
  if (std::signbit(x)) code |= 0x8000u;
  const uint16_t half = static_cast<uint16_t>(code);
  std::memcpy(to, &half, 2);
}

bool is_nan(const char* p, DType t) { return std::isnan(load_f32(p, t, 0)); }

/** Rows with gaps in one block of memory: [num_tokens, kv_heads, width] at strides. */
struct TestRows {
  DType dtype = DType::f32;
  int64_t token = 0, head = 0;
  std::vector<char> memory;
  const char* element(int64_t i, int64_t h, int64_t e) const {
    return memory.data() + (i * token + h * head + e) * dtype_bytes(dtype);
  }
};

/** Numbers of every size, Inf and NaN among them. */
TestRows any_rows(DType dtype, int64_t num_tokens, int32_t kv_heads, int32_t width) {
  TestRows rows;
  rows.dtype = dtype;
  rows.head = width + *rc::gen::element(0, 0, 3);
  rows.token = kv_heads * rows.head + *rc::gen::element(0, 0, 5);
  if (*rc::gen::inRange(0, 4) == 0) {  // head-major
    rows.token = width;
    rows.head = std::max<int64_t>(num_tokens, 1) * width;
  }
  const int64_t n = (num_tokens + 1) * rows.token + kv_heads * rows.head + width;
  rows.memory.resize(static_cast<size_t>(n * dtype_bytes(dtype)));
  fill_noise(&rows.memory);  // in 8 exponent bits: all magnitudes, a few NaN
  if (dtype == DType::f32 && *rc::gen::arbitrary<bool>()) {
    for (int64_t i = 0; i < n; ++i) {  // near the range of f16, where rounding is delicate
      uint32_t u;
      std::memcpy(&u, &rows.memory[4 * i], 4);
      const float x = std::ldexp(static_cast<float>(u & 0xffffffu), static_cast<int>(u >> 27) - 36);
      std::memcpy(&rows.memory[4 * i], &x, 4);
    }
  }
  return rows;
}

std::vector<int64_t> any_slots(const TestPool& pool, int64_t num_tokens) {
  const int64_t num_slots = pool.num_pages * pool.page_size;
  std::vector<int64_t> slots(static_cast<size_t>(num_tokens));
  for (int64_t& slot : slots) slot = *rc::gen::inRange<int64_t>(-1, num_slots);
  return slots;
}

void append_naively(TestPool* pool, const TestRows& k, const TestRows& v,
                    const std::vector<int64_t>& slots) {
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] == -1) continue;
    const int64_t page = slots[i] / pool->page_size, offset = slots[i] % pool->page_size;
    for (int32_t h = 0; h < pool->kv_heads; ++h) {
      for (int32_t e = 0; e < pool->width_k; ++e)
        store_expected(k.element(static_cast<int64_t>(i), h, e), k.dtype,
                       pool->element(pool->k, page, offset, h, e), pool->dtype);
      for (int32_t e = 0; pool->has_v && e < pool->width_v; ++e)
        store_expected(v.element(static_cast<int64_t>(i), h, e), v.dtype,
                       pool->element(pool->v, page, offset, h, e), pool->dtype);
    }
  }
}

attnfold_kv_rows view(const TestRows& k, const TestRows& v, const std::vector<int64_t>& slots) {
  attnfold_kv_rows rows = ATTNFOLD_KV_ROWS_INIT;
  rows.num_tokens = static_cast<int64_t>(slots.size());
  rows.k = k.memory.data();
  rows.k_stride_token = k.token;
  rows.k_stride_head = k.head;
  rows.v = v.memory.data();
  rows.v_stride_token = v.token;
  rows.v_stride_head = v.head;
  rows.dtype = static_cast<attnfold_dtype>(k.dtype);
  rows.slots = slots.data();
  return rows;
}

/** The same bytes, gaps and margins included; where both hold a NaN, any NaN. */
bool same_pool(const TestPool& got, const TestPool& want) {
  if (got.memory.size() != want.memory.size()) return false;
  for (size_t at = 0; at < got.memory.size(); at += static_cast<size_t>(got.bytes())) {
    const char *a = &got.memory[at], *b = &want.memory[at];
    if (std::memcmp(a, b, static_cast<size_t>(got.bytes())) == 0) continue;
    if (!is_nan(a, got.dtype) || !is_nan(b, want.dtype)) return false;
  }
  return true;
}

TEST(AppendProperty, WritesEachRowToItsSlotAndNothingElse) {
  EXPECT_TRUE(rc::check("append fills the pool as one element after the other would", [] {
    TestPool pool = any_pool();
    const int64_t num_tokens = *rc::gen::inRange<int64_t>(0, 30);
    const DType type = any_type();
    const TestRows k = any_rows(type, num_tokens, pool.kv_heads, pool.width_k),
                   v = any_rows(type, num_tokens, pool.kv_heads, pool.width_v);
    const std::vector<int64_t> slots = any_slots(pool, num_tokens);
    TestPool want = pool;
    append_naively(&want, k, v, slots);
    const attnfold_kv_pool to = pool.view();
    const attnfold_kv_rows rows = view(k, v, slots);
    const attnfold_execution e = any_execution();
    if (attnfold_append(&to, &rows, &e) != ATTNFOLD_OK) RC_FAIL(attnfold_last_error());
    RC_ASSERT(same_pool(pool, want));
    if (type == pool.dtype) RC_ASSERT(pool.memory == want.memory);
  }));
}

TEST(AppendProperty, TheLastOfSeveralTokensInOneSlotWins) {
  EXPECT_TRUE(rc::check("many tokens in few slots: any threads, the bytes of one", [] {
    TestPool pool;
    pool.dtype = any_type();
    pool.kv_heads = 4;
    pool.width_k = pool.width_v = 64;
    pool.page_size = *rc::gen::element(1, 5, 64);
    pool.num_pages = *rc::gen::inRange(1, 4);
    lay_out(&pool);
    const int64_t num_tokens = 600;  // 600 KiB or more: several shares
    const DType type = any_type();
    const TestRows k = any_rows(type, num_tokens, pool.kv_heads, pool.width_k),
                   v = any_rows(type, num_tokens, pool.kv_heads, pool.width_v);
    const std::vector<int64_t> slots = any_slots(pool, num_tokens);
    std::map<int64_t, size_t> last;
    for (size_t i = 0; i < slots.size(); ++i) last[slots[i]] = i;
    std::vector<int64_t> only_last(slots.size(), -1);
    for (const auto& [slot, i] : last) only_last[i] = slot;
    TestPool want = pool;
    const attnfold_kv_pool to_want = want.view(), to = pool.view();
    const attnfold_kv_rows last_rows = view(k, v, only_last), rows = view(k, v, slots);
    attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
    e.num_threads = 1;
    RC_ASSERT(attnfold_append(&to_want, &last_rows, &e) == ATTNFOLD_OK);
    const attnfold_execution many = any_execution();
    RC_ASSERT(attnfold_append(&to, &rows, &many) == ATTNFOLD_OK);
    RC_ASSERT(pool.memory == want.memory);
  }));
}

TEST(AppendProperty, RowsOfSkippedTokensAreNotRead) {
  // Three rows a page of memory apart; those of the two skipped tokens may not be touched.
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  char* memory = static_cast<char*>(
      mmap(nullptr, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(memory, MAP_FAILED);
  std::fill_n(reinterpret_cast<float*>(memory + page), 8, 1.5f);
  ASSERT_EQ(mprotect(memory, page, PROT_NONE), 0);
  ASSERT_EQ(mprotect(memory + 2 * page, page, PROT_NONE), 0);
  TestPool pool;
  pool.k = {0, 64, 8, 8};
  pool.page_size = 8;
  pool.has_v = false;
  pool.memory.assign(64 * 4, 0);
  const std::vector<int64_t> slots = {-1, 3, -1};
  attnfold_kv_rows rows = ATTNFOLD_KV_ROWS_INIT;
  rows.num_tokens = 3;
  rows.k = memory;
  rows.k_stride_token = static_cast<int64_t>(page / sizeof(float));
  rows.dtype = ATTNFOLD_F32;
  rows.slots = slots.data();
  const attnfold_kv_pool to = pool.view();
  ASSERT_EQ(attnfold_append(&to, &rows, nullptr), ATTNFOLD_OK) << attnfold_last_error();
  munmap(memory, 3 * page);
  for (int t = 0; t < 8; ++t) {
    for (int e = 0; e < 8; ++e) {
      float x;
      std::memcpy(&x, pool.element(pool.k, 0, t, 0, e), 4);
      EXPECT_EQ(x, t == 3 ? 1.5f : 0.0f);
    }
  }
}

}  // namespace
}  // namespace attnfold::property
