// Lines of a call: the engines' answers to whole batches, and what must hold of every line.
#include "explain/engines.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "attnfold/attnfold.h"
#include "explain/quantities.h"

namespace attnfold::explain {
namespace {

Question question_of(const char* model, std::vector<Request> batch) {
  Question q;
  q.model = *find_model(model);
  q.machine = *find_machine("h100");
  q.batch = std::move(batch);
  return q;
}

std::vector<Request> decodes(size_t n, int64_t kv) { return std::vector<Request>(n, {1, kv}); }

Line finished(Line (*engine)(const Question&), const Question& question) {
  Line line = engine(question);
  if (line.used) finish(question, line);
  return line;
}

bool says(const Line& line, const char* words) {
  return line.rule.find(words) != std::string::npos;
}

TEST(Lines, AnswersToTheSameBatches) {
  struct Case {
    std::vector<Request> batch;
    int32_t sglang, flashinfer, fa3;
  };
  for (const Case& c : {Case{decodes(1, 2560), 8, 20, 10}, Case{decodes(1, 32768), 8, 33, 15},
                        Case{decodes(4, 8192), 8, 8, 4}, Case{decodes(16, 4096), 7, 2, 1}}) {
    const Question q = question_of("llama-3-8b", c.batch);
    EXPECT_EQ(vllm_unified(q).splits[0], 16);
    EXPECT_EQ(sglang_adaptive(q).splits[0], c.sglang);
    EXPECT_EQ(flashinfer_tensor_core(q).splits[0], c.flashinfer);
    EXPECT_EQ(flash_attention_3(q).splits[0], c.fa3);
  }
  const Question many = question_of("llama-3-8b", decodes(64, 4096));
  EXPECT_TRUE(says(vllm_unified(many), "2D: batch 64 > 16"));
  EXPECT_EQ(vllm_unified(many).splits[0], 1);
}

TEST(Lines, VllmWorkedExample) {
  const Line line = finished(vllm_unified, question_of("llama-3-8b", decodes(1, 2560)));
  EXPECT_EQ(line.grid, "(1, 8, 16)");
  EXPECT_EQ(line.live, 128);
  EXPECT_EQ(line.waves, 1);
  EXPECT_EQ(line.keys_per_block, 160);
  EXPECT_EQ(line.partial_bytes, 532480);
  EXPECT_EQ(line.kv_bytes, 10485760);
  EXPECT_DOUBLE_EQ(line.wasted_rows, 0.75);
  EXPECT_NEAR(line.busy, 128.0 / 132, 1e-12);
  EXPECT_FALSE(line.compute_bound);
  const int64_t other = 2 * 32 * 128 * 2;
  EXPECT_NEAR(line.floor_us, (10485760 + 532480 + other) / 3.35e6, 1e-9);
}

TEST(Lines, VllmNamesEachOfItsReasons) {
  Question q = question_of("llama-3-8b", decodes(1, 2560));
  q.switches.batch_invariant = true;
  EXPECT_EQ(vllm_unified(q).rule, "2D: batch invariance is on");
  q.switches = {};
  q.switches.vllm_buffers = false;
  EXPECT_EQ(vllm_unified(q).rule, "2D: no scratch for partial states");
  q.switches = {};
  q.batch.push_back({512, 4096});
  EXPECT_EQ(vllm_unified(q).rule, "2D: a request has 512 query tokens");
  q.batch = decodes(17, 100);
  EXPECT_EQ(vllm_unified(q).rule, "2D: batch 17 > 16");
  q.batch = decodes(16, 100);
  EXPECT_TRUE(says(vllm_unified(q), "3D"));
  q.switches.vllm_capture_sizes = {1, 2, 4, 8};
  EXPECT_EQ(vllm_unified(q).rule, "2D: batch 16 > 8");
}

TEST(Lines, VllmCutsTheLengthNotTheWindow) {
  Question q = question_of("gemma-3-27b", decodes(1, 131072));
  q.windowed = true;
  const Line line = finished(vllm_unified, q);
  EXPECT_EQ(line.launched, 16 * 16);
  EXPECT_EQ(line.live, 16);  // one segment of 8192 keys holds the window of 1024
  EXPECT_EQ(line.keys_per_block, 1024);
}

TEST(Lines, CascadeSaysWhyNot) {
  Question q = question_of("llama-3-8b", decodes(64, 4096));
  EXPECT_TRUE(says(vllm_cascade(q), "256 are needed"));
  q.shared_prefix = 271;  // 16 whole pages
  EXPECT_TRUE(vllm_cascade(q).used);
  q.shared_prefix = 255;
  EXPECT_FALSE(vllm_cascade(q).used);
  q.shared_prefix = 2048;
  Line line = finished(vllm_cascade, q);
  ASSERT_TRUE(line.used);
  EXPECT_EQ(line.kv_bytes, (2048 + 64 * 2048) * int64_t{8} * 256 * 2);
  q.batch = decodes(7, 4096);
  EXPECT_TRUE(says(vllm_cascade(q), "batch 7; 8 are needed"));
  q.batch = decodes(8, 4096);
  EXPECT_TRUE(says(vllm_cascade(q), "flash decoding costs"));
  q.batch.push_back({2, 4096});  // no longer decodes only
  EXPECT_TRUE(vllm_cascade(q).used);
  q = question_of("gemma-2-9b", decodes(64, 4096));
  q.shared_prefix = 2048;
  q.windowed = true;
  EXPECT_TRUE(says(vllm_cascade(q), "window"));
}

TEST(Lines, PartitionsOfFixedLength) {
  const Question q = question_of("llama-3-8b", decodes(1, 2560));
  const Line v2 = finished(paged_attention_v2, q), rocm = finished(rocm_paged, q);
  EXPECT_EQ(v2.grid, "(32, 1, 5)");
  EXPECT_EQ(v2.live, 160);
  EXPECT_EQ(v2.kv_loads, 4 * v2.kv_bytes);
  EXPECT_EQ(rocm.grid, "(1, 10, 8)");
  EXPECT_EQ(rocm.kv_loads, rocm.kv_bytes);
  EXPECT_FALSE(rocm_paged(question_of("falcon-7b", decodes(1, 100))).used);
  EXPECT_FALSE(paged_attention_v2(question_of("llama-3-8b", {{2, 100}})).used);
}

TEST(Lines, InvariantModesTurnSplitsOff) {
  Question q = question_of("llama-3-8b", decodes(1, 32768));
  q.switches.batch_invariant = true;
  for (auto* engine :
       {vllm_unified, flashinfer_tensor_core, flash_attention_2, flash_attention_3}) {
    EXPECT_EQ(engine(q).splits[0], 1) << engine(q).engine;
    EXPECT_EQ(engine(q).partial_bytes, 0) << engine(q).engine;
  }
  EXPECT_EQ(sglang_deterministic(q).splits[0], 128);
  EXPECT_GT(attnfold_engine(q).splits[0], 1);
}

// Deterministic counts, and attnfold's bits, do not depend on mates; adaptive counts do.
TEST(Lines, AdaptiveCountsDependOnMates) {
  const Question alone = question_of("llama-3-8b", decodes(1, 4096)),
                 mates = question_of("llama-3-8b", decodes(32, 4096));
  EXPECT_EQ(flashinfer_tensor_core(alone).splits[0], 32);
  EXPECT_EQ(flashinfer_tensor_core(mates).splits[0], 1);
  EXPECT_EQ(sglang_deterministic(alone).splits[0], sglang_deterministic(mates).splits[0]);
}

/** Random ragged batches of random public models on random machines. */
Question random_question(std::mt19937_64& random) {
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  Question q;
  q.model = known_models()[static_cast<size_t>(below(static_cast<int64_t>(known_models().size())))];
  q.machine =
      known_machines()[static_cast<size_t>(below(static_cast<int64_t>(known_machines().size())))];
  q.windowed = q.model.window > 0 && below(2) == 0;
  const int64_t requests = 1 + below(24);
  for (int64_t i = 0; i < requests; ++i) {
    Request r;
    r.kv = 1 + below(below(2) ? 300 : 20000);
    r.q = below(3) ? 1 : 1 + below(std::min<int64_t>(r.kv, 300));
    q.batch.push_back(r);
  }
  q.page = int64_t{1} << below(8);
  q.kv_type = below(4) ? DType::bf16 : DType::f32;
  q.switches.cuda_graph = below(4) == 0;
  return q;
}

TEST(Lines, BlocksCoverTheVisibleKeys) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    std::mt19937_64 random(seed);
    const Question q = random_question(random);
    ASSERT_EQ(question_problem(q), "") << "seed " << seed;
    for (const Line& line : explain_call(q)) {
      SCOPED_TRACE(line.engine + ", seed " + std::to_string(seed) + ", " + q.model.name);
      EXPECT_FALSE(line.rule.empty());
      if (!line.used || line.blocks.empty()) continue;
      int64_t rows_times_keys = 0;
      for (const Block& block : line.blocks) {
        EXPECT_GT(block.keys, 0);
        EXPECT_LE(block.rows, block.tile_rows);
        rows_times_keys += block.copies * block.rows * block.keys;
      }
      // Every row meets all keys that it may see; a tile may walk over a few more.
      EXPECT_GE(rows_times_keys, visible_pairs(q) * q.model.h);
      if (decodes_only(q)) {
        EXPECT_EQ(rows_times_keys, visible_pairs(q) * q.model.h);
      }
      EXPECT_GE(line.kv_loads, line.kv_bytes);
      EXPECT_GE(line.shared_us, 0.999 * 1e6 * move_seconds(line.kv_bytes, q.machine.bytes_per_s));
      EXPECT_GE(line.wasted_rows, 0);
      EXPECT_LE(line.busy, 1);
      EXPECT_EQ(line.compute_bound, compute_seconds(line.flop, q.machine.flop_per_s) >
                                        move_seconds(line.bytes(), q.machine.bytes_per_s));
    }
  }
}

// What a line says of attnfold is what the library's plan says.
TEST(Lines, AttnfoldLoadsWhatItsPlanReports) {
  Question q = question_of("llama-3-8b", {{1, 5000}, {64, 300}, {1, 17}});
  q.machine = *find_machine("epyc-9654");
  q.switches.attnfold_workers = 7;
  const Line line = finished(attnfold_engine, q);
  attnfold_problem p = ATTNFOLD_PROBLEM_INIT;
  p.qo_heads = 32;
  p.kv_heads = 8;
  p.kv_storage = ATTNFOLD_KV_RAGGED;
  p.max_batch = 3;
  p.max_qo_rows = 66;
  p.max_kv_len = 5000;
  attnfold_execution e = ATTNFOLD_EXECUTION_INIT;
  e.num_workers = 7;
  attnfold_plan* plan = nullptr;
  ASSERT_EQ(attnfold_plan_create(&p, &e, &plan), ATTNFOLD_OK) << attnfold_last_error();
  const int32_t qo_indptr[] = {0, 1, 65, 66}, kv_indptr[] = {0, 5000, 5300, 5317};
  attnfold_lengths lengths = ATTNFOLD_LENGTHS_INIT;
  lengths.batch = 3;
  lengths.qo_indptr = qo_indptr;
  lengths.kv_indptr = kv_indptr;
  ASSERT_EQ(attnfold_plan_update(plan, &lengths, nullptr), ATTNFOLD_OK) << attnfold_last_error();
  attnfold_plan_report report{};
  report.struct_size = sizeof(report);
  ASSERT_EQ(attnfold_plan_get_report(plan, &report), ATTNFOLD_OK);
  attnfold_plan_destroy(plan);
  EXPECT_EQ(line.kv_loads, report.kv_bytes);
  EXPECT_EQ(line.partial_bytes, report.partial_bytes);
  EXPECT_EQ(line.live, report.num_items);
  EXPECT_EQ(line.launched, 7);
}

// On a GPU, worked by hand: 2 blocks on each of 132 SMs are 33 ranges for 8 kv heads.
TEST(Lines, AttnfoldOnAGpuCutsAsItsDevicePlannerDoes) {
  Question q = question_of("llama-3-8b", decodes(1, 32768));
  q.machine = *find_machine("h200");
  // 256 leaves: 7.76 to a range; 16 ranges of one whole super-chunk each.
  Line line = finished(attnfold_engine, q);
  EXPECT_EQ(line.launched, 264);
  EXPECT_EQ(line.splits[0], 16);
  EXPECT_EQ(line.live, 128);
  EXPECT_EQ(line.keys_per_block, 2048);
  EXPECT_EQ(line.kv_loads, line.kv_bytes);
  EXPECT_EQ(line.partial_bytes, 2 * 16 * 32 * (128 + 2) * 4);
  // 17 requests of 20 leaves: 17 ranges of one request each, and nothing to fold.
  q.batch = decodes(17, 2560);
  line = finished(attnfold_engine, q);
  EXPECT_EQ(line.live, 17 * 8);
  EXPECT_EQ(line.partial_bytes, 0);
  // 64 requests of 64 leaves: 4096 in 33 ranges, an even share of 125, cut within a leaf of it.
  q.batch = decodes(64, 8192);
  line = finished(attnfold_engine, q);
  EXPECT_EQ(line.kv_loads, line.kv_bytes);
  EXPECT_NE(line.rule.find("the largest has 126;"), std::string::npos) << line.rule;
  EXPECT_EQ(line.rule.find("claimed"), std::string::npos) << line.rule;
  EXPECT_EQ(line.rule.find("tiles"), std::string::npos) << line.rule;
  // Half as many: 62 to a range, of which 6 are claimed.
  q.batch = decodes(64, 4096);
  line = finished(attnfold_engine, q);
  EXPECT_EQ(line.launched, 264);
  EXPECT_NE(line.rule.find("the largest has 64;"), std::string::npos) << line.rule;
  EXPECT_NE(line.rule.find("198 are claimed"), std::string::npos) << line.rule;
  Question prefill = question_of("llama-3-8b", {{512, 8704}});
  prefill.machine = q.machine;
  line = finished(attnfold_engine, prefill);
  EXPECT_NE(line.rule.find("tiles of 128 rows"), std::string::npos) << line.rule;
  q.switches.attnfold_workers = 8;  // one range
  EXPECT_EQ(finished(attnfold_engine, q).partial_bytes, 0);
  // What the kernel rows do not serve is said.
  q = question_of("deepseek-v3", decodes(4, 1000));
  q.machine = *find_machine("h200");
  EXPECT_FALSE(attnfold_engine(q).used);
  EXPECT_NE(attnfold_engine(q).rule.find("head_dim_qk: serves 8..256, needs 576"),
            std::string::npos)
      << attnfold_engine(q).rule;
}

TEST(Lines, TimelineNeverOverlapsOnAWorker) {
  const Question q = question_of("llama-3-8b", {{1, 9000}, {300, 4000}, {1, 100}});
  for (const Line& line : explain_call(q)) {
    std::map<int32_t, double> until;
    for (const Span& span : timeline(q, line, 100000)) {
      EXPECT_GE(span.worker, 0);
      EXPECT_LT(span.worker, q.machine.sms);
      EXPECT_GE(span.begin_us, until[span.worker]) << line.engine;
      EXPECT_GT(span.end_us, span.begin_us) << line.engine;
      until[span.worker] = span.end_us;
    }
  }
}

TEST(Questions, UnsoundOnesNameWhatIsWrong) {
  const auto problem = [](auto&& change) {
    Question q = question_of("llama-3-8b", decodes(2, 100));
    change(q);
    return question_problem(q);
  };
  EXPECT_EQ(problem([](Question&) {}), "");
  EXPECT_NE(problem([](Question& q) { q.batch.clear(); }).find("batch"), std::string::npos);
  EXPECT_NE(problem([](Question& q) { q.batch[1].q = 101; }).find("got 101"), std::string::npos);
  EXPECT_NE(problem([](Question& q) { q.batch[0].kv = 0; }).find("context"), std::string::npos);
  EXPECT_NE(problem([](Question& q) { q.windowed = true; }).find("no windowed"), std::string::npos);
  EXPECT_NE(problem([](Question& q) { q.shared_prefix = 101; }).find("0..100"), std::string::npos);
  EXPECT_NE(problem([](Question& q) { q.machine.sms = 0; }).find("sms"), std::string::npos);
  EXPECT_NE(problem([](Question& q) { q.machine.flop_per_s = 0; }).find("peak"), std::string::npos);
}

}  // namespace
}  // namespace attnfold::explain
