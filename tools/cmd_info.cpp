// attnfold info: this build, this machine, the kernel table, and which of its rows serve a problem.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "check/call_file.h"
#include "command.h"
#include "machine.h"
#include "support_matrix.h"
#include "text.h"

namespace attnfold::tools {
namespace {

using nlohmann::json;

struct InfoOptions {
  bool as_json = false, matrix = false;
  std::string file;
  ProblemFlags problem;
};

/** Whether each row serves `problem`: "" if it does here, else why not. */
struct Service {
  std::vector<std::string> why_not;  // [kernel rows]
  bool served() const { return std::count(why_not.begin(), why_not.end(), "") > 0; }
};

Service service_of(const attnfold_problem& problem, const std::vector<attnfold_kernel_info>& rows) {
  Service service;
  for (size_t i = 0; i < rows.size(); ++i) {
    const attnfold_status status = attnfold_kernel_serves(static_cast<int32_t>(i), &problem);
    if (status == ATTNFOLD_INVALID_ARGUMENT) throw BadInput(attnfold_last_error());
    std::string text = status == ATTNFOLD_OK ? "" : attnfold_last_error();
    const std::string prefix = std::string(rows[i].name) + ": ";
    if (text.starts_with(prefix)) text.erase(0, prefix.size());
    if (text.empty() && rows[i].available == 0)
      text = std::string("not on this machine: ") + rows[i].why_not;
    service.why_not.push_back(text);
  }
  return service;
}

/** The row that a small plan gets when nothing is forced but the environment. */
struct Chosen {
  std::string kernel, isa, error;
};

Chosen chosen_row(const std::vector<attnfold_kernel_info>& rows, attnfold_problem problem) {
  problem.max_batch = 1;
  problem.max_qo_rows = 1;
  problem.max_kv_len = 1;
  attnfold_plan* plan = nullptr;
  if (attnfold_plan_create(&problem, nullptr, &plan) != ATTNFOLD_OK)
    return {"", "", attnfold_last_error()};
  Chosen chosen{attnfold_plan_kernel(plan), "", ""};
  attnfold_plan_destroy(plan);
  for (const attnfold_kernel_info& row : rows) {
    if (chosen.kernel == row.name) chosen.isa = row.isa;
  }
  return chosen;
}

/** Types of o, in words, for which alone each row is the default, where it serves others too; else
 * "".  So it is with rows that round weights. */
std::vector<std::string> defaults_by_o(const std::vector<attnfold_kernel_info>& rows) {
  std::vector<std::string> texts;
  for (size_t i = 0; i < rows.size(); ++i) {
    attnfold_problem p = plain_problem(rows[i]);
    std::vector<std::string> chosen;
    bool others = false;
    for (const attnfold_dtype o : {ATTNFOLD_F32, ATTNFOLD_F16, ATTNFOLD_BF16, ATTNFOLD_E4M3}) {
      p.o_dtype = o;
      if (attnfold_kernel_serves(static_cast<int32_t>(i), &p) != ATTNFOLD_OK) continue;
      if (chosen_row(rows, p).kernel == rows[i].name) {
        chosen.emplace_back(dtype_name(static_cast<DType>(o)));
      } else {
        others = true;
      }
    }
    texts.push_back(others ? fmt::format("{}", fmt::join(chosen, ", ")) : "");
  }
  return texts;
}

std::string problem_text(const attnfold_problem& p) {
  auto dtype = [](attnfold_dtype t) { return dtype_name(static_cast<DType>(t)); };
  std::string text = fmt::format("{}/{} heads, head dim {}", p.qo_heads, p.kv_heads, p.head_dim_qk);
  if (p.head_dim_vo != p.head_dim_qk) text += fmt::format("/{}", p.head_dim_vo);
  text += fmt::format(", q {}, kv {}, o {}", dtype(p.q_dtype), dtype(p.kv_dtype), dtype(p.o_dtype));
  constexpr const char* kScales[] = {"none", "tensor", "head", "token"};
  if (p.k_scale_kind != ATTNFOLD_SCALE_NONE)
    text += fmt::format(", k scales per {}", kScales[p.k_scale_kind]);
  if (p.v_scale_kind != ATTNFOLD_SCALE_NONE)
    text += fmt::format(", v scales per {}", kScales[p.v_scale_kind]);
  if (p.v_in_k) text += ", v in k";
  text +=
      p.kv_storage == ATTNFOLD_KV_RAGGED ? ", ragged" : fmt::format(", pages of {}", p.page_size);
  text += p.kv_layout == ATTNFOLD_NHD ? ", NHD" : ", HND";
  text += p.mask == ATTNFOLD_MASK_CAUSAL ? ", causal" : ", no mask";
  if (p.window_left >= 0) text += fmt::format(", window_left {}", p.window_left);
  if (p.window_right >= 0) text += fmt::format(", window_right {}", p.window_right);
  if (p.attention_chunk > 0) text += fmt::format(", attention_chunk {}", p.attention_chunk);
  if (p.sink_tokens > 0) text += fmt::format(", sink_tokens {}", p.sink_tokens);
  if (p.sparse_block_size > 0) {
    text += fmt::format(", blocks of {}: {} local, each {}th vertical, head step {}",
                        p.sparse_block_size, p.sparse_local_blocks, p.sparse_vertical_stride,
                        p.sparse_head_step);
  }
  if (p.logits_softcap > 0) text += fmt::format(", logits_softcap {}", p.logits_softcap);
  return text;
}

json info_json(const std::vector<attnfold_kernel_info>& rows, const Chosen& chosen,
               const attnfold_problem* problem, const Service* service) {
  const std::vector<std::string> defaults = defaults_by_o(rows);
  json kernels = json::array();
  for (size_t i = 0; i < rows.size(); ++i) {
    const attnfold_kernel_info& row = rows[i];
    json kernel = {{"name", row.name},
                   {"isa", row.isa},
                   {"q_dtypes", row.q_dtypes},
                   {"kv_dtype", row.kv_dtype},
                   {"numerics_id", row.numerics_id},
                   {"available", row.available != 0},
                   {"why_not", row.why_not}};
    if (!defaults[i].empty()) kernel["default_for_o"] = defaults[i];
    if (service != nullptr) {
      kernel["serves"] = service->why_not[i].empty();
      kernel["why_it_does_not_serve"] = service->why_not[i];
    }
    kernels.push_back(std::move(kernel));
  }
  json out = {{"version", version_text()},
              {"cpu", cpu_model()},
              {"cpu_features", cpu_features()},
              {"cpus", num_usable_cpus()},
              {"isa", chosen.isa},
              {"kernel", chosen.kernel},
              {"leaf", ATTNFOLD_LEAF},
              {"super_chunk", ATTNFOLD_SUPER_CHUNK},
              {"max_head_dim", ATTNFOLD_MAX_HEAD_DIM},
              {"kernels", std::move(kernels)}};
  if (!chosen.error.empty()) out["error"] = chosen.error;
  if (problem != nullptr) out["problem"] = problem_text(*problem);
  if (service != nullptr) out["served"] = service->served();
  return out;
}

void print_machine(const Chosen& chosen) {
  fmt::print("attnfold {}\n", version_text());
  fmt::print("cpu          {}\n", cpu_model());
  fmt::print("features     {}\n", cpu_features());
  fmt::print("cpus         {}\n", num_usable_cpus());
  fmt::print("isa          {}\n", chosen.error.empty() ? chosen.isa : "none: " + chosen.error);
  fmt::print("fold         L = {} keys a leaf, S = {} leaves a super-chunk\n\n", ATTNFOLD_LEAF,
             ATTNFOLD_SUPER_CHUNK);
}

void print_kernels(const std::vector<attnfold_kernel_info>& rows) {
  const std::vector<std::string> defaults = defaults_by_o(rows);
  Table table({"<kernel", "<isa", "<q", "<kv", "<here", "<numerics id"});
  for (size_t i = 0; i < rows.size(); ++i) {
    const attnfold_kernel_info& row = rows[i];
    const char* here = row.available != 0 ? "yes" : "no";
    table.add_row({row.name, row.isa, row.q_dtypes, row.kv_dtype, here, row.numerics_id});
    if (row.available == 0) table.add_note(row.why_not);
    if (!defaults[i].empty())
      table.add_note(fmt::format("default for o in {} alone; for others by its name", defaults[i]));
  }
  fmt::print("{}", table.text());
}

void print_service(const std::vector<attnfold_kernel_info>& rows, const Service& service) {
  Table table({"<kernel", "<serves", "<why not"});
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::string& why_not = service.why_not[i];
    table.add_row({rows[i].name, why_not.empty() ? "yes" : "no", why_not});
  }
  fmt::print("{}", table.text());
}

int run_info(const InfoOptions& options) {
  const std::vector<attnfold_kernel_info> rows = kernel_table();
  if (options.matrix) {
    const char* beside = !options.file.empty()         ? "a FILE"
                         : options.problem.any_given() ? "problem flags"
                         : options.as_json             ? "--json"
                                                       : nullptr;
    if (beside != nullptr)
      throw BadInput(fmt::format("--matrix: expected nothing beside it, got {}", beside));
    fmt::print("{}", support_matrix());
    return kRight;
  }
  if (!options.file.empty() && options.problem.any_given()) {
    throw BadInput("FILE: expected either a FILE or problem flags, got both");
  }
  attnfold_problem problem = ATTNFOLD_PROBLEM_INIT;
  const bool asked = !options.file.empty() || options.problem.any_given();
  if (!options.file.empty()) {
    const check::LoadResult loaded = check::load_call(options.file);
    if (!loaded.ok) throw BadInput(loaded.error);
    problem = loaded.call.problem;
  } else {
    problem = options.problem.problem();
  }
  const Service service = service_of(problem, rows);
  const Chosen chosen = chosen_row(rows, problem);
  if (options.as_json) {
    const json out =
        info_json(rows, chosen, asked ? &problem : nullptr, asked ? &service : nullptr);
    fmt::print("{}\n", out.dump(2, ' ', false, json::error_handler_t::replace));
  } else {
    print_machine(chosen);
    if (asked) fmt::print("problem      {}\n", problem_text(problem));
    if (asked)
      fmt::print("kernel       {}\n\n",
                 chosen.error.empty() ? chosen.kernel : "none: " + chosen.error);
    if (asked) print_service(rows, service);
    if (!asked) print_kernels(rows);
  }
  return asked && !service.served() ? kBadInput : kRight;
}

}  // namespace

void add_info(CLI::App& app, Command& command) {
  auto options = std::make_shared<InfoOptions>();
  CLI::App* sub =
      app.add_subcommand("info", "This machine, the kernel table, and which rows serve a problem");
  sub->add_option("FILE", options->file, "A call: which rows serve it, and why the others do not")
      ->check(not_empty())
      ->type_name("");
  sub->add_flag("--json", options->as_json, "Print JSON");
  sub->add_flag("--matrix", options->matrix,
                "Print the support matrix as Markdown, generated from the kernel table");
  options->problem.add_to(sub);
  sub->footer(
      "Exit codes: 0, or 2 if a problem is asked about that no row serves on this machine.");
  sub->callback([options, &command] { command = [options] { return run_info(*options); }; });
}

}  // namespace attnfold::tools
