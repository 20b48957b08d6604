// Call files in parts, to be damaged one part at a time.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "check/call_file.h"
#include "ref/oracle.h"

namespace attnfold::check {

using nlohmann::json;

inline std::string real_path(const std::string& name) {
  return std::string(ATTNFOLD_TEST_DATA_DIR "/") + name + ".safetensors";
}

inline LoadResult parse(const std::string& bytes) {
  // A copy of exactly this size, so that a sanitizer sees any read beyond it.
  const std::vector<char> exact(bytes.begin(), bytes.end());
  return parse_call(exact.data(), exact.size(), "test");
}

/** A call file as parts: the header's JSON, and the bytes of each tensor. */
struct Parts {
  json header = {{"__metadata__", json::object()}};
  std::string data;

  template <typename T>
  void put(const std::string& name, const char* dtype, std::vector<int64_t> shape,
           const std::vector<T>& values) {
    const size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
    header[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {begin, data.size()}}};
  }
  json& metadata() { return header["__metadata__"]; }
  std::string bytes() const { return with_header(header.dump()); }
  std::string with_header(const std::string& text) const {
    std::string length(8, '\0');
    for (int i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
    return length + text + data;
  }

  /** The bytes of one tensor, to be written over. */
  template <typename T>
  void overwrite(const std::string& name, size_t index, T value) {
    const size_t begin = header[name]["data_offsets"][0].get<size_t>();
    std::memcpy(&data[begin + index * sizeof(T)], &value, sizeof(T));
  }
};

constexpr int32_t kWild = 0x7ffffff0;

/** Two requests: 2 new tokens on 5 keys, 1 on 3.  Pages of 2 tokens, 2 query heads, 1 kv head. */
inline Parts paged_parts() {
  Parts parts;
  parts.metadata() = {{"format", "attnfold-call-1"},
                      {"mask", "causal"},
                      {"sm_scale", "0.25"},
                      {"page_size", "2"},
                      {"kv_layout", "NHD"}};
  parts.put<float>("q", "F32", {3, 2, 8}, std::vector<float>(48, 0.5f));
  parts.put<int32_t>("qo_indptr", "I32", {3}, {0, 2, 3});
  parts.put<float>("k_cache", "F32", {6, 2, 1, 8}, std::vector<float>(96, 0.25f));
  parts.put<float>("v_cache", "F32", {6, 2, 1, 8}, std::vector<float>(96, 2.0f));
  parts.put<int32_t>("block_table", "I32", {2, 3}, {5, 0, 3, 1, 2, kWild});
  parts.put<int32_t>("kv_len", "I32", {2}, {5, 3});
  return parts;
}

inline Parts csr_parts() {
  Parts parts = paged_parts();
  Parts csr;
  csr.metadata() = parts.metadata();
  csr.put<float>("q", "F32", {3, 2, 8}, std::vector<float>(48, 0.5f));
  csr.put<int32_t>("qo_indptr", "I32", {3}, {0, 2, 3});
  csr.put<float>("k_cache", "F32", {6, 2, 1, 8}, std::vector<float>(96, 0.25f));
  csr.put<float>("v_cache", "F32", {6, 2, 1, 8}, std::vector<float>(96, 2.0f));
  csr.put<int32_t>("kv_len", "I32", {2}, {5, 3});
  csr.put<int32_t>("kv_indptr", "I32", {3}, {0, 3, 5});
  csr.put<int32_t>("kv_indices", "I32", {5}, {5, 0, 3, 1, 2});
  return csr;
}

inline Parts ragged_parts() {
  Parts parts;
  parts.metadata() = {{"format", "attnfold-call-1"}, {"mask", "none"}, {"sm_scale", "1"}};
  parts.put<float>("q", "F32", {3, 2, 8}, std::vector<float>(48, 0.5f));
  parts.put<int32_t>("qo_indptr", "I32", {3}, {0, 2, 3});
  parts.put<float>("k", "F32", {8, 1, 8}, std::vector<float>(64, 0.25f));
  parts.put<float>("v", "F32", {8, 1, 16}, std::vector<float>(128, 2.0f));
  parts.put<int32_t>("kv_indptr", "I32", {3}, {0, 5, 8});
  return parts;
}

inline testing::AssertionResult reads(const std::string& bytes) {
  const LoadResult result = parse(bytes);
  if (result.ok) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "refused: " << result.error;
}

/** Refused as malformed, in words that hold each of `parts`. */
inline testing::AssertionResult refused(const std::string& bytes, std::vector<std::string> parts,
                                        bool unsupported = false) {
  const LoadResult result = parse(bytes);
  if (result.ok) return testing::AssertionFailure() << "it was read";
  if (result.unsupported != unsupported) {
    return testing::AssertionFailure() << "wrong kind of refusal: " << result.error;
  }
  for (const std::string& part : parts) {
    if (result.error.find(part) == std::string::npos) {
      return testing::AssertionFailure() << "expected \"" << part << "\" in: " << result.error;
    }
  }
  return testing::AssertionSuccess();
}
inline testing::AssertionResult unsupported(const std::string& bytes,
                                            std::vector<std::string> parts) {
  return refused(bytes, std::move(parts), true);
}

/** A call that parsed is one that can be answered: the oracle stays in bounds. */
inline void expect_sane(const LoadResult& result) {
  const Call& call = result.call;
  ASSERT_EQ(call.qo_indptr.size(), static_cast<size_t>(call.batch) + 1);
  ASSERT_EQ(call.kv_len.size(), static_cast<size_t>(call.batch));
  ref::answer(call);
}

/** Either refused with a message, or sane. */
inline void expect_survives(const std::string& bytes) {
  const LoadResult result = parse(bytes);
  if (result.ok) {
    expect_sane(result);
  } else {
    EXPECT_FALSE(result.error.empty());
  }
}

}  // namespace attnfold::check
