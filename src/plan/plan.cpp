#include "plan/plan.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

#include "plan/build_schedule.h"
#include "plan/hash.h"
#include "plan/validate.h"

namespace attnfold {
namespace {

constexpr uintptr_t kWorkspaceAlignment = 64;

/** At most, on some of the library's own threads: whoever is done takes the next. */
constexpr int32_t kSharesOfThread = 16, kSomeThreads = 4;

/** Fewer than are best for one unit.  Where units are between 4 and 8 a thread, one slow thread
 * keeps the others waiting for its last one. */
constexpr int32_t kRowsOfFinerUnits = 128;

/** Read once; later changes of the environment are not seen. */
const std::string& environment_isa() {
  static const std::string isa = std::getenv("ATTNFOLD_ISA") ? std::getenv("ATTNFOLD_ISA") : "";
  return isa;
}

std::string isa_names() {
  std::vector<std::string> names;
  for (const cpu::KernelRow* row : cpu::kernel_table()) {
    if (std::find(names.begin(), names.end(), row->isa) == names.end()) names.push_back(row->isa);
  }
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

bool is_isa(const std::string& name) {
  const auto& table = cpu::kernel_table();
  return std::any_of(table.begin(), table.end(),
                     [&](const cpu::KernelRow* row) { return name == row->isa; });
}

/** Names with bf16 have a row for bf16 alone; they take the AVX-512 rows along for the other types.
 */
bool isa_admits(const std::string& isa, const char* row_isa) {
  return isa.empty() || isa == row_isa ||
         (isa.find("_bf16") != std::string::npos && is_isa(isa) &&
          std::strcmp(row_isa, "avx512") == 0);
}

/** Most keys that one unit can see: a window bounds them, and with them the states that a cut
 * leaves behind. */
int32_t max_visible_keys(const attnfold_problem& p, const UnitShape& shape) {
  const bool bounded_right = p.mask == ATTNFOLD_MASK_CAUSAL || p.window_right >= 0;
  if (p.window_left < 0 || !bounded_right) return p.max_kv_len;
  const int64_t right = p.mask == ATTNFOLD_MASK_CAUSAL ? 0 : p.window_right;
  const int64_t keys = static_cast<int64_t>(p.window_left) + right + max_unit_rows(shape) +
                       p.sink_tokens + 2 * kLeaf;
  return static_cast<int32_t>(std::min<int64_t>(p.max_kv_len, keys));
}

Status check_stream(void* stream) {
  if (stream) return invalid("stream", "NULL (the plan is on the CPU)", "a pointer");
  return {};
}

}  // namespace

Status choose_row(const Problem& problem, const char* isa, const cpu::KernelRow** row) {
  const std::string wanted = isa ? isa : environment_isa();
  const std::string argument = isa ? "isa" : "ATTNFOLD_ISA";
  std::string why;
  bool known = wanted.empty();
  // Rows of a forced ISA come first, whatever the table prefers.
  for (const bool exact : {true, false}) {
    for (const cpu::KernelRow* candidate : cpu::kernel_table()) {
      if (!isa_admits(wanted, candidate->isa)) continue;
      known = true;
      if (!wanted.empty() && exact != (wanted == candidate->isa)) continue;
      if (wanted.empty() && !cpu::is_default_for(*candidate, problem)) continue;
      const std::string reason = cpu::why_row_rejects(*candidate, problem);
      if (reason.empty()) {
        // A forced ISA that the machine lacks is an error, not a reason to take its companion rows.
        *row = candidate;
        return {};
      }
      why += std::string(why.empty() ? "" : "; ") + candidate->name + ": " + reason;
      if (!wanted.empty() && exact && reason.find("this CPU") == 0) {
        return {ATTNFOLD_UNSUPPORTED,
                argument + ": expected one that this machine runs, got " + wanted + "; " + reason};
      }
    }
  }
  if (!known) return invalid(argument, "one of " + isa_names(), wanted);
  return {ATTNFOLD_UNSUPPORTED, "problem: expected one that a kernel row serves; nearest: " + why};
}

Status Plan::create(const attnfold_problem* problem, const attnfold_execution& e,
                    std::unique_ptr<AnyPlan>* out) {
  auto plan = std::make_unique<Plan>();
  ATTNFOLD_RETURN_IF_ERROR(validate_problem(problem, &plan->given_, &plan->problem_));
  ATTNFOLD_RETURN_IF_ERROR(choose_row(plan->problem_, e.isa, &plan->row_));
  plan->threads_ = cpu::threads_of(e);
  plan->num_workers_ = e.num_workers ? e.num_workers : plan->threads_.num_threads;
  if (e.num_workers == 0 && !e.parallel_for && plan->num_workers_ >= kSomeThreads) {
    plan->shared_threads_ = plan->num_workers_;
    plan->num_workers_ *= kSharesOfThread;
  }
  plan->cut_seed_ = e.cut_seed;
  plan->prefix_use_ = e.prefix_use;
  ATTNFOLD_RETURN_IF_ERROR(plan->reserve());
  *out = std::move(plan);
  return {};
}

size_t Plan::all_scratch_bytes() const {
  return static_cast<size_t>(cpu::bodies_at_once(threads_, num_workers_)) * scratch_bytes_;
}

Status Plan::reserve() {
  shape_ = cpu::unit_shape(*row_, problem_);
  shape_.leaf_bytes = kLeaf * key_bytes();
  capacity_ = schedule_capacity(shape_, given_.max_batch, given_.max_qo_rows,
                                max_visible_keys(given_, shape_), num_workers_,
                                !problem_.ragged && prefix_use_ != ATTNFOLD_PREFIX_OFF);
  most_rows_ = shape_.max_rows;
  if (shared_threads_ > 0) {  // where there are more, units have few rows, and states fewer floats
    capacity_.state_floats =
        schedule_capacity(shape_, given_.max_batch, given_.max_qo_rows,
                          max_visible_keys(given_, shape_), shared_threads_,
                          !problem_.ragged && prefix_use_ != ATTNFOLD_PREFIX_OFF)
            .state_floats;
    UnitShape finer = shape_;
    finer.max_rows = std::min(most_rows_, kRowsOfFinerUnits);
    const ScheduleCapacity most = schedule_capacity(
        finer, given_.max_batch, given_.max_qo_rows, max_visible_keys(given_, finer), num_workers_,
        !problem_.ragged && prefix_use_ != ATTNFOLD_PREFIX_OFF);
    capacity_.units = std::max(capacity_.units, most.units);
    capacity_.items = std::max(capacity_.items, most.items);
  }
  if (capacity_.items > INT32_MAX) {
    return invalid("max_qo_rows", "maxima whose units can be counted in 31 bits",
                   given_.max_qo_rows);
  }
  scratch_bytes_ = cpu::worker_scratch_bytes(problem_, shape_);
  workspace_bytes_ = kWorkspaceAlignment + all_scratch_bytes() +
                     static_cast<size_t>(capacity_.state_floats) * sizeof(float);
  qo_indptr_.resize(static_cast<size_t>(given_.max_batch) + 1);
  kv_indptr_.resize(static_cast<size_t>(given_.max_batch) + 1);
  kv_len_.resize(static_cast<size_t>(given_.max_batch));
  visible_prefix_.resize(static_cast<size_t>(given_.max_batch));
  mask_width_.resize(static_cast<size_t>(given_.max_batch));
  mask_indptr_.resize(static_cast<size_t>(given_.max_batch) + 1);
  const auto have = [&](auto* array, int64_t n) {
    using T = std::remove_reference_t<decltype((*array)[0])>;
    array->reset(new (std::nothrow) T[static_cast<size_t>(n)]);
    return *array != nullptr;
  };
  const int64_t requests = capacity_.requests;
  if (!have(&units_, capacity_.units) || !have(&items_, capacity_.items) ||
      !have(&shared_, capacity_.shared) || !have(&members_, capacity_.members) ||
      !have(&prefix_requests_, requests) || !have(&prefix_classes_, requests) ||
      !have(&prefix_nodes_, requests) ||
      !have(&prefix_ints_, 3 * requests + capacity_.prefix_slots) ||
      !have(&requests_, capacity_.members + given_.max_batch)) {
    return {ATTNFOLD_INTERNAL, "memory: expected room for the schedules of max_batch " +
                                   std::to_string(given_.max_batch) + " and max_qo_rows " +
                                   std::to_string(given_.max_qo_rows) + ", got none"};
  }
  if (problem_.blocks.block_size > 0) {
    // A visible prefix reaches beyond a window: the bound is that of all keys.
    const int64_t leaves = (static_cast<int64_t>(given_.max_kv_len) + kLeaf - 1) / kLeaf;
    live_leaves_.reset(new (std::nothrow) int32_t[static_cast<size_t>(capacity_.units * leaves)]);
  }
  if (problem_.blocks.block_size > 0 && !live_leaves_) {
    return {ATTNFOLD_INTERNAL, "memory: expected room for the live leaves of max_batch " +
                                   std::to_string(given_.max_batch) + ", max_qo_rows " +
                                   std::to_string(given_.max_qo_rows) + " and max_kv_len " +
                                   std::to_string(given_.max_kv_len) + ", got none"};
  }
  worker_items_.resize(static_cast<size_t>(num_workers_) + 1);
  schedule_.units = units_.get();
  schedule_.items = items_.get();
  for (int32_t r = 0; r < given_.max_batch; ++r) requests_[capacity_.members + r] = r;
  group_of_.resize(static_cast<size_t>(given_.max_batch));
  schedule_.shared = shared_.get();
  schedule_.members = members_.get();
  schedule_.worker_items = worker_items_.data();
  int32_t* const ints = prefix_ints_.get();
  schedule_.prefix = {prefix_requests_.get(), ints,
                      ints + requests,        ints + 2 * requests,
                      prefix_classes_.get(),  prefix_nodes_.get(),
                      ints + 3 * requests};
  schedule_.live_leaves = live_leaves_.get();
  return {};
}

int32_t Plan::rows_of_units(int32_t num_tokens) const {
  const int64_t rows = int64_t{num_tokens} * problem_.group_size * problem_.kv_heads;
  const int64_t units = rows / most_rows_;
  const bool are_few = units >= 4 * shared_threads_ && units < 8 * shared_threads_;
  return are_few ? std::min(most_rows_, kRowsOfFinerUnits) : most_rows_;
}

Status Plan::update(const attnfold_lengths* lengths, void* stream) {
  ATTNFOLD_RETURN_IF_ERROR(check_stream(stream));
  attnfold_lengths l;
  ATTNFOLD_RETURN_IF_ERROR(validate_lengths(given_, problem_, lengths, &l));
  UnitShape shape = shape_;
  shape.max_rows = rows_of_units(l.batch > 0 ? l.qo_indptr[l.batch] : 0);
  ATTNFOLD_RETURN_IF_ERROR(validate_prefixes(given_, shape, problem_.mask, l, group_of_.data()));
  lengths_ = {};
  lengths_.batch = l.batch;
  lengths_.qo_indptr = qo_indptr_.data();
  lengths_.kv_len = kv_len_.data();
  lengths_.block_table = l.block_table;
  lengths_.block_table_stride = l.block_table_stride;
  lengths_.kv_indptr = kv_indptr_.data();
  lengths_.kv_indices = l.kv_indices;
  lengths_.mask_bits = l.mask_bits;
  lengths_.block_indptr = l.block_indptr;
  lengths_.block_indices = l.block_indices;
  if (l.batch > 0 && l.visible_prefix) {
    std::copy_n(l.visible_prefix, l.batch, visible_prefix_.begin());
    lengths_.visible_prefix = visible_prefix_.data();
  }
  if (l.batch > 0 && l.mask_width) {
    std::copy_n(l.mask_width, l.batch, mask_width_.begin());
    std::copy_n(l.mask_indptr, l.batch + 1, mask_indptr_.begin());
    lengths_.mask_width = mask_width_.data();
    lengths_.mask_indptr = mask_indptr_.data();
  }
  qo_indptr_[0] = 0;
  reads_kv_ = false;
  for (int32_t r = 0; r < l.batch; ++r) {
    qo_indptr_[r + 1] = l.qo_indptr[r + 1];
    kv_len_[r] = l.kv_len ? l.kv_len[r] : l.kv_indptr[r + 1] - l.kv_indptr[r];
    reads_kv_ = reads_kv_ || (kv_len_[r] > 0 && qo_indptr_[r + 1] > qo_indptr_[r]);
  }
  if (l.batch > 0 && l.kv_indptr)
    std::copy(l.kv_indptr, l.kv_indptr + l.batch + 1, kv_indptr_.begin());
  num_kv_rows_ = l.num_kv_rows;
  shape_ = shape;
  PrefixSource prefixes;
  prefixes.max_batch = static_cast<int32_t>(capacity_.requests);
  prefixes.max_state_floats = capacity_.prefix_floats;
  prefixes.page_size = given_.page_size;
  prefixes.always = prefix_use_ == ATTNFOLD_PREFIX_ALWAYS;
  prefixes.num_groups = l.num_prefix_groups;
  prefixes.keys = l.prefix_keys;
  prefixes.indptr = l.prefix_indptr;
  prefixes.requests = l.prefix_requests;
  build_schedule(shape_, problem_.mask, problem_.blocks, lengths_, prefixes, num_workers_,
                 cut_seed_, capacity_.state_floats, &schedule_, shared_threads_);
  for (int32_t m = 0; m < schedule_.num_members; ++m) requests_[m] = members_[m].request;
  updated_ = true;
  return {};
}

Status Plan::check_updated() const {
  if (updated_) return {};
  return invalid("plan", "a successful attnfold_plan_update before", "none");
}

Status Plan::run(const attnfold_tensors* tensors, void* workspace, size_t workspace_bytes,
                 void* stream) const {
  ATTNFOLD_RETURN_IF_ERROR(check_stream(stream));
  ATTNFOLD_RETURN_IF_ERROR(check_updated());
  cpu::RunArgs args{};
  const Extent used =
      workspace_extent(workspace, workspace_bytes < workspace_bytes_ ? 0 : workspace_bytes_);
  const TensorExtents extents{qo_indptr_[lengths_.batch],
                              problem_.ragged ? num_kv_rows_ : given_.page_size,
                              problem_.ragged ? 1 : given_.num_pages,
                              reads_kv_,
                              true,
                              used};
  ATTNFOLD_RETURN_IF_ERROR(validate_tensors(given_, extents, tensors, &args.tensors));
  if (extents.qo_rows == 0) return {};
  if (!workspace) return {ATTNFOLD_OUT_OF_WORKSPACE, "workspace: expected a pointer, got NULL"};
  if (workspace_bytes < workspace_bytes_) {
    return {ATTNFOLD_OUT_OF_WORKSPACE, "workspace_bytes: expected at least " +
                                           std::to_string(workspace_bytes_) + ", got " +
                                           std::to_string(workspace_bytes)};
  }
  const uintptr_t base = (reinterpret_cast<uintptr_t>(workspace) + kWorkspaceAlignment - 1) &
                         ~(kWorkspaceAlignment - 1);
  args.problem = &problem_;
  args.shape = &shape_;
  args.schedule = &schedule_;
  args.lengths = &lengths_;
  args.scratch = reinterpret_cast<char*>(base);
  args.scratch_bytes = scratch_bytes_;
  args.states = reinterpret_cast<float*>(base + all_scratch_bytes());
  cpu::run(*row_, threads_, args);
  return {};
}

int64_t Plan::key_bytes() const {
  const int64_t width = problem_.head_dim_qk + (problem_.v_in_k ? 0 : problem_.head_dim_vo);
  const int64_t scales = (given_.k_scale_kind == ATTNFOLD_SCALE_PER_TOKEN ? 1 : 0) +
                         (given_.v_scale_kind == ATTNFOLD_SCALE_PER_TOKEN ? 1 : 0);
  return width * dtype_bytes(problem_.kv_dtype) + scales * static_cast<int64_t>(sizeof(float));
}

int64_t Plan::kv_bytes() const {
  int64_t rows = 0;
  for (int32_t i = 0; i < schedule_.num_units; ++i) {
    const Unit& u = units_[i];
    int64_t keys = static_cast<int64_t>(u.sink_keys) + u.key_end - u.key_begin;
    if (u.live) keys = num_block_keys(u);
    rows += keys * u.num_kv_heads;
  }
  return rows * key_bytes();
}

int64_t Plan::num_block_keys(const Unit& u) const {
  const HeadBlocks blocks =
      head_blocks(problem_.blocks, lengths_, problem_.kv_heads, u.request, u.kv_head_begin);
  const RequestShape request = request_shape(lengths_, u.request);
  const int64_t first_local = first_local_key(
      problem_.blocks, static_cast<int64_t>(request.kv_len) - request.qo_len + u.qo_begin);
  int64_t keys = 0;
  const int64_t ranges[2][2] = {{0, u.sink_keys}, {u.key_begin, u.key_end}};
  for (const auto& [begin, end] : ranges) {
    for (int64_t key = begin; key < end;) {
      const KeyStretch stretch = next_stretch(blocks, first_local, key);
      const int64_t stop = std::min(stretch.end, end);
      keys += std::max<int64_t>(stop - stretch.begin, 0);
      key = stop;
    }
  }
  return keys;
}

uint64_t Plan::schedule_id() const {
  uint64_t h = 0xcbf29ce484222325u;
  int32_t share = -1, worker = -1;  // shares counted without the empty ones
  for (int32_t i = 0; i < schedule_.num_items; ++i) {
    const Item& item = items_[i];
    const Unit& u = units_[item.unit];
    if (item.worker != worker) ++share;
    worker = item.worker;
    for (const int64_t value : {share, u.request, u.qo_begin, u.num_qo, u.kv_head_begin,
                                u.num_kv_heads, item.leaf_begin, item.leaf_end}) {
      h = hash_step(h, value);
    }
    for (int32_t m = 0; m < u.num_members; ++m) {
      h = hash_step(h, schedule_.members[u.member + m].request);
    }
    for (int32_t at = item.leaf_begin; u.live && at < item.leaf_end; ++at)
      h = hash_step(h, u.live[at]);
  }
  return h;
}

const int32_t* Plan::requests_of(const Unit& unit) const {
  return requests_.get() + (unit.num_members > 0 ? unit.member : capacity_.members + unit.request);
}

Status Plan::report(attnfold_plan_report* out) const {
  ATTNFOLD_RETURN_IF_ERROR(check_updated());
  attnfold_plan_report r{};
  r.num_workers = schedule_.num_workers;
  r.num_requests = lengths_.batch;
  r.num_units = schedule_.num_units;
  r.num_items = schedule_.num_items;
  r.num_cuts = schedule_.num_items - schedule_.num_units;
  for (int32_t i = 0; i < schedule_.num_items; ++i) {
    const Unit& u = units_[items_[i].unit];
    const int32_t end = items_[i].leaf_end;
    if (end != u.leaf_end && chunk_begin(u, end) != end) ++r.num_cuts_inside;
  }
  for (int32_t i = 0; i < schedule_.num_units; ++i) {
    const Unit& u = units_[i];
    r.num_leaves += num_leaves(u);
    int32_t chunks = 0;
    for (int32_t at = first_leaf(u); at < u.leaf_end; at = chunk_end(u, at)) ++chunks;
    if (u.starts_inside) chunks += u.leaf_begin / kSuperChunk;
    r.max_super_chunks = std::max(r.max_super_chunks, chunks);
  }
  r.max_worker_cost = schedule_.max_worker_cost;
  r.total_cost = schedule_.total_cost;
  r.max_leaf_cost = schedule_.max_leaf_cost;
  r.partial_bytes = 2 * schedule_.state_floats * static_cast<int64_t>(sizeof(float));
  r.kv_bytes = kv_bytes();
  r.schedule_id = schedule_id();
  r.num_prefix_groups = schedule_.num_prefix_groups;
  r.num_shared_leaves = schedule_.num_shared_leaves;
  r.saved_kv_bytes = schedule_.saved_bytes;
  const size_t size = out->struct_size;
  r.struct_size = size;
  std::memcpy(static_cast<void*>(out), &r, std::min(size, sizeof(r)));
  return {};
}

Status Plan::item(int32_t index, attnfold_plan_item* out) const {
  ATTNFOLD_RETURN_IF_ERROR(check_updated());
  if (index < 0 || index >= schedule_.num_items) {
    return invalid("index", "0.." + std::to_string(schedule_.num_items - 1), index);
  }
  const Item& item = items_[index];
  const Unit& u = units_[item.unit];
  const size_t size = out->struct_size;
  const int32_t begin = std::max(item.leaf_begin, u.leaf_begin),
                sink_end = std::min(item.leaf_end, u.leaf_begin);
  const bool sinks = item.leaf_begin < sink_end;
  attnfold_plan_item i = {size,
                          item.worker,
                          item.unit,
                          u.request,
                          u.qo_begin,
                          u.num_qo,
                          u.kv_head_begin,
                          u.num_kv_heads,
                          begin,
                          std::max(item.leaf_end, begin),
                          sinks ? item.leaf_begin - first_leaf(u) : 0,
                          sinks ? sink_end - first_leaf(u) : 0,
                          std::max(u.num_members, 1),
                          requests_of(u),
                          item.leaf_end - item.leaf_begin};
  if (u.live && i.num_leaves > 0) {
    i.leaf_begin = leaf_at(u, item.leaf_begin);
    i.leaf_end = leaf_at(u, item.leaf_end - 1) + 1;
  }
  std::memcpy(static_cast<void*>(out), &i, std::min(size, sizeof(i)));
  return {};
}

}  // namespace attnfold
