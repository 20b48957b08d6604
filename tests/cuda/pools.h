// Random pools and rows, in memory of the CPU and of the device.
#pragma once

#include <algorithm>
#include <random>
#include <tuple>

#include "attnfold/cache.h"
#include "cuda/device_suite.h"
#include "cuda/twin.h"

namespace attnfold::check::device_test {

inline int64_t below(std::mt19937_64& rng, int64_t n) {
  return static_cast<int64_t>(rng() % static_cast<uint64_t>(n));
}

/** Where (page, token, head) of a tensor is, in elements. */
struct Place {
  int64_t base = 0, stride[3] = {};  // page, token, head
};

/** Axes in any order, with gaps, each in either direction; returns the elements that it takes. */
inline int64_t any_place(std::mt19937_64& rng, const int64_t (&n)[3], int64_t width, bool even,
                         Place* place) {
  int axes[3] = {0, 1, 2};
  std::shuffle(axes, axes + 3, rng);
  int64_t reach = width;
  place->base = 0;
  for (const int axis : axes) {
    place->stride[axis] = reach + (even || rng() % 2 ? 0 : below(rng, 9));
    reach += (n[axis] - 1) * place->stride[axis];
    if (rng() % 5 == 0) {
      place->base += (n[axis] - 1) * place->stride[axis];
      place->stride[axis] = -place->stride[axis];
    }
  }
  return reach;
}

/** A pool, its memory and that of its scales full of noise, on both sides. */
class TwinPool {
 public:
  TwinPool(std::mt19937_64& rng, DType dtype, bool even = false) : dtype_(dtype) {
    pool_ = ATTNFOLD_KV_POOL_INIT;
    pool_.kv_dtype = static_cast<attnfold_dtype>(dtype);
    pool_.kv_heads = 1 + static_cast<int32_t>(below(rng, 9));
    pool_.page_size = 1 + static_cast<int32_t>(below(rng, 20));
    pool_.head_dim_qk = 8 * (1 + static_cast<int32_t>(below(rng, rng() % 4 ? 18 : 72)));
    pool_.head_dim_vo = 8 * (1 + static_cast<int32_t>(below(rng, rng() % 4 ? 18 : 72)));
    pool_.num_pages = 1 + below(rng, 30);
    has_v_ = rng() % 5 != 0;
    if (is_8_bit(dtype)) {
      pool_.k_scale_kind = static_cast<attnfold_scale_kind>(1 + rng() % 3);
      pool_.v_scale_kind = static_cast<attnfold_scale_kind>(1 + rng() % 3);
    }
    lay_out(rng, even);
  }
  /** The same kind of pool elsewhere. */
  TwinPool(std::mt19937_64& rng, const TwinPool& like)
      : dtype_(like.dtype_), has_v_(like.has_v_), pool_(like.pool_) {
    pool_.num_pages = 1 + below(rng, 30);
    lay_out(rng, false);
  }

  attnfold_kv_pool on_host() { return view(false); }
  attnfold_kv_pool on_device() { return view(true); }
  const attnfold_kv_pool& shape() const { return pool_; }
  int64_t num_slots() const { return pool_.num_pages * pool_.page_size; }
  bool has_int8_scale_of_callers() const {
    return dtype_ == DType::i8 && (pool_.k_scale_kind != ATTNFOLD_SCALE_PER_TOKEN ||
                                   (has_v_ && pool_.v_scale_kind != ATTNFOLD_SCALE_PER_TOKEN));
  }
  std::string differs(bool any_nan) const {
    for (const auto& [name, twin] :
         {std::pair<const char*, const Twin<char>*>{"k", &memory_[0]}, {"v", &memory_[1]}}) {
      if (const std::string wrong = twin->differs(dtype_, any_nan); !wrong.empty())
        return std::string(name) + ", " + wrong;
    }
    for (const auto& scales : scales_) {
      if (const std::string wrong = scales.differs(DType::f32, false); !wrong.empty())
        return "scales, " + wrong;
    }
    return "";
  }

 private:
  void lay_out(std::mt19937_64& rng, bool even) {
    const int64_t n[3] = {pool_.num_pages, pool_.page_size, pool_.kv_heads};
    const size_t bytes = static_cast<size_t>(dtype_bytes(dtype_));
    for (int t = 0; t < 2; ++t) {
      const int64_t margin = even ? 16 : below(rng, 17);
      const int64_t reach =
          any_place(rng, n, t ? pool_.head_dim_vo : pool_.head_dim_qk, even, &place_[t]);
      place_[t].base += margin;
      std::vector<char> noise(static_cast<size_t>(reach + margin + 5) * bytes);
      for (char& c : noise) c = static_cast<char>(rng());
      memory_[t] = Twin<char>(std::move(noise));
      const int64_t scale_reach = any_place(rng, n, 1, false, &scale_place_[t]);
      std::vector<float> scales(static_cast<size_t>(scale_reach + 3));
      for (float& s : scales)
        s = std::ldexp(rng() % 2 ? 1.0f : -1.25f, static_cast<int>(rng() % 12) - 8);
      scales_[t] = Twin<float>(std::move(scales));
    }
  }
  attnfold_kv_pool view(bool on_device) {
    attnfold_kv_pool p = pool_;
    const auto tensor = [&](int t) {
      char* at = memory_[t].host() + place_[t].base * dtype_bytes(dtype_);
      return on_device ? memory_[t].moved(at) : at;
    };
    const auto scale = [&](int t, attnfold_scale_kind kind) {
      float* at = scales_[t].host() + (kind == ATTNFOLD_SCALE_PER_TOKEN ? scale_place_[t].base : 0);
      return on_device ? scales_[t].moved(at) : at;
    };
    p.k = tensor(0);
    p.v = has_v_ ? tensor(1) : nullptr;
    std::tie(p.k_stride_page, p.k_stride_token, p.k_stride_head) = strides(place_[0]);
    std::tie(p.v_stride_page, p.v_stride_token, p.v_stride_head) = strides(place_[1]);
    if (is_8_bit(dtype_)) {
      p.k_scale = scale(0, p.k_scale_kind);
      p.v_scale = scale(1, p.v_scale_kind);
      if (p.k_scale_kind == ATTNFOLD_SCALE_PER_TOKEN)
        std::tie(p.k_scale_stride_page, p.k_scale_stride_token, p.k_scale_stride_head) =
            strides(scale_place_[0]);
      if (p.v_scale_kind == ATTNFOLD_SCALE_PER_TOKEN)
        std::tie(p.v_scale_stride_page, p.v_scale_stride_token, p.v_scale_stride_head) =
            strides(scale_place_[1]);
    }
    return p;
  }
  static std::tuple<int64_t, int64_t, int64_t> strides(const Place& p) {
    return {p.stride[0], p.stride[1], p.stride[2]};
  }

  DType dtype_;
  bool has_v_ = true;
  attnfold_kv_pool pool_;
  Place place_[2], scale_place_[2];
  Twin<char> memory_[2];
  Twin<float> scales_[2];
};

/** New rows with gaps: noise of every size, or numbers of a model. */
class TwinRows {
 public:
  TwinRows(std::mt19937_64& rng, const TwinPool& pool, DType dtype, int64_t num_tokens,
           bool even = false) {
    rows_ = ATTNFOLD_KV_ROWS_INIT;
    rows_.dtype = static_cast<attnfold_dtype>(dtype);
    rows_.num_tokens = num_tokens;
    const bool wild = rng() % 2 && !pool.has_int8_scale_of_callers();
    const int64_t n[3] = {1, std::max<int64_t>(num_tokens, 1), pool.shape().kv_heads};
    for (int t = 0; t < 2; ++t) {
      const int64_t reach = any_place(
          rng, n, t ? pool.shape().head_dim_vo : pool.shape().head_dim_qk, even, &place_[t]);
      std::vector<char> noise(static_cast<size_t>(reach) * static_cast<size_t>(dtype_bytes(dtype)));
      for (char& c : noise) c = static_cast<char>(rng());
      for (int64_t e = 0; !wild && e < reach; ++e)
        store_f32(noise.data(), dtype, e, static_cast<float>(below(rng, 4001) - 2000) / 256.0f);
      memory_[t] = Twin<char>(std::move(noise));
    }
    std::vector<int64_t> slots(static_cast<size_t>(num_tokens) + 1);
    const int64_t crowd = rng() % 2 ? pool.num_slots() : 1 + below(rng, pool.num_slots());
    for (int64_t& slot : slots) slot = rng() % 6 ? below(rng, crowd) : -1;
    slots_ = Twin<int64_t>(std::move(slots));
  }
  attnfold_kv_rows on_host() { return view(false); }
  attnfold_kv_rows on_device() { return view(true); }
  Twin<int64_t>& slots() { return slots_; }

 private:
  attnfold_kv_rows view(bool on_device) {
    attnfold_kv_rows r = rows_;
    const auto tensor = [&](int t) {
      const char* at =
          memory_[t].host() + place_[t].base * dtype_bytes(static_cast<DType>(r.dtype));
      return on_device ? memory_[t].moved(at) : at;
    };
    r.k = tensor(0);
    r.v = tensor(1);
    r.k_stride_token = place_[0].stride[1];
    r.k_stride_head = place_[0].stride[2];
    r.v_stride_token = place_[1].stride[1];
    r.v_stride_head = place_[1].stride[2];
    r.slots = on_device ? slots_.device() : slots_.host();
    return r;
  }

  attnfold_kv_rows rows_;
  Place place_[2];
  Twin<char> memory_[2];
  Twin<int64_t> slots_;
};

/** "" or what is wrong after both appended. */
inline std::string append_both(TwinPool& pool, TwinRows& rows) {
  const attnfold_kv_pool host = pool.on_host(), device = pool.on_device();
  const attnfold_kv_rows from_host = rows.on_host(), from_device = rows.on_device();
  const attnfold_execution e = on_device();
  if (attnfold_append(&host, &from_host, nullptr) != ATTNFOLD_OK) return attnfold_last_error();
  if (attnfold_append(&device, &from_device, &e) != ATTNFOLD_OK) return attnfold_last_error();
  require_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return pool.differs(is_8_bit(static_cast<DType>(pool.shape().kv_dtype)));
}

}  // namespace attnfold::check::device_test
