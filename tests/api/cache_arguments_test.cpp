// Bad arguments of the cache calls: each is named, with index and value, and nothing is written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "api/small_call.h"
#include "attnfold/cache.h"

namespace attnfold::api_test {
namespace {

constexpr int32_t kHeads = 2, kWidth = 8, kPage = 4, kPages = 5, kTokens = 3;
constexpr size_t kPoolFloats = size_t{kPages} * kPage * kHeads * kWidth;

template <class E>
E enumerator(int value) {
  E e;
  std::memcpy(&e, &value, sizeof(e));
  return e;
}

attnfold_kv_pool pool_of(Floats& k, Floats& v) {
  attnfold_kv_pool pool = ATTNFOLD_KV_POOL_INIT;
  pool.k = k.data();
  pool.v = v.data();
  pool.kv_dtype = ATTNFOLD_F32;
  pool.kv_heads = kHeads;
  pool.head_dim_qk = pool.head_dim_vo = kWidth;
  pool.page_size = kPage;
  pool.num_pages = kPages;
  return pool;
}

/** That a call failed for `argument`, and that its text ends in `got`, if that is given. */
void expect_fault(attnfold_status status, const std::string& argument, const std::string& got,
                  int index) {
  EXPECT_EQ(status, ATTNFOLD_INVALID_ARGUMENT) << "fault " << index << ", of " << argument;
  const std::string text = attnfold_last_error();
  EXPECT_TRUE(names_argument(text, argument)) << "fault " << index;
  const std::string end = ", got " + got;
  EXPECT_TRUE(got.empty() || (text.size() > end.size() &&
                              text.compare(text.size() - end.size(), end.size(), end) == 0))
      << "fault " << index << ": " << text;
}

struct Append {
  Append() {
    k.poison();
    v.poison();
    std::fill_n(new_k.data(), new_k.size(), 0.5f);
    std::fill_n(new_v.data(), new_v.size(), 0.5f);
    rows.num_tokens = kTokens;
    rows.k = new_k.data();
    rows.v = new_v.data();
    rows.dtype = ATTNFOLD_F32;
    rows.slots = slots.data();
  }
  Floats k{kPoolFloats}, v{kPoolFloats}, new_k{kTokens * kHeads * kWidth},
      new_v{kTokens * kHeads * kWidth};
  std::vector<int64_t> slots = {7, -1, 19};
  attnfold_kv_pool pool = pool_of(k, v);
  attnfold_kv_rows rows = ATTNFOLD_KV_ROWS_INIT;
  attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
  std::vector<float> scales = {0.5f, 0.25f, 0.5f, -0.25f};

  /** Makes the pool one of 8 bits with scales per head. */
  attnfold_kv_pool& scale(attnfold_dtype type) {
    pool.kv_dtype = type;
    pool.k_scale_kind = pool.v_scale_kind = ATTNFOLD_SCALE_PER_HEAD;
    pool.k_scale = scales.data();
    pool.v_scale = scales.data() + 2;
    return pool;
  }
};

/** Whether a fault lies in what an array holds, which is not looked at if it is a device's. */
bool is_of_contents(const std::string& argument) { return argument.find('[') != std::string::npos; }

template <class Call>
struct Fault {
  const char* argument;
  std::function<void(Call&)> make;
  const char* got = "";
};

TEST(CacheArguments, OfAppend) {
  const Fault<Append> faults[] = {
      {"pool.struct_size", [](Append& a) { a.pool.struct_size = 3; }, "3"},
      {"pool.kv_dtype", [](Append& a) { a.pool.kv_dtype = enumerator<attnfold_dtype>(77); }, "77"},
      {"pool.k_scale_kind", [](Append& a) { a.pool.kv_dtype = ATTNFOLD_E4M3; }, "0"},
      {"pool.k_scale_kind", [](Append& a) { a.pool.k_scale_kind = ATTNFOLD_SCALE_PER_HEAD; }, "2"},
      {"pool.v_scale_kind",
       [](Append& a) { a.scale(ATTNFOLD_I8).v_scale_kind = ATTNFOLD_SCALE_NONE; }, "0"},
      {"pool.k_scale_kind",
       [](Append& a) { a.scale(ATTNFOLD_I8).k_scale_kind = enumerator<attnfold_scale_kind>(4); },
       "4"},
      {"pool.k_scale", [](Append& a) { a.scale(ATTNFOLD_E5M2).k_scale = nullptr; }, "NULL"},
      {"pool.k_scale[1]", [](Append& a) { a.scale(ATTNFOLD_E4M3), a.scales[1] = 0.0f; }},
      {"pool.v_scale[0]", [](Append& a) { a.scale(ATTNFOLD_E4M3), a.scales[2] = NAN; }, "nan"},
      {"rows.k[2][1][3]", [](Append& a) { a.scale(ATTNFOLD_I8), a.new_k.data()[43] = NAN; }, "NaN"},
      {"pool.k_scale",
       [](Append& a) {
         a.scale(ATTNFOLD_I8).k_scale_kind = ATTNFOLD_SCALE_PER_TOKEN;
         a.pool.k_scale = a.k.data() + 1;
       }},
      {"pool.v_scale",
       [](Append& a) {
         a.scale(ATTNFOLD_I8).v_scale_kind = ATTNFOLD_SCALE_PER_TOKEN;
         a.pool.v_scale = a.new_v.data();
         a.pool.num_pages = 5;
       }},
      {"pool.kv_layout", [](Append& a) { a.pool.kv_layout = enumerator<attnfold_kv_layout>(2); }},
      {"pool.kv_heads", [](Append& a) { a.pool.kv_heads = 0; }, "0"},
      {"pool.head_dim_qk", [](Append& a) { a.pool.head_dim_qk = 12; }, "12"},
      {"pool.head_dim_vo", [](Append& a) { a.pool.head_dim_vo = 584; }, "584"},
      {"pool.page_size", [](Append& a) { a.pool.page_size = 0; }, "0"},
      {"pool.num_pages", [](Append& a) { a.pool.num_pages = -1; }, "-1"},
      {"pool.num_pages", [](Append& a) { a.pool.num_pages = INT64_MAX; }},
      {"pool.k", [](Append& a) { a.pool.k = nullptr; }, "NULL"},
      {"pool.k", [](Append& a) { a.pool.k = reinterpret_cast<char*>(a.pool.k) + 2; }},
      {"pool.k", [](Append& a) { a.pool.k_stride_page = INT64_MAX; }},
      {"pool.k", [](Append& a) { a.pool.k_stride_token = 8; }},  // tokens over heads
      {"pool.v", [](Append& a) { a.pool.v_stride_head = 4; }},
      {"pool.v", [](Append& a) { a.pool.v = a.pool.k; }},
      {"pool.v", [](Append& a) { a.pool.v = a.k.data() + 4; }},
      {"rows.struct_size", [](Append& a) { a.rows.struct_size = SIZE_MAX; }},
      {"rows.num_tokens", [](Append& a) { a.rows.num_tokens = -1; }, "-1"},
      {"rows.dtype", [](Append& a) { a.rows.dtype = enumerator<attnfold_dtype>(3); }, "3"},
      {"rows.slots", [](Append& a) { a.rows.slots = nullptr; }, "NULL"},
      {"rows.slots[0]", [](Append& a) { a.slots[0] = -2; }, "-2"},
      {"rows.slots[2]", [](Append& a) { a.slots[2] = kPages * kPage; }, "20"},
      {"rows.slots[1]", [](Append& a) { a.slots[1] = INT64_MIN; }, "-9223372036854775808"},
      {"rows.k", [](Append& a) { a.rows.k = nullptr; }, "NULL"},
      {"rows.v", [](Append& a) { a.rows.v = nullptr; }, "NULL"},
      {"rows.v", [](Append& a) { a.rows.v_stride_token = INT64_MIN; }},
      {"pool.k", [](Append& a) { a.rows.k = a.k.data() + 16; }},
      {"pool.v", [](Append& a) { a.rows.k = a.v.data(); }},
      {"pool.v",
       [](Append& a) {
         std::memset(a.v.data() + 8, 0xff, kTokens * sizeof(int64_t));  // slots of -1 within v
         a.rows.slots = reinterpret_cast<const int64_t*>(a.v.data() + 8);
       }},
      {"num_threads", [](Append& a) { a.execution.num_threads = -4; }, "-4"},
  };
  int index = 0;
  for (const auto& [argument, make, got] : faults) {
    for (const attnfold_backend backend : {ATTNFOLD_CPU, ATTNFOLD_CUDA}) {
      if (backend == ATTNFOLD_CUDA && is_of_contents(argument)) continue;
      Append a;
      make(a);
      a.execution.backend = backend;
      const std::vector<float> before(a.v.data(), a.v.data() + a.v.size());
      const attnfold_status status = attnfold_append(&a.pool, &a.rows, &a.execution);
      expect_fault(status, argument, got, index);
      EXPECT_TRUE(a.k.is_poisoned()) << argument;
      EXPECT_EQ(std::memcmp(before.data(), a.v.data(), a.v.bytes()), 0) << argument;
    }
    ++index;
  }
}

TEST(CacheArguments, OfAppendThatAreSoundAlthoughOdd) {
  Append skipped;  // a NaN in the row of a skipped token
  skipped.scale(ATTNFOLD_I8);
  skipped.new_k.data()[kHeads * kWidth] = NAN;
  EXPECT_EQ(attnfold_append(&skipped.pool, &skipped.rows, nullptr), ATTNFOLD_OK)
      << attnfold_last_error();
  Append a;
  a.pool.v = nullptr;  // keys alone: neither the width nor the rows of v are looked at
  a.pool.head_dim_vo = -5;
  a.rows.v = nullptr;
  EXPECT_EQ(attnfold_append(&a.pool, &a.rows, nullptr), ATTNFOLD_OK) << attnfold_last_error();
  attnfold_kv_pool empty = ATTNFOLD_KV_POOL_INIT;
  attnfold_kv_rows none = ATTNFOLD_KV_ROWS_INIT;
  EXPECT_EQ(attnfold_append(&empty, &none, nullptr), ATTNFOLD_OK) << attnfold_last_error();
  a.pool.num_pages = 0;
  expect_fault(attnfold_append(&a.pool, &a.rows, nullptr), "rows.slots[0]", "7", 0);
  a.slots.assign(kTokens, -1);
  EXPECT_EQ(attnfold_append(&a.pool, &a.rows, nullptr), ATTNFOLD_OK) << attnfold_last_error();
  EXPECT_EQ(attnfold_append(nullptr, &a.rows, nullptr), ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_EQ(attnfold_append(&a.pool, nullptr, nullptr), ATTNFOLD_INVALID_ARGUMENT);
}

struct Copy {
  Copy() {
    for (Floats* f : {&k, &v, &other_k, &other_v}) f->poison();
  }
  bool untouched() const {
    return k.is_poisoned() && v.is_poisoned() && other_k.is_poisoned() && other_v.is_poisoned();
  }
  Floats k{kPoolFloats}, v{kPoolFloats}, other_k{kPoolFloats}, other_v{kPoolFloats};
  attnfold_kv_pool from = pool_of(k, v), to = pool_of(other_k, other_v);
  std::vector<int32_t> pairs = {0, 1, 4, 4};
  int64_t num_pairs = 2;
  std::vector<float> scales = {0.5f, 0.25f};

  /** Makes both pools of 8 bits, with scales of these kinds. */
  void scale(attnfold_scale_kind of_from, attnfold_scale_kind of_to) {
    for (attnfold_kv_pool* pool : {&from, &to}) {
      pool->kv_dtype = ATTNFOLD_E4M3;
      pool->k_scale_kind = pool->v_scale_kind = pool == &from ? of_from : of_to;
      pool->k_scale = pool->v_scale = scales.data();
    }
  }
};
constexpr attnfold_scale_kind kTensor = ATTNFOLD_SCALE_PER_TENSOR;

TEST(CacheArguments, OfCopyPages) {
  const Fault<Copy> faults[] = {
      {"from.struct_size", [](Copy& c) { c.from.struct_size = 0; }, "0"},
      {"to.k", [](Copy& c) { c.to.k = nullptr; }, "NULL"},
      {"to.kv_dtype", [](Copy& c) { c.to.kv_dtype = ATTNFOLD_BF16; }},
      {"to.kv_heads", [](Copy& c) { c.to.kv_heads = 1; }, "1"},
      {"to.page_size", [](Copy& c) { c.to.page_size = 2; }, "2"},
      {"to.head_dim_qk", [](Copy& c) { c.from.head_dim_qk = 16, c.from.num_pages = 1; }, "8"},
      {"to.v", [](Copy& c) { c.to.v = nullptr; }, "NULL"},
      {"to.v", [](Copy& c) { c.from.v = nullptr; }, "a pointer"},
      {"to.k", [](Copy& c) { c.to.k = c.k.data(); }},  // k is from's, v is not
      {"to.v", [](Copy& c) { c.to.v = c.k.data() + 64; }},
      {"to.k_scale_kind", [](Copy& c) { c.scale(ATTNFOLD_SCALE_PER_HEAD, kTensor); }, "1"},
      {"to.k_scale_kind", [](Copy& c) { c.scale(kTensor, ATTNFOLD_SCALE_PER_HEAD); }, "2"},
      {"to.v_scale_kind",
       [](Copy& c) {
         c.scale(kTensor, ATTNFOLD_SCALE_PER_HEAD);
         c.to.k_scale_kind = kTensor;
       },
       "2"},
      {"num_pairs", [](Copy& c) { c.num_pairs = -1; }, "-1"},
      {"pairs", [](Copy& c) { c.pairs.clear(), c.pairs.shrink_to_fit(); }, "NULL"},
      {"pairs[0][0]", [](Copy& c) { c.pairs[0] = -1; }, "-1"},
      {"pairs[1][0]", [](Copy& c) { c.pairs[2] = kPages; }, "5"},
      {"pairs[1][1]", [](Copy& c) { c.to.num_pages = 4; }, "4"},
  };
  int index = 0;
  for (const auto& [argument, make, got] : faults) {
    for (const attnfold_backend backend : {ATTNFOLD_CPU, ATTNFOLD_CUDA}) {
      if (backend == ATTNFOLD_CUDA && is_of_contents(argument)) continue;
      Copy c;
      make(c);
      const attnfold_execution e = on_backend(backend);
      expect_fault(attnfold_copy_pages(&c.from, &c.to, c.pairs.data(), c.num_pairs, &e), argument,
                   got, index);
      EXPECT_TRUE(c.untouched()) << argument;
    }
    ++index;
  }
}

struct Slots {
  Slots() {
    lengths.batch = 2;
    lengths.qo_indptr = qo_indptr.data();
    lengths.kv_len = kv_len.data();
    lengths.block_table = table.data();
    lengths.block_table_stride = 3;
  }
  attnfold_lengths lengths = ATTNFOLD_LENGTHS_INIT;
  std::vector<int32_t> qo_indptr = {0, 2, 5}, kv_len = {9, 3}, table = {-9, 2, 0, 4, -9, -9},
                       indptr = {0, 3, 4}, indices = {-9, 2, 0, 4};
  std::vector<int64_t> positions = {7, 8, 0, 1, 2}, slots = std::vector<int64_t>(6, 55);
  int32_t page_size = kPage;
  int64_t num_pages = kPages, num_slots = 6;
  bool with_positions = false;
  void use_indices() {
    lengths.block_table = nullptr;
    lengths.kv_indptr = indptr.data();
    lengths.kv_indices = indices.data();
  }
  attnfold_status run(attnfold_backend backend = ATTNFOLD_CPU) {
    const attnfold_execution e = on_backend(backend);
    return attnfold_slot_mapping_on(&lengths, page_size, num_pages,
                                    with_positions ? positions.data() : nullptr, num_slots,
                                    slots.data(), &e);
  }
};

TEST(CacheArguments, OfSlotMapping) {
  Slots sound;
  ASSERT_EQ(sound.run(), ATTNFOLD_OK) << attnfold_last_error();
  EXPECT_EQ(sound.slots, (std::vector<int64_t>{11, 0, 16, 17, 18, -1}));
  const auto positions = [](std::vector<int64_t> p) {
    return [p](Slots& s) {
      s.with_positions = true;
      s.positions = p;
    };
  };
  const Fault<Slots> faults[] = {
      {"lengths.struct_size", [](Slots& s) { s.lengths.struct_size = 1; }, "1"},
      {"page_size", [](Slots& s) { s.page_size = 0; }, "0"},
      {"num_pages", [](Slots& s) { s.num_pages = INT64_MAX; }},
      {"batch", [](Slots& s) { s.lengths.batch = -1; }, "-1"},
      {"num_slots", [](Slots& s) { s.num_slots = 4; }, "4"},
      {"num_slots", [](Slots& s) { s.num_slots = -1; }, "-1"},
      {"qo_indptr", [](Slots& s) { s.lengths.qo_indptr = nullptr; }, "NULL"},
      {"qo_indptr[0]", [](Slots& s) { s.qo_indptr[0] = 1; }, "1"},
      {"qo_indptr[2]", [](Slots& s) { s.qo_indptr[2] = 1; }, "1"},
      {"kv_len", [](Slots& s) { s.lengths.kv_len = nullptr; }, "NULL"},
      {"kv_len[1]", [](Slots& s) { s.kv_len[1] = -3; }, "-3"},
      {"kv_len[1]", [](Slots& s) { s.kv_len[1] = 2; }, "2"},
      {"kv_len[0]", [](Slots& s) { s.kv_len[0] = 13; }, "13"},
      {"block_table", [](Slots& s) { s.lengths.block_table = nullptr; }, "NULL"},
      {"kv_indices", [](Slots& s) { s.lengths.kv_indices = s.indices.data(); }, "a pointer"},
      {"block_table_stride", [](Slots& s) { s.lengths.block_table_stride = -1; }, "-1"},
      {"block_table[0][1]", [](Slots& s) { s.table[1] = kPages; }, "5"},
      {"block_table[1][0]", [](Slots& s) { s.table[3] = -1; }, "-1"},
      {"block_table[0][1]", [](Slots& s) { s.num_pages = 0; }, "2"},
      {"kv_indptr", [](Slots& s) { s.use_indices(), s.lengths.kv_indptr = nullptr; }, "NULL"},
      {"kv_indptr[2]", [](Slots& s) { s.use_indices(), s.indptr[2] = 2; }, "2"},
      {"kv_indices[3]", [](Slots& s) { s.use_indices(), s.indices[3] = 9; }, "9"},
      {"kv_len[1]", [](Slots& s) { s.use_indices(), s.kv_len[1] = 5; }, "5"},
      {"positions[1]", positions({7, 9, 0, 1, 2}), "9"},
      {"positions[0]", positions({-2, 8, 0, 1, 2}), "-2"},
      {"positions[4]", positions({7, 8, 0, -1, INT64_MAX}), "9223372036854775807"},
      {"slots", [](Slots& s) { s.lengths.kv_len = reinterpret_cast<int32_t*>(&s.slots[5]); }},
      {"slots", [](Slots& s) { s.lengths.block_table = reinterpret_cast<int32_t*>(&s.slots[0]); }},
  };
  int index = 0;
  for (const auto& [argument, make, got] : faults) {
    Slots s;
    make(s);
    expect_fault(s.run(), argument, got, index++);
    EXPECT_EQ(s.slots, std::vector<int64_t>(6, 55)) << argument;
  }
  Slots past;  // positions without kv_len are bounded by the table
  past.with_positions = true;
  past.lengths.kv_len = nullptr;
  past.positions = {7, 12, 0, 1, 2};
  expect_fault(past.run(), "positions[1]", "12", 0);
}

TEST(CacheArguments, OfSlotMappingOnADevice) {
  const Fault<Slots> faults[] = {
      {"lengths.struct_size", [](Slots& s) { s.lengths.struct_size = 1; }, "1"},
      {"page_size", [](Slots& s) { s.page_size = 0; }, "0"},
      {"num_pages", [](Slots& s) { s.num_pages = INT64_MAX; }},
      {"batch", [](Slots& s) { s.lengths.batch = -1; }, "-1"},
      {"num_slots", [](Slots& s) { s.num_slots = -1; }, "-1"},
      {"qo_indptr", [](Slots& s) { s.lengths.qo_indptr = nullptr; }, "NULL"},
      {"kv_len", [](Slots& s) { s.lengths.kv_len = nullptr; }, "NULL"},
      {"block_table", [](Slots& s) { s.lengths.block_table = nullptr; }, "NULL"},
      {"kv_indices", [](Slots& s) { s.lengths.kv_indices = s.indices.data(); }, "a pointer"},
      {"block_table_stride", [](Slots& s) { s.lengths.block_table_stride = -1; }, "-1"},
      {"kv_indptr", [](Slots& s) { s.use_indices(), s.lengths.kv_indptr = nullptr; }, "NULL"},
  };
  int index = 0;
  for (const auto& [argument, make, got] : faults) {
    Slots s;
    make(s);
    expect_fault(s.run(ATTNFOLD_CUDA), argument, got, index++);
    EXPECT_EQ(s.slots, std::vector<int64_t>(6, 55)) << argument;
  }
}

bool has_device() {
  for (int32_t i = 0; i < attnfold_num_kernels(); ++i) {
    attnfold_kernel_info info{};
    info.struct_size = sizeof(info);
    if (attnfold_get_kernel(i, &info) == ATTNFOLD_OK && std::string(info.isa) == "cuda")
      return info.available;
  }
  return false;
}

TEST(CacheArguments, ADeviceThatIsNotHereIsUnsupportedAndNothingIsWritten) {
  if (has_device()) GTEST_SKIP() << "there is one";
  const attnfold_execution e = on_backend(ATTNFOLD_CUDA);
  const auto expect_unsupported = [](attnfold_status status) {
    EXPECT_EQ(status, ATTNFOLD_UNSUPPORTED);
    EXPECT_TRUE(names_argument(attnfold_last_error(), "backend"));
  };
  Append a;
  expect_unsupported(attnfold_append(&a.pool, &a.rows, &e));
  EXPECT_TRUE(a.k.is_poisoned() && a.v.is_poisoned());
  Copy c;
  expect_unsupported(attnfold_copy_pages(&c.from, &c.to, c.pairs.data(), c.num_pairs, &e));
  EXPECT_TRUE(c.untouched());
  Slots s;
  expect_unsupported(s.run(ATTNFOLD_CUDA));
  EXPECT_EQ(s.slots, std::vector<int64_t>(6, 55));
  attnfold_state from = ATTNFOLD_STATE_INIT, to = ATTNFOLD_STATE_INIT;
  from.o = a.new_k.data();
  from.lse = a.new_v.data();
  to.o = a.k.data();
  to.lse = a.v.data();
  expect_unsupported(attnfold_merge_parallel(1, 1, 8, &from, 1, &to, nullptr, 0, &e));
  expect_unsupported(attnfold_convert_state(1, 1, 8, &from, &to, &e));
  EXPECT_TRUE(a.k.is_poisoned() && a.v.is_poisoned());
}

TEST(CacheArguments, AStreamIsTheDevices) {
  Append a;
  a.execution.stream = &a;
  expect_fault(attnfold_append(&a.pool, &a.rows, &a.execution), "stream", "a pointer", 0);
  EXPECT_TRUE(a.k.is_poisoned() && a.v.is_poisoned());
}

TEST(CacheArguments, OfSlotMappingThatAreSoundAlthoughOdd) {
  Slots padding;
  padding.kv_len = {0, 0};
  padding.lengths.block_table = nullptr;
  EXPECT_EQ(padding.run(), ATTNFOLD_OK) << attnfold_last_error();
  EXPECT_EQ(padding.slots, std::vector<int64_t>(6, -1));
  const attnfold_lengths none = ATTNFOLD_LENGTHS_INIT;
  EXPECT_EQ(attnfold_slot_mapping(&none, 16, 0, nullptr, 0, nullptr), ATTNFOLD_OK);
  std::vector<int64_t> slots(3, 7);
  EXPECT_EQ(attnfold_slot_mapping(&none, 16, 0, nullptr, 3, slots.data()), ATTNFOLD_OK);
  EXPECT_EQ(slots, std::vector<int64_t>(3, -1));
}

struct Tables {
  int32_t batch = 2, width = 2, block_size = 32, page_size = 16;
  int64_t num_blocks = 7, block_stride = 3, page_stride = 5;
  std::vector<int32_t> blocks = {6, -1, 99, 0, 3, 99}, used = {2, 1},
                       pages = std::vector<int32_t>(10, 77);
  const int32_t *block_table = blocks.data(), *used_table = used.data();
  int32_t* page_table = pages.data();
  attnfold_status run() {
    return attnfold_map_to_kernel_pages(batch, width, block_size, page_size, num_blocks,
                                        block_table, block_stride, used_table, page_table,
                                        page_stride);
  }
};

TEST(CacheArguments, OfMapToKernelPages) {
  Tables sound;
  ASSERT_EQ(sound.run(), ATTNFOLD_OK) << attnfold_last_error();
  EXPECT_EQ(sound.pages, (std::vector<int32_t>{12, 13, -1, -1, 77, 0, 1, -1, -1, 77}));
  const Fault<Tables> faults[] = {
      {"batch", [](Tables& t) { t.batch = -1; }, "-1"},
      {"width", [](Tables& t) { t.width = -2; }, "-2"},
      {"block_size", [](Tables& t) { t.block_size = 0; }, "0"},
      {"page_size", [](Tables& t) { t.page_size = 12; }, "12"},
      {"page_size", [](Tables& t) { t.page_size = 64; }, "64"},
      {"page_size", [](Tables& t) { t.page_size = 0; }, "0"},
      {"num_blocks", [](Tables& t) { t.num_blocks = (int64_t{1} << 30) + 1; }, "1073741825"},
      {"block_table_stride", [](Tables& t) { t.block_stride = 1; }, "1"},
      {"page_table_stride", [](Tables& t) { t.page_stride = 3; }, "3"},
      {"block_table", [](Tables& t) { t.block_table = nullptr; }, "NULL"},
      {"page_table", [](Tables& t) { t.page_table = nullptr; }, "NULL"},
      {"page_table", [](Tables& t) { t.block_table = t.pages.data() + 2; }},
      {"page_table", [](Tables& t) { t.used_table = t.pages.data() + 8; }},
      {"used[1]", [](Tables& t) { t.used[1] = 3; }, "3"},
      {"used[0]", [](Tables& t) { t.used[0] = -1; }, "-1"},
      {"block_table[0][0]", [](Tables& t) { t.blocks[0] = 7; }, "7"},
      {"block_table[0][1]", [](Tables& t) { t.blocks[1] = -2; }, "-2"},
      {"block_table[1][1]", [](Tables& t) { t.used_table = nullptr, t.blocks[4] = 99; }, "99"},
  };
  int index = 0;
  for (const auto& [argument, make, got] : faults) {
    Tables t;
    make(t);
    expect_fault(t.run(), argument, got, index++);
    EXPECT_EQ(t.pages, std::vector<int32_t>(10, 77)) << argument;
  }
}

}  // namespace
}  // namespace attnfold::api_test
