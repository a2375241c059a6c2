#include "cli/stress/stress_source.h"

#include <algorithm>

#include "cli/ladder/rung.h"
#include "flash_attention/attention.h"
#include "flash_attention/error.h"
#include "fuzz/generator/vary.h"

namespace flash_attention::cli {
namespace {

constexpr int problems_of_configuration = 20;  // compiling it takes longer than to run them
constexpr int max_draws = 30;                  // of variants for one that needs no other kernels

/// What arrays draw from, one seed after another: what each pass takes, and what the fastest kernels take, since they would
/// see few of the problems of all.
std::vector<std::string> domains_of(const StressOptions& options) {
  if (!options.domain.empty()) return {options.domain};
  if (!options.kernel.empty()) return {options.kernel};
  if (!device_traits(options.device).gpu_kernels)
    return {"cpu/backward", "cpu/prefill", "backward/listed", "forward/listed"};
  const int arch = device_info(options.device).arch;
  const std::string fastest = arch >= 90 ? "/sm90" : "/sm80";
  std::vector<std::string> domains{"backward" + fastest, "forward" + fastest, "decode" + fastest, "decode/sm80",
                                   "forward/portable",   "backward/portable", "forward/tf32",     "backward/tf32",
                                   "forward/listed",     "backward/listed"};
  if (arch >= 89) domains.push_back("forward/sm89_fp8");
  if (fastest == "/sm90") domains.insert(domains.end(), {"forward/sm90_fp8", "decode/mla_sm90"});
  return domains;
}

}  // namespace

std::vector<testing::Target> targets_of(const testing::Case& c, const StressOptions& options) {
  std::vector<testing::Target> targets;
  const Problem& p = c.problem;
  const bool forward_alone = p.page_size != 0 || p.left_padding || p.kv_dtype.has_value() || p.latent ||
                             p.bit_mask.kind != BitMaskKind::none || p.sequence_windows;
  const auto add = [&](const std::string& kernel, Pass pass) {
    if (forward_alone && pass != Pass::forward) return;
    const testing::Target target{.device = options.device, .kernel = kernel, .pass = pass};
    if (testing::rejection(c, target).empty()) targets.push_back(target);
  };
  if (options.kernel.empty() && !options.every_kernel) {
    for (const Pass pass : {Pass::forward, Pass::backward}) add("", pass);
    return targets;
  }
  const bool on_gpu = device_traits(options.device).gpu_kernels;
  for (const KernelSummary& kernel : kernels()) {
    const bool flash = (kernel.pass == Pass::forward || kernel.pass == Pass::backward) && !is_rung(kernel.name);
    if (options.every_kernel ? flash && device_traits(kernel.device).gpu_kernels == on_gpu : kernel.name == options.kernel)
      add(kernel.name, kernel.pass);
  }
  return targets;
}

std::set<std::string> kernels_of(const testing::Case& c, const std::vector<testing::Target>& targets) {
  std::set<std::string> texts;
  for (const testing::Target& target : targets) {
    Plan plan;
    try {
      plan = make_plan(c.problem, target.pass, device_info(target.device), target.kernel);
    } catch (const Error&) {  // the call itself will say it, and is a difference
    }
    for (const Launch& launch : plan.launches) {
      texts.insert(launch.unit + " " + launch.entry + " " + to_source(launch.config) + " " + std::to_string(launch.block) +
                   " " + std::to_string(launch.min_blocks_per_sm) + launch.prelude);
    }
  }
  return texts;
}

std::string domain_of_seed(std::uint64_t seed, const StressOptions& options) {
  const std::vector<std::string> domains = domains_of(options);
  return domains[seed % domains.size()];
}

StressSource::StressSource(const StressOptions& options) : options_(options) {
  for (std::size_t n = 0; n < domains_of(options).size(); ++n) arrays_.push_back({.seed = options.seed + n});
}

std::vector<fuzz::GeneratedProblem> StressSource::array_of(std::uint64_t seed) const {
  return fuzz::problems(domain_of_seed(seed, options_), problems_of_configuration, seed);
}

bool StressSource::next(fuzz::GeneratedProblem& problem) {
  if (options_.only >= 0) return the_only(problem);
  if (next_variant(problem)) return true;
  if (!next_of_arrays(problem)) return false;
  if (options_.variants > 1) {
    first_ = problem;
    compiled_ = kernels_of(problem.c, targets_of(problem.c, options_));
    const bool nothing_runs = compiled_.empty() && device_traits(options_.device).gpu_kernels;  // an empty batch
    variants_left_ = nothing_runs ? 0 : options_.variants - 1, drawn_ = 0;
  }
  return true;
}

bool StressSource::the_only(fuzz::GeneratedProblem& problem) {
  if (given_) return false;
  given_ = true;
  const std::vector<fuzz::GeneratedProblem> all = array_of(options_.seed);
  if (options_.only >= static_cast<std::int64_t>(all.size())) return false;
  problem = all[static_cast<std::size_t>(options_.only)];
  if (options_.variant > 0)
    problem = fuzz::vary(problem, fuzz::domain_of(domain_of_seed(problem.seed, options_)), problems_of_configuration,
                         options_.variant);
  return true;
}

bool StressSource::next_of_arrays(fuzz::GeneratedProblem& problem) {
  for (;;) {
    Array& array = arrays_[turn_];
    if (array.problems.empty()) array.problems = array_of(array.seed);
    const bool ours = configuration_ % options_.parts == options_.part;
    problem = array.problems[array.at++];
    if (array.at % problems_of_configuration == 0) turn_ = (turn_ + 1) % arrays_.size(), ++configuration_;
    if (array.at == array.problems.size()) array = {.seed = array.seed + arrays_.size()};
    if (ours) return true;
  }
}

bool StressSource::next_variant(fuzz::GeneratedProblem& problem) {
  if (variants_left_ == 0) return false;
  --variants_left_;
  const fuzz::Domain domain = fuzz::domain_of(domain_of_seed(first_.seed, options_));
  for (int draw = 0; draw < max_draws; ++draw) {
    problem = fuzz::vary(first_, domain, problems_of_configuration, ++drawn_);
    const std::set<std::string> needed = kernels_of(problem.c, targets_of(problem.c, options_));
    if (std::includes(compiled_.begin(), compiled_.end(), needed.begin(), needed.end())) return true;
  }
  problem = fuzz::vary(first_, domain, problems_of_configuration, fuzz::values_alone + drawn_);
  return true;
}

}  // namespace flash_attention::cli
