// Shapes as a user writes them: `attnfold bench --shapes 1x32768:64/8:f16,512on8192`.
#pragma once

#include <string>

#include "bench_call.h"

namespace attnfold::tools {

/** What parse_shape takes, for messages and help. */
inline constexpr const char* kShapeForm =
    "BATCHxKEYS (decodes) or NEWonKEYS (a prefill), then any of :HEADS/KV_HEADS :dHEAD_DIM :pageN "
    ":hnd and :TYPE of the cache";

/** A shape whose name is `text`.  Throws BadInput, naming --shapes. */
BenchShape parse_shape(const std::string& text);

/** Whether it has more new tokens than one a request. */
bool is_prefill(const BenchShape& shape);

}  // namespace attnfold::tools
