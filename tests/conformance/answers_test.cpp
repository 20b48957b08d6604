// Answers have the bits that answers.txt records for their numerics id, on every machine.
//
// A change that is meant to alter bits needs a new id, and new lines: each failure prints the one
// that would pass.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <random>

#include "check/call_file.h"
#include "conformance/suite.h"

namespace attnfold::check {
namespace {

constexpr const char* kRecorded[] = {
    "decode_page1_layer05", "decode_ragged_layer15", "mixed_head_major_f16_layer12",
    "mixed_layer29",        "prefill_layer00",       "shared_prefix_layer10",
    "verify_layer20",       "vllm_mixed_layer17"};
constexpr uint64_t kNumRandom = 64;

Call recorded_call(const std::string& name) {
  LoadResult loaded = load_call(std::string(ATTNFOLD_TEST_DATA_DIR) + "/" + name + ".safetensors");
  EXPECT_TRUE(loaded.ok) << loaded.error;
  return std::move(loaded.call);
}

/** Ragged, with every mask and type, and with NaN in all that must not be read. */
Call random_call(uint64_t seed) {
  std::mt19937_64 rng(seed);
  Spec spec = random_spec(rng);
  spec.uniform = true;
  return generate(spec, seed);
}

/** FNV-1a of o and lse. */
std::string digest_of(const Answer& answer) {
  uint64_t hash = 0xcbf29ce484222325u;
  const auto add = [&](const void* data, size_t bytes) {
    const unsigned char* p = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) hash = (hash ^ p[i]) * 0x100000001b3u;
  };
  add(answer.o.data(), answer.o.size());
  add(answer.lse.data(), answer.lse.size() * sizeof(float));
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

/** What answers.txt says: digest by "call id". */
std::map<std::string, std::string> read_digests() {
  std::ifstream file(std::string(ATTNFOLD_TEST_DATA_DIR) + "/../conformance/answers.txt");
  std::map<std::string, std::string> digests;
  for (std::string call, id, digest; file >> call >> id >> digest;)
    digests[call + " " + id] = digest;
  return digests;
}

/** Holds answers to the file, and counts those of ids that it has. */
class Comparison {
 public:
  void answer(const std::string& name, const Call& call) {
    ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution(test::context(), 3), answer_));
    const std::string& id = answer_.numerics_id;
    if (id.rfind("cpu-fma-1/", 0) != 0 && id.rfind("cpu-amx-", 0) != 0 && id != "cpu-dpbf16-2/bf16")
      return;
    const std::string call_and_id = name + " " + answer_.numerics_id, digest = digest_of(answer_);
    EXPECT_EQ(digest, digests_[call_and_id])
        << "by " << answer_.kernel << "; the line: " << call_and_id << " " << digest;
    ++num_compared_;
  }
  const Answer& last() const { return answer_; }
  int num_compared() const { return num_compared_; }

 private:
  std::map<std::string, std::string> digests_ = read_digests();
  Answer answer_;
  int num_compared_ = 0;
};

TEST(Answers, OfRecordedCalls) {
  Comparison comparison;
  for (const char* name : kRecorded) {
    const Call call = recorded_call(name);
    comparison.answer(name, call);
    ATTNFOLD_EXPECT_HOLDS(cases::judge_answer(call, comparison.last())) << name;
  }
  EXPECT_GT(comparison.num_compared(), 0);
}

TEST(Answers, OfRandomCalls) {
  Comparison comparison;
  for (uint64_t seed = 0; seed < kNumRandom; ++seed)
    comparison.answer("random/" + std::to_string(seed), random_call(seed));
  EXPECT_GT(comparison.num_compared(), 32);
}

}  // namespace
}  // namespace attnfold::check
