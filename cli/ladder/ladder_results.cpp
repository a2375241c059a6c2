#include "cli/ladder/ladder_results.h"

#include <chrono>
#include <ctime>

#include "cli/output/json_value.h"
#include "flash_attention/version.h"

namespace flash_attention::cli {

extern const char* const recorded_ladder;  // made by the build from bench/results/h200/ladder.json

namespace {

Json case_to_json(const Problem& p) {
  Json json = Json::object();
  json.add("batch", p.batch).add("seq", p.seq_q).add("heads", p.heads_q).add("head_dim", p.head_dim);
  json.add("heads_kv", p.heads_kv).add("causal", p.causal).add("dtype", to_string(p.dtype));
  return json.add("window", 0).add("dropout_p", 0.0).add("lengths", Json::array());
}

Problem case_from(const JsonValue& json) {
  const auto whole = [&](const char* name) { return static_cast<std::int64_t>(json[name].number()); };
  Problem p;
  p.batch = whole("batch");
  p.seq_q = p.seq_kv = whole("seq");
  p.heads_q = whole("heads");
  p.heads_kv = whole("heads_kv");
  p.head_dim = p.head_dim_v = whole("head_dim");
  p.causal = json["causal"].flag();
  p.dtype = json["dtype"].text() == "float16" ? Dtype::float16 : Dtype::bfloat16;
  return p;
}

std::string now() {
  const std::time_t time = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S+00:00", std::gmtime(&time));
  return text;
}

}  // namespace

Problem ladder_problem(bool causal) {
  Problem problem;
  problem.batch = 4;
  problem.seq_q = problem.seq_kv = 4096;
  problem.heads_q = problem.heads_kv = 16;
  problem.head_dim = problem.head_dim_v = 128;
  problem.dtype = Dtype::bfloat16;
  problem.causal = causal;
  return problem;
}

Problem in_8_bits(Problem problem) {
  problem.q_dtype = problem.kv_dtype = Dtype::float8_e4m3;
  return problem;
}

double LadderResults::tflops(const std::string& kernel, bool causal) const {
  for (const LadderRow& row : rows) {
    if (row.kernel == kernel && row.problem == ladder_problem(causal)) return row.tflops;
  }
  return 0;
}

LadderRow to_row(const Measurement& m) {
  return {m.kernel,
          m.problem,
          m.pass,
          m.timing.median_s * 1e3,
          m.timing.low_s * 1e3,
          m.timing.high_s * 1e3,
          m.timing.samples,
          m.flops_per_second() / 1e12,
          m.timing.samples > 0 ? "" : "not timed"};
}

Json to_json(const LadderResults& results, const DeviceInfo& info) {
  Json machine = Json::object(), versions = Json::object(), rows = Json::array();
  machine.add("device", results.device)
      .add("sms", info.num_sms)
      .add("memory_gb", static_cast<double>(info.memory_bytes) / 1e9);
  versions.add("flash_attention", FLASH_ATTENTION_VERSION);
  for (const LadderRow& r : results.rows) {
    Json row = Json::object();
    row.add("case", case_to_json(r.problem)).add("baseline", r.kernel).add("pass", to_string(r.pass));
    if (r.reason.empty()) {
      row.add("ms", r.ms).add("p10", r.p10).add("p90", r.p90).add("samples", r.samples).add("tflops", r.tflops);
    } else {
      row.add("reason", r.reason);
    }
    rows.push(row);
  }
  Json json = Json::object();
  json.add("format", "flash_attention.results/1").add("kind", "speed").add("machine", machine).add("versions", versions);
  json.add("commit", "").add("date", now()).add("command", "flash-attention ladder --sweep");
  return json.add("rows", rows);
}

LadderResults results_from(std::string_view text, const std::string& name) {
  LadderResults results;
  if (text.empty()) return results;
  const JsonValue json = JsonValue::parse(text, name);
  results.device = json["machine"]["device"].text();
  for (const JsonValue& row : json["rows"].items()) {
    LadderRow r;
    r.kernel = row["baseline"].text();
    r.problem = case_from(row["case"]);
    r.pass = row["pass"].text() == "backward" ? Pass::backward : Pass::forward;
    r.ms = row["ms"].number();
    r.p10 = row["p10"].number();
    r.p90 = row["p90"].number();
    r.samples = static_cast<int>(row["samples"].number());
    r.tflops = row["tflops"].number();
    r.reason = row["reason"].text();
    results.rows.push_back(std::move(r));
  }
  return results;
}

LadderResults recorded_results() { return results_from(recorded_ladder, "the recorded ladder"); }

}  // namespace flash_attention::cli
