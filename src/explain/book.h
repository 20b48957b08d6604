// Numbers that texts on attention print, each from a function of its inputs.
//
// A formula is a named relation of quantities.h or heuristics.h; a row is that formula at the
// inputs of one printed number, with what is known of the print.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace attnfold::explain {

/** Named numbers, written "h=32;b=2;bw=3.35e12". */
class Inputs {
 public:
  explicit Inputs(std::string_view text);

  double real(std::string_view name) const;  // 0 if there is none of that name
  int64_t operator[](std::string_view name) const { return static_cast<int64_t>(real(name)); }
  /** Changes a number; false if there is none of that name. */
  bool set(std::string_view name, double value);
  const std::vector<std::pair<std::string, double>>& all() const { return values_; }

 private:
  std::vector<std::pair<std::string, double>> values_;
};

enum class Mark {
  derived,  // not printed: it follows
  agrees,
  rounds,  // the print is a rounding of it
  errs     // the print is something else
};
const char* mark_name(Mark mark);

struct BookRow {
  const char* name;
  const char* inputs;
  Mark mark;
  const char* remark;  // what is printed, if that is not the value
};

struct BookFormula {
  const char* formula;
  const char* unit;
  double (*value)(const Inputs& in);
  std::vector<BookRow> rows;
};

struct BookSection {
  const char* title;
  const char* source;  // where the algorithm or engine is published
  std::vector<BookFormula> formulas;
};

const std::vector<BookSection>& book();

// Its parts.
std::vector<BookSection> softmax_sections();
std::vector<BookSection> grid_sections();
std::vector<BookSection> decode_sections();
std::vector<BookSection> engine_sections();

}  // namespace attnfold::explain
