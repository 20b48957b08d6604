// Checks of the prefix groups that a caller names.
#include <algorithm>

#include "plan/prefix.h"
#include "plan/validate.h"

namespace attnfold {
namespace {

Status check_arrays(const attnfold_problem& p, const attnfold_lengths& l) {
  if (p.kv_storage == ATTNFOLD_KV_RAGGED)
    return invalid("num_prefix_groups", "0 (kv_storage is ragged)", l.num_prefix_groups);
  if (!l.prefix_keys) return invalid("prefix_keys", "[num_prefix_groups] keys", "NULL");
  if (!l.prefix_indptr) return invalid("prefix_indptr", "[num_prefix_groups + 1] offsets", "NULL");
  if (l.prefix_indptr[0] != 0) return invalid(indexed("prefix_indptr", 0), "0", l.prefix_indptr[0]);
  for (int32_t g = 0; g < l.num_prefix_groups; ++g) {
    if (l.prefix_indptr[g + 1] < l.prefix_indptr[g]) {
      return invalid(indexed("prefix_indptr", g + 1),
                     "at least " + indexed("prefix_indptr", g) + " (" +
                         std::to_string(l.prefix_indptr[g]) + ")",
                     l.prefix_indptr[g + 1]);
    }
    const int32_t least = g == 0 ? 0 : l.prefix_keys[g - 1];
    if (l.prefix_keys[g] < least) {
      return invalid(
          indexed("prefix_keys", g),
          "at least " +
              (g == 0 ? "0" : indexed("prefix_keys", g - 1) + " (" + std::to_string(least) + ")"),
          l.prefix_keys[g]);
    }
  }
  if (!l.prefix_requests && l.prefix_indptr[l.num_prefix_groups] > 0)
    return invalid("prefix_requests", "[prefix_indptr[num_prefix_groups]] requests", "NULL");
  return {};
}

/** Page ids of the keys that a run may read together are those of the group's first request. */
Status check_pages(const attnfold_problem& p, const attnfold_lengths& l, int32_t g, int32_t first,
                   int32_t r, int32_t keys) {
  const Lengths tables{l.batch,     l.qo_indptr, l.kv_len, l.block_table, l.block_table_stride,
                       l.kv_indptr, l.kv_indices};
  const int64_t n = planner::divide_up(keys, p.page_size);
  const int32_t *a = pages_of(tables, first), *b = pages_of(tables, r);
  const int64_t equal = planner::num_equal(a, b, n);
  if (equal == n) return {};
  const std::string name = l.block_table
                               ? indexed("block_table", r) + "[" + std::to_string(equal) + "]"
                               : indexed("kv_indices", l.kv_indptr[r] + equal);
  return invalid(name,
                 "page " + std::to_string(a[equal]) + ", as request " + std::to_string(first) +
                     " (" + indexed("prefix_keys", g) + " = " + std::to_string(l.prefix_keys[g]) +
                     ")",
                 b[equal]);
}

/** Request prefix_requests[i] of group g: there, named once, and of the group's own parent. */
Status check_request(const attnfold_lengths& l, int32_t g, int32_t i, int32_t parent,
                     const int32_t* group_of) {
  const int32_t r = l.prefix_requests[i];
  const auto name = [&] { return indexed("prefix_requests", i); };
  const auto group_text = [](int32_t group) {
    return group < 0 ? std::string("no earlier group") : "group " + std::to_string(group);
  };
  if (group_of[r] == g) return invalid(name(), "a request that its group does not name yet", r);
  if (group_of[r] != parent) {
    return invalid(name(), "a request of " + group_text(parent) + ", as the group's first",
                   std::to_string(r) + ", of " + group_text(group_of[r]));
  }
  if (l.prefix_keys[g] > l.kv_len[r]) {
    return invalid(indexed("prefix_keys", g),
                   "at most " + indexed("kv_len", r) + " (" + std::to_string(l.kv_len[r]) + ")",
                   l.prefix_keys[g]);
  }
  return {};
}

}  // namespace

Status validate_prefixes(const attnfold_problem& p, const UnitShape& shape, const Mask& mask,
                         const attnfold_lengths& l, int32_t* group_of) {
  if (l.num_prefix_groups < 0)
    return invalid("num_prefix_groups", "0 or more", l.num_prefix_groups);
  if (l.num_prefix_groups == 0 || l.batch == 0) return {};
  ATTNFOLD_RETURN_IF_ERROR(check_arrays(p, l));
  std::fill(group_of, group_of + l.batch, -1);  // the innermost group of each request so far
  for (int32_t g = 0; g < l.num_prefix_groups; ++g) {
    int32_t parent = -1, first = -1, first_keys = 0;  // first: of those that can share
    for (int32_t i = l.prefix_indptr[g]; i < l.prefix_indptr[g + 1]; ++i) {
      const int32_t r = l.prefix_requests[i];
      if (r < 0 || r >= l.batch) {
        return invalid(indexed("prefix_requests", i),
                       "a request, 0.." + std::to_string(l.batch - 1), r);
      }
      if (i == l.prefix_indptr[g]) parent = group_of[r];
      ATTNFOLD_RETURN_IF_ERROR(check_request(l, g, i, parent, group_of));
      group_of[r] = g;
      RequestShape request{l.qo_indptr[r + 1] - l.qo_indptr[r], l.kv_len[r]};
      if (l.visible_prefix) request.visible_prefix = l.visible_prefix[r];
      if (l.mask_width) request.mask_width = l.mask_width[r];
      // Under a block-sparse mask nothing is shared, and entries of unlisted blocks mean nothing.
      const int32_t keys =
          p.sparse_block_size > 0
              ? 0
              : std::min(l.prefix_keys[g], planner::shareable_keys(shape, mask, request));
      if (first < 0 && keys > 0) {
        first = r;
        first_keys = keys;
      }
      if (keys == 0) continue;
      ATTNFOLD_RETURN_IF_ERROR(check_pages(p, l, g, first, r, std::min(keys, first_keys)));
    }
  }
  return {};
}

}  // namespace attnfold
