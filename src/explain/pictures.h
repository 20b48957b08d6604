// Pictures of an answer, as SVG, and a page that holds them all.
#pragma once

#include <string>
#include <vector>

#include "explain/engines.h"

namespace attnfold::explain {

/** Blocks over SMs and time, one colour per request; the floor is marked. */
std::string timeline_svg(const Question& question, const Line& line);

/** The roof of the machine and where each engine's call lies under it. */
std::string roofline_svg(const Question& question, const std::vector<Line>& lines);

/** Splits of a decode against its context, for as many equal requests as the question has. */
std::string splits_svg(const Question& question);

/** One page with table, rules and pictures: well-formed XHTML that loads nothing else. */
struct PageText {
  std::string title, machine;
};
std::string page_html(const Question& question, const std::vector<Line>& lines,
                      const PageText& text);

/** With <, >, & and quotes as entities. */
std::string escaped(const std::string& text);

}  // namespace attnfold::explain
