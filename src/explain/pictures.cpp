#include "explain/pictures.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>

#include "explain/quantities.h"

namespace attnfold::explain {
namespace {

using Text = fmt::memory_buffer;

template <class... Args>
void put(Text& out, fmt::format_string<Args...> format, Args&&... args) {
  fmt::format_to(std::back_inserter(out), format, std::forward<Args>(args)...);
}

constexpr std::array<const char*, 8> kColours = {"#4269d0", "#efb118", "#ff725c", "#6cc5b0",
                                                 "#3ca951", "#ff8ab7", "#a463f2", "#9c6b4e"};

/** Hues that stay apart for neighbouring requests. */
std::string request_colour(int32_t request) {
  const int32_t hue = static_cast<int32_t>(int64_t{request} * 137 % 360);
  return fmt::format("hsl({},60%,{}%)", hue, request % 2 == 0 ? 48 : 62);
}

/** Where a number lies on an axis of `pixels` from `low` to `high`, logarithmic. */
struct LogAxis {
  double low, high, pixels;
  double at(double x) const {
    const double clamped = std::clamp(x, low, high);
    return pixels * std::log(clamped / low) / std::log(high / low);
  }
};

std::string plain(double x) { return fmt::format("{:.7g}", x); }
/** Three digits, or all before the point. */
std::string short_us(double us) {
  return us >= 100 ? fmt::format("{:.0f} us", us) : fmt::format("{:.3g} us", us);
}

constexpr double kLeft = 64, kTop = 12, kPlotWidth = 560, kPlotHeight = 280;

void open_svg(Text& out, const char* name, double width, double height) {
  put(out,
      "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" aria-label=\"{}\" viewBox=\"0 0 {} "
      "{}\" "
      "width=\"{}\" height=\"{}\" font-family=\"sans-serif\" font-size=\"11\">\n",
      name, width, height, width, height);
}

void label(Text& out, double x, double y, const char* anchor, const std::string& text) {
  put(out, "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" fill=\"#333\">{}</text>\n", x, y,
      anchor, escaped(text));
}

void grid_line(Text& out, double x1, double y1, double x2, double y2) {
  put(out, "<path d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}\" stroke=\"#ddd\"/>\n", x1, y1, x2, y2);
}

/** Powers of `step` on both axes, with names. */
void draw_axes(Text& out, const LogAxis& x, const LogAxis& y, double x_step, double y_step,
               const char* x_name, const char* y_name) {
  const double bottom = kTop + y.pixels;
  for (double v = x.low; v <= x.high * 1.001; v *= x_step) {
    grid_line(out, kLeft + x.at(v), kTop, kLeft + x.at(v), bottom);
    label(out, kLeft + x.at(v), bottom + 15, "middle", plain(v));
  }
  for (double v = y.low; v <= y.high * 1.001; v *= y_step) {
    grid_line(out, kLeft, bottom - y.at(v), kLeft + x.pixels, bottom - y.at(v));
    label(out, kLeft - 6, bottom - y.at(v) + 4, "end", plain(v));
  }
  label(out, kLeft + x.pixels / 2, bottom + 32, "middle", x_name);
  put(out,
      "<text transform=\"translate(14 {:.1f}) rotate(-90)\" text-anchor=\"middle\" "
      "fill=\"#333\">{}</text>\n",
      kTop + y.pixels / 2, y_name);
}

double power_below(double x, double base) {
  return std::pow(base, std::floor(std::log(x) / std::log(base) + 1e-9));
}
double power_above(double x, double base) {
  return std::pow(base, std::ceil(std::log(x) / std::log(base) - 1e-9));
}

/** Spans that follow one another on a worker for one request, as one. */
std::vector<Span> joined(std::vector<Span> spans, double gap_us) {
  std::stable_sort(spans.begin(), spans.end(),
                   [](const Span& a, const Span& b) { return a.worker < b.worker; });
  std::vector<Span> out;
  for (const Span& span : spans) {
    if (!out.empty() && out.back().worker == span.worker && out.back().request == span.request &&
        span.begin_us - out.back().end_us <= gap_us) {
      out.back().end_us = span.end_us;
    } else {
      out.push_back(span);
    }
  }
  return out;
}

}  // namespace

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '&': out += "&amp;"; break;
      case '"': out += "&quot;"; break;
      default: out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

std::string timeline_svg(const Question& question, const Line& line) {
  constexpr size_t kMostSpans = size_t{1} << 22, kMostDrawn = 30000;
  constexpr double kWidth = 620;
  const double height = std::clamp(static_cast<double>(question.machine.sms) * 1.5, 60.0, 260.0);
  std::vector<Span> spans = timeline(question, line, kMostSpans);
  double end = line.floor_us;
  for (const Span& span : spans) end = std::max(end, span.end_us);
  // Blocks of one request that touch are drawn apart only if there are few.
  if (spans.size() > kMostDrawn) spans = joined(std::move(spans), end * 1e-4);
  if (spans.size() > kMostDrawn) spans.resize(kMostDrawn);
  const double row = height / static_cast<double>(question.machine.sms), scale = kWidth / end;

  Text out;
  open_svg(out, "timeline", kLeft + kWidth + 20, kTop + height + 34);
  put(out,
      "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"#f4f4f4\" stroke=\"#ccc\"/>\n",
      kLeft, kTop, kWidth, height);
  for (const Span& span : spans) {
    put(out,
        "<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\" "
        "stroke=\"#fff\" stroke-width=\"0.2\"/>\n",
        kLeft + span.begin_us * scale, kTop + span.worker * row,
        std::max((span.end_us - span.begin_us) * scale, 0.05), row, request_colour(span.request));
  }
  const double floor_x = kLeft + line.floor_us * scale;
  put(out,
      "<path d=\"M{:.1f} {}V{:.1f}\" stroke=\"#000\" stroke-dasharray=\"3 3\"><title>floor</title>"
      "</path>\n",
      floor_x, kTop, kTop + height);
  label(out, kLeft - 6, kTop + 9, "end", "0");
  label(out, kLeft - 6, kTop + height, "end",
        fmt::format("{} {}", question.machine.sms,
                    question.machine.kind == MachineKind::gpu ? "SMs" : "cores"));
  label(out, kLeft, kTop + height + 15, "start", "0 us");
  label(out, kLeft + kWidth, kTop + height + 15, "end", short_us(end));
  label(out, std::clamp(floor_x, kLeft + 90, kLeft + kWidth - 90), kTop + height + 29, "middle",
        fmt::format("floor {} (dashed)", short_us(line.floor_us)));
  put(out, "</svg>\n");
  return fmt::to_string(out);
}

std::string roofline_svg(const Question& question, const std::vector<Line>& lines) {
  const Machine& machine = question.machine;
  const double ridge_x = ridge(machine.flop_per_s, machine.bytes_per_s);
  double low = ridge_x, high = ridge_x;
  for (const Line& line : lines) {
    if (!line.used) continue;
    low = std::min(low, line.intensity);
    high = std::max(high, line.intensity);
  }
  const LogAxis x{power_below(low * 0.7, 10), power_above(high * 1.5, 10), kPlotWidth};
  const LogAxis y{power_below(x.low * machine.bytes_per_s / 1e12, 10),
                  power_above(machine.flop_per_s / 1e12, 10), kPlotHeight};
  const double bottom = kTop + kPlotHeight;
  const auto roof = [&](double at) {
    return std::min(at * machine.bytes_per_s, machine.flop_per_s) / 1e12;
  };

  Text out;
  open_svg(out, "roofline", kLeft + kPlotWidth + 190, bottom + 42);
  draw_axes(out, x, y, 10, 10, "FLOP per byte", "TFLOP/s");
  put(out,
      "<path d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}L{:.1f} {:.1f}\" fill=\"none\" stroke=\"#333\" "
      "stroke-width=\"2\"/>\n",
      kLeft + x.at(x.low), bottom - y.at(roof(x.low)), kLeft + x.at(ridge_x),
      bottom - y.at(roof(ridge_x)), kLeft + x.at(x.high), bottom - y.at(roof(x.high)));
  label(out, kLeft + x.at(ridge_x), bottom - y.at(roof(ridge_x)) + 16, "start",
        fmt::format("ridge {:.0f}", ridge_x));
  size_t i = 0;
  for (const Line& line : lines) {
    if (!line.used) continue;
    const char* colour = kColours[i % kColours.size()];
    const double cx = kLeft + x.at(line.intensity), cy = bottom - y.at(roof(line.intensity));
    // The second eight of the engines are drawn as rings.
    put(out,
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"5\" fill=\"{}\" stroke=\"{}\" "
        "stroke-width=\"2\"><title>{}</title></circle>\n",
        cx, cy, i < kColours.size() ? colour : "#fff", colour, escaped(line.engine));
    const double ly = kTop + 14 + 18 * static_cast<double>(i);
    put(out,
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"5\" fill=\"{}\" stroke=\"{}\" "
        "stroke-width=\"2\"/>\n",
        kLeft + kPlotWidth + 18, ly - 4, i < kColours.size() ? colour : "#fff", colour);
    label(out, kLeft + kPlotWidth + 30, ly, "start",
          fmt::format("{} {:.3g}", line.engine, line.intensity));
    ++i;
  }
  put(out, "</svg>\n");
  return fmt::to_string(out);
}

std::string splits_svg(const Question& question) {
  constexpr std::array engines = {vllm_unified,
                                  sglang_adaptive,
                                  sglang_deterministic,
                                  flashinfer_tensor_core,
                                  flash_attention_2,
                                  flash_attention_3,
                                  flash_mla,
                                  attnfold_engine};
  const LogAxis x{64, 131072, kPlotWidth}, y{1, 1024, kPlotHeight};
  const double bottom = kTop + kPlotHeight;
  const size_t requests = std::min<size_t>(question.batch.size(), 512);
  Text out;
  open_svg(out, "splits against context", kLeft + kPlotWidth + 190, bottom + 42);
  draw_axes(out, x, y, 4, 4, fmt::format("keys of each of {} decodes", requests).c_str(),
            "splits of a request");
  double ly = kTop + 14;
  for (size_t i = 0; i < engines.size(); ++i) {
    std::string path, name;
    for (double s = x.low; s <= x.high * 1.001; s *= std::pow(2.0, 0.125)) {
      Question at = question;
      at.batch.assign(requests, {1, static_cast<int64_t>(std::lround(s))});
      at.shared_prefix = 0;
      const Line line = engines[i](at);
      if (!line.used) continue;
      name = line.engine;
      const double splits = std::max(line.splits[0], 1);
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", kLeft + x.at(s),
                          bottom - y.at(splits));
    }
    if (path.empty()) continue;
    // Each line has its own dashes too, since several lie on one another.
    put(out,
        "<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\" stroke-dasharray=\"{} {}\">"
        "<title>{}</title></path>\n",
        path, kColours[i], 12 + 2 * i, 2 * i, escaped(name));
    put(out, "<path d=\"M{:.1f} {:.1f}h20\" stroke=\"{}\" stroke-width=\"3\"/>\n",
        kLeft + kPlotWidth + 12, ly - 4, kColours[i]);
    label(out, kLeft + kPlotWidth + 38, ly, "start", name);
    ly += 18;
  }
  put(out, "</svg>\n");
  return fmt::to_string(out);
}

}  // namespace attnfold::explain
