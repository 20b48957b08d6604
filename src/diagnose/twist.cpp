#include "diagnose/twist.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "ref/oracle.h"

namespace attnfold::diagnose {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

double in_bf16(double x) { return bf16_to_f32(f32_to_bf16(static_cast<float>(x))); }

/** Whether the page of a slot is one of the pool: entries of pages that no row sees may be
 * anything. */
bool has_page(const check::Call& call, int32_t request, int32_t slot) {
  const attnfold_problem& p = call.problem;
  if (p.kv_storage != ATTNFOLD_KV_PAGED) return true;
  const int64_t page = slot / p.page_size;
  int64_t id = 0;
  if (call.block_table.empty()) {
    const int64_t at = call.kv_indptr[request] + page;
    if (at >= call.kv_indptr[request + 1]) return false;
    id = call.kv_indices[static_cast<size_t>(at)];
  } else {
    if (page >= call.block_table_stride) return false;
    id = call.block_table[static_cast<size_t>(request * call.block_table_stride + page)];
  }
  return id >= 0 && id < p.num_pages;
}

}  // namespace

Suspect::Suspect(const check::Call& call, int32_t request)
    : call_(call),
      request_(request),
      qo_len_(call.qo_indptr[request + 1] - call.qo_indptr[request]),
      given_len_(call.kv_len[request]),
      problem_(call.problem) {}

const Suspect::Slots& Suspect::slots_of(int32_t kv_head) {
  const auto known = slots_.find(kv_head);
  if (known != slots_.end()) return known->second;
  const attnfold_problem& p = call_.problem;
  const bool paged = p.kv_storage == ATTNFOLD_KV_PAGED;
  const int32_t n =
      paged ? (given_len_ + p.page_size - 1) / p.page_size * p.page_size
            : std::min(given_len_ + 1, call_.kv_indptr[request_ + 1] - call_.kv_indptr[request_]);
  Slots& s = slots_[kv_head];
  s.exists.assign(static_cast<size_t>(n), 0);
  s.k.assign(static_cast<size_t>(n) * p.head_dim_qk, 0.0);
  s.v.assign(static_cast<size_t>(n) * p.head_dim_vo, 0.0);
  s.k_scale.assign(static_cast<size_t>(n), 1.0);
  s.v_scale.assign(static_cast<size_t>(n), 1.0);
  const DType type = static_cast<DType>(p.kv_dtype);
  for (int32_t j = 0; j < n; ++j) {
    if (!has_page(call_, request_, j)) continue;
    s.exists[static_cast<size_t>(j)] = 1;
    s.k_scale[static_cast<size_t>(j)] = call_.scale_at(call_.k_scale, request_, j, kv_head);
    s.v_scale[static_cast<size_t>(j)] = call_.scale_at(call_.v_scale, request_, j, kv_head);
    const int64_t k = call_.kv_element_offset(request_, j, call_.k_strides, call_.k_offset) +
                      kv_head * call_.k_strides.head;
    const int64_t v = call_.kv_element_offset(request_, j, call_.v_strides, call_.v_offset) +
                      kv_head * call_.v_strides.head;
    for (int32_t d = 0; d < p.head_dim_qk; ++d) {
      s.k[static_cast<size_t>(j) * p.head_dim_qk + d] = load_f32(call_.k->data(), type, k + d);
    }
    for (int32_t d = 0; d < p.head_dim_vo; ++d) {
      s.v[static_cast<size_t>(j) * p.head_dim_vo + d] = load_f32(call_.v->data(), type, v + d);
    }
  }
  return s;
}

const std::vector<double>& Suspect::products(int32_t token, int32_t head, int32_t kv_head) {
  std::vector<double>& products = products_[{token, head, kv_head}];
  const Slots& s = slots_of(kv_head);
  if (!products.empty() || s.exists.empty()) return products;
  const attnfold_problem& p = call_.problem;
  const int64_t q = call_.q_offset + (call_.qo_indptr[request_] + token) * call_.q_strides.token +
                    head * call_.q_strides.head;
  for (size_t j = 0; j < s.exists.size(); ++j) {
    double sum = 0;
    for (int32_t d = 0; d < p.head_dim_qk; ++d) {
      sum += static_cast<double>(load_f32(call_.q->data(), static_cast<DType>(p.q_dtype), q + d)) *
             s.k[j * static_cast<size_t>(p.head_dim_qk) + static_cast<size_t>(d)];
    }
    products.push_back(sum);
  }
  return products;
}

/** Where the twist finds a key. */
int32_t Suspect::slot_of(int32_t key) const {
  if (twist_.first_page < 0) return key;
  const int32_t page = key / problem_.page_size, offset = key % problem_.page_size;
  if (page == twist_.first_page) return twist_.other_page * problem_.page_size + offset;
  if (page == twist_.other_page) return twist_.first_page * problem_.page_size + offset;
  return key;
}

bool Suspect::visible(int32_t token, int32_t key) const {
  if (key >= kv_len_) return true;  // a tail that is read at all
  if (twist_.last_page_dropped && key >= kv_len_ / problem_.page_size * problem_.page_size) {
    return false;
  }
  if (twist_.causal_top_left) {
    return key < qo_len_ && ref::visible(problem_, qo_len_, qo_len_, token, key);
  }
  return ref::visible(problem_, qo_len_, kv_len_, token, key);
}

/** One past the last key that some row may see. */
int32_t Suspect::end() const {
  if (!twist_.page_tail_read || qo_len_ != 1) return kv_len_;
  const int32_t page = problem_.page_size;
  return (kv_len_ + page - 1) / page * page;
}

double Suspect::scored(double product) const {
  const double scale = problem_.sm_scale < 0
                           ? 1 / std::sqrt(static_cast<double>(problem_.head_dim_qk))
                           : static_cast<double>(problem_.sm_scale);
  const double cap = static_cast<double>(problem_.logits_softcap);
  if (twist_.cap_before_scale) return scale * cap * std::tanh(product / cap);
  const double x = product * std::pow(scale, twist_.scale_power);
  return cap > 0 ? cap * std::tanh(x / cap) : x;
}

bool Suspect::look(const Twist& twist, int32_t token, int32_t head) {
  twist_ = twist;
  problem_ = call_.problem;
  if (problem_.window_left >= 0) problem_.window_left += twist.window_left_shift;
  if (problem_.window_right >= 0) problem_.window_right += twist.window_right_shift;
  kv_len_ = given_len_ + twist.kv_len_shift;
  // A window of one key less than its own token alone would read as "no window".
  const bool closed = (call_.problem.window_left >= 0 && problem_.window_left < 0) ||
                      (call_.problem.window_right >= 0 && problem_.window_right < 0);
  if (closed || kv_len_ < 0) return false;
  const int32_t kv_head =
      twist.heads_interleaved ? head % problem_.kv_heads : head / call_.group_size();
  const std::vector<double>& products_here = products(token, head, kv_head);
  at_ = &slots_of(kv_head);
  if (end() > static_cast<int32_t>(products_here.size())) return false;
  seen_.clear();
  slice_.clear();
  scores_.clear();
  // Top-left counts a token's position from the first key.
  const int32_t position = (twist.causal_top_left ? qo_len_ : kv_len_) - qo_len_ + token;
  for (int32_t key = 0; key < end(); ++key) {
    if (!visible(token, key)) continue;
    const int32_t slot = slot_of(key);
    if (!at_->exists[static_cast<size_t>(slot)]) return false;
    const double k_scale = twist.k_scales_missing ? 1 : at_->k_scale[static_cast<size_t>(slot)];
    double x = scored(products_here[static_cast<size_t>(slot)] * k_scale);
    if (!call_.alibi_slopes.empty()) {
      x += static_cast<double>(call_.alibi_slopes[static_cast<size_t>(head)]) * (key - position);
    }
    seen_.push_back(slot);
    slice_.push_back(twist.slice > 0 ? key / twist.slice : 0);
    scores_.push_back(x);
  }
  unwritten_ = twist.empty_unwritten && sees_nothing(token);
  weigh(head);
  return true;
}

/** By the rules of the call, whatever the twist. */
bool Suspect::sees_nothing(int32_t token) const {
  for (int32_t key = 0; key < given_len_; ++key) {
    if (ref::visible(call_.problem, qo_len_, given_len_, token, key)) return false;
  }
  return true;
}

/** Weights of the keys that are seen, and lse. */
void Suspect::weigh(int32_t head) {
  double top = -kInf;
  bool nan = false;
  for (const double x : scores_) {
    nan = nan || std::isnan(x);
    top = std::max(top, x);
  }
  if (nan) top = std::numeric_limits<double>::quiet_NaN();
  std::map<int32_t, double> slice_top;
  if (twist_.slices_unscaled) {
    for (size_t i = 0; i < scores_.size(); ++i) {
      auto [it, fresh] = slice_top.try_emplace(slice_[i], scores_[i]);
      if (!fresh) it->second = std::max(it->second, scores_[i]);
    }
  }
  weights_.clear();
  double mass = 0;
  for (size_t i = 0; i < scores_.size(); ++i) {
    const double reference = twist_.slices_unscaled ? slice_top[slice_[i]] : top;
    mass += weights_.emplace_back(scores_[i] == reference ? 1 : std::exp(scores_[i] - reference));
  }
  if (!call_.sink_logits.empty() && twist_.sink_count > 0) {
    const double sink = static_cast<double>(call_.sink_logits[static_cast<size_t>(head)]);
    const double highest = seen_.empty() ? sink : nan ? top : std::max(top, sink);
    const double shrink = seen_.empty() ? 0 : std::exp(top - highest);
    for (double& w : weights_) w *= shrink;
    mass = mass * shrink + twist_.sink_count * std::exp(sink - highest);
    top = highest;
  }
  for (double& w : weights_) w /= mass;
  lse_ = mass > 0 || nan ? std::log(mass) + top : -kInf;
  if (seen_.empty() && twist_.empty_lse_inf) lse_ = kInf;
  if (twist_.lse_base_2) lse_ /= std::log(2.0);
}

std::vector<double> Suspect::o() const {
  const size_t width = static_cast<size_t>(problem_.head_dim_vo);
  std::vector<double> o(width, 0.0), part(width);
  for (size_t i = 0; i < seen_.size();) {
    size_t next = i;
    double mass = 0;
    std::fill(part.begin(), part.end(), 0.0);
    for (; next < seen_.size() && slice_[next] == slice_[i]; ++next) {
      const size_t slot = static_cast<size_t>(seen_[next]);
      const double* v = &at_->v[slot * width];
      const double scale = twist_.v_scales_missing ? 1 : at_->v_scale[slot];
      for (size_t d = 0; d < width; ++d) part[d] += weights_[next] * (v[d] * scale);
      mass += weights_[next];
    }
    for (size_t d = 0; d < width; ++d) {
      o[d] += twist_.slices_16_bit && mass > 0 ? in_bf16(part[d] / mass) * mass : part[d];
    }
    i = next;
  }
  return o;
}

std::optional<Twist> combined(const Twist& a, const Twist& b) {
  const Twist right;
  Twist both;
  bool apart = true;
  const auto take = [&](auto Twist::*field) {
    const bool in_a = a.*field != right.*field, in_b = b.*field != right.*field;
    if (in_a && in_b) apart = false;
    both.*field = in_a ? a.*field : b.*field;
  };
  take(&Twist::scale_power), take(&Twist::cap_before_scale), take(&Twist::causal_top_left);
  take(&Twist::k_scales_missing), take(&Twist::v_scales_missing);
  take(&Twist::window_left_shift), take(&Twist::window_right_shift);
  take(&Twist::heads_interleaved), take(&Twist::kv_len_shift), take(&Twist::last_page_dropped);
  take(&Twist::page_tail_read), take(&Twist::first_page), take(&Twist::other_page);
  take(&Twist::sink_count), take(&Twist::slice), take(&Twist::slices_unscaled);
  take(&Twist::slices_16_bit), take(&Twist::lse_base_2), take(&Twist::lse_transposed);
  take(&Twist::empty_lse_inf), take(&Twist::empty_unwritten);
  if (!apart) return std::nullopt;
  return both;
}

namespace {

void add(std::vector<Fault>& faults, std::string name, auto&& change) {
  faults.push_back({std::move(name), {}, false});
  change(faults.back().twist);
}

void add_page_faults(const check::Call& call, int32_t request, std::vector<Fault>& faults) {
  const attnfold_problem& p = call.problem;
  const int32_t kv_len = call.kv_len[request];
  if (p.kv_storage != ATTNFOLD_KV_PAGED) return;
  if (kv_len % p.page_size != 0) {
    add(faults, "the last, partial page is dropped", [](Twist& t) { t.last_page_dropped = true; });
    add(faults, "slots after the last key of its page are read",
        [](Twist& t) { t.page_tail_read = true; });
  }
  const int32_t full = kv_len / p.page_size;
  const bool all_pairs = full <= 24;
  for (int32_t a = 0; a < full; ++a) {
    for (int32_t b = a + 1; b < (all_pairs ? full : std::min(a + 2, full)); ++b) {
      add(faults, "pages " + std::to_string(a) + " and " + std::to_string(b) + " are swapped",
          [&](Twist& t) { t.first_page = a, t.other_page = b; });
      faults.back().of_layout = true;
    }
  }
}

void add_slice_faults(int32_t kv_len, std::vector<Fault>& faults) {
  std::vector<int32_t> sizes = {16, 32, 64, 128, 256, 512};
  for (int32_t n = 2; n <= 16; ++n) sizes.push_back((kv_len + n - 1) / n);
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  for (const int32_t size : sizes) {
    if (size < 1 || size >= kv_len) continue;
    const std::string of = " (slices of " + std::to_string(size) + " keys)";
    add(faults, "partial states are merged without rescaling" + of,
        [&](Twist& t) { t.slice = size, t.slices_unscaled = true; });
    faults.back().of_layout = true;
    add(faults, "partial outputs are rounded to bf16" + of,
        [&](Twist& t) { t.slice = size, t.slices_16_bit = true; });
    faults.back().of_layout = true;
  }
}

}  // namespace

std::vector<Fault> known_faults(const check::Call& call, int32_t request) {
  const attnfold_problem& p = call.problem;
  std::vector<Fault> faults;
  add(faults, "lse is in base 2", [](Twist& t) { t.lse_base_2 = true; });
  add(faults, "lse is transposed", [](Twist& t) { t.lse_transposed = true; });
  add(faults, "empty rows have lse +inf", [](Twist& t) { t.empty_lse_inf = true; });
  add(faults, "empty rows are not written", [](Twist& t) { t.empty_unwritten = true; });
  add(faults, "the scale is missing", [](Twist& t) { t.scale_power = 0; });
  add(faults, "the scale is applied twice", [](Twist& t) { t.scale_power = 2; });
  if (p.mask == ATTNFOLD_MASK_CAUSAL) {
    add(faults, "the causal mask is top-left", [](Twist& t) { t.causal_top_left = true; });
  }
  for (const int32_t shift : {-1, 1}) {
    const std::string by = shift < 0 ? " by one too few" : " by one too many";
    if (p.window_left >= 0) {
      add(faults, "the window reaches left" + by, [&](Twist& t) { t.window_left_shift = shift; });
    }
    if (p.window_right >= 0) {
      add(faults, "the window reaches right" + by, [&](Twist& t) { t.window_right_shift = shift; });
    }
    add(faults, "kv_len is" + by, [&](Twist& t) { t.kv_len_shift = shift; });
  }
  if (p.logits_softcap > 0) {
    add(faults, "the soft-cap comes before the scale", [](Twist& t) { t.cap_before_scale = true; });
  }
  if (p.k_scale_kind != ATTNFOLD_SCALE_NONE) {
    add(faults, "the scales of k are missing", [](Twist& t) { t.k_scales_missing = true; });
  }
  if (p.v_scale_kind != ATTNFOLD_SCALE_NONE) {
    add(faults, "the scales of v are missing", [](Twist& t) { t.v_scales_missing = true; });
  }
  if (p.kv_heads > 1 && p.kv_heads < p.qo_heads) {
    add(faults, "query heads take kv heads in turn", [](Twist& t) { t.heads_interleaved = true; });
  }
  if (!call.sink_logits.empty()) {
    add(faults, "the sink is missing", [](Twist& t) { t.sink_count = 0; });
    for (int32_t n = 2; n <= 16; ++n) {
      add(faults, "the sink is counted " + std::to_string(n) + " times, once per split",
          [&](Twist& t) { t.sink_count = n; });
    }
  }
  add_page_faults(call, request, faults);
  add_slice_faults(call.kv_len[request], faults);
  return faults;
}

}  // namespace attnfold::diagnose
