// Starts the test programs.  Under ATTNFOLD_ISA, a machine that lacks that ISA skips the whole program, and says so; a name
// that no kernel row has is a failure.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "attnfold/attnfold.h"

namespace {

constexpr int kSkipped = 77;  // what CTest is told to read as "skipped"

/** 0, or the exit status with which to leave. */
int check_forced_isa() {
  const char* isa = std::getenv("ATTNFOLD_ISA");
  if (isa == nullptr || *isa == '\0') return 0;
  bool known = false;
  for (int32_t i = 0; i < attnfold_num_kernels(); ++i) {
    attnfold_kernel_info info{};
    info.struct_size = sizeof info;
    if (attnfold_get_kernel(i, &info) != ATTNFOLD_OK || std::string_view(info.isa) != isa) continue;
    if (info.available) return 0;
    if (!known) std::fprintf(stderr, "SKIPPED: ATTNFOLD_ISA=%s: %s\n", isa, info.why_not);
    known = true;
  }
  if (known) return kSkipped;
  std::fprintf(stderr, "ATTNFOLD_ISA=%s: no kernel row has this ISA\n", isa);
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (!GTEST_FLAG_GET(list_tests)) {
    if (const int status = check_forced_isa(); status != 0) return status;
  }
  return RUN_ALL_TESTS();
}
