// The attnfold command: one subcommand per file, cmd_<name>.cpp.
#include <fcntl.h>
#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "command.h"

namespace attnfold::tools {
namespace {

/** A line on stderr.  Unlike fmt::print it does not throw where that cannot be written. */
void complain(const std::string& text) { std::fputs(("attnfold: " + text + "\n").c_str(), stderr); }

/** Closed standard streams become ones that fail: a file that is opened must not take their place.
 */
void hold_standard_streams() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (fcntl(fd, F_GETFD) == -1 && errno == EBADF) (void)!open("/dev/null", O_RDONLY);
  }
}

int run_command(const Command& command) {
  try {
    return command();
  } catch (const BadInput& error) {
    complain(error.what());
    return kBadInput;
  } catch (const std::bad_alloc&) {
    complain("not enough memory for this input");
    return kBadInput;
  } catch (const std::exception& error) {
    if (std::ferror(stdout) != 0) return kBadInput;  // that is the fault, see exit_code
    complain(std::string("internal error: ") + error.what());
    return kInternal;
  }
}

/** `code`, unless what was printed is lost: then nobody may take it for an answer. */
int exit_code(int code) {
  const bool was_lost = std::ferror(stdout) != 0;
  errno = 0;
  if (std::fflush(stdout) == 0 && !was_lost) return code;
  complain(std::string("stdout: expected a file that can be written") +
           (errno != 0 ? std::string(", got ") + std::strerror(errno) : std::string()));
  return kBadInput;
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
    const std::string first = argc > 1 ? argv[1] : "";
    const auto is_first = [&](const CLI::App* sub) { return sub->get_name() == first; };
    if (first.substr(0, 1) != "-" && !first.empty() && app.get_subcommands(is_first).empty()) {
      fmt::print(stderr, "attnfold: expected a subcommand (see attnfold --help), got {}\n", first);
      return kBadInput;
    }
    return app.exit(error) == 0 ? kRight : kBadInput;
  }
  return run_command(command);
}

}  // namespace
}  // namespace attnfold::tools

int main(int argc, char** argv) {
  using namespace attnfold::tools;
  hold_standard_streams();
  try {
    return exit_code(main_of(argc, argv));
  } catch (const std::exception& error) {
    complain(std::string("internal error: ") + error.what());
    return kInternal;
  }
}
