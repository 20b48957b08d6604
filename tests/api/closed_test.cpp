// A host that loads the library with a plug-in of its own, and closes it again.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <thread>

namespace attnfold::api_test {
namespace {

int num_listed() {
  int n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    ++n;
  return n;
}

/** Who has been joined may be listed a moment longer. */
int num_threads() {
  int least = num_listed();
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    least = std::min(least, num_listed());
  }
  return least;
}

TEST(Closed, ALibraryThatIsClosedLeavesNoThreadBehind) {
  std::thread([] {}).join();  // sanitizers have a thread of their own, from the first one on
  const int before = num_threads();
  for (int i = 0; i < 10; ++i) {
    void* plugin = dlopen(ATTNFOLD_TEST_PLUGIN, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(plugin, nullptr) << dlerror();
    const auto run = reinterpret_cast<int (*)(int)>(dlsym(plugin, "run_on_threads"));
    ASSERT_NE(run, nullptr);
    EXPECT_EQ(run(5), 0);
    EXPECT_EQ(num_threads(), before + 4);
    ASSERT_EQ(dlclose(plugin), 0);
    if (dlopen(ATTNFOLD_TEST_PLUGIN, RTLD_NOW | RTLD_NOLOAD) != nullptr)
      GTEST_SKIP() << "this system keeps what is closed";
    EXPECT_EQ(num_threads(), before);
  }
}

}  // namespace
}  // namespace attnfold::api_test
