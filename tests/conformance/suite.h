// What the suites share: the seed, and checks over answers.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "check/cases_util.h"

namespace attnfold::check::test {

/** ATTNFOLD_SEED, else a fixed seed.  Printed with each test that uses it. */
inline uint64_t seed() {
  const char* text = std::getenv("ATTNFOLD_SEED");
  const uint64_t value = text == nullptr ? 20260 : std::strtoull(text, nullptr, 10);
  ::testing::Test::RecordProperty("seed", std::to_string(value));
  return value;
}

/** ATTNFOLD_ISA chooses the kernel row. */
inline cases::Context context() { return {seed(), nullptr}; }

#define ATTNFOLD_EXPECT_HOLDS(expression) \
  EXPECT_EQ(expression, "") << "ATTNFOLD_SEED=" << ::attnfold::check::test::seed()
#define ATTNFOLD_ASSERT_HOLDS(expression) \
  ASSERT_EQ(expression, "") << "ATTNFOLD_SEED=" << ::attnfold::check::test::seed()

}  // namespace attnfold::check::test
