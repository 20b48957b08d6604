#include "explain/book.h"

#include <algorithm>
#include <cstdlib>

namespace attnfold::explain {

Inputs::Inputs(std::string_view text) {
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(';'));
    text.remove_prefix(std::min(item.size() + 1, text.size()));
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos) continue;
    values_.emplace_back(item.substr(0, equals),
                         std::strtod(std::string(item.substr(equals + 1)).c_str(), nullptr));
  }
}

double Inputs::real(std::string_view name) const {
  for (const auto& [known, value] : values_) {
    if (known == name) return value;
  }
  return 0;
}

bool Inputs::set(std::string_view name, double value) {
  for (auto& [known, number] : values_) {
    if (known != name) continue;
    number = value;
    return true;
  }
  return false;
}

const char* mark_name(Mark mark) {
  switch (mark) {
    case Mark::derived: return "derived";
    case Mark::agrees: return "agrees";
    case Mark::rounds: return "rounds";
    case Mark::errs: return "errs";
  }
  return "";
}

const std::vector<BookSection>& book() {
  static const std::vector<BookSection> sections = [] {
    std::vector<BookSection> all;
    for (auto* part : {softmax_sections, grid_sections, decode_sections, engine_sections}) {
      for (BookSection& section : part()) all.push_back(std::move(section));
    }
    return all;
  }();
  return sections;
}

}  // namespace attnfold::explain
