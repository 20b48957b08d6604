// A plot of what share of its roofline a decode reaches, against the size of its keys and values.
#pragma once

#include <string>
#include <vector>

namespace attnfold::tools {

struct PlotPoint {
  double kv_bytes;
  double fraction;
};

struct PlotLine {
  std::string name;
  std::vector<PlotPoint> points;
};

/** An SVG document: sizes on a logarithmic axis, fractions from 0 to 1.2 or as far as they go. */
std::string fraction_plot(const std::string& title, const std::vector<PlotLine>& lines);

}  // namespace attnfold::tools
