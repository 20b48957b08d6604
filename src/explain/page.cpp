// The page of an answer.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "explain/pictures.h"
#include "explain/quantities.h"

namespace attnfold::explain {
namespace {

constexpr const char* kStyle =
    "body{font-family:sans-serif;margin:2em auto;max-width:80em;padding:0 1em;color:#222;"
    "background:#fff}"
    "table{border-collapse:collapse;font-size:.85em}"
    "th,td{padding:.25em .45em;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left}"
    ".scroll{overflow-x:auto}svg{max-width:100%;height:auto}"
    "dt{font-weight:bold;margin-top:.5em}dd{margin-left:1.5em}figure{margin:1em 0}"
    "figcaption{font-size:.9em}";

std::string span_of(const std::vector<int32_t>& splits) {
  const auto [low, high] = std::minmax_element(splits.begin(), splits.end());
  return *low == *high ? fmt::format("{}", *low) : fmt::format("{}..{}", *low, *high);
}

std::string megabytes(int64_t bytes) {
  return fmt::format("{:.4g}", static_cast<double>(bytes) / 1e6);
}

std::string row_of(const Line& line) {
  const bool blocks = !line.blocks.empty();
  const auto cell = [](const std::string& text) {
    return fmt::format("<td>{}</td>", escaped(text));
  };
  const auto if_blocks = [&](std::string text) { return cell(blocks ? text : "-"); };
  std::string row = "<tr>" + cell(line.engine) + cell(line.grid);
  row += if_blocks(fmt::format("{}/{}", line.live, line.launched)) + cell(span_of(line.splits));
  row += if_blocks(fmt::format("{}", line.waves));
  row += if_blocks(fmt::format("{:.1f} %", 100 * line.busy));
  row += if_blocks(fmt::format("{}", line.keys_per_block));
  row += if_blocks(fmt::format("{:.0f} %", 100 * line.wasted_rows));
  row += cell(megabytes(line.partial_bytes)) + cell(megabytes(line.kv_bytes));
  row +=
      if_blocks(fmt::format("{:.2f}", ratio(line.kv_loads, std::max<int64_t>(line.kv_bytes, 1))));
  row += cell(fmt::format("{:.3g}", line.intensity)) +
         cell(line.compute_bound ? "compute" : "memory") +
         cell(fmt::format("{:.3g}", line.floor_us));
  return row + if_blocks(fmt::format("{:.3g}", line.shared_us)) + "</tr>\n";
}

std::string table_of(const std::vector<Line>& lines) {
  std::string text =
      "<div class=\"scroll\"><table><thead><tr><th>engine</th><th>grid</th><th>live/launched</th>"
      "<th>splits</th><th>waves</th><th>SMs busy</th><th>keys/block</th><th>wasted rows</th>"
      "<th>partial MB</th><th>KV MB</th><th>loaded</th><th>FLOP/B</th><th>side</th>"
      "<th>floor us</th><th>even us</th></tr></thead><tbody>\n";
  for (const Line& line : lines) {
    if (line.used) text += row_of(line);
  }
  return text + "</tbody></table></div>\n";
}

}  // namespace

std::string page_html(const Question& question, const std::vector<Line>& lines,
                      const PageText& text) {
  std::string page = fmt::format(
      "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\"><head>"
      "<meta charset=\"utf-8\"/><meta name=\"viewport\" content=\"width=device-width\"/>"
      "<title>attnfold explain: {0}</title><style>{1}</style></head><body>\n"
      "<h1>{0}</h1>\n<p>{2}. One layer of one step.</p>\n",
      escaped(text.title), kStyle, escaped(text.machine));
  page += table_of(lines);
  page += "<h2>What decided</h2>\n<dl>\n";
  for (const Line& line : lines) {
    page += fmt::format("<dt>{}{}</dt><dd>{}</dd>\n", escaped(line.engine),
                        line.used ? "" : " (not for this call)", escaped(line.rule));
  }
  page += "</dl>\n<h2>Roofline</h2>\n<figure>" + roofline_svg(question, lines) +
          "<figcaption>FLOP per byte of q, k, v, o and partial states, and the roof above it."
          "</figcaption></figure>\n";
  page +=
      "<h2>Splits against context</h2>\n<figure>" + splits_svg(question) +
      "<figcaption>Both axes are logarithmic.</figcaption></figure>\n<h2>Blocks over time</h2>\n";
  page +=
      "<p>Blocks start in launch order on the first free SM; an SM has an equal share of bandwidth "
      "and "
      "peak, and every load comes from memory. A colour is a request.</p>\n";
  for (const Line& line : lines) {
    if (!line.used || line.blocks.empty()) continue;
    page += fmt::format("<figure><figcaption>{}: {} blocks, splits {}</figcaption>{}</figure>\n",
                        escaped(line.engine), line.live, span_of(line.splits),
                        timeline_svg(question, line));
  }
  return page + "</body></html>\n";
}

}  // namespace attnfold::explain
