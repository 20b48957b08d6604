// The safetensors container: named arrays behind a JSON header.  What the arrays mean is
// call_file.cpp's business.
//
//   bytes 0..7      length H of the header, little-endian
//   bytes 8..8+H    JSON: {"__metadata__": {"key": "value"}, "name": {"dtype", "shape",
//   "data_offsets": [begin, end]}, ..} the rest        the arrays' bytes, fastest dimension last;
//   offsets count from here
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace attnfold::check {

struct Array {
  std::string dtype;           // as the file spells it: "BF16"
  std::vector<int64_t> shape;  // slowest first
  const std::byte* data = nullptr;
  size_t bytes = 0;
};

struct Container {
  std::map<std::string, std::string> metadata;
  std::map<std::string, Array> arrays;  // data points into the bytes that were parsed
};

/**
 * Reads a container.  "" or what is wrong where.  Checked: lengths, JSON and its nesting, duplicate
 * names, types of every value, shapes against offsets without overflow, and that the arrays cover
 * the data without overlap or gap.
 */
constexpr size_t kLengthBytes = 8;  // of the header's length, at the start of a file
constexpr size_t kMaxHeaderBytes = size_t{16} << 20;
std::string parse_container(const void* bytes, size_t size, Container* container);

/** "" or what went wrong. */
std::string write_container(const Container& container, const std::string& path);

/** A name or value from a file, fit to be shown: quoted, unprintable bytes escaped, cut if long. */
std::string shown(const std::string& text);

/** "[2, 3]" */
std::string shown(const std::vector<int64_t>& shape);

}  // namespace attnfold::check
