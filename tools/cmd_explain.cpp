// attnfold explain: what engines would do with a call, and what it costs.
#include <fmt/format.h>

#include <fstream>
#include <memory>
#include <optional>

#include "command.h"
#include "explain/pictures.h"
#include "explain_input.h"
#include "explain_measured.h"
#include "explain_report.h"

namespace attnfold::tools {
namespace {

struct ExplainOptions {
  ExplainFlags flags;
  std::string book_part, book_changes, html;
  bool list = false, book = false, as_json = false, measured = false;
};

void print_json(const nlohmann::ordered_json& json) {
  fmt::print("{}\n", json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.close();
  if (!out) throw BadInput(fmt::format("--html: {} cannot be written", path));
}

int run_explain(const ExplainOptions& options) {
  if (options.list) {
    options.flags.require_alone("--list", {});
    fmt::print("{}", known_text());
    return kRight;
  }
  if (options.book) {
    options.flags.require_alone("--book", {"--with", "--json"});
    if (options.as_json) {
      print_json(book_json(options.book_part, options.book_changes));
    } else {
      fmt::print("{}", book_text(options.book_part, options.book_changes));
    }
    return kRight;
  }
  if (!options.book_changes.empty()) throw BadInput("--with: expected --book beside it");
  const explain::Question question = options.flags.question();
  const std::vector<explain::Line> lines = explain::explain_call(question);
  if (!options.html.empty()) {
    write_text(
        options.html,
        explain::page_html(question, lines, {call_text(question), machine_text(question.machine)}));
  }
  std::optional<MeasuredRun> run;
  if (options.measured) run = measure_question(question);
  if (options.as_json) {
    nlohmann::ordered_json out = explain_json(question, lines);
    if (run) {
      out["measured"] = {{"run_us", run->us.median},
                         {"q1", run->us.lower},
                         {"q3", run->us.upper},
                         {"runs", run->runs},
                         {"kernel", run->kernel},
                         {"threads", run->threads},
                         {"floor_us", run->line.floor_us},
                         {"bytes_per_s", run->machine.bytes_per_s},
                         {"flop_per_s", run->machine.flop_per_s}};
    }
    print_json(out);
  } else {
    fmt::print("{}{}", explain_text(question, lines), run ? measured_text(*run) : std::string());
  }
  return kRight;
}

}  // namespace

void add_explain(CLI::App& app, Command& command) {
  auto options = std::make_shared<ExplainOptions>();
  CLI::App* sub = app.add_subcommand(
      "explain", "What engines would do with a batch: splits, waves, bytes, floor, and why");
  options->flags.add_to(sub);
  sub->add_flag("--json", options->as_json, "Print JSON");
  sub->add_flag("--measured", options->measured,
                "Also run attnfold on this machine, beside the floor of this machine");
  sub->add_option("--html", options->html, "Also write a page with pictures")
      ->check(not_empty())
      ->type_name("FILE");
  sub->add_flag("--list", options->list, "List the models and machines that are known by name");
  auto* book =
      sub->add_option("--book", options->book_part,
                      "Print the numbers of the literature, or those whose names hold NAME")
          ->expected(0, 1)
          ->type_name("[NAME]");
  sub->add_option("--with", options->book_changes, "With --book: other inputs, as in h=64,h_kv=4")
      ->check(not_empty())
      ->type_name("LIST");
  sub->footer(
      "Costs are those of one layer.  docs/explain.md has the formulas and sources.\n"
      "Exit codes: 0, or 2 for bad input.");
  sub->callback([options, book, &command] {
    options->book = book->count() > 0;
    command = [options] { return run_explain(*options); };
  });
}

}  // namespace attnfold::tools
