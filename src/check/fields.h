// Typed, checked access to the metadata and arrays of a container.  Faults are thrown and say what
// was expected and what came.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "check/call.h"
#include "check/safetensors.h"

namespace attnfold::check {

/** What is wrong with a call file: "<what>: expected <expected>, got <got>". */
struct Malformed {
  std::string text;
};
[[noreturn]] void fail(const std::string& what, const std::string& expected,
                       const std::string& got);

/** "tensor kv_len[3]" */
std::string indexed(const char* tensor, int64_t i);

class Fields {
 public:
  explicit Fields(const Container& file) : file_(file) {}
  const Container& file() const { return file_; }
  bool has(const char* tensor) const { return file_.arrays.count(tensor) > 0; }

  // Metadata.  Without `otherwise` the key must be there.
  std::string text(const char* key) const;
  std::string text(const char* key, const char* otherwise) const;
  bool is(const char* key, const std::string& value, const char* yes, const char* no) const;
  float number(const char* key, const std::string& value, float at_least) const;
  int32_t integer(const char* key, const std::string& value, int32_t at_least) const;

  // Arrays.  Every dimension fits int32, and the product of those that are not 0 fits int64.
  const Array& array(const char* name, size_t num_dims, const char* shape) const;

  /** I32 values, `length` of them unless that is -1. */
  std::vector<int32_t> list(const char* name, int64_t length, const char* shape) const;
  std::vector<int32_t> values_i32(const char* name, const Array& array) const;

 private:
  const Container& file_;
};

// Demands on an array; `name` is for the message.
void require_dtype(const char* name, const Array& array, const char* dtype);
void require_shape(const char* name, const Array& array, const std::vector<int64_t>& shape,
                   const char* why);
void require_positive(const char* name, int64_t value, const char* what);
void require_rising(const char* name, const std::vector<int32_t>& indptr);

std::shared_ptr<Buffer> copy_of(const Array& array);

}  // namespace attnfold::check
