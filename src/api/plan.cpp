#include "flash_attention/plan.h"

#include <sstream>

#include "api/checks/validate.h"
#include "api/guard.h"
#include "plan/kernel_table.h"

namespace flash_attention {

Plan make_plan(const Problem& problem, Pass pass, const DeviceInfo& device, std::string_view kernel,
               std::optional<TileSize> tile, std::optional<BackwardPart> part) {
  return api::guarded([&] { return plan::choose(api::normalise(problem, pass), pass, device, kernel, tile, part); });
}

std::vector<KernelSummary> kernels() {
  std::vector<KernelSummary> all;
  for (const plan::KernelEntry& entry : plan::kernel_table()) {
    all.push_back({std::string(entry.name), entry.pass, entry.device, std::string(entry.requirements),
                   std::vector(entry.proven.begin(), entry.proven.end())});
  }
  return all;
}

std::string to_string(const Plan& plan) {
  std::ostringstream out;
  out << "kernel     " << plan.kernel << '\n';
  out << "tile       " << plan.block_q << " queries x " << plan.block_kv << " keys";
  if (plan.num_splits > 1) out << ", keys in " << plan.num_splits << " parts";
  out << "\nworkspace  " << plan.workspace_bytes << " bytes";
  if (plan.mask.present)
    out << ", " << plan.workspace_bytes - plan.mask.begin << " of them what the first launch finds out about the masks";
  out << '\n';
  if (!plan.tuned.empty()) out << "tuned      " << plan.tuned << '\n';
  for (const Launch& launch : plan.launches) {
    out << "launch     " << launch.entry << " (" << launch.unit << ") grid " << launch.grid[0] << 'x' << launch.grid[1]
        << 'x' << launch.grid[2] << ", " << launch.block << " threads, " << launch.shared_bytes << " bytes shared";
    if (launch.cluster > 1) out << ", clusters of " << launch.cluster;
    out << "\n           " << to_source(launch.config) << '\n';
  }
  for (const Candidate& candidate : plan.candidates) {
    if (!candidate.reason.empty()) out << "not        " << candidate.kernel << ": " << candidate.reason << '\n';
  }
  return out.str();
}

}  // namespace flash_attention
