#include "state.h"

#include <string>
#include <vector>

#include "fields.h"

namespace attnfold::python {
namespace {

struct Shape {
  int64_t rows = -1;
  int64_t heads = 0, head_dim = 0;
};

/** The lse, or l, of a state: [rows, heads] or [heads, rows]. */
float* read_lse(const std::string& name, nb::handle object, const Place& place,
                attnfold_lse_layout layout, Access access, int64_t rows, int64_t heads,
                int64_t* row, int64_t* head, std::vector<nb::object>* keep) {
  Array a = read_array(name.c_str(), object, place, access);
  check_type(name.c_str(), a, ATTNFOLD_F32);
  const bool rows_first = layout == ATTNFOLD_ROWS_HEADS;
  check_shape(name.c_str(), a,
              rows_first ? std::vector<int64_t>{rows, heads} : std::vector<int64_t>{heads, rows});
  *row = stride_of(name.c_str(), a, rows_first ? 0 : 1);
  *head = stride_of(name.c_str(), a, rows_first ? 1 : 0);
  keep->push_back(std::move(a.holder));
  return static_cast<float*>(a.data);
}

/** Reads a state named `name`; its rows are those of `shape`, which the first state sets. */
attnfold_state read_state(const std::string& name, nb::tuple fields, const Place& place,
                          Access access, Shape* shape, std::vector<nb::object>* keep) {
  attnfold_state s = ATTNFOLD_STATE_INIT;
  Array o = read_array((name + ".o").c_str(), fields[0], place, access);
  if (o.type < 0 || o.type >= kInt32)
    raise_value(name + ".o", "elements of a floating-point type", type_text(o));
  s.lse_layout = static_cast<attnfold_lse_layout>(nb::cast<int>(fields[2]));
  s.log_base = static_cast<attnfold_log_base>(nb::cast<int>(fields[3]));
  s.empty = static_cast<attnfold_empty_kind>(nb::cast<int>(fields[4]));
  s.empty_value = float_of(name + ".empty_value", fields[5]);
  s.sink_included = nb::cast<bool>(fields[6]);
  s.num_rows = int64_of(name + ".num_rows", fields[8]);
  if (shape->rows < 0) {
    check_shape((name + ".o").c_str(), o, {-1, -1, -1});
    *shape = {o.shape[0], o.shape[1], o.shape[2]};
  }
  // A state with fewer rows needs to hold no more than those.
  const int64_t rows = s.num_rows >= 0 && s.num_rows < shape->rows ? -1 : shape->rows;
  check_shape((name + ".o").c_str(), o, {rows, shape->heads, shape->head_dim});
  if (rows < 0 && o.shape[0] < s.num_rows) {
    raise_value(name + ".o", "at least " + std::to_string(s.num_rows) + " rows",
                std::to_string(o.shape[0]));
  }
  check_rows_contiguous((name + ".o").c_str(), o);
  s.o = o.data;
  s.o_dtype = static_cast<attnfold_dtype>(o.type);
  s.o_stride_row = stride_of((name + ".o").c_str(), o, 0);
  s.o_stride_head = stride_of((name + ".o").c_str(), o, 1);
  s.lse = read_lse(name + ".lse", fields[1], place, s.lse_layout, access, o.shape[0], shape->heads,
                   &s.lse_stride_row, &s.lse_stride_head, keep);
  if (!fields[7].is_none()) {
    s.normalised = 0;
    int64_t row = 0, head = 0;
    s.l = read_lse(name + ".l", fields[7], place, s.lse_layout, access, o.shape[0], shape->heads,
                   &row, &head, keep);
    if (row != s.lse_stride_row || head != s.lse_stride_head)
      raise_value(name + ".l", "the strides of lse", "others");
  }
  keep->push_back(std::move(o.holder));
  return s;
}

}  // namespace

void merge(nb::list states, nb::tuple out, nb::handle row_mask, nb::dict execution) {
  attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
  std::string isa;
  fill_execution(execution, &e, &isa);
  const Place place = place_of(e);
  std::vector<nb::object> keep;
  Shape shape;
  const attnfold_state to = read_state("out", out, place, Access::kWrite, &shape, &keep);
  std::vector<attnfold_state> from;
  for (size_t i = 0; i < nb::len(states); ++i) {
    from.push_back(read_state("states[" + std::to_string(i) + "]", nb::cast<nb::tuple>(states[i]),
                              place, Access::kRead, &shape, &keep));
  }
  const uint8_t* mask = nullptr;
  int64_t mask_stride = 1;
  if (!row_mask.is_none()) {
    Array a = read_array("row_mask", row_mask, place);
    if (a.type != kBool) check_type("row_mask", a, kUInt8);
    check_shape("row_mask", a, {shape.rows});
    mask = static_cast<const uint8_t*>(a.data);
    mask_stride = a.strides[0];
    keep.push_back(std::move(a.holder));
  }
  attnfold_status status;
  {
    nb::gil_scoped_release release;
    status = attnfold_merge_parallel(shape.rows, static_cast<int32_t>(shape.heads),
                                     static_cast<int32_t>(shape.head_dim), from.data(),
                                     static_cast<int32_t>(from.size()), &to, mask, mask_stride, &e);
  }
  raise_if_error(status);
}

void convert_state(nb::tuple from, nb::tuple to, nb::dict execution) {
  attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
  std::string isa;
  fill_execution(execution, &e, &isa);
  const Place place = place_of(e);
  std::vector<nb::object> keep;
  Shape shape;
  const attnfold_state t = read_state("to", to, place, Access::kWrite, &shape, &keep);
  const attnfold_state f = read_state("from", from, place, Access::kRead, &shape, &keep);
  attnfold_status status;
  {
    nb::gil_scoped_release release;
    status = attnfold_convert_state(shape.rows, static_cast<int32_t>(shape.heads),
                                    static_cast<int32_t>(shape.head_dim), &f, &t, &e);
  }
  raise_if_error(status);
}

}  // namespace attnfold::python
