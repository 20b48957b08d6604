// The fields of a problem and of an execution, by name.
#include "fields.h"

#include <cstddef>
#include <cstring>
#include <limits>

namespace attnfold::python {
namespace {

enum class Kind { kInt32, kInt64, kFloat };
struct Field {
  const char* name;
  size_t offset;
  Kind kind;
};
#define ATTNFOLD_FIELD(kind, name) \
  { #name, offsetof(attnfold_problem, name), Kind::kind }
constexpr Field kProblemFields[] = {ATTNFOLD_FIELD(kInt32, qo_heads),
                                    ATTNFOLD_FIELD(kInt32, kv_heads),
                                    ATTNFOLD_FIELD(kInt32, head_dim_qk),
                                    ATTNFOLD_FIELD(kInt32, head_dim_vo),
                                    ATTNFOLD_FIELD(kInt32, q_dtype),
                                    ATTNFOLD_FIELD(kInt32, kv_dtype),
                                    ATTNFOLD_FIELD(kInt32, o_dtype),
                                    ATTNFOLD_FIELD(kInt32, kv_storage),
                                    ATTNFOLD_FIELD(kInt32, kv_layout),
                                    ATTNFOLD_FIELD(kInt32, page_size),
                                    ATTNFOLD_FIELD(kInt64, num_pages),
                                    ATTNFOLD_FIELD(kInt32, mask),
                                    ATTNFOLD_FIELD(kInt32, window_left),
                                    ATTNFOLD_FIELD(kInt32, window_right),
                                    ATTNFOLD_FIELD(kFloat, sm_scale),
                                    ATTNFOLD_FIELD(kInt32, max_batch),
                                    ATTNFOLD_FIELD(kInt32, max_qo_rows),
                                    ATTNFOLD_FIELD(kInt32, max_kv_len),
                                    ATTNFOLD_FIELD(kFloat, logits_softcap),
                                    ATTNFOLD_FIELD(kInt32, attention_chunk),
                                    ATTNFOLD_FIELD(kInt32, sink_tokens),
                                    ATTNFOLD_FIELD(kInt32, k_scale_kind),
                                    ATTNFOLD_FIELD(kInt32, v_scale_kind),
                                    ATTNFOLD_FIELD(kInt32, v_in_k),
                                    ATTNFOLD_FIELD(kInt32, sparse_block_size),
                                    ATTNFOLD_FIELD(kInt32, sparse_local_blocks),
                                    ATTNFOLD_FIELD(kInt32, sparse_vertical_stride),
                                    ATTNFOLD_FIELD(kInt32, sparse_head_step)};
#undef ATTNFOLD_FIELD

[[noreturn]] void raise_no_number(const std::string& name, const char* expected, nb::handle value) {
  PyErr_Clear();
  throw nb::type_error(
      (name + ": expected " + expected + ", got " + type_of_object(value)).c_str());
}

}  // namespace

int64_t int_of(const std::string& name, nb::handle value, int64_t low, int64_t high) {
  const nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) raise_no_number(name, "an integer", value);
  int overflow = 0;
  const long long x = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow || x < low || x > high) {
    raise_value(name, std::to_string(low) + ".." + std::to_string(high),
                nb::str(nb::handle(index)).c_str());
  }
  return x;
}

double double_of(const std::string& name, nb::handle value) {
  const double x = PyFloat_AsDouble(value.ptr());
  if (x == -1 && PyErr_Occurred()) raise_no_number(name, "a number", value);
  return x;
}

float float_of(const std::string& name, nb::handle value) {
  return static_cast<float>(double_of(name, value));
}

int32_t int32_of(const std::string& name, nb::handle value) {
  return static_cast<int32_t>(int_of(name, value, std::numeric_limits<int32_t>::min(),
                                     std::numeric_limits<int32_t>::max()));
}

int64_t int64_of(const std::string& name, nb::handle value) {
  return int_of(name, value, std::numeric_limits<int64_t>::min(),
                std::numeric_limits<int64_t>::max());
}

void check_has_scale(const std::string& name, nb::handle object, attnfold_scale_kind kind) {
  if (kind != ATTNFOLD_SCALE_NONE) return;
  raise_value(name, "None (" + name + "_kind is \"none\")",
              is_number(object) ? "a number" : type_of_object(object));
}

void* stream_of(nb::handle stream) {
  if (stream.is_none()) return nullptr;
  return reinterpret_cast<void*>(int_of("stream", stream, 0, std::numeric_limits<int64_t>::max()));
}

Place place_of(const attnfold_execution& execution) {
  if (execution.backend != ATTNFOLD_CUDA) return {};
  return {true, execution.device < 0 ? 0 : execution.device, execution.stream};
}

void raise_unknown(const std::string& name) {
  throw nb::type_error(("unexpected argument " + name).c_str());
}

void fill_problem(nb::dict fields, attnfold_problem* problem) {
  for (const auto& [key, value] : fields) {
    const std::string name = nb::str(key).c_str();
    const Field* field = nullptr;
    for (const Field& f : kProblemFields) {
      if (name == f.name) field = &f;
    }
    if (!field) raise_unknown(name);
    char* at = reinterpret_cast<char*>(problem) + field->offset;
    if (field->kind == Kind::kFloat) {
      const float x = float_of(name, value);
      std::memcpy(at, &x, sizeof(x));
    } else if (field->kind == Kind::kInt32) {
      const int32_t x = int32_of(name, value);
      std::memcpy(at, &x, sizeof(x));
    } else {
      const int64_t x = int64_of(name, value);
      std::memcpy(at, &x, sizeof(x));
    }
  }
}

void fill_execution(nb::dict fields, attnfold_execution* execution, std::string* isa) {
  for (const auto& [key, value] : fields) {
    const std::string name = nb::str(key).c_str();
    if (name == "num_threads") {
      execution->num_threads = int32_of(name, value);
    } else if (name == "num_workers") {
      execution->num_workers = int32_of(name, value);
    } else if (name == "cut_seed") {
      execution->cut_seed =
          static_cast<uint64_t>(int_of(name, value, 0, std::numeric_limits<int64_t>::max()));
    } else if (name == "isa") {
      *isa = nb::str(value).c_str();
      execution->isa = isa->c_str();
    } else if (name == "prefix_use") {
      execution->prefix_use = static_cast<attnfold_prefix_use>(int32_of(name, value));
    } else if (name == "backend") {
      execution->backend = static_cast<attnfold_backend>(int32_of(name, value));
    } else if (name == "device") {
      execution->device = int32_of(name, value);
    } else if (name == "stream") {
      execution->stream = stream_of(value);
    } else {
      raise_unknown(name);
    }
  }
}

nb::dict fields_of(const attnfold_problem& problem) {
  nb::dict d;
  for (const Field& f : kProblemFields) {
    const char* at = reinterpret_cast<const char*>(&problem) + f.offset;
    if (f.kind == Kind::kFloat) {
      float x;
      std::memcpy(&x, at, sizeof(x));
      d[f.name] = x;
    } else if (f.kind == Kind::kInt32) {
      int32_t x;
      std::memcpy(&x, at, sizeof(x));
      d[f.name] = x;
    } else {
      int64_t x;
      std::memcpy(&x, at, sizeof(x));
      d[f.name] = x;
    }
  }
  return d;
}

}  // namespace attnfold::python
