#include "tuning/tuned_file.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "flash_attention/error.h"
#include "flash_attention/tune.h"
#include "flash_attention/version.h"
#include "support/folder.h"
#include "tuning/problem_json.h"
#include "tuning/recorder.h"
#include "tuning/store.h"

namespace flash_attention::tuning {
namespace {

using testing::TemporaryFolder;
using testing::write_text;

/// A problem with every field that is not the default one.
Problem crowded() {
  Problem p{.batch = 3, .seq_q = 1, .seq_kv = 5000, .heads_q = 8, .heads_kv = 2, .head_dim = 64, .head_dim_v = 32};
  p.dtype = Dtype::float16;
  p.kv_dtype = Dtype::int8;
  p.kv_scales = ScaleKind::token;
  p.scale = 0.1f;
  p.softcap = 30;
  p.window_left = 100;
  p.alignment = Alignment::top_left;
  p.bias = {.present = true, .dtype = Dtype::bfloat16, .batch_stride = 0, .head_stride = 5000, .q_stride = 0};
  p.page_size = 16, p.num_pages = 1000;
  p.q_strides = {512, 512, 64};
  p.program = "let x = s\nret x";
  p.program_sizes[1] = {1, 2, 3, 4};
  p.program_gradients = 5;
  p.precision = Precision::tf32;
  p.hidden_rows = {.bounds = 2, .batch_stride = 7, .head_stride = 1};
  p.block_mask = {.block_q = 128, .block_kv = 64, .batch_stride = 1, .head_stride = 2, .q_stride = 3};
  return p;
}

DeviceInfo gpu() {
  DeviceInfo info;
  info.device = {.kind = DeviceKind::cuda};
  info.name = "NVIDIA RTX 4090";
  info.arch = 89, info.num_sms = 128;
  return info;
}

TunedFile sample() {
  const Problem plain{.batch = 2, .seq_q = 512, .seq_kv = 512, .head_dim = 64, .head_dim_v = 64};
  return {.place = place_of(gpu(), "13000"),
          .entries = {{plain, Pass::forward, {{"forward/sm80", 64, 128, 0, 0}, "forward/sm80, 128 x 64", 1.125, 0.011}},
                      {crowded(), Pass::forward, {{}, "forward/portable, 16 x 64", 1, 0.02}},
                      {plain, Pass::backward, {{"backward/sm80", 0, 0, 1, 0}, "backward/sm80, 64 x 64", 1.5, 0.25}}},
          .verdicts = {{"forward/sm80", Pass::forward, true, ""},
                       {"backward/sm80", Pass::backward, false, "dq[3] is \"NaN\"\nand should be 1"}}};
}

std::string refusal(const std::string& text) {
  try {
    parse_tuned(text, "f.json");
    return "taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
}

TEST(ProblemJson, comes_back_field_by_field) {
  for (const Problem& problem : {Problem{}, crowded()}) {
    const std::string text = to_json(problem).text();
    EXPECT_EQ(problem_of(support::JsonValue::parse(text, "x"), "x"), problem) << text;
  }
  EXPECT_EQ(to_json(Problem{}).text(), "{}");
}

TEST(ProblemJson, refuses_by_name) {
  const auto message = [](const std::string& text) {
    try {
      problem_of(support::JsonValue::parse(text, "p"), "p");
      return std::string("taken");
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  EXPECT_EQ(message(R"({"seq": 5})"), "p.seq: a problem has no such field");
  EXPECT_EQ(message(R"({"seq_q": "5"})"), "p.seq_q: expected a whole number");
  EXPECT_EQ(message(R"({"seq_q": 5.5})"), "p.seq_q: expected a whole number");
  EXPECT_EQ(message(R"({"seq_q": 1e30})"), "p.seq_q: expected a whole number");
  EXPECT_EQ(message(R"({"causal": 1})"), "p.causal: expected true or false");
  EXPECT_EQ(message(R"({"dtype": "bf16"})"),
            "p.dtype: got 'bf16', allowed: float32, float16, bfloat16, float8_e4m3, float8_e5m2, int8");
  EXPECT_EQ(message(R"({"q_strides": [1, 2]})"), "p.q_strides: expected three strides");
  EXPECT_EQ(message("[]"), "p: expected a problem: an object with sizes and options");
}

TEST(TunedFile, comes_back) {
  const TunedFile file = sample(), back = parse_tuned(to_text(file), "f.json");
  EXPECT_EQ(back.place, file.place);
  EXPECT_EQ(back.verdicts[0], file.verdicts[0]);
  EXPECT_EQ(back.verdicts[1].passed, false);
  ASSERT_EQ(back.entries.size(), file.entries.size());
  for (const plan::Tuned::Entry& entry : file.entries) {
    const auto same = [&](const plan::Tuned::Entry& one) {
      return one.problem == entry.problem && one.pass == entry.pass && one.tuned == entry.tuned;
    };
    EXPECT_EQ(std::ranges::count_if(back.entries, same), 1);
  }
  EXPECT_EQ(to_text(back).substr(0, 200), to_text(file).substr(0, 200));
}

TEST(TunedFile, does_not_depend_on_the_order_of_its_entries) {
  TunedFile file = sample();
  const std::string text = to_text(file);
  std::ranges::reverse(file.entries);
  EXPECT_EQ(to_text(file), text);
}

/// Every byte counts: a change of any is noticed.
TEST(TunedFile, refuses_what_is_damaged) {
  const std::string text = to_text(sample());
  for (std::size_t i = 0; i < text.size(); i += 7) {
    std::string damaged = text;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    const std::string what = refusal(damaged);
    EXPECT_TRUE(what.starts_with("f.json: it is ")) << i << ": " << what;
  }
  for (std::size_t size = 0; size < text.size(); size += 31) EXPECT_NE(refusal(text.substr(0, size)), "taken") << size;
  EXPECT_NE(refusal(text + "\n"), "taken");
  EXPECT_TRUE(refusal("{\"results\": []}").starts_with("f.json: it is no file of tuned choices"));
}

TEST(TunedFile, refuses_another_device_and_another_version) {
  const auto message = [](const Place& there, const Place& here) -> std::string {
    try {
      require_place({.place = there, .entries = {}, .verdicts = {}}, here, "f.json");
      return "taken";
    } catch (const Error& error) {
      return error.what();
    }
  };
  const Place here = place_of(gpu(), "13000");
  Place there = here;
  there.driver = "12080";
  EXPECT_EQ(message(there, here), "taken");
  there.name = "NVIDIA A100", there.arch = 80, there.num_sms = 108;
  EXPECT_EQ(message(there, here),
            "f.json: it was measured on NVIDIA A100 (sm_80, 108 SMs), and this is NVIDIA RTX 4090 (sm_89, 128 SMs)");
  there = here;
  there.library = "0.0.1";
  EXPECT_EQ(message(there, here),
            "f.json: it is of version 0.0.1 of the library, and this is " FLASH_ATTENTION_VERSION);
}

TEST(TunedStore, takes_what_is_intact_and_of_this_place_alone) {
  const TemporaryFolder folder;
  const TunedFile file = sample();
  const auto path = file_of(folder.path(), file.place);
  EXPECT_TRUE(load(path, file.place).entries.empty());
  write_text(path, to_text(file));
  EXPECT_EQ(load(path, file.place).entries.size(), 3u);
  Place other = file.place;
  other.num_sms = 56;
  EXPECT_TRUE(load(path, other).entries.empty());
  EXPECT_NE(file_of(folder.path(), other), path);
  write_text(path, to_text(file) + "x");
  EXPECT_TRUE(load(path, file.place).entries.empty());
}

TEST(TunedStore, a_later_choice_replaces_an_earlier_one) {
  TunedFile file = sample();
  plan::Tuned::Entry later = file.entries[0];
  later.tuned = {{"forward/sm80", 32, 32, 0, 0}, "forward/sm80, 128 x 64", 2, 0.01};
  merge(file, {later}, {{"backward/sm80", Pass::backward, true, ""}});
  EXPECT_EQ(file.entries.size(), 3u);
  EXPECT_EQ(file.entries[0].tuned.gain, 2);
  ASSERT_EQ(file.verdicts.size(), 2u);
  EXPECT_TRUE(file.verdicts[1].passed);
}

TEST(TuneCases, are_read_from_an_array_and_from_lines_and_each_once) {
  const std::string one = R"({"pass": "forward", "problem": {"seq_q": 5, "seq_kv": 6, "head_dim": 8}})";
  const std::string two = R"({"pass": "backward", "problem": {"seq_q": 5, "seq_kv": 6, "head_dim": 8}})";
  EXPECT_EQ(parse_tune_cases("[" + one + ",\n" + two + "," + one + "]", "f").size(), 2u);
  EXPECT_EQ(parse_tune_cases(one + "\n\n" + two + "\n" + one, "f").size(), 2u);
  const auto message = [](const std::string& text) -> std::string {
    try {
      parse_tune_cases(text, "f");
      return "taken";
    } catch (const Error& error) {
      return error.what();
    }
  };
  EXPECT_EQ(message(""), "f: there are no problems in it");
  EXPECT_EQ(message(one + "\n{\"pass\": \"sideways\", \"problem\": {}}"),
            "f, line 2: pass: got 'sideways', allowed: forward, backward");
  EXPECT_EQ(message(R"({"pass": "forward", "problem": {}, "seconds": 1})"),
            "f, line 1: a case has 'pass' and 'problem', and no 'seconds'");
  EXPECT_EQ(message(std::string(100000, '[')), "f: not JSON at character 64");
}

TEST(Recorder, writes_each_problem_once_as_cases) {
  const TemporaryFolder folder;
  const auto file = folder / "calls.jsonl";
  for (int round = 0; round < 3; ++round) {
    record(file, crowded(), Pass::forward);
    record(file, crowded(), Pass::backward);
    record(file, Problem{.seq_q = 3}, Pass::standard_forward);
  }
  const std::vector<TuneCase> cases = parse_tune_cases(testing::read_text(file), "calls");
  ASSERT_EQ(cases.size(), 2u);
  EXPECT_EQ(cases[0].problem, crowded());
  EXPECT_EQ(cases[1].pass, Pass::backward);
  const std::string text = testing::read_text(file);
  EXPECT_EQ(std::ranges::count(text, '\n'), 2);
}

}  // namespace
}  // namespace flash_attention::tuning
