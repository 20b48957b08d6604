// Random merges, run on both sides.
#pragma once

#include <memory>

#include "cuda/states.h"

namespace attnfold::check::device_test {

inline std::vector<attnfold_state> views(std::vector<std::unique_ptr<TwinState>>& states,
                                         bool on_device) {
  std::vector<attnfold_state> out;
  for (auto& s : states) out.push_back(on_device ? s->on_device() : s->on_host());
  return out;
}

/** One merge on both; `target` of the states, or one of its own, is the output. */
struct TwinMerge {
  StateShape shape;
  std::vector<std::unique_ptr<TwinState>> states;  // the last is the output if `target` is -1
  int target = -1;
  TwinMask mask;

  std::string differs() const {
    for (size_t i = 0; i < states.size(); ++i) {
      if (const std::string wrong = states[i]->differs(); !wrong.empty())
        return (i + 1 == states.size() ? "out." : "states[" + std::to_string(i) + "].") + wrong;
    }
    return "";
  }
  attnfold_status run(bool on_device, const attnfold_execution& e) {
    std::vector<attnfold_state> all = views(states, on_device);
    attnfold_state out = all[target < 0 ? all.size() - 1 : static_cast<size_t>(target)];
    out.num_rows = -1;
    if (target < 0) all.pop_back();
    return attnfold_merge_parallel(shape.rows, shape.heads, shape.width, all.data(),
                                   static_cast<int32_t>(all.size()), &out,
                                   on_device ? mask.on_device() : mask.on_host(), mask.stride, &e);
  }
  /** "" or what is wrong after both ran. */
  std::string compare() {
    const attnfold_execution here = ATTNFOLD_EXECUTION_INIT;
    if (run(false, here) != ATTNFOLD_OK) return attnfold_last_error();
    if (run(true, on_device()) != ATTNFOLD_OK) return attnfold_last_error();
    require_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return differs();
  }
};

/** Two states that the packed kernel takes: all types, tails, prefixes, masks, in place. */
inline TwinMerge plain_merge(std::mt19937_64& rng) {
  static constexpr int32_t kWidths[] = {8, 16, 24, 32, 64, 72, 80, 96, 112, 128, 128, 192, 256};
  const StateShape shape{1 + static_cast<int64_t>(rng() % 90), 1 + static_cast<int32_t>(rng() % 33),
                         kWidths[rng() % std::size(kWidths)]};
  TwinMerge m{shape, {}, -1, TwinMask(rng, shape.rows)};
  const DType type = static_cast<DType>(rng() % 3);
  for (int i = 0; i < 2; ++i)
    m.states.push_back(std::make_unique<TwinState>(rng, shape, plain_convention(rng, shape, type)));
  if (rng() % 3 == 0) {
    m.target = static_cast<int>(rng() % 2);
    return m;
  }
  Convention out = plain_convention(rng, shape, type);
  out.num_rows = -1;
  m.states.push_back(std::make_unique<TwinState>(rng, shape, out));
  return m;
}

inline TwinMerge any_merge(std::mt19937_64& rng) {
  const int n = rng() % 8 == 0 ? 32 : static_cast<int>(rng() % 9);
  const StateShape shape{
      1 + static_cast<int64_t>(rng() % 12), 1 + static_cast<int32_t>(rng() % 9),
      rng() % 8 ? 1 + static_cast<int32_t>(rng() % 150) : 1 + static_cast<int32_t>(rng() % 1500)};
  TwinMerge m{shape, {}, -1, TwinMask(rng, shape.rows)};
  for (int i = 0; i < n; ++i)
    m.states.push_back(std::make_unique<TwinState>(rng, shape, any_convention(rng, shape)));
  Convention out = any_convention(rng, shape);
  out.normalised = true;
  out.num_rows = -1;
  m.states.push_back(std::make_unique<TwinState>(rng, shape, out));
  return m;
}

}  // namespace attnfold::check::device_test
