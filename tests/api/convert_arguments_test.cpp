// Bad arguments of attnfold_convert_state, and of what attnfold_merge was given later: named, and
// nothing written.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>

#include "api/small_call.h"

namespace attnfold::api_test {
namespace {

constexpr int64_t kRows = 3;
constexpr int32_t kHeads = 2, kWidth = 8;
constexpr size_t kPairs = kRows * kHeads;

struct Conversion {
  Conversion() {
    for (size_t i = 0; i < o.size(); ++i) o.data()[i] = noise(i);
    for (size_t i = 0; i < lse.size(); ++i) lse.data()[i] = 3 * noise(500 + i);
    from.o = o.data();
    from.lse = lse.data();
    to.o = out_o.data();
    to.lse = out_lse.data();
    out_o.poison();
    out_lse.poison();
  }
  attnfold_status run(attnfold_backend backend = ATTNFOLD_CPU) const {
    const attnfold_execution e = on_backend(backend);
    return attnfold_convert_state(rows, heads, width, &from, &to, &e);
  }
  int64_t rows = kRows;
  int32_t heads = kHeads, width = kWidth;
  Floats o{kPairs * kWidth}, lse{kPairs}, out_o{kPairs * kWidth}, out_lse{kPairs};
  attnfold_state from = ATTNFOLD_STATE_INIT, to = ATTNFOLD_STATE_INIT;
};

template <class E>
E enumerator(int value) {
  E e;
  std::memcpy(&e, &value, sizeof(e));
  return e;
}

struct Fault {
  const char* argument;
  std::function<void(Conversion&)> make;
};

TEST(ConvertArguments, EveryBadArgumentIsNamedAndNothingIsWritten) {
  const Fault faults[] = {
      {"rows", [](Conversion& c) { c.rows = -1; }},
      {"heads", [](Conversion& c) { c.heads = -1; }},
      {"head_dim_vo", [](Conversion& c) { c.width = 0; }},
      {"from.struct_size", [](Conversion& c) { c.from.struct_size = 1; }},
      {"from.o", [](Conversion& c) { c.from.o = nullptr; }},
      {"from.lse", [](Conversion& c) { c.from.lse = nullptr; }},
      {"from.l", [](Conversion& c) { c.from.normalised = 0; }},
      {"from.num_rows", [](Conversion& c) { c.from.num_rows = 4; }},
      {"from.num_rows", [](Conversion& c) { c.from.num_rows = -2; }},
      {"from.o_dtype", [](Conversion& c) { c.from.o_dtype = enumerator<attnfold_dtype>(77); }},
      {"from.o", [](Conversion& c) { c.from.o_stride_row = INT64_MAX; }},
      {"to.o", [](Conversion& c) { c.to.o = nullptr; }},
      {"to.l", [](Conversion& c) { c.to.normalised = 0; }},
      {"to.num_rows", [](Conversion& c) { c.to.num_rows = 2; }},
      {"to.empty", [](Conversion& c) { c.to.empty = enumerator<attnfold_empty_kind>(-1); }},
      {"to.sink_included", [](Conversion& c) { c.from.sink_included = 1; }},
      {"to.sink_included", [](Conversion& c) { c.to.sink_included = 1; }},
      {"to.o_stride_row", [](Conversion& c) { c.to.o_stride_row = 8; }},
      {"to.lse_stride_row", [](Conversion& c) { c.to.lse_stride_head = 2; }},
      {"to.o", [](Conversion& c) { c.to.o = c.o.data() + 8; }},
      {"to.lse", [](Conversion& c) { c.to.lse = c.out_o.data() + 4; }},
      {"to.lse",  // in place, but transposed
       [](Conversion& c) {
         c.to.lse = c.lse.data();
         c.to.lse_layout = ATTNFOLD_HEADS_ROWS;
       }},
  };
  int index = 0;
  for (const auto& [argument, make] : faults) {
    for (const attnfold_backend backend : {ATTNFOLD_CPU, ATTNFOLD_CUDA}) {
      Conversion c;
      make(c);
      EXPECT_EQ(c.run(backend), ATTNFOLD_INVALID_ARGUMENT)
          << "fault " << index << ", of " << argument;
      EXPECT_TRUE(names_argument(attnfold_last_error(), argument)) << "fault " << index;
      EXPECT_TRUE(c.out_o.is_poisoned() && c.out_lse.is_poisoned()) << "fault " << index;
    }
    ++index;
  }
}

TEST(ConvertArguments, NothingToConvertNeedsNoPointers) {
  const attnfold_state none = ATTNFOLD_STATE_INIT;
  EXPECT_EQ(attnfold_convert_state(0, 4, 8, &none, &none, nullptr), ATTNFOLD_OK)
      << attnfold_last_error();
  Conversion c;
  c.from = none;
  c.from.num_rows = 0;  // no row of it is here: all are empty
  ASSERT_EQ(c.run(), ATTNFOLD_OK) << attnfold_last_error();
  for (size_t i = 0; i < kPairs; ++i)
    EXPECT_EQ(c.out_lse.data()[i], -std::numeric_limits<float>::infinity());
  for (size_t i = 0; i < c.out_o.size(); ++i) EXPECT_EQ(c.out_o.data()[i], 0.0f);
}

TEST(ConvertArguments, AnLseOutOfRangeDoesNotBecomeAMark) {
  Conversion c;
  c.lse.data()[0] = FLT_MAX;
  c.lse.data()[1] = -FLT_MAX;
  c.to.log_base = ATTNFOLD_LOG_2;
  ASSERT_EQ(c.run(), ATTNFOLD_OK) << attnfold_last_error();
  EXPECT_EQ(c.out_lse.data()[0], FLT_MAX);
  EXPECT_EQ(c.out_lse.data()[1], -FLT_MAX);
  EXPECT_EQ(std::memcmp(c.out_o.data(), c.o.data(), c.o.bytes()), 0);
  const attnfold_state out = c.to;
  ASSERT_EQ(attnfold_merge(kRows, kHeads, kWidth, &c.from, 1, &out, nullptr, 0), ATTNFOLD_OK);
  EXPECT_EQ(c.out_lse.data()[0], FLT_MAX);
}

TEST(ConvertArguments, PlusInfinityCanBeTheMark) {
  const float inf = std::numeric_limits<float>::infinity();
  Conversion c;
  c.lse.data()[2] = -inf;
  c.to.empty = ATTNFOLD_EMPTY_FINITE;
  c.to.empty_value = inf;
  ASSERT_EQ(c.run(), ATTNFOLD_OK) << attnfold_last_error();
  EXPECT_EQ(c.out_lse.data()[2], inf);
  EXPECT_EQ(c.out_lse.data()[1], c.lse.data()[1]);
}

TEST(MergeRowMask, ItsMemoryIsApartFromTheOutput) {
  Conversion c;
  const auto* mask = reinterpret_cast<const uint8_t*>(c.out_lse.data());
  EXPECT_EQ(attnfold_merge(kRows, kHeads, kWidth, &c.from, 1, &c.to, mask, 1),
            ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_TRUE(names_argument(attnfold_last_error(), "out.lse"));
  EXPECT_TRUE(c.out_o.is_poisoned() && c.out_lse.is_poisoned());
}

}  // namespace
}  // namespace attnfold::api_test
