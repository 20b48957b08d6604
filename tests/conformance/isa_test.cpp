// Forcing an instruction set takes, is reported, and keeps the bits that equal numerics ids
// promise.
#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "conformance/suite.h"

namespace attnfold::check {
namespace {

std::vector<std::string> available_isas() {
  std::vector<std::string> isas;
  for (int32_t i = 0; i < attnfold_num_kernels(); ++i) {
    attnfold_kernel_info info{};
    info.struct_size = sizeof info;
    EXPECT_EQ(attnfold_get_kernel(i, &info), ATTNFOLD_OK);
    if (std::strncmp(info.name, "cpu_", 4) != 0) continue;  // a device's: not this backend's
    if (info.available && std::find(isas.begin(), isas.end(), info.isa) == isas.end())
      isas.push_back(info.isa);
  }
  return isas;
}

constexpr DType kTypes[] = {DType::f32,  DType::f16,  DType::bf16,
                            DType::e4m3, DType::e5m2, DType::i8};

/** 8-bit types with scales per token. */
Call call_of(DType type, uint64_t seed) {
  Spec spec =
      cases::make_spec({6, 2, 72, 64}, type, 16, cases::kCausal, {1, 3, 40}, {2300, 200, 90});
  if (is_8_bit(type))
    spec.problem.k_scale_kind = spec.problem.v_scale_kind = ATTNFOLD_SCALE_PER_TOKEN;
  return generate(spec, seed);
}

/** Kernel names read cpu_<isa>/.. */
bool is_of(const std::string& kernel, const std::string& isa) {
  return kernel.rfind("cpu_" + isa + "/", 0) == 0;
}

TEST(Isa, EnvironmentTakes) {
  const char* isa = std::getenv("ATTNFOLD_ISA");
  if (isa == nullptr || *isa == '\0') GTEST_SKIP() << "ATTNFOLD_ISA is not set";
  Answer answer;
  ATTNFOLD_ASSERT_HOLDS(
      cases::run(call_of(DType::bf16, test::seed()), cases::execution(test::context()), answer));
  EXPECT_TRUE(is_of(answer.kernel, isa)) << answer.kernel;
}

TEST(Isa, ExecutionTakesOverTheEnvironment) {
  const uint64_t seed = test::seed();
  for (const std::string& isa : available_isas()) {
    if (isa.find("_bf16") != std::string::npos) continue;  // serve bf16 alone: below
    for (DType type : kTypes) {
      Answer answer;
      ATTNFOLD_ASSERT_HOLDS(
          cases::run(call_of(type, seed), cases::execution({seed, isa.c_str()}), answer))
          << isa;
      EXPECT_TRUE(is_of(answer.kernel, isa)) << answer.kernel << " for " << isa;
    }
  }
}

TEST(Isa, UnknownAndUnavailableAreRefused) {
  const Call call = call_of(DType::bf16, test::seed());
  const RunResult result = run_engine(call, cases::execution({test::seed(), "mmx"}));
  EXPECT_NE(result.status, ATTNFOLD_OK);
  EXPECT_NE(result.error.find("isa"), std::string::npos) << result.error;
}

TEST(Isa, WeightsAreRoundedByDefaultWhereTheOutputIs) {
  const uint64_t seed = test::seed();
  const auto default_kernel = [&](DType o_type) {
    Spec spec =
        cases::make_spec({6, 2, 72, 64}, DType::bf16, 16, cases::kCausal, {1, 40}, {200, 90});
    spec.problem.o_dtype = static_cast<attnfold_dtype>(o_type);
    const RunResult result = run_engine(generate(spec, seed), cases::execution({seed, ""}));
    EXPECT_EQ(result.status, ATTNFOLD_OK) << result.error;
    return result.answer.kernel;
  };
  const std::string exact = default_kernel(DType::f32);
  std::string rounding = exact;  // the same row with rounded weights, if the machine has one
  for (const std::string& isa : available_isas())
    if (is_of(exact, isa.substr(0, isa.find("_p16"))) && isa.find("_p16") != std::string::npos)
      rounding = "cpu_" + isa + exact.substr(exact.find('/'));
  EXPECT_EQ(exact.find("_p16"), std::string::npos) << exact;
  EXPECT_EQ(default_kernel(DType::bf16), rounding);
  EXPECT_EQ(default_kernel(DType::e4m3), rounding);
}

TEST(Isa, EqualNumericsIdsGiveEqualBits) {
  const uint64_t seed = test::seed();
  for (DType type : kTypes) {
    const Call call = call_of(type, seed);
    const DType o_type = static_cast<DType>(call.problem.o_dtype);
    const ref::Truth truth = ref::answer(call);
    std::map<std::string, Answer> by_id;
    std::map<std::string, std::string> id_of;
    for (const std::string& isa : available_isas()) {
      Answer answer, again;
      const RunResult result = run_engine(call, cases::execution({seed, isa.c_str()}));
      if (result.status == ATTNFOLD_UNSUPPORTED) continue;
      ASSERT_EQ(result.status, ATTNFOLD_OK) << result.error;
      ATTNFOLD_ASSERT_HOLDS(cases::run(call, cases::execution({seed, isa.c_str()}, 5, 9), answer))
          << isa;
      ATTNFOLD_EXPECT_HOLDS(cases::same_bytes(call, result.answer, answer, isa + " twice"));
      const Judgement j = judge(call, truth, answer.o.data(), o_type, answer.lse.data(),
                                o_type == DType::f32 ? 0 : 1, bound_of(answer.numerics_id));
      EXPECT_TRUE(j.right) << isa << ": " << j.text;
      id_of[isa] = answer.numerics_id;
      const auto [at, is_new] = by_id.try_emplace(answer.numerics_id, std::move(answer));
      if (!is_new) {
        ATTNFOLD_EXPECT_HOLDS(
            cases::same_bytes(call, at->second, result.answer, isa + " and " + at->second.kernel));
      }
    }
    for (const char* isa : {"avx2", "avx512", "neon"}) {
      if (id_of.count(isa)) {
        EXPECT_EQ(id_of[isa], id_of["scalar"]) << "rows of FMA share one id";
      }
    }
  }
}

}  // namespace
}  // namespace attnfold::check
