// Text for people: tables, progress, sizes; and the statistics of repeated timings.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace attnfold::tools {

/** Aligned columns.  A column is flush left if its heading starts with '<', else flush right. */
class Table {
 public:
  explicit Table(std::vector<std::string> headings);
  void add_row(std::vector<std::string> cells);
  void add_note(std::string text);  // a line of its own, indented, below the last row
  std::string text() const;

 private:
  struct Line {
    std::vector<std::string> cells;
    std::string note;
  };
  std::vector<std::string> headings_;
  std::vector<bool> left_;
  std::vector<Line> lines_;
};

/** One line on stderr, rewritten in place, shown once two seconds have passed; silent unless stderr
 * is a terminal. */
class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void show(const std::string& text);
  void clear();

 private:
  std::chrono::steady_clock::time_point start_;
  bool is_terminal_;
  bool shown_ = false;
};

/** Median and quartiles of a sample. */
struct Spread {
  double median = 0, lower = 0, upper = 0;
};
Spread spread_of(std::vector<double> values);

inline double elapsed_us_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

/** Microseconds that `f` took. */
template <class F>
double elapsed_us(F&& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return elapsed_us_since(start);
}

/** Three significant digits or all digits before the point: "1.23", "45.6", "789", "12345". */
std::string short_number(double x);
/** "12 B", "3.4 KB", "134 MB": powers of 1000. */
std::string bytes_text(double bytes);
/** At most `width` characters, the front replaced by ".." where it does not fit. */
std::string shortened(const std::string& text, size_t width);
/** Broken at spaces into lines of at most `width`, the second and later ones indented by `indent`.
 */
std::string wrapped(const std::string& text, size_t width, size_t indent);

}  // namespace attnfold::tools
