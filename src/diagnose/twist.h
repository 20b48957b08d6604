// Attention as an engine with one of the known faults would compute it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "check/call.h"

namespace attnfold::diagnose {

/** Departures from the rules of a call; the defaults are right. */
struct Twist {
  int32_t scale_power = 1;  // times that q.k is scaled
  bool cap_before_scale = false;
  bool k_scales_missing = false, v_scales_missing = false;  // those that 8-bit keys come with
  bool causal_top_left = false;
  int32_t window_left_shift = 0, window_right_shift = 0;
  bool heads_interleaved = false;  // query head h reads kv head h % kv_heads
  int32_t kv_len_shift = 0;
  bool last_page_dropped = false;            // keys of a last page that is not full
  bool page_tail_read = false;               // slots after the last key of its page
  int32_t first_page = -1, other_page = -1;  // swapped, of each request
  int32_t sink_count = 1;
  int32_t slice = 0;  // keys of a partial state, with one of the next two
  bool slices_unscaled = false, slices_16_bit = false;
  bool lse_base_2 = false, lse_transposed = false;
  bool empty_lse_inf = false, empty_unwritten = false;
};

/** Both departures at once; nothing if they are about the same rule. */
std::optional<Twist> combined(const Twist& a, const Twist& b);

/**
 * Rows of one request under a twist.  Keys and products of q and k are decoded once and serve every
 * twist; lse costs little, o is worked out only when asked for.
 */
class Suspect {
 public:
  Suspect(const check::Call& call, int32_t request);

  /** Sets the row to look at; false if the twist has no meaning there. */
  bool look(const Twist& twist, int32_t token, int32_t head);
  double lse() const { return lse_; }
  std::vector<double> o() const;
  bool any_o() const { return unwritten_; }  // whatever stood there before
  bool any_lse() const { return unwritten_ || twist_.slices_unscaled; }

 private:
  struct Slots {                           // of one kv head
    std::vector<double> k, v;              // [slots, width], as stored
    std::vector<double> k_scale, v_scale;  // [slots]
    std::vector<char> exists;
  };
  const Slots& slots_of(int32_t kv_head);
  const std::vector<double>& products(int32_t token, int32_t head, int32_t kv_head);
  int32_t slot_of(int32_t key) const;
  bool visible(int32_t token, int32_t key) const;
  bool sees_nothing(int32_t token) const;
  int32_t end() const;
  double scored(double product) const;
  void weigh(int32_t head);

  const check::Call& call_;
  const int32_t request_, qo_len_, given_len_;
  std::map<int32_t, Slots> slots_;
  std::map<std::tuple<int32_t, int32_t, int32_t>, std::vector<double>> products_;

  Twist twist_;
  attnfold_problem problem_;  // with the twist's window
  int32_t kv_len_ = 0;
  const Slots* at_ = nullptr;
  std::vector<int32_t> seen_;   // slots
  std::vector<int32_t> slice_;  // of each
  std::vector<double> scores_, weights_;
  double lse_ = 0;
  bool unwritten_ = false;
};

struct Fault {
  std::string name;
  Twist twist;
  bool of_layout = false;  // of swapped pages or of slices: there are many of these
};

/** Every fault that could show in this request of the call; those of layout last. */
std::vector<Fault> known_faults(const check::Call& call, int32_t request);

}  // namespace attnfold::diagnose
