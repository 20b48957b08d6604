// Call files: real ones read, every form reads, and what is written reads back.
#include "check/call_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>

#include "check/generate.h"
#include "unit/call_file_parts.h"

namespace attnfold::check {
namespace {

/** Up to the end of the last field: what lies behind it is padding. */
constexpr size_t kProblemBytes =
    offsetof(attnfold_problem, sparse_head_step) + sizeof(attnfold_problem::sparse_head_step);

const char* const kRealFiles[] = {
    "decode_page1_layer05", "decode_ragged_layer15", "mixed_head_major_f16_layer12",
    "mixed_layer29",        "prefill_layer00",       "shared_prefix_layer10",
    "verify_layer20",       "vllm_mixed_layer17"};

/** A path in the temporary directory that is removed with this object. */
class TemporaryFile {
 public:
  TemporaryFile() {
    static int count = 0;
    path_ = testing::TempDir() + "attnfold_call_file_test." + std::to_string(getpid()) + "." +
            std::to_string(count++);
  }
  ~TemporaryFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// ------------------------------------------------ real files

TEST(CallFile, EveryRealCallReads) {
  for (const char* name : kRealFiles) {
    const LoadResult result = load_call(real_path(name));
    ASSERT_TRUE(result.ok) << result.error;
    EXPECT_EQ(result.call.problem.qo_heads, 9);
    EXPECT_EQ(result.call.problem.kv_heads, 3);
    EXPECT_EQ(result.call.problem.head_dim_qk, 64);
    EXPECT_EQ(result.call.problem.sm_scale, 0.125f);
    EXPECT_NE(result.call.origin.find("SmolLM2"), std::string::npos) << name;
  }
}

TEST(CallFile, FieldsOfARealCallAreAsItsHeaderSays) {
  const LoadResult result = load_call(real_path("mixed_head_major_f16_layer12"));
  ASSERT_TRUE(result.ok) << result.error;
  const Call& call = result.call;
  EXPECT_EQ(call.batch, 4);
  EXPECT_EQ(call.num_rows(), 39);
  EXPECT_EQ(call.problem.kv_layout, ATTNFOLD_HND);
  EXPECT_EQ(call.problem.page_size, 64);
  EXPECT_EQ(call.problem.num_pages, 19);
  EXPECT_EQ(call.problem.q_dtype, ATTNFOLD_F16);
  EXPECT_EQ(call.problem.mask, ATTNFOLD_MASK_CAUSAL);
  EXPECT_EQ(call.block_table_stride, 7);
  EXPECT_EQ(call.k_strides.page, 3 * 64 * 64);
  EXPECT_EQ(call.k_strides.head, 64 * 64);
  EXPECT_EQ(call.k_strides.token, 64);
  EXPECT_EQ(call.recorded_lse.size(), 39u * 9);
  EXPECT_EQ(call.problem.max_qo_rows, 39);
  EXPECT_EQ(call.problem.max_kv_len, *std::max_element(call.kv_len.begin(), call.kv_len.end()));
  EXPECT_NE(call.recorded_by.find("numpy"), std::string::npos);
}

TEST(CallFile, ACallNeedsNoRecordedAnswerAndOneNeedsNoLse) {
  const LoadResult none = load_call(real_path("decode_page1_layer05"));
  ASSERT_TRUE(none.ok) << none.error;
  EXPECT_EQ(none.call.recorded_o, nullptr);
  EXPECT_TRUE(none.call.recorded_lse.empty());
  const LoadResult no_lse = load_call(real_path("vllm_mixed_layer17"));
  ASSERT_TRUE(no_lse.ok) << no_lse.error;
  EXPECT_NE(no_lse.call.recorded_o, nullptr);
  EXPECT_TRUE(no_lse.call.recorded_lse.empty());
}

// ------------------------------------------------ round trips

void expect_same_bytes(const std::shared_ptr<Buffer>& a, const std::shared_ptr<Buffer>& b) {
  ASSERT_EQ(a == nullptr, b == nullptr);
  if (a == nullptr) return;
  ASSERT_EQ(a->size(), b->size());
  EXPECT_EQ(std::memcmp(a->data(), b->data(), a->size()), 0);
}

TEST(CallFile, RealCallsSaveAndLoadUnchanged) {
  for (const char* name : kRealFiles) {
    SCOPED_TRACE(name);
    const LoadResult first = load_call(real_path(name));
    ASSERT_TRUE(first.ok) << first.error;
    const TemporaryFile file;
    ASSERT_EQ(save_call(first.call, file.path()), "");
    const LoadResult second = load_call(file.path());
    ASSERT_TRUE(second.ok) << second.error;
    const Call &a = first.call, &b = second.call;
    EXPECT_EQ(std::memcmp(&a.problem, &b.problem, kProblemBytes), 0);
    EXPECT_EQ(a.qo_indptr, b.qo_indptr);
    EXPECT_EQ(a.kv_len, b.kv_len);
    EXPECT_EQ(a.block_table, b.block_table);
    EXPECT_EQ(a.origin, b.origin);
    EXPECT_EQ(a.recorded_by, b.recorded_by);
    expect_same_bytes(a.q, b.q);
    expect_same_bytes(a.k, b.k);
    expect_same_bytes(a.v, b.v);
    expect_same_bytes(a.recorded_o, b.recorded_o);
    EXPECT_EQ(a.recorded_lse, b.recorded_lse);
  }
}

TEST(CallFile, DrawnCallsKeepTheirAnswerThroughAFile) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 rng(seed);
    Spec spec = random_spec(rng);
    spec.problem.qo_heads = 2 * (spec.problem.kv_heads = 2);
    spec.problem.head_dim_qk = 16;
    spec.problem.head_dim_vo = 8;
    const Call call = generate(spec, seed);
    const TemporaryFile file;
    ASSERT_EQ(save_call(call, file.path()), "");
    const LoadResult loaded = load_call(file.path());
    ASSERT_TRUE(loaded.ok) << loaded.error;
    const ref::Truth a = ref::answer(call), b = ref::answer(loaded.call);
    EXPECT_EQ(a.o, b.o);
    EXPECT_EQ(a.lse, b.lse);
    EXPECT_EQ(loaded.call.problem.kv_dtype, spec.problem.kv_dtype);
    EXPECT_EQ(loaded.call.problem.o_dtype == ATTNFOLD_E4M3, spec.problem.o_dtype == ATTNFOLD_E4M3);
    EXPECT_EQ(loaded.call.problem.k_scale_kind, spec.problem.k_scale_kind);
    EXPECT_EQ(loaded.call.problem.v_scale_kind, spec.problem.v_scale_kind);
    EXPECT_EQ(loaded.call.problem.v_in_k, spec.problem.v_in_k);
    if (spec.problem.o_dtype == ATTNFOLD_E4M3) {
      EXPECT_EQ(loaded.call.o_scale, spec.o_scale);
    }
    EXPECT_EQ(loaded.call.problem.window_left, spec.problem.window_left);
    EXPECT_EQ(loaded.call.problem.window_right, spec.problem.window_right);
  }
}

TEST(CallFile, AnAnswerSavesAsTheRecordedOne) {
  Spec spec;
  spec.problem.head_dim_qk = spec.problem.head_dim_vo = 8;
  spec.qo_len = {2};
  spec.kv_len = {3};
  const Call call = generate(spec, 1);
  Answer answer;
  answer.o = Buffer(2 * 8 * 2);
  for (size_t i = 0; i < answer.o.size(); ++i) answer.o.data()[i] = static_cast<std::byte>(i);
  answer.lse = {1.5f, -std::numeric_limits<float>::infinity()};
  answer.kernel = "some_kernel";
  const TemporaryFile file;
  ASSERT_EQ(save_answer(call, answer, file.path()), "");
  const LoadResult loaded = load_call(file.path());
  ASSERT_TRUE(loaded.ok) << loaded.error;
  ASSERT_NE(loaded.call.recorded_o, nullptr);
  EXPECT_EQ(std::memcmp(loaded.call.recorded_o->data(), answer.o.data(), answer.o.size()), 0);
  EXPECT_EQ(loaded.call.recorded_lse, answer.lse);
  EXPECT_NE(loaded.call.recorded_by.find("some_kernel"), std::string::npos);
}

TEST(CallFile, PathsThatAreNoFileAreNamed) {
  for (const std::string& path : {std::string("/no/such/file"), testing::TempDir()}) {
    const LoadResult result = load_call(path);
    EXPECT_FALSE(result.ok);
    EXPECT_NE(result.error.find(path), std::string::npos) << result.error;
  }
  EXPECT_NE(save_call(parse(paged_parts().bytes()).call, "/no/such/directory/file"), "");
}

// ------------------------------------------------ forms of a call

TEST(CallFile, AFileThatIsNoCallByItsHeaderIsNotReadWhole) {
  const TemporaryFile file;
  constexpr uint64_t kBytes = uint64_t{1} << 40;  // a hole, far more than there is memory
  for (const auto& [metadata, expected] :
       {std::pair("", "metadata format"),
        std::pair(R"("__metadata__":{"format":"attnfold-call-2"},)", "attnfold-call-2"),
        std::pair(R"("__metadata__":{"format":"attnfold-call-1"},)", "tensor")}) {
    std::string header = std::string("{") + metadata + R"("weight":{"dtype":"U8","shape":[)";
    const uint64_t length = header.size() + 60;
    const std::string data = std::to_string(kBytes - 8 - length);
    header += data + R"(],"data_offsets":[0,)" + data + "]}}";
    header.resize(length, ' ');
    {
      std::ofstream out(file.path(), std::ios::binary);
      for (int i = 0; i < 8; ++i) out.put(static_cast<char>(length >> (8 * i) & 0xff));
      out << header;
    }
    std::error_code error;
    std::filesystem::resize_file(file.path(), kBytes, error);
    if (error) GTEST_SKIP() << "no file of 2^40 bytes here: " << error.message();
    const LoadResult loaded = load_call(file.path());
    EXPECT_FALSE(loaded.ok);
    EXPECT_NE(loaded.error.find(expected), std::string::npos) << loaded.error;
  }
}

TEST(CallFile, BlockTableCsrAndRaggedFormsRead) {
  EXPECT_TRUE(reads(paged_parts().bytes()));
  EXPECT_TRUE(reads(csr_parts().bytes()));
  EXPECT_TRUE(reads(ragged_parts().bytes()));
  const LoadResult ragged = parse(ragged_parts().bytes());
  EXPECT_EQ(ragged.call.kv_len, (std::vector<int32_t>{5, 3})) << "kv_len is from kv_indptr";
  EXPECT_EQ(ragged.call.problem.head_dim_vo, 16);
  EXPECT_EQ(ref::answer(parse(csr_parts().bytes()).call).o,
            ref::answer(parse(paged_parts().bytes()).call).o);
}

TEST(CallFile, VisiblePrefixesAndMaskBitsRead) {
  for (Parts parts : {paged_parts(), csr_parts(), ragged_parts()}) {
    parts.put<int32_t>("visible_prefix", "I32", {2}, {2, 0});
    parts.put<int32_t>("mask_width", "I32", {2}, {3, 1});
    parts.put<uint8_t>("mask_bits", "U8", {3}, {0x3, 0x5, 0x0});
    const LoadResult result = parse(parts.bytes());
    ASSERT_TRUE(result.ok) << result.error;
    EXPECT_EQ(result.call.visible_prefix, (std::vector<int32_t>{2, 0}));
    EXPECT_EQ(result.call.mask_indptr, (std::vector<int64_t>{0, 2, 3}));
    EXPECT_TRUE(ref::visible(result.call, 0, 0, 3));
    EXPECT_FALSE(ref::visible(result.call, 0, 0, 4));
    EXPECT_FALSE(ref::visible(result.call, 0, 1, 3));
    EXPECT_TRUE(ref::visible(result.call, 0, 1, 4));
    EXPECT_FALSE(ref::visible(result.call, 1, 0, 2));
    expect_sane(result);
  }
}

TEST(CallFile, BlockListsAndPatternsRead) {
  for (Parts parts : {paged_parts(), csr_parts(), ragged_parts()}) {
    parts.metadata()["sparse_block_size"] = "2";
    Parts pattern = parts;
    parts.put<int32_t>("block_indptr", "I32", {3}, {0, 2, 3});
    parts.put<int32_t>("block_indices", "I32", {3}, {0, 2, 1});
    const LoadResult lists = parse(parts.bytes());
    ASSERT_TRUE(lists.ok) << lists.error;
    EXPECT_TRUE(ref::visible(lists.call, 0, 1, 1));
    EXPECT_FALSE(ref::visible(lists.call, 0, 1, 2));
    EXPECT_TRUE(ref::visible(lists.call, 0, 1, 4));
    EXPECT_FALSE(ref::visible(lists.call, 1, 0, 0));
    EXPECT_TRUE(ref::visible(lists.call, 1, 0, 2));
    expect_sane(lists);
    pattern.metadata()["sparse_local_blocks"] = "1";
    pattern.metadata()["sparse_vertical_stride"] = "3";
    const LoadResult drawn = parse(pattern.bytes());
    ASSERT_TRUE(drawn.ok) << drawn.error;
    EXPECT_EQ(drawn.call.problem.sparse_vertical_stride, 3);
    EXPECT_FALSE(ref::visible(drawn.call, 0, 1, 3));
    EXPECT_TRUE(ref::visible(drawn.call, 0, 1, 4)) << "the own block, and the third";
    expect_sane(drawn);
  }
}

TEST(CallFile, EmptyBatchReads) {
  Parts parts;
  parts.metadata() = paged_parts().metadata();
  parts.put<float>("q", "F32", {0, 2, 8}, {});
  parts.put<int32_t>("qo_indptr", "I32", {1}, {0});
  parts.put<float>("k_cache", "F32", {0, 2, 1, 8}, {});
  parts.put<float>("v_cache", "F32", {0, 2, 1, 8}, {});
  parts.put<int32_t>("block_table", "I32", {0, 3}, {});
  parts.put<int32_t>("kv_len", "I32", {0}, {});
  const LoadResult result = parse(parts.bytes());
  ASSERT_TRUE(result.ok) << result.error;
  EXPECT_EQ(result.call.batch, 0);
  expect_sane(result);
}

TEST(CallFile, RecordedLseOfBase2OrHeadMajorIsConverted) {
  Parts parts = paged_parts();
  parts.metadata()["lse_base"] = "2";
  parts.metadata()["lse_layout"] = "heads_rows";
  const float minus_inf = -std::numeric_limits<float>::infinity();
  parts.put<float>("lse", "F32", {2, 3}, {1, 2, 3, 4, minus_inf, 6});
  const LoadResult result = parse(parts.bytes());
  ASSERT_TRUE(result.ok) << result.error;
  const float ln2 = 0.69314718f;
  const std::vector<float> expected = {1, 4, 2, minus_inf, 3, 6};
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_FLOAT_EQ(result.call.recorded_lse[i], expected[i] * ln2) << i;
  }
}

TEST(CallFile, NotesAreIgnored) {
  Parts parts = paged_parts();
  parts.metadata()["x_remark"] = "whatever";
  parts.put<int64_t>("x_timestamps", "I64", {2}, {1, 2});
  EXPECT_TRUE(reads(parts.bytes()));
}

TEST(CallFile, EntriesThatNoRowLooksAtMeanNothing) {
  Parts parts = paged_parts();
  parts.overwrite<int32_t>("block_table", 5, -1);  // past request 1's two pages
  EXPECT_TRUE(reads(parts.bytes()));
  parts.overwrite<int32_t>("block_table", 4, kWild);
  EXPECT_TRUE(refused(parts.bytes(), {"block_table[4]", "0 to 5", std::to_string(kWild)}));
  parts = paged_parts();
  parts.metadata()["window_left"] = "0";
  parts.overwrite<int32_t>("block_table", 0, kWild);  // keys 0 and 1: before both tokens' windows
  EXPECT_TRUE(reads(parts.bytes()));
  parts.metadata()["window_left"] = "2";  // the first token stands at 3 and sees key 1
  EXPECT_TRUE(refused(parts.bytes(), {"block_table[0]"}));
}

}  // namespace
}  // namespace attnfold::check
