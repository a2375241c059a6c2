#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>

#include "cli/measure/measure.h"
#include "cli/measure/workload.h"
#include "cli/output/format.h"
#include "cli/output/json.h"
#include "cli/output/terminal.h"
#include "cli/problem/problem_flags.h"
#include "cli/trace/page.h"
#include "cli/verb.h"
#include "emulator/host/seed.h"
#include "flash_attention/error.h"

namespace flash_attention::cli {
namespace {

Pass traced_pass(const Arguments& arguments) {
  const std::string word = arguments.words().empty() ? "forward" : arguments.words().front();
  if (word != "forward" && word != "backward" && word != "decode") {
    throw Error(ErrorCode::invalid_argument,
                "trace: got '" + word + "'; allowed are forward, backward and decode (forward with one query)");
  }
  return word == "backward" ? Pass::backward : Pass::forward;
}

/// The launch that does the work: the one whose blocks have most shared memory.
std::size_t main_launch(const Plan& plan) {
  const auto most = std::max_element(plan.launches.begin(), plan.launches.end(),
                                     [](const Launch& a, const Launch& b) { return a.shared_bytes < b.shared_bytes; });
  return static_cast<std::size_t>(most - plan.launches.begin());
}

Device emulated_device(const Arguments& arguments) {
  return {.kind = DeviceKind::emulator, .emulated_arch = arguments.given("arch") ? arch_from(arguments.text("arch")) : 90};
}

int sms_of(const Device& device) { return emulator::machine_of(device.emulated_arch).num_sms; }

/// Fills in the lse that backward reads, as no forward pass was run: about right, so that probabilities are.
void stand_in_for_forward(const Workload& work) {
  auto* lse = static_cast<float*>(work.lse.host());
  std::fill_n(lse, work.lse.bytes() / sizeof(float), std::log(static_cast<float>(work.problem.seq_kv)));
}

std::vector<emulator::LaunchRecord> record_launches(const Problem& problem, const Options& options, Pass pass,
                                                    emulator::RecordRequest request, bool sampled) {
  Workload work = make_workload(problem, options, pass == Pass::backward);
  if (sampled) {
    request.alone = true;
    if (pass == Pass::backward) stand_in_for_forward(work);
  } else if (pass == Pass::backward) {
    run_forward(work);
  }
  const auto workspace = attach_workspace(work, pass);
  emulator::start_recording(request);
  try {
    call(work, pass);
  } catch (...) {
    emulator::stop_recording();
    throw;
  }
  return emulator::stop_recording();
}

void write_trace(const std::string& file, const std::string& text) {
  std::ofstream stream(file, std::ios::binary);
  if (!(stream << text).flush()) throw Error(ErrorCode::unavailable, "trace: cannot write " + file);
}

Json describe_launch(const TracedLaunch& launch) {
  Json units = Json::object();
  for (int u = 0; u < emulator::num_units; ++u) {
    units.add(to_string(static_cast<emulator::Unit>(u)),
              launch.timeline.busy[static_cast<std::size_t>(u)] / launch.timeline.clocks);
  }
  Json json = Json::object();
  json.add("unit", launch.record.unit).add("clocks", launch.timeline.clocks).add("waiting", launch.timeline.waiting);
  json.add("predicted_s", launch.prediction.seconds).add("bound", launch.prediction.bound);
  return json.add("resident", launch.prediction.resident).add("busy", units);
}

int trace(const Arguments& arguments) {
  const Pass pass = traced_pass(arguments);
  Problem problem = problem_from(arguments);
  if (!arguments.words().empty() && arguments.words().front() == "decode") problem.seq_q = 1;
  Options options;
  options.device = emulated_device(arguments);
  const KernelChoice choice = kernel_from(arguments);
  options.kernel = choice.name, options.tile = choice.tile;
  const int num_sms = arguments.given("sms") ? static_cast<int>(arguments.integer("sms", 1, sms_of(options.device))) : 0;
  emulator::set_num_sms(num_sms);
  const DeviceInfo info = device_info(options.device);
  const emulator::Machine machine = emulator::machine_of(info.arch, num_sms);
  const Plan plan = make_plan(problem, pass, info, options.kernel, options.tile);
  const bool sampled = arguments.on("sampled");
  if (sampled && (plan.mask.present || (pass == Pass::forward && plan.zeroed_bytes > 0))) {
    throw Error(ErrorCode::invalid_argument,
                "sampled: blocks of " + plan.kernel +
                    " need each other here (a counter of tiles, or a map that a launch "
                    "makes); allowed without --sampled, with --sms for a part of the GPU and of the problem");
  }
  emulator::RecordRequest request{.clusters = static_cast<int>(arguments.integer("samples", 1, 4096))};
  if (arguments.given("block")) request.only = arguments.integer("block", 0);

  Progress progress;
  progress.show("recording " + plan.kernel + " in the emulator ...");
  std::vector<TracedLaunch> launches;
  for (emulator::LaunchRecord& launch : record_launches(problem, options, pass, request, sampled)) {
    progress.show("laying out " + launch.unit + " ...");
    if (launch.blocks.empty()) {
      throw Error(ErrorCode::invalid_argument, "block: got " + arguments.text("block") + "; " + launch.unit + " has " +
                                                   std::to_string(launch.num_blocks() / launch.cluster) +
                                                   " (blocks of a cluster count as one)");
    }
    const std::span<const emulator::BlockRecord> cluster{launch.blocks.data(), static_cast<std::size_t>(launch.cluster)};
    TracedLaunch traced{
        .record = {},
        .timeline = lay_out(cluster, machine, share_of(launch, machine), launches.size() == main_launch(plan)),
        .prediction = predict(launch, machine)};
    traced.record = std::move(launch);
    launches.push_back(std::move(traced));
  }
  progress.clear();
  const TracedLaunch& main = launches[main_launch(plan)];

  double seconds = 0;
  Json list = Json::array();
  Table table({"launch", "blocks", "on an SM", "clocks a block", "by the model", "bound by"});
  for (const TracedLaunch& launch : launches) {
    seconds += launch.prediction.seconds;
    list.push(describe_launch(launch));
    table.add({launch.record.unit, std::to_string(launch.record.num_blocks()), std::to_string(launch.prediction.resident),
               format("%.0f", launch.prediction.block_clocks), format_seconds(launch.prediction.seconds),
               launch.prediction.bound});
  }
  const std::string title = plan.kernel + ", " + describe(problem);
  if (arguments.given("output")) write_trace(arguments.text("output"), chrome_trace(main, machine));
  if (arguments.given("page")) write_trace(arguments.text("page"), trace_page(title, main, machine));
  if (arguments.on("json")) {
    Json json = Json::object();
    json.add("kernel", plan.kernel).add("machine", machine.name).add("predicted_s", seconds).add("launches", list);
    std::puts(json.text().c_str());
    return interrupted() ? interrupted_by_user : ok;
  }
  std::printf("problem  %s\nkernel   %s, tiles of %d x %d\nmachine  the rates of an %s; no time here was measured\n\n%s\n",
              describe(problem).c_str(), plan.kernel.c_str(), plan.block_q, plan.block_kv, machine.name,
              table.text().c_str());
  std::printf("Units while a block of %s runs:\n", main.record.unit.c_str());
  for (int u = 0; u < emulator::num_units; ++u) {
    const auto unit = static_cast<emulator::Unit>(u);
    std::printf("  %-18s %3.0f %%%s\n", to_string(unit),
                100 * main.timeline.busy[static_cast<std::size_t>(u)] / main.timeline.clocks,
                unit == main.timeline.critical ? "  the busiest" : "");
  }
  std::printf("  %-18s %3.0f %%\n", "warps that wait", 100 * main.timeline.waiting);
  if (arguments.given("output"))
    std::printf("\n%s: open it in ui.perfetto.dev or chrome://tracing\n", arguments.text("output").c_str());
  if (arguments.given("page"))
    std::printf("\n%s: open it in a browser; it needs no network\n", arguments.text("page").c_str());
  return interrupted() ? interrupted_by_user : ok;
}

}  // namespace

const Verb trace_verb{
    "trace",
    "a kernel's block in time, warp by warp, laid out from what the emulator records",
    "Runs the problem in the emulator, which writes down what each warp of a block did: copies, products, exponentials,\n"
    "waits. A model with the rates of a GPU puts that in time. The rates are those of data sheets and micro-benchmarks;\n"
    "docs/trace.md compares the model with an H200. Nothing is measured here, and no GPU is needed.\n"
    "\n"
    "Examples:\n"
    "  flash-attention trace --dtype bf16 --seq-q 1024 --heads 1 --page trace.html        a block as a page\n"
    "  flash-attention trace backward --dtype bf16 --seq-q 512 --heads 1 --output t.json  for Perfetto\n"
    "  flash-attention trace decode --dtype bf16 --seq-kv 4096 --heads 8 --kv-heads 1\n"
    "  flash-attention trace --dtype bf16 --seq-q 4096 --heads 1 --sms 2 --causal         one head on 2 SMs stands for 64 "
    "on all\n",
    1,
    problem_flags() + std::vector<Flag>{{"output", "FILE", "the trace as JSON, for Perfetto and chrome://tracing"},
                                        {"page", "FILE", "the trace as a page"},
                                        {"block", "N", "record this block of each launch, or this cluster of blocks"},
                                        {"samples", "N", "record so many, evenly over the grid; the first is drawn", "1"},
                                        {"sms", "N", "a GPU of so many SMs, with their share of L2 and memory"},
                                        {"sampled", "", "run the recorded blocks alone; results are not complete"},
                                        {"json", "", "print JSON"}},
    trace};

}  // namespace flash_attention::cli
