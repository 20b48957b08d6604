// attnfold._core: the C interface on arrays.  The package's Python files give it names, defaults
// and documentation.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <string>

#include "arrays.h"
#include "cache.h"
#include "dlpack_abi.h"
#include "fields.h"
#include "plan.h"
#include "state.h"

namespace attnfold::python {
namespace {

/** Memory that this module owns and DLPack lends: for frameworks whose arrays cannot be written. */
nb::object new_dlpack(nb::tuple shape, int type) {
  struct Owned {
    dlpack::Managed managed;
    int64_t shape[kMaxDims];
  };
  constexpr auto free_managed = [](dlpack::Managed* m) {
    std::free(m->tensor.data);
    delete static_cast<Owned*>(m->context);
  };
  const size_t ndim = nb::len(shape);
  if (ndim > kMaxDims) raise_value("shape", "at most 5 axes", std::to_string(ndim));
  if (type < 0 || type > ATTNFOLD_E4M3)
    raise_value("dtype", "float32, float16, bfloat16 or float8_e4m3fn", type_name(type));
  auto memory = std::make_unique<Owned>();
  Owned* owned = memory.get();
  dlpack::Tensor& t = owned->managed.tensor;
  t.ndim = static_cast<int32_t>(ndim);
  int64_t n = 1;
  for (int i = 0; i < t.ndim; ++i)
    n *= owned->shape[i] = nb::cast<int64_t>(shape[static_cast<size_t>(i)]);
  const int bits = type == ATTNFOLD_F32 ? 32 : type == ATTNFOLD_E4M3 ? 8 : 16;
  const uint8_t code = type == ATTNFOLD_BF16   ? dlpack::kBFloat
                       : type == ATTNFOLD_E4M3 ? dlpack::kE4M3FN
                                               : dlpack::kFloat;
  t.data = std::aligned_alloc(64, static_cast<size_t>((n * bits / 8 + 64) / 64 * 64));
  if (!t.data) throw std::bad_alloc();
  t.device = {dlpack::kCpu, 0};
  t.dtype = {code, static_cast<uint8_t>(bits), 1};
  t.shape = owned->shape;
  owned->managed.context = owned;
  owned->managed.deleter = free_managed;
  PyObject* capsule = PyCapsule_New(&owned->managed, "dltensor", [](PyObject* c) {
    if (!PyCapsule_IsValid(c, "dltensor")) return;  // somebody took it over
    auto* m = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(c, "dltensor"));
    m->deleter(m);
  });
  memory.release();
  return nb::steal(capsule);
}

nb::list kernels() {
  nb::list rows;
  for (int32_t i = 0; i < attnfold_num_kernels(); ++i) {
    attnfold_kernel_info k{};
    k.struct_size = sizeof(k);
    raise_if_error(attnfold_get_kernel(i, &k));
    nb::dict d;
    d["name"] = k.name;
    d["isa"] = k.isa;
    d["q_dtypes"] = k.q_dtypes;
    d["kv_dtype"] = k.kv_dtype;
    d["numerics_id"] = k.numerics_id;
    d["available"] = k.available != 0;
    d["why_not"] = k.why_not;
    rows.append(d);
  }
  return rows;
}

std::string version() {
  const int v = attnfold_version();
  return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." +
         std::to_string(v % 100);
}

/** Shape and type of an array, for objects that know neither; raises TypeError for what is none. */
nb::tuple describe(const std::string& name, nb::handle object) {
  const Array a = read_anywhere(name.c_str(), object);
  nb::list shape;
  for (int i = 0; i < a.ndim; ++i) shape.append(a.shape[i]);
  return nb::make_tuple(nb::tuple(shape), type_text(a));
}

size_t data_pointer(nb::handle array) {
  return reinterpret_cast<size_t>(read_anywhere("array", array).data);
}

}  // namespace
}  // namespace attnfold::python

NB_MODULE(_core, m) {
  using namespace attnfold::python;
  nb::class_<Plan>(m, "Plan")
      .def(nb::init<nb::dict, nb::dict>(), nb::arg("problem"), nb::arg("execution"))
      .def("update", &Plan::update, nb::arg("lengths"), nb::arg("stream").none())
      .def("run", &Plan::run, nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(),
           nb::arg("o").none(), nb::arg("lse").none(), nb::arg("alibi_slopes").none(),
           nb::arg("sink_logits").none(), nb::arg("k_scale").none(), nb::arg("v_scale").none(),
           nb::arg("o_scale").none(), nb::arg("workspace").none(), nb::arg("stream").none())
      .def("forget", &Plan::forget)
      .def("report", &Plan::report)
      .def("problem", &Plan::problem)
      .def_prop_ro("workspace_bytes", &Plan::workspace_bytes)
      .def_prop_ro("kernel", &Plan::kernel)
      .def_prop_ro("numerics_id", &Plan::numerics_id)
      .def_prop_ro("cuda", &Plan::cuda)
      .def_prop_ro("device", &Plan::device);
  m.def("merge", &merge, nb::arg("states"), nb::arg("out"), nb::arg("row_mask").none(),
        nb::arg("execution"));
  m.def("convert_state", &convert_state, nb::arg("from_state"), nb::arg("to_state"),
        nb::arg("execution"));
  m.def("append", &append, nb::arg("pool"), nb::arg("k").none(), nb::arg("v").none(),
        nb::arg("slots").none(), nb::arg("execution"));
  m.def("copy_pages", &copy_pages, nb::arg("from_pool"), nb::arg("to_pool"),
        nb::arg("pairs").none(), nb::arg("execution"));
  m.def("slot_mapping", &slot_mapping, nb::arg("qo_indptr").none(), nb::arg("kv_len").none(),
        nb::arg("block_table").none(), nb::arg("kv_indptr").none(), nb::arg("kv_indices").none(),
        nb::arg("page_size").none(), nb::arg("num_pages").none(), nb::arg("positions").none(),
        nb::arg("num_slots").none(), nb::arg("slots").none(), nb::arg("execution"));
  m.def("map_to_kernel_pages", &map_to_kernel_pages, nb::arg("block_table").none(),
        nb::arg("block_size").none(), nb::arg("page_size").none(), nb::arg("num_blocks").none(),
        nb::arg("used").none());
  m.def("new_dlpack", &new_dlpack, nb::arg("shape"), nb::arg("dtype"));
  m.def("kernels", &kernels);
  m.def("version", &version);
  m.def("data_pointer", &data_pointer, nb::arg("array").none());
  m.def("describe", &describe, nb::arg("name"), nb::arg("array").none());
  m.def("int_of", &int_of, nb::arg("name"), nb::arg("value").none(), nb::arg("low"),
        nb::arg("high"));
  m.def("number_of", &double_of, nb::arg("name"), nb::arg("value").none());
}
