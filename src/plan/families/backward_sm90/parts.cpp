// backward/sm90 block by block: the launches of a pass, one part at a time, on one workspace. A block finds its rows
// there at an offset, so the kernels are the same as for a whole pass.
#include <algorithm>

#include "abi/backward_sm90.h"
#include "plan/families/backward_sm90/structure.h"
#include "plan/families/sm90.h"
#include "plan/workspace.h"

namespace flash_attention::plan {
namespace {

using PartKind = BackwardPart::Kind;
using Region = abi::BackwardSm90Region;

constexpr int max_blocks = 256;                              // each has separate counters of tasks
constexpr std::int64_t counters = 2 * sizeof(std::int32_t);  // of a block

PartKind kind_of(const Launch& launch) {
  if (launch.entry == "backward_sm90_prepare") return PartKind::rows;
  const bool converts = launch.entry == "backward_sm90_convert" || launch.entry == "backward_sm90_finish";
  return converts ? PartKind::dq : PartKind::block;
}

/// Whether blocks may add to dQ in any order, beginning with zeros.
bool adds_to_dq(const Plan& plan) {
  const bool sums = std::any_of(plan.launches.begin(), plan.launches.end(),
                                [](const Launch& launch) { return kind_of(launch) == PartKind::dq; });
  return sums && offset_of(plan, Region::order) == 0;
}

/// Why the problem cannot be a part of a pass.
std::string reject_part(const Request& r, const Plan& plan) {
  const Problem& p = r.problem;
  const BackwardPart& part = *r.part;
  const bool is_block = part.kind == PartKind::block;
  if (!adds_to_dq(plan)) return "blocks cannot add to dQ in any order";
  if (is_block && lay_out_sm90_backward(r, true, choose_backward_sm90_structure(r, true)).num_splits > 1)
    return "few key heads: their groups are split between tasks";
  const std::int64_t end = part.first + p.seq_q;
  if (end > part.rows || (!is_block && p.seq_q != part.rows)) return "the problem has other rows than the part";
  // Tiles are added as a whole, so they must not reach into rows after the block.
  if (part.first % tile_rows != 0 || (end % tile_rows != 0 && end != part.rows)) return "blocks are tiles of 64 rows";
  return part.number < max_blocks ? "" : "a pass has at most 256 blocks";
}

/// Selects the part's place in the workspace that all parts share, and its launches.
Plan cut_out(const Problem& p, Plan plan, const BackwardPart& part) {
  std::erase_if(plan.launches, [&](const Launch& launch) { return kind_of(launch) != part.kind; });
  plan.shared_rows = part.rows;
  plan.workspace_bytes = 0;
  const std::int64_t rows = sm90_padded_rows(part.rows, 1) * p.heads_q, row_bytes = (p.head_dim + 31) / 32 * 32 * 4;
  reserve(plan, Region::tasks, max_blocks * counters);
  reserve(plan, Region::lse2, (rows + rows / tile_rows + 1) * 4);  // and the flags of rows that may not be finite
  reserve(plan, Region::delta, rows * 4);
  reserve(plan, Region::dQ, rows * row_bytes);
  const bool by_product = offset_of(plan, Region::parts) != 0;
  if (by_product) reserve(plan, Region::parts, rows * abi::backward_sm90_parts_row_bytes);
  if (part.kind == PartKind::rows) plan.zeroed_bytes = static_cast<std::size_t>(max_blocks * counters);
  offset_of(plan, Region::tasks) += part.number * counters;
  offset_of(plan, Region::lse2) += part.first * 4;
  offset_of(plan, Region::delta) += part.first * 4;
  offset_of(plan, Region::dQ) += part.first * row_bytes;
  if (by_product) offset_of(plan, Region::parts) += part.first * abi::backward_sm90_parts_row_bytes;
  return plan;
}

}  // namespace

Answer plan_sm90_backward_part(const Request& r) {
  const Problem& p = r.problem;
  if (p.batch != 1 || p.packed || p.seqused_q) return Refusal{"parts have one sequence"};
  if (r.features.has_mask_data() || r.features.mask) return Refusal{"parts take no masks that are data"};
  if (r.features.bias || r.features.sink || p.program_gradients != 0)
    return Refusal{"parts have no gradients but those of q, k and v"};
  Plan plan = lay_out_sm90_backward(r, false, choose_backward_sm90_structure(r, false));
  std::string reason = reject_part(r, plan);
  return offer_unless(std::move(reason), [&] { return cut_out(p, std::move(plan), *r.part); });
}

}  // namespace flash_attention::plan
