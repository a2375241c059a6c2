#include "tuning/cases.h"

#include <algorithm>

#include "flash_attention/error.h"
#include "support/json_value.h"
#include "tuning/problem_json.h"

namespace flash_attention::tuning {
namespace {

using support::JsonValue;

void add_case(const JsonValue& json, const std::string& name, std::vector<TuneCase>& cases) {
  for (const auto& [member, value] : json.members()) {
    if (member != "pass" && member != "problem")
      throw Error(ErrorCode::invalid_argument, name + ": a case has 'pass' and 'problem', and no '" + member + "'");
  }
  const TuneCase found{problem_of(json["problem"], name + ": problem"), pass_of(json["pass"].text(), name + ": pass")};
  const auto same = [&](const TuneCase& one) { return one.pass == found.pass && one.problem == found.problem; };
  if (std::ranges::none_of(cases, same)) cases.push_back(found);
}

Problem sized(std::int64_t batch, std::int64_t heads_q, std::int64_t heads_kv, std::int64_t seq, std::int64_t head_dim,
              Dtype dtype) {
  Problem problem;
  problem.batch = batch;
  problem.heads_q = heads_q;
  problem.heads_kv = heads_kv;
  problem.seq_q = problem.seq_kv = seq;
  problem.head_dim = problem.head_dim_v = head_dim;
  problem.dtype = dtype;
  return problem;
}

/// One token of each sequence against a cache.
Problem decoding(std::int64_t batch, std::int64_t seq_kv, std::int64_t head_dim, Dtype dtype) {
  Problem problem = sized(batch, 32, 8, seq_kv, head_dim, dtype);
  problem.seq_q = 1;
  problem.seqused_kv = problem.causal = true;
  return problem;
}

}  // namespace

std::vector<TuneCase> parse_cases(std::string_view text, const std::string& name) {
  std::vector<TuneCase> cases;
  const std::size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin != std::string_view::npos && text[begin] == '[') {
    const JsonValue all = JsonValue::parse(text, name);
    for (const JsonValue& json : all.items()) add_case(json, name, cases);
  } else {
    for (std::size_t line = 1; !text.empty(); ++line) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      const std::string place = name + ", line " + std::to_string(line);
      if (text.substr(0, end).find_first_not_of(" \t\r") != std::string_view::npos)
        add_case(JsonValue::parse(text.substr(0, end), place), place, cases);
      text.remove_prefix(std::min(end + 1, text.size()));
    }
  }
  if (cases.empty()) throw Error(ErrorCode::invalid_argument, name + ": there are no problems in it");
  return cases;
}

std::vector<TuneCase> usual_cases(const DeviceInfo& device) {
  std::vector<TuneCase> cases;
  const auto add_training = [&](Problem problem) {
    for (const bool causal : {false, true}) {
      problem.causal = causal;
      for (const Pass pass : {Pass::forward, Pass::backward}) cases.push_back({problem, pass});
    }
  };
  if (!device_traits(device.device).gpu_kernels) {
    for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16}) {
      for (const std::int64_t seq : {256, 1024}) add_training(sized(1, 8, 8, seq, 64, dtype));
      for (const std::int64_t batch : {1, 8}) cases.push_back({decoding(batch, 2048, 128, dtype), Pass::forward});
    }
    return cases;
  }
  for (const std::int64_t head_dim : {128, 64}) {
    for (const std::int64_t seq : {512, 2048, 8192})
      add_training(sized(16384 / seq, 2048 / head_dim, 2048 / head_dim, seq, head_dim, Dtype::bfloat16));
  }
  add_training(sized(4, 8, 8, 4096, 256, Dtype::bfloat16));
  for (const std::int64_t batch : {1, 8, 64}) {
    for (const std::int64_t seq_kv : {1024, 8192}) cases.push_back({decoding(batch, seq_kv, 128, Dtype::bfloat16), Pass::forward});
  }
  return cases;
}

}  // namespace flash_attention::tuning
