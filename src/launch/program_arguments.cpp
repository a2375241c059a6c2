#include "launch/program_arguments.h"

#include <algorithm>
#include <cmath>

#include "plan/workspace.h"
#include "program/sizes.h"

namespace flash_attention::launch {

static_assert(abi::program_tensors == program::max_tensors && abi::program_axes == program::max_rank &&
              abi::program_scalars == program::max_scalars);

abi::ProgramArgs program_arguments(const Problem& p, const Plan& plan, const Buffers& b, const Options& options) {
  abi::ProgramArgs args{};
  if (p.program.empty()) return args;
  const auto known = program::parsed(p.program);
  const program::Program& parsed = *known;
  for (std::size_t n = 0; n < parsed.tensors.size(); ++n) {
    args.tensors[n] = b.program_tensors[n];
    for (std::size_t axis = 0; axis < program::max_rank; ++axis)
      args.sizes[n][axis] = static_cast<int>(p.program_sizes[n][axis]);
  }
  for (std::size_t n = 0; n < parsed.scalars.size(); ++n) {
    if (parsed.scalars[n] == program::Type::real) {
      args.reals[n] = static_cast<float>(b.program_scalars[n]);
    } else {
      args.ints[n] = static_cast<int>(b.program_scalars[n]);
    }
  }
  if (plan.pass != Pass::backward || p.program_gradients == 0) return args;
  const program::GradientLayout layout = program::gradient_layout(p, parsed);
  char* part = static_cast<char*>(options.workspace) + plan::offset_of(plan, abi::SharedRegion::program_gradients);
  args.limits = reinterpret_cast<unsigned*>(part);
  for (int n = 0; n < program::max_tensors; ++n) {
    if (layout.offsets[n] < 0) continue;
    args.sums[n] = reinterpret_cast<long long*>(part + layout.offsets[n]);
    args.gradients[n] = b.program_gradients[n];
    args.counts[n] = program::num_elements(p, parsed, n);
  }
  const double scores =
      static_cast<double>(p.batch * p.heads_q) * static_cast<double>(p.seq_q) * static_cast<double>(p.seq_kv);
  args.room = 60 - std::ilogb(std::max(scores, 1.0));
  return args;
}

}  // namespace flash_attention::launch
