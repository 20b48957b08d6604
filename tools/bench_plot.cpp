#include "bench_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "text.h"

namespace attnfold::tools {
namespace {

constexpr double kWidth = 720, kHeight = 400, kLeft = 60, kRight = 140, kTop = 40, kBottom = 50;
constexpr std::array<const char*, 4> kColours = {"#1b6ca8", "#c8553d", "#3a7d44", "#7a5195"};

/** Text as it may stand in XML. */
std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '&') {
      out += "&amp;";
    } else {
      out += c;
    }
  }
  return out;
}

/** Where values stand on the page. */
struct Axes {
  double low_bytes, high_bytes, high_fraction;

  double x(double bytes) const {
    const double range = std::log2(high_bytes / low_bytes);
    return kLeft + (kWidth - kLeft - kRight) * std::log2(bytes / low_bytes) / range;
  }
  double y(double fraction) const {
    return kHeight - kBottom - (kHeight - kTop - kBottom) * fraction / high_fraction;
  }
};

Axes axes_of(const std::vector<PlotLine>& lines) {
  Axes axes{std::numeric_limits<double>::max(), 0, 1.2};
  for (const PlotLine& line : lines) {
    for (const PlotPoint& point : line.points) {
      axes.low_bytes = std::min(axes.low_bytes, point.kv_bytes);
      axes.high_bytes = std::max(axes.high_bytes, point.kv_bytes);
      axes.high_fraction = std::max(axes.high_fraction, point.fraction);
    }
  }
  if (axes.high_bytes == 0) axes.low_bytes = axes.high_bytes = 1e6;
  if (axes.high_bytes <= axes.low_bytes) {
    axes.low_bytes /= 2;
    axes.high_bytes *= 2;
  }
  return axes;
}

std::string label(double x, double y, const char* anchor, const std::string& text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor,
                     escaped(text));
}

}  // namespace

std::string fraction_plot(const std::string& title, const std::vector<PlotLine>& lines) {
  const Axes axes = axes_of(lines);
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" "
      "font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
      kWidth, kHeight);
  svg += label(kLeft, 20, "start", title);
  for (double fraction = 0; fraction <= axes.high_fraction + 1e-9; fraction += 0.2) {
    svg += fmt::format(
        "<line x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\" stroke=\"{3}\"/>\n", kLeft,
        kWidth - kRight, axes.y(fraction), std::abs(fraction - 1) < 1e-9 ? "#888" : "#ddd");
    svg += label(kLeft - 8, axes.y(fraction) + 4, "end", fmt::format("{:.0f} %", 100 * fraction));
  }
  for (double bytes = std::exp2(std::ceil(std::log2(axes.low_bytes))); bytes <= axes.high_bytes;
       bytes *= 4) {
    svg += label(axes.x(bytes), kHeight - kBottom + 18, "middle", bytes_text(bytes));
  }
  svg +=
      label((kLeft + kWidth - kRight) / 2, kHeight - 12, "middle", "keys and values of the call");
  for (size_t i = 0; i < lines.size(); ++i) {
    const char* colour = kColours[i % kColours.size()];
    std::string path;
    for (const PlotPoint& point : lines[i].points) {
      const double x = axes.x(point.kv_bytes), y = axes.y(point.fraction);
      path += fmt::format("{:.1f},{:.1f} ", x, y);
      svg +=
          fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>\n", x, y, colour);
    }
    svg += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\"/>\n", path, colour);
    const double y = kTop + 18 * static_cast<double>(i);
    svg += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"10\" height=\"10\" fill=\"{}\"/>\n",
                       kWidth - kRight + 12, y, colour);
    svg += label(kWidth - kRight + 28, y + 9, "start", lines[i].name);
  }
  return svg + "</svg>\n";
}

}  // namespace attnfold::tools
