// A pool of the cache calls, checked and with every stride resolved.
#pragma once

#include <cstdint>
#include <string>

#include "attnfold/cache.h"
#include "core/problem.h"
#include "cpu/backend.h"
#include "plan/validate.h"
#include "status.h"

namespace attnfold::cache {

/** What an argument is called in messages: put together only when there is one. */
struct Name {
  const char* owner;
  const char* field;
  std::string text() const { return std::string(owner) + "." + field; }
};

Status check_range(Name name, int64_t value, int64_t low, int64_t high);
Status check_array(const char* name, const void* p, size_t alignment);

/** That written memory is apart from `other`; both may be empty. */
Status check_apart(const Extent& written, const Extent& other);

Extent extent_of_array(const char* name, const void* p, int64_t bytes);

/** k, v or scales per token of a pool; or k or v of new rows, which have no pages. */
template <class Byte>
struct Rows {
  View<Byte> view{};
  int32_t width = 0;  // elements of a row; 0: there is none
  int bytes = 0;      // of an element
  Extent extent{};
};

/** Scales that the caller made: one for each head, or for all. */
struct GivenScales {
  const float* data = nullptr;
  int64_t stride_head = 0;
};

/** What a page consists of; scales here are those per token. */
enum Part { kK, kV, kKScale, kVScale, kNumParts };

struct Pool {
  DType dtype;
  int32_t kv_heads, page_size;
  int64_t num_pages;
  Rows<char> part[kNumParts];
  GivenScales given[2];               // of k, of v
  attnfold_scale_kind scale_kind[2];  // as given, of k and of v

  const Rows<char>& k() const { return part[kK]; }
  const Rows<char>& v() const { return part[kV]; }
  int64_t page_bytes() const {
    return static_cast<int64_t>(page_size) * kv_heads * (k().width + v().width) *
           dtype_bytes(dtype);
  }
};

struct PoolNames {
  const char* pool;
  const char* part[kNumParts];
};

Status resolve_pool(const PoolNames& names, const attnfold_kv_pool* given, Pool* out);

/** Threads for work on `bytes`, and into how many shares to cut it: little work stays on the
 * calling thread. */
cpu::Threads threads_for(const attnfold_execution& execution, int64_t bytes, int32_t* num_shares);

}  // namespace attnfold::cache
