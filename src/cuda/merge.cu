// attnfold_merge and attnfold_convert_state on the device.
//
// A warp takes a few (row, head) pairs.  Each side's o is read once, 16 bytes a lane, and written
// once.  What the sides weigh is worked out by one lane for each pair (core/state.h, as on the
// CPU), while o is on its way, and handed round by shuffles or shared memory.  A pair's elements
// are read by the lane that writes them, and its lse by the lane that writes it: in place is safe.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "core/state.h"
#include "cuda/backend.h"
#include "cuda/device.h"
#include "cuda/ptx.h"

namespace attnfold::cuda {
namespace {

constexpr int kWarps = 8, kMaxStates = 32;
constexpr int kLeave = -1;  // in place of a MergedRow::Kind: the row is masked, or there is none

/** What both kernels are given; the states fit into the parameters of a launch. */
template <int kMax>
struct MergeArgs {
  StateView out;
  int64_t pairs;  // rows x heads
  int32_t heads, width, n;
  int32_t log2_lanes;  // of a pair
  bool by_pair;        // there is no mask, and lse has one stride, lse_head, from pair to pair
  float empty_lse;
  const uint8_t* row_mask;
  int64_t row_mask_stride;
  StateView states[kMax];
};

struct Pair {
  int64_t row;
  int32_t head;
};

template <int kMax>
__device__ __forceinline__ Pair place_of_pair(const MergeArgs<kMax>& a, int64_t pair) {
  if (a.pairs <= UINT32_MAX) {
    const uint32_t p = static_cast<uint32_t>(pair), heads = static_cast<uint32_t>(a.heads);
    return {p / heads, static_cast<int32_t>(p % heads)};
  }
  return {pair / a.heads, static_cast<int32_t>(pair % a.heads)};
}

template <int kMax>
__device__ __forceinline__ bool leaves(const MergeArgs<kMax>& a, int64_t row) {
  return a.row_mask && !a.row_mask[row * a.row_mask_stride];
}

// ------------------------------------------------------------------------------------------------
// two normalised states of one type, packed by pair: the merge of a serving step

/** Two numbers of 16 bits as floats, and back. */
template <DType kType>
struct Packed;

template <>
struct Packed<DType::bf16> {
  using T = __nv_bfloat16;
  using T2 = __nv_bfloat162;
  static __device__ __forceinline__ float2 widen(uint32_t x) {
    return make_float2(float_of(x << 16), float_of(x & 0xffff0000u));
  }
};

template <>
struct Packed<DType::f16> {
  using T = __half;
  using T2 = __half2;
  static __device__ __forceinline__ float2 widen(uint32_t x) {
    return __half22float2(*reinterpret_cast<const __half2*>(&x));
  }
};

__device__ __forceinline__ float max_or_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

/** Weighted sums of the numbers in two words, held between the two.  16-bit sums are rounded before
 * they are held: rounding keeps order, and the bounds are numbers of the type. */
template <DType kType>
__device__ __forceinline__ uint32_t sum_word(uint32_t a, uint32_t b, float scale_a, float scale_b) {
  if constexpr (kType == DType::f32) {
    const float x = float_of(a), y = float_of(b);
    const float sum = scale_a * x + scale_b * y;
    return bits_of(min_or_nan(max_or_nan(sum, fminf(x, y)), fmaxf(x, y)));
  } else {
    using P = Packed<kType>;
    const float2 x = P::widen(a), y = P::widen(b);
    const uint32_t sum =
        pack<typename P::T>(scale_a * x.x + scale_b * y.x, scale_a * x.y + scale_b * y.y);
    const auto as_pair = [](const uint32_t& w) {
      return *reinterpret_cast<const typename P::T2*>(&w);
    };
    const auto held = __hmin2_nan(__hmax2_nan(as_pair(sum), __hmin2(as_pair(a), as_pair(b))),
                                  __hmax2(as_pair(a), as_pair(b)));
    return *reinterpret_cast<const uint32_t*>(&held);
  }
}

template <DType kType>
__device__ __forceinline__ uint4 sum_16_bytes(uint4 a, uint4 b, float scale_a, float scale_b) {
  return make_uint4(
      sum_word<kType>(a.x, b.x, scale_a, scale_b), sum_word<kType>(a.y, b.y, scale_a, scale_b),
      sum_word<kType>(a.z, b.z, scale_a, scale_b), sum_word<kType>(a.w, b.w, scale_a, scale_b));
}

/** As weigh_sides asks for them. */
struct TwoSides {
  float* scale;
  __device__ float& value(int32_t i) const { return scale[i]; }
  __device__ float mass(int32_t) const { return 1.0f; }
  __device__ bool normalised(int32_t) const { return true; }
};

/** A pair of merge_two, of one lane: what its sides weigh, and its lse. */
class TwoWeighed {
 public:
  int kind = kLeave;  // or a MergedRow::Kind
  float scale[2] = {};

  __device__ __forceinline__ bool copies(int side) const {
    return kind == MergedRow::kCopy && merged_.only == side;
  }
  /** Asks for what is stored; nothing waits for it yet. */
  __device__ __forceinline__ void load(const MergeArgs<2>& a, int64_t pair) {
    if (a.by_pair) {
      place_ = pair * a.out.lse_head;
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const bool exists = pair < a.states[s].num_rows * a.heads;
        stored_[s] = exists ? a.states[s].lse[pair * a.states[s].lse_head] : kNoKeys;
      }
    } else {
      const Pair at = place_of_pair(a, pair);
      if (leaves(a, at.row)) return;
      place_ = a.out.lse_index(at.row, at.head);
#pragma unroll
      for (int s = 0; s < 2; ++s) stored_[s] = stored_lse(a.states[s], at.row, at.head);
    }
    kind = MergedRow::kSum;
  }
  __device__ __forceinline__ void weigh(const MergeArgs<2>& a) {
    if (kind == kLeave) return;
#pragma unroll
    for (int s = 0; s < 2; ++s) scale[s] = natural_lse(a.states[s], stored_[s]);
    merged_ = weigh_sides(TwoSides{scale}, 2);
    kind = merged_.kind;
  }
  __device__ __forceinline__ void write_lse(const MergeArgs<2>& a) const {
    if (kind == kLeave) return;
    float lse = a.empty_lse;
    if (kind == MergedRow::kSum) lse = rebased_lse(lse_of_sum(merged_), false, a.out.base2);
    if (copies(0)) lse = rebased_lse(stored_[0], a.states[0].base2, a.out.base2);
    if (copies(1)) lse = rebased_lse(stored_[1], a.states[1].base2, a.out.base2);
    a.out.lse[place_] = lse;
  }

 private:
  MergedRow merged_;
  float stored_[2];
  int64_t place_;  // of its lse
};

/** Steps: loads of a lane from each side that are on their way at once. */
template <DType kType, int kSteps>
__global__ void __launch_bounds__(kWarps * 32) merge_two(const __grid_constant__ MergeArgs<2> a) {
  constexpr int kBytes = dtype_bytes(kType);
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int at_once = 32 >> a.log2_lanes, of_warp = kSteps * at_once;  // pairs
  const int sub = lane >> a.log2_lanes;
  const int64_t byte = (lane & ((1 << a.log2_lanes) - 1)) * 16;
  const bool inside = byte < a.width * kBytes;
  const int64_t stride = int64_t{gridDim.x} * kWarps * of_warp;
  for (int64_t first = (int64_t{blockIdx.x} * kWarps + warp) * of_warp; first < a.pairs;
       first += stride) {
    TwoWeighed w;
    if (lane < of_warp && first + lane < a.pairs) w.load(a, first + lane);
    uint4 x[2][kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int64_t pair = first + k * at_once + sub;
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        x[s][k] = make_uint4(0, 0, 0, 0);
        if (inside && pair < a.states[s].num_rows * a.heads)
          x[s][k] = *reinterpret_cast<const uint4*>(a.states[s].o +
                                                    pair * a.states[s].o_head * kBytes + byte);
      }
    }
    w.weigh(a);
    const unsigned sums = __ballot_sync(~0u, w.kind == MergedRow::kSum);
    const unsigned firsts = __ballot_sync(~0u, w.copies(0));
    const unsigned seconds = __ballot_sync(~0u, w.copies(1));
    const unsigned empties = __ballot_sync(~0u, w.kind == MergedRow::kEmpty);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int index = k * at_once + sub;
      const unsigned bit = 1u << index;
      const float scale_a = __shfl_sync(~0u, w.scale[0], index),
                  scale_b = __shfl_sync(~0u, w.scale[1], index);
      if (!inside || !((sums | firsts | seconds | empties) & bit)) continue;
      uint4 y = make_uint4(0, 0, 0, 0);
      if (sums & bit) {
        y = sum_16_bytes<kType>(x[0][k], x[1][k], scale_a, scale_b);
      } else if ((firsts | seconds) & bit) {
        y = firsts & bit ? x[0][k] : x[1][k];
      }
      *reinterpret_cast<uint4*>(a.out.o + (first + index) * a.out.o_head * kBytes + byte) = y;
    }
    w.write_lse(a);
  }
}

/**
 * The same for few pairs, where a call takes as long as one warp.  There is no mask, and offsets
 * have 31 bits.  Each side of a pair is weighed by a lane of its own.  What does not hang on stored
 * numbers is worked out before the wait, and the first pass, in which nothing is read or written,
 * brings the instructions.
 */
template <DType kType, int kSteps>
__global__ void __launch_bounds__(kWarps * 32) merge_few(const __grid_constant__ MergeArgs<2> a) {
  constexpr int kBytes = dtype_bytes(kType);
  let_next_kernel_start();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int at_once = 32 >> a.log2_lanes, of_warp = kSteps * at_once;  // pairs
  const int sub = lane >> a.log2_lanes;
  const uint32_t byte = (lane & ((1 << a.log2_lanes) - 1)) * 16;
  const bool inside = byte < static_cast<uint32_t>(a.width) * kBytes;
  const uint32_t pairs = static_cast<uint32_t>(a.pairs);
  const uint32_t first = (blockIdx.x * kWarps + warp) * of_warp;

  const int side = lane & 1;
  const uint32_t own = first + lane / 2;
  const bool weighs = lane < 2 * of_warp && own < pairs;
  const StateView& view = a.states[side];
  const uint32_t heads = static_cast<uint32_t>(a.heads);
  const bool exists = weighs && own / heads < view.num_rows;
  const float* lse = view.lse + own * static_cast<uint32_t>(view.lse_head);
  float* lse_out = a.out.lse + own * static_cast<uint32_t>(a.out.lse_head);
  const char* from[2];
  uint32_t rows[2];  // steps whose pair the side has, one bit each
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    from[s] =
        a.states[s].o + (first + sub) * static_cast<uint32_t>(a.states[s].o_head) * kBytes + byte;
    rows[s] = 0;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint32_t pair = first + k * at_once + sub;
      if (inside && pair < pairs && pair / heads < a.states[s].num_rows) rows[s] |= 1u << k;
    }
  }
  char* to = a.out.o + (first + sub) * static_cast<uint32_t>(a.out.o_head) * kBytes + byte;
  int live = 0;  // the first time nothing is read or written: it brings the instructions
#pragma unroll 1
  while (true) {
    float stored = kNoKeys;
    if (live && exists) stored = *lse;
    uint4 x[2][kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        x[s][k] = make_uint4(0, 0, 0, 0);
        if (live && (rows[s] >> k & 1))
          x[s][k] = *reinterpret_cast<const uint4*>(
              from[s] + k * at_once * static_cast<uint32_t>(a.states[s].o_head) * kBytes);
      }
    }
    // As weigh_sides: every lane has both sides in their order, and works out its own.
    const float natural = natural_lse(view, stored);
    const float other = __shfl_xor_sync(~0u, natural, 1),
                other_stored = __shfl_xor_sync(~0u, stored, 1);
    const float v[2] = {side ? other : natural, side ? natural : other};
    float max = kLowest;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (v[s] != kNoKeys) max = merge_max(max, {v[s], 1.0f});
    }
    const bool both = v[0] != kNoKeys && v[1] != kNoKeys;
    const float weight = merge_weight(max, {natural, 1.0f});
    const float total = weight + __shfl_xor_sync(~0u, weight, 1);
    const float scale = weight / total;
    const bool sums = weighs && both && total != 0.0f;
    const unsigned sum = __ballot_sync(~0u, sums);
    const unsigned copied = __ballot_sync(~0u, weighs && !both && natural != kNoKeys);
    const unsigned any = __ballot_sync(~0u, weighs);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int index = 2 * (k * at_once + sub);
      const float scale_a = __shfl_sync(~0u, scale, index),
                  scale_b = __shfl_sync(~0u, scale, index + 1);
      uint4 y = make_uint4(0, 0, 0, 0);
      if (sum >> index & 1) {
        y = sum_16_bytes<kType>(x[0][k], x[1][k], scale_a, scale_b);
      } else if (copied >> index & 3) {
        y = copied >> index & 1 ? x[0][k] : x[1][k];
      }
      if (live && inside && (any >> index & 1))
        *reinterpret_cast<uint4*>(to + k * at_once * static_cast<uint32_t>(a.out.o_head) * kBytes) =
            y;
    }
    float value = a.empty_lse;
    if (sums) {
      value = rebased_lse(merge_lse(max, total), false, a.out.base2);
    } else if (v[0] != kNoKeys && !both) {
      value = rebased_lse(stored, a.states[0].base2, a.out.base2);
    } else if (v[1] != kNoKeys && !both) {
      value = rebased_lse(other_stored, a.states[1].base2, a.out.base2);
    }
    if (live && weighs && side == 0) *lse_out = value;
    if (live) return;
    wait_for_previous_kernels();
    live = 1;
    asm volatile("" : "+r"(live));  // known only here, so that there is one copy of the code
  }
}

// ------------------------------------------------------------------------------------------------
// any states

constexpr int kPiece = 8;  // elements of a lane
constexpr int kPairs = 8;  // of a warp
constexpr int kBatch = 4;  // sides whose elements are on their way at once

struct alignas(16) Piece {
  uint32_t words[kPiece];
};

/** `n` of the elements at p: as vectors, if there are all and p allows it. */
__device__ __forceinline__ void load_piece(const char* p, DType type, int n, Piece* piece) {
  uint4* const to = reinterpret_cast<uint4*>(piece);
  if (n == kPiece && reinterpret_cast<uintptr_t>(p) % 16 == 0) {
    to[0] = reinterpret_cast<const uint4*>(p)[0];
    if (type == DType::f32) to[1] = reinterpret_cast<const uint4*>(p)[1];
    return;
  }
  if (type == DType::f32) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i)
      piece->words[i] = i < n ? reinterpret_cast<const uint32_t*>(p)[i] : 0;
    return;
  }
#pragma unroll
  for (int i = 0; i < kPiece / 2; ++i) {
    const uint16_t* const from = reinterpret_cast<const uint16_t*>(p);
    const uint32_t low = 2 * i < n ? from[2 * i] : 0, high = 2 * i + 1 < n ? from[2 * i + 1] : 0;
    piece->words[i] = low | high << 16;
  }
}

__device__ __forceinline__ void store_piece(char* p, DType type, int n, const Piece& piece) {
  const uint4* const from = reinterpret_cast<const uint4*>(&piece);
  if (n == kPiece && reinterpret_cast<uintptr_t>(p) % 16 == 0) {
    reinterpret_cast<uint4*>(p)[0] = from[0];
    if (type == DType::f32) reinterpret_cast<uint4*>(p)[1] = from[1];
    return;
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    if (i >= n) continue;
    if (type == DType::f32) {
      reinterpret_cast<uint32_t*>(p)[i] = piece.words[i];
    } else {
      reinterpret_cast<uint16_t*>(p)[i] =
          static_cast<uint16_t>(piece.words[i / 2] >> (i % 2 ? 16 : 0));
    }
  }
}

/** Element i; i is a constant wherever this is unrolled. */
__device__ __forceinline__ float element(const Piece& piece, DType type, int i) {
  if (type == DType::f32) return float_of(piece.words[i]);
  const uint16_t half = static_cast<uint16_t>(piece.words[i / 2] >> (i % 2 ? 16 : 0));
  return type == DType::f16 ? f16_to_f32(half) : bf16_to_f32(half);
}

__device__ __forceinline__ Piece narrow(const float (&x)[kPiece], DType type) {
  Piece piece;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    if (type == DType::f32) {
      piece.words[i] = bits_of(x[i]);
    } else {
      const uint32_t half = type == DType::f16 ? f32_to_f16(x[i]) : f32_to_bf16(x[i]);
      if (i % 2 == 0) {
        piece.words[i / 2] = half;
      } else {
        piece.words[i / 2] |= half << 16;
      }
    }
  }
  return piece;
}

/** What one lane found out about a pair, for the lanes that sum it. */
struct alignas(16) WeighedPair {
  int64_t row;
  int32_t head;
  int16_t kind;    // a MergedRow::Kind, or kLeave
  int16_t detail;  // of a copy: the side; of a sum: whether it is bounded
};

/** Of the states of a warp: value and mass at [side][pair]. */
struct ManySides {
  const MergeArgs<kMaxStates>& args;
  float *values, *masses;
  int pair;
  __device__ float& value(int32_t i) const { return values[i * kPairs + pair]; }
  __device__ float mass(int32_t i) const { return masses[i * kPairs + pair]; }
  __device__ bool normalised(int32_t i) const { return args.states[i].normalised; }
};

/** Weighs one pair and writes its lse and l. */
__device__ __forceinline__ void weigh_many(const MergeArgs<kMaxStates>& a, const ManySides& sides,
                                           const Pair& at, WeighedPair* out) {
  *out = {at.row, at.head, kLeave, 0};
  if (leaves(a, at.row)) return;
  const MergedRow merged = weigh_sides(sides, a.n);
  out->kind = static_cast<int16_t>(merged.kind);
  out->detail = static_cast<int16_t>(merged.is_bounded);
  float lse = a.empty_lse;
  if (merged.kind == MergedRow::kSum) lse = rebased_lse(lse_of_sum(merged), false, a.out.base2);
  if (merged.kind == MergedRow::kCopy) {
    const StateView& s = a.states[merged.only];
    lse = rebased_lse(stored_lse(s, at.row, at.head), s.base2, a.out.base2);
    out->detail = static_cast<int16_t>(merged.only);
  }
  const int64_t index = a.out.lse_index(at.row, at.head);
  a.out.lse[index] = lse;
  if (!a.out.normalised) a.out.l[index] = merged.kind == MergedRow::kEmpty ? 0.0f : 1.0f;
}

/** n elements of a pair, from element d on: summed over its sides, in their order. */
__device__ __forceinline__ Piece sum_piece(const MergeArgs<kMaxStates>& a, const ManySides& sides,
                                           const WeighedPair& pair, int64_t d, int n) {
  float sum[kPiece], low[kPiece], high[kPiece];
  bool is_first = true;
  for (int32_t begin = 0; begin < a.n; begin += kBatch) {
    Piece piece[kBatch];
    float scale[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int32_t i = begin + u;
      scale[u] = i < a.n ? sides.value(i) : kNoKeys;
      if (scale[u] == kNoKeys) continue;
      const StateView& s = a.states[i];
      load_piece(s.o_at(pair.row, pair.head) + d * dtype_bytes(s.o_dtype), s.o_dtype, n, &piece[u]);
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (scale[u] == kNoKeys) continue;
      const DType type = a.states[begin + u].o_dtype;
#pragma unroll
      for (int e = 0; e < kPiece; ++e) {
        const float x = element(piece[u], type, e), term = scale[u] * x;
        sum[e] = is_first ? term : sum[e] + term;
        low[e] = is_first || x < low[e] ? x : low[e];
        high[e] = is_first || x > high[e] ? x : high[e];
      }
      is_first = false;
    }
  }
  if (pair.detail) {
#pragma unroll
    for (int e = 0; e < kPiece; ++e) sum[e] = within(sum[e], low[e], high[e]);
  }
  return narrow(sum, a.out.o_dtype);
}

/** The same of a pair with one side: its bits, if the types are the same. */
__device__ __forceinline__ Piece copy_piece(const MergeArgs<kMaxStates>& a, const WeighedPair& pair,
                                            int64_t d, int n) {
  const StateView& s = a.states[pair.detail];
  Piece piece;
  load_piece(s.o_at(pair.row, pair.head) + d * dtype_bytes(s.o_dtype), s.o_dtype, n, &piece);
  if (s.o_dtype == a.out.o_dtype) return piece;
  float x[kPiece];
#pragma unroll
  for (int e = 0; e < kPiece; ++e) x[e] = element(piece, s.o_dtype, e);
  return narrow(x, a.out.o_dtype);
}

__global__ void __launch_bounds__(kWarps * 32)
    merge_many(const __grid_constant__ MergeArgs<kMaxStates> a) {
  extern __shared__ float shared[];  // value and mass, [warp][2][side][pair]
  __shared__ WeighedPair weighed[kWarps][kPairs];
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  float* const values = shared + warp * 2 * a.n * kPairs;
  const ManySides mine{a, values, values + a.n * kPairs, lane % kPairs};
  const int lanes = 1 << a.log2_lanes, at_once = 32 >> a.log2_lanes;
  const int64_t stride = int64_t{gridDim.x} * kWarps * kPairs;
  for (int64_t first = (int64_t{blockIdx.x} * kWarps + warp) * kPairs; first < a.pairs;
       first += stride) {
    const int64_t pair = first + lane % kPairs;
    const bool exists = pair < a.pairs;
    const Pair at = place_of_pair(a, exists ? pair : 0);
    for (int32_t i = lane / kPairs; exists && i < a.n; i += 32 / kPairs) {
      const StateView& s = a.states[i];
      const float lse = natural_lse(s, stored_lse(s, at.row, at.head));
      mine.value(i) = lse;
      if (!s.normalised && lse != kNoKeys)
        mine.masses[i * kPairs + mine.pair] = s.l[s.lse_index(at.row, at.head)];
    }
    __syncwarp();
    if (lane < kPairs) {
      weighed[warp][lane].kind = kLeave;
      if (exists) weigh_many(a, mine, at, &weighed[warp][lane]);
    }
    __syncwarp();
    for (int p = lane >> a.log2_lanes; p < kPairs; p += at_once) {
      const WeighedPair w = weighed[warp][p];
      if (w.kind == kLeave) continue;
      const ManySides sides{a, values, values + a.n * kPairs, p};
      char* const out = a.out.o_at(w.row, w.head);
      for (int64_t d = (lane & (lanes - 1)) * kPiece; d < a.width; d += lanes * kPiece) {
        const int n = a.width - d < kPiece ? static_cast<int>(a.width - d) : kPiece;
        Piece piece{};
        if (w.kind == MergedRow::kSum) piece = sum_piece(a, sides, w, d, n);
        if (w.kind == MergedRow::kCopy) piece = copy_piece(a, w, d, n);
        store_piece(out + d * dtype_bytes(a.out.o_dtype), a.out.o_dtype, n, piece);
      }
    }
    __syncwarp();
  }
}

// ------------------------------------------------------------------------------------------------

/** Elements from a pair to the next one, or -1 if that is not one number. */
int64_t pair_stride(const MergeWork& w, int64_t row, int64_t head) {
  if (w.heads == 1) return row;
  return w.rows <= 1 || row == w.heads * head ? head : -1;
}

/** Whether merge_two serves it. */
bool is_plain(const MergeWork& w) {
  if (w.states.size() != 2) return false;
  const int bytes = dtype_bytes(w.out.o_dtype);
  const int64_t row_bytes = int64_t{w.width} * bytes;
  if (row_bytes % 16 != 0 || row_bytes > 32 * 16) return false;
  const auto plain = [&](const StateView& s) {
    const int64_t stride = pair_stride(w, s.o_row, s.o_head);
    return s.o_dtype == w.out.o_dtype && s.normalised && stride != -1 && stride * bytes % 16 == 0 &&
           reinterpret_cast<uintptr_t>(s.o) % 16 == 0;
  };
  return plain(w.out) && plain(w.states[0]) && plain(w.states[1]);
}

/** log2 of the lanes that hold `pieces`, between 4 and 32. */
int32_t log2_lanes(int64_t pieces) {
  int32_t log2 = 2;
  while (log2 < 5 && int64_t{1} << log2 < pieces) ++log2;
  return log2;
}

// Fewer loads on their way for each warp, and so more warps, where there are few pairs.
constexpr int kFewSteps = 2, kManySteps = 4;
constexpr int64_t kManyPairs = 1 << 16;

template <DType kType>
const void* two_kernel_of(bool is_small) {
  return is_small ? reinterpret_cast<const void*>(merge_two<kType, kFewSteps>)
                  : reinterpret_cast<const void*>(merge_two<kType, kManySteps>);
}

const void* two_kernel(DType type, bool is_small) {
  switch (type) {
    case DType::f32: return two_kernel_of<DType::f32>(is_small);
    case DType::f16: return two_kernel_of<DType::f16>(is_small);
    default: return two_kernel_of<DType::bf16>(is_small);
  }
}

const void* few_kernel(DType type) {
  switch (type) {
    case DType::f32: return reinterpret_cast<const void*>(merge_few<DType::f32, kFewSteps>);
    case DType::f16: return reinterpret_cast<const void*>(merge_few<DType::f16, kFewSteps>);
    default: return reinterpret_cast<const void*>(merge_few<DType::bf16, kFewSteps>);
  }
}

/** Whether merge_few may work out every offset, once strides are from pair to pair. */
bool is_near(const MergeArgs<2>& a) {
  const auto near = [&](int64_t stride) {
    return stride >= 0 && stride <= INT32_MAX / 4 / std::max<int64_t>(a.pairs, 1);
  };
  const auto all_near = [&](const StateView& s) { return near(s.o_head) && near(s.lse_head); };
  return a.by_pair && all_near(a.out) && all_near(a.states[0]) && all_near(a.states[1]);
}

template <int kMax>
MergeArgs<kMax> args_of(const MergeWork& w) {
  MergeArgs<kMax> a{};
  a.out = w.out;
  a.pairs = w.rows * w.heads;
  a.heads = w.heads;
  a.width = w.width;
  a.n = static_cast<int32_t>(w.states.size());
  a.empty_lse = w.empty_lse;
  a.row_mask = w.row_mask;
  a.row_mask_stride = w.row_mask_stride;
  std::copy(w.states.begin(), w.states.end(), a.states);
  return a;
}

unsigned blocks_for(int64_t pairs, int64_t pairs_of_block) {
  return static_cast<unsigned>(
      std::min<int64_t>((pairs + pairs_of_block - 1) / pairs_of_block, INT32_MAX));
}

}  // namespace

Status merge(const MergeWork& w, const attnfold_execution& execution) {
  int device;
  ATTNFOLD_RETURN_IF_ERROR(choose_device(execution, &device));
  if (w.states.size() > kMaxStates) {
    return {ATTNFOLD_UNSUPPORTED, "n: expected 0.." + std::to_string(kMaxStates) +
                                      " on CUDA, got " + std::to_string(w.states.size())};
  }
  const int64_t pairs = w.rows * w.heads;
  if (pairs == 0) return {};
  const CurrentDevice current(device);
  if (is_plain(w)) {
    MergeArgs<2> a = args_of<2>(w);
    a.by_pair = !w.row_mask;
    for (StateView* s : {&a.out, &a.states[0], &a.states[1]}) {
      s->o_head = pair_stride(w, s->o_row, s->o_head);
      const int64_t lse = pair_stride(w, s->lse_row, s->lse_head);
      a.by_pair = a.by_pair && lse != -1;
    }
    for (StateView* s : {&a.out, &a.states[0], &a.states[1]}) {
      if (a.by_pair) s->lse_head = pair_stride(w, s->lse_row, s->lse_head);
    }
    a.log2_lanes = log2_lanes(int64_t{w.width} * dtype_bytes(w.out.o_dtype) / 16);
    const int64_t at_once = kWarps * (32 >> a.log2_lanes);
    const bool is_small = pairs < kManyPairs;
    if (is_small && is_near(a)) {
      return launch_overlapped(few_kernel(w.out.o_dtype), blocks_for(pairs, at_once * kFewSteps),
                               kWarps * 32, 0, execution.stream, &a);
    }
    return launch_overlapped(two_kernel(w.out.o_dtype, is_small),
                             blocks_for(pairs, at_once * (is_small ? kFewSteps : kManySteps)),
                             kWarps * 32, 0, execution.stream, &a);
  }
  MergeArgs<kMaxStates> a = args_of<kMaxStates>(w);
  a.log2_lanes = log2_lanes((int64_t{w.width} + kPiece - 1) / kPiece);
  const size_t shared = sizeof(float) * kWarps * 2 * kPairs * w.states.size();
  return launch_overlapped(reinterpret_cast<const void*>(merge_many),
                           blocks_for(pairs, kWarps * kPairs), kWarps * 32, shared,
                           execution.stream, &a);
}

}  // namespace attnfold::cuda
