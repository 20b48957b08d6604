#include "check/call_scales.h"

#include <limits>

namespace attnfold::check {
namespace {

std::shared_ptr<Buffer> one_value(float value) {
  auto buffer = std::make_shared<Buffer>(sizeof(float));
  store_f32(buffer->data(), DType::f32, 0, value);
  return buffer;
}

void read_per_token(const char* name, const Array& array, const Call& call, Scales* scales) {
  const attnfold_problem& p = call.problem;
  const int64_t heads = p.kv_heads, slots = p.page_size;
  if (p.kv_storage == ATTNFOLD_KV_RAGGED) {
    require_shape(name, array, {call.num_kv_rows, heads}, "[kv_rows, kv_heads]");
    scales->strides = {0, heads, 1};
  } else if (p.kv_layout == ATTNFOLD_NHD) {
    require_shape(name, array, {p.num_pages, slots, heads}, "[num_pages, page_size, kv_heads]");
    scales->strides = {slots * heads, heads, 1};
  } else {
    require_shape(name, array, {p.num_pages, heads, slots}, "[num_pages, kv_heads, page_size]");
    scales->strides = {slots * heads, 1, slots};
  }
}

}  // namespace

void read_scales(const Fields& file, const char* name, Call* call, attnfold_scale_kind* kind,
                 Scales* scales) {
  const bool stated = file.file().metadata.count(name) > 0;
  const std::string what = std::string("metadata ") + name;
  *kind = ATTNFOLD_SCALE_NONE;
  if (!file.has(name)) {
    const DType type = static_cast<DType>(call->problem.kv_dtype);
    if (!stated && is_8_bit(type)) {
      fail(what, std::string("one, or a tensor ") + name + ", with keys in " + dtype_name(type),
           "none");
    }
    const float any = -std::numeric_limits<float>::infinity();
    const float scale = file.number(name, file.text(name, "1"), any);
    if (scale == 1.0f && !is_8_bit(type)) return;
    *kind = ATTNFOLD_SCALE_PER_TENSOR;
    scales->values = one_value(scale);
    return;
  }
  if (stated) fail(what, std::string("none beside the tensor ") + name, file.text(name));
  const bool per_head = file.file().arrays.at(name).shape.size() == 1;
  const size_t num_axes = call->problem.kv_storage == ATTNFOLD_KV_RAGGED ? 2 : 3;
  const Array& array =
      file.array(name, per_head ? 1 : num_axes, "[kv_heads], or that of the keys without head_dim");
  require_dtype(name, array, "F32");
  if (per_head) {
    require_shape(name, array, {call->problem.kv_heads}, "[kv_heads]");
    scales->strides = {0, 0, 1};
  } else {
    read_per_token(name, array, *call, scales);
  }
  *kind = per_head ? ATTNFOLD_SCALE_PER_HEAD : ATTNFOLD_SCALE_PER_TOKEN;
  scales->values = copy_of(array);
}

void read_o_scale(const Fields& file, Call* call) {
  if (file.file().metadata.count("o_scale") == 0) return;
  const std::string text = file.text("o_scale");
  call->o_scale = file.number("o_scale", text, 0.0f);
  if (call->o_scale == 0.0f) fail("metadata o_scale", "a number > 0", shown(text));
  call->problem.o_dtype = ATTNFOLD_E4M3;
}

}  // namespace attnfold::check
