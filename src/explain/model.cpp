#include "explain/model.h"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>

namespace attnfold::explain {
namespace {

using nlohmann::json;

Model plain(const char* name, const char* source, int64_t layers, int64_t h, int64_t h_kv,
            int64_t d) {
  Model m;
  m.name = name;
  m.source = std::string("huggingface.co/") + source;
  m.layers = layers;
  m.h = h;
  m.h_kv = h_kv;
  m.d_qk = m.d_vo = d;
  return m;
}

Model windowed(Model m, int64_t window, int64_t window_layers) {
  m.window = window;
  m.window_layers = window_layers;
  return m;
}

/** Absorbed: one kv head of the latent and the rotary part, of which values are the latent. */
Model latent(const char* name, const char* source, int64_t layers, int64_t h, int64_t rank,
             int64_t rope) {
  Model m = plain(name, source, layers, h, 1, rank + rope);
  m.d_vo = rank;
  m.latent = true;
  return m;
}

}  // namespace

const std::vector<Model>& known_models() {
  static const std::vector<Model> models = {
      plain("llama-2-7b", "meta-llama/Llama-2-7b-hf", 32, 32, 32, 128),
      plain("llama-3-8b", "meta-llama/Meta-Llama-3-8B", 32, 32, 8, 128),
      plain("llama-3-70b", "meta-llama/Meta-Llama-3-70B", 80, 64, 8, 128),
      plain("llama-3.1-405b", "meta-llama/Llama-3.1-405B", 126, 128, 8, 128),
      plain("llama-3.2-1b", "meta-llama/Llama-3.2-1B", 16, 32, 8, 64),
      plain("qwen2.5-7b", "Qwen/Qwen2.5-7B", 28, 28, 4, 128),
      plain("qwen2.5-72b", "Qwen/Qwen2.5-72B", 80, 64, 8, 128),
      plain("qwen3-8b", "Qwen/Qwen3-8B", 36, 32, 8, 128),
      plain("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 48, 32, 4, 128),
      plain("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", 94, 64, 4, 128),
      windowed(plain("mistral-7b", "mistralai/Mistral-7B-v0.1", 32, 32, 8, 128), 4096, 32),
      plain("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", 32, 32, 8, 128),
      windowed(plain("gemma-2-9b", "google/gemma-2-9b", 42, 16, 8, 256), 4096, 21),
      windowed(plain("gemma-2-27b", "google/gemma-2-27b", 46, 32, 16, 128), 4096, 23),
      windowed(plain("gemma-3-27b", "google/gemma-3-27b-it", 62, 32, 16, 128), 1024, 52),
      windowed(plain("gpt-oss-20b", "openai/gpt-oss-20b", 24, 64, 8, 64), 128, 12),
      windowed(plain("gpt-oss-120b", "openai/gpt-oss-120b", 36, 64, 8, 64), 128, 18),
      plain("smollm2-135m", "HuggingFaceTB/SmolLM2-135M", 30, 9, 3, 64),
      plain("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B", 24, 32, 32, 64),
      plain("falcon-7b", "tiiuae/falcon-7b", 32, 71, 1, 64),
      windowed(plain("phi-3-mini", "microsoft/Phi-3-mini-4k-instruct", 32, 32, 32, 96), 2047, 32),
      latent("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite", 27, 16, 512, 64),
      latent("deepseek-v3", "deepseek-ai/DeepSeek-V3", 61, 128, 512, 64),
      latent("kimi-k2", "moonshotai/Kimi-K2-Instruct", 61, 64, 512, 64)};
  return models;
}

const Model* find_model(const std::string& name) {
  for (const Model& model : known_models()) {
    if (model.name == name) return &model;
  }
  return nullptr;
}

std::string shard(Model& model, int64_t tp) {
  const auto text = [](int64_t x) { return std::to_string(x); };
  if (model.h % tp != 0) {
    return "tp: expected a divisor of the " + text(model.h) + " query heads, got " + text(tp);
  }
  if (model.h_kv % tp != 0 && tp % model.h_kv != 0) {
    return "tp: expected a divisor or a multiple of the " + text(model.h_kv) + " kv heads, got " +
           text(tp);
  }
  model.h /= tp;
  model.h_kv = std::max<int64_t>(model.h_kv / tp, 1);  // fewer kv heads than ranks are copied
  return {};
}

std::string model_problem(const Model& m) {
  const auto bad = [](const char* name, const char* expected, int64_t got) {
    return std::string(name) + ": expected " + expected + ", got " + std::to_string(got);
  };
  if (m.layers < 1 || m.layers > 1024) return bad("layers", "1..1024", m.layers);
  if (m.h < 1 || m.h > 1024) return bad("qo_heads", "1..1024", m.h);
  if (m.h_kv < 1 || m.h % m.h_kv != 0) {
    return "kv_heads: expected a divisor of qo_heads (" + std::to_string(m.h) + "), got " +
           std::to_string(m.h_kv);
  }
  if (m.d_qk < 8 || m.d_qk > 1024) return bad("head_dim_qk", "8..1024", m.d_qk);
  if (m.d_vo < 8 || m.d_vo > 1024) return bad("head_dim_vo", "8..1024", m.d_vo);
  if (m.window < 0 || m.window > INT32_MAX)
    return bad("window", "0 (none), or 1..2147483647 keys", m.window);
  return {};
}

namespace {

/** Layers of a config that have its window: named one by one, by a pattern, or all. */
int64_t count_window_layers(const json& config, int64_t layers) {
  if (config.value("use_sliding_window", json(true)) == json(false)) return 0;
  if (config.contains("layer_types") && config["layer_types"].is_array()) {
    const json& types = config["layer_types"];
    return std::count(types.begin(), types.end(), json("sliding_attention"));
  }
  const json every = config.value("sliding_window_pattern", json());
  if (every.is_number_integer() && every.get<int64_t>() > 0) {
    return layers - layers / every.get<int64_t>();
  }
  return layers;
}

ConfigResult read_config(const json& whole, const std::string& name) {
  // Multi-modal models keep their language model's numbers one level down.
  const json& config = whole.contains("text_config") ? whole["text_config"] : whole;
  Model m;
  m.name = name;
  m.source = name;
  std::string fault;
  const auto number = [&](const char* key, int64_t otherwise) {
    const auto it = config.find(key);
    if (it == config.end() || it->is_null() || it->is_boolean()) return otherwise;
    const bool fits =
        it->is_number_integer() && !(it->is_number_unsigned() && it->get<uint64_t>() > INT64_MAX);
    if (fits) return it->get<int64_t>();
    fault = name + ": " + key + ": expected a whole number, got " +
            it->dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 60);
    return otherwise;
  };
  m.layers = number("num_hidden_layers", 0);
  m.h = number("num_attention_heads", 0);
  for (const char* key : {"num_hidden_layers", "num_attention_heads"}) {
    if (!fault.empty()) return {m, fault};
    if (number(key, 0) < 1) return {m, name + ": expected " + key + " to be a number >= 1"};
  }
  const int64_t rank = number("kv_lora_rank", 0);
  if (rank > 0) {
    Model absorbed = latent(name.c_str(), "", m.layers, m.h, rank, number("qk_rope_head_dim", 64));
    absorbed.source = name;
    return {absorbed, fault.empty() ? model_problem(absorbed) : fault};
  }
  m.h_kv = number("num_key_value_heads", number("multi_query", 0) ? 1 : m.h);
  if (config.value("multi_query", json(false)) == json(true)) m.h_kv = 1;
  m.d_qk = number("head_dim", number("hidden_size", 0) / m.h);
  m.d_vo = number("v_head_dim", m.d_qk);
  m.window = number("sliding_window", 0);
  if (!fault.empty()) return {m, fault};
  if (m.window < 0) return {m, model_problem(m)};
  if (m.window > 0) m.window_layers = count_window_layers(config, m.layers);
  if (m.window_layers == 0) m.window = 0;
  m.alibi = config.value("alibi", json(false)) == json(true);
  return {m, model_problem(m)};
}

}  // namespace

ConfigResult model_of_config(const std::string& json_text, const std::string& name) {
  const json whole = json::parse(json_text, nullptr, false);
  if (!whole.is_object()) return {{}, name + ": expected a JSON object"};
  if (whole.contains("text_config") && !whole["text_config"].is_object()) {
    return {{}, name + ": text_config: expected a JSON object"};
  }
  return read_config(whole, name);
}

const std::vector<Machine>& known_machines() {
  static const std::vector<Machine> machines = {
      {"a100", MachineKind::gpu, 108, 2.039e12, 312e12, 80,
       "NVIDIA A100 80GB datasheet (SXM); 108 SMs: A100 whitepaper"},
      {"h100", MachineKind::gpu, 132, 3.35e12, 989.4e12, 90,
       "NVIDIA H100 datasheet (SXM5); 132 SMs and dense 989.4: H100 whitepaper"},
      {"h200", MachineKind::gpu, 132, 4.8e12, 989.4e12, 90,
       "NVIDIA H200 datasheet (SXM); SMs and peak of the H100"},
      {"b200", MachineKind::gpu, 148, 8.0e12, 2250e12, 100,
       "NVIDIA DGX B200 datasheet, an eighth of it, dense"},
      {"l40s", MachineKind::gpu, 142, 0.864e12, 362.05e12, 89, "NVIDIA L40S datasheet, dense"},
      {"rtx4090", MachineKind::gpu, 128, 1.008e12, 165.2e12, 89,
       "NVIDIA Ada GPU architecture whitepaper, fp32 accumulation, dense"},
      {"epyc-9654", MachineKind::cpu, 96, 0.4608e12, 14.75e12, 0,
       "AMD EPYC 9654: 12 channels DDR5-4800; 96 cores, 2.4 GHz, 64 FLOP/cycle of bf16 dot"}};
  return machines;
}

const Machine* find_machine(const std::string& name) {
  for (const Machine& machine : known_machines()) {
    if (machine.name == name) return &machine;
  }
  return nullptr;
}

}  // namespace attnfold::explain
