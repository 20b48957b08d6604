#include "bench_shape.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <string_view>
#include <vector>

#include "command.h"

namespace attnfold::tools {
namespace {

constexpr int32_t kMostRequests = 4096, kMostKeys = 1 << 20, kMostHeads = 1024, kMostPage = 1 << 16;

/** Takes a whole number in [1, most] off the front of `text`; 0 if there is none. */
int32_t take_number(std::string_view* text, int32_t most) {
  int32_t n = 0;
  const auto [stop, error] = std::from_chars(text->data(), text->data() + text->size(), n);
  if (error != std::errc() || n < 1 || n > most) return 0;
  text->remove_prefix(static_cast<size_t>(stop - text->data()));
  return n;
}

bool take_text(std::string_view* text, std::string_view prefix) {
  if (!text->starts_with(prefix)) return false;
  text->remove_prefix(prefix.size());
  return true;
}

/** 16x2048, or 512on8192. */
bool read_lengths(std::string_view part, BenchShape* shape) {
  const int32_t first = take_number(&part, kMostKeys);
  const bool is_decode = take_text(&part, "x");
  if (first == 0 || (!is_decode && !take_text(&part, "on"))) return false;
  const int32_t keys = take_number(&part, kMostKeys);
  if (keys == 0 || !part.empty()) return false;
  if (is_decode) {
    if (first > kMostRequests) return false;
    shape->qo_len.assign(static_cast<size_t>(first), 1);
    shape->kv_len.assign(static_cast<size_t>(first), keys);
  } else {
    if (first > keys) return false;
    shape->qo_len = {first};
    shape->kv_len = {keys};
  }
  return true;
}

bool read_heads(std::string_view part, BenchShape* shape) {
  shape->qo_heads = take_number(&part, kMostHeads);
  if (shape->qo_heads == 0 || !take_text(&part, "/")) return false;
  shape->kv_heads = take_number(&part, kMostHeads);
  return shape->kv_heads > 0 && part.empty() && shape->qo_heads % shape->kv_heads == 0;
}

bool read_option(std::string_view part, BenchShape* shape) {
  constexpr std::array kTypes = {ATTNFOLD_F32,  ATTNFOLD_F16,  ATTNFOLD_BF16,
                                 ATTNFOLD_E4M3, ATTNFOLD_E5M2, ATTNFOLD_I8};
  for (const attnfold_dtype type : kTypes) {
    if (part != dtype_name(static_cast<DType>(type))) continue;
    shape->dtype = type;
    return true;
  }
  if (part == "hnd") return shape->head_major = true;
  if (take_text(&part, "page")) {
    shape->page_size = take_number(&part, kMostPage);
    return shape->page_size > 0 && part.empty();
  }
  if (take_text(&part, "d")) {
    shape->head_dim = take_number(&part, kMostHeads);
    return shape->head_dim > 0 && part.empty();
  }
  return read_heads(part, shape);
}

}  // namespace

BenchShape parse_shape(const std::string& text) {
  BenchShape shape{text, 32, 8, {}, {}};
  std::string_view rest = text;
  for (bool is_first = true; is_first || !rest.empty(); is_first = false) {
    const size_t end = std::min(rest.find(':'), rest.size());
    const std::string_view part = rest.substr(0, end);
    const bool ends_in_colon = end + 1 == rest.size();
    rest.remove_prefix(std::min(end + 1, rest.size()));
    const bool is_known = is_first ? read_lengths(part, &shape) : read_option(part, &shape);
    if (!is_known || ends_in_colon) {
      throw BadInput(fmt::format("--shapes: expected {}, got {} in {}", kShapeForm,
                                 part.empty() || ends_in_colon ? "an empty part" : part, text));
    }
  }
  return shape;
}

bool is_prefill(const BenchShape& shape) { return shape.qo_len.front() > 1; }

}  // namespace attnfold::tools
