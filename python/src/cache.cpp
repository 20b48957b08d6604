#include "cache.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "attnfold/cache.h"
#include "fields.h"

namespace attnfold::python {
namespace {

struct PoolSide {
  int64_t page = 0, token = 0, head = 0;
};

/** k or v of a pool; the first one sets its sizes, the second must have them. */
PoolSide read_side(const char* name, const Array& a, attnfold_kv_pool* pool, bool first,
                   int32_t* head_dim) {
  const int token_axis = pool->kv_layout == ATTNFOLD_HND ? 2 : 1, head_axis = 3 - token_axis;
  check_shape(name, a, {-1, -1, -1, -1});
  if (first) {
    pool->num_pages = a.shape[0];
    pool->page_size = static_cast<int32_t>(a.shape[token_axis]);
    pool->kv_heads = static_cast<int32_t>(a.shape[head_axis]);
    pool->kv_dtype = static_cast<attnfold_dtype>(a.type);
    if (a.type < 0 || a.type >= kInt32)
      raise_value(name, "elements of a floating-point type or int8", type_text(a));
  } else {
    check_type(name, a, pool->kv_dtype);
    std::vector<int64_t> shape = {pool->num_pages, pool->page_size, pool->kv_heads, -1};
    if (pool->kv_layout == ATTNFOLD_HND) std::swap(shape[1], shape[2]);
    check_shape(name, a, shape);
  }
  check_rows_contiguous(name, a);
  *head_dim = static_cast<int32_t>(a.shape[3]);
  return {stride_of(name, a, 0), stride_of(name, a, token_axis), stride_of(name, a, head_axis)};
}

PoolSide read_scale(const char* name, nb::handle object, attnfold_scale_kind kind,
                    const Place& place, const attnfold_kv_pool& pool, Access access, float* number,
                    float** data, std::vector<nb::object>* keep) {
  if (object.is_none()) return {};
  check_has_scale(name, object, kind);
  if (is_number(object)) {
    if (kind != ATTNFOLD_SCALE_PER_TENSOR || place.cuda)
      raise_value(name, place.cuda ? "an array of the device" : "an array of this kind of scale",
                  "a number");
    *number = float_of(name, object);
    *data = number;
    return {};
  }
  const bool per_token = kind == ATTNFOLD_SCALE_PER_TOKEN;
  Array a = read_array(name, object, place, per_token ? access : Access::kRead);
  check_type(name, a, ATTNFOLD_F32);
  PoolSide s;
  if (per_token) {
    std::vector<int64_t> shape = {pool.num_pages, pool.page_size, pool.kv_heads};
    const int token_axis = pool.kv_layout == ATTNFOLD_HND ? 2 : 1;
    if (token_axis == 2) std::swap(shape[1], shape[2]);
    check_shape(name, a, shape);
    s = {stride_of(name, a, 0), stride_of(name, a, token_axis), stride_of(name, a, 3 - token_axis)};
  } else {
    check_shape(name, a, {kind == ATTNFOLD_SCALE_PER_HEAD ? pool.kv_heads : 1});
    if (!a.packed()) raise_value(name, "a packed array", "one with strides");
  }
  *data = static_cast<float*>(a.data);
  keep->push_back(std::move(a.holder));
  return s;
}

struct Pool {
  attnfold_kv_pool c = ATTNFOLD_KV_POOL_INIT;
  float numbers[2];
  std::vector<nb::object> keep;
};

void read_pool(const std::string& prefix, nb::tuple fields, const Place& place, Access access,
               Pool* pool) {
  attnfold_kv_pool& c = pool->c;
  c.kv_layout = static_cast<attnfold_kv_layout>(nb::cast<int>(fields[2]));
  c.k_scale_kind = static_cast<attnfold_scale_kind>(nb::cast<int>(fields[3]));
  c.v_scale_kind = static_cast<attnfold_scale_kind>(nb::cast<int>(fields[4]));
  const std::string k_name = prefix + "k_cache", v_name = prefix + "v_cache";
  Array a = read_array(k_name.c_str(), fields[0], place, access);
  PoolSide s = read_side(k_name.c_str(), a, &c, true, &c.head_dim_qk);
  c.k = a.data;
  c.k_stride_page = s.page;
  c.k_stride_token = s.token;
  c.k_stride_head = s.head;
  pool->keep.push_back(std::move(a.holder));
  if (!fields[1].is_none()) {
    a = read_array(v_name.c_str(), fields[1], place, access);
    s = read_side(v_name.c_str(), a, &c, false, &c.head_dim_vo);
    c.v = a.data;
    c.v_stride_page = s.page;
    c.v_stride_token = s.token;
    c.v_stride_head = s.head;
    pool->keep.push_back(std::move(a.holder));
  }
  s = read_scale("k_scale", fields[5], c.k_scale_kind, place, c, access, &pool->numbers[0],
                 &c.k_scale, &pool->keep);
  c.k_scale_stride_page = s.page;
  c.k_scale_stride_token = s.token;
  c.k_scale_stride_head = s.head;
  s = read_scale("v_scale", fields[6], c.v_scale_kind, place, c, access, &pool->numbers[1],
                 &c.v_scale, &pool->keep);
  c.v_scale_stride_page = s.page;
  c.v_scale_stride_token = s.token;
  c.v_scale_stride_head = s.head;
}

}  // namespace

void append(nb::tuple pool_fields, nb::handle k, nb::handle v, nb::handle slots,
            nb::dict execution) {
  attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
  std::string isa;
  fill_execution(execution, &e, &isa);
  const Place place = place_of(e);
  Pool pool;
  read_pool("", pool_fields, place, Access::kWrite, &pool);
  attnfold_kv_rows rows = ATTNFOLD_KV_ROWS_INIT;
  const Integers s = read_integers("slots", slots, 1, kInt64, place);
  rows.num_tokens = s.shape[0];
  rows.slots = s.i64();
  Array a = read_array("k", k, place);
  check_shape("k", a, {rows.num_tokens, pool.c.kv_heads, pool.c.head_dim_qk});
  check_rows_contiguous("k", a);
  if (a.type < 0 || a.type > ATTNFOLD_BF16)
    raise_value("k", "elements of float32, float16 or bfloat16", type_text(a));
  rows.dtype = static_cast<attnfold_dtype>(a.type);
  rows.k = a.data;
  rows.k_stride_token = stride_of("k", a, 0);
  rows.k_stride_head = stride_of("k", a, 1);
  pool.keep.push_back(std::move(a.holder));
  if (pool.c.v) {
    a = read_array("v", v, place);
    check_type("v", a, rows.dtype);
    check_shape("v", a, {rows.num_tokens, pool.c.kv_heads, pool.c.head_dim_vo});
    check_rows_contiguous("v", a);
    rows.v = a.data;
    rows.v_stride_token = stride_of("v", a, 0);
    rows.v_stride_head = stride_of("v", a, 1);
    pool.keep.push_back(std::move(a.holder));
  } else if (!v.is_none()) {
    raise_value("v", "None (v_cache is None)", type_of_object(v));
  }
  attnfold_status status;
  {
    nb::gil_scoped_release release;
    status = attnfold_append(&pool.c, &rows, &e);
  }
  raise_if_error(status,
                 {{"rows.", ""}, {"pool.k:", "k_cache:"}, {"pool.v:", "v_cache:"}, {"pool.", ""}});
}

void copy_pages(nb::tuple from_fields, nb::tuple to_fields, nb::handle pairs, nb::dict execution) {
  attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
  std::string isa;
  fill_execution(execution, &e, &isa);
  const Place place = place_of(e);
  Pool from, to;
  read_pool("from_pool.", from_fields, place, Access::kRead, &from);
  read_pool("to_pool.", to_fields, place, Access::kWrite, &to);
  if (!from.c.v != !to.c.v) {
    raise_value("to_pool.v_cache", from.c.v ? "an array, as in from_pool" : "None, as in from_pool",
                to.c.v ? "an array" : "None");
  }
  const Integers p = read_integers("pairs", pairs, 2, kInt32, place, Rows::kPacked);
  if (p.shape[1] != 2 && (p.shape[0] > 0 || p.shape[1] > 0))
    raise_value("pairs", "shape [any, 2]",
                "[" + std::to_string(p.shape[0]) + ", " + std::to_string(p.shape[1]) + "]");
  attnfold_status status;
  {
    nb::gil_scoped_release release;
    status = attnfold_copy_pages(&from.c, &to.c, p.i32(), p.shape[0], &e);
  }
  raise_if_error(status, {{"from.k:", "from_pool.k_cache:"},
                          {"from.v:", "from_pool.v_cache:"},
                          {"from.", "from_pool."},
                          {"to.k:", "to_pool.k_cache:"},
                          {"to.v:", "to_pool.v_cache:"},
                          {"to.", "to_pool."}});
}

nb::object slot_mapping(nb::handle qo_indptr, nb::handle kv_len, nb::handle block_table,
                        nb::handle kv_indptr, nb::handle kv_indices, nb::handle page_size,
                        nb::handle num_pages, nb::handle positions, nb::handle num_slots,
                        nb::handle slots, nb::dict execution) {
  attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
  std::string isa;
  fill_execution(execution, &e, &isa);
  const Place place = place_of(e);
  const int32_t page_tokens = int32_of("page_size", page_size);
  const int64_t pages = int64_of("num_pages", num_pages);
  std::vector<Integers> arrays;
  arrays.reserve(6);
  const auto array = [&](const char* name, nb::handle object, int ndim, int type,
                         int64_t count) -> const Integers& {
    arrays.push_back(read_integers(name, object, ndim, type, place));
    if (count >= 0 && arrays.back().shape[0] < count) {
      raise_value(name, "at least " + std::to_string(count) + " entries",
                  std::to_string(arrays.back().shape[0]));
    }
    return arrays.back();
  };
  attnfold_lengths lengths = ATTNFOLD_LENGTHS_INIT;
  const Integers& indptr = array("qo_indptr", qo_indptr, 1, kInt32, 1);
  const bool seen = !place.cuda;  // what a device holds is not looked at
  const int64_t batch = indptr.shape[0] - 1;
  // Without given slots as many as there are tokens: a bad qo_indptr is for the engine to name.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  nb::object made = nb::borrow(slots);
  if (slots.is_none()) {
    const int64_t count = num_slots.is_none() ? std::max<int64_t>(indptr.i32()[batch], 0)
                                              : int_of("num_slots", num_slots, 0, kMost);
    made = nb::module_::import_("numpy").attr("empty")(count, "int64");
  }
  const Array out = read_array("slots", made, place, Access::kWrite);
  check_type("slots", out, kInt64);
  check_shape("slots", out, {-1});
  if (!out.packed()) raise_value("slots", "a packed array", "one with strides");
  // No token beyond the slots is mapped on a device.
  const int64_t tokens = seen ? indptr.i32()[batch] : out.shape[0];
  lengths.batch = static_cast<int32_t>(batch);
  lengths.qo_indptr = indptr.i32();
  if (!kv_len.is_none()) lengths.kv_len = array("kv_len", kv_len, 1, kInt32, batch).i32();
  int64_t longest = 0;
  for (int64_t r = 0; seen && lengths.kv_len && r < batch; ++r)
    longest = std::max<int64_t>(longest, lengths.kv_len[r]);
  const int64_t* at = nullptr;
  if (!positions.is_none()) {
    at = array("positions", positions, 1, kInt64, tokens).i64();
  }
  if (!block_table.is_none()) {
    const Integers& table = array("block_table", block_table, 2, kInt32, batch);
    const int64_t needed = page_tokens > 0 ? (longest + page_tokens - 1) / page_tokens : 0;
    if (table.shape[1] < needed) {
      raise_value("block_table", "rows of at least " + std::to_string(needed) + " pages",
                  std::to_string(table.shape[1]));
    }
    const int64_t held = table.shape[1] * page_tokens;
    for (int64_t i = 0; seen && at && page_tokens > 0 && i < tokens; ++i) {
      if (at[i] >= held) {
        raise_value("positions[" + std::to_string(i) + "]",
                    "less than " + std::to_string(held) + ", what a row of block_table holds",
                    std::to_string(at[i]));
      }
    }
    lengths.block_table = table.i32();
    lengths.block_table_stride = table.stride;
  }
  if (!kv_indptr.is_none()) {
    lengths.kv_indptr = array("kv_indptr", kv_indptr, 1, kInt32, batch + 1).i32();
    const int64_t listed = seen ? lengths.kv_indptr[batch] : -1;
    lengths.kv_indices = array("kv_indices", kv_indices, 1, kInt32, listed).i32();
  } else if (!kv_indices.is_none()) {
    raise_value("kv_indptr", "an array beside kv_indices", "None");
  }
  raise_if_error(attnfold_slot_mapping_on(&lengths, page_tokens, pages, at, out.shape[0],
                                          static_cast<int64_t*>(out.data), &e));
  return made;
}

nb::object map_to_kernel_pages(nb::handle block_table, nb::handle block_size, nb::handle page_size,
                               nb::handle num_blocks, nb::handle used) {
  const Integers from = read_integers("block_table", block_table, 2, kInt32, {});
  const int32_t block_tokens = int32_of("block_size", block_size);
  const int32_t page_tokens = int32_of("page_size", page_size);
  const int64_t blocks = int64_of("num_blocks", num_blocks);
  Integers counts;
  if (!used.is_none()) {
    counts = read_integers("used", used, 1, kInt32, {});
    if (counts.shape[0] != from.shape[0]) {
      raise_value("used", "shape [" + std::to_string(from.shape[0]) + "]",
                  "[" + std::to_string(counts.shape[0]) + "]");
    }
  }
  // Sizes that do not go together are for the engine to name, before it writes anything.
  const bool whole = page_tokens > 0 && block_tokens > 0 && block_tokens % page_tokens == 0;
  const int64_t width = whole ? from.shape[1] * (block_tokens / page_tokens) : 0;
  const nb::object pages =
      nb::module_::import_("numpy").attr("empty")(nb::make_tuple(from.shape[0], width), "int32");
  const Array to = read_array("page_table", pages, {}, Access::kWrite);
  raise_if_error(attnfold_map_to_kernel_pages(
      static_cast<int32_t>(from.shape[0]), static_cast<int32_t>(from.shape[1]), block_tokens,
      page_tokens, blocks, from.i32(), from.stride, used.is_none() ? nullptr : counts.i32(),
      static_cast<int32_t*>(to.data), width));
  return pages;
}

}  // namespace attnfold::python
