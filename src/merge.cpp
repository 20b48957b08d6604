// attnfold_merge and attnfold_convert_state: results of any engine, described by type.
#include "merge.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cpu/backend.h"
#include "cuda/backend.h"
#include "merge_rows.h"
#include "plan/validate.h"

namespace attnfold {
namespace {

constexpr int32_t kStatesOnStack = 32;  // more are kept in memory of their own
constexpr int32_t kPairsPerShare =
    64;  // (row, head) pairs; fewer are not worth waking a thread for

/** Whose fields a message speaks of: "out", or "states[3]".  Put together only when there is one.
 */
struct Owner {
  const char* name;
  int64_t index = -1;
  std::string field(const char* f) const {
    return (index < 0 ? std::string(name) : indexed(name, index)) + "." + f;
  }
};

struct Shape {
  int64_t rows, heads, width;
  int64_t pairs() const { return rows * heads; }
};

Status check_enum(const Owner& owner, const char* field, int value, int high) {
  if (value < 0 || value > high)
    return invalid(owner.field(field), "0.." + std::to_string(high), value);
  return {};
}

Status read_state(const Owner& owner, const attnfold_state* given, attnfold_state* s) {
  const attnfold_state defaults = ATTNFOLD_STATE_INIT;
  if (Status status = read_struct(owner.name, given, defaults, s); !status.ok()) {
    const std::string name = owner.index < 0 ? owner.name : indexed(owner.name, owner.index);
    return read_struct(name.c_str(), given, defaults, s);
  }
  ATTNFOLD_RETURN_IF_ERROR(check_enum(owner, "o_dtype", s->o_dtype, ATTNFOLD_BF16));
  ATTNFOLD_RETURN_IF_ERROR(check_enum(owner, "lse_layout", s->lse_layout, ATTNFOLD_HEADS_ROWS));
  ATTNFOLD_RETURN_IF_ERROR(check_enum(owner, "log_base", s->log_base, ATTNFOLD_LOG_2));
  ATTNFOLD_RETURN_IF_ERROR(check_enum(owner, "empty", s->empty, ATTNFOLD_EMPTY_FINITE));
  ATTNFOLD_RETURN_IF_ERROR(check_enum(owner, "sink_included", s->sink_included, 1));
  return check_enum(owner, "normalised", s->normalised, 1);
}

Status resolve(const Owner& owner, const attnfold_state& s, const Shape& shape, StateView* out) {
  if (s.num_rows < -1 || s.num_rows > shape.rows) {
    return invalid(owner.field("num_rows"),
                   "-1 (all), or 0.." + std::to_string(shape.rows) + " (rows)", s.num_rows);
  }
  const int64_t num_rows = s.num_rows < 0 ? shape.rows : s.num_rows;
  if (num_rows * shape.heads > 0) {
    if (!s.o) return invalid(owner.field("o"), "a pointer", "NULL");
    if (!s.lse) return invalid(owner.field("lse"), "a pointer", "NULL");
    if (!s.normalised && !s.l)
      return invalid(owner.field("l"), "a pointer (normalised is 0)", "NULL");
  }
  const bool by_head = s.lse_layout == ATTNFOLD_HEADS_ROWS;
  *out = {static_cast<char*>(s.o),
          static_cast<DType>(s.o_dtype),
          s.o_stride_row ? s.o_stride_row : shape.heads * shape.width,
          s.o_stride_head ? s.o_stride_head : shape.width,
          s.lse,
          s.l,
          s.lse_stride_row ? s.lse_stride_row : (by_head ? 1 : shape.heads),
          s.lse_stride_head ? s.lse_stride_head : (by_head ? num_rows : 1),
          s.log_base == ATTNFOLD_LOG_2,
          s.normalised != 0,
          s.empty == ATTNFOLD_EMPTY_NAN,
          s.empty == ATTNFOLD_EMPTY_FINITE,
          s.empty_value,
          num_rows};
  return {};
}

/** One array of a state: o, lse or l. */
struct Array {
  const char* field;
  const char* data;
  int64_t bytes;             // of an element
  int64_t row, head, width;  // strides and elements per (row, head)
  Extent extent;

  bool same_as(const Array& a) const {
    return data == a.data && bytes == a.bytes && row == a.row && head == a.head && width == a.width;
  }
};

/** The arrays of a state, with their extents. */
struct Arrays {
  Array array[3];
  int count = 0;
};

/** That every element stands at a multiple of its size. */
Status check_alignment(const Owner& owner, const Array& a) {
  const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(a.data)) % a.bytes;
  if (past == 0) return {};
  return invalid(owner.field(a.field),
                 "an address that is a multiple of " + std::to_string(a.bytes),
                 "one that is " + std::to_string(past) + " past it");
}

Status arrays_of(const Owner& owner, const StateView& s, const Shape& shape, Arrays* out) {
  const auto* lse = reinterpret_cast<const char*>(s.lse);
  const auto* l = reinterpret_cast<const char*>(s.l);
  out->array[0] = {"o", s.o, dtype_bytes(s.o_dtype), s.o_row, s.o_head, shape.width, {""}};
  out->array[1] = {"lse", lse, sizeof(float), s.lse_row, s.lse_head, 1, {""}};
  out->array[2] = {"l", l, sizeof(float), s.lse_row, s.lse_head, 1, {""}};
  out->count = s.normalised ? 2 : 3;
  if (s.num_rows * shape.heads == 0) return {};
  for (Array& a : std::span(out->array, static_cast<size_t>(out->count))) {
    ATTNFOLD_RETURN_IF_ERROR(check_alignment(owner, a));
    const auto extent = [&](const char* name) {
      return extent_of(name, a.data, {1, s.num_rows, shape.heads}, {0, a.row, a.head}, a.width,
                       static_cast<int>(a.bytes), &a.extent);
    };
    if (!extent("").ok()) return extent(owner.field(a.field).c_str());
  }
  return {};
}

/** An output's rows and heads are apart. */
Status check_output(const Owner& owner, const Arrays& arrays, const Shape& shape) {
  for (int i = 0; i < arrays.count; ++i) {
    const Array& a = arrays.array[i];
    const auto check = [&](const char* name) {
      return check_output_strides(name, shape.rows, a.row, shape.heads, a.head, a.width);
    };
    if (!check("").ok()) return check(owner.field(a.field).c_str());
    for (int j = 0; j < i; ++j) {
      if (!overlap(a.extent, arrays.array[j].extent)) continue;
      return invalid(owner.field(a.field),
                     "memory apart from " + owner.field(arrays.array[j].field),
                     "memory that overlaps it");
    }
  }
  return {};
}

/** In place is element for element; any other overlap would read what was already written. */
Status check_alias(const Owner& out, const Arrays& written, const Owner& in, const Arrays& read) {
  for (int r = 0; r < read.count; ++r) {
    for (int w = 0; w < written.count; ++w) {
      const Array &source = read.array[r], &target = written.array[w];
      if (!overlap(target.extent, source.extent) || (w == r && target.same_as(source))) continue;
      return invalid(out.field(target.field),
                     "memory apart from " + in.field(source.field) +
                         ", or the same address, type and strides as its own",
                     "memory that overlaps it");
    }
  }
  return {};
}

Status check_shape(int64_t rows, int32_t heads, int32_t width) {
  if (rows < 0 || rows > INT32_MAX) return invalid("rows", "0.." + std::to_string(INT32_MAX), rows);
  if (heads < 0 || heads > 1 << 16) return invalid("heads", "0.." + std::to_string(1 << 16), heads);
  if (width < 1 || width > 1 << 16)
    return invalid("head_dim_vo", "1.." + std::to_string(1 << 16), width);
  return {};
}

struct RowMask {
  const uint8_t* data;
  int64_t stride;
  bool leaves(int64_t row) const { return data && !data[row * stride]; }
};

Status check_mask(const RowMask& mask, const Arrays& written, const Shape& shape) {
  if (!mask.data || shape.pairs() == 0) return {};
  Extent extent;
  ATTNFOLD_RETURN_IF_ERROR(
      extent_of("row_mask", mask.data, {1, 1, shape.rows}, {0, 0, mask.stride}, 1, 1, &extent));
  for (int w = 0; w < written.count; ++w) {
    if (!overlap(written.array[w].extent, extent)) continue;
    return invalid(Owner{"out"}.field(written.array[w].field), "memory apart from row_mask",
                   "memory that overlaps it");
  }
  return {};
}

/** What the shares of a merge have in common. */
struct Work {
  std::span<const StateView> states;
  const StateView& out;
  Shape shape;
  float empty_lse;
  RowMask mask;
  int32_t num_shares;
  float* scratch;  // [num_shares, states], or null: few enough for the stack
};

void merge_share(void* context, int32_t share) {
  const Work& w = *static_cast<const Work*>(context);
  float on_stack[kStatesOnStack];
  float* const scales = w.scratch ? w.scratch + share * w.states.size() : on_stack;
  RowMerge merge(w.states, w.out, w.empty_lse, w.shape.width, scales);
  const int64_t begin = w.shape.pairs() * share / w.num_shares,
                end = w.shape.pairs() * (share + 1) / w.num_shares;
  for (int64_t pair = begin; pair < end; ++pair) {
    const int64_t row = pair / w.shape.heads;
    if (!w.mask.leaves(row)) merge.merge(row, pair - row * w.shape.heads);
  }
}

Status run(Work work, const attnfold_execution* execution) {
  attnfold_execution e;
  ATTNFOLD_RETURN_IF_ERROR(validate_execution(execution, &e));
  if (e.backend == ATTNFOLD_CUDA) {
    return cuda::merge(
        {work.states, work.out, work.shape.rows, static_cast<int32_t>(work.shape.heads),
         static_cast<int32_t>(work.shape.width), work.empty_lse, work.mask.data, work.mask.stride},
        e);
  }
  const cpu::Threads threads = cpu::threads_of(e);
  work.num_shares = static_cast<int32_t>(
      std::clamp<int64_t>(work.shape.pairs() / kPairsPerShare, 1, threads.num_threads));
  std::vector<float> scratch;
  if (work.states.size() > kStatesOnStack)
    scratch.resize(work.states.size() * static_cast<size_t>(work.num_shares));
  work.scratch = scratch.empty() ? nullptr : scratch.data();
  if (work.shape.pairs() > 0) cpu::run_parallel(threads, {{work.num_shares, merge_share, &work}});
  return {};
}

constexpr float kInf = std::numeric_limits<float>::infinity();

/** What `to` asks for as the lse of an empty row. */
float empty_lse_of(const attnfold_state& to) {
  switch (to.empty) {
    case ATTNFOLD_EMPTY_NAN: return std::numeric_limits<float>::quiet_NaN();
    case ATTNFOLD_EMPTY_FINITE: return to.empty_value;
    default: return -kInf;
  }
}

}  // namespace

Status merge_states(int64_t rows, int32_t heads, int32_t width, const attnfold_state* states,
                    int32_t n, const attnfold_state* out, const uint8_t* row_mask,
                    int64_t row_mask_stride, const attnfold_execution* execution) {
  ATTNFOLD_RETURN_IF_ERROR(check_shape(rows, heads, width));
  if (n < 0 || n > 1 << 20) return invalid("n", "0.." + std::to_string(1 << 20), n);
  if (n > 0 && !states) return invalid("states", "[n] states", "NULL");
  const Shape shape{rows, heads, width};
  const Owner owner{"out"};
  attnfold_state given;
  StateView target;
  ATTNFOLD_RETURN_IF_ERROR(read_state(owner, out, &given));
  if (!given.normalised) return invalid(owner.field("normalised"), "1", 0);
  if (given.num_rows != -1) return invalid(owner.field("num_rows"), "-1", given.num_rows);
  ATTNFOLD_RETURN_IF_ERROR(resolve(owner, given, shape, &target));
  Arrays written;
  ATTNFOLD_RETURN_IF_ERROR(arrays_of(owner, target, shape, &written));
  if (shape.pairs() > 0) ATTNFOLD_RETURN_IF_ERROR(check_output(owner, written, shape));
  const RowMask mask{row_mask, row_mask_stride};
  ATTNFOLD_RETURN_IF_ERROR(check_mask(mask, written, shape));
  StateView on_stack[kStatesOnStack];
  std::vector<StateView> many(n > kStatesOnStack ? static_cast<size_t>(n) : 0);
  StateView* const sides = many.empty() ? on_stack : many.data();
  bool any_sink = false;
  for (int32_t i = 0; i < n; ++i) {
    const Owner side{"states", i};
    // A caller of another header has other gaps between states: those of its own sizeof.
    const auto* state = reinterpret_cast<const attnfold_state*>(
        reinterpret_cast<const char*>(states) + static_cast<size_t>(i) * states->struct_size);
    if (state->struct_size != states->struct_size) {
      return invalid(side.field("struct_size"),
                     "that of states[0], " + std::to_string(states->struct_size),
                     state->struct_size);
    }
    ATTNFOLD_RETURN_IF_ERROR(read_state(side, state, &given));
    if (i == 0 && states->struct_size % alignof(attnfold_state) != 0) {
      return invalid(
          side.field("struct_size"),
          "the sizeof of its struct, a multiple of " + std::to_string(alignof(attnfold_state)),
          states->struct_size);
    }
    ATTNFOLD_RETURN_IF_ERROR(resolve(side, given, shape, sides + i));
    if (given.sink_included && any_sink) {
      return invalid(side.field("sink_included"), "0 (another side counts the sink already)", 1);
    }
    any_sink = any_sink || given.sink_included;
    Arrays read;
    ATTNFOLD_RETURN_IF_ERROR(arrays_of(side, sides[i], shape, &read));
    ATTNFOLD_RETURN_IF_ERROR(check_alias(owner, written, side, read));
  }
  return run({{sides, static_cast<size_t>(n)}, target, shape, -kInf, mask, 1, nullptr}, execution);
}

Status convert_state(int64_t rows, int32_t heads, int32_t width, const attnfold_state* from,
                     const attnfold_state* to, const attnfold_execution* execution) {
  ATTNFOLD_RETURN_IF_ERROR(check_shape(rows, heads, width));
  const Shape shape{rows, heads, width};
  const Owner in{"from"}, out{"to"};
  attnfold_state source, target;
  StateView read_view, written_view;
  ATTNFOLD_RETURN_IF_ERROR(read_state(in, from, &source));
  ATTNFOLD_RETURN_IF_ERROR(read_state(out, to, &target));
  if (target.sink_included != source.sink_included) {
    return invalid(out.field("sink_included"),
                   "that of from, " + std::to_string(source.sink_included) +
                       " (a conversion neither adds nor takes the sink)",
                   target.sink_included);
  }
  if (target.num_rows != -1) return invalid(out.field("num_rows"), "-1", target.num_rows);
  ATTNFOLD_RETURN_IF_ERROR(resolve(in, source, shape, &read_view));
  ATTNFOLD_RETURN_IF_ERROR(resolve(out, target, shape, &written_view));
  Arrays read, written;
  ATTNFOLD_RETURN_IF_ERROR(arrays_of(in, read_view, shape, &read));
  ATTNFOLD_RETURN_IF_ERROR(arrays_of(out, written_view, shape, &written));
  if (shape.pairs() > 0) ATTNFOLD_RETURN_IF_ERROR(check_output(out, written, shape));
  ATTNFOLD_RETURN_IF_ERROR(check_alias(out, written, in, read));
  return run({{&read_view, 1}, written_view, shape, empty_lse_of(target), {}, 1, nullptr},
             execution);
}

}  // namespace attnfold
