// Errors of each numerics id against the float64 oracle, beside those of naive float32 arithmetic:
// the first table of docs/numerics.md, and for its second what o is off by in float32 and in bf16,
// rms over that of o.  Usage: error_bench   (prints Markdown)
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "check/call.h"
#include "check/generate.h"
#include "check/judge.h"
#include "ref/oracle.h"

namespace {

using attnfold::DType;
using attnfold::check::Call;

struct Workload {
  const char* name;
  std::vector<int32_t> qo_len, kv_len;
  float q_range;
  attnfold_dtype kv;
};

attnfold::check::Spec spec_of(const Workload& w) {
  attnfold::check::Spec spec;
  spec.problem.qo_heads = 8;
  spec.problem.kv_heads = 2;
  spec.problem.q_dtype = spec.problem.kv_dtype = w.kv;
  if (attnfold::is_8_bit(static_cast<DType>(w.kv))) {
    spec.problem.q_dtype = ATTNFOLD_BF16;
    spec.problem.k_scale_kind = spec.problem.v_scale_kind = ATTNFOLD_SCALE_PER_TOKEN;
  }
  spec.problem.o_dtype = ATTNFOLD_F32;  // errors before rounding to a 16-bit type
  spec.qo_len = w.qo_len;
  spec.kv_len = w.kv_len;
  spec.q_range = w.q_range;
  return spec;
}

/** Root mean square and largest error of o, largest of lse. */
struct Errors {
  double rms = 0, max = 0, lse = 0;
};

/** rms of |o - truth| over rms of the truth, o being stored in `type`. */
double relative_rms(const attnfold::ref::Truth& truth, const void* o, DType type) {
  double error = 0, size = 0;
  for (size_t i = 0; i < truth.o.size(); ++i) {
    const double d = load_f32(o, type, static_cast<int64_t>(i)) - truth.o[i];
    error += d * d;
    size += truth.o[i] * truth.o[i];
  }
  return std::sqrt(error / size);
}

Errors errors_of(const attnfold::ref::Truth& truth, const attnfold::check::Answer& answer) {
  Errors e;
  const float* o = reinterpret_cast<const float*>(answer.o.data());
  for (size_t i = 0; i < truth.o.size(); ++i) {
    const double error = std::fabs(o[i] - truth.o[i]);
    e.rms += error * error;
    e.max = std::fmax(e.max, error);
  }
  e.rms = std::sqrt(e.rms / static_cast<double>(truth.o.size()));
  for (size_t i = 0; i < truth.lse.size(); ++i) {
    if (std::isfinite(truth.lse[i]))
      e.lse = std::fmax(e.lse, std::fabs(answer.lse[i] - truth.lse[i]));
  }
  return e;
}

/** The answer of the rows of an ISA, or UNSUPPORTED where the machine has none of them. */
attnfold::check::RunResult run_on(const char* isa, const Call& call) {
  attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
  execution.isa = isa;
  attnfold::check::RunResult run = attnfold::check::run_engine(call, execution);
  if (run.status != ATTNFOLD_OK && run.status != ATTNFOLD_UNSUPPORTED) {
    std::fprintf(stderr, "%s\n", run.error.c_str());
    std::exit(1);
  }
  return run;
}

double largest(const std::vector<double>& values) {
  double m = 0;
  for (double v : values) m = std::fmax(m, v);
  return m;
}

// The other rows share the scalar rows' ids, and so their bits.
constexpr const char* kIsas[] = {
    "scalar",
#if defined(__x86_64__)
    "avx512_bf16", "avx512_bf16_p16", "amx_bf16", "amx_bf16_p16",
#endif
};

}  // namespace

int main() {
  const Workload workloads[] = {
      {"decode, 32768 keys, flat", {1}, {32768}, 0.1f, ATTNFOLD_BF16},
      {"decode, 32768 keys", {1}, {32768}, 1.0f, ATTNFOLD_BF16},
      {"decode, 32768 keys, peaked", {1}, {32768}, 8.0f, ATTNFOLD_BF16},
      {"prefill, 256 on 1024", {256}, {1024}, 1.0f, ATTNFOLD_BF16},
      {"decode, 32768 keys", {1}, {32768}, 1.0f, ATTNFOLD_F16},
      {"decode, 32768 keys", {1}, {32768}, 1.0f, ATTNFOLD_F32},
      {"prefill, 256 on 1024", {256}, {1024}, 1.0f, ATTNFOLD_F32},
      {"decode, 32768 keys", {1}, {32768}, 1.0f, ATTNFOLD_E4M3},
      {"decode, 32768 keys, peaked", {1}, {32768}, 8.0f, ATTNFOLD_E4M3},
      {"prefill, 256 on 1024", {256}, {1024}, 1.0f, ATTNFOLD_E4M3},
      {"decode, 32768 keys", {1}, {32768}, 1.0f, ATTNFOLD_E5M2},
      {"decode, 32768 keys", {1}, {32768}, 1.0f, ATTNFOLD_I8},
      {"prefill, 256 on 1024", {256}, {1024}, 1.0f, ATTNFOLD_I8},
  };
  std::printf(
      "| workload (8/2 heads, d 128) | k, v | numerics id | o rms | o max | naive o max | lse "
      "max | "
      "naive lse max | of the bound |\n");
  std::printf("|---|---|---|---|---|---|---|---|---|\n");
  for (const Workload& w : workloads) {
    const Call call = attnfold::check::generate(spec_of(w), 1);
    const attnfold::ref::Truth truth = attnfold::ref::answer(call);
    for (const char* isa : kIsas) {
      if (std::string(isa) != "scalar" && w.kv != ATTNFOLD_BF16) continue;
      const attnfold::check::RunResult run = run_on(isa, call);
      if (run.status == ATTNFOLD_UNSUPPORTED) continue;
      const Errors e = errors_of(truth, run.answer);
      const auto verdict = attnfold::check::judge(
          call, truth, run.answer.o.data(), DType::f32, run.answer.lse.data(), 0,
          attnfold::check::bound_of(run.answer.numerics_id));
      std::printf("| %s | %s | %s | %.1e | %.1e | %.1e | %.1e | %.1e | %.2f |\n", w.name,
                  attnfold::dtype_name(static_cast<DType>(w.kv)), run.answer.numerics_id.c_str(),
                  e.rms, e.max, largest(truth.naive_o_err), e.lse, largest(truth.naive_lse_err),
                  std::fmax(verdict.worst_o, verdict.worst_lse));
    }
  }
  std::printf("\n| workload | o | numerics id | error of o over its rms |\n|---|---|---|---|\n");
  for (const Workload& w : workloads) {
    if (w.kv != ATTNFOLD_BF16) continue;
    Call call = attnfold::check::generate(spec_of(w), 1);
    const attnfold::ref::Truth truth = attnfold::ref::answer(call);
    for (attnfold_dtype o : {ATTNFOLD_F32, ATTNFOLD_BF16}) {
      call.problem.o_dtype = o;
      const DType type = static_cast<DType>(o);
      for (const char* isa : kIsas) {
        const attnfold::check::RunResult run = run_on(isa, call);
        if (run.status == ATTNFOLD_UNSUPPORTED) continue;
        std::printf("| %s | %s | %s | %.1e |\n", w.name, attnfold::dtype_name(type),
                    run.answer.numerics_id.c_str(), relative_rms(truth, run.answer.o.data(), type));
      }
    }
  }
}
