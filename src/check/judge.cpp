#include "check/judge.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <sstream>

#include "check/device_call.h"
#include "check/random.h"

namespace attnfold::check {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kE4m3Max = 448;  // where an o in e4m3 saturates

/** Where a row comes from, for people. */
struct Place {
  int32_t request, token, row, head;
};

Place place_of(const Call& call, int64_t index) {
  Place place;
  place.row = static_cast<int32_t>(index / call.problem.qo_heads);
  place.head = static_cast<int32_t>(index % call.problem.qo_heads);
  const auto next = std::upper_bound(call.qo_indptr.begin(), call.qo_indptr.end(), place.row);
  place.request = static_cast<int32_t>(next - call.qo_indptr.begin()) - 1;
  place.token = place.row - call.qo_indptr[place.request];
  return place;
}

std::ostream& operator<<(std::ostream& out, const Place& place) {
  return out << "request " << place.request << ", token " << place.token << " (row " << place.row
             << "), head " << place.head;
}

// ------------------------------------------------ roundings

struct FloatFormat {
  int precision;     // significant bits, the hidden one included
  int min_exponent;  // of the smallest normal value
  double overflow;   // the least magnitude that rounds to Inf
};

FloatFormat format_of(DType type) {
  switch (type) {
    case DType::f16: return {11, -14, 65520.0};
    case DType::bf16: return {8, -126, 0x1.ffp127};
    case DType::e4m3: return {4, -6, kInf};
    default: return {24, -126, 0x1.ffffffp127};
  }
}

/** Half a unit in the last place of values as large as `magnitude`. */
double half_unit(DType type, double magnitude) {
  const FloatFormat format = format_of(type);
  int exponent = format.min_exponent;
  if (magnitude > 0 && std::isfinite(magnitude)) {
    exponent = std::max(std::ilogb(magnitude), format.min_exponent);
  }
  return std::ldexp(0.5, exponent - format.precision + 1);
}

/** How far `got` may be from a finite truth, and how far it is. */
struct Distance {
  double error, bound;
  bool within() const { return error <= bound; }
  double share() const { return error == 0 ? 0 : error / bound; }
};

/** Both not finite: the same kind.  Not used where plain float32 itself leaves its range. */
bool same_kind(double truth, double got) {
  if (std::isnan(truth)) return std::isnan(got);
  return truth == got;
}

/** `scale` is what stored values of the type count times. */
Distance distance(double truth, double got, double bound, DType type, int roundings,
                  double scale = 1) {
  if (!std::isfinite(truth)) return {same_kind(truth, got) ? 0 : kInf, 0};
  const double reach = std::fabs(truth) + bound;
  const double allowed = bound + roundings * half_unit(type, reach / scale) * scale;
  if (std::isinf(got) && roundings > 0 && reach >= format_of(type).overflow) {
    return {std::signbit(got) == std::signbit(truth) ? 0 : kInf, allowed};
  }
  if (!std::isfinite(got)) return {kInf, allowed};
  return {std::fabs(got - truth), allowed};
}

// ------------------------------------------------ judging

class Judge {
 public:
  Judge(const Call& call, const ref::Truth& truth, Bound bound)
      : call_(call), truth_(truth), bound_(bound) {}

  void judge_o(int64_t index, const void* o, DType type, int roundings) {
    const double naive = truth_.naive_o_err[index];
    if (std::isinf(naive)) return;  // plain float32 leaves its range here: P1 asks for nothing
    const bool empty = truth_.lse[index] == -kInf;
    const double float32_bound =
        empty ? 0 : bound_.naive_factor * naive + bound_.floor * truth_.max_abs_v[index];
    const int64_t dim = call_.problem.head_dim_vo;
    const bool saturates = type == DType::e4m3;
    const double scale = saturates ? double{call_.o_scale} : 1;
    for (int64_t d = 0; d < dim; ++d) {
      double expected = truth_.o[index * dim + d];
      if (saturates && !std::isnan(expected))
        expected = std::clamp(expected, -kE4m3Max * scale, kE4m3Max * scale);
      const double got = load_f32(o, type, index * dim + d) * scale;
      const double bound =
          float32_bound + (empty ? 0 : weight_rounding(truth_, bound_, index * dim + d));
      note(distance(expected, got, bound, type, empty ? 0 : roundings, scale), index, d, expected,
           got, &judgement_.worst_o, &judgement_.max_o_err);
    }
  }

  void judge_lse(int64_t index, float got) {
    const double naive = truth_.naive_lse_err[index];
    if (std::isinf(naive)) return;
    const double expected = truth_.lse[index];
    const double bound =
        bound_.naive_factor * naive + bound_.floor * std::max(1.0, std::fabs(expected));
    note(distance(expected, got, bound, DType::f32, 0), index, -1, expected, got,
         &judgement_.worst_lse, &judgement_.max_lse_err);
  }

  Judgement finish(int64_t num_rows, bool has_lse) {
    if (!judgement_.right) return judgement_;
    std::ostringstream text;
    text << num_rows << " rows right: largest error of o " << judgement_.max_o_err << " ("
         << judgement_.worst_o << " of its bound)";
    if (has_lse) {
      text << ", of lse " << judgement_.max_lse_err << " (" << judgement_.worst_lse
           << " of its bound)";
    }
    judgement_.text = text.str();
    return judgement_;
  }

 private:
  /** `d` is -1 for lse. */
  void note(const Distance& distance, int64_t index, int64_t d, double expected, double got,
            double* worst, double* max_error) {
    *worst = std::max(*worst, distance.share());
    *max_error = std::max(*max_error, distance.error);
    if (distance.within() || !judgement_.right) return;
    judgement_.right = false;
    std::ostringstream text;
    text.precision(9);
    text << (d < 0 ? "lse" : "o") << " of " << place_of(call_, index);
    if (d >= 0) text << ", element " << d;
    text << ": expected " << expected << " within " << distance.bound << ", got " << got;
    judgement_.text = text.str();
  }

  const Call& call_;
  const ref::Truth& truth_;
  Bound bound_;
  Judgement judgement_;
};

std::string hex_bits(const void* p, int bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  uint32_t bits = 0;
  std::memcpy(&bits, p, bytes);
  std::string text = "0x";
  for (int shift = 8 * bytes - 4; shift >= 0; shift -= 4) text += kDigits[bits >> shift & 15];
  return text;
}

std::string difference(const Place& place, const std::string& what, const void* a, const void* b,
                       DType type) {
  std::ostringstream text;
  text.precision(9);
  const int bytes = dtype_bytes(type);
  text << what << " of " << place << ": " << load_f32(a, type, 0) << " (" << hex_bits(a, bytes)
       << ") in one answer, " << load_f32(b, type, 0) << " (" << hex_bits(b, bytes)
       << ") in the other";
  return text.str();
}

/** Makes a plan of the call; false if that fails. */
bool schedule_id_of(const Call& call, const attnfold_execution& execution, uint64_t* id) {
  attnfold_plan* plan = nullptr;
  if (attnfold_plan_create(&call.problem, &execution, &plan) != ATTNFOLD_OK) return false;
  const bool on_device = execution.backend == ATTNFOLD_CUDA;
  const std::unique_ptr<DeviceCall> device =
      on_device ? std::make_unique<DeviceCall>(call) : nullptr;
  const attnfold_lengths lengths = on_device ? device->lengths() : call.lengths();
  attnfold_plan_report report{};
  report.struct_size = sizeof(report);
  const bool good = attnfold_plan_update(plan, &lengths, nullptr) == ATTNFOLD_OK &&
                    attnfold_plan_get_report(plan, &report) == ATTNFOLD_OK;
  attnfold_plan_destroy(plan);
  *id = report.schedule_id;
  return good;
}

}  // namespace

Bound bound_of(const std::string& numerics_id) {
  Bound bound;
  if (numerics_id == "cpu-dpbf16-2/bf16" || numerics_id == "cpu-amx-2/bf16")
    bound.weights = Weights::kRounded;
  if (numerics_id.rfind("cuda-mma-1/", 0) == 0) bound.weights = Weights::kRoundedSomehow;
  return bound;
}

Bound bound_of_recorded(const Call& call) {
  const std::string before = "numerics ";
  const size_t at = call.recorded_by.find(before);
  return at == std::string::npos ? Bound() : bound_of(call.recorded_by.substr(at + before.size()));
}

double weight_rounding(const ref::Truth& truth, const Bound& bound, int64_t element) {
  // Sums that begin with zero flush what is below 2^-126, once for each of a leaf's keys.
  constexpr double kFlushed = 0x1p-118;
  if (bound.weights == Weights::kFloat32 || truth.rounding_o.empty()) return 0;
  return kFlushed + (bound.weights == Weights::kRounded ? truth.rounding_o[element]
                                                        : truth.rounding_limit_o[element]);
}

Judgement judge(const Call& call, const ref::Truth& truth, const void* o, DType o_dtype,
                const float* lse, int roundings, Bound bound) {
  Judge judge(call, truth, bound);
  const int64_t num_rows = int64_t{call.num_rows()} * call.problem.qo_heads;
  for (int64_t index = 0; index < num_rows; ++index) {
    judge.judge_o(index, o, o_dtype, roundings);
    if (lse != nullptr) judge.judge_lse(index, lse[index]);
  }
  return judge.finish(num_rows, lse != nullptr);
}

std::string first_difference(const Call& call, const Answer& a, const Answer& b) {
  const DType type = static_cast<DType>(call.problem.o_dtype);
  const int64_t dim = call.problem.head_dim_vo, bytes = dtype_bytes(type);
  const int64_t num_rows = int64_t{call.num_rows()} * call.problem.qo_heads;
  const size_t o_bytes = static_cast<size_t>(num_rows * dim * bytes);
  if (a.o.size() != o_bytes || b.o.size() != o_bytes ||
      a.lse.size() != static_cast<size_t>(num_rows) || b.lse.size() != a.lse.size()) {
    return "the answers differ in size from the call";
  }
  for (int64_t index = 0; index < num_rows; ++index) {
    const Place place = place_of(call, index);
    for (int64_t d = 0; d < dim; ++d) {
      const std::byte* x = a.o.data() + (index * dim + d) * bytes;
      const std::byte* y = b.o.data() + (index * dim + d) * bytes;
      if (std::memcmp(x, y, bytes) != 0) {
        return difference(place, "o, element " + std::to_string(d) + ",", x, y, type);
      }
    }
    if (std::memcmp(&a.lse[index], &b.lse[index], sizeof(float)) != 0) {
      return difference(place, "lse", &a.lse[index], &b.lse[index], DType::f32);
    }
  }
  return "";
}

std::vector<attnfold_execution> distinct_schedules(const Call& call, int want, uint64_t seed,
                                                   const char* isa, attnfold_backend backend) {
  constexpr int32_t kWorkers[] = {1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 32};
  constexpr int kNumWorkers = static_cast<int>(std::size(kWorkers));
  constexpr int kFruitless = 40;  // candidates in a row that bring nothing new before giving up
  constexpr int kMaxThreads = 4;

  attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
  execution.isa = isa;
  execution.backend = backend;
  std::vector<attnfold_execution> found = {execution};
  uint64_t id = 0;
  if (!schedule_id_of(call, execution, &id)) return found;
  std::set<uint64_t> ids = {id};

  int fruitless = 0;
  for (int i = 0; static_cast<int>(found.size()) < want && fruitless < kFruitless; ++i) {
    // First every count of workers with balanced cuts, then cuts drawn at random.
    const bool balanced = i < kNumWorkers;
    const uint64_t draw = hash_of(seed, i);
    execution.num_workers = kWorkers[balanced ? i : static_cast<int>(draw % kNumWorkers)];
    if (backend == ATTNFOLD_CUDA)  // which cuts for each kv head
      execution.num_workers = std::min(execution.num_workers * call.problem.kv_heads, 1024);
    execution.num_threads = 1 + i % kMaxThreads;
    execution.cut_seed = balanced ? 0 : draw | 1;
    const bool is_new = schedule_id_of(call, execution, &id) && ids.insert(id).second;
    if (is_new) found.push_back(execution);
    fruitless = is_new ? 0 : fruitless + 1;
  }
  return found;
}

}  // namespace attnfold::check
