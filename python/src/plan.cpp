// Plans: one update per step, runs without the GIL.
#include "plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>

namespace attnfold::python {
namespace {

/** A float32 of one number, or what an array holds; kept alive by `keep`. */
const float* floats_of(const char* name, nb::handle object, int64_t count, const Place& place,
                       std::vector<nb::object>* keep) {
  if (object.is_none()) return nullptr;
  Array a = read_array(name, object, place);
  check_type(name, a, ATTNFOLD_F32);
  check_shape(name, a, {count});
  if (!a.packed()) raise_value(name, "a packed array", "one with strides");
  keep->push_back(std::move(a.holder));
  return static_cast<const float*>(a.data);
}

}  // namespace

Plan::Plan(nb::dict problem, nb::dict execution) {
  fill_problem(problem, &problem_);
  attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
  std::string isa;
  fill_execution(execution, &e, &isa);
  attnfold_status status;
  {
    nb::gil_scoped_release release;
    status = attnfold_plan_create(&problem_, &e, &plan_);
  }
  raise_if_error(status);
  place_ = place_of(e);
}

Plan::~Plan() { attnfold_plan_destroy(plan_); }

/**
 * A child that was forked while other threads were at work has their locks, but not the threads
 * that would give them back: it gets locks of its own.  What is left behind may be half changed,
 * and the schedule still points into its arrays, so that it is never freed.
 */
Plan::Shared& Plan::shared() {
  const pid_t process = getpid();
  if (process != process_) {
    auto fresh = std::make_unique<Shared>();
    if (shared_->updating) torn_ = true;
    static_cast<void>(shared_.release());
    shared_ = std::move(fresh);
    process_ = process;
  }
  return *shared_;
}

void Plan::read_lengths(nb::dict given, const Place& place, attnfold_lengths* lengths,
                        Step* step) const {
  Sizes sizes;
  int64_t batch = -1;
  step->arrays.reserve(16);  // pointers into converted arrays must stay
  const auto array = [&](const char* name, nb::handle object, int ndim,
                         int type) -> const Integers& {
    step->arrays.push_back(read_integers(name, object, ndim, type, place));
    return step->arrays.back();
  };
  // An array of `count` entries; -1: of any number.
  const auto i32 = [&](const char* name, nb::handle object, int64_t count,
                       int64_t* size = nullptr) {
    const Integers& x = array(name, object, 1, kInt32);
    if (count >= 0 && x.shape[0] != count) {
      raise_value(name, "shape [" + std::to_string(count) + "]",
                  "[" + std::to_string(x.shape[0]) + "]");
    }
    if (size) *size = x.shape[0];
    return x.i32();
  };
  if (given.contains("qo_indptr")) {
    int64_t size = 0;
    lengths->qo_indptr = i32("qo_indptr", given["qo_indptr"], -1, &size);
    if (size == 0) raise_value("qo_indptr", "an array of batch + 1 offsets", "shape [0]");
    batch = size - 1;
    lengths->batch = static_cast<int32_t>(batch);
    step->qo_rows = place.cuda ? -1 : lengths->qo_indptr[batch];
  }
  if (batch < 0) raise_value("qo_indptr", "an array of batch + 1 offsets", "None");
  for (const auto& [key, value] : given) {
    const std::string name = nb::str(key).c_str();
    if (name == "kv_len") {
      lengths->kv_len = i32("kv_len", value, batch);
    } else if (name == "block_table") {
      const Integers& x = array("block_table", value, 2, kInt32);
      if (x.shape[0] < batch)
        raise_value(name, "at least " + std::to_string(batch) + " rows",
                    std::to_string(x.shape[0]));
      lengths->block_table = x.i32();
      lengths->block_table_stride = x.stride;
      sizes.table_width = x.shape[1];
    } else if (name == "kv_indptr") {
      lengths->kv_indptr = i32("kv_indptr", value, batch + 1);
    } else if (name == "kv_indices") {
      lengths->kv_indices = i32("kv_indices", value, -1, &sizes.kv_indices);
    } else if (name == "num_kv_rows") {
      lengths->num_kv_rows = int_of(name, value, 0, std::numeric_limits<int64_t>::max());
    } else if (name == "prefix_keys") {
      int64_t groups = 0;
      lengths->prefix_keys = i32("prefix_keys", value, -1, &groups);
      lengths->num_prefix_groups = static_cast<int32_t>(groups);
    } else if (name == "prefix_indptr") {
      lengths->prefix_indptr = i32("prefix_indptr", value, -1, &sizes.prefix_indptr);
    } else if (name == "prefix_requests") {
      lengths->prefix_requests = i32("prefix_requests", value, -1, &sizes.prefix_requests);
    } else if (name == "visible_prefix") {
      lengths->visible_prefix = i32("visible_prefix", value, batch);
    } else if (name == "mask_width") {
      lengths->mask_width = i32("mask_width", value, batch);
    } else if (name == "mask_indptr") {
      const Integers& x = array("mask_indptr", value, 1, kInt64);
      if (x.shape[0] != batch + 1)
        raise_value(name, "shape [" + std::to_string(batch + 1) + "]",
                    "[" + std::to_string(x.shape[0]) + "]");
      lengths->mask_indptr = x.i64();
    } else if (name == "mask_bits") {
      const Integers& x = array("mask_bits", value, 1, kUInt8);
      lengths->mask_bits = static_cast<const uint8_t*>(x.data);
      sizes.mask_bits = x.shape[0];
    } else if (name == "block_indptr") {
      lengths->block_indptr = i32("block_indptr", value, batch * problem_.kv_heads + 1);
    } else if (name == "block_indices") {
      lengths->block_indices = i32("block_indices", value, -1, &sizes.block_indices);
    } else if (name != "qo_indptr") {
      raise_unknown(name);
    }
  }
  if (!lengths->prefix_keys && (lengths->prefix_indptr || lengths->prefix_requests)) {
    raise_value("prefix_keys", "an array beside prefix_indptr and prefix_requests", "None");
  }
  if (!place.cuda) check_sizes(*lengths, sizes);
  if (problem_.kv_storage == ATTNFOLD_KV_RAGGED && !place.cuda && lengths->kv_indptr) {
    step->kv_rows = lengths->num_kv_rows ? lengths->num_kv_rows : lengths->kv_indptr[batch];
  }
}

/** What the C interface cannot see: how long the arrays are that its offsets point into. */
void Plan::check_sizes(const attnfold_lengths& lengths, const Sizes& sizes) const {
  const auto at_least = [](const char* name, int64_t needed, int64_t got) {
    if (got < needed)
      raise_value(name, "at least " + std::to_string(needed) + " entries", std::to_string(got));
  };
  const bool paged = problem_.kv_storage == ATTNFOLD_KV_PAGED;
  const int64_t batch = lengths.batch;
  if (paged && lengths.block_table && lengths.kv_len) {
    int64_t longest = 0;
    for (int64_t r = 0; r < batch; ++r) longest = std::max<int64_t>(longest, lengths.kv_len[r]);
    const int64_t pages = (longest + problem_.page_size - 1) / problem_.page_size;
    if (sizes.table_width < pages) {
      raise_value("block_table", "rows of at least " + std::to_string(pages) + " pages",
                  std::to_string(sizes.table_width));
    }
  }
  if (paged && lengths.kv_indptr)
    at_least("kv_indices", lengths.kv_indptr[batch], sizes.kv_indices);
  if (lengths.mask_indptr) at_least("mask_bits", lengths.mask_indptr[batch], sizes.mask_bits);
  if (lengths.block_indptr)
    at_least("block_indices", lengths.block_indptr[batch * problem_.kv_heads], sizes.block_indices);
  const int64_t groups = lengths.num_prefix_groups;
  if (groups > 0) {
    at_least("prefix_indptr", groups + 1, sizes.prefix_indptr);
    at_least("prefix_requests", lengths.prefix_indptr[groups], sizes.prefix_requests);
  }
}

void Plan::update(nb::dict given, nb::handle stream) {
  attnfold_lengths lengths = ATTNFOLD_LENGTHS_INIT;
  Step step;
  const Place place = place_in(stream);
  read_lengths(given, place, &lengths, &step);
  Shared& shared = this->shared();
  attnfold_status status;
  {
    nb::gil_scoped_release release;
    const std::unique_lock lock(shared.schedule);
    shared.updating = true;
    status = attnfold_plan_update(plan_, &lengths, place.stream);
    if (status == ATTNFOLD_OK) {
      std::swap(shared.arrays, step.arrays);
      qo_rows_ = step.qo_rows;
      kv_rows_ = step.kv_rows;
      torn_ = false;
      ++version_;
    }
    shared.updating = false;
  }
  raise_if_error(status);
}

void Plan::check_whole() const {
  if (torn_)
    throw std::runtime_error(
        "plan: expected an update in this process, which was forked while "
        "another thread updated the plan");
}

void Plan::forget() {
  std::vector<Integers> arrays;
  Shared& shared = this->shared();
  {
    nb::gil_scoped_release release;
    const std::unique_lock lock(shared.schedule);
    std::swap(shared.arrays, arrays);
  }
}

void Plan::set_kv(const char* name, nb::handle object, const Place& place, int64_t width,
                  const void** data, int64_t* page, int64_t* token, int64_t* head,
                  std::vector<nb::object>* keep) const {
  Array a = read_array(name, object, place);
  check_type(name, a, problem_.kv_dtype);
  const bool head_major = problem_.kv_layout == ATTNFOLD_HND;
  const bool paged = problem_.kv_storage == ATTNFOLD_KV_PAGED;
  const int64_t tokens = paged ? problem_.page_size : -1, heads = problem_.kv_heads;
  std::vector<int64_t> shape = head_major ? std::vector<int64_t>{heads, tokens, width}
                                          : std::vector<int64_t>{tokens, heads, width};
  if (paged) shape.insert(shape.begin(), problem_.num_pages);
  check_shape(name, a, shape);
  check_rows_contiguous(name, a);
  const int first = paged ? 1 : 0, token_axis = head_major ? first + 1 : first,
            head_axis = head_major ? first : first + 1;
  if (!paged && a.shape[token_axis] < kv_rows_) {
    raise_value(name, "at least " + std::to_string(kv_rows_) + " rows",
                std::to_string(a.shape[token_axis]));
  }
  *data = a.data;
  *page = paged ? stride_of(name, a, 0) : 0;
  *token = stride_of(name, a, token_axis);
  *head = stride_of(name, a, head_axis);
  keep->push_back(std::move(a.holder));
}

void Plan::set_scale(const char* name, nb::handle object, const Place& place,
                     attnfold_scale_kind kind, float* number, const float** data, int64_t* page,
                     int64_t* token, int64_t* head, std::vector<nb::object>* keep) const {
  if (object.is_none()) return;
  check_has_scale(name, object, kind);
  if (kind != ATTNFOLD_SCALE_PER_TOKEN) {
    if (is_number(object) && !place.cuda && kind == ATTNFOLD_SCALE_PER_TENSOR) {
      *number = float_of(name, object);
      *data = number;
      return;
    }
    *data = floats_of(name, object, kind == ATTNFOLD_SCALE_PER_HEAD ? problem_.kv_heads : 1, place,
                      keep);
    return;
  }
  Array a = read_array(name, object, place);
  check_type(name, a, ATTNFOLD_F32);
  const bool head_major = problem_.kv_layout == ATTNFOLD_HND,
             paged = problem_.kv_storage == ATTNFOLD_KV_PAGED;
  const int64_t tokens = paged ? problem_.page_size : -1, heads = problem_.kv_heads;
  std::vector<int64_t> shape =
      head_major ? std::vector<int64_t>{heads, tokens} : std::vector<int64_t>{tokens, heads};
  if (paged) shape.insert(shape.begin(), problem_.num_pages);
  check_shape(name, a, shape);
  const int first = paged ? 1 : 0, token_axis = head_major ? first + 1 : first;
  if (!paged && a.shape[token_axis] < kv_rows_) {
    raise_value(name, "at least " + std::to_string(kv_rows_) + " rows",
                std::to_string(a.shape[token_axis]));
  }
  *data = static_cast<const float*>(a.data);
  *page = paged ? stride_of(name, a, 0) : 0;
  *token = stride_of(name, a, token_axis);
  *head = stride_of(name, a, head_major ? first : first + 1);
  keep->push_back(std::move(a.holder));
}

void Plan::set_outputs(nb::handle o, nb::handle lse, const Place& place, int64_t rows,
                       attnfold_tensors* tensors, std::vector<nb::object>* keep) const {
  const attnfold_problem& p = problem_;
  attnfold_tensors& t = *tensors;
  Array a = read_array("o", o, place, Access::kWrite);
  check_type("o", a, p.o_dtype);
  check_shape("o", a, {rows, p.qo_heads, p.head_dim_vo});
  check_rows_contiguous("o", a);
  t.o = a.data;
  t.o_stride_row = stride_of("o", a, 0);
  t.o_stride_head = stride_of("o", a, 1);
  keep->push_back(std::move(a.holder));

  if (!lse.is_none()) {
    a = read_array("lse", lse, place, Access::kWrite);
    check_type("lse", a, ATTNFOLD_F32);
    check_shape("lse", a, {rows, p.qo_heads});
    t.lse = static_cast<float*>(a.data);
    t.lse_stride_row = stride_of("lse", a, 0);
    t.lse_stride_head = stride_of("lse", a, 1);
    keep->push_back(std::move(a.holder));
  }
}

Plan::Workspace Plan::take_workspace(Shared* shared) {
  {
    const std::lock_guard lock(shared->workspaces_mutex);
    if (!shared->workspaces.empty()) {
      Workspace last = std::move(shared->workspaces.back());
      shared->workspaces.pop_back();
      return last;
    }
  }
  const size_t bytes = (workspace_bytes() + 63) / 64 * 64;
  void* memory = std::aligned_alloc(64, bytes ? bytes : 64);
  if (!memory) throw std::bad_alloc();
  return {static_cast<std::byte*>(memory), std::free};
}

void Plan::run(nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse,
               nb::handle alibi_slopes, nb::handle sink_logits, nb::handle k_scale,
               nb::handle v_scale, nb::handle o_scale, nb::handle workspace, nb::handle stream) {
  const attnfold_problem& p = problem_;
  attnfold_tensors t = ATTNFOLD_TENSORS_INIT;
  std::vector<nb::object> keep;
  keep.reserve(10);
  float numbers[3];
  const uint64_t version = version_;
  const Place place = place_in(stream);

  Array a = read_array("q", q, place);
  check_type("q", a, p.q_dtype);
  check_shape("q", a, {qo_rows_, p.qo_heads, p.head_dim_qk});
  check_rows_contiguous("q", a);
  const int64_t rows = a.shape[0];
  t.q = a.data;
  t.q_stride_row = stride_of("q", a, 0);
  t.q_stride_head = stride_of("q", a, 1);
  keep.push_back(std::move(a.holder));

  set_kv("k", k, place, p.head_dim_qk, &t.k, &t.k_stride_page, &t.k_stride_token, &t.k_stride_head,
         &keep);
  if (!v.is_none()) {
    if (p.v_in_k) raise_value("v", "None (v_in_k)", "an array");
    set_kv("v", v, place, p.head_dim_vo, &t.v, &t.v_stride_page, &t.v_stride_token,
           &t.v_stride_head, &keep);
  } else if (!p.v_in_k) {
    raise_value("v", "an array", "None");
  }

  set_outputs(o, lse, place, rows, &t, &keep);
  t.alibi_slopes = floats_of("alibi_slopes", alibi_slopes, p.qo_heads, place, &keep);
  t.sink_logits = floats_of("sink_logits", sink_logits, p.qo_heads, place, &keep);
  set_scale("k_scale", k_scale, place, p.k_scale_kind, &numbers[0], &t.k_scale,
            &t.k_scale_stride_page, &t.k_scale_stride_token, &t.k_scale_stride_head, &keep);
  set_scale("v_scale", v_scale, place, p.v_scale_kind, &numbers[1], &t.v_scale,
            &t.v_scale_stride_page, &t.v_scale_stride_token, &t.v_scale_stride_head, &keep);
  if (is_number(o_scale) && !place.cuda) {
    numbers[2] = float_of("o_scale", o_scale);
    t.o_scale = &numbers[2];
  } else {
    t.o_scale = floats_of("o_scale", o_scale, 1, place, &keep);
  }

  void* given = nullptr;
  size_t given_bytes = 0;
  if (!workspace.is_none()) {
    a = read_array("workspace", workspace, place, Access::kWrite);
    check_type("workspace", a, kUInt8);
    if (!a.packed()) raise_value("workspace", "a packed array", "one with strides");
    given = a.data;
    given_bytes = static_cast<size_t>(a.size());
    keep.push_back(std::move(a.holder));
  }

  if (!given && place.cuda) raise_value("workspace", "memory of the device", "None");
  if (place.cuda && rows == 0) return;  // the C interface does not see that nothing is asked

  attnfold_status status = ATTNFOLD_OK;
  bool updated = false;
  Shared& shared = this->shared();
  check_whole();
  {
    nb::gil_scoped_release release;
    Workspace own(nullptr, std::free);
    if (!given) own = take_workspace(&shared);
    {
      const std::shared_lock lock(shared.schedule);
      updated = version != version_;  // by another thread, since the shapes were checked
      if (!updated) {
        status = attnfold_plan_run(plan_, &t, given ? given : own.get(),
                                   given ? given_bytes : workspace_bytes(), place.stream);
      }
    }
    if (own) {
      const std::lock_guard lock(shared.workspaces_mutex);
      shared.workspaces.push_back(std::move(own));
    }
  }
  if (updated) throw std::runtime_error("plan: another thread updated it during this run");
  raise_if_error(status);
}

nb::dict Plan::report() {
  attnfold_plan_report r{};
  r.struct_size = sizeof(r);
  attnfold_status status;
  Shared& shared = this->shared();
  check_whole();
  {
    nb::gil_scoped_release release;
    const std::shared_lock lock(shared.schedule);
    status = attnfold_plan_get_report(plan_, &r);
  }
  raise_if_error(status);
  nb::dict d;
  d["num_workers"] = r.num_workers;
  d["num_requests"] = r.num_requests;
  d["num_units"] = r.num_units;
  d["num_items"] = r.num_items;
  d["num_cuts"] = r.num_cuts;
  d["num_cuts_inside"] = r.num_cuts_inside;
  d["max_super_chunks"] = r.max_super_chunks;
  d["num_leaves"] = r.num_leaves;
  d["max_worker_cost"] = r.max_worker_cost;
  d["total_cost"] = r.total_cost;
  d["max_leaf_cost"] = r.max_leaf_cost;
  d["partial_bytes"] = r.partial_bytes;
  d["kv_bytes"] = r.kv_bytes;
  d["schedule_id"] = r.schedule_id;
  d["num_prefix_groups"] = r.num_prefix_groups;
  d["num_shared_leaves"] = r.num_shared_leaves;
  d["saved_kv_bytes"] = r.saved_kv_bytes;
  return d;
}

}  // namespace attnfold::python
