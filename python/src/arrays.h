// Arrays of numpy and of whoever speaks DLPack, as pointers and strides: nothing is copied.
#ifndef ATTNFOLD_PYTHON_ARRAYS_H_
#define ATTNFOLD_PYTHON_ARRAYS_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "attnfold/attnfold.h"

namespace attnfold::python {

namespace nb = nanobind;

/** How names of the C interface begin, and what that is in Python; the first one that fits is
 * taken. */
using Renames = std::initializer_list<std::pair<const char*, const char*>>;

/** Raises what a status stands for: ValueError, NotImplementedError, MemoryError or RuntimeError,
 * with the engine's words. */
void raise_if_error(attnfold_status status, Renames renames = {});

/** The name of an object's type, without its module. */
const char* type_of_object(nb::handle object);

/** Raises a ValueError of the engine's form. */
[[noreturn]] void raise_value(const std::string& name, const std::string& expected,
                              const std::string& got);

constexpr int kMaxDims = 5;

/** Element types: attnfold_dtype, and those of lengths. */
enum ElementType : int { kInt32 = 16, kInt64 = 17, kUInt8 = 18, kBool = 19, kOther = -1 };

/** Which memory a call works on, and on CUDA in which stream. */
struct Place {
  bool cuda = false;
  int32_t device = 0;
  void* stream = nullptr;
};

struct Array {
  void* data = nullptr;
  int ndim = 0;
  int64_t shape[kMaxDims] = {}, strides[kMaxDims] = {};  // in elements
  int type = kOther;
  std::string other;  // what the framework calls the type, if kOther
  bool cuda = false;
  int32_t device = 0;
  bool read_only = false;
  nb::object holder;  // what keeps the memory alive

  int64_t size() const;
  bool packed() const;
};

enum class Access { kRead, kWrite };

/** The array behind `object`, wherever it lies; raises ValueError (a device that is not served),
 * TypeError. */
Array read_anywhere(const char* name, nb::handle object);

/** The array behind `object`, ready for work of the place's stream; raises ValueError too if it
 * lies elsewhere, or is to be written and may not be. */
Array read_array(const char* name, nb::handle object, const Place& place,
                 Access access = Access::kRead);

/** A Python float or int, or a scalar of a number type of numpy or ml_dtypes. */
bool is_number(nb::handle object);

/** Raises unless the array has this element type. */
void check_type(const char* name, const Array& array, int type);

/** Raises unless the array has this shape; -1 stands for any extent. */
void check_shape(const char* name, const Array& array, const std::vector<int64_t>& shape);

/**
 * A stride as the C interface takes it: 0 for an axis of one element (packed, never used), else as
 * it is; raises for a repeated axis, whose stride of 0 the interface would read as packed.
 */
int64_t stride_of(const char* name, const Array& array, int axis);

/** Raises unless the last axis is contiguous. */
void check_rows_contiguous(const char* name, const Array& array);

const char* type_name(int type);
/** What the elements are: also of types that nothing here takes. */
std::string type_text(const Array& array);
std::string shape_text(const Array& array);

/**
 * An array of lengths: used in place if it has the wanted type and is packed (block tables: packed
 * rows), else converted on the host.  Python lists are taken too; [] is none of whatever it is.
 */
struct Integers {
  const void* data = nullptr;
  int64_t shape[2] = {}, stride = 0;  // stride: from row to row, of two axes
  nb::object holder;
  std::vector<int32_t> converted32;
  std::vector<int64_t> converted64;

  const int32_t* i32() const { return static_cast<const int32_t*>(data); }
  const int64_t* i64() const { return static_cast<const int64_t*>(data); }
};

/** Of two axes: whether rows may lie apart from each other, or are copied if they do. */
enum class Rows { kStrided, kPacked };

Integers read_integers(const char* name, nb::handle object, int ndim, int type, const Place& place,
                       Rows rows = Rows::kStrided);

}  // namespace attnfold::python

#endif  // ATTNFOLD_PYTHON_ARRAYS_H_
