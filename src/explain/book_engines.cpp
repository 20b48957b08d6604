// SGLang's splits, PagedAttention's and ROCm's partitions.
#include "explain/book.h"
#include "explain/heuristics.h"

namespace attnfold::explain {
namespace {

double real(int64_t x) { return static_cast<double>(x); }

int64_t token_grid(const Inputs& in) {
  return sglang::token_grid(in["B"], in["h"], in["h_kv"], in["BLOCK_H"]);
}
/** Of a batch whose requests are all of length s. */
sglang::Chunks equal_chunks(const Inputs& in, int64_t grid) {
  return sglang::chunks({in["s"]}, in["N_SM"], grid, in["max_splits"]);
}
int64_t equal_splits(const Inputs& in, int64_t grid) {
  return sglang::splits(in["s"], equal_chunks(in, grid));
}

BookSection sglang_splits() {
  return {
      "SGLang: splits",
      "SGLang get_num_kv_splits_triton and decode_attention.py",
      {
          {"floor(N_SM*max(log2(s/64),1))",
           "cores",
           [](const Inputs& in) { return real(sglang::extended_sms(in["N_SM"], in["s"])); },
           {{"sglang_ext_cores_s64", "N_SM=132;s=64", Mark::derived, ""},
            {"sglang_ext_cores_s128", "N_SM=132;s=128", Mark::derived, ""},
            {"sglang_ext_cores_s2560", "N_SM=132;s=2560", Mark::agrees, ""},
            {"sglang_ext_cores_s8192", "N_SM=132;s=8192", Mark::derived, ""},
            {"sglang_ext_cores_s32768", "N_SM=132;s=32768", Mark::derived, ""},
            {"sglang_ext_cores_s131072", "N_SM=132;s=131072", Mark::derived, ""}}},
          {"min(BLOCK_H,h/h_kv)",
           "heads",
           [](const Inputs& in) {
             return real(sglang::block_h(in["h"], in["h_kv"], in["BLOCK_H"]));
           },
           {{"sglang_block_h_llama3_8b", "h=32;h_kv=8;BLOCK_H=16", Mark::agrees, ""}}},
          {"ceil(h/min(BLOCK_H,h/h_kv))",
           "blocks",
           [](const Inputs& in) {
             return real(sglang::head_tiles(in["h"], in["h_kv"], in["BLOCK_H"]));
           },
           {{"sglang_head_tiles_llama3_8b", "h=32;h_kv=8;BLOCK_H=16", Mark::agrees, ""}}},
          {"ceil(g/BLOCK_H)",
           "blocks",
           [](const Inputs& in) { return real(sglang::head_tiles(in["g"], 1, in["BLOCK_H"])); },
           {{"sglang_group_blocks_mla", "g=128;BLOCK_H=16", Mark::agrees, ""}}},
          {"(B*ceil(h/min(BLOCK_H,h/h_kv)))",
           "blocks",
           [](const Inputs& in) { return real(token_grid(in)); },
           {{"sglang_token_grid_llama3_8b_b1", "B=1;h=32;h_kv=8;BLOCK_H=16", Mark::agrees, ""},
            {"sglang_token_grid_llama3_8b_b4", "B=4;h=32;h_kv=8;BLOCK_H=16", Mark::errs,
             "printed as equal to vLLM's grid, which is 40"},
            {"sglang_token_grid_llama3_8b_b16", "B=16;h=32;h_kv=8;BLOCK_H=16", Mark::errs,
             "printed as equal to vLLM's grid, which is 160"}}},
          {"ceil(s/ceil(s/min(ceil(floor(N_SM*max(log2(s/64),1))/(B*ceil(h/min(BLOCK_H,h/"
           "h_kv)))),max_splits)))",
           "splits",
           [](const Inputs& in) { return real(equal_splits(in, token_grid(in))); },
           {{"sglang_splits_llama3_8b_s2560_b1",
             "B=1;s=2560;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_8b_s2560_b4",
             "B=4;s=2560;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_8b_s2560_b8",
             "B=8;s=2560;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_8b_s2560_b16",
             "B=16;s=2560;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_8b_s2560_b32",
             "B=32;s=2560;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_8b_s2560_b64",
             "B=64;s=2560;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_8b_s2560_b87",
             "B=87;s=2560;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_8b_s2560_b88",
             "B=88;s=2560;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_8b_s2560_b128",
             "B=128;s=2560;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_8b_s2560_b256",
             "B=256;s=2560;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_8b_s128_b1",
             "B=1;s=128;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_8b_s128_b32",
             "B=32;s=128;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_8b_s32768_b1",
             "B=1;s=32768;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_8b_s32768_b32",
             "B=32;s=32768;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_8b_s32768_b64",
             "B=64;s=32768;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_8b_s131072_b64",
             "B=64;s=131072;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_70b_tp8_s2560_b1",
             "B=1;s=2560;h=8;h_kv=1;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_70b_tp8_s2560_b64",
             "B=64;s=2560;h=8;h_kv=1;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_70b_tp8_s2560_b128",
             "B=128;s=2560;h=8;h_kv=1;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_70b_tp8_s2560_b256",
             "B=256;s=2560;h=8;h_kv=1;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""},
            {"sglang_splits_llama3_8b_s2560_b1_max16",
             "B=1;s=2560;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=16", Mark::derived, ""}}},
          {"ceil(s/ceil(s/min(ceil(floor(N_SM*max(log2(s/64),1))/(B*h)),max_splits)))",
           "splits",
           [](const Inputs& in) {
             return real(
                 equal_splits(in, sglang::token_grid(in["B"], in["h"], in["h"], sglang::kBlockH)));
           },
           {{"sglang_splits_mha_s2560_b1", "B=1;s=2560;h=32;N_SM=132;max_splits=8", Mark::derived,
             ""},
            {"sglang_splits_mha_s2560_b8", "B=8;s=2560;h=32;N_SM=132;max_splits=8", Mark::derived,
             ""}}},
          {"ceil(s/min(ceil(floor(N_SM*max(log2(s/64),1))/(B*ceil(h/min(BLOCK_H,h/"
           "h_kv)))),max_splits))",
           "keys",
           [](const Inputs& in) { return real(equal_chunks(in, token_grid(in)).by_sms); },
           {{"sglang_chunk_llama3_8b_s2560_b16",
             "B=16;s=2560;h=32;h_kv=8;BLOCK_H=16;N_SM=132;max_splits=8", Mark::derived, ""}}},
          {"(B*ceil(h/min(BLOCK_H,h/h_kv)))*max_splits",
           "blocks",
           [](const Inputs& in) { return real(token_grid(in) * in["max_splits"]); },
           {{"sglang_stage1_blocks_llama3_8b_s2560_b1", "B=1;h=32;h_kv=8;BLOCK_H=16;max_splits=8",
             Mark::derived, ""},
            {"sglang_stage1_blocks_llama3_8b_s2560_b16", "B=16;h=32;h_kv=8;BLOCK_H=16;max_splits=8",
             Mark::derived, ""}}},
          {"ceil(s/tile)",
           "splits",
           [](const Inputs& in) { return real(ceil_div(in["s"], in["tile"])); },
           {{"sglang_deterministic_decode_splits_s2560", "s=2560;tile=2048", Mark::derived, ""},
            {"sglang_deterministic_prefill_splits_s8192", "s=8192;tile=4096", Mark::derived, ""}}},
      }};
}

BookSection pagedattention_and_rocm() {
  return {"PagedAttention and ROCm",
          "vLLM paged_attention_v2.cu (until July 2026) and csrc/rocm/attention.cu",
          {
              {"kernels+v1+v2",
               "lines",
               [](const Inputs& in) { return real(in["kernels"] + in["v1"] + in["v2"]); },
               {{"pa_deleted_lines", "kernels=667;v1=190;v2=202", Mark::agrees, ""}}},
              {"h*B",
               "blocks",
               [](const Inputs& in) { return real(in["h"] * in["B"]); },
               {{"pa_v1_grid_b1", "h=32;B=1", Mark::derived, ""},
                {"pa_v2_reduce_grid_b1", "h=32;B=1", Mark::derived, ""}}},
              {"ceil(s/partition)",
               "partitions",
               [](const Inputs& in) { return real(paged::partitions(in["s"], in["partition"])); },
               {{"pa_v2_partitions_s2560", "s=2560;partition=512", Mark::derived, ""},
                {"rocm_partitions_s2560", "s=2560;partition=256", Mark::derived, ""}}},
              {"h*B*ceil(s/partition)",
               "blocks",
               [](const Inputs& in) {
                 return real(in["h"] * in["B"] * paged::partitions(in["s"], in["partition"]));
               },
               {{"pa_v2_grid_s2560_b1", "h=32;B=1;s=2560;partition=512", Mark::derived, ""}}},
              {"B*ceil(s/partition)*h_kv",
               "blocks",
               [](const Inputs& in) {
                 return real(in["B"] * paged::partitions(in["s"], in["partition"]) * in["h_kv"]);
               },
               {{"rocm_grid_s2560_b1", "B=1;s=2560;partition=256;h_kv=8", Mark::derived, ""}}},
          }};
}

}  // namespace

std::vector<BookSection> engine_sections() { return {sglang_splits(), pagedattention_and_rocm()}; }

}  // namespace attnfold::explain
