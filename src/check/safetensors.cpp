#include "check/safetensors.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

namespace attnfold::check {
namespace {

using nlohmann::json;

constexpr int kMaxJsonDepth = 3;  // header object, tensor object, shape array
constexpr size_t kMaxShownChars = 64;
constexpr size_t kMaxDims = 16;
constexpr const char* kMetadataKey = "__metadata__";

/** What is wrong with a container; never leaves this file. */
struct Malformed {
  std::string text;
};

[[noreturn]] void fail(std::string text) { throw Malformed{std::move(text)}; }

struct NamedSize {
  const char* name;
  int bytes;
};
constexpr NamedSize kDtypes[] = {
    {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
    {"U16", 2},  {"I16", 2}, {"F16", 2}, {"BF16", 2},    {"U32", 4},     {"I32", 4},
    {"F32", 4},  {"U64", 8}, {"I64", 8}, {"F64", 8},     {"C64", 8},
};

int bytes_of_dtype(const std::string& tensor, const std::string& dtype) {
  for (const NamedSize& known : kDtypes) {
    if (dtype == known.name) return known.bytes;
  }
  fail("tensor " + shown(tensor) + ": dtype: expected a safetensors dtype, got " + shown(dtype));
}

std::string shown_json(const json& value) {
  return shown(value.dump(-1, ' ', false, json::error_handler_t::replace));
}

uint64_t read_le64(const unsigned char* p) {
  uint64_t x = 0;
  for (size_t i = kLengthBytes; i-- > 0;) x = x << 8 | p[i];
  return x;
}

/** Parses JSON, refusing what a plain parse lets pass: names that come twice, and deep nesting. */
json parse_json(const char* begin, const char* end) {
  std::vector<std::set<std::string>> names;  // of the objects that are open
  const auto watch = [&names](int depth, json::parse_event_t event, json& parsed) {
    using Event = json::parse_event_t;
    if ((event == Event::object_start || event == Event::array_start) && depth >= kMaxJsonDepth) {
      fail("header: expected at most " + std::to_string(kMaxJsonDepth) +
           " levels of JSON, got more");
    }
    if (event == Event::object_start) names.emplace_back();
    if (event == Event::object_end) names.pop_back();
    if (event == Event::key) {
      const std::string name = parsed.get<std::string>();
      if (!names.back().insert(name).second) {
        fail("header: expected each name once, got " + shown(name) + " twice");
      }
    }
    return true;
  };
  try {
    return json::parse(begin, end, watch);
  } catch (const json::exception& e) {
    fail(std::string("header: expected JSON, got a fault: ") + e.what());
  }
}

/** Member `key` of a tensor's entry. */
const json& member(const json& entry, const std::string& tensor, const char* key) {
  const auto found = entry.find(key);
  if (found == entry.end()) fail("tensor " + shown(tensor) + ": expected a " + key + ", got none");
  return *found;
}

int64_t whole_number(const json& value, const std::string& what) {
  if (!value.is_number_unsigned() ||
      value.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()}) {
    fail(what + ": expected a whole number from 0 to 2^63 - 1, got " + shown_json(value));
  }
  return value.get<int64_t>();
}

std::vector<int64_t> whole_numbers(const json& value, const std::string& what) {
  if (!value.is_array()) fail(what + ": expected a list of numbers, got " + shown_json(value));
  std::vector<int64_t> numbers;
  for (const json& x : value) numbers.push_back(whole_number(x, what));
  return numbers;
}

/** Bytes of `shape` elements, or -1 if they do not fit 63 bits.  A dimension of 0 makes 0 bytes. */
int64_t bytes_of_shape(const std::vector<int64_t>& shape, int64_t element_bytes) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t bytes = element_bytes;
  for (int64_t dim : shape) {
    if (dim > std::numeric_limits<int64_t>::max() / bytes) return -1;
    bytes *= dim;
  }
  return bytes;
}

struct Extent {
  int64_t begin, end;
  std::string name;
};

Extent read_array(const std::string& name, const json& entry, const std::byte* data,
                  int64_t data_bytes, Array* array) {
  const std::string at = "tensor " + shown(name);
  if (!entry.is_object()) {
    fail(at + ": expected an object with dtype, shape and data_offsets, got " + shown_json(entry));
  }
  for (const auto& [key, value] : entry.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets") {
      fail(at + ": expected dtype, shape and data_offsets only, got " + shown(key));
    }
  }
  const json& dtype = member(entry, name, "dtype");
  if (!dtype.is_string()) fail(at + ": dtype: expected a string, got " + shown_json(dtype));
  array->dtype = dtype.get<std::string>();
  array->shape = whole_numbers(member(entry, name, "shape"), at + ": shape");
  if (array->shape.size() > kMaxDims) {
    fail(at + ": shape: expected at most " + std::to_string(kMaxDims) + " dimensions, got " +
         std::to_string(array->shape.size()));
  }
  const int64_t bytes = bytes_of_shape(array->shape, bytes_of_dtype(name, array->dtype));
  if (bytes < 0) {
    fail(at + ": shape: expected a size below 2^63 bytes, got " + shown(array->shape));
  }

  const auto offsets = whole_numbers(member(entry, name, "data_offsets"), at + ": data_offsets");
  if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data_bytes) {
    fail(at + ": data_offsets: expected [begin, end] within 0.." + std::to_string(data_bytes) +
         ", got " + shown(offsets));
  }
  if (offsets[1] - offsets[0] != bytes) {
    fail(at + ": data_offsets: expected " + std::to_string(bytes) + " bytes for " + array->dtype +
         " " + shown(array->shape) + ", got " + shown(offsets) + ", which is " +
         std::to_string(offsets[1] - offsets[0]));
  }
  array->data = data + offsets[0];
  array->bytes = static_cast<size_t>(bytes);
  return {offsets[0], offsets[1], name};
}

void check_cover(std::vector<Extent> extents, int64_t data_bytes) {
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  int64_t covered = 0;
  std::string last = "the header";
  for (const Extent& extent : extents) {
    if (extent.begin < covered && extent.end > extent.begin) {
      fail("tensor " + shown(extent.name) + ": data_offsets: expected no overlap, got " +
           std::to_string(extent.begin) + ".." + std::to_string(extent.end) + ", but " + last +
           " ends at " + std::to_string(covered));
    }
    if (extent.begin > covered) {
      fail("tensor " + shown(extent.name) + ": data_offsets: expected to begin where " + last +
           " ends, at " + std::to_string(covered) + ", got " + std::to_string(extent.begin));
    }
    if (extent.end > covered) {
      covered = extent.end;
      last = "tensor " + shown(extent.name);
    }
  }
  if (covered != data_bytes) {
    fail("data: expected to end with " + last + " after " + std::to_string(covered) +
         " bytes, got " + std::to_string(data_bytes) + " bytes");
  }
}

void parse(const void* bytes, size_t size, Container* container) {
  if (size < kLengthBytes) {
    fail("file: expected at least 8 bytes (the header's length), got " + std::to_string(size));
  }
  const uint64_t header_bytes = read_le64(static_cast<const unsigned char*>(bytes));
  if (header_bytes > size - kLengthBytes) {
    fail("header length: expected at most the " + std::to_string(size - kLengthBytes) +
         " bytes that follow it, got " + std::to_string(header_bytes));
  }
  if (header_bytes > kMaxHeaderBytes) {
    fail("header length: expected at most " + std::to_string(kMaxHeaderBytes) + ", got " +
         std::to_string(header_bytes));
  }
  const char* header = static_cast<const char*>(bytes) + kLengthBytes;
  if (header_bytes == 0 || header[0] != '{') {
    fail("header: expected JSON that begins with {, got " +
         shown(std::string(header, std::min<size_t>(header_bytes, 8))));
  }
  const json root = parse_json(header, header + header_bytes);
  const std::byte* data = static_cast<const std::byte*>(bytes) + kLengthBytes + header_bytes;
  const int64_t data_bytes = static_cast<int64_t>(size - kLengthBytes - header_bytes);

  std::vector<Extent> extents;
  for (const auto& [name, entry] : root.items()) {
    if (name != kMetadataKey) {
      extents.push_back(read_array(name, entry, data, data_bytes, &container->arrays[name]));
      continue;
    }
    if (!entry.is_object()) {
      fail("__metadata__: expected an object of strings, got " + shown_json(entry));
    }
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string()) {
        fail("metadata " + shown(key) + ": expected a string, got " + shown_json(value));
      }
      container->metadata[key] = value.get<std::string>();
    }
  }
  check_cover(std::move(extents), data_bytes);
}

}  // namespace

std::string shown(const std::string& text) {
  std::string out = "\"";
  for (size_t i = 0; i < text.size() && i < kMaxShownChars; ++i) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    if (c >= 0x20 && c < 0x7f) {
      out += text[i];
    } else {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\x%02x", c);
      out += escape;
    }
  }
  out += '"';
  if (text.size() > kMaxShownChars) {
    out += ".. (" + std::to_string(text.size()) + " bytes)";
  }
  return out;
}

std::string shown(const std::vector<int64_t>& shape) {
  constexpr size_t kMaxShownDims = 8;
  std::string out = "[";
  for (size_t i = 0; i < shape.size() && i < kMaxShownDims; ++i) {
    out += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  if (shape.size() > kMaxShownDims) out += ", ..";
  return out + "]";
}

std::string parse_container(const void* bytes, size_t size, Container* container) {
  *container = {};
  try {
    parse(bytes, size, container);
    return "";
  } catch (const Malformed& fault) {
    return fault.text;
  }
}

std::string write_container(const Container& container, const std::string& path) {
  json root = json::object();
  root[kMetadataKey] = container.metadata;
  int64_t at = 0;
  for (const auto& [name, array] : container.arrays) {
    const int64_t end = at + static_cast<int64_t>(array.bytes);
    root[name] = {{"dtype", array.dtype}, {"shape", array.shape}, {"data_offsets", {at, end}}};
    at = end;
  }
  std::string header = root.dump(-1, ' ', false, json::error_handler_t::replace);
  header.resize((header.size() + kLengthBytes - 1) / kLengthBytes * kLengthBytes, ' ');

  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) return path + ": expected a file that can be written, got an error on open";
  unsigned char length[kLengthBytes];
  for (size_t i = 0; i < kLengthBytes; ++i) length[i] = header.size() >> (8 * i) & 0xff;
  bool good = std::fwrite(length, 1, kLengthBytes, file) == kLengthBytes;
  good &= std::fwrite(header.data(), 1, header.size(), file) == header.size();
  for (const auto& [name, array] : container.arrays) {
    good &= array.bytes == 0 || std::fwrite(array.data, 1, array.bytes, file) == array.bytes;
  }
  good &= std::fclose(file) == 0;
  return good ? "" : path + ": expected to write the whole file, got an error; is the disk full?";
}

}  // namespace attnfold::check
