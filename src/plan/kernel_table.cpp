#include "plan/kernel_table.h"

#include <algorithm>
#include <vector>

#include "flash_attention/error.h"
#include "plan/masks.h"
#include "plan/program.h"
#include "plan/request.h"

namespace flash_attention::plan {

std::span<const KernelEntry> kernel_table() {
  // Never destroyed: a call may come from a destructor at the end of the process.
  static const std::vector<KernelEntry>& table = *[] {
    auto& rows = *new std::vector<KernelEntry>;
    for (auto family : {cpu_kernels, mla_kernels, decode_kernels, sm90_fp8_kernels, sm90_kernels, sm80_kernels,
                        tf32_kernels, portable_kernels, standard_kernels, ladder_kernels, cpu_ladder_kernels}) {
      const auto entries = family();
      rows.insert(rows.end(), entries.begin(), entries.end());
    }
    return &rows;
  }();
  return table;
}

std::string missing_option(const KernelEntry& entry, const Problem& problem) {
  if (*problem.kv_dtype != problem.dtype && !entry.narrow_keys) return "takes no keys and values of 8 bits";
  if (problem.latent && !entry.latent) return "takes no latent keys";
  if (*problem.q_dtype != problem.dtype && !entry.narrow_queries) return "takes no queries of 8 bits";
  if (problem.hidden_rows.bounds != 0 && !entry.hidden_rows) return "takes no hidden rows";
  if (problem.block_mask.block_q != 0 && !entry.block_mask) return "takes no block mask";
  if (!problem.program.empty() && !entry.programs) return "takes no program";
  return {};
}

namespace {

bool serves(const KernelEntry& entry, Pass pass, const DeviceInfo& device) {
  return entry.pass == pass && device_traits(entry.device).gpu_kernels == device_traits(device.device).gpu_kernels;
}

std::string reject(const KernelEntry& entry, const Problem& problem, const DeviceInfo& device) {
  if (problem.page_size != 0 && !entry.pages) return "takes no pages";
  if (problem.left_padding && !entry.left_padding) return "takes no left padding";
  if (problem.invariant && entry.pass == Pass::forward) {
    if (!entry.invariant) return "bits of a row depend on the call";
    if (device_traits(entry.device).gpu_kernels && problem.seq_kv > max_invariant_keys) {
      return "takes at most " + std::to_string(max_invariant_keys) + " keys where bits are invariant";
    }
  }
  const std::string option = missing_option(entry, problem);
  return option.empty() ? entry.reject(problem, device) : option;
}

/// Whether forward/sm90 or forward/sm80 takes the problem.
bool prefill_takes(const Problem& problem, const DeviceInfo& device) {
  for (auto family : {sm90_kernels, sm80_kernels}) {
    for (const KernelEntry& entry : family()) {
      if (entry.pass == Pass::forward && reject(entry, problem, device).empty()) return true;
    }
  }
  return false;
}

std::string reject_tile(const KernelEntry& entry, const Problem& problem, const DeviceInfo& device, const TileSize& tile) {
  if (entry.reject_tile == nullptr) return "its tile cannot be set";
  if (problem.invariant) return "tile: bits that are invariant have one tile";
  std::string reason = entry.reject_tile(problem, device, tile);
  return reason.empty()
             ? reason
             : "tile: got (" + std::to_string(tile.block_q) + ", " + std::to_string(tile.block_kv) + "), " + reason;
}

std::string names_of(Pass pass, const DeviceInfo& device) {
  std::string names;
  for (const KernelEntry& entry : kernel_table()) {
    if (!serves(entry, pass, device)) continue;
    if (!names.empty()) names += ", ";
    names += entry.name;
  }
  return names.empty() ? "none" : names;
}

}  // namespace

Plan choose(const Problem& problem, Pass pass, const DeviceInfo& device, std::string_view asked) {
  const auto [kernel, tile, part] = parse_request(asked);
  std::vector<Candidate> candidates;
  bool found = false;
  for (const KernelEntry& entry : kernel_table()) {
    if (!serves(entry, pass, device)) continue;
    if (kernel.empty() ? !entry.automatic : entry.name != kernel) continue;
    found = true;
    std::string reason = reject(entry, problem, device);
    if (reason.empty() && kernel.empty() && entry.yield != nullptr) {
      std::string better = entry.yield(problem, device);
      if (!better.empty() && prefill_takes(problem, device)) reason = std::move(better);
    }
    if (reason.empty() && tile) reason = reject_tile(entry, problem, device, *tile);
    if (reason.empty() && part) {
      reason = entry.reject_part == nullptr ? "does no parts of a pass" : entry.reject_part(problem, device, *part);
    }
    const bool chosen = reason.empty();
    candidates.push_back({std::string(entry.name), std::move(reason)});
    if (!chosen) continue;
    Plan plan = tile   ? entry.lay_out_tile(problem, device, *tile)
                : part ? entry.lay_out_part(problem, device, *part)
                       : entry.lay_out(problem, device);
    plan.kernel = entry.name;
    plan.pass = pass;
    plan.tensor_maps = entry.tensor_maps;
    plan.counts_repairs = entry.counts_repairs;
    plan.candidates = std::move(candidates);
    prepare_masks(problem, plan);
    add_program_source(problem, plan);
    return plan;
  }
  const std::string where = std::string(to_string(pass)) + " on " + to_string(device.device);
  if (!found && !kernel.empty()) {
    throw Error(ErrorCode::invalid_argument, "kernel: '" + std::string(kernel) + "' does not exist for " + where +
                                                 "; there are: " + names_of(pass, device));
  }
  std::string message = "no kernel for " + where + " takes this problem";
  for (const Candidate& candidate : candidates) message += "; " + candidate.kernel + ": " + candidate.reason;
  throw Error(ErrorCode::unsupported, message);
}

}  // namespace flash_attention::plan
