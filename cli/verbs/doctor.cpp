#include <cstdio>

#include "cli/output/format.h"
#include "cli/output/report.h"
#include "cli/output/terminal.h"
#include "cli/verb.h"
#include "flash_attention/runtime.h"

namespace flash_attention::cli {
namespace {

/// A small problem that takes every path of a kernel once: a tail in both lengths, grouped heads, a causal diagonal.
Problem self_test_problem(Dtype dtype) {
  Problem problem;
  problem.batch = 2;
  problem.seq_q = 67;
  problem.seq_kv = 131;
  problem.heads_q = 4;
  problem.heads_kv = 2;
  problem.head_dim = 64;
  problem.head_dim_v = 64;
  problem.dtype = dtype;
  problem.causal = true;
  return problem;
}

/// Runs one pass in one element type and turns the outcome, also a refusal, into a finding.
Finding self_test(const DeviceInfo& info, Dtype dtype, Pass pass) {
  Finding finding;
  finding.subject = format("self-test %s %s %s", to_string(info.device).c_str(), std::string(to_string(pass)).c_str(),
                           std::string(to_string(dtype)).c_str());
  try {
    Options options;
    options.device = info.device;
    const Measurement m = measure(self_test_problem(dtype), pass, options, {.seconds = 0, .max_samples = 0});
    finding.ok = m.ok();
    finding.detail = m.kernel + ", largest error against fp64 " + describe(m.accuracy);
    if (!finding.ok) finding.advice = "please report this with the output of `flash-attention doctor --json`";
  } catch (const Error& error) {
    finding.detail = error.what();
    finding.advice = "`flash-attention run` with the same device shows the error alone";
  }
  return finding;
}

std::vector<Finding> self_tests() {
  std::vector<Finding> findings;
  Progress progress;
  for (const DeviceInfo& info : devices()) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
        if (interrupted()) return findings;
        progress.show("self-test on " + to_string(info.device) + " ...");
        findings.push_back(self_test(info, dtype, pass));
      }
    }
  }
  return findings;
}

void print(const Finding& finding, const char* bad) {
  std::printf("%s  %-40s %s\n", finding.ok ? "ok     " : bad, finding.subject.c_str(), finding.detail.c_str());
  if (!finding.ok && !finding.advice.empty()) std::printf("         -> %s\n", finding.advice.c_str());
}

int doctor(const Arguments& arguments) {
  const std::vector<Finding> found = diagnose();
  const std::vector<Finding> tested = self_tests();
  bool healthy = true;
  for (const Finding& finding : tested) healthy = healthy && finding.ok;
  if (arguments.on("json")) {
    Json list = Json::array();
    for (const std::vector<Finding>* findings : {&found, &tested}) {
      for (const Finding& finding : *findings) {
        Json entry = Json::object();
        entry.add("subject", finding.subject)
            .add("ok", finding.ok)
            .add("detail", finding.detail)
            .add("advice", finding.advice);
        list.push(entry);
      }
    }
    Json json = Json::object();
    std::puts(
        json.add("best_device", to_string(best_device())).add("healthy", healthy).add("findings", list).text().c_str());
  } else {
    for (const Finding& finding : found) print(finding, "missing");
    for (const Finding& finding : tested) print(finding, "FAILED ");
    std::printf("\nbest device here: %s\n", describe(device_info(best_device())).c_str());
  }
  return healthy ? ok : check_failed;
}

}  // namespace

const Verb doctor_verb{
    "doctor",
    "what this machine has, what is missing, and a self-test of each device",
    "Looks at the CPU, its instruction sets and threads, the NVIDIA driver, NVRTC, each GPU and the kernel cache; then\n"
    "runs a small forward and backward pass in every element type on every device and compares with fp64.\n"
    "A missing GPU is not an error. A self-test that fails is one: the exit code is then 1.\n",
    0,
    {{"json", "", "print JSON"}},
    doctor};

}  // namespace flash_attention::cli
