#include "text.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace attnfold::tools {

Table::Table(std::vector<std::string> headings) {
  for (std::string& heading : headings) {
    const bool left = !heading.empty() && heading.front() == '<';
    left_.push_back(left);
    headings_.push_back(left ? heading.substr(1) : heading);
  }
}

void Table::add_row(std::vector<std::string> cells) {
  cells.resize(headings_.size());
  lines_.push_back({std::move(cells), {}});
}

void Table::add_note(std::string text) { lines_.push_back({{}, std::move(text)}); }

std::string Table::text() const {
  std::vector<size_t> width(headings_.size());
  for (size_t c = 0; c < headings_.size(); ++c) {
    width[c] = headings_[c].size();
    for (const Line& line : lines_) {
      if (!line.cells.empty()) width[c] = std::max(width[c], line.cells[c].size());
    }
  }
  auto row_text = [&](const std::vector<std::string>& cells) {
    std::string row;
    for (size_t c = 0; c < cells.size(); ++c) {
      if (c > 0) row += "  ";
      row += left_[c] ? fmt::format("{:<{}}", cells[c], width[c])
                      : fmt::format("{:>{}}", cells[c], width[c]);
    }
    row.erase(row.find_last_not_of(' ') + 1);
    return row + "\n";
  };
  std::string text = row_text(headings_);
  for (const Line& line : lines_) {
    text += line.cells.empty() ? fmt::format("    {}\n", wrapped(line.note, 92, 6))
                               : row_text(line.cells);
  }
  return text;
}

Progress::Progress()
    : start_(std::chrono::steady_clock::now()), is_terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() { clear(); }

void Progress::show(const std::string& text) {
  if (!is_terminal_ || std::chrono::steady_clock::now() - start_ < std::chrono::seconds(2)) return;
  fmt::print(stderr, "\r\x1b[K{}", text);
  std::fflush(stderr);
  shown_ = true;
}

void Progress::clear() {
  if (shown_) fmt::print(stderr, "\r\x1b[K");
  shown_ = false;
}

Spread spread_of(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  auto at = [&](double fraction) {
    const double position = fraction * static_cast<double>(values.size() - 1);
    const size_t below = static_cast<size_t>(position);
    const size_t above = std::min(below + 1, values.size() - 1);
    return values[below] +
           (position - static_cast<double>(below)) * (values[above] - values[below]);
  };
  return {at(0.5), at(0.25), at(0.75)};
}

std::string short_number(double x) {
  if (!std::isfinite(x)) return fmt::format("{}", x);
  const double magnitude = std::fabs(x);
  if (magnitude >= 99.95) return fmt::format("{:.0f}", x);
  if (magnitude >= 9.995) return fmt::format("{:.1f}", x);
  return fmt::format("{:.2f}", x);
}

std::string bytes_text(double bytes) {
  if (bytes < 1e3) return fmt::format("{:.0f} B", bytes);
  if (bytes < 1e6) return short_number(bytes / 1e3) + " KB";
  if (bytes < 1e9) return short_number(bytes / 1e6) + " MB";
  return short_number(bytes / 1e9) + " GB";
}

std::string shortened(const std::string& text, size_t width) {
  return text.size() <= width ? text : ".." + text.substr(text.size() - (width - 2));
}

std::string wrapped(const std::string& text, size_t width, size_t indent) {
  std::string out;
  size_t start = 0;
  while (text.size() - start > width) {
    size_t stop = text.rfind(' ', start + width);
    const bool has_space = stop != std::string::npos && stop > start;
    if (!has_space) stop = start + width;
    out += text.substr(start, stop - start) + "\n" + std::string(indent, ' ');
    start = has_space ? stop + 1 : stop;
  }
  return out + text.substr(start);
}

}  // namespace attnfold::tools
