// Every named case, under its own name; and that no name is missing.
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <string>

#include "check/cases.h"
#include "conformance/suite.h"

namespace attnfold::check {
namespace {

class Case : public ::testing::TestWithParam<NamedCase> {};

TEST_P(Case, Holds) {
  const uint64_t seed = test::seed();
  const std::string wrong = GetParam().run(seed, nullptr);
  EXPECT_EQ(wrong, "") << GetParam().claim << " (" << GetParam().ref << "); attnfold verify --case "
                       << GetParam().name << " --seed " << seed;
}

INSTANTIATE_TEST_SUITE_P(Named, Case,
                         ::testing::ValuesIn(named_cases().begin(), named_cases().end()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(CaseList, EveryNameRunsOrSaysWhatItWaitsFor) {
  std::multiset<std::string> listed, known;
  std::ifstream names(std::string(ATTNFOLD_TEST_DATA_DIR) + "/../conformance/case_names.txt");
  for (std::string line; std::getline(names, line);) listed.insert(line);
  ASSERT_EQ(listed.size(), 125u);
  for (const NamedCase& c : named_cases()) known.insert(c.name);
  for (const WaitingCase& c : waiting_cases()) {
    known.insert(c.name);
    EXPECT_STRNE(c.feature, "") << c.name;
  }
  EXPECT_EQ(listed, known);
}

TEST(CaseList, FindsCasesAndCallsByName) {
  ASSERT_NE(find_case("gqa_ratio_5"), nullptr);
  EXPECT_EQ(find_case("no_such_case"), nullptr);
  EXPECT_TRUE(case_call("random", 3).has_value());
  EXPECT_FALSE(case_call("no_such_call", 3).has_value());
  const std::optional<Call> decode = case_call("long_decode_20000", 3);
  ASSERT_TRUE(decode.has_value());
  EXPECT_EQ(decode->kv_len, (std::vector<int32_t>{20000, 37, 300}));
}

}  // namespace
}  // namespace attnfold::check
