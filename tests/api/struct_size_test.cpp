// Callers compiled with an older or a newer header: a struct's own size says which fields it has.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <vector>

#include "api/small_call.h"

namespace attnfold::api_test {
namespace {

/** `given` with `extra` bytes after it, all of one value. */
template <class T>
class Longer {
 public:
  Longer(const T& given, size_t extra, char fill) : bytes_(sizeof(T) + extra, fill) {
    std::memcpy(bytes_.data(), &given, sizeof(T));
    const size_t size = bytes_.size();
    std::memcpy(bytes_.data(), &size, sizeof(size));
  }
  T* get() { return reinterpret_cast<T*>(bytes_.data()); }

 private:
  std::vector<char> bytes_;
};

attnfold_status create(const attnfold_problem* problem, const attnfold_execution* e) {
  attnfold_plan* plan = nullptr;
  const attnfold_status status = attnfold_plan_create(problem, e, &plan);
  EXPECT_EQ(plan != nullptr, status == ATTNFOLD_OK);
  attnfold_plan_destroy(plan);
  return status;
}

TEST(StructSize, FieldsPastTheStatedSizeKeepTheirDefaults) {
  SmallCall call;
  call.problem.window_left = -77;  // not sound, and not to be read
  call.problem.struct_size = offsetof(attnfold_problem, window_left);
  EXPECT_EQ(create(&call.problem, nullptr), ATTNFOLD_OK) << attnfold_last_error();

  SmallCall sound;
  attnfold_execution e = execution(1, 1);
  e.isa = "no such instruction set";
  e.struct_size = offsetof(attnfold_execution, isa);
  EXPECT_EQ(create(&sound.problem, &e), ATTNFOLD_OK) << attnfold_last_error();

  const PlanPtr plan = make_plan(sound, execution(1, 1));
  sound.poison_outputs();
  sound.tensors.struct_size = offsetof(attnfold_tensors, lse);
  EXPECT_EQ(run(plan.get(), sound.tensors), ATTNFOLD_OK) << attnfold_last_error();
  EXPECT_FALSE(sound.o.is_poisoned());
  EXPECT_TRUE(sound.lse.is_poisoned());
}

TEST(StructSize, ANewerCallersFieldsMayBeThereIfTheyAreZero) {
  SmallCall call;
  Longer<attnfold_problem> problem(call.problem, 24, 0);
  Longer<attnfold_execution> e(execution(1, 1), 8, 0);
  EXPECT_EQ(create(problem.get(), e.get()), ATTNFOLD_OK) << attnfold_last_error();

  const PlanPtr plan = make_plan(call, execution(1, 1));
  Longer<attnfold_lengths> lengths(call.lengths, 16, 0);
  EXPECT_EQ(attnfold_plan_update(plan.get(), lengths.get(), nullptr), ATTNFOLD_OK)
      << attnfold_last_error();
  Longer<attnfold_tensors> tensors(call.tensors, 40, 0);
  EXPECT_EQ(run(plan.get(), *tensors.get()), ATTNFOLD_OK) << attnfold_last_error();
}

TEST(StructSize, ANewerCallersFieldsThatAreSetAreUnsupported) {
  SmallCall call;
  Longer<attnfold_problem> problem(call.problem, 24, 1);
  EXPECT_EQ(create(problem.get(), nullptr), ATTNFOLD_UNSUPPORTED);
  EXPECT_EQ(std::string(attnfold_last_error()).rfind("problem", 0), 0u) << attnfold_last_error();

  const PlanPtr plan = make_plan(call, execution(1, 1));
  Longer<attnfold_tensors> tensors(call.tensors, 8, 1);
  call.poison_outputs();
  EXPECT_EQ(run(plan.get(), *tensors.get()), ATTNFOLD_UNSUPPORTED);
  EXPECT_TRUE(call.outputs_untouched());
}

TEST(StructSize, ASizeThatNoVersionHasIsNamed) {
  for (const size_t size : {size_t{0}, size_t{7}, SIZE_MAX}) {
    SmallCall call;
    const PlanPtr plan = make_plan(call, execution(1, 1));
    call.poison_outputs();

    attnfold_problem problem = call.problem;
    problem.struct_size = size;
    EXPECT_EQ(create(&problem, nullptr), ATTNFOLD_INVALID_ARGUMENT);
    EXPECT_TRUE(names_argument(attnfold_last_error(), "problem.struct_size"));

    attnfold_execution e = execution(1, 1);
    e.struct_size = size;
    EXPECT_EQ(create(&call.problem, &e), ATTNFOLD_INVALID_ARGUMENT);
    EXPECT_TRUE(names_argument(attnfold_last_error(), "execution.struct_size"));

    attnfold_lengths lengths = call.lengths;
    lengths.struct_size = size;
    EXPECT_EQ(attnfold_plan_update(plan.get(), &lengths, nullptr), ATTNFOLD_INVALID_ARGUMENT);
    EXPECT_TRUE(names_argument(attnfold_last_error(), "lengths.struct_size"));

    attnfold_tensors tensors = call.tensors;
    tensors.struct_size = size;
    EXPECT_EQ(run(plan.get(), tensors), ATTNFOLD_INVALID_ARGUMENT);
    EXPECT_TRUE(names_argument(attnfold_last_error(), "tensors.struct_size"));
    EXPECT_TRUE(call.outputs_untouched());

    attnfold_plan_report report{};
    report.struct_size = size;
    EXPECT_EQ(attnfold_plan_get_report(plan.get(), &report), ATTNFOLD_INVALID_ARGUMENT);
    EXPECT_TRUE(names_argument(attnfold_last_error(), "report.struct_size"));

    attnfold_plan_item item{};
    item.struct_size = size;
    EXPECT_EQ(attnfold_plan_get_item(plan.get(), 0, &item), ATTNFOLD_INVALID_ARGUMENT);
    EXPECT_TRUE(names_argument(attnfold_last_error(), "item.struct_size"));

    attnfold_kernel_info info{};
    info.struct_size = size;
    EXPECT_EQ(attnfold_get_kernel(0, &info), ATTNFOLD_INVALID_ARGUMENT);
    EXPECT_TRUE(names_argument(attnfold_last_error(), "info.struct_size"));
  }
}

/** That `fill` writes only the bytes that the caller says it has. */
template <class T, class Fill>
void expect_writes_only(size_t size, Fill fill) {
  T out;
  std::memset(static_cast<void*>(&out), 0x5b, sizeof(out));
  out.struct_size = size;
  ASSERT_EQ(fill(&out), ATTNFOLD_OK) << attnfold_last_error();
  EXPECT_EQ(out.struct_size, size);
  const char* bytes = reinterpret_cast<const char*>(&out);
  for (size_t i = size; i < sizeof(out); ++i) ASSERT_EQ(bytes[i], 0x5b) << "byte " << i;
}

TEST(StructSize, AnOlderCallersOutputStructIsNotOverrun) {
  SmallCall call;
  const PlanPtr plan = make_plan(call, execution(2, 3));
  expect_writes_only<attnfold_plan_report>(
      offsetof(attnfold_plan_report, num_leaves),
      [&](attnfold_plan_report* r) { return attnfold_plan_get_report(plan.get(), r); });
  expect_writes_only<attnfold_plan_item>(
      offsetof(attnfold_plan_item, leaf_begin),
      [&](attnfold_plan_item* i) { return attnfold_plan_get_item(plan.get(), 0, i); });
  expect_writes_only<attnfold_kernel_info>(
      offsetof(attnfold_kernel_info, numerics_id),
      [&](attnfold_kernel_info* i) { return attnfold_get_kernel(0, i); });
}

}  // namespace
}  // namespace attnfold::api_test
