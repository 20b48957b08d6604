// Merging and converting attention results.
#ifndef ATTNFOLD_PYTHON_STATE_H_
#define ATTNFOLD_PYTHON_STATE_H_

#include "arrays.h"

namespace attnfold::python {

/** `states` and `out` are tuples of the fields of attnfold.State, in its order. */
void merge(nb::list states, nb::tuple out, nb::handle row_mask, nb::dict execution);
void convert_state(nb::tuple from, nb::tuple to, nb::dict execution);

}  // namespace attnfold::python

#endif  // ATTNFOLD_PYTHON_STATE_H_
