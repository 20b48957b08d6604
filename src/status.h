// Status and Result: how functions of the library fail.  Messages read `<argument>: expected
// <what>, got <value>`.
#pragma once

#include <string>
#include <utility>

#include "attnfold/attnfold.h"

namespace attnfold {

class [[nodiscard]] Status {
 public:
  Status() = default;  // OK
  Status(attnfold_status code, std::string message) : code_(code), message_(std::move(message)) {}
  bool ok() const { return code_ == ATTNFOLD_OK; }
  attnfold_status code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  attnfold_status code_ = ATTNFOLD_OK;
  std::string message_;
};

template <class T>
Status invalid(const std::string& argument, const std::string& expected, const T& got) {
  std::string value;
  if constexpr (std::is_convertible_v<T, std::string>) {
    value = got;
  } else {
    value = std::to_string(got);
  }
  return {ATTNFOLD_INVALID_ARGUMENT, argument + ": expected " + expected + ", got " + value};
}

inline std::string indexed(const char* name, long long i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

}  // namespace attnfold

/** Returns from the enclosing function if the status is an error. */
#define ATTNFOLD_RETURN_IF_ERROR(expression)   \
  do {                                         \
    ::attnfold::Status status_ = (expression); \
    if (!status_.ok()) return status_;         \
  } while (0)
