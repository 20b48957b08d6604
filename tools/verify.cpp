#include "verify.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>

#include "ref/oracle.h"

namespace attnfold::tools {
namespace {

/** A sound call that the engine refuses cannot be judged; one that it fails at is wrong. */
Verdict refused(Verdict verdict, const check::RunResult& result) {
  const bool is_refusal =
      result.status == ATTNFOLD_INVALID_ARGUMENT || result.status == ATTNFOLD_UNSUPPORTED;
  verdict.code = is_refusal ? kBadInput : kWrong;
  verdict.why = fmt::format("{}: {}", attnfold_status_name(result.status), result.error);
  return verdict;
}

Verdict wrong(Verdict verdict, std::string why) {
  verdict.code = kWrong;
  verdict.why = std::move(why);
  return verdict;
}

/** "" if `narrow` is `wide` rounded once to the call's o_dtype; NaN need only be NaN. */
std::string rounding_difference(const check::Call& call, const check::Answer& wide,
                                const check::Answer& narrow) {
  const DType type = static_cast<DType>(call.problem.o_dtype);
  const int64_t row_elements = int64_t{call.problem.qo_heads} * call.problem.head_dim_vo;
  const int64_t num_elements = call.num_rows() * row_elements;
  for (int64_t i = 0; i < num_elements; ++i) {
    const float exact = load_f32(wide.o.data(), DType::f32, i);
    uint32_t rounded = 0, stored = 0;
    store_f32(&rounded, type, 0, type == DType::e4m3 ? exact / call.o_scale : exact);
    std::memcpy(&stored, narrow.o.data() + i * dtype_bytes(type),
                static_cast<size_t>(dtype_bytes(type)));
    const bool both_nan = std::isnan(exact) && std::isnan(load_f32(narrow.o.data(), type, i));
    if (rounded == stored || both_nan) continue;
    return fmt::format("row {}, head {}, element {}: o in {} is {}, but o in f32 is {}",
                       i / row_elements, i % row_elements / call.problem.head_dim_vo,
                       i % call.problem.head_dim_vo, dtype_name(type),
                       load_f32(narrow.o.data(), type, i), exact);
  }
  for (size_t i = 0; i < wide.lse.size(); ++i) {
    if (bits_of(wide.lse[i]) != bits_of(narrow.lse[i])) return "lse depends on the type of o";
  }
  return {};
}

std::string execution_text(const attnfold_execution& execution) {
  return fmt::format("{} threads, {} workers, cut_seed {}", execution.num_threads,
                     execution.num_workers, execution.cut_seed);
}

/** Kernel names read cpu_<isa>/.. */
std::string isa_of(const std::string& kernel) {
  const size_t begin = kernel.find('_') + 1;
  return kernel.substr(begin, kernel.find('/') - begin);
}

}  // namespace

Verdict verify_call(const check::Call& call, const VerifyOptions& options,
                    const std::function<void(const std::string&)>& step) {
  Verdict verdict;
  verdict.num_rows = call.num_rows() * call.problem.qo_heads;
  std::string isa = options.isa;
  check::Call wide = call;  // schedules are compared in float32, where no rounding hides a bit
  wide.problem.o_dtype = ATTNFOLD_F32;
  attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
  execution.isa = isa_or_null(isa);
  execution.backend = options.backend;

  step("engine");
  const check::RunResult narrow = check::run_engine(call, execution);
  if (narrow.status != ATTNFOLD_OK) return refused(std::move(verdict), narrow);
  if (options.backend == ATTNFOLD_CPU) {  // the type of o has a say in the choice of a row
    isa = isa_of(narrow.answer.kernel);
    execution.isa = isa.c_str();
  }
  const check::RunResult first = check::run_engine(wide, execution);
  if (first.status != ATTNFOLD_OK) return refused(std::move(verdict), first);
  verdict.kernel = first.answer.kernel;

  step("oracle");
  const ref::Truth truth = ref::answer(call);
  verdict.engine =
      check::judge(call, truth, first.answer.o.data(), DType::f32, first.answer.lse.data(), 0,
                   check::bound_of(first.answer.numerics_id));
  if (call.recorded_o != nullptr) {
    verdict.recorded_lse = !call.recorded_lse.empty();
    const float* lse = call.recorded_lse.empty() ? nullptr : call.recorded_lse.data();
    verdict.recorded = check::judge(call, truth, call.recorded_o->data(), call.recorded_o_dtype,
                                    lse, 1, check::bound_of_recorded(call));
  }
  if (!verdict.engine->right) return wrong(std::move(verdict), "engine: " + verdict.engine->text);
  const std::string rounding = rounding_difference(call, first.answer, narrow.answer);
  if (!rounding.empty()) return wrong(std::move(verdict), "engine: " + rounding);

  step("schedules");
  for (const attnfold_execution& other : check::distinct_schedules(
           wide, options.schedules, options.seed, execution.isa, options.backend)) {
    step(fmt::format("schedule {} of {}", verdict.num_schedules + 1, options.schedules));
    const check::RunResult result = check::run_engine(wide, other);
    if (result.status != ATTNFOLD_OK) return refused(std::move(verdict), result);
    const std::string difference = check::first_difference(wide, first.answer, result.answer);
    if (!difference.empty()) {
      return wrong(std::move(verdict),
                   fmt::format("schedule of {}: {}", execution_text(other), difference));
    }
    ++verdict.num_schedules;
  }
  if (verdict.recorded && !verdict.recorded->right) {
    std::string why = "recorded answer: " + verdict.recorded->text;
    if (call.recorded_by.find("numerics ") == std::string::npos) {
      why +=
          "; recorded_by names no numerics id: judged as of a kernel that does not round weights";
    }
    return wrong(std::move(verdict), std::move(why));
  }
  return verdict;
}

ExitCode worse_of(ExitCode a, ExitCode b) {
  if (a == kWrong || b == kWrong) return kWrong;
  return a == kRight ? b : a;
}

}  // namespace attnfold::tools
