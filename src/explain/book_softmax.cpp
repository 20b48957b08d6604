// Textbook attention, the range of exponentials, the online state and its merge.
#include "explain/book.h"
#include "explain/quantities.h"

namespace attnfold::explain {
namespace {

double real(int64_t x) { return static_cast<double>(x); }
/** In units of `unit`. */
double per(double unit, int64_t x) { return static_cast<double>(x) / unit; }

constexpr double kGib = 1.0 / (int64_t{1} << 30);

/** The three kernels of a layer, and of one head that shares nothing. */
Materialised layer(const Inputs& in) {
  return materialised(in["h"], in["h_kv"], in["T"], in["T"], in["d"], in["d"], in["b"]);
}
Materialised head(const Inputs& in) {
  return materialised(1, 1, in["T"], in["T"], in["d"], in["d"], in["b"]);
}
int64_t layer_compulsory(const Inputs& in) {
  return compulsory_bytes(in["h"], in["h_kv"], in["T"], in["T"], in["d"], in["d"], in["b"]);
}
int64_t layer_flop(const Inputs& in) {
  return attention_flop(in["h"], in["T"] * in["T"], in["d"], in["d"]);
}
double head_intensity(const Inputs& in) {
  return intensity(attention_flop(1, in["T"] * in["T"], in["d"], in["d"]), head(in).total());
}
/** Of FLOPs and bytes per head width, which cancels. */
double compulsory_intensity(const Inputs& in) {
  return intensity(attention_flop(in["h"], in["T"] * in["T"], 1, 1),
                   compulsory_bytes(in["h"], in["h_kv"], in["T"], in["T"], 1, 1, in["b"]));
}
/** Of a pair of one head, when q, k, v and o no longer count. */
double three_kernel_limit(const Inputs& in) {
  return intensity(attention_flop(1, 1, in["d"], in["d"]),
                   materialised(1, 1, 1, 1, in["d"], in["d"], in["b"]).intermediate);
}
int64_t shared_memory(const Inputs& in) { return in["smem_kib"] * 1024; }
double format_max(const Inputs& in) {
  return largest_float(static_cast<int>(in["mantissa"]), static_cast<int>(in["max_exponent"]));
}

BookSection attention_in_three_kernels() {
  return {
      "Attention in three kernels",
      "Vaswani et al. 2017, arXiv:1706.03762; Rabe and Staats 2021, arXiv:2112.05682",
      {
          {"h/h_kv",
           "heads",
           [](const Inputs& in) { return real(group_size(in["h"], in["h_kv"])); },
           {{"group_size", "h=32;h_kv=8", Mark::agrees, ""},
            {"rocm_gqa_ratio", "h=32;h_kv=8", Mark::derived, ""}}},
          {"1/sqrt(d)",
           "1",
           [](const Inputs& in) { return softmax_scale(in["d"]); },
           {{"sm_scale", "d=128", Mark::derived, ""}}},
          {"h*T**2*b",
           "B",
           [](const Inputs& in) { return real(score_bytes(in["h"], in["T"], in["T"], in["b"])); },
           {{"s_bytes", "h=32;T=8192;b=2", Mark::derived, ""}}},
          {"h*T**2*b/2**30",
           "GiB",
           [](const Inputs& in) { return kGib * score_bytes(in["h"], in["T"], in["T"], in["b"]); },
           {{"s_gib", "h=32;T=8192;b=2", Mark::agrees, ""},
            {"p_gib", "h=32;T=8192;b=2", Mark::agrees, ""},
            {"s_gib_32k", "h=32;T=32768;b=2", Mark::agrees, ""}}},
          {"2*h*T**2*b/2**30",
           "GiB",
           [](const Inputs& in) {
             return kGib * 2 * score_bytes(in["h"], in["T"], in["T"], in["b"]);
           },
           {{"s_and_p_gib", "h=32;T=8192;b=2", Mark::derived, ""}}},
          {"(T2/T)**2",
           "ratio",
           [](const Inputs& in) {
             return ratio(score_bytes(1, in["T2"], in["T2"], 1),
                          score_bytes(1, in["T"], in["T"], 1));
           },
           {{"s_growth_8k_to_32k", "T=8192;T2=32768", Mark::derived, ""}}},
          {"h*T**2*b/10**9+weights_gb",
           "GB",
           [](const Inputs& in) {
             return per(1e9, score_bytes(in["h"], in["T"], in["T"], in["b"])) +
                    in.real("weights_gb");
           },
           {{"s_gb_plus_weights_32k", "h=32;T=32768;b=2;weights_gb=15", Mark::derived, ""}}},
          {"h*T*d*b",
           "B",
           [](const Inputs& in) { return real(tensor_bytes(in["h"], in["T"], in["d"], in["b"])); },
           {{"q_bytes", "h=32;T=8192;d=128;b=2", Mark::derived, ""}}},
          {"h_kv*T*d*b",
           "B",
           [](const Inputs& in) {
             return real(tensor_bytes(in["h_kv"], in["T"], in["d"], in["b"]));
           },
           {{"k_bytes", "h_kv=8;T=8192;d=128;b=2", Mark::derived, ""}}},
          {"(h+h_kv)*T*d*b+h*T**2*b",
           "B",
           [](const Inputs& in) { return real(layer(in).scores); },
           {{"traffic_qk_kernel", "h=32;h_kv=8;T=8192;d=128;b=2", Mark::derived, ""}}},
          {"2*h*T**2*b",
           "B",
           [](const Inputs& in) {
             return real(materialised(in["h"], in["h"], in["T"], in["T"], 1, 1, in["b"]).softmax);
           },
           {{"traffic_softmax_kernel", "h=32;T=8192;b=2", Mark::derived, ""}}},
          {"(h+h_kv)*T*d*b+h*T**2*b",
           "B",
           [](const Inputs& in) { return real(layer(in).values); },
           {{"traffic_pv_kernel", "h=32;h_kv=8;T=8192;d=128;b=2", Mark::derived, ""}}},
          {"4*h*T**2*b+2*(h+h_kv)*T*d*b",
           "B",
           [](const Inputs& in) { return real(layer(in).total()); },
           {{"traffic_materialised", "h=32;h_kv=8;T=8192;d=128;b=2", Mark::derived, ""}}},
          {"(4*h*T**2*b+2*(h+h_kv)*T*d*b)/2**30",
           "GiB",
           [](const Inputs& in) { return kGib * layer(in).total(); },
           {{"traffic_materialised_gib", "h=32;h_kv=8;T=8192;d=128;b=2", Mark::rounds,
             "printed as 16.156"}}},
          {"layers*(4*h*T**2*b+2*(h+h_kv)*T*d*b)/2**30",
           "GiB",
           [](const Inputs& in) { return kGib * in["layers"] * layer(in).total(); },
           {{"traffic_materialised_all_layers_gib", "h=32;h_kv=8;T=8192;d=128;b=2;layers=32",
             Mark::derived, ""}}},
          {"2*(h+h_kv)*T*d*b",
           "B",
           [](const Inputs& in) { return real(layer_compulsory(in)); },
           {{"traffic_compulsory", "h=32;h_kv=8;T=8192;d=128;b=2", Mark::derived, ""}}},
          {"100*4*h*T**2*b/(4*h*T**2*b+2*(h+h_kv)*T*d*b)",
           "%",
           [](const Inputs& in) { return percent(layer(in).intermediate, layer(in).total()); },
           {{"intermediate_share", "h=32;h_kv=8;T=8192;d=128;b=2", Mark::rounds,
             "printed as 99 %"}}},
          {"100*(1-2*(h+h_kv)*T*d*b/(4*h*T**2*b+2*(h+h_kv)*T*d*b))",
           "%",
           [](const Inputs& in) { return 100 - percent(layer_compulsory(in), layer(in).total()); },
           {{"traffic_deleted", "h=32;h_kv=8;T=8192;d=128;b=2", Mark::rounds, "printed as 99 %"}}},
          {"2*h*T**2*d",
           "FLOP",
           [](const Inputs& in) { return real(product_flop(in["h"], in["T"] * in["T"], in["d"])); },
           {{"flop_qk", "h=32;T=8192;d=128", Mark::derived, ""}}},
          {"4*h*T**2*d",
           "FLOP",
           [](const Inputs& in) { return real(layer_flop(in)); },
           {{"flop_layer", "h=32;T=8192;d=128", Mark::rounds, "printed as 1.0995e12"}}},
          {"4*T**2*d/10**9",
           "GFLOP",
           [](const Inputs& in) {
             return per(1e9, attention_flop(1, in["T"] * in["T"], in["d"], in["d"]));
           },
           {{"flop_head_gflop", "T=8192;d=128", Mark::rounds, "printed as 34.36"}}},
          {"(4*T**2*b+4*T*d*b)/10**6",
           "MB",
           [](const Inputs& in) { return per(1e6, head(in).total()); },
           {{"traffic_head_mb", "T=8192;d=128;b=2", Mark::rounds, "printed as 545.3"}}},
      }};
}

BookSection roofline_of_a_prefill() {
  return {
      "Roofline of a prefill",
      "Williams et al. 2009, doi:10.1145/1498765.1498785; Dao et al. 2022, arXiv:2205.14135",
      {
          {"4*h*T**2*d/(4*h*T**2*b+2*(h+h_kv)*T*d*b)",
           "FLOP/B",
           [](const Inputs& in) { return intensity(layer_flop(in), layer(in).total()); },
           {{"intensity_materialised_layer", "h=32;h_kv=8;T=8192;d=128;b=2", Mark::rounds,
             "printed as 63"}}},
          {"T*d/(b*(T+d))",
           "FLOP/B",
           [](const Inputs& in) { return head_intensity(in); },
           {{"intensity_materialised_head", "T=8192;d=128;b=2", Mark::rounds, "printed as 63"}}},
          {"d/b",
           "FLOP/B",
           [](const Inputs& in) { return three_kernel_limit(in); },
           {{"intensity_materialised_limit", "d=128;b=2", Mark::derived, ""}}},
          {"2*h*T/(b*(h+h_kv))",
           "FLOP/B",
           [](const Inputs& in) { return compulsory_intensity(in); },
           {{"intensity_compulsory_layer", "h=32;h_kv=8;T=8192;b=2", Mark::agrees, ""}}},
          {"T/b",
           "FLOP/B",
           [](const Inputs& in) {
             return intensity(attention_flop(1, in["T"] * in["T"], 1, 1),
                              compulsory_bytes(1, 1, in["T"], in["T"], 1, 1, in["b"]));
           },
           {{"intensity_compulsory_head", "T=8192;b=2", Mark::agrees, ""}}},
          {"peak/bw",
           "FLOP/B",
           [](const Inputs& in) { return ridge(in.real("peak"), in.real("bw")); },
           {{"ridge", "peak=989.4e12;bw=3.35e12", Mark::rounds, "printed as 295"}}},
          {"2*h*T/(b*(h+h_kv))/ridge",
           "ratio",
           [](const Inputs& in) { return compulsory_intensity(in) / in.real("ridge"); },
           {{"past_ridge", "h=32;h_kv=8;T=8192;b=2;ridge=295", Mark::rounds, "printed as 22"}}},
          {"ridge*(4*h*T**2*b+2*(h+h_kv)*T*d*b)/(4*h*T**2*d)",
           "ratio",
           [](const Inputs& in) {
             return in.real("ridge") / intensity(layer_flop(in), layer(in).total());
           },
           {{"left_of_ridge_layer", "h=32;h_kv=8;T=8192;d=128;b=2;ridge=295", Mark::rounds,
             "printed as 4.7"}}},
          {"ridge*b*(T+d)/(T*d)",
           "ratio",
           [](const Inputs& in) { return in.real("ridge") / head_intensity(in); },
           {{"left_of_ridge_head", "T=8192;d=128;b=2;ridge=295", Mark::rounds, "printed as 4.7"}}},
          {"(4*h*T**2*b+2*(h+h_kv)*T*d*b)/(2*(h+h_kv)*T*d*b)",
           "ratio",
           [](const Inputs& in) { return ratio(layer(in).total(), layer_compulsory(in)); },
           {{"intensity_loss_layer", "h=32;h_kv=8;T=8192;d=128;b=2", Mark::rounds,
             "printed as 103"},
            {"traffic_ratio_32k", "h=32;h_kv=8;T=32768;d=128;b=2", Mark::derived, ""}}},
          {"2*h*T/(b*(h+h_kv))/(T*d/(b*(T+d)))",
           "ratio",
           [](const Inputs& in) { return compulsory_intensity(in) / head_intensity(in); },
           {{"intensity_loss_mixed", "h=32;h_kv=8;T=8192;d=128;b=2", Mark::derived, ""}}},
          {"1000*(4*h*T**2*b+2*(h+h_kv)*T*d*b)/bw",
           "ms",
           [](const Inputs& in) { return 1e3 * move_seconds(layer(in).total(), in.real("bw")); },
           {{"time_materialised_layer", "h=32;h_kv=8;T=8192;d=128;b=2;bw=3.35e12", Mark::rounds,
             "printed as 5.18"}}},
          {"1000*layers*(4*h*T**2*b+2*(h+h_kv)*T*d*b)/bw",
           "ms",
           [](const Inputs& in) {
             return 1e3 * move_seconds(in["layers"] * layer(in).total(), in.real("bw"));
           },
           {{"time_materialised_all_layers", "h=32;h_kv=8;T=8192;d=128;b=2;layers=32;bw=3.35e12",
             Mark::rounds, "printed as 165.7"}}},
          {"1000*4*h*T**2*d/peak",
           "ms",
           [](const Inputs& in) { return 1e3 * compute_seconds(layer_flop(in), in.real("peak")); },
           {{"time_compute_floor_layer", "h=32;T=8192;d=128;peak=989.4e12", Mark::derived, ""}}},
          {"1000*layers*4*h*T**2*d/peak",
           "ms",
           [](const Inputs& in) {
             return 1e3 * compute_seconds(in["layers"] * layer_flop(in), in.real("peak"));
           },
           {{"time_compute_floor_all_layers", "h=32;T=8192;d=128;layers=32;peak=989.4e12",
             Mark::rounds, "printed as 35.6"}}},
          {"10**6*2*(h+h_kv)*T*d*b/bw",
           "us",
           [](const Inputs& in) { return 1e6 * move_seconds(layer_compulsory(in), in.real("bw")); },
           {{"time_compulsory_layer", "h=32;h_kv=8;T=8192;d=128;b=2;bw=3.35e12", Mark::derived,
             ""}}},
          {"(4*h*T**2*b+2*(h+h_kv)*T*d*b)/bw/(4*h*T**2*d/peak)",
           "ratio",
           [](const Inputs& in) {
             return move_seconds(layer(in).total(), in.real("bw")) /
                    compute_seconds(layer_flop(in), in.real("peak"));
           },
           {{"slowdown_8k", "h=32;h_kv=8;T=8192;d=128;b=2;bw=3.35e12;peak=989.4e12", Mark::rounds,
             "printed as 4.7"},
            {"slowdown_1k", "h=32;h_kv=8;T=1024;d=128;b=2;bw=3.35e12;peak=989.4e12", Mark::errs,
             "printed as growing with T; it falls, because the FLOPs are quadratic too"},
            {"slowdown_32k", "h=32;h_kv=8;T=32768;d=128;b=2;bw=3.35e12;peak=989.4e12", Mark::errs,
             "printed as growing with T; it falls, because the FLOPs are quadratic too"}}},
          {"peak/bw/(d/b)",
           "ratio",
           [](const Inputs& in) {
             return ridge(in.real("peak"), in.real("bw")) / three_kernel_limit(in);
           },
           {{"slowdown_limit", "d=128;b=2;bw=3.35e12;peak=989.4e12", Mark::errs,
             "printed as growing with T; it falls towards this limit"}}},
          {"T*b",
           "B",
           [](const Inputs& in) { return real(score_bytes(1, 1, in["T"], in["b"])); },
           {{"s_row_bytes", "T=8192;b=2", Mark::agrees, ""}}},
          {"B_r*B_c*b",
           "B",
           [](const Inputs& in) { return real(score_bytes(1, in["B_r"], in["B_c"], in["b"])); },
           {{"s_tile_bytes", "B_r=64;B_c=64;b=2", Mark::agrees, ""}}},
          {"smem_kib*1024",
           "B",
           [](const Inputs& in) { return real(shared_memory(in)); },
           {{"smem_bytes", "smem_kib=228", Mark::derived, ""}}},
          {"floor(smem_kib*1024/(T*b))",
           "rows",
           [](const Inputs& in) {
             return real(shared_memory(in) / score_bytes(1, 1, in["T"], in["b"]));
           },
           {{"s_rows_per_sm", "smem_kib=228;T=8192;b=2", Mark::derived, ""}}},
          {"floor(smem_kib*1024/(B_r*B_c*b))",
           "tiles",
           [](const Inputs& in) {
             return real(shared_memory(in) / score_bytes(1, in["B_r"], in["B_c"], in["b"]));
           },
           {{"s_tiles_per_sm", "smem_kib=228;B_r=64;B_c=64;b=2", Mark::derived, ""}}},
      }};
}

BookSection range_of_exponentials() {
  return {
      "Range of exponentials",
      "IEEE 754-2019; Milakov and Gimelshein 2018, arXiv:1805.02867",
      {
          {"(2-(1/2)**mantissa)*2**max_exponent",
           "1",
           [](const Inputs& in) { return format_max(in); },
           {{"fp16_max", "mantissa=10;max_exponent=15", Mark::derived, ""}}},
          {"ln(fp16_max)",
           "1",
           [](const Inputs& in) { return exp_reaches(in.real("fp16_max")); },
           {{"exp_overflow_fp16", "fp16_max=65504", Mark::rounds, "printed as 11.1"}}},
          {"ln(fp16_max+half_ulp)",
           "1",
           [](const Inputs& in) { return exp_reaches(in.real("fp16_max") + in.real("half_ulp")); },
           {{"exp_overflow_fp16_nearest", "fp16_max=65504;half_ulp=16", Mark::rounds,
             "printed as 11.1"}}},
          {"ln((2-(1/2)**mantissa)*2**max_exponent)",
           "1",
           [](const Inputs& in) { return exp_reaches(format_max(in)); },
           {{"exp_overflow_fp32", "mantissa=23;max_exponent=127", Mark::derived, ""},
            {"exp_overflow_bf16", "mantissa=7;max_exponent=127", Mark::derived, ""}}},
          {"exp(x)",
           "1",
           [](const Inputs& in) { return rescale(in.real("x"), 0); },
           {{"exp_100", "x=100", Mark::rounds, "printed as 2.688e43"}}},
          {"exp(x)/((2-(1/2)**mantissa)*2**max_exponent)",
           "ratio",
           [](const Inputs& in) { return rescale(in.real("x"), 0) / format_max(in); },
           {{"exp_100_over_fp32_max", "x=100;mantissa=23;max_exponent=127", Mark::derived, ""}}},
          {"ln((1/2)**zero_exponent)",
           "1",
           [](const Inputs& in) {
             return exp_reaches(std::ldexp(1.0, -static_cast<int>(in["zero_exponent"])));
           },
           {{"exp_underflow_fp16", "zero_exponent=25", Mark::rounds, "printed as -17.33"},
            {"exp_underflow_fp32", "zero_exponent=150", Mark::derived, ""}}},
          {"ln((1/2)**subnormal_exponent)",
           "1",
           [](const Inputs& in) {
             return exp_reaches(std::ldexp(1.0, -static_cast<int>(in["subnormal_exponent"])));
           },
           {{"exp_smallest_fp16_subnormal", "subnormal_exponent=24", Mark::derived, ""}}},
          {"ln((1/2)**normal_exponent)",
           "1",
           [](const Inputs& in) {
             return exp_reaches(std::ldexp(1.0, -static_cast<int>(in["normal_exponent"])));
           },
           {{"exp_underflow_fp16_ftz", "normal_exponent=14", Mark::derived, ""},
            {"exp_underflow_fp32_ftz", "normal_exponent=126", Mark::derived, ""}}},
          {"sqrt(2*ln(N))-(ln(ln(N))+ln(4*pi))/(2*sqrt(2*ln(N)))",
           "1",
           [](const Inputs& in) { return expected_normal_max(in.real("N")); },
           {{"expected_max_normal", "N=8192;pi=3.14159265358979", Mark::rounds, "printed as 3.7"}}},
          {"ln(fp16_max)-(sqrt(2*ln(N))-(ln(ln(N))+ln(4*pi))/(2*sqrt(2*ln(N))))",
           "sigma",
           [](const Inputs& in) {
             return exp_reaches(in.real("fp16_max")) - expected_normal_max(in.real("N"));
           },
           {{"overflow_margin_sigma", "N=8192;pi=3.14159265358979;fp16_max=65504", Mark::errs,
             "printed as nine"}}},
          {"sigma*(sqrt(2*ln(N))-(ln(ln(N))+ln(4*pi))/(2*sqrt(2*ln(N))))",
           "1",
           [](const Inputs& in) { return in.real("sigma") * expected_normal_max(in.real("N")); },
           {{"expected_max_sigma3", "N=8192;sigma=3;pi=3.14159265358979", Mark::derived, ""}}},
      }};
}

BookSection the_online_state() {
  return {"The online state",
          "Milakov and Gimelshein 2018, arXiv:1805.02867",
          {
              {"exp(m_old-m_new)",
               "1",
               [](const Inputs& in) { return rescale(in.real("m_old"), in.real("m_new")); },
               {{"alpha_block3", "m_old=3;m_new=8", Mark::rounds, "printed as 0.0067379"}}},
              {"exp(m_new-m_old)",
               "ratio",
               [](const Inputs& in) { return 1 / rescale(in.real("m_old"), in.real("m_new")); },
               {{"alpha_block3_divisor", "m_old=3;m_new=8", Mark::rounds, "printed as 148"}}},
              {"ceil(T/B_c)",
               "blocks",
               [](const Inputs& in) { return real(ceil_div(in["T"], in["B_c"])); },
               {{"rescales_per_row", "T=8192;B_c=64", Mark::derived, ""}}},
              {"100/B_c",
               "%",
               [](const Inputs& in) { return 100 * rescale_share(in["B_c"], 1, false); },
               {{"rescale_of_pv_multiply_adds", "B_c=64", Mark::rounds, "printed as 1.6 %"}}},
              {"100*(d+1)/(d*B_c)",
               "%",
               [](const Inputs& in) { return 100 * rescale_share(in["B_c"], in["d"], true); },
               {{"rescale_of_pv_multiply_adds_with_l", "B_c=64;d=128", Mark::rounds,
                 "printed as 1.6 %"}}},
              {"100/(2*B_c)",
               "%",
               [](const Inputs& in) { return 100 * ratio(1, product_flop(1, in["B_c"], 1)); },
               {{"rescale_of_pv_flop", "B_c=64", Mark::agrees, ""}}},
              {"100/(4*B_c)",
               "%",
               [](const Inputs& in) { return 100 * ratio(1, attention_flop(1, in["B_c"], 1, 1)); },
               {{"rescale_of_all_flop", "B_c=64", Mark::agrees, ""}}},
          }};
}

BookSection merging_two_results() {
  return {"Merging two results",
          "Ye et al. 2025, arXiv:2501.01005, section 2.2; vLLM merge_attn_states.cu",
          {
              {"load_bits/(8*b)",
               "elements",
               [](const Inputs& in) { return real(merge_pack_elements(in["load_bits"], in["b"])); },
               {{"merge_pack_size", "load_bits=128;b=2", Mark::agrees, ""},
                {"merge_pack_size_fp32", "load_bits=128;b=4", Mark::agrees, ""}}},
              {"d/(load_bits/(8*b))",
               "threads",
               [](const Inputs& in) {
                 return ratio(in["d"], merge_pack_elements(in["load_bits"], in["b"]));
               },
               {{"merge_threads_per_head", "d=128;load_bits=128;b=2", Mark::agrees, ""}}},
              {"load_bits/8",
               "B",
               [](const Inputs& in) { return real(merge_pack_elements(in["load_bits"], 1)); },
               {{"merge_bytes_per_thread", "load_bits=128", Mark::agrees, ""}}},
              {"3*d*b+2*4",
               "B",
               [](const Inputs& in) { return real(merge_bytes(in["d"], in["b"], false)); },
               {{"merge_bytes_no_lse_out", "d=128;b=2", Mark::agrees, ""}}},
              {"3*d*b+3*4",
               "B",
               [](const Inputs& in) { return real(merge_bytes(in["d"], in["b"], true)); },
               {{"merge_bytes", "d=128;b=2", Mark::errs,
                 "printed as 776, without the 4 bytes of lse written"}}},
              {"3*d",
               "FLOP",
               [](const Inputs& in) { return real(merge_flop(in["d"], 0)); },
               {{"merge_flop_vector", "d=128", Mark::derived, ""}}},
              {"3*d+scalar",
               "FLOP",
               [](const Inputs& in) { return real(merge_flop(in["d"], in["scalar"])); },
               {{"merge_flop", "d=128;scalar=8", Mark::rounds, "printed as 390"}}},
              {"3*d/(3*d*b+2*4)",
               "FLOP/B",
               [](const Inputs& in) {
                 return intensity(merge_flop(in["d"], 0), merge_bytes(in["d"], in["b"], false));
               },
               {{"merge_intensity", "d=128;b=2", Mark::rounds, "printed as 0.5"}}},
              {"ridge*(3*d*b+2*4)/(3*d)",
               "ratio",
               [](const Inputs& in) {
                 return in.real("ridge") /
                        intensity(merge_flop(in["d"], 0), merge_bytes(in["d"], in["b"], false));
               },
               {{"merge_ridge_distance", "d=128;b=2;ridge=295", Mark::derived, ""}}},
          }};
}

}  // namespace

std::vector<BookSection> softmax_sections() {
  return {attention_in_three_kernels(), roofline_of_a_prefill(), range_of_exponentials(),
          the_online_state(), merging_two_results()};
}

}  // namespace attnfold::explain
