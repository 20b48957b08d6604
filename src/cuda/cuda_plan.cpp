// A plan on a GPU: memory for its schedule, and the launches of a step and of a layer.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "cuda/backend.h"
#include "cuda/cuda_validate.h"
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "cuda/plan_kernel.h"
#include "cuda/tensor_map.h"
#include "plan/hash.h"
#include "plan/validate.h"

namespace attnfold::cuda {
namespace {

/** The largest unit of which both strides are multiples, so that the place of any key fits in 32
 * bits. */
Status kv_steps(const char* name, const View<const char>& view, bool ragged, int64_t num_pages,
                KvSteps* out) {
  const int64_t page = ragged ? 0 : view.stride_page, token = view.stride_token;
  const auto unserved = [&](const char* expected) -> Status {
    return {ATTNFOLD_UNSUPPORTED, std::string(name) + ": expected " + expected + ", got " +
                                      std::to_string(page) + " and " + std::to_string(token)};
  };
  if (page < 0 || token < 0)
    return unserved("strides of pages and tokens that are not negative on CUDA");
  const int64_t unit = std::max<int64_t>(std::gcd(page, token), 1);
  if (std::max(page / unit * num_pages, token / unit) > INT32_MAX || unit > INT32_MAX / 2)
    return unserved("strides whose multiples count every row in 31 bits");
  *out = {static_cast<uint32_t>(ragged ? token / unit : page / unit),
          static_cast<uint32_t>(token / unit), static_cast<uint32_t>(2 * unit)};
  return {};
}

/** A schedule read back from the device. */
struct HostSchedule {
  RangeCounts counts;
  SharedCounts num_shared;
  std::vector<RowSet> sets, tiles;
  std::vector<RangePlace> places;
};

class CudaPlan final : public AnyPlan {
 public:
  Status create(const attnfold_problem* problem, const attnfold_execution& execution);
  Status update(const attnfold_lengths* lengths, void* stream) override;
  Status run(const attnfold_tensors* tensors, void* workspace, size_t workspace_bytes,
             void* stream) const override;
  size_t workspace_bytes() const override { return workspace_bytes_; }
  Status report(attnfold_plan_report* out) const override;
  Status item(int32_t index, attnfold_plan_item* out) const override;
  const char* kernel() const override { return row_->name; }
  const char* numerics_id() const override { return row_->numerics_id; }

 private:
  /** One new token per request, unless the maxima leave room for more. */
  bool only_decodes() const { return given_.max_qo_rows <= given_.max_batch; }
  Status choose_row();
  Status choose_large_kernel();
  void choose_small_kernel();
  Status reserve(const attnfold_execution& execution);
  Status load_kernels();
  int64_t max_leaves() const;
  Status large_args(const AttendArgs& args, LargeArgs* out) const;
  Status launch_both(const AttendArgs& args, const cudaLaunchConfig_t& config, bool overlaps) const;
  Status launch_small(const AttendArgs& args, cudaLaunchConfig_t config, bool overlaps) const;
  Status launch_fold(const AttendArgs& args, int64_t shared, cudaLaunchConfig_t config) const;
  uint32_t* claimed_counter(const void* workspace) const;
  bool serves_tiles(int64_t num_kv_rows) const;
  int64_t most_shared_sets() const;
  Status check_updated() const;
  Status read_schedule(HostSchedule* out) const;

  attnfold_problem given_;  // every default resolved
  Problem problem_;
  const KernelRow* row_ = nullptr;
  SmallKernel small_{};
  LargeKernel large_{};       // dim = 0: none
  bool takes_boxes_ = false;  // it is that of wgmma, which asks the tensor copy engine for keys
  KernelList kernels_{};
  bool overlaps_ = false;  // kernels wait for those before them by themselves
  int device_ = 0, num_sms_ = 0;
  RangeShape shape_{};
  // Runs that share a workspace follow one another, so that each workspace has counters, of claimed
  // ranges and of tiles, which the second kernel sets back.  Workspaces beyond the 64th hold their
  // own, and an operation before the first kernel does that.
  static constexpr size_t kCounters = 64, kCounterStride = 32, kCounts = 2;  // of 4 bytes
  mutable std::array<std::atomic<const void*>, kCounters> workspaces_{};
  uint32_t* counters_ = nullptr;
  size_t own_counter_ = 0;  // where it is in a workspace
  DeviceMemory memory_;
  RangeSchedule schedule_{};
  size_t workspace_bytes_ = 0, states_floats_ = 0;

  bool updated_ = false;
  Lengths lengths_{};  // page tables on the device, the caller's
  int64_t num_kv_rows_ = 0;
};

Status CudaPlan::create(const attnfold_problem* problem, const attnfold_execution& execution) {
  ATTNFOLD_RETURN_IF_ERROR(validate_problem(problem, &given_, &problem_));
  ATTNFOLD_RETURN_IF_ERROR(choose_device(execution, &device_));
  const CurrentDevice current(device_);
  ATTNFOLD_RETURN_IF_ERROR(choose_row());
  ATTNFOLD_RETURN_IF_ERROR(choose_large_kernel());
  choose_small_kernel();
  ATTNFOLD_RETURN_IF_ERROR(reserve(execution));
  return load_kernels();
}

Status CudaPlan::choose_row() {
  std::string reasons;
  for (int i = 0; i < kNumKernelRows; ++i) {
    const std::string why = why_row_rejects(kernel_row(i), given_);
    if (why.empty()) row_ = &kernel_row(i);
    reasons += (i > 0 ? "; " : "") + std::string(kernel_row(i).name) + ": " + why;
  }
  if (!row_)
    return {ATTNFOLD_UNSUPPORTED,
            "problem: expected one that a kernel row serves; nearest: " + reasons};
  kernels_ = row_->dtype == DType::bf16 ? kernels_bf16() : kernels_f16();
  return {};
}

/** The instantiation with the fewest rows and elements that hold the problem's.  None of this
 * changes a bit. */
void CudaPlan::choose_small_kernel() {
  shape_.group_size = problem_.group_size;
  // A tile and a leaf take wgmma's kernel no longer than a row set and a leaf, the other thrice.
  // Ragged keys may come without what the copy engine has to know of them: then there are no tiles.
  const bool few = takes_boxes_ && !problem_.ragged;
  shape_.set_rows = choose_set_rows(problem_.group_size, only_decodes(), few);
  shape_.fewest_tile_rows = few ? shape_.set_rows : 2 * shape_.set_rows;
  shape_.tile_cost = takes_boxes_ ? 1 : kMmaTileCost;
  const int32_t tiles = shape_.set_rows <= 8 ? 1 : 2;
  const SmallKernel* best = nullptr;
  for (int32_t i = 0; i < kernels_.num_small; ++i) {
    const SmallKernel& k = kernels_.small[i];
    if (k.row_tiles == tiles && k.dim >= problem_.head_dim_vo && (!best || k.dim < best->dim))
      best = &k;
  }
  small_ = *best;
}

/** The large-row kernel, where a call may have many rows: that of wgmma, or else that of mma.sync,
 * if one of them serves the problem here.  The small-row kernel has the same bits, and answers
 * everything else. */
Status CudaPlan::choose_large_kernel() {
  if (only_decodes() || given_.max_kv_len == 0 || problem_.score_scale <= 0.0f) return {};
  const bool is_bf16 = row_->dtype == DType::bf16;
  const bool boxes = problem_.ragged || problem_.page_size % kBoxKeys == 0;
  if (boxes && problem_.softcap == 0.0f && has_tensor_maps()) {
    const LargeKernelList list = is_bf16 ? large_kernels_bf16() : large_kernels_f16();
    for (int32_t i = 0; i < list.count; ++i) {
      if (list.large[i].dim != problem_.head_dim_vo) continue;
      // Only its machine code for sm_90a has a body.
      cudaFuncAttributes attributes;
      ATTNFOLD_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, list.large[i].attend));
      if (attributes.ptxVersion < 90) continue;
      large_ = list.large[i];
      takes_boxes_ = true;
      return {};
    }
  }
  int room = 0;
  ATTNFOLD_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_));
  const LargeKernelList list = is_bf16 ? large_mma_kernels_bf16() : large_mma_kernels_f16();
  for (int32_t i = 0; i < list.count && large_.dim == 0; ++i) {
    if (list.large[i].dim >= problem_.head_dim_vo &&
        list.large[i].shared_bytes <= static_cast<size_t>(room))
      large_ = list.large[i];
  }
  return {};
}

/** Leaves that the rows of one row set may see. */
int64_t CudaPlan::max_leaves() const {
  const int64_t all = (static_cast<int64_t>(given_.max_kv_len) + kLeaf - 1) / kLeaf;
  const bool bounded_right = given_.mask == ATTNFOLD_MASK_CAUSAL || given_.window_right >= 0;
  if (given_.window_left < 0 || !bounded_right) return all;
  const int64_t right = given_.mask == ATTNFOLD_MASK_CAUSAL ? 0 : given_.window_right;
  const int64_t keys =
      given_.window_left + right + shape_.set_rows + given_.sink_tokens + 3 * kLeaf;
  return std::min(all, (keys + kLeaf - 1) / kLeaf);
}

Status CudaPlan::reserve(const attnfold_execution& execution) {
  ATTNFOLD_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, device_));
  const int32_t workers =
      execution.num_workers ? execution.num_workers : num_sms_ * small_.blocks_per_sm;
  shape_.cut_seed = execution.cut_seed;
  shape_.kv_heads = problem_.kv_heads;
  if (large_.dim > 0 && (problem_.ragged || given_.num_pages > 0)) {
    shape_.tile_blocks =
        execution.num_workers ? std::min(execution.num_workers, num_sms_) : num_sms_;
  }
  const int32_t owned = execution.num_workers ? std::max(workers / problem_.kv_heads, 1)
                                              : choose_num_ranges(workers, problem_.kv_heads);
  const int64_t max_sets =
      static_cast<int64_t>(given_.max_batch) +
      static_cast<int64_t>(given_.max_qo_rows) * shape_.group_size / shape_.set_rows;
  if (max_sets > INT32_MAX / 4) {
    return invalid("max_qo_rows", "maxima whose row sets can be counted in 29 bits",
                   given_.max_qo_rows);
  }
  shape_.claims = choose_claims(owned, max_sets * max_leaves(), max_leaves(), shape_.cut_seed != 0);
  shape_.num_ranges = owned * (shape_.claims + 1);
  if (shape_.claims > 0) small_.attend = small_.attend_claiming;
  const int64_t states =
      max_states(owned, max_sets, max_leaves()) + (shape_.claims > 0 ? kMaxClaimed * owned : 0);
  const int64_t state_rows = states * problem_.kv_heads * shape_.set_rows;
  if (state_rows > INT32_MAX)
    return invalid("max_kv_len", "maxima whose states can be counted in 31 bits",
                   given_.max_kv_len);
  states_floats_ = static_cast<size_t>(state_rows) * static_cast<size_t>(state_pitch(problem_));
  workspace_bytes_ = (states_floats_ + static_cast<size_t>(shape_.tile_blocks) *
                                           static_cast<size_t>(tile_total_floats(large_.dim))) *
                     sizeof(float);
  own_counter_ = workspace_bytes_;
  if (shape_.claims > 0 || shape_.tile_blocks > 0) workspace_bytes_ += 16;

  size_t bytes = 0;
  const auto place = [&](size_t size) {
    const size_t at = bytes;
    bytes += (size + 255) / 256 * 256;
    return at;
  };
  const size_t counts = place(sizeof(RangeCounts)), num_shared = place(sizeof(SharedCounts));
  const size_t sets = place(static_cast<size_t>(max_sets + 1) * sizeof(RowSet));
  const size_t places = place((static_cast<size_t>(shape_.num_ranges) + 1) * sizeof(RangePlace));
  const size_t ranges = place(static_cast<size_t>(shape_.num_ranges) * sizeof(Range));
  const size_t shared = place(static_cast<size_t>(shape_.num_ranges) * sizeof(SharedSet));
  const int64_t max_tiles = shape_.tile_blocks == 0 ? 0
                                                    : static_cast<int64_t>(given_.max_batch) +
                                                          static_cast<int64_t>(given_.max_qo_rows) *
                                                              shape_.group_size / kTileRows;
  const size_t claimed =
      place(static_cast<size_t>(shape_.claims) * static_cast<size_t>(owned) * sizeof(Range));
  const size_t counters = place(kCounters * kCounterStride * sizeof(uint32_t));
  const size_t num_tiles = place(sizeof(TileCounts));
  const size_t tiles = place(static_cast<size_t>(2 * max_tiles) * sizeof(RowSet));
  ATTNFOLD_RETURN_IF_ERROR(memory_.allocate(bytes, device_));
  ATTNFOLD_RETURN_IF_CUDA_ERROR(cudaMemset(memory_.data(), 0, bytes));
  char* base = memory_.data();
  schedule_ = {reinterpret_cast<RangeCounts*>(base + counts),
               reinterpret_cast<SharedCounts*>(base + num_shared),
               reinterpret_cast<RowSet*>(base + sets),
               static_cast<int32_t>(max_sets),
               reinterpret_cast<RangePlace*>(base + places),
               reinterpret_cast<Range*>(base + ranges),
               reinterpret_cast<SharedSet*>(base + shared),
               reinterpret_cast<TileCounts*>(base + num_tiles),
               reinterpret_cast<RowSet*>(base + tiles),
               static_cast<int32_t>(max_tiles),
               reinterpret_cast<Range*>(base + claimed)};
  counters_ = reinterpret_cast<uint32_t*>(base + counters);
  return {};
}

/** Loads every kernel that a step may use, so that neither update nor run does. */
Status CudaPlan::load_kernels() {
  ATTNFOLD_RETURN_IF_CUDA_ERROR(load_plan_kernel());
  const auto set = [](const void* kernel, cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute(kernel, attribute, value);
  };
  ATTNFOLD_RETURN_IF_CUDA_ERROR(set(small_.attend, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(small_.shared_bytes)));
  for (const void* kernel : {large_.attend, large_.attend_modified}) {
    if (!kernel) continue;
    ATTNFOLD_RETURN_IF_CUDA_ERROR(set(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(large_.shared_bytes)));
  }
  // An SM holds blocks of both kernels at once only if they divide its memory alike.
  for (const void* kernel :
       {small_.attend, kernels_.fold.fold_4, kernels_.fold.fold_2, kernels_.fold.runs}) {
    ATTNFOLD_RETURN_IF_CUDA_ERROR(set(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared));
  }
  cudaFuncAttributes attributes;
  ATTNFOLD_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, small_.attend));
  overlaps_ = waits_by_itself(attributes);
  for (const void* kernel : {kernels_.fold.fold_4, kernels_.fold.fold_2, kernels_.fold.runs})
    ATTNFOLD_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, kernel));
  return {};
}

Status CudaPlan::update(const attnfold_lengths* given, void* stream) {
  const attnfold_lengths defaults = ATTNFOLD_LENGTHS_INIT;
  attnfold_lengths l;
  ATTNFOLD_RETURN_IF_ERROR(read_struct("lengths", given, defaults, &l));
  ATTNFOLD_RETURN_IF_ERROR(validate_device_lengths(given_, l));
  PlanArgs args{shape_,      problem_.mask, l.batch,     given_.max_kv_len,
                l.qo_indptr, l.kv_len,      l.kv_indptr, schedule_};
  if (!serves_tiles(l.num_kv_rows)) args.shape.tile_blocks = 0;
  const CurrentDevice current(device_);
  ATTNFOLD_RETURN_IF_CUDA_ERROR(launch_plan(args, static_cast<cudaStream_t>(stream)));
  lengths_ = {l.batch,     l.qo_indptr, l.kv_len, l.block_table, l.block_table_stride,
              l.kv_indptr, l.kv_indices};
  num_kv_rows_ = l.num_kv_rows;
  updated_ = true;
  return {};
}

/** The counters for this workspace, or null where there are too many. */
uint32_t* CudaPlan::claimed_counter(const void* workspace) const {
  for (size_t i = 0; i < kCounters; ++i) {
    const void* of = nullptr;  // who comes first takes it
    if (workspaces_[i].compare_exchange_strong(of, workspace) || of == workspace)
      return counters_ + i * kCounterStride;
  }
  return nullptr;
}

/** Whether a step's tiles have a kernel.  The copy engine has to know where rows end. */
bool CudaPlan::serves_tiles(int64_t num_kv_rows) const {
  return shape_.tile_blocks > 0 && !(takes_boxes_ && problem_.ragged && num_kv_rows <= 0);
}

Status CudaPlan::check_updated() const {
  if (updated_) return {};
  return invalid("plan", "a successful attnfold_plan_update before", "none");
}

/** Launches the second kernel.  It serves any number of row sets; for `shared` of them tasks are so
 * narrow, and have so many warps each, as find room at once. */
Status CudaPlan::launch_fold(const AttendArgs& args, int64_t shared,
                             cudaLaunchConfig_t config) const {
  const FoldKernel& kernel = kernels_.fold;
  const int64_t rows = shared * problem_.kv_heads * shape_.set_rows, warps = kernel.threads / 32;
  const int64_t max_blocks = int64_t{num_sms_} * 4, max_chunks = max_leaves() / kSuperChunk + 2;
  FoldArgs fold{args, 3, false};
  int32_t elements = 4;
  const auto tasks = [&] {
    return rows * ((problem_.head_dim_vo - 1) / (elements << fold.log_lanes) + 1);
  };
  const void* chosen = kernel.fold_4;
  config.dynamicSmemBytes = (static_cast<size_t>(shape_.num_ranges) + 1) * sizeof(RangePlace);
  // A block has 16 groups of 8 lanes, or 32 of 4: one for each super-chunk, if that leaves no block
  // to start late.  Two elements in a lane leave room for more states on their way.
  constexpr int64_t kChunksOf16Groups = 18;  // the largest row rarely begins and ends inside one
  elements = 2;
  if (max_chunks <= kChunksOf16Groups && tasks() <= (max_chunks > 4 ? 1 : 2) * int64_t{num_sms_}) {
    chosen = kernel.fold_2;
    fold.whole_block = max_chunks > 4;
  } else {
    elements = 4;
    fold.log_lanes = 2;
    if (max_chunks <= kChunksOf16Groups || tasks() > num_sms_) fold.log_lanes = 3;
    fold.whole_block = max_chunks > 32 >> fold.log_lanes && tasks() <= int64_t{num_sms_} * 2;
    if (!fold.whole_block && max_chunks > 10 && small_.row_tiles == 1) {
      chosen = kernel.runs;  // a row's super-chunks would take several passes
      fold.log_lanes = 5;
      config.dynamicSmemBytes = 0;
    }
    while (fold.log_lanes < 5 && tasks() > max_blocks * warps) ++fold.log_lanes;
  }
  const int64_t blocks = fold.whole_block ? tasks() : (tasks() + warps - 1) / warps;
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(blocks, max_blocks)));
  config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
  void* parameters[] = {&fold};
  ATTNFOLD_RETURN_IF_CUDA_ERROR(cudaLaunchKernelExC(&config, chosen, parameters));
  return {};
}

/** What the large-row kernel is given. */
Status CudaPlan::large_args(const AttendArgs& args, LargeArgs* out) const {
  out->attend = args;
  out->exponent_scale = args.tensors.alibi_slopes ? 1.0f : args.problem.score_scale;
  out->totals = args.states + states_floats_;
  const Mask& mask = args.problem.mask;
  out->sees_prefixes = mask.window_left < 0 && mask.window_right < 0 && mask.attention_chunk <= 0;
  if (!takes_boxes_) return {};
  ATTNFOLD_RETURN_IF_ERROR(
      make_key_places("k", problem_, args.tensors.k, given_.num_pages, num_kv_rows_, &out->k));
  return make_key_places("v", problem_, args.tensors.v, given_.num_pages, num_kv_rows_, &out->v);
}

/** Launches the large-row kernel, for however many tiles there are, and the others beside it:
 * ranges and tiles have nothing to do with each other. */
Status CudaPlan::launch_both(const AttendArgs& args, const cudaLaunchConfig_t& config,
                             bool overlaps) const {
  LargeArgs large{};
  ATTNFOLD_RETURN_IF_ERROR(large_args(args, &large));
  cudaLaunchConfig_t first = config;
  if (!overlaps) first.numAttrs = 0;
  first.gridDim = dim3(static_cast<unsigned>(shape_.tile_blocks));
  first.blockDim = dim3(static_cast<unsigned>(large_.threads));
  first.dynamicSmemBytes = large_.shared_bytes;
  void* parameters[] = {&large};
  const bool modified = problem_.softcap != 0.0f || args.tensors.alibi_slopes;
  ATTNFOLD_RETURN_IF_CUDA_ERROR(
      cudaLaunchKernelExC(&first, modified ? large_.attend_modified : large_.attend, parameters));
  AttendArgs beside = args;
  beside.beside_tiles = true;
  return launch_small(beside, config, true);
}

Status CudaPlan::run(const attnfold_tensors* tensors, void* workspace, size_t workspace_bytes,
                     void* stream) const {
  ATTNFOLD_RETURN_IF_ERROR(check_updated());
  AttendArgs args{};
  args.problem = problem_;
  args.problem.score_scale =
      problem_.score_scale + problem_.score_scale_low;  // one float here: rounded to nearest
  args.lengths = lengths_;
  const Extent used =
      workspace_extent(workspace, workspace_bytes < workspace_bytes_ ? 0 : workspace_bytes_);
  ATTNFOLD_RETURN_IF_ERROR(
      validate_device_tensors(given_, num_kv_rows_, used, tensors, &args.tensors));
  if (lengths_.batch == 0 || given_.max_qo_rows == 0) return {};
  const int64_t num_pages = problem_.ragged ? 1 : given_.num_pages;
  ATTNFOLD_RETURN_IF_ERROR(
      kv_steps("k_stride_page", args.tensors.k, problem_.ragged, num_pages, &args.k_steps));
  ATTNFOLD_RETURN_IF_ERROR(
      kv_steps("v_stride_page", args.tensors.v, problem_.ragged, num_pages, &args.v_steps));
  if (!workspace) return {ATTNFOLD_OUT_OF_WORKSPACE, "workspace: expected a pointer, got NULL"};
  if (workspace_bytes < workspace_bytes_) {
    return {ATTNFOLD_OUT_OF_WORKSPACE, "workspace_bytes: expected at least " +
                                           std::to_string(workspace_bytes_) + ", got " +
                                           std::to_string(workspace_bytes)};
  }
  if (reinterpret_cast<uintptr_t>(workspace) % 16 != 0) {
    return invalid("workspace", "an address that is a multiple of 16", "another");
  }
  args.shape = shape_;
  args.page_shift = -1;
  for (int32_t i = 0; i < 31; ++i) {
    if (problem_.page_size == 1 << i) args.page_shift = i;
  }
  args.schedule = schedule_;
  args.states = static_cast<float*>(workspace);

  // Each kernel may start while the one before it ends, if its code waits for that.
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &overlap;
  config.numAttrs = overlaps_ ? 1 : 0;
  const CurrentDevice current(device_);
  const bool tiles = serves_tiles(num_kv_rows_), counts = shape_.claims > 0 || tiles;
  if (counts) args.claimed = claimed_counter(workspace);
  const bool overlaps = !counts || args.claimed;
  if (!overlaps) {
    args.claimed = reinterpret_cast<uint32_t*>(static_cast<char*>(workspace) + own_counter_);
    ATTNFOLD_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(args.claimed, 0, kCounts * sizeof(uint32_t), config.stream));
  }
  if (!tiles) return launch_small(args, config, overlaps);
  if (most_shared_sets() > 0) args.tiles_done = args.claimed + 1;
  return launch_both(args, config, overlaps);
}

/** Launches the small-row kernel, and the fold of what its ranges leave behind.  `overlaps`: it may
 * start while the kernel before it ends. */
Status CudaPlan::launch_small(const AttendArgs& args, cudaLaunchConfig_t config,
                              bool overlaps) const {
  cudaLaunchConfig_t first = config;
  if (!overlaps) first.numAttrs = 0;
  first.gridDim =
      dim3(static_cast<unsigned>(problem_.kv_heads), static_cast<unsigned>(num_owned(shape_)));
  first.blockDim = dim3(static_cast<unsigned>(small_.threads));
  first.dynamicSmemBytes = small_.shared_bytes;
  void* parameters[] = {const_cast<AttendArgs*>(&args)};
  const auto launch = [&]() -> Status {
    ATTNFOLD_RETURN_IF_CUDA_ERROR(cudaLaunchKernelExC(&first, small_.attend, parameters));
    const int64_t shared = most_shared_sets();
    return shared > 0 ? launch_fold(args, shared, config) : Status{};
  };
  const Status status = launch();
  if (!status.ok() && args.claimed) {  // nobody else sets them back
    cudaMemsetAsync(args.claimed, 0, kCounts * sizeof(uint32_t), config.stream);
  }
  return status;
}

/** Row sets of a step that several ranges may share, about; 0: none at all. */
int64_t CudaPlan::most_shared_sets() const {
  // Where a token is a row set of its own, no request's last set is a part of one.
  const int64_t token_rows = static_cast<int64_t>(given_.max_qo_rows) * shape_.group_size;
  const int64_t sets = shape_.group_size == shape_.set_rows
                           ? given_.max_qo_rows
                           : lengths_.batch + token_rows / shape_.set_rows;
  // What is claimed lies at the end of an owned range, mostly in the row set in which that ends.
  const int64_t cuts = num_owned(shape_) - (shape_.claims > 0 ? 0 : 1);
  return std::min<int64_t>({cuts, sets, schedule_.max_sets});
}

Status CudaPlan::read_schedule(HostSchedule* out) const {
  const CurrentDevice current(device_);
  const auto read = [](auto* to, const auto* from, size_t n) {
    return cudaMemcpy(to, from, n * sizeof(*to), cudaMemcpyDeviceToHost);
  };
  ATTNFOLD_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
  ATTNFOLD_RETURN_IF_CUDA_ERROR(read(&out->counts, schedule_.counts, 1));
  ATTNFOLD_RETURN_IF_CUDA_ERROR(read(&out->num_shared, schedule_.num_shared, 1));
  out->sets.resize(static_cast<size_t>(schedule_.max_sets));
  out->places.resize(static_cast<size_t>(shape_.num_ranges) + 1);
  ATTNFOLD_RETURN_IF_CUDA_ERROR(read(out->sets.data(), schedule_.sets, out->sets.size()));
  ATTNFOLD_RETURN_IF_CUDA_ERROR(read(out->places.data(), schedule_.places, out->places.size()));
  TileCounts num_tiles{};
  if (shape_.tile_blocks > 0)
    ATTNFOLD_RETURN_IF_CUDA_ERROR(read(&num_tiles, schedule_.num_tiles, 1));
  out->tiles.resize(static_cast<size_t>(num_tiles.tiles));
  ATTNFOLD_RETURN_IF_CUDA_ERROR(read(out->tiles.data(), schedule_.tiles, out->tiles.size()));
  return {};
}

Status CudaPlan::report(attnfold_plan_report* out) const {
  ATTNFOLD_RETURN_IF_ERROR(check_updated());
  HostSchedule s;
  ATTNFOLD_RETURN_IF_ERROR(read_schedule(&s));
  const RangeCounts& n = s.counts;
  attnfold_plan_report r{};
  r.num_workers = num_owned(shape_) * problem_.kv_heads;
  r.num_requests = lengths_.batch;
  r.num_units = (n.sets + n.empty_sets + static_cast<int32_t>(s.tiles.size())) * problem_.kv_heads;
  r.num_leaves = static_cast<int64_t>(n.leaves) * problem_.kv_heads;
  r.max_leaf_cost = 1;
  uint64_t h = 0xcbf29ce484222325u;
  int64_t keys = 0;
  const auto count = [&](const RowSet& set) {
    if (set.num_leaves == 0) return;
    r.max_super_chunks = std::max(r.max_super_chunks, chunk_ordinal(set, set.num_leaves - 1) + 1);
    const VisibleKeys seen = seen_by_any(shape_, problem_.mask, set);
    keys += int64_t{seen.sink} + seen.end - seen.begin;
    for (const int64_t value : {set.request, set.row_begin, set.num_rows, set.num_leaves})
      h = hash_step(h, value);
  };
  std::for_each_n(s.sets.begin(), n.sets, count);
  for (const RowSet& tile : s.tiles) {
    count(tile);
    r.num_leaves += static_cast<int64_t>(tile.num_leaves) * problem_.kv_heads;
  }
  r.total_cost = r.num_leaves;
  int32_t cuts = 0, inside = 0;
  for (int32_t i = 0; i < shape_.num_ranges; ++i) {
    const int32_t begin = s.places[static_cast<size_t>(i)].cut,
                  end = s.places[static_cast<size_t>(i) + 1].cut;
    r.max_worker_cost = std::max<int64_t>(r.max_worker_cost, end - begin);
    if (begin == end) continue;
    h = hash_step(h, end);
    if (end == n.leaves) continue;
    const RowSet& set = s.sets[static_cast<size_t>(set_at(s.sets.data(), n.sets, end))];
    if (end == set.start) continue;
    ++cuts;
    if (chunk_begin(set, end - set.start) != end - set.start) ++inside;
  }
  r.num_cuts = cuts * problem_.kv_heads;
  r.num_cuts_inside = inside * problem_.kv_heads;
  r.num_items = r.num_units + r.num_cuts;
  r.partial_bytes = int64_t{2} * s.places.back().entered_states * problem_.kv_heads *
                    shape_.set_rows * (problem_.head_dim_vo + 2) *
                    static_cast<int64_t>(sizeof(float));
  r.kv_bytes = keys * problem_.kv_heads * (problem_.head_dim_qk + problem_.head_dim_vo) *
               dtype_bytes(problem_.kv_dtype);
  r.schedule_id = h;
  const size_t size = out->struct_size;
  r.struct_size = size;
  std::memcpy(static_cast<void*>(out), &r, std::min(size, sizeof(r)));
  return {};
}

Status CudaPlan::item(int32_t, attnfold_plan_item*) const {
  return {ATTNFOLD_UNSUPPORTED,
          "plan: expected one on the CPU, whose items are listed, got one on a CUDA device"};
}

}  // namespace

std::string why_not_here() { return cuda::why_not(0); }

Status create_plan(const attnfold_problem* problem, const attnfold_execution& execution,
                   std::unique_ptr<AnyPlan>* out) {
  auto plan = std::make_unique<CudaPlan>();
  ATTNFOLD_RETURN_IF_ERROR(plan->create(problem, execution));
  *out = std::move(plan);
  return {};
}

}  // namespace attnfold::cuda
