// Random pools for the properties of the cache calls: any layout, gaps, directions, k and v apart
// or interleaved; and a naive view of them that the claims compare against.
#pragma once

#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "attnfold/cache.h"
#include "core/dtype.h"

namespace attnfold::property {

/** Element (page, token, head, e) of k or v is at byte `base + its strides`, in elements. */
struct Place {
  int64_t base = 0, page = 0, token = 0, head = 0;
  int64_t at(int64_t p, int64_t t, int64_t h, int64_t e) const {
    return base + p * page + t * token + h * head + e;
  }
};

/** A pool within one block of memory that is full of noise. */
struct TestPool {
  DType dtype = DType::f32;
  int32_t kv_heads = 1, page_size = 1, width_k = 8, width_v = 8;
  int64_t num_pages = 1;
  bool has_v = true;
  Place k, v;
  std::vector<char> memory;

  int bytes() const { return dtype_bytes(dtype); }
  char* element(const Place& place, int64_t p, int64_t t, int64_t h, int64_t e) {
    return memory.data() + place.at(p, t, h, e) * bytes();
  }
  attnfold_kv_pool view() {
    attnfold_kv_pool pool = ATTNFOLD_KV_POOL_INIT;
    pool.k = memory.data() + k.base * bytes();
    pool.k_stride_page = k.page;
    pool.k_stride_token = k.token;
    pool.k_stride_head = k.head;
    if (has_v) {
      pool.v = memory.data() + v.base * bytes();
      pool.v_stride_page = v.page;
      pool.v_stride_token = v.token;
      pool.v_stride_head = v.head;
    }
    pool.kv_dtype = static_cast<attnfold_dtype>(dtype);
    pool.kv_heads = kv_heads;
    pool.head_dim_qk = width_k;
    pool.head_dim_vo = width_v;
    pool.page_size = page_size;
    pool.num_pages = num_pages;
    return pool;
  }
};

/** Strides in a random order of the axes with random gaps, each in either direction.  Returns the
 * elements from the lowest to the highest; place.base is relative to the lowest. */
inline int64_t any_strides(const TestPool& pool, int32_t width, Place* place) {
  int axes[3] = {0, 1, 2};
  const int64_t n[3] = {pool.num_pages, pool.page_size, pool.kv_heads};
  int64_t* stride[3] = {&place->page, &place->token, &place->head};
  std::swap(axes[0], axes[*rc::gen::inRange(0, 3)]);
  std::swap(axes[1], axes[*rc::gen::inRange(1, 3)]);
  int64_t reach = width;
  place->base = 0;
  for (const int axis : axes) {
    *stride[axis] = reach + *rc::gen::element(0, 0, 1, 8);
    reach += (n[axis] - 1) * *stride[axis];
    if (*rc::gen::inRange(0, 4) == 0) {
      place->base += (n[axis] - 1) * *stride[axis];
      *stride[axis] = -*stride[axis];
    }
  }
  return reach;
}

inline void fill_noise(std::vector<char>* memory) {
  uint64_t x = *rc::gen::arbitrary<uint64_t>() | 1;
  for (char& c : *memory) {
    x = x * 6364136223846793005u + 1442695040888963407u;
    c = static_cast<char>(x >> 56);
  }
}

/** Lays k and v out anew; types, counts and widths stay. */
inline void lay_out(TestPool* pool) {
  const int64_t gap = 16;
  int64_t reach = any_strides(*pool, pool->width_k, &pool->k);
  if (!pool->has_v) {
    pool->k.base += gap;
  } else if (*rc::gen::inRange(0, 3) == 0) {  // [num_pages, 2, page_size, heads, width]
    const int64_t row_k = int64_t{pool->kv_heads} * pool->width_k,
                  row_v = int64_t{pool->kv_heads} * pool->width_v;
    const int64_t page = pool->page_size * (row_k + row_v) + *rc::gen::element(0, 8);
    pool->k = {gap, page, row_k, pool->width_k};
    pool->v = {gap + pool->page_size * row_k, page, row_v, pool->width_v};
    reach = pool->num_pages * page;
  } else if (*rc::gen::inRange(0, 3) == 0) {  // k and v of a token and head side by side
    const int64_t pair = pool->width_k + pool->width_v, row = pool->kv_heads * pair;
    pool->k = {gap, pool->page_size * row, row, pair};
    pool->v = pool->k;
    pool->v.base += pool->width_k;
    reach = pool->num_pages * pool->page_size * row;
  } else {
    const int64_t reach_v = any_strides(*pool, pool->width_v, &pool->v);
    pool->k.base += gap;
    pool->v.base += gap + reach;
    reach += reach_v;
  }
  pool->memory.resize(static_cast<size_t>((reach + 2 * gap) * pool->bytes()));
  fill_noise(&pool->memory);
}

inline DType any_type() { return *rc::gen::element(DType::f32, DType::f16, DType::bf16); }

inline TestPool any_pool() {
  TestPool pool;
  pool.dtype = any_type();
  pool.kv_heads = *rc::gen::inRange(1, 4);
  pool.page_size = *rc::gen::element(1, 2, 3, 16, 19);
  pool.width_k = 8 * *rc::gen::inRange(1, 5);
  pool.width_v = 8 * *rc::gen::inRange(1, 5);
  pool.num_pages = *rc::gen::inRange(1, 12);
  pool.has_v = *rc::gen::inRange(0, 5) != 0;
  lay_out(&pool);
  return pool;
}

/** Threads that are the calling one, and as many shares as asked for whatever the size. */
inline void backwards(void*, int32_t n, void (*body)(void*, int32_t), void* context) {
  for (int32_t i = n - 1; i >= 0; --i) body(context, i);
}

inline attnfold_execution any_execution() {
  attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
  e.num_threads = *rc::gen::inRange(1, 9);
  if (*rc::gen::arbitrary<bool>()) e.parallel_for = backwards;
  return e;
}

}  // namespace attnfold::property
