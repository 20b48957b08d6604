// Models by name, by config.json, and their shards; machines.
#include "explain/model.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace attnfold::explain {
namespace {

TEST(Models, KnownOnesAreSoundAndNamedOnce) {
  std::set<std::string> names;
  for (const Model& m : known_models()) {
    EXPECT_EQ(model_problem(m), "") << m.name;
    EXPECT_TRUE(names.insert(m.name).second) << m.name;
    EXPECT_LE(m.window_layers, m.layers) << m.name;
    EXPECT_EQ(m.window > 0, m.window_layers > 0) << m.name;
  }
  EXPECT_GE(names.size(), 20u);
  for (const Machine& machine : known_machines()) EXPECT_NE(machine.source, "") << machine.name;
}

TEST(Models, Shards) {
  Model m = *find_model("llama-3-70b");
  EXPECT_EQ(shard(m, 8), "");
  EXPECT_EQ(m.h, 8);
  EXPECT_EQ(m.h_kv, 1);
  m = *find_model("llama-3-70b");
  EXPECT_EQ(shard(m, 16), "");  // kv heads are copied
  EXPECT_EQ(m.h, 4);
  EXPECT_EQ(m.h_kv, 1);
  m = *find_model("deepseek-v3");
  EXPECT_EQ(shard(m, 8), "");
  EXPECT_EQ(m.h, 16);
  EXPECT_EQ(m.h_kv, 1);
  m = *find_model("llama-3-8b");
  EXPECT_NE(shard(m, 3).find("got 3"), std::string::npos);
  m = *find_model("qwen2.5-7b");
  EXPECT_NE(shard(m, 14).find("kv heads"), std::string::npos);
}

TEST(Models, Configs) {
  const auto read = [](const char* text) { return model_of_config(text, "config.json"); };
  ConfigResult r = read(
      R"({"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
          "hidden_size": 3584, "sliding_window": 131072, "use_sliding_window": false})");
  ASSERT_EQ(r.error, "");
  EXPECT_EQ(r.model.h_kv, 4);
  EXPECT_EQ(r.model.d_qk, 128);
  EXPECT_EQ(r.model.window, 0);
  r = read(R"({"num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 8,
               "head_dim": 64, "hidden_size": 2880, "sliding_window": 128, "layer_types":
               ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]})");
  ASSERT_EQ(r.error, "");
  EXPECT_EQ(r.model.d_vo, 64);
  EXPECT_EQ(r.model.window, 128);
  EXPECT_EQ(r.model.window_layers, 2);
  r = read(R"({"text_config": {"num_hidden_layers": 62, "num_attention_heads": 32,
               "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
               "sliding_window_pattern": 6}})");
  ASSERT_EQ(r.error, "");
  EXPECT_EQ(r.model.window_layers, 52);
  r = read(R"({"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512,
               "qk_rope_head_dim": 64, "num_key_value_heads": 128})");
  ASSERT_EQ(r.error, "");
  EXPECT_TRUE(r.model.latent);
  EXPECT_EQ(r.model.h_kv, 1);
  EXPECT_EQ(r.model.kv_elements(), 576);
  r = read(R"({"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544,
               "multi_query": true})");
  ASSERT_EQ(r.error, "");
  EXPECT_EQ(r.model.h_kv, 1);
  EXPECT_EQ(r.model.d_qk, 64);
}

TEST(Models, WhatIsNoWholeNumberInAConfigIsNamed) {
  for (const std::string key : {"num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                                "head_dim", "v_head_dim", "sliding_window", "kv_lora_rank"}) {
    for (const char* value : {"\"4\"", "4.5", "1e30", "9223372036854775808", "[]", "{}"}) {
      const std::string config =
          "{\"num_hidden_layers\": 2, \"num_attention_heads\": 4, "
          "\"hidden_size\": 256, \"" +
          key + "\": " + value + "}";
      const std::string error = model_of_config(config, "config.json").error;
      EXPECT_EQ(error.rfind("config.json: " + key + ": expected a whole number, got ", 0), 0u)
          << config << ": " << error;
    }
    if (key.rfind("num_", 0) == 0 && key != "num_key_value_heads") continue;
    EXPECT_EQ(model_of_config("{\"num_hidden_layers\": 2, \"num_attention_heads\": 4, "
                              "\"hidden_size\": 256, \"" +
                                  key + "\": null}",
                              "config.json")
                  .error,
              "")
        << key;
  }
}

TEST(Models, UnsoundConfigsAreErrors) {
  for (const char* text :
       {"", "[]", "{", "{}", "3", "{\"num_hidden_layers\": 2}",
        "{\"num_hidden_layers\": \"x\", \"num_attention_heads\": 4}",
        "{\"num_hidden_layers\": 2, \"num_attention_heads\": 4}",
        "{\"num_hidden_layers\": 2, \"num_attention_heads\": 0, \"head_dim\": 64}",
        "{\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 3, "
        "\"head_dim\": 64}",
        "{\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 0, "
        "\"head_dim\": 64}",
        "{\"num_hidden_layers\": -2, \"num_attention_heads\": 4, \"head_dim\": 64}",
        "{\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"head_dim\": 64, "
        "\"sliding_window\": -4}",
        "{\"text_config\": 3}"}) {
    EXPECT_NE(model_of_config(text, "config.json").error, "") << text;
  }
}

}  // namespace
}  // namespace attnfold::explain
