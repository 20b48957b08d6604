// The fields of a problem and of an execution, by name.
#ifndef ATTNFOLD_PYTHON_FIELDS_H_
#define ATTNFOLD_PYTHON_FIELDS_H_

#include <cstdint>
#include <string>

#include "arrays.h"

namespace attnfold::python {

/** A Python int; raises ValueError outside of low..high, TypeError for what is none. */
int64_t int_of(const std::string& name, nb::handle value, int64_t low, int64_t high);
int32_t int32_of(const std::string& name, nb::handle value);
int64_t int64_of(const std::string& name, nb::handle value);

/** A number; raises TypeError for what is none. */
double double_of(const std::string& name, nb::handle value);

/** Likewise, rounded to float32. */
float float_of(const std::string& name, nb::handle value);

/** Raises for a scale that is given where there is none of its kind. */
void check_has_scale(const std::string& name, nb::handle object, attnfold_scale_kind kind);

/** A cudaStream_t given as an int; None is the default stream. */
void* stream_of(nb::handle stream);

/** Where a call with this execution works. */
Place place_of(const attnfold_execution& execution);

/** Raises a TypeError. */
[[noreturn]] void raise_unknown(const std::string& name);

/** Sets fields by name; raises TypeError for a name that there is not. */
void fill_problem(nb::dict fields, attnfold_problem* problem);
void fill_execution(nb::dict fields, attnfold_execution* execution, std::string* isa);

nb::dict fields_of(const attnfold_problem& problem);

}  // namespace attnfold::python

#endif  // ATTNFOLD_PYTHON_FIELDS_H_
