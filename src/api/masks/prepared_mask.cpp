#include "api/masks/prepared_mask.h"

#include <memory>

#include "api/backends.h"
#include "api/checks/pointers.h"
#include "api/checks/refuse.h"
#include "api/checks/validate.h"
#include "api/guard.h"
#include "plan/masks.h"

namespace flash_attention {
namespace api {

void check_prepared_mask(const Prepared& prepared, const Buffers& buffers, const PreparedMask& mask) {
  const Plan& plan = prepared.plan;
  const std::string call = std::string(to_string(plan.pass)) + " by " + plan.kernel;
  if (!plan.mask.present) refuse("prepared_mask", address(mask.data), call + " prepares no masks of this problem");
  check_pointer("prepared_mask", mask.data, true, 256);
  if (mask.stamp == stamp_of(prepared.mask_form, buffers)) return;
  refuse("prepared_mask.stamp", std::to_string(mask.stamp),
         "it was prepared for another call: " + call + " in tiles of " + std::to_string(plan.block_q) + " x " +
             std::to_string(plan.block_kv) +
             " needs one of the same pass, kernel, sizes, windows, masks (by their pointers) and scalars");
}

}  // namespace api

MaskPreparation mask_preparation(const Problem& problem, Pass pass, const Buffers& buffers, const Options& options) {
  return api::guarded([&] {
    const std::shared_ptr<const api::Prepared> prepared = api::prepare(problem, pass, options);
    const api::MaskForm& form = prepared->mask_form;
    api::check_pointer("program_tensors", buffers.program_tensors, !form.tensors.empty(), 1);
    api::check_pointer("program_scalars", buffers.program_scalars, !form.scalars.empty(), 8);
    MaskPreparation needed{.bytes = plan::prepared_bytes(prepared->plan), .stamp = api::stamp_of(form, buffers)};
    for (const int n : form.tensors) needed.tensors |= 1u << n;
    return needed;
  });
}

PreparedMask prepare_mask(const Problem& problem, Pass pass, const Buffers& buffers, void* memory, std::size_t bytes,
                          const Options& options) {
  return api::guarded([&]() -> PreparedMask {
    const std::shared_ptr<const api::Prepared> prepared = api::prepare(problem, pass, options);
    const Plan& plan = prepared->plan;
    api::validate_preparation(prepared->problem, plan, buffers, memory, bytes, options);
    if (!plan.mask.present) return {};
    const PreparedMask mask{memory, api::stamp_of(prepared->mask_form, buffers)};
    if (prepared->problem.batch == 0) return mask;
    Options into = options;
    into.workspace = nullptr;
    into.prepared_mask = mask;
    const Plan launch = plan::preparation(plan);
    api::backend_of(options.device)
        .load(prepared->problem, launch, prepared->device, options.stream)
        ->launch(prepared->problem, launch, buffers, into);
    return mask;
  });
}

}  // namespace flash_attention
