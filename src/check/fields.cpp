#include "check/fields.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

namespace attnfold::check {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxElements = int64_t{1} << 60;  // times any element size fits int64

std::string plain(float x) {
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%g", static_cast<double>(x));
  return digits;
}

}  // namespace

void fail(const std::string& what, const std::string& expected, const std::string& got) {
  throw Malformed{what + ": expected " + expected + ", got " + got};
}

std::string indexed(const char* tensor, int64_t i) {
  return std::string("tensor ") + tensor + "[" + std::to_string(i) + "]";
}

std::string Fields::text(const char* key) const {
  const auto found = file_.metadata.find(key);
  if (found == file_.metadata.end()) fail(std::string("metadata ") + key, "a value", "none");
  return found->second;
}

std::string Fields::text(const char* key, const char* otherwise) const {
  const auto found = file_.metadata.find(key);
  return found == file_.metadata.end() ? otherwise : found->second;
}

bool Fields::is(const char* key, const std::string& value, const char* yes, const char* no) const {
  if (value != yes && value != no) {
    fail(std::string("metadata ") + key, std::string(yes) + " or " + no, shown(value));
  }
  return value == yes;
}

float Fields::number(const char* key, const std::string& value, float at_least) const {
  float x = 0;
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, x);
  if (error != std::errc() || stop != end || !std::isfinite(x) || x < at_least) {
    const std::string bound = std::isfinite(at_least) ? ", at least " + plain(at_least) : "";
    fail(std::string("metadata ") + key, "a finite float32 number" + bound, shown(value));
  }
  return x;
}

int32_t Fields::integer(const char* key, const std::string& value, int32_t at_least) const {
  int32_t x = 0;
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, x);
  if (error != std::errc() || stop != end || x < at_least) {
    fail(std::string("metadata ") + key,
         "an integer from " + std::to_string(at_least) + " to " + std::to_string(kMaxInt32),
         shown(value));
  }
  return x;
}

const Array& Fields::array(const char* name, size_t num_dims, const char* shape) const {
  const std::string what = std::string("tensor ") + name;
  const auto found = file_.arrays.find(name);
  if (found == file_.arrays.end()) fail(what, std::string("shape ") + shape, "no such tensor");
  const Array& array = found->second;
  if (array.shape.size() != num_dims) {
    fail(what, std::string("shape ") + shape, shown(array.shape));
  }
  int64_t product = 1;
  for (int64_t dim : array.shape) {
    if (dim > kMaxInt32 || std::max<int64_t>(dim, 1) > kMaxElements / product) {
      fail(what, "dimensions up to 2^31 - 1, their product up to 2^60", shown(array.shape));
    }
    product *= std::max<int64_t>(dim, 1);
  }
  return array;
}

std::vector<int32_t> Fields::list(const char* name, int64_t length, const char* shape) const {
  const Array& found = array(name, 1, shape);
  if (length >= 0) require_shape(name, found, {length}, shape);
  return values_i32(name, found);
}

std::vector<int32_t> Fields::values_i32(const char* name, const Array& array) const {
  require_dtype(name, array, "I32");
  std::vector<int32_t> values(array.bytes / sizeof(int32_t));
  if (!values.empty()) std::memcpy(values.data(), array.data, array.bytes);
  return values;
}

void require_dtype(const char* name, const Array& array, const char* dtype) {
  if (array.dtype != dtype) {
    fail(std::string("tensor ") + name, std::string("dtype ") + dtype, array.dtype);
  }
}

void require_shape(const char* name, const Array& array, const std::vector<int64_t>& shape,
                   const char* why) {
  if (array.shape == shape) return;
  fail(std::string("tensor ") + name, "shape " + shown(shape) + " (" + why + ")",
       shown(array.shape));
}

void require_positive(const char* name, int64_t value, const char* what) {
  if (value < 1) {
    fail(std::string("tensor ") + name, std::string("a positive ") + what, std::to_string(value));
  }
}

void require_rising(const char* name, const std::vector<int32_t>& indptr) {
  if (indptr[0] < 0) fail(indexed(name, 0), "at least 0", std::to_string(indptr[0]));
  for (size_t i = 1; i < indptr.size(); ++i) {
    if (indptr[i] >= indptr[i - 1]) continue;
    fail(indexed(name, static_cast<int64_t>(i)),
         "at least the one before, " + std::to_string(indptr[i - 1]), std::to_string(indptr[i]));
  }
}

std::shared_ptr<Buffer> copy_of(const Array& array) {
  auto buffer = std::make_shared<Buffer>(array.bytes);
  if (array.bytes > 0) std::memcpy(buffer->data(), array.data, array.bytes);
  return buffer;
}

}  // namespace attnfold::check
