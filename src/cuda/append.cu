// attnfold_append on the device.
//
// A block takes a few tokens.  It first finds out which of them are the last for their slot: its
// own slots go into a table in shared memory, and the slots of all later tokens are looked up
// there. Then a few lanes carry each row (k or v of a token and head) over, 8 elements a lane, with
// the conversions of core/cache.h.  Rows move once; slots are read by every block before their own.
#include <algorithm>
#include <cstdint>

#include "core/cache.h"
#include "cuda/backend.h"
#include "cuda/device.h"
#include "cuda/ptx.h"

namespace attnfold::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 8;             // elements of a lane: head dims are multiples of 8
constexpr int32_t kMaxTokens = 1024;  // of a block
constexpr int32_t kBlocksPerSm = 8;
constexpr int64_t kFree = -1;  // an entry of the table without a slot

struct AppendArgs {
  AppendWork work;
  int32_t tokens;      // of a block
  int32_t log2_table;  // entries
  int32_t log2_lanes;  // of a row
};

// ------------------------------------------------------------------------------------------------
// which token wins a slot

/** The slots of a block's tokens, each with the last token that it is for. */
struct SlotTable {
  unsigned long long* slots;
  int32_t* last;
  int32_t log2_size;

  __device__ __forceinline__ int32_t mask() const { return (1 << log2_size) - 1; }
  __device__ __forceinline__ int32_t hash(int64_t slot) const {
    return static_cast<int32_t>((static_cast<uint64_t>(slot) * 0x9e3779b97f4a7c15u) >>
                                (64 - log2_size));
  }
  __device__ __forceinline__ void clear() const {
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i <= mask(); i += kThreads) {
      slots[i] = static_cast<unsigned long long>(kFree);
      last[i] = -1;
    }
  }
  __device__ __forceinline__ void insert(int64_t slot, int32_t token) const {
    int32_t i = hash(slot);
    for (;; i = (i + 1) & mask()) {
      const unsigned long long before = atomicCAS(slots + i, static_cast<unsigned long long>(kFree),
                                                  static_cast<unsigned long long>(slot));
      if (before == static_cast<unsigned long long>(kFree) ||
          before == static_cast<unsigned long long>(slot))
        break;
    }
    atomicMax(last + i, token);
  }
  /** Where the slot is, or -1. */
  __device__ __forceinline__ int32_t find(int64_t slot) const {
    for (int32_t i = hash(slot);; i = (i + 1) & mask()) {
      if (slots[i] == static_cast<unsigned long long>(slot)) return i;
      if (slots[i] == static_cast<unsigned long long>(kFree)) return -1;
    }
  }
};

/** Fills `places` for the block's tokens; page -1 if a token is skipped, or not the last. */
__device__ __forceinline__ void find_places(const AppendArgs& a, const SlotTable& table,
                                            int32_t first, int32_t count, SlotPlace* places) {
  const AppendWork& w = a.work;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const auto is_slot = [&](int64_t slot) { return slot >= 0 && slot < w.num_slots; };
  table.clear();
  __syncthreads();
  for (int32_t i = thread; i < count; i += kThreads) {
    const int64_t slot = w.slots[first + i];
    if (is_slot(slot)) table.insert(slot, first + i);
  }
  __syncthreads();
#pragma unroll 4
  for (int64_t i = int64_t{first} + count + thread; i < w.num_tokens; i += kThreads) {
    const int64_t slot = w.slots[i];
    if (!is_slot(slot)) continue;
    if (const int32_t entry = table.find(slot); entry >= 0)
      atomicMax(table.last + entry, INT32_MAX);
  }
  __syncthreads();
  for (int32_t i = thread; i < count; i += kThreads) {
    const int64_t slot = w.slots[first + i];
    places[i] = {-1, 0};
    if (is_slot(slot) && table.last[table.find(slot)] == first + i)
      places[i] = place_of_slot(slot, w.page_size);
  }
#if !defined(ATTNFOLD_DROP_A_WAIT)  // shows that racecheck sees one that is missing
  __syncthreads();
#endif
}

// ------------------------------------------------------------------------------------------------
// rows

/** 8 elements of a type, as they are stored. */
template <DType kType>
struct alignas(16) Piece {
  char bytes[kPiece * dtype_bytes(kType)];
};

/** As vectors, if p allows it. */
template <DType kType>
__device__ __forceinline__ void load_piece(const char* p, Piece<kType>* piece) {
  constexpr int kBytes = kPiece * dtype_bytes(kType);
  if (reinterpret_cast<uintptr_t>(p) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i)
      reinterpret_cast<uint4*>(piece->bytes)[i] = reinterpret_cast<const uint4*>(p)[i];
    return;
  }
  using Word = std::conditional_t<kType == DType::f32, uint32_t, uint16_t>;
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    reinterpret_cast<Word*>(piece->bytes)[i] = reinterpret_cast<const Word*>(p)[i];
}

template <DType kType>
__device__ __forceinline__ void store_piece(char* p, const Piece<kType>& piece) {
  constexpr int kBytes = kPiece * dtype_bytes(kType);
  if constexpr (kBytes == 8) {
    if (reinterpret_cast<uintptr_t>(p) % 8 == 0) {
      *reinterpret_cast<uint2*>(p) = *reinterpret_cast<const uint2*>(piece.bytes);
      return;
    }
  } else if (reinterpret_cast<uintptr_t>(p) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i)
      reinterpret_cast<uint4*>(p)[i] = reinterpret_cast<const uint4*>(piece.bytes)[i];
    return;
  }
  using Word = std::conditional_t<dtype_bytes(kType) == 4, uint32_t,
                                  std::conditional_t<kBytes == 8, uint8_t, uint16_t>>;
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    reinterpret_cast<Word*>(p)[i] = reinterpret_cast<const Word*>(piece.bytes)[i];
}

/** A row of the block: walked without a division. */
struct RowPlace {
  int32_t token, rest;  // of the block; k heads, then v heads
  __device__ __forceinline__ void advance(int32_t tokens, int32_t rests, int32_t per_token) {
    token += tokens;
    rest += rests;
    if (rest >= per_token) {
      rest -= per_token;
      ++token;
    }
  }
};

/** Where a row comes from and goes to. */
struct RowWay {
  const char* from;
  char* to;
  const AppendPart* part;
  int32_t head;
  SlotPlace place;
};

template <DType kFrom, DType kTo>
__device__ __forceinline__ bool find_way(const AppendArgs& a, const SlotPlace* places,
                                         int32_t first, int32_t count, RowPlace row, RowWay* way) {
  if (row.token >= count) return false;
  const AppendWork& w = a.work;
  way->place = places[row.token];
  if (way->place.page < 0) return false;
  const bool is_v = row.rest >= w.kv_heads;
  way->part = &w.part[is_v];
  way->head = is_v ? row.rest - w.kv_heads : row.rest;
  const View<const char>& from = way->part->from;
  const View<char>& to = way->part->to;
  way->from = from.data +
              ((int64_t{first} + row.token) * from.stride_token + way->head * from.stride_head) *
                  dtype_bytes(kFrom);
  way->to = to.data + (way->place.page * to.stride_page + way->place.offset * to.stride_token +
                       way->head * to.stride_head) *
                          dtype_bytes(kTo);
  return true;
}

/** The scale of a row: the caller's, or made by all lanes of the row together and written. */
template <DType kFrom, DType kTo>
__device__ __forceinline__ float scale_for(const AppendArgs& a, const RowWay& way, bool exists,
                                           int32_t lane) {
  const int32_t lanes = 1 << a.log2_lanes;
  RowMagnitude magnitude;
  const bool made = exists && way.part->scale.data;
  for (int32_t e = lane * kPiece; made && e < way.part->width; e += lanes * kPiece) {
    Piece<kFrom> piece;
    load_piece(way.from + e * dtype_bytes(kFrom), &piece);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) magnitude.add(load_f32(piece.bytes, kFrom, i));
  }
  for (int32_t far = lanes / 2; far > 0; far /= 2) {
    const uint32_t largest = __shfl_xor_sync(~0u, magnitude.largest, far);
    magnitude.largest = largest > magnitude.largest ? largest : magnitude.largest;
    magnitude.nan |= __shfl_xor_sync(~0u, magnitude.nan, far);
  }
  if (!exists) return 1.0f;
  if (!made) return way.part->given_scale[way.head * way.part->given_stride_head];
  const float scale = scale_of(magnitude, kTo);
  const View<char>& to = way.part->scale;
  if (lane == 0) {
    reinterpret_cast<float*>(
        to.data)[way.place.page * to.stride_page + way.place.offset * to.stride_token +
                 way.head * to.stride_head] = scale;
  }
  return scale;
}

template <DType kFrom, DType kTo>
__global__ void __launch_bounds__(kThreads) append_rows(const __grid_constant__ AppendArgs a) {
  constexpr int kRows = is_8_bit(kTo) ? 1 : 4;  // of a lane, on their way at once
  extern __shared__ unsigned long long shared[];
  const AppendWork& w = a.work;
  const SlotTable table{shared, reinterpret_cast<int32_t*>(shared + (1 << a.log2_table)),
                        a.log2_table};
  SlotPlace* const places = reinterpret_cast<SlotPlace*>(table.last + (1 << a.log2_table));
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int32_t first = static_cast<int32_t>(blockIdx.x) * a.tokens;
  const int32_t count =
      static_cast<int32_t>(w.num_tokens - first < a.tokens ? w.num_tokens - first : a.tokens);
  find_places(a, table, first, count, places);

  const int32_t lanes = 1 << a.log2_lanes, lane = static_cast<int32_t>(threadIdx.x) & (lanes - 1);
  const int32_t rows_at_once = kThreads >> a.log2_lanes;
  const int32_t per_token = w.num_parts * w.kv_heads;
  const int32_t step_tokens = rows_at_once / per_token, step_rests = rows_at_once % per_token;
  const int32_t mine = static_cast<int32_t>(threadIdx.x) >> a.log2_lanes;
  RowPlace row{mine / per_token, mine % per_token};
  const int32_t in_warp = 32 >> a.log2_lanes;  // rows
  RowPlace of_warp{mine / in_warp * in_warp / per_token, mine / in_warp * in_warp % per_token};
  while (of_warp.token < count) {  // the same for all lanes of a warp
    RowWay way[kRows];
    bool exists[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      exists[u] = find_way<kFrom, kTo>(a, places, first, count, row, &way[u]);
      row.advance(step_tokens, step_rests, per_token);
      of_warp.advance(step_tokens, step_rests, per_token);
    }
    if constexpr (is_8_bit(kTo)) {
      const float scale = scale_for<kFrom, kTo>(a, way[0], exists[0], lane);
      for (int32_t e = lane * kPiece; exists[0] && e < way[0].part->width; e += lanes * kPiece) {
        Piece<kFrom> in;
        Piece<kTo> out;
        load_piece(way[0].from + e * dtype_bytes(kFrom), &in);
        quantise_elements<kFrom, kTo>(in.bytes, out.bytes, kPiece, scale);
        store_piece(way[0].to + e, out);
      }
    } else {
      const int32_t width =
          w.num_parts > 1 && w.part[1].width > w.part[0].width ? w.part[1].width : w.part[0].width;
      for (int32_t e = lane * kPiece; e < width; e += lanes * kPiece) {
        Piece<kFrom> in[kRows];
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          if (exists[u] && e < way[u].part->width)
            load_piece(way[u].from + e * dtype_bytes(kFrom), &in[u]);
        }
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          if (!exists[u] || e >= way[u].part->width) continue;
          Piece<kTo> out;
          convert_elements<kFrom, kTo>(in[u].bytes, out.bytes, kPiece);
          store_piece(way[u].to + e * dtype_bytes(kTo), out);
        }
      }
    }
  }
}

template <DType kFrom>
const void* kernel_to(DType to) {
  switch (to) {
    case DType::f32: return reinterpret_cast<const void*>(append_rows<kFrom, DType::f32>);
    case DType::f16: return reinterpret_cast<const void*>(append_rows<kFrom, DType::f16>);
    case DType::bf16: return reinterpret_cast<const void*>(append_rows<kFrom, DType::bf16>);
    case DType::e4m3: return reinterpret_cast<const void*>(append_rows<kFrom, DType::e4m3>);
    case DType::e5m2: return reinterpret_cast<const void*>(append_rows<kFrom, DType::e5m2>);
    default: return reinterpret_cast<const void*>(append_rows<kFrom, DType::i8>);
  }
}

const void* kernel_of(DType from, DType to) {
  switch (from) {
    case DType::f32: return kernel_to<DType::f32>(to);
    case DType::f16: return kernel_to<DType::f16>(to);
    default: return kernel_to<DType::bf16>(to);
  }
}

}  // namespace

Status append(const AppendWork& work, const attnfold_execution& execution) {
  int device, num_sms;
  ATTNFOLD_RETURN_IF_ERROR(choose_device(execution, &device));
  if (work.num_tokens == 0 || work.num_slots == 0) return {};
  const CurrentDevice current(device);
  ATTNFOLD_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
  AppendArgs a{work, 1, 1, 0};
  const int64_t room = int64_t{num_sms} * kBlocksPerSm;
  a.tokens =
      static_cast<int32_t>(std::min<int64_t>((work.num_tokens + room - 1) / room, kMaxTokens));
  while (1 << a.log2_table < 2 * a.tokens) ++a.log2_table;
  int32_t width = work.part[0].width;
  if (work.num_parts > 1) width = std::max(width, work.part[1].width);
  while (a.log2_lanes < 5 && kPiece << a.log2_lanes < width) ++a.log2_lanes;
  const size_t shared = (sizeof(int64_t) + sizeof(int32_t)) * (size_t{1} << a.log2_table) +
                        sizeof(SlotPlace) * static_cast<size_t>(a.tokens);
  const int64_t blocks = (work.num_tokens + a.tokens - 1) / a.tokens;
  return launch_overlapped(kernel_of(work.from, work.to), static_cast<unsigned>(blocks), kThreads,
                           shared, execution.stream, &a);
}

}  // namespace attnfold::cuda
