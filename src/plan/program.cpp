#include "plan/program.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "plan/families/portable.h"
#include "plan/kernel_config.h"
#include "plan/workspace.h"
#include "program/sizes.h"
#include "program/source.h"

namespace flash_attention::plan {
namespace {

/// Whether a launch is the same for every program.
bool is_without_program(const Launch& launch) {
  if (launch.unit == "backward/delta" || launch.unit == "backward/sm90/prepare") return true;
  const auto* config = config_of<abi::ForwardConfig>(launch);
  return config != nullptr && !config->features.score_program && !config->features.mask_program;
}

// One source for all short sequences, and one for all others: a program is compiled once for all lengths.
constexpr std::int64_t short_sequence = 1 << 22;

}  // namespace

void add_program_gradients(const Problem& problem, const abi::BackwardConfig& config, Plan& plan) {
  if (problem.program_gradients == 0) return;
  const program::GradientLayout layout = program::gradient_layout(problem, *program::parsed(problem.program));
  reserve(plan, abi::SharedRegion::program_gradients, layout.bytes);
  constexpr int block = 64, threads = 256;
  const std::int64_t tiles = (problem.seq_q + block - 1) / block * problem.heads_q * problem.batch;
  const std::int64_t elements = std::clamp<std::int64_t>(layout.bytes / 8 / threads, 1, 1024);
  const auto add = [&](const char* entry, std::int64_t blocks, int shared_bytes) {
    add_launch(plan,
               {.unit = "backward/program_gradients",
                .entry = entry,
                .config = launch_config(config),
                .block = threads,
                .shared_bytes = shared_bytes},
               blocks);
  };
  add("backward_program_clear", elements, 0);
  add("backward_program_limits", tiles, portable_shared_bytes);
  add("backward_program_sums", tiles, portable_shared_bytes);
  add("backward_program_finish", elements, 0);
}

ProgramTraits traits_of_program(const Problem& problem) {
  const auto known = program::parsed(problem.program);
  const program::Program& parsed = *known;
  ProgramTraits traits{.score = parsed.score >= 0, .visible = parsed.visible >= 0};
  std::vector<int> roots{parsed.score};
  const std::vector<program::Node> nodes = program::slice(parsed.nodes, roots);
  std::vector<bool> varies(nodes.size(), false);  // from score to score
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    using program::Op;
    varies[n] = nodes[n].op == Op::i || nodes[n].op == Op::j || nodes[n].op == Op::score;
    for (const int arg : nodes[n].args) varies[n] = varies[n] || (arg >= 0 && varies[static_cast<std::size_t>(arg)]);
    traits.loads_scores = traits.loads_scores || (nodes[n].op == Op::load && varies[n]);
    traits.values += varies[n];
    traits.calls = traits.calls || nodes[n].op == Op::sin || nodes[n].op == Op::cos;
    const program::Node& node = nodes[n];
    const bool real = node.type == program::Type::real;
    const bool divides = node.op == Op::div && varies[static_cast<std::size_t>(node.args[1])];
    traits.hides = traits.hides || node.op == Op::log || divides || (node.op == Op::load && real && varies[n]) ||
                   (node.op == Op::literal && real && !std::isfinite(node.real));
  }
  return traits;
}

void add_program_source(const Problem& problem, Plan& plan) {
  if (problem.program.empty() || plan.launches.empty()) return;
  program::Program parsed = *program::parsed(problem.program);
  program::SourceOptions options{.gradients = problem.program_gradients};
  for (int n = 0; n < static_cast<int>(parsed.tensors.size()); ++n) {
    if (program::num_elements(problem, parsed, n) == 0) options.empty |= 1u << n;
  }
  const std::int64_t tile = 1024;  // indices of a tile may exceed the end
  if (std::max(problem.seq_q, problem.seq_kv) + tile <= short_sequence) options.longest = short_sequence;
  const std::string source = program::cuda_source(std::move(parsed), options);
  for (Launch& launch : plan.launches) {
    if (!is_without_program(launch)) launch.prelude = source;
  }
}

}  // namespace flash_attention::plan
