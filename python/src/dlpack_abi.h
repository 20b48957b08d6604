// The binary layout of DLPack 1 (https://dmlc.github.io/dlpack): tensors, and the table of
// functions by which a framework describes one without a Python call.
#ifndef ATTNFOLD_PYTHON_DLPACK_ABI_H_
#define ATTNFOLD_PYTHON_DLPACK_ABI_H_

#include <cstdint>

namespace attnfold::python::dlpack {

constexpr int32_t kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13;
constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kBool = 6, kE4M3FN = 10, kE5M2 = 12;
constexpr uint64_t kReadOnly = 1;

struct Device {
  int32_t type, id;
};

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; NULL: packed
  uint64_t byte_offset;
};

/** What a capsule "dltensor" holds. */
struct Managed {
  Tensor tensor;
  void* context;
  void (*deleter)(Managed*);
};

struct Version {
  uint32_t major, minor;
};

/** What a capsule "dltensor_versioned" holds. */
struct ManagedVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedVersioned*);
  uint64_t flags;
  Tensor tensor;
};

/** What a type's capsule "dlpack_exchange_api" holds, as far as it is used. */
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  /** Fills a view that lives as long as the object; 0 on success, else a Python error is set. */
  int (*view_of_object)(void* object, Tensor* out);
};

}  // namespace attnfold::python::dlpack

#endif  // ATTNFOLD_PYTHON_DLPACK_ABI_H_
