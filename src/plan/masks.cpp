#include "plan/masks.h"

#include "abi/key_bounds.h"

namespace flash_attention::plan {
namespace {

/// Batch entries and heads that have bounds of their own.
std::int64_t heads_with_bounds(const Problem& p) { return p.hidden_rows.head_stride != 0 ? p.heads_kv : 1; }

}  // namespace

void prepare_masks(const Problem& p, Plan& plan) {
  if (p.hidden_rows.bounds == 0) return;
  const bool packed = p.packed && p.page_size == 0;
  const std::int64_t units = heads_with_bounds(p) * abi::unit_places(packed, p.batch, p.seq_kv, p.total_kv);
  const auto bytes = static_cast<std::size_t>(units) * sizeof(abi::KeyBounds);
  plan.workspace_bytes = (plan.workspace_bytes + 255) / 256 * 256;
  plan.workspace_offsets[abi::mask_slot] = static_cast<std::int64_t>(plan.workspace_bytes);
  plan.workspace_bytes += (bytes + 255) / 256 * 256;
}

}  // namespace flash_attention::plan
