#pragma once

#include <vector>

#include "cli/measure/array.h"
#include "flash_attention/attention.h"

namespace flash_attention::cli {

/// A problem with random inputs on a device, ready to be called.
struct Workload {
  Problem problem;
  Options options;
  Array q, k, v, out, lse, alibi_slopes;
  Array q_scale, k_scale, v_scale;  ///< of 8-bit Q, K and V
  Array k_groups, v_groups, k_zeros, v_zeros;  ///< of 4-bit K and V
  Array page_table, seqused_kv;     ///< where the problem has them: pages in no order, all keys in use
  Array key_list;                   ///< where the problem has it: different entries, in no order
  Array dout, dq, dk, dv;           ///< empty without a backward pass
  Array out_tangent;                ///< empty without tangents

  Buffers buffers() const;
  std::vector<const Array*> arrays() const;
};

/// Inputs are close to normal with mean 0 and variance 1, and the same for the same seed on every machine.
Workload make_workload(const Problem& problem, const Options& options, bool with_backward);

/// Runs one pass; the workspace must be in the options.
void call(const Workload& workload, Pass pass);

/// Gives the workload the workspace that the pass asks for; keep the result alive as long as the workload is called.
std::shared_ptr<void> attach_workspace(Workload& workload, Pass pass);

}  // namespace flash_attention::cli
