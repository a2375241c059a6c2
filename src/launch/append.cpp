#include "launch/append.h"

#include <algorithm>

#include "launch/views.h"
#include "plan/append.h"

namespace flash_attention::launch {

abi::AppendArgs make_arguments(const AppendProblem& p, const AppendBuffers& b) {
  abi::AppendArgs args{};
  args.Q = view(b.q, p.q_strides);
  args.Q_out = view(b.q_out, p.q_out_strides);
  args.K = view(b.k, p.k_strides);
  args.V = view(b.v, p.v_strides);
  args.K_cache = view(b.k_cache, p.k_cache_strides);
  args.V_cache = view(b.v_cache, p.v_cache_strides);
  args.K_scale = scale_view(b.k_scale, p.k_scale_strides);
  args.V_scale = scale_view(b.v_scale, p.v_scale_strides);
  args.K_groups = group_view(b.k_group_scale, b.k_group_zero, p.k_group_strides);
  args.V_groups = group_view(b.v_group_scale, b.v_group_zero, p.v_group_strides);
  args.cos = b.cos;
  args.sin = b.sin;
  args.rotary_stride = p.rotary_stride;
  args.lengths = b.lengths;
  args.rotary_offsets = b.rotary_offsets;
  args.cu_seqlens_new = b.cu_seqlens_new;
  args.cu_seqlens_q = b.cu_seqlens_q;
  args.sequences = b.sequences;
  args.positions = b.positions;
  args.page_table = b.page_table;
  args.page_table_stride = p.page_table_stride;
  args.angle_positions = b.angle_positions;
  args.q_weight = b.q_norm_weight;
  args.k_weight = b.k_norm_weight;
  args.tokens_q = plan::query_tokens(p);
  args.tokens_new = plan::new_tokens(p);
  args.page_size = static_cast<int>(p.page_size);
  args.num_pages = static_cast<int>(p.num_pages);
  args.capacity = static_cast<int>(p.capacity);
  args.batch = static_cast<int>(p.batch);
  args.seq_q = static_cast<int>(p.seq_q);
  args.seq_new = static_cast<int>(p.seq_new);
  args.heads_q = static_cast<int>(p.heads_q);
  args.heads_kv = static_cast<int>(p.heads_kv);
  args.rotary_positions = static_cast<int>(p.rotary_positions);
  args.one_query = p.rotary_one_query ? 1 : 0;
  args.heads_of_task = plan::heads_of_append_task(p);
  std::copy(p.rotary_sections.begin(), p.rotary_sections.end(), args.sections);
  args.angle_sections = static_cast<int>(p.angle_sections);
  args.norm_eps = p.norm_eps;
  return args;
}

abi::AppendGradientArgs make_arguments(const AppendProblem& p, const AppendBuffers& b, const AppendGradients& g) {
  abi::AppendGradientArgs args{};
  args.rows = make_arguments(p, b);
  args.dQ_out = view(g.dq_out, p.dq_out_strides);
  args.dK_out = view(g.dk_out, p.dk_out_strides);
  args.dQ = view(g.dq, p.dq_strides);
  args.dK = view(g.dk, p.dk_strides);
  args.blocks = plan::append_gradient_blocks(p);
  auto* sums = static_cast<float*>(g.workspace);
  if (g.dq_norm_weight != nullptr) args.q_weight_sums = sums;
  if (g.dk_norm_weight != nullptr) args.k_weight_sums = sums + args.blocks * p.head_dim;
  args.dq_weight = g.dq_norm_weight;
  args.dk_weight = g.dk_norm_weight;
  return args;
}

}  // namespace flash_attention::launch
