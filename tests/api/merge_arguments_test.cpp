// Bad arguments of attnfold_merge: each is named, and no output is written.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>

#include "api/small_call.h"

namespace attnfold::api_test {
namespace {

constexpr int64_t kRows = 3;
constexpr int32_t kHeads = 2, kWidth = 8;

/** Two states and an output of [kRows, kHeads, kWidth]. */
struct Merge {
  Merge() {
    out.o = out_o.data();
    out.lse = out_lse.data();
    for (int s = 0; s < 2; ++s) {
      for (size_t i = 0; i < o[s].size(); ++i) o[s].data()[i] = noise(s * 1000 + i);
      for (size_t i = 0; i < lse[s].size(); ++i) lse[s].data()[i] = 3 * noise(s * 1000 + 500 + i);
      states[s].o = o[s].data();
      states[s].lse = lse[s].data();
    }
    out_o.poison();
    out_lse.poison();
  }
  attnfold_status run(attnfold_backend backend = ATTNFOLD_CPU) const {
    if (backend == ATTNFOLD_CPU)
      return attnfold_merge(rows, heads, width, list, n, &out, nullptr, 0);
    const attnfold_execution e = on_backend(backend);
    return attnfold_merge_parallel(rows, heads, width, list, n, &out, nullptr, 0, &e);
  }
  bool untouched() const { return out_o.is_poisoned() && out_lse.is_poisoned(); }

  int64_t rows = kRows;
  int32_t heads = kHeads, width = kWidth, n = 2;
  Floats o[2] = {Floats(kRows * kHeads * kWidth), Floats(kRows* kHeads* kWidth)};
  Floats lse[2] = {Floats(kRows * kHeads), Floats(kRows* kHeads)};
  Floats out_o{kRows * kHeads * kWidth}, out_lse{kRows * kHeads};
  attnfold_state states[2] = {ATTNFOLD_STATE_INIT, ATTNFOLD_STATE_INIT};
  attnfold_state out = ATTNFOLD_STATE_INIT;
  const attnfold_state* list = states;
};

template <class E>
E enumerator(int value) {
  E e;
  std::memcpy(&e, &value, sizeof(e));
  return e;
}

struct Fault {
  const char* argument;
  std::function<void(Merge&)> make;
};

TEST(MergeArguments, EveryBadArgumentIsNamedAndNothingIsWritten) {
  const Fault faults[] = {
      {"rows", [](Merge& m) { m.rows = -1; }},
      {"rows", [](Merge& m) { m.rows = INT64_MAX; }},
      {"heads", [](Merge& m) { m.heads = -2; }},
      {"heads", [](Merge& m) { m.heads = INT32_MAX; }},
      {"head_dim_vo", [](Merge& m) { m.width = 0; }},
      {"head_dim_vo", [](Merge& m) { m.width = INT32_MIN; }},
      {"n", [](Merge& m) { m.n = -1; }},
      {"states", [](Merge& m) { m.list = nullptr; }},
      {"states[0].o", [](Merge& m) { m.states[0].o = nullptr; }},
      {"states[1].lse", [](Merge& m) { m.states[1].lse = nullptr; }},
      {"states[1].l", [](Merge& m) { m.states[1].normalised = 0; }},
      {"states[0].o_dtype", [](Merge& m) { m.states[0].o_dtype = enumerator<attnfold_dtype>(3); }},
      {"states[0].lse_layout",
       [](Merge& m) { m.states[0].lse_layout = enumerator<attnfold_lse_layout>(-1); }},
      {"states[1].log_base",
       [](Merge& m) { m.states[1].log_base = enumerator<attnfold_log_base>(2); }},
      {"states[1].empty", [](Merge& m) { m.states[1].empty = enumerator<attnfold_empty_kind>(3); }},
      {"states[0].sink_included", [](Merge& m) { m.states[0].sink_included = 2; }},
      {"states[1].sink_included",
       [](Merge& m) { m.states[0].sink_included = m.states[1].sink_included = 1; }},
      {"states[0].normalised", [](Merge& m) { m.states[0].normalised = -1; }},
      {"states[1].struct_size", [](Merge& m) { m.states[1].struct_size = 0; }},
      {"states[0].struct_size", [](Merge& m) { m.states[0].struct_size = 0; }},
      {"states[1].struct_size",
       [](Merge& m) { m.states[1].struct_size = offsetof(attnfold_state, sink_included); }},
      {"out.o", [](Merge& m) { m.out.o = nullptr; }},
      {"out.lse", [](Merge& m) { m.out.lse = nullptr; }},
      {"out.o", [](Merge& m) { m.out.o = reinterpret_cast<char*>(m.out.o) + 2; }},
      {"states[1].lse",
       [](Merge& m) {
         m.states[1].lse = reinterpret_cast<float*>(reinterpret_cast<char*>(m.states[1].lse) + 1);
       }},
      {"out.normalised",
       [](Merge& m) {
         m.out.normalised = 0;
         m.out.l = m.out_lse.data();
       }},
      {"out.num_rows", [](Merge& m) { m.out.num_rows = 3; }},
      {"states[1].num_rows", [](Merge& m) { m.states[1].num_rows = 4; }},
      {"states[0].num_rows", [](Merge& m) { m.states[0].num_rows = -2; }},
      {"out.lse", [](Merge& m) { m.out.lse = m.out_o.data() + 8; }},
      {"out.o", [](Merge& m) { m.out.o = m.o[0].data() + 4; }},  // in place, but shifted
      {"out.lse", [](Merge& m) { m.out.lse = m.lse[1].data() + 1; }},
      {"out.lse", [](Merge& m) { m.out.lse = m.o[0].data(); }},
      {"out.o", [](Merge& m) { m.out.o = m.lse[0].data(); }},
      {"out.o_stride_row", [](Merge& m) { m.out.o_stride_row = 1; }},
      {"out.o", [](Merge& m) { m.out.o_stride_row = INT64_MAX; }},
      {"out.o", [](Merge& m) { m.out.o_stride_row = int64_t{1} << 62; }},
      {"out.lse", [](Merge& m) { m.out.lse_stride_row = INT64_MIN; }},
      {"states[0].o", [](Merge& m) { m.states[0].o_stride_row = INT64_MAX; }},
      {"states[1].lse", [](Merge& m) { m.states[1].lse_stride_row = INT64_MIN; }},
  };
  int index = 0;
  for (const auto& [argument, make] : faults) {
    for (const attnfold_backend backend : {ATTNFOLD_CPU, ATTNFOLD_CUDA}) {
      Merge m;
      make(m);
      std::vector<float> inputs(m.o[0].data(), m.o[0].data() + m.o[0].size());
      EXPECT_EQ(m.run(backend), ATTNFOLD_INVALID_ARGUMENT)
          << "fault " << index << ", of " << argument;
      const std::string text = attnfold_last_error();
      EXPECT_EQ(text.rfind(argument, 0), 0u) << "fault " << index << ": " << text;
      EXPECT_NE(text.find(": expected "), std::string::npos) << text;
      EXPECT_TRUE(m.untouched()) << "fault " << index << ", of " << argument;
      EXPECT_EQ(std::memcmp(inputs.data(), m.o[0].data(), m.o[0].bytes()), 0)
          << "fault " << index << ", of " << argument;
    }
    ++index;
  }
}

TEST(MergeArguments, StatesStandAsFarApartAsTheirCallersStructIsLong) {
  Merge m;
  ASSERT_EQ(m.run(), ATTNFOLD_OK);
  const std::vector<float> o(m.out_o.data(), m.out_o.data() + m.out_o.size()),
      lse(m.out_lse.data(), m.out_lse.data() + m.out_lse.size());
  // Of a header before num_rows, and of one with 24 bytes more.
  for (const size_t size : {offsetof(attnfold_state, num_rows), sizeof(attnfold_state) + 24}) {
    std::vector<int64_t> memory(2 * size / sizeof(int64_t));
    char* const bytes = reinterpret_cast<char*>(memory.data());
    for (int s = 0; s < 2; ++s) {
      attnfold_state state = m.states[s];
      state.struct_size = size;
      std::memcpy(bytes + static_cast<size_t>(s) * size, &state, std::min(size, sizeof(state)));
    }
    m.list = reinterpret_cast<const attnfold_state*>(bytes);
    m.out_o.poison();
    m.out_lse.poison();
    ASSERT_EQ(m.run(), ATTNFOLD_OK) << size << ": " << attnfold_last_error();
    EXPECT_EQ(std::memcmp(m.out_o.data(), o.data(), m.out_o.bytes()), 0) << size;
    EXPECT_EQ(std::memcmp(m.out_lse.data(), lse.data(), m.out_lse.bytes()), 0) << size;
  }
}

TEST(MergeArguments, ANullOutIsNamed) {
  Merge m;
  EXPECT_EQ(attnfold_merge(kRows, kHeads, kWidth, m.states, 2, nullptr, nullptr, 0),
            ATTNFOLD_INVALID_ARGUMENT);
  EXPECT_TRUE(names_argument(attnfold_last_error(), "out"));
}

TEST(MergeArguments, NothingToMergeNeedsNoPointers) {
  attnfold_state out = ATTNFOLD_STATE_INIT;
  EXPECT_EQ(attnfold_merge(0, kHeads, kWidth, nullptr, 0, &out, nullptr, 0), ATTNFOLD_OK)
      << attnfold_last_error();
  EXPECT_EQ(attnfold_merge(kRows, 0, kWidth, nullptr, 0, &out, nullptr, 0), ATTNFOLD_OK)
      << attnfold_last_error();
}

}  // namespace
}  // namespace attnfold::api_test
