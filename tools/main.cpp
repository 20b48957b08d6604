// The attnfold command: one subcommand per file, cmd_<name>.cpp.
#include <fmt/format.h>

#include <exception>
#include <new>

#include "command.h"

namespace attnfold::tools {
namespace {

int run_command(const Command& command) {
  try {
    return command();
  } catch (const BadInput& error) {
    fmt::print(stderr, "attnfold: {}\n", error.what());
    return kBadInput;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "attnfold: not enough memory for this input\n");
    return kBadInput;
  } catch (const std::exception& error) {
    fmt::print(stderr, "attnfold: internal error: {}\n", error.what());
    return kInternal;
  }
}

int main_of(int argc, char** argv) {
  CLI::App app{
      "attnfold answers, checks and times attention calls of LLM serving: ragged queries over a "
      "paged KV cache."};
  app.name("attnfold");
  app.set_version_flag("--version", "attnfold " + version_text());
  app.require_subcommand(1);
  app.get_formatter()->column_width(26);
  app.footer(
      "A FILE holds one attention call: a safetensors file of format attnfold-call-1 "
      "(docs/call-format.md).\n"
      "Exit codes: 0 right, 1 wrong, 2 cannot be judged or bad input, 3 internal error.");
  Command command;
  add_info(app, command);
  add_run(app, command);
  add_verify(app, command);
  add_bench(app, command);
  add_explain(app, command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kRight : kBadInput;
  }
  return run_command(command);
}

}  // namespace
}  // namespace attnfold::tools

int main(int argc, char** argv) {
  try {
    return attnfold::tools::main_of(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "attnfold: internal error: {}\n", error.what());
    return attnfold::tools::kInternal;
  }
}
