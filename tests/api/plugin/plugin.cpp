// The library inside of a plug-in; closed_test.cpp loads it.
#include <vector>

#include "attnfold/attnfold.h"

/** Merges two states on that many threads; 0 if all went well. */
extern "C" ATTNFOLD_API int run_on_threads(int num_threads) {
  constexpr int32_t kTokens = 4096, kHeads = 8, kHeadDim = 64;
  const size_t rows = size_t{kTokens} * kHeads;
  std::vector<float> o(rows * kHeadDim, 0.5f), out(o.size()), lse(rows, 1.0f), out_lse(rows);
  attnfold_state state = ATTNFOLD_STATE_INIT, merged = ATTNFOLD_STATE_INIT;
  state.o = o.data();
  state.lse = lse.data();
  merged.o = out.data();
  merged.lse = out_lse.data();
  const attnfold_state states[] = {state, state};
  attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
  execution.num_threads = num_threads;
  if (attnfold_merge_parallel(kTokens, kHeads, kHeadDim, states, 2, &merged, nullptr, 0,
                              &execution) != ATTNFOLD_OK)
    return 1;
  for (const float x : out)
    if (x != 0.5f) return 2;
  return 0;
}
