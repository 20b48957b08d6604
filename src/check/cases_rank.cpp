// Named cases: keys sharded over ranks.  Each rank is one call; its tokens are requests of their
// own, since what a token sees of a shard is a prefix of the shard.
#include <cstring>

#include "check/cases_util.h"

namespace attnfold::check::cases {
namespace {

/** Keys go to the ranks in turns of `interleave`. */
struct Shards {
  int32_t world, interleave;

  int32_t owner(int32_t key) const { return key / interleave % world; }
  int32_t global(int32_t rank, int32_t local) const {
    return local / interleave * interleave * world + rank * interleave + local % interleave;
  }
  int32_t local_len(int32_t rank, int32_t global_len) const {
    int32_t n = 0;
    for (int32_t key = 0; key < global_len; ++key) n += owner(key) == rank;
    return n;
  }
};

/** The call of one rank: all tokens of `whole`, each over what it sees of the shard; values as
 * fill_noise(whole, seed). */
Call rank_call(const Call& whole, const Shards& shards, int32_t rank, uint64_t seed) {
  const attnfold_problem& p = whole.problem;
  Lengths kv_len, request;
  for (int32_t r = 0; r < whole.batch; ++r) {
    const int32_t qo_len = whole.qo_indptr[r + 1] - whole.qo_indptr[r];
    for (int32_t i = 0; i < qo_len; ++i) {
      const int32_t seen = p.mask == kCausal ? whole.kv_len[r] - qo_len + i + 1 : whole.kv_len[r];
      kv_len.push_back(shards.local_len(rank, seen));
      request.push_back(r);
    }
  }
  Call call = zero_call(make_spec({p.qo_heads, p.kv_heads, p.head_dim_qk, p.head_dim_vo},
                                  static_cast<DType>(p.kv_dtype), p.page_size, kNone,
                                  Lengths(kv_len.size(), 1), kv_len));
  call.problem.o_dtype = ATTNFOLD_F32;
  call.q = whole.q;
  fill_k(call, [&](int t, int c, int h, int e) {
    return 1.7f * noise(seed + 1, request[t], shards.global(rank, c), h, e);
  });
  fill_v(call, [&](int t, int c, int h, int e) {
    return 1.7f * noise(seed + 2, request[t], shards.global(rank, c), h, e);
  });
  return call;
}

/** The ranks' calls, each changed by `change`, merged and judged. */
template <typename Change>
std::string merged_is_right(const Call& whole, const Shards& shards, const Context& x,
                            Change change) {
  std::vector<State> sides;
  for (int32_t rank = 0; rank < shards.world; ++rank) {
    Call call = rank_call(whole, shards, rank, x.seed);
    ATTNFOLD_HOLD(change(call));
    const Call before = call;
    Answer answer;
    ATTNFOLD_HOLD(in("rank " + std::to_string(rank), same_under(call, x, {1, 3}, answer)));
    if (before.kv_len != call.kv_len || before.block_table != call.block_table)
      return "the caller's arrays were changed";
    sides.push_back(state_of(call, answer));
  }
  State merged;
  const attnfold_problem& p = whole.problem;
  ATTNFOLD_HOLD(merge(whole.num_rows(), p.qo_heads, p.head_dim_vo, sides, merged));
  return in(
      "world " + std::to_string(shards.world) + ", interleave " + std::to_string(shards.interleave),
      judge_state(whole, merged, ref::answer(whole)));
}

constexpr auto kUnchanged = [](Call&) { return std::string(); };

std::string cp_global_causal_positions(uint64_t seed, const char* isa) {
  Call whole =
      zero_call(make_spec({8, 1, 576, 512}, DType::bf16, 64, kCausal, {4, 1, 2}, {37, 8, 3}));
  fill_noise(whole, seed);
  for (int32_t world : {2, 4, 8})
    ATTNFOLD_HOLD(merged_is_right(whole, {world, 1}, {seed, isa}, kUnchanged));
  return "";
}

std::string cp_interleave_block(uint64_t seed, const char* isa) {
  Call whole = zero_call(make_spec({8, 1, 576, 512}, DType::bf16, 16, kNone, {1, 1}, {100, 129}));
  fill_noise(whole, seed);
  for (int32_t world : {2, 3}) {
    for (int32_t interleave : {1, 4, 16}) {
      const Shards shards{world, interleave};
      for (int32_t n : whole.kv_len) {
        int32_t sum = 0;
        for (int32_t rank = 0; rank < world; ++rank) sum += shards.local_len(rank, n);
        if (sum != n)
          return "local lengths sum to " + std::to_string(sum) + ", not " + std::to_string(n);
      }
      ATTNFOLD_HOLD(merged_is_right(whole, shards, {seed, isa}, kUnchanged));
    }
  }
  return "";
}

std::string cp_pages_from_global_length(uint64_t seed, const char* isa) {
  const Context x{seed, isa};
  const int32_t q_len = is_fast(x) ? 40 : 5;
  Call whole = zero_call(
      make_spec({8, 1, 256, 256}, DType::bf16, 16, kCausal, {1, q_len}, {1000, 1000 + q_len}));
  fill_noise(whole, seed);
  const int32_t global_pages = static_cast<int32_t>(whole.block_table_stride);
  return merged_is_right(
      whole, {2, 1}, x, [&](Call& call) {  // tables as long as the global length, the rest foreign
        const int64_t old_stride = call.block_table_stride;
        call = with_extra_pages(call, 1, 50.0f);
        const int32_t foreign = static_cast<int32_t>(call.problem.num_pages) - 1;
        std::vector<int32_t> table;
        for (int32_t r = 0; r < call.batch; ++r) {
          for (int32_t i = 0; i < global_pages; ++i) {
            table.push_back(i * 16 < call.kv_len[r] ? call.block_table[r * old_stride + i]
                                                    : foreign);
          }
        }
        call.block_table = table;
        call.block_table_stride = global_pages;
        call.problem.max_kv_len = whole.problem.max_kv_len;
        return std::string();
      });
}

constexpr NamedCase kCases[] = {
    {"cp_global_causal_positions",
     "keys dealt to ranks one by one merge to causal attention at global positions",
     "lightseekorg/tokenspeed#364", cp_global_causal_positions},
    {"cp_interleave_block", "any interleave of keys over ranks merges to the same attention",
     "ROCm/ATOM#2087", cp_interleave_block},
    {"cp_pages_from_global_length",
     "local lengths say what is read, and the caller's arrays stay as they were",
     "vllm-project/vllm#48003", cp_pages_from_global_length},
};

}  // namespace

std::span<const NamedCase> rank_cases() { return kCases; }

}  // namespace attnfold::check::cases
