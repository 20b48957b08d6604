// attnfold verify: is the engine right on these calls, and are the answers recorded in them?
#include <fmt/format.h>

#include <memory>
#include <new>
#include <nlohmann/json.hpp>

#include "check/call_file.h"
#include "check/cases.h"
#include "command.h"
#include "diagnose_call.h"
#include "text.h"
#include "verify.h"

namespace attnfold::tools {
namespace {

using nlohmann::json;
constexpr size_t kNameWidth = 42;

using Step = std::function<void(const std::string&)>;

struct Options {
  std::vector<std::string> files, cases;
  VerifyOptions verify;
  bool as_json = false, list_cases = false;
  bool diagnose = false;
};

Verdict cannot_judge(std::string why) {
  Verdict verdict;
  verdict.code = kBadInput;
  verdict.why = std::move(why);
  return verdict;
}

Verdict verify_file(const std::string& path, const VerifyOptions& options, const Step& step) {
  step("reading");
  const check::LoadResult loaded = check::load_call(path);
  if (!loaded.ok) return cannot_judge(loaded.error);
  return verify_call(loaded.call, options, step);
}

Verdict verify_case(const std::string& name, const VerifyOptions& options, const Step& step) {
  if (const check::NamedCase* named = check::find_case(name)) {
    step("case");
    const std::string fault = named->run(options.seed, isa_or_null(options.isa));
    Verdict verdict;
    if (fault.empty()) return verdict;
    verdict.code = kWrong;
    verdict.why = fmt::format("{}; seed {}", fault, options.seed);
    return verdict;
  }
  for (const check::WaitingCase& waiting : check::waiting_cases()) {
    if (name == waiting.name)
      return cannot_judge(fmt::format("waits for a feature: {}", waiting.feature));
  }
  const std::optional<check::Call> call = check::case_call(name, options.seed);
  if (!call)
    return cannot_judge("--case: expected a name that `attnfold verify --list-cases` prints, got " +
                        name);
  Verdict verdict = verify_call(*call, options, step);
  if (verdict.code == kWrong) verdict.why += fmt::format("; seed {}", options.seed);
  return verdict;
}

const char* word_of(ExitCode code) {
  return code == kRight ? "right" : code == kWrong ? "WRONG" : "cannot be judged";
}

json verdict_json(const std::string& name, const Verdict& v) {
  json out = {{"name", name},
              {"verdict", word_of(v.code)},
              {"code", static_cast<int>(v.code)},
              {"why", v.why},
              {"rows", v.num_rows},
              {"kernel", v.kernel},
              {"schedules", v.num_schedules}};
  auto judgement = [](const check::Judgement& j) {
    return json{{"right", j.right},
                {"worst_o", j.worst_o},
                {"worst_lse", j.worst_lse},
                {"max_o_error", j.max_o_err},
                {"max_lse_error", j.max_lse_err}};
  };
  if (v.engine) out["engine"] = judgement(*v.engine);
  if (v.recorded) {
    out["recorded"] = judgement(*v.recorded);
    if (!v.recorded_lse) out["recorded"]["worst_lse"] = out["recorded"]["max_lse_error"] = nullptr;
  }
  return out;
}

void add_to_table(Table& table, const std::string& name, const Verdict& v) {
  auto ratio = [](const std::optional<check::Judgement>& j, double check::Judgement::*member) {
    return j ? short_number((*j).*member) : std::string("-");
  };
  const size_t slash = name.rfind('/');
  const std::string file =
      name.size() <= kNameWidth || slash == std::string::npos ? name : name.substr(slash + 1);
  const bool has_lse = v.recorded && v.recorded_lse;
  table.add_row({shortened(file, kNameWidth), v.engine ? fmt::format("{}", v.num_rows) : "-",
                 ratio(v.engine, &check::Judgement::worst_o),
                 ratio(v.engine, &check::Judgement::worst_lse),
                 v.num_schedules > 0 ? fmt::format("{}", v.num_schedules) : "-",
                 ratio(v.recorded, &check::Judgement::worst_o),
                 has_lse ? ratio(v.recorded, &check::Judgement::worst_lse) : "-", word_of(v.code)});
  if (!v.why.empty()) table.add_note(v.why);
}

int list_cases(bool as_json) {
  if (as_json) {
    json out = json::array();
    for (const check::NamedCase& c : check::named_cases())
      out.push_back({{"name", c.name}, {"claim", c.claim}});
    fmt::print("{}\n", out.dump(2, ' ', false, json::error_handler_t::replace));
    return kRight;
  }
  fmt::print(
      "Calls that are drawn from --seed and verified like a file:\n  long_decode_20000\n  "
      "random\nCases:\n");
  for (const check::NamedCase& c : check::named_cases())
    fmt::print("  {}\n      {}\n", c.name, c.claim);
  if (!check::waiting_cases().empty()) fmt::print("Cases that wait for a feature:\n");
  for (const check::WaitingCase& c : check::waiting_cases())
    fmt::print("  {}: {}\n", c.name, c.feature);
  return kRight;
}

int run_verify(const Options& options) {
  if (options.list_cases) return list_cases(options.as_json);
  if (options.files.empty() && options.cases.empty())
    throw BadInput("FILE: expected a file or --case NAME, got neither");
  if (options.diagnose) {
    if (!options.cases.empty()) throw BadInput("--diagnose: expected files, got --case");
    return run_diagnose(options.files, options.as_json);
  }
  require_isa(options.verify.isa);

  Progress progress;
  Table table({"<call", "rows", "o", "lse", "schedules", "rec. o", "rec. lse", "<"});
  json results = json::array();
  ExitCode worst = kRight;
  auto judge_one = [&](const std::string& name, auto verify_it, const std::string& argument) {
    Verdict verdict;
    try {
      verdict = verify_it(argument, options.verify, [&](const std::string& step) {
        progress.show(fmt::format("{}: {}", shortened(name, 50), step));
      });
    } catch (const std::bad_alloc&) {
      verdict = cannot_judge("not enough memory for this call");
    }
    worst = worse_of(worst, verdict.code);
    results.push_back(verdict_json(name, verdict));
    add_to_table(table, name, verdict);
  };
  for (const std::string& file : options.files) judge_one(file, verify_file, file);
  for (const std::string& name : options.cases) judge_one("case " + name, verify_case, name);
  progress.clear();

  if (options.as_json) {
    const json out = {
        {"code", static_cast<int>(worst)}, {"seed", options.verify.seed}, {"results", results}};
    fmt::print("{}\n", out.dump(2, ' ', false, json::error_handler_t::replace));
    return worst;
  }
  fmt::print("{}\n", table.text());
  fmt::print(
      "o, lse: largest error over its bound (promise P1), engine and recorded answer against "
      "float64.\n"
      "schedules: distinct plans that gave the same bits.{}\n",
      options.cases.empty() ? "" : fmt::format("  Seed {}.", options.verify.seed));
  return worst;
}

}  // namespace

void add_verify(CLI::App& app, Command& command) {
  auto options = std::make_shared<Options>();
  CLI::App* sub =
      app.add_subcommand("verify", "Judge the engine, and recorded answers, against float64");
  sub->add_option("FILE", options->files, "Calls")->type_name("");
  sub->add_option("--case", options->cases, "A case by name instead of a file; may be repeated")
      ->type_name("NAME")
      ->allow_extra_args(false);
  sub->add_option("--seed", options->verify.seed, "What cases and schedules are drawn from")
      ->check(whole_number<uint64_t>())
      ->type_name("N")
      ->capture_default_str();
  sub->add_option("--schedules", options->verify.schedules,
                  "Distinct schedules to compare by bits, or all that exist")
      ->check(in_range(1, 1000))
      ->capture_default_str();
  add_isa_flag(sub, options->verify.isa);
  sub->add_flag("--diagnose", options->diagnose,
                "Instead: which known faults explain the recorded answers of the files");
  add_backend_flag(sub, options->verify.backend);
  sub->add_flag("--list-cases", options->list_cases, "List the cases and what each claims");
  sub->add_flag("--json", options->as_json, "Print JSON");
  sub->footer(
      "Each call is answered with o in float32 and held to the bound of promise P1 row by row; o "
      "in the call's own type\n"
      "must be that answer rounded once; every schedule must give the same bits.  A recorded "
      "answer is held to the same\n"
      "bound plus one rounding of its stored type.\n"
      "Exit codes: 0 right, 1 wrong, 2 cannot be judged (malformed, unsupported, missing, "
      "unknown); of several 1, 2, 0.");
  sub->callback([options, &command] { command = [options] { return run_verify(*options); }; });
}

}  // namespace attnfold::tools
