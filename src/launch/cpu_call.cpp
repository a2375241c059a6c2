#include "launch/cpu_call.h"

#include <algorithm>
#include <cmath>

#include "plan/families/cpu_regions.h"
#include "plan/families/cpu_tiles.h"
#include "plan/workspace.h"

namespace flash_attention::cpu {
namespace {

TensorView view(const void* data, const Strides& strides, bool packed = false) {
  return {static_cast<char*>(const_cast<void*>(data)), packed ? 0 : strides.batch, strides.seq, strides.head};
}

ScoreView view(const void* data, const ScoreTensor& tensor) {
  if (!tensor.present) return {};
  return {static_cast<char*>(const_cast<void*>(data)), tensor.dtype, tensor.batch_stride, tensor.head_stride,
          tensor.q_stride};
}

/// dbias is dense, with extent 1 on axes that the bias broadcasts.
ScoreView dbias_view(const Problem& problem, void* dbias) {
  if (!problem.bias.present || dbias == nullptr) return {};
  ScoreView gradient{.data = static_cast<char*>(dbias), .dtype = problem.bias.dtype};
  std::int64_t size = problem.seq_kv;
  if (problem.bias.q_stride != 0) gradient.q_stride = size, size *= problem.seq_q;
  if (problem.bias.head_stride != 0) gradient.head_stride = size, size *= problem.heads_q;
  if (problem.bias.batch_stride != 0) gradient.batch_stride = size;
  return gradient;
}

/// Makes k and v views of the workspace: the rows of a head one after another, as float.
void copy_keys(const Problem& problem, const Plan& plan, const Options& options, Call& call) {
  const std::int64_t rows = problem.packed ? problem.total_kv : problem.seq_kv;
  const auto view_of_copy = [&](plan::CpuRegion region, std::int64_t columns) {
    const std::int64_t stride = plan::cpu_copied_stride(columns), head = rows * stride;
    return TensorView{static_cast<char*>(options.workspace) + plan::offset_of(plan, region),
                      problem.packed ? 0 : problem.heads_kv * head, stride, head};
  };
  call.kv_dtype = Dtype::float32;
  call.k_source = call.k;
  call.v_source = call.v;
  call.k = view_of_copy(plan::CpuRegion::copied_K, problem.head_dim);
  call.v = view_of_copy(plan::CpuRegion::copied_V, problem.head_dim_v);
}

}  // namespace

Call make_call(const Problem& problem, const Plan& plan, int block_q, const Buffers& buffers, const Options& options) {
  Call call;
  call.dtype = problem.dtype;
  call.q = view(buffers.q, problem.q_strides, problem.packed);
  call.k = view(buffers.k, problem.k_strides);  // packed: normalise() made the batch stride 0
  call.v = view(buffers.v, problem.v_strides);
  call.out = view(buffers.out, problem.out_strides, problem.packed);
  call.lse = buffers.lse;
  if (plan.pass == Pass::tangent || plan.pass == Pass::second) {
    call.q_tangent = view(buffers.q_tangent, problem.q_strides, problem.packed);
    call.k_tangent = view(buffers.k_tangent, problem.k_strides);
    call.v_tangent = view(buffers.v_tangent, problem.v_strides);
    call.out_tangent = view(buffers.out_tangent, problem.out_strides, problem.packed);
    call.lse_tangent = buffers.lse_tangent;
    if (buffers.bias_tangent != nullptr) call.bias_tangent = view(buffers.bias_tangent, problem.bias);
    if (problem.sink) call.sink_tangent = buffers.sink_tangent;
  }
  if (plan.pass == Pass::backward || plan.pass == Pass::standard_backward || plan.pass == Pass::second) {
    call.dout = view(buffers.dout, problem.dout_strides, problem.packed);
    call.dq = view(buffers.dq, problem.dq_strides, problem.packed);
    call.dk = view(buffers.dk, problem.dk_strides, problem.packed);
    call.dv = view(buffers.dv, problem.dv_strides, problem.packed);
    call.dlse = buffers.dlse;
    call.dbias = dbias_view(problem, buffers.dbias);
    if (problem.sink) call.dsink = buffers.dsink;
    if (problem.return_key_mass) call.dkey_mass = buffers.dkey_mass;
    if (problem.return_entropy) call.dentropy = buffers.dentropy;
  } else {
    if (problem.return_max_logit) call.max_logit = buffers.max_logit;
    if (problem.return_key_mass) call.key_mass = buffers.key_mass;
  }
  if (problem.return_entropy) call.entropy = buffers.entropy;
  if (problem.packed) {
    call.cu_seqlens_q = buffers.cu_seqlens_q;
    if (problem.page_size == 0) call.cu_seqlens_kv = buffers.cu_seqlens_kv;
  }
  if (problem.seqused_q) call.seqused_q = buffers.seqused_q;
  if (problem.seqused_kv) call.seqused_kv = buffers.seqused_kv;
  if (problem.key_lengths) call.key_lengths = buffers.key_lengths;
  if (problem.left_padding) call.left_padding = buffers.left_padding;
  if (problem.sequence_windows) call.sequence_windows = buffers.sequence_windows;
  if (problem.page_size != 0) {
    call.page_table = buffers.page_table;
    call.page_table_stride = problem.page_table_stride;
    call.page_size = problem.page_size;
  }

  call.bias = view(buffers.bias, problem.bias);
  call.mask = view(buffers.mask, problem.mask);
  if (problem.hidden_rows.bounds != 0) {
    call.hidden_rows = buffers.hidden_rows;
    call.hidden_bounds = problem.hidden_rows.bounds;
    call.hidden_batch_stride = problem.hidden_rows.batch_stride;
    call.hidden_head_stride = problem.hidden_rows.head_stride;
  }
  if (problem.block_mask.block_q != 0) {
    const BlockMask& blocks = problem.block_mask;
    call.block_mask = {.data = reinterpret_cast<char*>(const_cast<std::uint8_t*>(buffers.block_mask)),
                       .batch_stride = blocks.batch_stride,
                       .head_stride = blocks.head_stride,
                       .q_stride = blocks.q_stride};
    call.mask_block_q = static_cast<int>(blocks.block_q);
    call.mask_block_kv = static_cast<int>(blocks.block_kv);
  }
  if (problem.bit_mask.kind != BitMaskKind::none) {
    call.has_bit_mask = true;
    call.bit_mask = buffers.bit_mask;
    call.bit_mask_row_bytes = problem.bit_mask.row_bytes;
    if (problem.bit_mask.offsets) call.bit_mask_offsets = buffers.bit_mask_offsets;
  }
  if (problem.alibi) call.alibi_slopes = buffers.alibi_slopes;
  call.alibi_batch_stride = problem.alibi_batch_stride;
  if (problem.sink) call.sink = buffers.sink;

  call.q_dtype = *problem.q_dtype;
  call.kv_dtype = *problem.kv_dtype;
  const auto scales = [](const float* data, const Strides& s) { return ScaleView{data, s.batch, s.seq, s.head}; };
  if (problem.q_scales != ScaleKind::none) call.q_scale = scales(buffers.q_scale, problem.q_scale_strides);
  if (problem.kv_scales != ScaleKind::none) {
    call.k_scale = scales(buffers.k_scale, problem.k_scale_strides);
    call.v_scale = scales(buffers.v_scale, problem.v_scale_strides);
    call.token_scales = problem.kv_scales == ScaleKind::token;
  }
  if (problem.kv_group != 0) {
    const auto groups = [](const void* scale, const void* zero, const Strides& s) {
      return GroupView{static_cast<const char*>(scale), static_cast<const char*>(zero), s.batch, s.seq, s.head};
    };
    call.k_groups = groups(buffers.k_group_scale, buffers.k_group_zero, problem.k_group_strides);
    call.v_groups = groups(buffers.v_group_scale, buffers.v_group_zero, problem.v_group_strides);
    call.kv_group = static_cast<int>(problem.kv_group);
  }
  if (plan.cpu.copies_keys) copy_keys(problem, plan, options, call);

  call.batch = problem.batch;
  call.seq_q = problem.seq_q;
  call.seq_kv = problem.seq_kv;
  call.total_q = problem.total_q;
  call.total_kv = problem.total_kv;
  call.heads_q = static_cast<int>(problem.heads_q);
  call.heads_kv = static_cast<int>(problem.heads_kv);
  call.group = static_cast<int>(problem.heads_q / problem.heads_kv);
  call.head_dim = static_cast<int>(problem.head_dim);
  call.head_dim_v = static_cast<int>(problem.head_dim_v);
  call.latent = problem.latent;

  call.scale = *problem.scale;
  call.softcap = problem.softcap;
  call.window_left = problem.window_left;
  call.window_right = problem.window_right;
  call.chunk = problem.attention_chunk;
  call.top_left = problem.alignment == Alignment::top_left;
  call.invariant = problem.invariant;

  call.dropout = problem.dropout_p > 0;
  call.drop_threshold = static_cast<std::uint32_t>(std::floor(static_cast<double>(problem.dropout_p) * 0x1p32));
  call.keep_scale = 1 / (1 - problem.dropout_p);
  call.seed = options.seed;
  call.offset = options.offset;

  if (problem.key_list.kind != KeyListKind::none) {
    call.key_list = buffers.key_list;
    call.row_max = buffers.row_max;
    if (problem.key_list.counts) call.key_counts = buffers.key_counts;
    call.list_entries = problem.key_list.entries;
    call.list_block_q = problem.key_list.block_q;
    call.list_block_kv = problem.key_list.block_kv;
    call.list_heads = static_cast<int>(problem.key_list.heads);
    call.list_set = problem.key_list.kind == KeyListKind::blocks;
  }

  call.num_splits = plan.num_splits;
  call.blocks_together = std::max(plan.block_q / block_q, 1);
  call.heads_together = plan.cpu.heads_together;
  call.packs_keys = plan.cpu.packs_keys;
  call.cache_resident_bytes = plan.cpu.cache_resident_bytes;
  call.workspace = static_cast<char*>(options.workspace);
  for (std::size_t i = 0; i < plan.workspace_offsets.size(); ++i) call.workspace_offsets[i] = plan.workspace_offsets[i];
  return call;
}

}  // namespace flash_attention::cpu
