#include "launch/append.h"

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
  args.rows_q = plan::query_tokens(p) * p.heads_q;
  args.rows_keys = plan::new_tokens(p) * p.heads_kv;
  args.rows_values = args.rows_keys;
  args.page_size = static_cast<int>(p.page_size);
  args.num_pages = static_cast<int>(p.num_pages);
  args.capacity = static_cast<int>(p.capacity);
  args.batch = static_cast<int>(p.batch);
  args.seq_q = static_cast<int>(p.seq_q);
  args.seq_new = static_cast<int>(p.seq_new);
  args.heads_q = static_cast<int>(p.heads_q);
  args.heads_kv = static_cast<int>(p.heads_kv);
  args.head_dim = static_cast<int>(p.head_dim);
  args.head_dim_v = static_cast<int>(p.head_dim_v);
  args.rotary_dim = static_cast<int>(p.rotary_dim);
  args.rotary_positions = static_cast<int>(p.rotary_positions);
  args.one_query = p.rotary_one_query ? 1 : 0;
  return args;
}

}  // namespace flash_attention::launch
