#include "plan/kernel_table.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>
#include <variant>
#include <vector>

#include "flash_attention/error.h"
#include "plan/features.h"
#include "plan/kernel_config.h"
#include "plan/key_list.h"
#include "plan/masks.h"
#include "plan/program.h"
#include "plan/request.h"

namespace flash_attention::plan {

std::span<const KernelEntry> kernel_table() {
  // Never destroyed: a call may come from a destructor at the end of the process.
  static const std::vector<KernelEntry>& table = *[] {
    auto& rows = *new std::vector<KernelEntry>;
    for (auto family : {
             cpu_kernels,
             mla_kernels,
             decode_kernels,
             sm90_fp8_kernels,
             sm89_fp8_kernels,
             sm90_kernels,
             sm100_kernels,
             sm80_kernels,
             tf32_kernels,
             fp32_kernels,
             portable_kernels,
             tangent_kernels,
             listed_kernels,
             standard_kernels,
             ladder_kernels,
             cpu_ladder_kernels,
         }) {
      const auto entries = family();
      rows.insert(rows.end(), entries.begin(), entries.end());
    }
    return &rows;
  }();
  return table;
}

std::string missing_option(const KernelEntry& entry, const Request& request) {
  const Problem& problem = request.problem;
  const abi::Features& features = request.features;
  const Capabilities& takes = entry.takes;
  if (features.kv_group != 0) {
    if (!takes.grouped_keys) return "takes no keys and values of 4 bits";
  } else if (*problem.kv_dtype != problem.dtype && !takes.narrow_keys) {
    return "takes no keys and values of 8 bits";
  }
  if (features.latent && !takes.latent) return "takes no latent keys";
  if (features.narrow_queries && !takes.narrow_queries) return "takes no queries of 8 bits";
  if (features.hidden_bounds != 0 && !takes.hidden_rows) return "takes no hidden rows";
  if (features.block_mask && !takes.block_mask) return "takes no block mask";
  if (features.has_program() && !takes.programs) return "takes no program";
  if (features.key_list && !takes.key_list) return "takes no lists of keys";
  if (features.bit_mask() && !takes.bit_mask) return "takes no bit mask";
  if (features.sequence_windows && !takes.sequence_windows) return "takes no windows of sequences";
  if (features.has_statistics() && !takes.statistics) return "computes no statistics";
  return {};
}

bool is_unproven(const KernelEntry& entry, const DeviceInfo& device) {
  return device_traits(device.device).gpu_kernels && !is_last_resort(entry) &&
         std::ranges::find(entry.proven, device.arch) == entry.proven.end();
}

namespace {

const Verdict* verdict_on(const KernelEntry& entry, const DeviceInfo& device) {
  const bool known = device.tuned != nullptr && device.tuned->serves(device);
  return known ? device.tuned->verdict(entry.name, entry.pass) : nullptr;
}

/// Why a kernel must not be used on this GPU: it has never run on such a GPU, and no self-test has passed.
std::string distrust(const KernelEntry& entry, const DeviceInfo& device) {
  if (!is_unproven(entry, device)) return {};
  const Verdict* const verdict = verdict_on(entry, device);
  if (verdict != nullptr) return verdict->passed ? "" : "failed its self-test on this GPU: " + verdict->reason;
  return device.proven_only ? "was never run on sm_" + std::to_string(device.arch) : "";
}

using Rows = std::vector<const KernelEntry*>;

/// The rows for a pass on a GPU or a CPU, in order.
const Rows& rows_of(Pass pass, bool gpu) {
  static const auto& by_pass = *[] {
    auto& rows = *new std::array<std::array<Rows, 2>, 6>;  // never destroyed, like the table
    for (const KernelEntry& entry : kernel_table())
      rows[static_cast<std::size_t>(entry.pass)][device_traits(entry.device).gpu_kernels].push_back(&entry);
    return &rows;
  }();
  return by_pass[static_cast<std::size_t>(pass)][gpu];
}

std::string missing_capability(const KernelEntry& entry, const Request& request, bool gpu) {
  const Problem& problem = request.problem;
  if (request.features.paged && !entry.takes.pages) return "takes no pages";
  if (request.features.left_padding && !entry.takes.left_padding) return "takes no left padding";
  if (problem.invariant && entry.pass == Pass::forward) {
    if (!entry.takes.invariant) return "bits of a row depend on the call";
    if (gpu && problem.seq_kv > max_invariant_keys) {
      return "takes at most " + std::to_string(max_invariant_keys) + " keys where bits are invariant";
    }
  }
  return missing_option(entry, request);
}

/// The kernels' answers to one request. Each kernel is asked at most once.
class Answers {
 public:
  /// named: the caller named the kernel, so it is used even if it is untested here.
  Answers(const Request& request, bool gpu, bool named) : request_(request), gpu_(gpu), named_(named) {}

  Answer take(const KernelEntry& entry) {
    for (auto& [asked, answer] : known_) {
      if (asked == &entry) return std::move(answer);
    }
    return ask(entry);
  }

  /// Whether a kernel for many queries, other than `asked`, takes the request.
  bool some_prefill_takes_it(const Rows& rows, const KernelEntry& asked) {
    for (const KernelEntry* entry : rows) {
      if (!entry->prefill || entry == &asked) continue;
      const auto found = std::ranges::find(known_, entry, &std::pair<const KernelEntry*, Answer>::first);
      const Answer& answer = found != known_.end() ? found->second : known_.emplace_back(entry, ask(*entry)).second;
      if (std::holds_alternative<Offer>(answer)) return true;
    }
    return false;
  }

 private:
  Answer ask(const KernelEntry& entry) const {
    std::string missing = missing_capability(entry, request_, gpu_);
    if (missing.empty() && !named_) missing = distrust(entry, request_.device);
    if (!missing.empty()) return Refusal{std::move(missing)};
    return entry.plan(request_);
  }

  const Request& request_;
  bool gpu_, named_;
  std::vector<std::pair<const KernelEntry*, Answer>> known_;
};

std::string names_of(const Rows& rows) {
  std::string names;
  for (const KernelEntry* entry : rows) {
    if (!names.empty()) names += ", ";
    names += entry->name;
  }
  return names.empty() ? "none" : names;
}

/// Adds the parts of a plan that are the same for every kernel.
Plan finished(const Request& request, Pass pass, const KernelEntry& entry, Plan plan) {
  plan.kernel = entry.name;
  plan.pass = pass;
  plan.counts_repairs = entry.counts_repairs;
  plan.unproven = is_unproven(entry, request.device) && verdict_on(entry, request.device) == nullptr;
  prepare_masks(request, plan);
  add_program_source(request.problem, plan);
  return plan;
}

/// The plan of a measured choice; nothing if there is no such choice, or if its kernel does not support this problem.
std::optional<Plan> plan_tuned(const Problem& problem, Pass pass, const DeviceInfo& device) {
  if (device.tuned == nullptr || !device.tuned->serves(device)) return std::nullopt;
  const TunedChoice* const tuned = device.tuned->find(problem, pass);
  if (tuned == nullptr) return std::nullopt;
  std::optional<Plan> plan = plan_choice(problem, pass, device, tuned->choice);
  if (!plan) return std::nullopt;
  char gain[32];
  std::snprintf(gain, sizeof gain, "%.2f", tuned->gain);
  plan->tuned = to_string(tuned->choice) + ": " + gain + " times the default, " + tuned->instead_of;
  return plan;
}

}  // namespace

std::optional<Plan> plan_choice(const Problem& problem, Pass pass, const DeviceInfo& device, const Choice& choice) {
  std::optional<TileSize> tile;
  if (choice.block_q > 0) tile = TileSize{choice.block_q, choice.block_kv};
  Request request = make_request(problem, device, tile);
  request.num_stages = choice.num_stages, request.num_splits = choice.num_splits;
  const bool gpu = device_traits(device.device).gpu_kernels;
  for (const KernelEntry* entry : rows_of(pass, gpu)) {
    const Capabilities& takes = entry->takes;
    if (entry->name != choice.kernel || !entry->automatic || (request.tile && !takes.tile) ||
        (choice.num_stages > 0 && !takes.stages) || (choice.num_splits > 0 && !takes.splits))
      continue;
    Answer answer = Answers(request, gpu, false).take(*entry);
    Offer* const offer = std::get_if<Offer>(&answer);
    if (offer == nullptr) continue;
    Plan plan = finished(request, pass, *entry, std::move(offer->plan));
    plan.candidates.push_back({std::string(entry->name), ""});
    return plan;
  }
  return std::nullopt;
}

namespace {

/// Whether lists of blocks may become a block mask: it takes no more memory than Q, and its blocks are those of tiles.
bool may_become_mask(const Problem& p, Pass pass) {
  constexpr std::int64_t smallest_block = 16;
  const bool lists = p.key_list.block_kv >= smallest_block && features_of(p).key_set;
  if (!lists || p.packed || p.page_size != 0 || p.seq_q == 0 || p.seq_kv == 0 || p.batch == 0) return false;
  if (pass != Pass::forward && pass != Pass::backward) return false;
  const std::int64_t query_bytes = p.batch * p.seq_q * p.heads_q * p.head_dim * static_cast<std::int64_t>(size_of(p.dtype));
  return block_mask_bytes(p) <= query_bytes;
}

/// Adds the launch that makes the mask, before all others. Lists change from call to call, so it is not a prepared
/// mask.
void add_listed_blocks(const Problem& p, Plan& plan) {
  constexpr std::size_t unit = 256;
  const auto whole = [](std::size_t size) { return (size + unit - 1) / unit * unit; };
  plan.listed_blocks = static_cast<std::int64_t>(whole(plan.workspace_bytes));
  plan.workspace_bytes = whole(plan.workspace_bytes) + whole(static_cast<std::size_t>(block_mask_bytes(p)));
  plan.mask.present = false;
  Launch launch{.unit = "mask/listed_blocks",
                .entry = "mask_listed_blocks",
                .config = launch_config(abi::ForwardConfig{}),
                .block = 128};
  launch.grid[0] = static_cast<int>(p.batch * list_rows(p) * p.key_list.heads);
  plan.launches.insert(plan.launches.begin(), std::move(launch));
}

Plan choose_kernel(const Problem& problem, Pass pass, const DeviceInfo& device, std::string_view kernel,
                   std::optional<TileSize> tile, std::optional<BackwardPart> part) {
  if (kernel.empty() && !tile && !part) {
    if (std::optional<Plan> tuned = plan_tuned(problem, pass, device)) return *std::move(tuned);
  }
  const Request request = make_request(problem, device, tile, part);
  const bool gpu = device_traits(device.device).gpu_kernels;
  const Rows& rows = rows_of(pass, gpu);
  Answers answers(request, gpu, !kernel.empty());
  std::vector<Candidate> candidates;
  candidates.reserve(8);  // few problems try more kernels
  bool found = false;
  for (const KernelEntry* row : rows) {
    const KernelEntry& entry = *row;
    if (kernel.empty() ? !entry.automatic : entry.name != kernel) continue;
    found = true;
    Answer answer = answers.take(entry);
    Offer* const offer = std::get_if<Offer>(&answer);
    Candidate& candidate = candidates.emplace_back();
    candidate.kernel = entry.name;
    std::string& reason = candidate.reason;
    if (offer == nullptr) {
      reason = std::move(std::get<Refusal>(answer).reason);
    } else if (kernel.empty() && !offer->prefers_prefill.empty() && answers.some_prefill_takes_it(rows, entry)) {
      reason = std::move(offer->prefers_prefill);
    } else if (tile && !entry.takes.tile) {
      reason = "its tile cannot be set";
    } else if (part && !entry.takes.parts) {
      reason = "does no parts of a pass";
    }
    if (!reason.empty()) continue;
    Plan plan = finished(request, pass, entry, std::move(offer->plan));
    plan.candidates = std::move(candidates);
    return plan;
  }
  const std::string where = std::string(to_string(pass)) + " on " + to_string(device.device);
  if (!found && !kernel.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "kernel: '" + std::string(kernel) + "' does not exist for " + where + "; there are: " + names_of(rows));
  }
  std::string message = "no kernel for " + where + " takes this problem";
  for (const Candidate& candidate : candidates) message += "; " + candidate.kernel + ": " + candidate.reason;
  throw Error(ErrorCode::unsupported, message);
}

/// Whether forward/sm90 or backward/sm90 takes lists of blocks, of a problem that may_become_mask(), as they are. With few
/// queries kernels of decoding, which gather, are asked first.
bool takes_lists(const Problem& p, Pass pass, const DeviceInfo& device, std::string_view kernel,
                 std::optional<TileSize> tile, std::optional<BackwardPart> part) {
  const KernelEntry& entry = sm90_kernels()[pass == Pass::forward ? 0 : 1];
  if (kernel.empty() ? pass == Pass::forward && p.seq_q <= max_decode_queries : kernel != entry.name) return false;
  const Request request = make_request(p, device, tile, part);
  return std::holds_alternative<Offer>(Answers(request, true, !kernel.empty()).take(entry));
}

}  // namespace

Plan choose(const Problem& problem, Pass pass, const DeviceInfo& device, std::string_view kernel,
            std::optional<TileSize> tile, std::optional<BackwardPart> part) {
  const bool gpu = device_traits(device.device).gpu_kernels;
  if (gpu && !kernel.ends_with("/listed") && may_become_mask(problem, pass) &&
      !takes_lists(problem, pass, device, kernel, tile, part)) {
    Plan plan = choose_kernel(with_block_mask(problem), pass, device, kernel, tile, part);
    if (!kernel.empty() || !plan.kernel.ends_with("/portable")) {  // tensor cores
      add_listed_blocks(problem, plan);
      return plan;
    }
  }
  return choose_kernel(problem, pass, device, kernel, tile, part);
}

}  // namespace flash_attention::plan
