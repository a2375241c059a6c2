#include "launch/arguments.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "launch/views.h"
#include "plan/features.h"
#include "plan/kernel_config.h"
#include "plan/key_list.h"
#include "plan/masks.h"
#include "plan/workspace.h"
#include "program/sizes.h"

namespace flash_attention::launch {
namespace {

static_assert(std::tuple_size_v<decltype(Plan::workspace_offsets)> == abi::max_regions);
static_assert(abi::program_tensors == program::max_tensors && abi::program_axes == program::max_rank &&
              abi::program_scalars == program::max_scalars);

abi::ScoreView view(const void* data, const ScoreTensor& tensor) {
  return {data, tensor.batch_stride, tensor.head_stride, tensor.q_stride};
}

/// Sets the addresses of prepared masks, which are not in the workspace.
void find_prepared(const Plan& plan, const void* data, abi::AttentionArgs& args) {
  char* const kept = static_cast<char*>(const_cast<void*>(data));  // the launch that prepares the masks writes there
  if (args.workspace == nullptr) args.workspace = kept;
  const char* const begin = static_cast<const char*>(args.workspace) + plan.mask.begin;
  const std::ptrdiff_t distance = kept + plan::prepared_head_bytes - begin;
  for (long long& offset : args.workspace_offsets) {
    if (offset >= static_cast<long long>(plan.mask.begin)) offset += distance;
  }
}

void set_lists(const Problem& p, const Buffers& b, abi::AttentionArgs& args) {
  args.key_list = b.key_list;
  args.key_counts = b.key_counts;
  args.list_entries = static_cast<int>(p.key_list.entries);
  args.list_heads = static_cast<int>(p.key_list.heads);
  args.list_block_q = static_cast<int>(p.key_list.block_q);
  args.list_block_kv = static_cast<int>(p.key_list.block_kv);
}

/// If a plan stacks heads, kernels count rows as queries, and stacks as heads (args.h).
void stack_heads(const Plan& plan, abi::AttentionArgs& args) {
  const auto rows_of_query = [](const Launch& launch) {
    const abi::Features* const features = plan::features_of(launch);
    return features == nullptr ? 0 : features->stacked_heads;
  };
  const int rows = plan.launches.empty() ? 0 : rows_of_query(plan.launches.front());
  if (rows == 0) return;
  args.stacked_group = args.group;
  args.seq_q *= rows, args.total_q *= rows;
  args.heads_q = args.heads_kv, args.group = 1;
}

/// The arguments of the program: scalars, tensors, and the addresses of its gradients.
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

/// The arguments for kernels that take a block mask: the first launch has made it from lists of blocks.
abi::AttentionArgs with_listed_blocks(const Problem& p, const Plan& plan, const Buffers& b, const Options& options) {
  Plan masked = plan;
  masked.listed_blocks = -1;
  Buffers buffers = b;
  buffers.block_mask = static_cast<const std::uint8_t*>(options.workspace) + plan.listed_blocks;
  abi::AttentionArgs args = make_arguments(plan::with_block_mask(p), masked, buffers, options);
  set_lists(p, b, args);
  return args;
}

}  // namespace

abi::AttentionArgs make_arguments(const Problem& p, const Plan& plan, const Buffers& b, const Options& options) {
  if (plan.listed_blocks >= 0) return with_listed_blocks(p, plan, b, options);
  abi::AttentionArgs args{};
  args.Q = view(b.q, p.q_strides);
  args.K = view(b.k, p.k_strides);
  args.V = view(b.v, p.v_strides);
  args.O = view(b.out, p.out_strides);
  args.dO = view(b.dout, p.dout_strides);
  args.dQ = view(b.dq, p.dq_strides);
  args.dK = view(b.dk, p.dk_strides);
  args.dV = view(b.dv, p.dv_strides);
  args.lse = b.lse;
  args.dlse = b.dlse;
  args.cu_seqlens_q = b.cu_seqlens_q;
  args.cu_seqlens_kv = b.cu_seqlens_kv;
  args.seqused_q = b.seqused_q;
  args.seqused_kv = b.seqused_kv;
  args.key_lengths = b.key_lengths;
  args.left_padding = b.left_padding;
  args.bit_mask = b.bit_mask;
  args.bit_offsets = b.bit_mask_offsets;
  args.bit_row_bytes = static_cast<int>(p.bit_mask.row_bytes);
  args.sequence_windows = b.sequence_windows;
  args.page_table = b.page_table;
  args.page_table_stride = p.page_table_stride;
  args.page_size = static_cast<int>(p.page_size);
  args.num_pages = static_cast<int>(p.num_pages);
  args.bias = view(b.bias, p.bias);
  args.mask = view(b.mask, p.mask);
  args.hidden_rows = b.hidden_rows;
  args.hidden_batch_stride = p.hidden_rows.batch_stride;
  args.hidden_head_stride = p.hidden_rows.head_stride;
  args.block_mask = {b.block_mask, p.block_mask.batch_stride, p.block_mask.head_stride, p.block_mask.q_stride};
  args.mask_block_q = static_cast<int>(p.block_mask.block_q);
  args.mask_block_kv = static_cast<int>(p.block_mask.block_kv);
  args.map_heads = static_cast<int>(plan::map_heads(p));
  args.map_batches = static_cast<int>(plan::map_batches(p));
  args.alibi_slopes = b.alibi_slopes;
  args.alibi_batch_stride = p.alibi_batch_stride;
  args.sink = b.sink;
  args.K_scale = scale_view(b.k_scale, p.k_scale_strides);
  args.V_scale = scale_view(b.v_scale, p.v_scale_strides);
  args.Q_scale = scale_view(b.q_scale, p.q_scale_strides);
  args.K_groups = group_view(b.k_group_scale, b.k_group_zero, p.k_group_strides);
  args.V_groups = group_view(b.v_group_scale, b.v_group_zero, p.v_group_strides);

  // dbias is dense over the axes that bias does not broadcast.
  args.dbias = b.dbias;
  const long long rows = p.bias.q_stride != 0 ? p.seq_q : 1;
  const long long heads = p.bias.head_stride != 0 ? p.heads_q : 1;
  args.dbias_q_stride = p.bias.q_stride != 0 ? p.seq_kv : 0;
  args.dbias_head_stride = p.bias.head_stride != 0 ? rows * p.seq_kv : 0;
  args.dbias_batch_stride = p.bias.batch_stride != 0 ? heads * rows * p.seq_kv : 0;
  args.dsink = b.dsink;
  args.max_logit = b.max_logit;
  args.key_mass = b.key_mass;
  args.entropy = b.entropy;
  args.dkey_mass = b.dkey_mass;
  args.dentropy = b.dentropy;
  args.Q_tangent = const_cast<void*>(b.q_tangent);
  args.K_tangent = const_cast<void*>(b.k_tangent);
  args.V_tangent = const_cast<void*>(b.v_tangent);
  args.O_tangent = b.out_tangent;
  args.bias_tangent = b.bias_tangent;
  args.sink_tangent = b.sink_tangent;
  args.lse_tangent = b.lse_tangent;

  args.program = program_arguments(p, plan, b, options);
  args.repairs = options.repairs;
  args.workspace = options.workspace;
  for (std::size_t i = 0; i < plan.workspace_offsets.size(); ++i) args.workspace_offsets[i] = plan.workspace_offsets[i];
  if (options.prepared_mask.data != nullptr) find_prepared(plan, options.prepared_mask.data, args);

  args.batch = static_cast<int>(p.batch);
  args.seq_q = static_cast<int>(p.seq_q);
  args.seq_kv = static_cast<int>(p.seq_kv);
  args.heads_q = static_cast<int>(p.heads_q);
  args.heads_kv = static_cast<int>(p.heads_kv);
  args.group = static_cast<int>(p.heads_q / p.heads_kv);
  args.total_q = static_cast<int>(plan.shared_rows != 0 ? plan.shared_rows : p.total_q);
  args.total_kv = static_cast<int>(p.total_kv);
  args.num_splits = plan.num_splits;
  args.early_heads = plan.early_heads;
  constexpr std::int64_t far = std::numeric_limits<int>::max() / 2;
  args.window_left = static_cast<int>(std::min(p.window_left, far));
  args.window_right = static_cast<int>(std::min(p.window_right, far));
  args.chunk = static_cast<int>(std::min(p.attention_chunk, far));
  args.row_max = b.row_max;
  set_lists(p, b, args);
  args.scale = *p.scale;
  args.softcap = p.softcap;
  args.seed = options.seed;
  args.offset = options.offset;
  args.drop_threshold = static_cast<unsigned>(std::floor(static_cast<double>(p.dropout_p) * 0x1p32));
  args.keep_scale = 1.0f / (1.0f - p.dropout_p);
  if (p.key_list.kind == KeyListKind::blocks) stack_heads(plan, args);
  return args;
}

}  // namespace flash_attention::launch
