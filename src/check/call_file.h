// Reads and writes call files: safetensors files of the format attnfold-call-1
// (docs/call-format.md).
#pragma once

#include <string>

#include "check/call.h"

namespace attnfold::check {

/** A malformed or unsupported file gives a message that says what is wrong where; never a crash. */
struct LoadResult {
  bool ok = false;
  bool unsupported = false;  // well-formed, but of a feature that this version does not serve
  std::string error;
  Call call;
};
LoadResult load_call(const std::string& path);
LoadResult parse_call(const void* bytes, size_t size, const std::string& name_for_messages);

/** "" or what went wrong. */
std::string save_call(const Call& call, const std::string& path);
std::string save_answer(const Call& call, const Answer& answer, const std::string& path);

/** What it says there of who answered. */
std::string by_line(const Answer& answer);

}  // namespace attnfold::check
