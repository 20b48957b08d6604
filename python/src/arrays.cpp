// How an object becomes an array, in this order: numpy's array interface (which also describes the
// types of ml_dtypes), the function table of DLPack (torch), `__dlpack__` (everybody else).
#include "arrays.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "dlpack_abi.h"

namespace attnfold::python {
namespace {

/** What numpy's `__array_struct__` points at. */
struct ArrayInterface {
  int two, ndim;
  char kind;
  int item_bytes, flags;
  Py_intptr_t *shape, *strides;  // in bytes
  void* data;
  PyObject* descr;
};
constexpr int kNumpyNative = 0x200, kNumpyWriteable = 0x400;

int type_of_name(const char* name) {
  constexpr std::pair<const char*, int> kNames[] = {{"float32", ATTNFOLD_F32},
                                                    {"float16", ATTNFOLD_F16},
                                                    {"bfloat16", ATTNFOLD_BF16},
                                                    {"float8_e4m3fn", ATTNFOLD_E4M3},
                                                    {"float8_e5m2", ATTNFOLD_E5M2},
                                                    {"int8", ATTNFOLD_I8},
                                                    {"int32", kInt32},
                                                    {"int64", kInt64},
                                                    {"uint8", kUInt8},
                                                    {"bool", kBool}};
  for (const auto& [known, type] : kNames) {
    if (std::strcmp(name, known) == 0) return type;
  }
  return kOther;
}

int type_of_dlpack(const dlpack::DataType& t) {
  if (t.lanes != 1) return kOther;
  switch (t.code) {
    case dlpack::kFloat:
      return t.bits == 32 ? int{ATTNFOLD_F32} : t.bits == 16 ? int{ATTNFOLD_F16} : int{kOther};
    case dlpack::kBFloat: return ATTNFOLD_BF16;
    case dlpack::kE4M3FN: return ATTNFOLD_E4M3;
    case dlpack::kE5M2: return ATTNFOLD_E5M2;
    case dlpack::kInt:
      return t.bits == 8    ? int{ATTNFOLD_I8}
             : t.bits == 32 ? int{kInt32}
             : t.bits == 64 ? int{kInt64}
                            : int{kOther};
    case dlpack::kUInt: return t.bits == 8 ? kUInt8 : kOther;
    case dlpack::kBool: return t.bits == 8 ? kBool : kOther;
    default: return kOther;
  }
}

/** Small caches keyed by an object that is kept alive for good; guarded by the GIL. */
template <class Value>
struct Cache {
  std::vector<std::pair<PyObject*, Value>> entries;
  const Value* find(PyObject* key) const {
    for (const auto& [known, value] : entries) {
      if (known == key) return &value;
    }
    return nullptr;
  }
  Value add(PyObject* key, Value value) {
    if (entries.size() < 64) {
      Py_INCREF(key);
      entries.emplace_back(key, value);
    }
    return value;
  }
};

bool is_float(int type) { return type >= ATTNFOLD_F32 && type <= ATTNFOLD_E5M2; }

int type_of_numpy(nb::handle object) {
  static Cache<int> cache;
  const nb::object dtype = object.attr("dtype");
  if (const int* known = cache.find(dtype.ptr())) return *known;
  const nb::str name(dtype.attr("name"));
  const int type = type_of_name(name.c_str());
  return type == kOther ? type : cache.add(dtype.ptr(), type);
}

/** The name of a type that type_of_dlpack does not know. */
std::string name_of_dlpack(const dlpack::DataType& t) {
  const char* kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  const std::string kind =
      t.code < 7 ? kinds[t.code] : "DLPack type " + std::to_string(t.code) + " of ";
  return kind + std::to_string(t.bits) + (t.lanes == 1 ? "" : "x" + std::to_string(t.lanes));
}

/**
 * A type of numpy, looked up once into `*kept`, which is NULL at first.
 * NOTE: no `static` with an initialiser.  Python code may let another thread run, which would wait
 * for the static's guard with the GIL held.
 */
PyTypeObject* numpy_type(const char* name, PyObject** kept) {
  if (!*kept) {
    PyObject* type = nb::object(nb::module_::import_("numpy").attr(name)).release().ptr();
    if (!*kept) *kept = type;  // two threads may come here, and find the same one
  }
  return reinterpret_cast<PyTypeObject*>(*kept);
}

PyTypeObject* numpy_array() {
  static PyObject* kept = nullptr;
  return numpy_type("ndarray", &kept);
}

bool is_numpy(nb::handle object) { return PyObject_TypeCheck(object.ptr(), numpy_array()); }

/** numpy's subclass whose mask neither the array interface nor the engine knows.  Its module is not
 * imported for that: without it there is no such array. */
bool is_masked(nb::handle object) {
  if (!is_numpy(object) || Py_IS_TYPE(object.ptr(), numpy_array())) return false;
  const nb::str name("numpy.ma");
  const nb::object module = nb::steal(PyImport_GetModule(name.ptr()));
  if (!module.is_valid()) {
    if (PyErr_Occurred()) throw nb::python_error();
    return false;
  }
  const nb::object masked = nb::getattr(module, "MaskedArray", nb::none());
  if (masked.is_none()) return false;
  const int is = PyObject_IsInstance(object.ptr(), masked.ptr());
  if (is < 0) throw nb::python_error();
  return is == 1;
}

void check_unmasked(const char* name, nb::handle object) {
  if (is_masked(object)) raise_value(name, "an array without a mask", "a masked array");
}

[[noreturn]] void raise_no_array(const char* name, nb::handle object) {
  throw nb::type_error((std::string(name) +
                        ": expected an array (numpy, or with __dlpack__), got " +
                        type_of_object(object))
                           .c_str());
}

/** An exporter's refusal (no memory behind it, a type that DLPack lacks, another device) as an
 * error that names the argument; its own is the cause. */
[[noreturn]] void raise_refused(const char* name, const char* expected, nb::handle object,
                                nb::python_error& error) {
  if (!error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError)) throw error;
  std::string why = nb::str(error.value()).c_str();
  why.resize(std::min(why.size(), why.find('\n')));
  nb::raise_from(error, PyExc_ValueError, "%s: expected %s, got %s: %s", name, expected,
                 type_of_object(object), why.c_str());
}

void check_ndim(const char* name, int ndim) {
  if (ndim > kMaxDims) raise_value(name, "an array of at most 5 axes", std::to_string(ndim));
}

Array read_numpy(const char* name, nb::handle object) {
  Array a;
  check_unmasked(name, object);
  const nb::object capsule = object.attr("__array_struct__");
  const auto* in = static_cast<const ArrayInterface*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (!in) throw nb::python_error();
  check_ndim(name, in->ndim);
  a.ndim = in->ndim;
  a.type = type_of_numpy(object);
  if (a.type == kOther) {
    const nb::object dtype = object.attr("dtype");
    a.other = nb::str(nb::handle(dtype)).c_str();
    if (in->item_bytes <= 0) raise_value(name, "elements of at least one byte", a.other);
  } else if (!(in->flags & kNumpyNative)) {
    raise_value(name, "elements in native byte order", "swapped ones");
  }
  for (int i = 0; i < a.ndim; ++i) {
    a.shape[i] = in->shape[i];
    if (in->strides[i] % in->item_bytes != 0 && in->shape[i] > 1) {
      raise_value(name, "strides of whole elements", std::to_string(in->strides[i]) + " bytes");
    }
    a.strides[i] = in->strides[i] / in->item_bytes;
  }
  a.data = in->data;
  a.read_only = !(in->flags & kNumpyWriteable);
  a.holder = nb::borrow(object);
  return a;
}

void fill_from_dlpack(const char* name, const dlpack::Tensor& t, Array* a) {
  check_ndim(name, t.ndim);
  a->ndim = t.ndim;
  a->type = type_of_dlpack(t.dtype);
  if (a->type == kOther) a->other = name_of_dlpack(t.dtype);
  a->data = static_cast<char*>(t.data) + t.byte_offset;
  if (!t.data) a->data = nullptr;
  int64_t packed = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    a->shape[i] = t.shape[i];
    a->strides[i] = t.strides ? t.strides[i] : packed;
    packed *= t.shape[i];
  }
  a->cuda = t.device.type == dlpack::kCuda || t.device.type == dlpack::kCudaManaged;
  a->device = t.device.id;
  if (!a->cuda && t.device.type != dlpack::kCpu && t.device.type != dlpack::kCudaHost) {
    raise_value(name, "memory of the CPU or of a CUDA device",
                "DLPack device type " + std::to_string(t.device.type));
  }
}

const dlpack::ExchangeApi* exchange_api(nb::handle object) {
  static Cache<const dlpack::ExchangeApi*> cache;
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
  if (const auto* known = cache.find(type)) return *known;
  const dlpack::ExchangeApi* api = nullptr;
  const nb::object capsule = nb::getattr(nb::handle(type), "__dlpack_c_exchange_api__", nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
    api = static_cast<const dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (api && api->version.major != 1) api = api->previous;
    if (api && !api->view_of_object) api = nullptr;
  }
  return api ? cache.add(type, api) : api;  // classes of a user's module must be free to go
}

std::string place_text(bool cuda, int32_t device) {
  return cuda ? "cuda:" + std::to_string(device) : "the CPU";
}

void check_place(const char* name, const Array& a, const Place& place) {
  if (a.cuda == place.cuda && (!a.cuda || a.device == place.device)) return;
  raise_value(name, "memory of " + place_text(place.cuda, place.device) + ", where the call runs",
              "memory of " + place_text(a.cuda, a.device));
}

/** Asks for a capsule.  On CUDA the owner makes `place`'s stream wait for what it has under way;
 * the protocol calls the default stream 1. */
nb::object capsule_of(const char* name, nb::handle object, nb::handle method, const Place* place) {
  nb::dict how;
  how["max_version"] = nb::make_tuple(1, 0);
  if (place && place->cuda) {
    const nb::object device = object.attr("__dlpack_device__")();
    const int type = nb::cast<int>(nb::int_(device[0]));
    Array a;
    a.cuda = type == dlpack::kCuda || type == dlpack::kCudaManaged;
    a.device = nb::cast<int32_t>(nb::int_(device[1]));
    check_place(name, a, *place);
    how["stream"] = place->stream ? reinterpret_cast<uintptr_t>(place->stream) : uintptr_t{1};
  }
  try {
    return method(**how);
  } catch (nb::python_error& e) {  // an exporter of the time before versions
    if (!e.matches(PyExc_TypeError)) throw;
  }
  PyDict_DelItemString(how.ptr(), "max_version");
  return method(**how);
}

Array read_dlpack(const char* name, nb::handle object, const Place* place) {
  constexpr const char* kLent = "an array whose memory DLPack can lend";
  Array a;
  if (const dlpack::ExchangeApi* api = exchange_api(object)) {
    dlpack::Tensor view;
    if (api->view_of_object(object.ptr(), &view) != 0) {
      nb::python_error error;
      raise_refused(name, kLent, object, error);
    }
    fill_from_dlpack(name, view, &a);
    a.holder = nb::borrow(object);
    return a;
  }
  nb::object method = nb::getattr(object, "__dlpack__", nb::none());
  if (method.is_none() || PyType_Check(object.ptr())) raise_no_array(name, object);
  nb::object capsule;
  try {
    capsule = capsule_of(name, object, method, place);
  } catch (nb::python_error& error) {
    raise_refused(name, kLent, object, error);
  }
  // Nobody takes the capsule over: its destructor gives the memory back when the array is done
  // with.
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    const auto* m = static_cast<dlpack::ManagedVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (m->version.major != 1)
      raise_value(name, "DLPack version 1", std::to_string(m->version.major));
    fill_from_dlpack(name, m->tensor, &a);
    a.read_only = m->flags & dlpack::kReadOnly;
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    fill_from_dlpack(
        name,
        static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"))->tensor, &a);
  } else {
    raise_value(name, "a DLPack capsule", "another object from __dlpack__");
  }
  a.holder = std::move(capsule);
  return a;
}

template <class To, class From>
void convert(const char* name, const Array& a, std::vector<To>* out) {
  out->reserve(1);  // so that data() is not NULL, which would mean that nothing was given
  out->resize(static_cast<size_t>(a.size()));
  const int64_t columns = a.ndim == 2 ? a.shape[1] : 1, step = a.ndim == 2 ? a.strides[1] : 0;
  for (int64_t i = 0, at = 0; i < a.shape[0]; ++i) {
    for (int64_t j = 0; j < columns; ++j, ++at) {
      const From value = static_cast<const From*>(a.data)[i * a.strides[0] + j * step];
      if (static_cast<From>(static_cast<To>(value)) != value) {
        raise_value(std::string(name) + "[" + std::to_string(at) + "]", "a number of 32 bits",
                    std::to_string(value));
      }
      (*out)[static_cast<size_t>(at)] = static_cast<To>(value);
    }
  }
}

}  // namespace

void raise_if_error(attnfold_status status, Renames renames) {
  if (status == ATTNFOLD_OK) return;
  PyObject* type = PyExc_RuntimeError;
  if (status == ATTNFOLD_INVALID_ARGUMENT) type = PyExc_ValueError;
  if (status == ATTNFOLD_UNSUPPORTED) type = PyExc_NotImplementedError;
  if (status == ATTNFOLD_OUT_OF_WORKSPACE) type = PyExc_MemoryError;
  std::string text = attnfold_last_error();
  for (const auto& [theirs, ours] : renames) {
    if (text.compare(0, std::strlen(theirs), theirs) != 0) continue;
    text.replace(0, std::strlen(theirs), ours);
    break;
  }
  PyErr_SetString(type, text.c_str());
  throw nb::python_error();
}

const char* type_of_object(nb::handle object) {
  const char* name = Py_TYPE(object.ptr())->tp_name;
  const char* dot = std::strrchr(name, '.');
  return dot ? dot + 1 : name;
}

void raise_value(const std::string& name, const std::string& expected, const std::string& got) {
  throw nb::value_error((name + ": expected " + expected + ", got " + got).c_str());
}

int64_t Array::size() const {
  int64_t n = 1;
  for (int i = 0; i < ndim; ++i) n *= shape[i];
  return n;
}

bool Array::packed() const {
  if (size() == 0) return true;  // whatever strides its framework writes down
  int64_t expected = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

Array read_anywhere(const char* name, nb::handle object) {
  return is_numpy(object) ? read_numpy(name, object) : read_dlpack(name, object, nullptr);
}

Array read_array(const char* name, nb::handle object, const Place& place, Access access) {
  Array a = is_numpy(object) ? read_numpy(name, object) : read_dlpack(name, object, &place);
  check_place(name, a, place);
  // Some frameworks give no address where there is no element; to the C interface NULL is "not
  // given".
  alignas(64) static char nowhere[64];
  if (!a.data && a.size() == 0) a.data = nowhere;
  if (access == Access::kWrite) {
    // jax arrays are immutable, but not all versions of it say so.
    const nb::object module =
        nb::getattr(nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()))), "__module__");
    if (a.read_only || std::strncmp(nb::str(module).c_str(), "jaxlib", 6) == 0) {
      raise_value(name, "an array that may be written", "a read-only one");
    }
  }
  return a;
}

bool is_number(nb::handle object) {
  if (PyFloat_Check(object.ptr()) || PyLong_Check(object.ptr())) return true;
  static PyObject *generic = nullptr, *floating = nullptr, *integer = nullptr;
  if (!PyObject_TypeCheck(object.ptr(), numpy_type("generic", &generic))) return false;
  return PyObject_TypeCheck(object.ptr(), numpy_type("floating", &floating)) ||
         PyObject_TypeCheck(object.ptr(), numpy_type("integer", &integer)) ||
         is_float(type_of_numpy(object));  // those of ml_dtypes
}

void check_type(const char* name, const Array& a, int type) {
  if (a.type != type)
    raise_value(name, std::string("elements of ") + type_name(type), type_text(a));
}

const char* type_name(int type) {
  switch (type) {
    case ATTNFOLD_F32: return "float32";
    case ATTNFOLD_F16: return "float16";
    case ATTNFOLD_BF16: return "bfloat16";
    case ATTNFOLD_E4M3: return "float8_e4m3fn";
    case ATTNFOLD_E5M2: return "float8_e5m2";
    case ATTNFOLD_I8: return "int8";
    case kInt32: return "int32";
    case kInt64: return "int64";
    case kUInt8: return "uint8";
    case kBool: return "bool";
    default: return "another type";
  }
}

std::string type_text(const Array& a) { return a.type == kOther ? a.other : type_name(a.type); }

std::string shape_text(const Array& a) {
  std::string text = "[";
  for (int i = 0; i < a.ndim; ++i) text += (i ? ", " : "") + std::to_string(a.shape[i]);
  return text + "]";
}

void check_shape(const char* name, const Array& a, const std::vector<int64_t>& shape) {
  bool same = a.ndim == static_cast<int>(shape.size());
  std::string text = "shape [";
  for (size_t i = 0; i < shape.size(); ++i) {
    same = same && (shape[i] < 0 || a.shape[i] == shape[i]);
    text += (i ? ", " : "") + (shape[i] < 0 ? std::string("any") : std::to_string(shape[i]));
  }
  if (!same) raise_value(name, text + "]", shape_text(a));
}

int64_t stride_of(const char* name, const Array& a, int axis) {
  if (a.shape[axis] <= 1 || a.size() == 0) return 0;
  if (a.strides[axis] == 0) {
    raise_value(name, "each element in a place of its own",
                "axis " + std::to_string(axis) + " repeated (stride 0)");
  }
  return a.strides[axis];
}

void check_rows_contiguous(const char* name, const Array& a) {
  const int last = a.ndim - 1;
  if (a.shape[last] > 1 && a.strides[last] != 1 && a.size() > 0) {
    raise_value(name, "a contiguous last axis", "stride " + std::to_string(a.strides[last]));
  }
}

Integers read_integers(const char* name, nb::handle object, int ndim, int type, const Place& place,
                       Rows rows) {
  Array a;
  if (is_numpy(object) || nb::hasattr(object, "__dlpack__")) {
    a = read_array(name, object, place);
  } else {
    if (PyList_Check(object.ptr()) || PyTuple_Check(object.ptr())) {  // whose masks asarray drops
      for (nb::handle row : object) check_unmasked(name, row);
    }
    nb::object list;
    try {
      list = nb::module_::import_("numpy").attr("asarray")(object);
    } catch (nb::python_error& error) {  // rows of several lengths
      raise_refused(name, "an array or a list of integers", object, error);
    }
    if (nb::cast<int>(list.attr("ndim")) == 0) {
      throw nb::type_error((std::string(name) + ": expected an array or a list of integers, got " +
                            type_of_object(object))
                               .c_str());
    }
    if (nb::cast<int64_t>(list.attr("size")) == 0) {
      list = list.attr("astype")(type_name(type));  // numpy makes floats of nothing
      if (ndim == 2 && nb::cast<int>(list.attr("ndim")) == 1) list = list.attr("reshape")(0, 0);
    }
    a = read_array(name, list, place);
  }
  check_shape(name, a, std::vector<int64_t>(static_cast<size_t>(ndim), -1));
  Integers out;
  if (type == kUInt8 && a.type == kBool) {  // one bit a byte, which would be read as eight
    raise_value(name, "packed bits, of uint8 (numpy.packbits(.., bitorder=\"little\"))", "bool");
  }
  const bool in_place = a.type == type;
  const bool rows_packed =
      a.packed() || (ndim == 2 && rows == Rows::kStrided &&
                     (a.shape[1] <= 1 || a.strides[1] == 1) && a.strides[0] > 0);
  for (int i = 0; i < ndim; ++i) out.shape[i] = a.shape[i];
  // Rows without entries follow one another, too: 0 would say that all requests have the same row.
  const int64_t packed_stride = ndim == 2 ? std::max<int64_t>(a.shape[1], 1) : 1;
  out.stride = ndim == 2 && !a.packed() ? a.strides[0] : packed_stride;
  if (in_place && rows_packed) {
    out.data = a.data;
    out.holder = std::move(a.holder);
    return out;
  }
  const bool integer = a.type == kInt32 || a.type == kInt64;
  if (place.cuda || type == kUInt8 || !integer) {
    raise_value(name, std::string("a packed array of ") + type_name(type),
                in_place ? "one with strides" : type_text(a));
  }
  if (type == kInt32) {
    a.type == kInt32 ? convert<int32_t, int32_t>(name, a, &out.converted32)
                     : convert<int32_t, int64_t>(name, a, &out.converted32);
    out.data = out.converted32.data();
  } else {
    a.type == kInt32 ? convert<int64_t, int32_t>(name, a, &out.converted64)
                     : convert<int64_t, int64_t>(name, a, &out.converted64);
    out.data = out.converted64.data();
  }
  out.stride = packed_stride;
  return out;
}

}  // namespace attnfold::python
