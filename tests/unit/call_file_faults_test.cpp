// Call files with one fault each: every message names the place, what was expected and what came.
#include <functional>
#include <limits>
#include <map>

#include "check/safetensors.h"
#include "unit/call_file_parts.h"

namespace attnfold::check {
namespace {

// ------------------------------------------------ one fault each

TEST(CallFileFaults, OptionalTermsAreServedAndAnotherFormatIsUnsupported) {
  for (const auto& [key, value] : std::map<std::string, std::string>{{"logits_softcap", "30"},
                                                                     {"sink_tokens", "4"},
                                                                     {"attention_chunk", "64"},
                                                                     {"k_scale", "0.5"},
                                                                     {"v_scale", "-2"},
                                                                     {"o_scale", "0.25"}}) {
    Parts parts = paged_parts();
    parts.metadata()[key] = value;
    EXPECT_TRUE(reads(parts.bytes())) << key;
  }
  for (const char* name : {"alibi_slopes", "sink_logits"}) {
    Parts parts = paged_parts();
    parts.put<float>(name, "F32", {2}, {1, 2});
    EXPECT_TRUE(reads(parts.bytes())) << name;
    parts = paged_parts();
    parts.put<float>(name, "F32", {3}, {1, 2, 3});
    EXPECT_TRUE(refused(parts.bytes(), {name, "[2]", "[3]"}));
  }
  Parts parts = paged_parts();
  parts.metadata()["format"] = "attnfold-call-2";
  parts.metadata()["some_new_key"] = "1";
  EXPECT_TRUE(unsupported(parts.bytes(), {"attnfold-call-2", "attnfold-call-1"}));
}

TEST(CallFileFaults, HeadDimThatNoKernelServesIsUnsupported) {
  Parts parts;
  parts.metadata() = ragged_parts().metadata();
  parts.put<float>("q", "F32", {1, 1, 12}, std::vector<float>(12));
  parts.put<int32_t>("qo_indptr", "I32", {2}, {0, 1});
  parts.put<float>("k", "F32", {1, 1, 12}, std::vector<float>(12));
  parts.put<float>("v", "F32", {1, 1, 8}, std::vector<float>(8));
  parts.put<int32_t>("kv_indptr", "I32", {2}, {0, 1});
  EXPECT_TRUE(unsupported(parts.bytes(), {"head_dim 12", "576"}));
}

TEST(CallFileFaults, EachMetadataFaultIsNamed) {
  struct Fault {
    const char *key, *value, *expected;
  };
  const Fault faults[] = {
      {"format", "something", "attnfold-call-1"},
      {"mask", "Causal", "causal or none"},
      {"mask", "", "causal or none"},
      {"sm_scale", "0.125x", "finite"},
      {"sm_scale", "", "finite"},
      {"sm_scale", "nan", "finite"},
      {"sm_scale", "inf", "finite"},
      {"sm_scale", "1e60", "finite"},
      {"sm_scale", "-0.5", "at least 0"},
      {"sm_scale", " 1", "finite"},
      {"page_size", "0", "from 1"},
      {"page_size", "-2", "from 1"},
      {"page_size", "3", "page_size, 3"},
      {"page_size", "99999999999", "from 1"},
      {"kv_layout", "nhd", "NHD or HND"},
      {"window_left", "-2", "from -1"},
      {"window_right", "1.5", "an integer"},
      {"lse_base", "10", "e or 2"},
      {"lse_layout", "rows", "heads_rows"},
      {"logits_softcap", "-1", "at least 0"},
      {"sink_tokens", "x", "an integer"},
      {"k_scale", "nan", "finite"},
      {"v_scale", "inf", "finite"},
      {"o_scale", "0", "> 0"},
      {"o_scale", "-1", "at least 0"},
      {"v_in_k", "8", "none beside"},  // v_cache is there
      {"unknown_key", "1", "unknown_key"},
  };
  for (const Fault& fault : faults) {
    Parts parts = paged_parts();
    parts.metadata()[fault.key] = fault.value;
    EXPECT_TRUE(refused(parts.bytes(), {fault.key, fault.expected})) << fault.value;
  }
  for (const char* key : {"format", "mask", "sm_scale", "page_size", "kv_layout"}) {
    Parts parts = paged_parts();
    parts.metadata().erase(key);
    EXPECT_TRUE(refused(parts.bytes(), {key, "got none"}));
  }
}

/** A name for the message, a change to the parts, and what the message must hold. */
struct TensorFault {
  std::string what;
  std::function<void(Parts&)> change;
  std::vector<std::string> message;
};

void expect_each_refused(Parts (*make)(), const std::vector<TensorFault>& faults) {
  ASSERT_TRUE(reads(make().bytes()));
  for (const TensorFault& fault : faults) {
    Parts parts = make();
    fault.change(parts);
    EXPECT_TRUE(refused(parts.bytes(), fault.message)) << fault.what;
  }
}

TensorFault value_fault(const std::string& tensor, size_t index, int32_t value,
                        std::vector<std::string> message) {
  const auto change = [=](Parts& parts) { parts.overwrite(tensor, index, value); };
  return {tensor + "[" + std::to_string(index) + "] = " + std::to_string(value), change, message};
}
TensorFault shape_fault(const std::string& tensor, std::vector<int64_t> shape,
                        std::vector<std::string> message) {
  const auto change = [=](Parts& parts) { parts.header[tensor]["shape"] = shape; };
  return {tensor + " of shape " + shown(shape), change, message};
}
TensorFault dtype_fault(const std::string& tensor, const char* dtype,
                        std::vector<std::string> message) {
  const auto change = [=](Parts& parts) { parts.header[tensor]["dtype"] = dtype; };
  return {tensor + " of " + dtype, change, message};
}
TensorFault missing(const std::string& tensor, std::vector<std::string> message) {
  // Under a name that is ignored, the bytes stay covered.
  const auto change = [=](Parts& parts) {
    parts.header["x_" + tensor] = parts.header[tensor];
    parts.header.erase(tensor);
  };
  return {"no " + tensor, change, message};
}

TEST(CallFileFaults, EachTensorFaultOfAPagedCallIsNamed) {
  expect_each_refused(
      paged_parts,
      {value_fault("qo_indptr", 0, 1, {"qo_indptr[0]", "expected 0", "got 1"}),
       value_fault("qo_indptr", 1, -1, {"qo_indptr[1]", "got -1"}),
       value_fault("qo_indptr", 1, 9, {"qo_indptr[2]", "9", "got 3"}),
       value_fault("qo_indptr", 2, 4, {"qo_indptr[2]", "rows of q, 3", "got 4"}),
       value_fault("kv_len", 0, -1, {"kv_len[0]", "got -1"}),
       value_fault("kv_len", 1, 7, {"kv_len[1]", "0..6", "got 7"}),
       value_fault("kv_len", 1, 0x7fffffff, {"kv_len[1]", "0..6"}),
       value_fault("block_table", 0, 6, {"block_table[0]", "0 to 5", "got 6"}),
       value_fault("block_table", 2, -1, {"block_table[2]", "request 0", "got -1"}),
       shape_fault("q", {3, 16}, {"q", "[qo_rows, qo_heads, head_dim_qk]", "[3, 16]"}),
       shape_fault("q", {2, 3, 8}, {"rows of q, 2", "got 3"}),
       shape_fault("q", {3, 1, 16}, {"k_cache", "head_dim of q, 16", "got 8"}),
       shape_fault("k_cache", {6, 1, 2, 8}, {"k_cache", "page_size, 2", "got 1"}),
       shape_fault("k_cache", {3, 2, 2, 8}, {"v_cache", "[3, 2, 2, 8]", "[6, 2, 1, 8]"}),
       shape_fault("v_cache", {12, 2, 1, 4}, {"v_cache", "[6, 2, 1, 4]", "[12, 2, 1, 4]"}),
       shape_fault("block_table", {3, 2}, {"block_table", "[2, 2]", "[3, 2]"}),
       shape_fault("block_table", {6}, {"block_table", "[batch, max_pages]"}),
       shape_fault("kv_len", {1, 2}, {"kv_len", "[batch]"}),
       shape_fault("qo_indptr", {3, 1}, {"qo_indptr", "[batch + 1]"}),
       dtype_fault("q", "I32", {"tensor q", "F32, F16 or BF16", "I32"}),
       dtype_fault("q", "U32", {"tensor q", "U32"}),
       dtype_fault("qo_indptr", "U32", {"qo_indptr", "I32", "U32"}),
       dtype_fault("kv_len", "F32", {"kv_len", "I32", "F32"}),
       dtype_fault("block_table", "F32", {"block_table", "I32"}),
       dtype_fault("k_cache", "I32", {"k_cache", "F32, F16, BF16, F8_E4M3, F8_E5M2 or I8"}),
       missing("q", {"tensor q"}),
       missing("qo_indptr", {"tensor qo_indptr"}),
       missing("k_cache", {"tensor k_cache"}),
       missing("v_cache", {"tensor v_cache"}),
       missing("kv_len", {"tensor kv_len"}),
       missing("block_table", {"tensor block_table", "kv_indptr"}),
       {"unknown tensor",
        [](Parts& p) { p.put<float>("mask_words", "F32", {1}, {0}); },
        {"mask_words"}},
       {"two tables",
        [](Parts& p) { p.put<int32_t>("kv_indices", "I32", {1}, {0}); },
        {"kv_indices", "block_table"}},
       {"two storages",
        [](Parts& p) { p.put<float>("k", "F32", {1}, {0}); },
        {"tensor k:", "none beside"}},
       {"heads that do not divide",
        [](Parts& p) {
          p.header["k_cache"]["shape"] = p.header["v_cache"]["shape"] = {2, 2, 3, 8};
        },
        {"k_cache", "divide qo_heads, 2", "got 3"}},
       {"o of other heads",
        [](Parts& p) {
          p.put<float>("o", "F32", {3, 1, 8}, std::vector<float>(24));
        },
        {"tensor o", "[3, 2, 8]", "[3, 1, 8]"}},
       {"o of another dtype",
        [](Parts& p) {
          p.put<uint16_t>("o", "F16", {3, 2, 8}, std::vector<uint16_t>(48));
        },
        {"tensor o", "F32", "F16"}},
       {"lse transposed",
        [](Parts& p) {
          p.put<float>("lse", "F32", {2, 3}, std::vector<float>(6));
        },
        {"tensor lse", "[3, 2]", "[2, 3]"}}});
}

TEST(CallFileFaults, EachFaultOfARequestsMaskIsNamed) {
  const auto with = [](std::vector<int32_t> prefix, std::vector<int32_t> width, size_t num_bytes) {
    Parts parts = paged_parts();  // 2 new tokens on 5 keys, 1 on 3
    parts.put<int32_t>("visible_prefix", "I32", {static_cast<int64_t>(prefix.size())}, prefix);
    parts.put<int32_t>("mask_width", "I32", {static_cast<int64_t>(width.size())}, width);
    parts.put<uint8_t>("mask_bits", "U8", {static_cast<int64_t>(num_bytes)},
                       std::vector<uint8_t>(num_bytes, 1));
    return parts;
  };
  EXPECT_TRUE(reads(with({3, 3}, {2, 0}, 2).bytes()));
  EXPECT_TRUE(refused(with({4, 3}, {2, 0}, 2).bytes(), {"visible_prefix[0]", "0..3", "got 4"}));
  EXPECT_TRUE(refused(with({0, -1}, {2, 0}, 2).bytes(), {"visible_prefix[1]", "got -1"}));
  EXPECT_TRUE(refused(with({0}, {2, 0}, 2).bytes(), {"visible_prefix", "[2]", "[1]"}));
  EXPECT_TRUE(refused(with({0, 0}, {1, 0}, 2).bytes(), {"mask_width[0]", "2..5", "got 1"}));
  EXPECT_TRUE(refused(with({0, 0}, {0, 4}, 1).bytes(), {"mask_width[1]", "1..3", "got 4"}));
  EXPECT_TRUE(refused(with({0, 0}, {5, 3}, 2).bytes(), {"mask_bits", "[3]", "[2]"}));
  Parts parts = paged_parts();
  parts.put<int32_t>("mask_width", "I32", {2}, {2, 0});
  EXPECT_TRUE(refused(parts.bytes(), {"mask_bits", "no such tensor"}));
  parts.put<int32_t>("mask_bits", "I32", {2}, {1, 1});
  EXPECT_TRUE(refused(parts.bytes(), {"mask_bits", "U8", "I32"}));
}

/** Keys and values of 8 bits, scales of the keys per token and of the values per head. */
Parts byte_parts() {
  Parts parts;
  parts.metadata() = paged_parts().metadata();
  parts.put<float>("q", "F32", {3, 2, 8}, std::vector<float>(48, 0.5f));
  parts.put<int32_t>("qo_indptr", "I32", {3}, {0, 2, 3});
  parts.put<uint8_t>("k_cache", "F8_E4M3", {6, 2, 1, 8}, std::vector<uint8_t>(96, 0x38));
  parts.put<uint8_t>("v_cache", "F8_E4M3", {6, 2, 1, 8}, std::vector<uint8_t>(96, 0x40));
  parts.put<float>("k_scale", "F32", {6, 2, 1}, std::vector<float>(12, 0.5f));
  parts.put<float>("v_scale", "F32", {1}, {2.0f});
  parts.put<int32_t>("block_table", "I32", {2, 3}, {5, 0, 3, 1, 2, kWild});
  parts.put<int32_t>("kv_len", "I32", {2}, {5, 3});
  return parts;
}

TEST(CallFileFaults, EachFaultOfScalesIsNamed) {
  expect_each_refused(
      byte_parts,
      {missing("k_scale", {"k_scale", "e4m3", "got none"}),
       missing("v_scale", {"v_scale", "e4m3", "got none"}),
       shape_fault("k_scale", {12}, {"k_scale", "[1]", "[12]"}),
       shape_fault("k_scale", {2, 6, 1}, {"k_scale", "[6, 2, 1]", "page_size", "[2, 6, 1]"}),
       shape_fault("k_scale", {6, 2}, {"k_scale", "[6, 2]"}),
       shape_fault("v_scale", {1, 1}, {"v_scale", "[1, 1]"}),
       dtype_fault("v_scale", "I32", {"v_scale", "F32", "I32"}),
       dtype_fault("v_cache", "I8", {"v_cache", "F8_E4M3", "I8"}),
       dtype_fault("q", "I32", {"tensor q", "F32, F16 or BF16", "I32"}),
       {"a scale twice",
        [](Parts& p) { p.metadata()["k_scale"] = "1"; },
        {"k_scale", "none beside the tensor"}},
       {"an o of 8 bits without its scale",
        [](Parts& p) {
          p.put<uint8_t>("o", "F8_E4M3", {3, 2, 8}, std::vector<uint8_t>(48));
        },
        {"tensor o", "o_scale", "F8_E4M3"}},
       {"an o in another type than its scale says",
        [](Parts& p) {
          p.metadata()["o_scale"] = "0.5";
          p.put<float>("o", "F32", {3, 2, 8}, std::vector<float>(48));
        },
        {"tensor o", "F8_E4M3", "F32"}}});
}

TEST(CallFileFaults, EachFaultOfValuesInKeysIsNamed) {
  const auto make = [] {
    Parts parts = ragged_parts();
    parts.header["x_v"] = parts.header["v"];
    parts.header.erase("v");
    parts.metadata()["v_in_k"] = "8";
    return parts;
  };
  expect_each_refused(
      make, {{"wider than k",
              [](Parts& p) { p.metadata()["v_in_k"] = "16"; },
              {"v_in_k", "head_dim_qk, 8", "got 16"}},
             {"no number", [](Parts& p) { p.metadata()["v_in_k"] = "yes"; }, {"v_in_k", "integer"}},
             {"off", [](Parts& p) { p.metadata()["v_in_k"] = "0"; }, {"tensor v"}}});
}

TEST(CallFileFaults, EachFaultOfABlockMaskIsNamed) {
  const auto with = [](std::vector<int32_t> indptr, std::vector<int32_t> blocks) {
    Parts parts = paged_parts();  // blocks 0..2 of request 0, 0..1 of request 1
    parts.metadata()["sparse_block_size"] = "2";
    parts.put<int32_t>("block_indptr", "I32", {static_cast<int64_t>(indptr.size())}, indptr);
    parts.put<int32_t>("block_indices", "I32", {static_cast<int64_t>(blocks.size())}, blocks);
    return parts;
  };
  EXPECT_TRUE(reads(with({0, 2, 3}, {0, 2, 1}).bytes()));
  EXPECT_TRUE(refused(with({0, 2, 3}, {0, 3, 1}).bytes(), {"block_indices[1]", "1..2", "got 3"}));
  EXPECT_TRUE(refused(with({0, 2, 3}, {2, 2, 1}).bytes(), {"block_indices[1]", "got 2"}));
  EXPECT_TRUE(refused(with({0, 2, 3}, {0, 2, -1}).bytes(), {"block_indices[2]", "0..1", "got -1"}));
  EXPECT_TRUE(refused(with({0, 2}, {0, 2}).bytes(), {"block_indptr", "[3]", "[2]"}));
  EXPECT_TRUE(refused(with({0, 3, 2}, {0, 2}).bytes(), {"block_indptr[2]", "3", "got 2"}));
  EXPECT_TRUE(refused(with({0, 2, 3}, {0, 2}).bytes(), {"block_indptr[2]", "2", "got 3"}));
  Parts parts = with({0, 2, 3}, {0, 2, 1});
  parts.metadata()["sparse_local_blocks"] = "1";
  EXPECT_TRUE(refused(parts.bytes(), {"block_indptr", "none"}));
  parts = paged_parts();
  parts.metadata()["sparse_block_size"] = "2";
  EXPECT_TRUE(refused(parts.bytes(), {"block_indptr", "no such tensor"}));
  parts.metadata()["sparse_head_step"] = "1";
  EXPECT_TRUE(refused(parts.bytes(), {"sparse_head_step", "0", "got 1"}));
  parts.metadata()["sparse_block_size"] = "-2";
  EXPECT_TRUE(refused(parts.bytes(), {"sparse_block_size", "-2"}));
}

TEST(CallFileFaults, EachTensorFaultOfACsrCallIsNamed) {
  expect_each_refused(csr_parts,
                      {value_fault("kv_indptr", 0, -1, {"kv_indptr[0]", "got -1"}),
                       value_fault("kv_indptr", 1, 6, {"kv_indptr[2]", "6", "got 5"}),
                       value_fault("kv_indptr", 1, 2, {"kv_len[0]", "0..4", "got 5"}),
                       value_fault("kv_indptr", 2, 6, {"kv_indptr[2]", "5", "got 6"}),
                       value_fault("kv_indices", 4, 6, {"kv_indices[4]", "request 1", "got 6"}),
                       shape_fault("kv_indptr", {3, 1}, {"kv_indptr", "[batch + 1]"}),
                       missing("kv_indptr", {"kv_indptr"}), missing("kv_indices", {"kv_indices"})});
}

TEST(CallFileFaults, EachTensorFaultOfARaggedCallIsNamed) {
  expect_each_refused(ragged_parts,
                      {value_fault("kv_indptr", 2, 9, {"kv_indptr[2]", "rows of k, 8", "got 9"}),
                       value_fault("kv_indptr", 1, 9, {"kv_indptr[2]", "9", "got 8"}),
                       missing("kv_indptr", {"kv_indptr"}),
                       missing("v", {"tensor v"}),
                       shape_fault("k", {4, 2, 8}, {"tensor v", "[4, 2, 16]", "[8, 1, 16]"}),
                       {"kv_len beyond its rows",
                        [](Parts& p) {
                          p.put<int32_t>("kv_len", "I32", {2}, {5, 4});
                        },
                        {"kv_len[1]", "0..3", "got 4"}},
                       {"head-major",
                        [](Parts& p) { p.metadata()["kv_layout"] = "HND"; },
                        {"kv_layout", "NHD", "HND"}},
                       {"a table",
                        [](Parts& p) {
                          p.put<int32_t>("block_table", "I32", {2, 1}, {0, 0});
                        },
                        {"block_table", "none beside"}}});
}

// ------------------------------------------------ the container

TEST(CallFileFaults, EachContainerFaultIsNamed) {
  const Parts parts = paged_parts();
  const std::string good = parts.bytes();
  EXPECT_TRUE(refused("", {"at least 8 bytes", "got 0"}));
  EXPECT_TRUE(refused(good.substr(0, 7), {"at least 8 bytes", "got 7"}));
  EXPECT_TRUE(refused(std::string(8, '\xff'), {"header length", "18446744073709551615"}));
  EXPECT_TRUE(refused(std::string(8, '\0'), {"header"}));
  EXPECT_TRUE(refused(good + "x", {"data", "expected to end"}));
  EXPECT_TRUE(refused(parts.with_header("[]"), {"begins with {"}));
  EXPECT_TRUE(refused(parts.with_header(" " + parts.header.dump()), {"begins with {"}));
  EXPECT_TRUE(refused(parts.with_header("{\"a\":"), {"JSON"}));
  EXPECT_TRUE(refused(parts.with_header("{\"\xff\":1}"), {"JSON"}));
  EXPECT_TRUE(refused(parts.with_header("{\"a\":1,\"a\":2}"), {"once", "\"a\""}));
  EXPECT_TRUE(
      refused(parts.with_header("{\"__metadata__\":{\"mask\":\"none\",\"mask\":\"causal\"}}"),
              {"once", "\"mask\""}));
  const size_t kDeep = 200000;
  EXPECT_TRUE(refused(parts.with_header("{\"a\":" + std::string(kDeep, '[')), {"levels"}));
  std::string objects;
  for (size_t i = 0; i < kDeep; ++i) objects += "{\"a\":";
  EXPECT_TRUE(refused(parts.with_header(objects), {"levels"}));
}

TEST(CallFileFaults, EachTensorEntryFaultIsNamed) {
  struct Fault {
    const char* key;
    json value;
    const char* message;
  };
  const int64_t max = std::numeric_limits<int64_t>::max();
  const Fault faults[] = {
      {"dtype", 5, "a string"},
      {"dtype", "F33", "F33"},
      {"shape", "x", "a list"},
      {"shape", {3, 2, -8}, "-8"},
      {"shape", {3, 2, 8.0}, "8.0"},
      {"shape", {3, 2, 1e30}, "whole number"},
      {"shape", {max, max, max}, "below 2^63"},
      {"shape", {int64_t{1} << 62, 4, 4}, "below 2^63"},
      {"shape", {3, 2, 9}, "expected 216 bytes"},
      {"shape", std::vector<int>(40, 1), "dimensions"},
      {"data_offsets", {0}, "[begin, end]"},
      {"data_offsets", {192, 0}, "[begin, end]"},
      {"data_offsets", {0, max}, "[begin, end]"},
      {"data_offsets", {-1, 192}, "-1"},
      {"data_offsets", {0, uint64_t{1} << 63}, "9223372036854775808"},
      {"data_offsets", {4, 196}, "begin where the header ends"},
      {"extra", 1, "extra"},
  };
  for (const Fault& fault : faults) {
    Parts parts = paged_parts();
    parts.header["q"][fault.key] = fault.value;
    EXPECT_TRUE(refused(parts.bytes(), {"tensor", fault.message})) << fault.value.dump();
  }
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    Parts parts = paged_parts();
    parts.header["q"].erase(key);
    EXPECT_TRUE(refused(parts.bytes(), {"\"q\"", key}));
  }
  Parts parts = paged_parts();
  parts.header["qo_indptr"]["data_offsets"] = {188, 200};
  EXPECT_TRUE(refused(parts.bytes(), {"qo_indptr", "overlap", "188..200", "192"}));
  parts = paged_parts();
  parts.header["x_gap"] = {{"dtype", "U8"}, {"shape", {0}}, {"data_offsets", {0, 0}}};
  EXPECT_TRUE(reads(parts.bytes())) << "a tensor of no bytes covers nothing";
  parts.data += std::string(8, 'x');
  parts.header["x_far"] = {{"dtype", "U8"},
                           {"shape", {4}},
                           {"data_offsets", {parts.data.size() - 4, parts.data.size()}}};
  EXPECT_TRUE(refused(parts.bytes(), {"x_far", "expected to begin where"}));
}

TEST(CallFileFaults, HugeDimensionsBesideAZeroDoNotOverflow) {
  const int64_t huge = std::numeric_limits<int32_t>::max();
  Parts parts;
  parts.metadata() = ragged_parts().metadata();
  parts.put<float>("q", "F32", {0, huge, huge - 7}, {});
  parts.put<int32_t>("qo_indptr", "I32", {1}, {0});
  parts.put<float>("k", "F32", {0, huge, huge - 7}, {});
  parts.put<float>("v", "F32", {0, huge, huge - 7}, {});
  parts.put<int32_t>("kv_indptr", "I32", {1}, {0});
  EXPECT_TRUE(refused(parts.bytes(), {"tensor q", "2^60"}));
}

}  // namespace
}  // namespace attnfold::check
