// Bytes of a decode: partial states, keys and values, page tables.
#include "explain/book.h"
#include "explain/heuristics.h"

namespace attnfold::explain {
namespace {

double real(int64_t x) { return static_cast<double>(x); }
/** In units of `unit`. */
double per(double unit, int64_t x) { return static_cast<double>(x) / unit; }

int64_t decode_kv(const Inputs& in) {
  return kv_bytes(in["h_kv"], in["s"], in["d"], in["d"], in["b"]);
}
/** Of `requests` decodes, written or read once. */
int64_t states(const Inputs& in, int64_t requests) {
  return requests * in["h"] * in["segments"] * state_bytes(in["d"]);
}
int64_t grid_3d(const Inputs& in) {
  const int64_t block_q = vllm::block_q(in["BLOCK_M"], group_size(in["h"], in["h_kv"]));
  return vllm::grid_2d(in["B"], in["B"], in["h_kv"], block_q) * in["segments"];
}
int64_t active(const Inputs& in) {
  return vllm::active_segments(in["s"], in["TILE"], in["segments"]);
}

BookSection partial_states() {
  return {
      "Partial states",
      "Dao, Haziza, Massa, Sizov 2023, Flash-Decoding; vLLM triton_unified_attention.py",
      {
          {"(d+2)*4",
           "B",
           [](const Inputs& in) { return real(state_bytes(in["d"])); },
           {{"partial_bytes_per_segment", "d=128", Mark::derived, ""}}},
          {"segments*(d+2)*4",
           "B",
           [](const Inputs& in) { return real(in["segments"] * state_bytes(in["d"])); },
           {{"partial_bytes_per_row", "segments=16;d=128", Mark::agrees, ""}}},
          {"B*h*segments*(d+2)*4",
           "B",
           [](const Inputs& in) { return real(states(in, in["B"])); },
           {{"partial_bytes_read_b1", "B=1;h=32;segments=16;d=128", Mark::rounds,
             "printed as 266 KB"}}},
          {"2*B*h*segments*(d+2)*4",
           "B",
           [](const Inputs& in) { return real(2 * states(in, in["B"])); },
           {{"partial_bytes_round_trip_b1", "B=1;h=32;segments=16;d=128", Mark::rounds,
             "printed as 532 KB"},
            {"partial_bytes_round_trip_llama3_70b_tp8_b1", "B=1;h=8;segments=16;d=128",
             Mark::derived, ""}}},
          {"2*layers*B*h*segments*(d+2)*4/10**6",
           "MB",
           [](const Inputs& in) { return per(1e6, in["layers"] * 2 * states(in, in["B"])); },
           {{"partial_mb_round_trip_all_layers", "B=1;h=32;segments=16;d=128;layers=32",
             Mark::rounds, "printed as 17"}}},
          {"threshold*h*segments*d*4",
           "B",
           [](const Inputs& in) {
             return real(in["threshold"] * in["h"] * in["segments"] * in["d"] * kFloatBytes);
           },
           {{"scratch_bytes_output", "threshold=16;h=32;segments=16;d=128", Mark::derived, ""}}},
          {"threshold*h*segments*(d+2)*4",
           "B",
           [](const Inputs& in) { return real(states(in, in["threshold"])); },
           {{"scratch_bytes_total", "threshold=16;h=32;segments=16;d=128", Mark::derived, ""}}},
          {"100*2*h*segments*(d+2)*4/(2*h_kv*d*s*b)",
           "%",
           [](const Inputs& in) { return percent(2 * states(in, 1), decode_kv(in)); },
           {{"partial_over_kv_s128", "h=32;h_kv=8;d=128;s=128;b=2;segments=16", Mark::derived, ""},
            {"partial_over_kv_s512", "h=32;h_kv=8;d=128;s=512;b=2;segments=16", Mark::rounds,
             "printed as 25 %"},
            {"partial_over_kv_s2560", "h=32;h_kv=8;d=128;s=2560;b=2;segments=16", Mark::derived,
             ""},
            {"partial_over_kv_s32768", "h=32;h_kv=8;d=128;s=32768;b=2;segments=16", Mark::derived,
             ""}}},
          {"2*h*ceil(s/(TILE*ceil(s/(TILE*segments))))*(d+2)*4",
           "B",
           [](const Inputs& in) { return real(2 * in["h"] * active(in) * state_bytes(in["d"])); },
           {{"partial_bytes_useful_s128", "h=32;d=128;s=128;TILE=16;segments=16", Mark::rounds,
             "printed as 266 KB"}}},
          {"100*2*h*ceil(s/(TILE*ceil(s/(TILE*segments))))*(d+2)*4/(2*h_kv*d*s*b)",
           "%",
           [](const Inputs& in) {
             return percent(2 * in["h"] * active(in) * state_bytes(in["d"]), decode_kv(in));
           },
           {{"partial_useful_over_kv_s128", "h=32;h_kv=8;d=128;b=2;s=128;TILE=16;segments=16",
             Mark::derived, ""}}},
          {"4*h*d*s/(2*h_kv*d*s*b+2*h*segments*(d+2)*4)",
           "FLOP/B",
           [](const Inputs& in) {
             return intensity(attention_flop(in["h"], in["s"], in["d"], in["d"]),
                              decode_kv(in) + 2 * states(in, 1));
           },
           {{"decode_intensity_with_partials_s2560", "h=32;h_kv=8;d=128;s=2560;b=2;segments=16",
             Mark::derived, ""}}},
          {"tokens*h",
           "blocks",
           [](const Inputs& in) { return real(in["tokens"] * in["h"]); },
           {{"reduce_grid_b1", "tokens=1;h=32", Mark::agrees, ""}}},
          {"100*tokens*h/N_SM",
           "%",
           [](const Inputs& in) { return percent(in["tokens"] * in["h"], in["N_SM"]); },
           {{"reduce_sm_share_b1", "tokens=1;h=32;N_SM=132", Mark::derived, ""}}},
          {"10**6*B*h*segments*(d+2)*4/bw",
           "us",
           [](const Inputs& in) { return 1e6 * move_seconds(states(in, in["B"]), in.real("bw")); },
           {{"reduce_time_b1", "B=1;h=32;segments=16;d=128;bw=3.35e12", Mark::agrees, ""}}},
          {"(floor(B/floor(BLOCK_M/(h/h_kv)))+B)*h_kv*segments+tokens*h",
           "blocks",
           [](const Inputs& in) { return real(grid_3d(in) + in["tokens"] * in["h"]); },
           {{"blocks_both_launches_b1", "B=1;h=32;h_kv=8;BLOCK_M=16;segments=16;tokens=1",
             Mark::agrees, ""}}},
          {"2*layers",
           "launches",
           [](const Inputs& in) { return real(2 * in["layers"]); },
           {{"launches_all_layers", "layers=32", Mark::derived, ""}}},
          {"(2*h_kv*d*s*b+2*h*segments*(d+2)*4)/10**6",
           "MB",
           [](const Inputs& in) { return per(1e6, decode_kv(in) + 2 * states(in, 1)); },
           {{"traffic_mb_layer_b1", "h=32;h_kv=8;d=128;s=2560;b=2;segments=16", Mark::derived,
             ""}}},
          {"10**6*layers*(2*h_kv*d*s*b+2*h*segments*(d+2)*4)/bw",
           "us",
           [](const Inputs& in) {
             return 1e6 *
                    move_seconds(in["layers"] * (decode_kv(in) + 2 * states(in, 1)), in.real("bw"));
           },
           {{"traffic_time_all_layers_s2560",
             "h=32;h_kv=8;d=128;s=2560;b=2;segments=16;layers=32;bw=3.35e12", Mark::derived, ""}}},
      }};
}

BookSection keys_and_values_of_a_decode() {
  return {
      "Keys and values of a decode",
      "Ainslie et al. 2023, arXiv:2305.13245; vLLM triton_unified_attention.py",
      {
          {"2*h/(b*h_kv)",
           "FLOP/B",
           [](const Inputs& in) { return decode_intensity(in["h"], in["h_kv"], in["b"]); },
           {{"decode_intensity", "h=32;h_kv=8;b=2", Mark::agrees, ""},
            {"decode_intensity_llama3_8b", "h=32;h_kv=8;b=2", Mark::agrees, ""},
            {"decode_intensity_llama3_70b_tp8", "h=8;h_kv=1;b=2", Mark::derived, ""},
            {"decode_intensity_mha", "h=32;h_kv=32;b=2", Mark::agrees, ""}}},
          {"2*h_kv*d*s*b",
           "B",
           [](const Inputs& in) { return real(decode_kv(in)); },
           {{"kv_bytes_layer_s128", "h_kv=8;d=128;s=128;b=2", Mark::rounds, "printed as 524 KB"},
            {"kv_bytes_layer_s512", "h_kv=8;d=128;s=512;b=2", Mark::rounds, "printed as 2.1 MB"},
            {"kv_bytes_layer_s2560", "h_kv=8;d=128;s=2560;b=2", Mark::rounds, "printed as 10.5 MB"},
            {"kv_bytes_layer_s8192", "h_kv=8;d=128;s=8192;b=2", Mark::derived, ""},
            {"kv_bytes_layer_s32768", "h_kv=8;d=128;s=32768;b=2", Mark::derived, ""},
            {"kv_bytes_layer_s131072", "h_kv=8;d=128;s=131072;b=2", Mark::derived, ""},
            {"kv_bytes_layer_llama3_70b_tp8_s2560", "h_kv=1;d=128;s=2560;b=2", Mark::derived, ""}}},
          {"2*h_kv*d*b*layers",
           "B",
           [](const Inputs& in) {
             return real(in["layers"] * kv_bytes(in["h_kv"], 1, in["d"], in["d"], in["b"]));
           },
           {{"kv_bytes_per_token_all_layers", "h_kv=8;d=128;b=2;layers=32", Mark::derived, ""}}},
          {"2*h_kv*d*s*b*layers/10**6",
           "MB",
           [](const Inputs& in) { return per(1e6, in["layers"] * decode_kv(in)); },
           {{"kv_mb_all_layers_s2560", "h_kv=8;d=128;s=2560;b=2;layers=32", Mark::errs,
             "printed as 336 and as 335; only 336 is a rounding"}}},
          {"2*TILE*d*b",
           "B",
           [](const Inputs& in) {
             return real(kv_bytes(1, in["TILE"], in["d"], in["d"], in["b"]));
           },
           {{"kv_tile_bytes", "TILE=16;d=128;b=2", Mark::agrees, ""}}},
          {"TILE*d*b",
           "B",
           [](const Inputs& in) { return real(tensor_bytes(1, in["TILE"], in["d"], in["b"])); },
           {{"k_tile_run_bytes", "TILE=16;d=128;b=2", Mark::agrees, ""}}},
          {"2*(2*live*TILE*d)",
           "FLOP",
           [](const Inputs& in) {
             return real(attention_flop(1, in["live"] * in["TILE"], in["d"], in["d"]));
           },
           {{"tile_flop", "live=4;TILE=16;d=128", Mark::agrees, ""}}},
          {"2*(2*live*TILE*d)/(2*TILE*d*b)",
           "FLOP/B",
           [](const Inputs& in) {
             return intensity(attention_flop(1, in["live"] * in["TILE"], in["d"], in["d"]),
                              kv_bytes(1, in["TILE"], in["d"], in["d"], in["b"]));
           },
           {{"tile_intensity", "live=4;TILE=16;d=128;b=2", Mark::derived, ""}}},
          {"ridge/(2*h/(b*h_kv))",
           "ratio",
           [](const Inputs& in) {
             return in.real("ridge") / decode_intensity(in["h"], in["h_kv"], in["b"]);
           },
           {{"decode_below_ridge", "h=32;h_kv=8;b=2;ridge=295", Mark::rounds, "printed as 74"}}},
          {"4*h*d*s",
           "FLOP",
           [](const Inputs& in) {
             return real(attention_flop(in["h"], in["s"], in["d"], in["d"]));
           },
           {{"decode_flop_layer_s2560", "h=32;d=128;s=2560", Mark::derived, ""}}},
          {"BLOCK_M-g",
           "rows",
           [](const Inputs& in) { return real(in["BLOCK_M"] - in["g"]); },
           {{"rows_masked_llama3_8b", "BLOCK_M=16;g=4", Mark::agrees, ""},
            {"rows_masked_llama3_70b_tp8", "BLOCK_M=16;g=8", Mark::derived, ""}}},
          {"100*(BLOCK_M-g)/BLOCK_M",
           "%",
           [](const Inputs& in) { return percent(in["BLOCK_M"] - in["g"], in["BLOCK_M"]); },
           {{"tile_waste_llama3_8b", "BLOCK_M=16;g=4", Mark::agrees, ""},
            {"tile_waste_llama3_70b_tp8", "BLOCK_M=16;g=8", Mark::derived, ""}}},
          {"10**6*2*h_kv*d*s*b/bw",
           "us",
           [](const Inputs& in) { return 1e6 * move_seconds(decode_kv(in), in.real("bw")); },
           {{"kv_time_layer_s2560", "h_kv=8;d=128;s=2560;b=2;bw=3.35e12", Mark::derived, ""}}},
          {"10**6*layers*2*h_kv*d*s*b/bw",
           "us",
           [](const Inputs& in) {
             return 1e6 * move_seconds(in["layers"] * decode_kv(in), in.real("bw"));
           },
           {{"kv_time_all_layers_s2560", "h_kv=8;d=128;s=2560;b=2;layers=32;bw=3.35e12",
             Mark::derived, ""}}},
          {"2*d*b",
           "B",
           [](const Inputs& in) { return real(kv_bytes(1, 1, in["d"], in["d"], in["b"])); },
           {{"kv_bytes_per_key_and_head", "d=128;b=2", Mark::agrees, ""}}},
      }};
}

BookSection page_tables() {
  return {
      "Page tables",
      "Kwon et al. 2023, arXiv:2309.06180; vLLM block_table.py",
      {
          {"ceil(s/page)",
           "entries",
           [](const Inputs& in) { return real(table_entries(in["s"], in["page"])); },
           {{"block_table_entries_s2560", "s=2560;page=16", Mark::agrees, ""}}},
          {"4*ceil(s/page)",
           "B",
           [](const Inputs& in) { return real(table_bytes(in["s"], in["page"])); },
           {{"block_table_bytes_s2560", "s=2560;page=16", Mark::agrees, ""}}},
          {"100*4/(page*2*d*b)",
           "%",
           [](const Inputs& in) {
             return percent(table_bytes(1, 1), kv_bytes(1, in["page"], in["d"], in["d"], in["b"]));
           },
           {{"block_table_share_page16", "page=16;d=128;b=2", Mark::errs,
             "printed as 0.78 %, which is the share with pages of one token"},
            {"block_table_share_page1", "page=1;d=128;b=2", Mark::rounds, "printed as 0.78 %"}}},
          {"ceil(TILE/page)",
           "pages",
           [](const Inputs& in) { return real(table_entries(in["TILE"], in["page"])); },
           {{"pages_per_tile_16_16", "TILE=16;page=16", Mark::agrees, ""}}},
          {"block/kernel_block",
           "ratio",
           [](const Inputs& in) { return ratio(in["block"], in["kernel_block"]); },
           {{"kernel_blocks_per_block_128_16", "block=128;kernel_block=16", Mark::agrees, ""},
            {"kernel_blocks_per_block_32_16", "block=32;kernel_block=16", Mark::agrees, ""}}},
          {"ids*block/kernel_block",
           "entries",
           [](const Inputs& in) {
             return real(table_entries(in["ids"] * in["block"], in["kernel_block"]));
           },
           {{"kernel_block_ids_example", "ids=3;block=32;kernel_block=16", Mark::agrees, ""}}},
          {"last_id*(block/kernel_block)+block/kernel_block-1",
           "id",
           [](const Inputs& in) {
             return real(table_entries((in["last_id"] + 1) * in["block"], in["kernel_block"]) - 1);
           },
           {{"kernel_block_last_id_example", "last_id=2;block=32;kernel_block=16", Mark::agrees,
             ""}}},
          {"4*ceil(s/block)",
           "B",
           [](const Inputs& in) { return real(table_bytes(in["s"], in["block"])); },
           {{"allocator_table_bytes_s2560_block128", "s=2560;block=128", Mark::derived, ""}}},
      }};
}

}  // namespace

std::vector<BookSection> decode_sections() {
  return {partial_states(), keys_and_values_of_a_decode(), page_tables()};
}

}  // namespace attnfold::explain
