// Whose attention, and on what: public architectures, a config.json, and machines.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace attnfold::explain {

/** Attention of one model, as much as costs depend on it. */
struct Model {
  std::string name;
  std::string source;  // where its config.json is published
  int64_t layers = 0;
  int64_t h = 0, h_kv = 0;  // query and kv heads
  int64_t d_qk = 0, d_vo = 0;
  int64_t window = 0;  // keys that a token of a windowed layer sees, its own included; 0 = all
  int64_t window_layers = 0;  // layers that have the window
  bool latent = false;        // v is the first d_vo elements of k (absorbed latent attention)
  bool alibi = false;

  /** Elements that one token keeps per kv head. */
  int64_t kv_elements() const { return latent ? d_qk : d_qk + d_vo; }
  int64_t group() const { return h / h_kv; }
};

const std::vector<Model>& known_models();
const Model* find_model(const std::string& name);

/** The shard of one of `tp` ranks.  "" or why it cannot be cut so. */
std::string shard(Model& model, int64_t tp);

/** From the text of a Hugging Face config.json.  On failure `error` is set. */
struct ConfigResult {
  Model model;
  std::string error;
};
ConfigResult model_of_config(const std::string& json_text, const std::string& name);

/** "" if every size is sound, else which is not. */
std::string model_problem(const Model& model);

enum class MachineKind { gpu, cpu };

struct Machine {
  std::string name;
  MachineKind kind = MachineKind::gpu;
  int64_t sms = 0;  // streaming multiprocessors, or cores
  double bytes_per_s = 0;
  double flop_per_s = 0;  // dense, 16-bit inputs, fp32 accumulation
  int64_t arch = 0;       // 90 = SM90; 0 for a CPU
  std::string source;
};

const std::vector<Machine>& known_machines();
const Machine* find_machine(const std::string& name);

}  // namespace attnfold::explain
