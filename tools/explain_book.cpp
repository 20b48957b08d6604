// attnfold explain --book: numbers that texts print, computed.
#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>

#include "command.h"
#include "explain/book.h"
#include "explain_report.h"

namespace attnfold::tools {
namespace {

using explain::BookFormula;
using explain::BookRow;
using explain::BookSection;
using explain::Inputs;
using nlohmann::ordered_json;

// Inputs that are no counts.
constexpr std::array<std::string_view, 12> kReals = {"bw",    "peak",     "ridge",    "pi",
                                                     "N",     "x",        "m_old",    "m_new",
                                                     "sigma", "fp16_max", "half_ulp", "weights_gb"};

bool is_count(const std::string& name) {
  return std::find(kReals.begin(), kReals.end(), name) == kReals.end();
}

/** Formulas are whole-number arithmetic on counts: they must be counts, and small enough. */
void check_inputs(const BookRow& row, const Inputs& in) {
  const auto refuse = [&](const std::string& what) {
    throw BadInput(fmt::format("--with: {}: {}", row.name, what));
  };
  double product = 8;
  for (const auto& [name, value] : in.all()) {
    if (!is_count(name)) continue;
    const double low = name == "segment" || name == "last_id" || name == "scalar" ? 0 : 1;
    if (!(value >= low) || value != std::floor(value)) {
      refuse(fmt::format("expected {} to be a whole number >= {}, got {}", name, low, value));
    }
    if (name == "T2") {  // only ever by itself
      if (value > 0x1p24) refuse("expected T2 to be at most 2^24");
      continue;
    }
    product *= std::max(value, 1.0) * (name == "T" ? value : 1);
    if (product > 0x1p60) refuse("expected inputs whose product fits 60 bits");
  }
  const int64_t h = in["h"], h_kv = in["h_kv"];
  if (h_kv > 0 && h > 0 && h % h_kv != 0) refuse("expected h_kv to divide h");
  if (h_kv > 0 && in["BLOCK_M"] > 0 && h > 0 && in["BLOCK_M"] < h / h_kv) {
    refuse("expected BLOCK_M to be at least h/h_kv");
  }
  if (in["g"] > 0 && in["BLOCK_M"] > 0 && in["BLOCK_M"] < in["g"]) {
    refuse("expected BLOCK_M to be at least g");
  }
  for (const char* exponent :
       {"mantissa", "max_exponent", "zero_exponent", "subnormal_exponent", "normal_exponent"}) {
    if (in[exponent] > 1000) refuse(fmt::format("expected {} to be at most 1000", exponent));
  }
  if (in["load_bits"] > 0 && in["load_bits"] < 8 * std::max<int64_t>(in["b"], 1)) {
    refuse("expected load_bits to hold an element");
  }
}

std::vector<std::pair<std::string, double>> parse_changes(const std::string& text) {
  std::vector<std::pair<std::string, double>> changes;
  size_t at = 0;
  while (at < text.size()) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string item = text.substr(at, end - at);
    const size_t equals = item.find('=');
    double value = 0;
    const char* last = item.data() + item.size();
    const auto [stop, error] = equals == std::string::npos
                                   ? std::from_chars_result{last, std::errc::invalid_argument}
                                   : std::from_chars(item.data() + equals + 1, last, value);
    if (error != std::errc() || stop != last || !std::isfinite(value)) {
      throw BadInput(fmt::format("--with: expected NAME=NUMBER, got {}", item));
    }
    changes.emplace_back(item.substr(0, equals), value);
    at = end + 1;
  }
  return changes;
}

struct Shown {
  const BookSection* section;
  const BookFormula* formula;
  const BookRow* row;
  Inputs inputs;
  bool changed;
  double value;
};

bool is_name(const std::string& part) {
  for (const BookSection& section : explain::book()) {
    for (const BookFormula& formula : section.formulas) {
      for (const BookRow& row : formula.rows) {
        if (part == row.name) return true;
      }
    }
  }
  return false;
}

/** The row of that name, or rows whose names hold it; with changes, those that have all the inputs
 * named. */
std::vector<Shown> shown_rows(const std::string& part, const std::string& changes_text) {
  const auto changes = parse_changes(changes_text);
  const bool exact = is_name(part);
  std::vector<Shown> rows;
  for (const BookSection& section : explain::book()) {
    for (const BookFormula& formula : section.formulas) {
      for (const BookRow& row : formula.rows) {
        if (exact ? part != row.name : std::string(row.name).find(part) == std::string::npos) {
          continue;
        }
        Inputs in(row.inputs);
        size_t set = 0;
        for (const auto& [name, value] : changes) set += in.set(name, value) ? 1 : 0;
        if (set != changes.size()) continue;
        check_inputs(row, in);
        rows.push_back({&section, &formula, &row, in, set > 0, formula.value(in)});
      }
    }
  }
  if (rows.empty()) {
    throw BadInput(fmt::format("--book: no number has '{}' in its name{}", part,
                               changes.empty() ? "" : " and all inputs of --with"));
  }
  return rows;
}

std::string inputs_text(const Inputs& in) {
  std::string text;
  for (const auto& [name, value] : in.all()) {
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", name, value);
  }
  return text;
}

}  // namespace

std::string book_text(const std::string& part, const std::string& changes) {
  std::string text;
  const BookSection* section = nullptr;
  const BookFormula* formula = nullptr;
  for (const Shown& shown : shown_rows(part, changes)) {
    if (shown.section != section) {
      section = shown.section;
      text +=
          fmt::format("{}{}  [{}]\n", text.empty() ? "" : "\n", section->title, section->source);
    }
    if (shown.formula != formula) {
      formula = shown.formula;
      text += fmt::format("  {}\n", formula->formula);
    }
    const std::string unit = std::string(formula->unit) == "1" ? "" : formula->unit;
    text += fmt::format("    {:<40} {:>20} {:<7}", shown.row->name, shown.value, unit);
    if (!shown.changed) {
      text += fmt::format("{:<8} {}", explain::mark_name(shown.row->mark), shown.row->remark);
    }
    while (text.back() == ' ') text.pop_back();
    text += fmt::format("\n      {}\n", inputs_text(shown.inputs));
  }
  return text;
}

ordered_json book_json(const std::string& part, const std::string& changes) {
  ordered_json rows = ordered_json::array();
  for (const Shown& shown : shown_rows(part, changes)) {
    ordered_json inputs;
    for (const auto& [name, value] : shown.inputs.all()) inputs[name] = value;
    ordered_json one = {{"name", shown.row->name},
                        {"section", shown.section->title},
                        {"source", shown.section->source},
                        {"inputs", std::move(inputs)},
                        {"formula", shown.formula->formula},
                        {"unit", shown.formula->unit},
                        {"value", shown.value}};
    if (!shown.changed) {
      one["print"] = explain::mark_name(shown.row->mark);
      one["remark"] = shown.row->remark;
    }
    rows.push_back(std::move(one));
  }
  return rows;
}

}  // namespace attnfold::tools
