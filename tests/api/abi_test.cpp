// Sizes, offsets and values that callers were compiled with.  A field may be added at the end of a
// struct; anything else that shows here breaks programs in use.
#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "attnfold/attnfold.h"
#include "attnfold/cache.h"

namespace {

static_assert(sizeof(void*) == 8, "the offsets below are those of LP64");

TEST(Abi, ProblemKeepsItsLayout) {
  EXPECT_EQ(sizeof(attnfold_problem), 128u);
  EXPECT_EQ(offsetof(attnfold_problem, struct_size), 0u);
  EXPECT_EQ(offsetof(attnfold_problem, qo_heads), 8u);
  EXPECT_EQ(offsetof(attnfold_problem, kv_heads), 12u);
  EXPECT_EQ(offsetof(attnfold_problem, head_dim_qk), 16u);
  EXPECT_EQ(offsetof(attnfold_problem, head_dim_vo), 20u);
  EXPECT_EQ(offsetof(attnfold_problem, q_dtype), 24u);
  EXPECT_EQ(offsetof(attnfold_problem, kv_dtype), 28u);
  EXPECT_EQ(offsetof(attnfold_problem, o_dtype), 32u);
  EXPECT_EQ(offsetof(attnfold_problem, kv_storage), 36u);
  EXPECT_EQ(offsetof(attnfold_problem, kv_layout), 40u);
  EXPECT_EQ(offsetof(attnfold_problem, page_size), 44u);
  EXPECT_EQ(offsetof(attnfold_problem, num_pages), 48u);
  EXPECT_EQ(offsetof(attnfold_problem, mask), 56u);
  EXPECT_EQ(offsetof(attnfold_problem, window_left), 60u);
  EXPECT_EQ(offsetof(attnfold_problem, window_right), 64u);
  EXPECT_EQ(offsetof(attnfold_problem, sm_scale), 68u);
  EXPECT_EQ(offsetof(attnfold_problem, max_batch), 72u);
  EXPECT_EQ(offsetof(attnfold_problem, max_qo_rows), 76u);
  EXPECT_EQ(offsetof(attnfold_problem, max_kv_len), 80u);
  EXPECT_EQ(offsetof(attnfold_problem, logits_softcap), 84u);
  EXPECT_EQ(offsetof(attnfold_problem, attention_chunk), 88u);
  EXPECT_EQ(offsetof(attnfold_problem, sink_tokens), 92u);
  EXPECT_EQ(offsetof(attnfold_problem, k_scale_kind), 96u);
  EXPECT_EQ(offsetof(attnfold_problem, v_scale_kind), 100u);
  EXPECT_EQ(offsetof(attnfold_problem, v_in_k), 104u);
  EXPECT_EQ(offsetof(attnfold_problem, sparse_block_size), 108u);
  EXPECT_EQ(offsetof(attnfold_problem, sparse_local_blocks), 112u);
  EXPECT_EQ(offsetof(attnfold_problem, sparse_vertical_stride), 116u);
  EXPECT_EQ(offsetof(attnfold_problem, sparse_head_step), 120u);
}

TEST(Abi, ExecutionKeepsItsLayout) {
  EXPECT_EQ(sizeof(attnfold_execution), 72u);
  EXPECT_EQ(offsetof(attnfold_execution, num_threads), 8u);
  EXPECT_EQ(offsetof(attnfold_execution, num_workers), 12u);
  EXPECT_EQ(offsetof(attnfold_execution, cut_seed), 16u);
  EXPECT_EQ(offsetof(attnfold_execution, isa), 24u);
  EXPECT_EQ(offsetof(attnfold_execution, parallel_for), 32u);
  EXPECT_EQ(offsetof(attnfold_execution, parallel_user), 40u);
  EXPECT_EQ(offsetof(attnfold_execution, prefix_use), 48u);
  EXPECT_EQ(offsetof(attnfold_execution, backend), 52u);
  EXPECT_EQ(offsetof(attnfold_execution, device), 56u);
  EXPECT_EQ(offsetof(attnfold_execution, stream), 64u);
}

TEST(Abi, LengthsKeepTheirLayout) {
  EXPECT_EQ(sizeof(attnfold_lengths), 152u);
  EXPECT_EQ(offsetof(attnfold_lengths, batch), 8u);
  EXPECT_EQ(offsetof(attnfold_lengths, qo_indptr), 16u);
  EXPECT_EQ(offsetof(attnfold_lengths, kv_len), 24u);
  EXPECT_EQ(offsetof(attnfold_lengths, block_table), 32u);
  EXPECT_EQ(offsetof(attnfold_lengths, block_table_stride), 40u);
  EXPECT_EQ(offsetof(attnfold_lengths, kv_indptr), 48u);
  EXPECT_EQ(offsetof(attnfold_lengths, kv_indices), 56u);
  EXPECT_EQ(offsetof(attnfold_lengths, num_kv_rows), 64u);
  EXPECT_EQ(offsetof(attnfold_lengths, num_prefix_groups), 72u);
  EXPECT_EQ(offsetof(attnfold_lengths, prefix_keys), 80u);
  EXPECT_EQ(offsetof(attnfold_lengths, prefix_indptr), 88u);
  EXPECT_EQ(offsetof(attnfold_lengths, prefix_requests), 96u);
  EXPECT_EQ(offsetof(attnfold_lengths, visible_prefix), 104u);
  EXPECT_EQ(offsetof(attnfold_lengths, mask_width), 112u);
  EXPECT_EQ(offsetof(attnfold_lengths, mask_indptr), 120u);
  EXPECT_EQ(offsetof(attnfold_lengths, mask_bits), 128u);
  EXPECT_EQ(offsetof(attnfold_lengths, block_indptr), 136u);
  EXPECT_EQ(offsetof(attnfold_lengths, block_indices), 144u);
}

TEST(Abi, TensorsKeepTheirLayout) {
  EXPECT_EQ(sizeof(attnfold_tensors), 232u);
  EXPECT_EQ(offsetof(attnfold_tensors, q), 8u);
  EXPECT_EQ(offsetof(attnfold_tensors, q_stride_row), 16u);
  EXPECT_EQ(offsetof(attnfold_tensors, k), 32u);
  EXPECT_EQ(offsetof(attnfold_tensors, k_stride_page), 40u);
  EXPECT_EQ(offsetof(attnfold_tensors, v), 64u);
  EXPECT_EQ(offsetof(attnfold_tensors, v_stride_page), 72u);
  EXPECT_EQ(offsetof(attnfold_tensors, o), 96u);
  EXPECT_EQ(offsetof(attnfold_tensors, o_stride_row), 104u);
  EXPECT_EQ(offsetof(attnfold_tensors, lse), 120u);
  EXPECT_EQ(offsetof(attnfold_tensors, lse_stride_head), 136u);
  EXPECT_EQ(offsetof(attnfold_tensors, alibi_slopes), 144u);
  EXPECT_EQ(offsetof(attnfold_tensors, sink_logits), 152u);
  EXPECT_EQ(offsetof(attnfold_tensors, k_scale), 160u);
  EXPECT_EQ(offsetof(attnfold_tensors, k_scale_stride_page), 168u);
  EXPECT_EQ(offsetof(attnfold_tensors, v_scale), 192u);
  EXPECT_EQ(offsetof(attnfold_tensors, v_scale_stride_page), 200u);
  EXPECT_EQ(offsetof(attnfold_tensors, o_scale), 224u);
}

TEST(Abi, OutputStructsKeepTheirLayout) {
  EXPECT_EQ(sizeof(attnfold_plan_report), 120u);
  EXPECT_EQ(offsetof(attnfold_plan_report, num_workers), 8u);
  EXPECT_EQ(offsetof(attnfold_plan_report, max_super_chunks), 32u);
  EXPECT_EQ(offsetof(attnfold_plan_report, num_leaves), 40u);
  EXPECT_EQ(offsetof(attnfold_plan_report, kv_bytes), 80u);
  EXPECT_EQ(offsetof(attnfold_plan_report, schedule_id), 88u);
  EXPECT_EQ(offsetof(attnfold_plan_report, num_prefix_groups), 96u);
  EXPECT_EQ(offsetof(attnfold_plan_report, num_shared_leaves), 104u);
  EXPECT_EQ(offsetof(attnfold_plan_report, saved_kv_bytes), 112u);
  EXPECT_EQ(sizeof(attnfold_plan_item), 72u);
  EXPECT_EQ(offsetof(attnfold_plan_item, worker), 8u);
  EXPECT_EQ(offsetof(attnfold_plan_item, leaf_end), 40u);
  EXPECT_EQ(offsetof(attnfold_plan_item, sink_leaf_begin), 44u);
  EXPECT_EQ(offsetof(attnfold_plan_item, sink_leaf_end), 48u);
  EXPECT_EQ(offsetof(attnfold_plan_item, num_requests), 52u);
  EXPECT_EQ(offsetof(attnfold_plan_item, requests), 56u);
  EXPECT_EQ(offsetof(attnfold_plan_item, num_leaves), 64u);
  EXPECT_EQ(sizeof(attnfold_kernel_info), 64u);
  EXPECT_EQ(offsetof(attnfold_kernel_info, name), 8u);
  EXPECT_EQ(offsetof(attnfold_kernel_info, why_not), 56u);
}

TEST(Abi, StateKeepsItsLayout) {
  EXPECT_EQ(sizeof(attnfold_state), 112u);
  EXPECT_EQ(offsetof(attnfold_state, o), 8u);
  EXPECT_EQ(offsetof(attnfold_state, o_dtype), 16u);
  EXPECT_EQ(offsetof(attnfold_state, o_stride_row), 24u);
  EXPECT_EQ(offsetof(attnfold_state, lse), 40u);
  EXPECT_EQ(offsetof(attnfold_state, lse_layout), 48u);
  EXPECT_EQ(offsetof(attnfold_state, lse_stride_row), 56u);
  EXPECT_EQ(offsetof(attnfold_state, log_base), 72u);
  EXPECT_EQ(offsetof(attnfold_state, empty), 76u);
  EXPECT_EQ(offsetof(attnfold_state, empty_value), 80u);
  EXPECT_EQ(offsetof(attnfold_state, sink_included), 84u);
  EXPECT_EQ(offsetof(attnfold_state, normalised), 88u);
  EXPECT_EQ(offsetof(attnfold_state, l), 96u);
  EXPECT_EQ(offsetof(attnfold_state, num_rows), 104u);
}

TEST(Abi, CacheStructsKeepTheirLayout) {
  EXPECT_EQ(offsetof(attnfold_kv_pool, k), 8u);
  EXPECT_EQ(offsetof(attnfold_kv_pool, k_stride_page), 16u);
  EXPECT_EQ(offsetof(attnfold_kv_pool, v), 40u);
  EXPECT_EQ(offsetof(attnfold_kv_pool, v_stride_page), 48u);
  EXPECT_EQ(offsetof(attnfold_kv_pool, kv_dtype), 72u);
  EXPECT_EQ(offsetof(attnfold_kv_pool, kv_layout), 76u);
  EXPECT_EQ(offsetof(attnfold_kv_pool, kv_heads), 80u);
  EXPECT_EQ(offsetof(attnfold_kv_pool, head_dim_qk), 84u);
  EXPECT_EQ(offsetof(attnfold_kv_pool, head_dim_vo), 88u);
  EXPECT_EQ(offsetof(attnfold_kv_pool, page_size), 92u);
  EXPECT_EQ(offsetof(attnfold_kv_pool, num_pages), 96u);
  EXPECT_EQ(offsetof(attnfold_kv_pool, k_scale_kind), 104u);
  EXPECT_EQ(offsetof(attnfold_kv_pool, v_scale_kind), 108u);
  EXPECT_EQ(offsetof(attnfold_kv_pool, k_scale), 112u);
  EXPECT_EQ(offsetof(attnfold_kv_pool, k_scale_stride_page), 120u);
  EXPECT_EQ(offsetof(attnfold_kv_pool, v_scale), 144u);
  EXPECT_EQ(offsetof(attnfold_kv_pool, v_scale_stride_page), 152u);
  EXPECT_EQ(offsetof(attnfold_kv_rows, num_tokens), 8u);
  EXPECT_EQ(offsetof(attnfold_kv_rows, k), 16u);
  EXPECT_EQ(offsetof(attnfold_kv_rows, v), 40u);
  EXPECT_EQ(offsetof(attnfold_kv_rows, dtype), 64u);
  EXPECT_EQ(offsetof(attnfold_kv_rows, slots), 72u);
}

TEST(Abi, EnumeratorsKeepTheirValues) {
  EXPECT_EQ(ATTNFOLD_NO_SLOT, -1);
  EXPECT_EQ(ATTNFOLD_NO_PAGE, -1);
  EXPECT_EQ(ATTNFOLD_F32, 0);
  EXPECT_EQ(ATTNFOLD_F16, 1);
  EXPECT_EQ(ATTNFOLD_BF16, 2);
  EXPECT_EQ(ATTNFOLD_E4M3, 3);
  EXPECT_EQ(ATTNFOLD_E5M2, 4);
  EXPECT_EQ(ATTNFOLD_I8, 5);
  EXPECT_EQ(ATTNFOLD_SCALE_NONE, 0);
  EXPECT_EQ(ATTNFOLD_SCALE_PER_TENSOR, 1);
  EXPECT_EQ(ATTNFOLD_SCALE_PER_HEAD, 2);
  EXPECT_EQ(ATTNFOLD_SCALE_PER_TOKEN, 3);
  EXPECT_EQ(ATTNFOLD_KV_PAGED, 0);
  EXPECT_EQ(ATTNFOLD_KV_RAGGED, 1);
  EXPECT_EQ(ATTNFOLD_NHD, 0);
  EXPECT_EQ(ATTNFOLD_HND, 1);
  EXPECT_EQ(ATTNFOLD_MASK_NONE, 0);
  EXPECT_EQ(ATTNFOLD_MASK_CAUSAL, 1);
  EXPECT_EQ(ATTNFOLD_PREFIX_AUTO, 0);
  EXPECT_EQ(ATTNFOLD_PREFIX_OFF, 1);
  EXPECT_EQ(ATTNFOLD_PREFIX_ALWAYS, 2);
  EXPECT_EQ(ATTNFOLD_LOG_E, 0);
  EXPECT_EQ(ATTNFOLD_LOG_2, 1);
  EXPECT_EQ(ATTNFOLD_ROWS_HEADS, 0);
  EXPECT_EQ(ATTNFOLD_HEADS_ROWS, 1);
  EXPECT_EQ(ATTNFOLD_EMPTY_INF, 0);
  EXPECT_EQ(ATTNFOLD_EMPTY_NAN, 1);
  EXPECT_EQ(ATTNFOLD_EMPTY_FINITE, 2);
}

TEST(Abi, EveryStatusHasItsNameAndValue) {
  const std::pair<int, const char*> known[] = {
      {0, "OK"},           {1, "INVALID_ARGUMENT"}, {2, "UNSUPPORTED"}, {3, "OUT_OF_WORKSPACE"},
      {4, "DEVICE_ERROR"}, {5, "INTERNAL"},
  };
  for (const auto& [value, name] : known) {
    EXPECT_STREQ(attnfold_status_name(static_cast<attnfold_status>(value)), name);
  }
  EXPECT_NE(attnfold_status_name(static_cast<attnfold_status>(6)), nullptr);
}

TEST(Abi, TheLibraryHasTheHeadersVersion) {
  EXPECT_EQ(attnfold_version(),
            ATTNFOLD_VERSION_MAJOR * 10000 + ATTNFOLD_VERSION_MINOR * 100 + ATTNFOLD_VERSION_PATCH);
}

TEST(Abi, InitialisersSetTheSizeAndTheDocumentedDefaults) {
  const attnfold_problem problem = ATTNFOLD_PROBLEM_INIT;
  EXPECT_EQ(problem.struct_size, sizeof(problem));
  EXPECT_EQ(problem.mask, ATTNFOLD_MASK_CAUSAL);
  EXPECT_EQ(problem.window_left, -1);
  EXPECT_EQ(problem.window_right, -1);
  EXPECT_EQ(problem.sm_scale, ATTNFOLD_SM_SCALE_DEFAULT);
  EXPECT_EQ(problem.page_size, 16);
  EXPECT_EQ(problem.logits_softcap, 0.0f);
  EXPECT_EQ(problem.attention_chunk, 0);
  EXPECT_EQ(problem.sink_tokens, 0);
  const attnfold_execution execution = ATTNFOLD_EXECUTION_INIT;
  EXPECT_EQ(execution.struct_size, sizeof(execution));
  EXPECT_EQ(execution.isa, nullptr);
  EXPECT_EQ(execution.prefix_use, ATTNFOLD_PREFIX_AUTO);
  const attnfold_lengths lengths = ATTNFOLD_LENGTHS_INIT;
  EXPECT_EQ(lengths.struct_size, sizeof(lengths));
  EXPECT_EQ(lengths.num_prefix_groups, 0);
  const attnfold_tensors tensors = ATTNFOLD_TENSORS_INIT;
  EXPECT_EQ(tensors.struct_size, sizeof(tensors));
  EXPECT_EQ(tensors.lse_stride_head, 0);
  EXPECT_EQ(tensors.alibi_slopes, nullptr);
  EXPECT_EQ(tensors.sink_logits, nullptr);
  const attnfold_kv_pool pool = ATTNFOLD_KV_POOL_INIT;
  EXPECT_EQ(pool.struct_size, sizeof(pool));
  EXPECT_EQ(pool.page_size, 16);
  EXPECT_EQ(pool.num_pages, 0);
  const attnfold_kv_rows rows = ATTNFOLD_KV_ROWS_INIT;
  EXPECT_EQ(rows.struct_size, sizeof(rows));
  EXPECT_EQ(rows.slots, nullptr);
  const attnfold_state state = ATTNFOLD_STATE_INIT;
  EXPECT_EQ(state.struct_size, sizeof(state));
  EXPECT_EQ(state.normalised, 1);
  EXPECT_EQ(state.l, nullptr);
  EXPECT_EQ(state.num_rows, -1);
}

}  // namespace
