#include "diagnose_call.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "check/call_file.h"
#include "diagnose/diagnose.h"
#include "text.h"
#include "verify.h"

namespace attnfold::tools {
namespace {

using nlohmann::json;

std::string requests_text(const std::vector<int32_t>& requests) {
  constexpr size_t kMost = 8;
  std::string text = requests.size() == 1 ? "request" : "requests";
  for (size_t i = 0; i < std::min(requests.size(), kMost); ++i) {
    text += (i > 0 ? ", " : " ") + std::to_string(requests[i]);
  }
  if (requests.size() > kMost) text += fmt::format(" and {} more", requests.size() - kMost);
  return text;
}

std::string diagnosis_text(const diagnose::Diagnosis& diagnosis) {
  if (diagnosis.right()) return fmt::format("right: {} rows\n", diagnosis.rows);
  std::string text = fmt::format("{} of {} rows are wrong\n", diagnosis.wrong_rows, diagnosis.rows);
  for (const diagnose::Finding& finding : diagnosis.findings) {
    text += fmt::format("  {}: {}\n", requests_text(finding.requests), finding.faults.front());
    for (size_t i = 1; i < finding.faults.size(); ++i) {
      text += fmt::format("    or, with the same rows: {}\n", finding.faults[i]);
    }
    text += fmt::format("    explains all of {} rows looked at, of {} wrong ones\n",
                        finding.checked_rows, finding.wrong_rows);
  }
  if (!diagnosis.unexplained.empty()) {
    text += fmt::format("  {}: none of these\n", requests_text(diagnosis.unexplained));
  }
  return text;
}

json diagnosis_json(const diagnose::Diagnosis& diagnosis) {
  json out = {{"rows", diagnosis.rows},
              {"wrong_rows", diagnosis.wrong_rows},
              {"unexplained_requests", diagnosis.unexplained},
              {"findings", json::array()}};
  for (const diagnose::Finding& f : diagnosis.findings) {
    out["findings"].push_back({{"faults", f.faults},
                               {"requests", f.requests},
                               {"wrong_rows", f.wrong_rows},
                               {"checked_rows", f.checked_rows}});
  }
  return out;
}

}  // namespace

ExitCode run_diagnose(const std::vector<std::string>& files, bool as_json) {
  json results = json::array();
  std::string text;
  ExitCode worst = kRight;
  Progress progress;
  for (const std::string& file : files) {
    progress.show(shortened(file, 50));
    const check::LoadResult loaded = check::load_call(file);
    const std::string error = loaded.ok ? diagnose::why_not(loaded.call) : loaded.error;
    if (!error.empty()) {
      worst = worse_of(worst, kBadInput);
      text += fmt::format("{}: cannot be judged: {}\n", file, error);
      results.push_back({{"name", file}, {"error", error}});
      continue;
    }
    const diagnose::Diagnosis diagnosis = diagnose::diagnose(loaded.call);
    worst = worse_of(worst, diagnosis.right() ? kRight : kWrong);
    text += fmt::format("{}: {}", file, diagnosis_text(diagnosis));
    results.push_back(diagnosis_json(diagnosis));
    results.back()["name"] = file;
  }
  progress.clear();
  if (as_json) {
    fmt::print("{}\n", json({{"code", static_cast<int>(worst)}, {"results", results}})
                           .dump(2, ' ', false, json::error_handler_t::replace));
  } else {
    fmt::print("{}", text);
  }
  return worst;
}

}  // namespace attnfold::tools
