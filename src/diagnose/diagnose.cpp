#include "diagnose/diagnose.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "check/judge.h"
#include "diagnose/twist.h"
#include "ref/oracle.h"

namespace attnfold::diagnose {
namespace {

struct Place {
  int32_t request, token, row, head;
};

/** A fault may add rounding errors of its own size: what it explains lies within this many bounds.
 */
constexpr double kSlack = 4;

class Detective {
 public:
  explicit Detective(const check::Call& call)
      : call_(call), truth_(ref::answer(call)), recorded_bound_(check::bound_of_recorded(call)) {}

  Diagnosis work() {
    Diagnosis diagnosis;
    std::map<std::string, std::vector<int32_t>> requests_of;  // of each fault
    std::vector<std::vector<std::string>> faults_of(static_cast<size_t>(call_.batch));
    for (int32_t r = 0; r < call_.batch; ++r) {
      sort_rows(r);
      diagnosis.rows += static_cast<int64_t>(wrong_.size() + right_.size());
      diagnosis.wrong_rows += static_cast<int64_t>(wrong_.size());
      wrong_count_[r] = static_cast<int64_t>(wrong_.size());
      if (wrong_.empty()) continue;
      faults_of[static_cast<size_t>(r)] = explanations(r);
      for (const std::string& name : faults_of[static_cast<size_t>(r)]) {
        requests_of[name].push_back(r);
      }
      if (faults_of[static_cast<size_t>(r)].empty()) diagnosis.unexplained.push_back(r);
    }
    gather(std::move(requests_of), diagnosis);
    return diagnosis;
  }

 private:
  int64_t index_of(const Place& at) const {
    return int64_t{at.row} * call_.problem.qo_heads + at.head;
  }

  double half_unit(double magnitude) const {
    const int precision = call_.recorded_o_dtype == DType::f32   ? 24
                          : call_.recorded_o_dtype == DType::f16 ? 11
                                                                 : 8;
    const int least = call_.recorded_o_dtype == DType::f16 ? -14 : -126;
    const int exponent = magnitude > 0 ? std::max(std::ilogb(magnitude), least) : least;
    return std::ldexp(0.5, exponent - precision + 1);
  }

  static bool near(double want, double got, double bound) {
    if (!std::isfinite(want)) return std::isnan(want) ? std::isnan(got) : want == got;
    return std::fabs(want - got) <= bound;
  }

  bool o_is(const Place& at, const std::vector<double>& want, double slack) const {
    const int64_t index = index_of(at), width = call_.problem.head_dim_vo;
    const double base = slack * (2 * truth_.naive_o_err[static_cast<size_t>(index)] +
                                 0x1p-20 * truth_.max_abs_v[static_cast<size_t>(index)]);
    for (int64_t d = 0; d < width; ++d) {
      const double got = static_cast<double>(
          load_f32(call_.recorded_o->data(), call_.recorded_o_dtype, index * width + d));
      const double x = want[static_cast<size_t>(d)];
      const double bound =
          base + slack * check::weight_rounding(truth_, recorded_bound_, index * width + d);
      if (!near(x, got, bound + half_unit(std::fabs(x) + bound))) return false;
    }
    return true;
  }

  bool lse_is(const Place& at, double want, double slack) const {
    if (call_.recorded_lse.empty()) return true;
    const size_t index = static_cast<size_t>(index_of(at));
    const double bound =
        slack * (2 * truth_.naive_lse_err[index] + 0x1p-20 * std::max(1.0, std::fabs(want)));
    return near(want, static_cast<double>(call_.recorded_lse[index]), bound);
  }

  void sort_rows(int32_t r) {
    wrong_.clear();
    right_.clear();
    const int64_t width = call_.problem.head_dim_vo;
    for (int32_t row = call_.qo_indptr[r]; row < call_.qo_indptr[r + 1]; ++row) {
      for (int32_t head = 0; head < call_.problem.qo_heads; ++head) {
        const Place at{r, row - call_.qo_indptr[r], row, head};
        const size_t index = static_cast<size_t>(index_of(at));
        if (std::isinf(truth_.naive_o_err[index])) continue;  // float32 leaves its range
        const std::vector<double> o(truth_.o.begin() + static_cast<int64_t>(index) * width,
                                    truth_.o.begin() + static_cast<int64_t>(index + 1) * width);
        const bool good = o_is(at, o, 1) && lse_is(at, truth_.lse[index], 1);
        (good ? right_ : wrong_).push_back(at);
      }
    }
  }

  Suspect& suspect(int32_t request) {
    return suspects_.try_emplace(request, call_, request).first->second;
  }

  bool explains(const Twist& twist, const Place& at) {
    Suspect& rows = suspect(at.request);
    if (!rows.look(twist, at.token, at.head)) return false;
    if (twist.lse_transposed) {
      if (!rows.any_o() && !o_is(at, rows.o(), kSlack)) return false;
      return rows.any_lse() || call_.recorded_lse.empty() || transposed_lse_is(twist, at);
    }
    if (!rows.any_lse() && !lse_is(at, rows.lse(), kSlack)) return false;
    return rows.any_o() || o_is(at, rows.o(), kSlack);
  }

  /** Whether the lse is what stands at this place of [rows, heads] if [heads, rows] was written. */
  bool transposed_lse_is(const Twist& twist, const Place& at) {
    const int32_t rows = call_.num_rows();
    const int64_t index = index_of(at);
    const int32_t row = static_cast<int32_t>(index % rows),
                  head = static_cast<int32_t>(index / rows);
    int32_t request = 0;
    while (call_.qo_indptr[request + 1] <= row) ++request;
    Suspect& other = suspect(request);
    return other.look(twist, row - call_.qo_indptr[request], head) &&
           lse_is(at, other.lse(), kSlack);
  }

  /** At most `n` of them, spread evenly. */
  static std::vector<Place> spread(const std::vector<Place>& all, size_t n) {
    std::vector<Place> some;
    const size_t count = std::min(n, all.size());
    for (size_t i = 0; i < count; ++i) some.push_back(all[i * all.size() / count]);
    return some;
  }

  bool explains_all(const Twist& twist, const std::vector<Place>& places) {
    return std::all_of(places.begin(), places.end(),
                       [&](const Place& at) { return explains(twist, at); });
  }

  std::vector<std::string> explanations(int32_t r) {
    std::vector<Place> places = spread(wrong_, kWrongSample);
    const std::vector<Place> good = spread(right_, kRightSample);
    places.insert(places.end(), good.begin(), good.end());
    const std::vector<Fault> faults = known_faults(call_, r);
    std::vector<std::string> names;
    for (const Fault& fault : faults) {
      if (explains_all(fault.twist, places)) names.push_back(fault.name);
    }
    if (!names.empty()) return names;
    // Pairs: one of the two is of the rules, the other may also be of pages or slices.
    for (size_t a = 0; a < faults.size(); ++a) {
      if (faults[a].of_layout) break;
      for (size_t b = a + 1; b < faults.size(); ++b) {
        const std::optional<Twist> both = combined(faults[a].twist, faults[b].twist);
        if (both && explains_all(*both, places)) {
          names.push_back(faults[a].name + " and " + faults[b].name);
        }
      }
    }
    return names;
  }

  /** Faults that explain the same requests are one finding; each request is in one. */
  void gather(std::map<std::string, std::vector<int32_t>> requests_of, Diagnosis& diagnosis) {
    while (!requests_of.empty()) {
      const auto most = std::max_element(
          requests_of.begin(), requests_of.end(),
          [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
      Finding finding;
      finding.requests = most->second;
      for (const int32_t r : finding.requests) {
        finding.wrong_rows += wrong_count_[r];
        finding.checked_rows += std::min<int64_t>(wrong_count_[r], kWrongSample);
      }
      for (const auto& [name, requests] : requests_of) {
        if (requests == finding.requests) finding.faults.push_back(name);
      }
      for (auto it = requests_of.begin(); it != requests_of.end();) {
        std::erase_if(it->second, [&](int32_t r) {
          return std::find(finding.requests.begin(), finding.requests.end(), r) !=
                 finding.requests.end();
        });
        it = it->second.empty() ? requests_of.erase(it) : std::next(it);
      }
      diagnosis.findings.push_back(std::move(finding));
    }
    std::stable_sort(
        diagnosis.findings.begin(), diagnosis.findings.end(),
        [](const Finding& a, const Finding& b) { return a.wrong_rows > b.wrong_rows; });
  }

  static constexpr size_t kWrongSample = 12, kRightSample = 6;
  const check::Call& call_;
  const ref::Truth truth_;
  const check::Bound recorded_bound_;
  std::vector<Place> wrong_, right_;  // of the request at hand
  std::map<int32_t, Suspect> suspects_;
  std::map<int32_t, int64_t> wrong_count_;
};

}  // namespace

std::string why_not(const check::Call& call) {
  const attnfold_problem& p = call.problem;
  const auto unknown = [](const char* feature) {
    return std::string("no faults are known of ") + feature;
  };
  if (call.recorded_o == nullptr) return "it has no recorded answer";
  if (!call.mask_width.empty()) return unknown("mask bits");
  if (!call.visible_prefix.empty()) return unknown("visible prefixes");
  if (p.v_in_k) return unknown("values inside the keys");
  if (p.o_dtype == ATTNFOLD_E4M3) return unknown("o in e4m3");
  if (p.sparse_block_size > 0) return unknown("block masks");
  return "";
}

Diagnosis diagnose(const check::Call& call) { return Detective(call).work(); }

}  // namespace attnfold::diagnose
