// Every number of book.csv (name, inputs, formula, value, unit, tolerance) comes out of the book's
// functions, which know no value.
#include "explain/book.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>

namespace attnfold::explain {
namespace {

/** Fields of a line of comma-separated values; quotes hold commas together. */
std::vector<std::string> fields_of(const std::string& line) {
  std::vector<std::string> fields(1);
  bool quoted = false;
  for (const char c : line) {
    if (c == '"') {
      quoted = !quoted;
    } else if (c == ',' && !quoted) {
      fields.emplace_back();
    } else {
      fields.back() += c;
    }
  }
  return fields;
}

struct Expected {
  std::string inputs, unit;
  double value, tolerance;
};

std::map<std::string, Expected> expected_rows() {
  std::ifstream in(ATTNFOLD_EXPLAIN_BOOK);
  std::map<std::string, Expected> rows;
  std::string line;
  std::getline(in, line);  // headings
  while (std::getline(in, line)) {
    const std::vector<std::string> f = fields_of(line);
    if (f.size() != 6) {
      ADD_FAILURE() << "expected 6 fields: " << line;
      continue;
    }
    rows[f[0]] = {f[1], f[4], std::stod(f[3]), std::stod(f[5])};
  }
  return rows;
}

TEST(Book, HasEveryNumberWithinItsTolerance) {
  std::map<std::string, Expected> rows = expected_rows();
  ASSERT_EQ(rows.size(), 328u);
  for (const BookSection& section : book()) {
    for (const BookFormula& formula : section.formulas) {
      for (const BookRow& row : formula.rows) {
        const auto it = rows.find(row.name);
        ASSERT_NE(it, rows.end()) << row.name << " twice, or not in book.csv";
        const Expected want = it->second;
        rows.erase(it);
        EXPECT_EQ(row.inputs, want.inputs) << row.name;
        EXPECT_EQ(formula.unit, want.unit) << row.name;
        EXPECT_NEAR(formula.value(Inputs(row.inputs)), want.value, want.tolerance) << row.name;
      }
    }
  }
  for (const auto& [name, unused] : rows) ADD_FAILURE() << name << " is not in the book";
}

// No value may be a constant in disguise: each formula moves with its inputs.
TEST(Book, EveryFormulaFollowsItsInputs) {
  for (const BookSection& section : book()) {
    for (const BookFormula& formula : section.formulas) {
      bool moved = false;
      for (const BookRow& row : formula.rows) {
        const Inputs given(row.inputs);
        for (const auto& [name, number] : given.all()) {
          if (name == "h_kv" || name == "BLOCK_M") continue;  // groups stay whole
          Inputs in = given;
          in.set(name, number * 64);
          moved = moved || formula.value(in) != formula.value(given);
        }
      }
      EXPECT_TRUE(moved) << formula.formula;
    }
  }
}

TEST(Book, MarksRoundingsAndErrors) {
  std::map<Mark, int> count;
  for (const BookSection& section : book()) {
    EXPECT_STRNE(section.source, "") << section.title;
    for (const BookFormula& formula : section.formulas) {
      for (const BookRow& row : formula.rows) {
        ++count[row.mark];
        const bool remarked = row.mark == Mark::rounds || row.mark == Mark::errs;
        EXPECT_EQ(remarked, row.remark[0] != '\0') << row.name;
      }
    }
  }
  EXPECT_EQ(count[Mark::rounds], 40);
  EXPECT_EQ(count[Mark::errs], 14);
  EXPECT_EQ(count[Mark::agrees], 66);
}

TEST(Book, InputsParse) {
  Inputs in("h=32;bw=3.35e12;m_old=-3");
  EXPECT_EQ(in["h"], 32);
  EXPECT_EQ(in.real("bw"), 3.35e12);
  EXPECT_EQ(in.real("m_old"), -3);
  EXPECT_EQ(in.real("none"), 0);
  EXPECT_FALSE(in.set("none", 1));
  EXPECT_TRUE(in.set("h", 8));
  EXPECT_EQ(in["h"], 8);
}

}  // namespace
}  // namespace attnfold::explain
