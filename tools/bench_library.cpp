#include "bench_library.h"

#include <dlfcn.h>

#include <stdexcept>

namespace attnfold::tools {
namespace {

template <class Function>
void find(void* library, const char* name, Function* out) {
  *out = reinterpret_cast<Function>(dlsym(library, name));
  if (!*out) throw std::runtime_error(dlerror());  // which begins with the path
}

}  // namespace

void Library::check(attnfold_status status, const char* what) const {
  if (status != ATTNFOLD_OK)
    throw std::runtime_error((name.empty() ? "" : name + ": ") + what + ": " + last_error());
}

std::vector<Library> load_libraries(const std::vector<std::string>& paths) {
  std::vector<Library> all(1);
  for (const std::string& path : paths) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(dlerror());
    Library l;
    l.name = path.substr(path.rfind('/') + 1);
    find(library, "attnfold_plan_create", &l.plan_create);
    find(library, "attnfold_plan_destroy", &l.plan_destroy);
    find(library, "attnfold_plan_update", &l.plan_update);
    find(library, "attnfold_plan_workspace_bytes", &l.plan_workspace_bytes);
    find(library, "attnfold_plan_run", &l.plan_run);
    find(library, "attnfold_last_error", &l.last_error);
    all.push_back(l);
  }
  return all;
}

}  // namespace attnfold::tools
