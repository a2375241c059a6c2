// Every field of the C structs reaches the C++ ones: the contract's cases give the same bits through both doors.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "flash_attention/c_api.h"
#include "support/cases/contract.h"
#include "support/oracle/tensors.h"

namespace flash_attention::testing {
namespace {

flash_attention_strides c_strides(const Strides& s) { return {s.batch, s.seq, s.head}; }

flash_attention_score_tensor c_score_tensor(const ScoreTensor& t) {
  return {t.present, static_cast<std::int32_t>(t.dtype), t.batch_stride, t.head_stride, t.q_stride};
}

flash_attention_problem c_problem(const Problem& p) {
  flash_attention_problem c;
  flash_attention_problem_init(&c);
  c.batch = p.batch, c.seq_q = p.seq_q, c.seq_kv = p.seq_kv, c.heads_q = p.heads_q, c.heads_kv = p.heads_kv;
  c.head_dim = p.head_dim, c.head_dim_v = p.head_dim_v, c.total_q = p.total_q, c.total_kv = p.total_kv;
  c.dtype = static_cast<std::int32_t>(p.dtype), c.packed = p.packed;
  c.q_strides = c_strides(p.q_strides), c.k_strides = c_strides(p.k_strides), c.v_strides = c_strides(p.v_strides);
  c.out_strides = c_strides(p.out_strides), c.dout_strides = c_strides(p.dout_strides);
  c.dq_strides = c_strides(p.dq_strides), c.dk_strides = c_strides(p.dk_strides), c.dv_strides = c_strides(p.dv_strides);
  c.bias = c_score_tensor(p.bias), c.mask = c_score_tensor(p.mask);
  if (p.scale) c.scale = *p.scale;
  c.softcap = p.softcap, c.dropout_p = p.dropout_p, c.alibi = p.alibi, c.alibi_batch_stride = p.alibi_batch_stride;
  c.window_left = p.window_left, c.window_right = p.window_right, c.causal = p.causal;
  c.alignment = static_cast<std::int32_t>(p.alignment);
  c.key_lengths = p.key_lengths, c.seqused_q = p.seqused_q, c.seqused_kv = p.seqused_kv, c.sink = p.sink;
  c.deterministic = p.deterministic, c.left_padding = p.left_padding;
  c.page_size = p.page_size, c.num_pages = p.num_pages, c.page_table_stride = p.page_table_stride;
  c.hidden_bounds = p.hidden_rows.bounds, c.hidden_batch_stride = p.hidden_rows.batch_stride;
  c.hidden_head_stride = p.hidden_rows.head_stride;
  const BlockMask& m = p.block_mask;
  c.mask_block_q = m.block_q, c.mask_block_kv = m.block_kv, c.block_mask_batch_stride = m.batch_stride;
  c.block_mask_head_stride = m.head_stride, c.block_mask_q_stride = m.q_stride;
  c.invariant = p.invariant;
  if (p.kv_dtype) c.kv_dtype = static_cast<std::int32_t>(*p.kv_dtype);
  c.kv_scales = static_cast<std::int32_t>(p.kv_scales);
  c.latent = p.latent;
  c.k_scale_strides = c_strides(p.k_scale_strides), c.v_scale_strides = c_strides(p.v_scale_strides);
  if (p.q_dtype) c.q_dtype = static_cast<std::int32_t>(*p.q_dtype);
  c.q_scales = static_cast<std::int32_t>(p.q_scales);
  c.q_scale_strides = c_strides(p.q_scale_strides);
  c.attention_chunk = p.attention_chunk;
  c.precision = static_cast<std::int32_t>(p.precision);
  c.key_list_kind = static_cast<std::int32_t>(p.key_list.kind), c.key_list_entries = p.key_list.entries;
  c.key_list_heads = p.key_list.heads, c.key_list_block_q = p.key_list.block_q;
  c.key_list_block_kv = p.key_list.block_kv, c.key_list_counts = p.key_list.counts;
  c.bit_mask_kind = static_cast<std::int32_t>(p.bit_mask.kind), c.bit_mask_row_bytes = p.bit_mask.row_bytes;
  c.bit_mask_offsets = p.bit_mask.offsets, c.sequence_windows = p.sequence_windows;
  c.return_max_logit = p.return_max_logit, c.return_key_mass = p.return_key_mass, c.return_entropy = p.return_entropy;
  c.kv_group = p.kv_group, c.k_group_strides = c_strides(p.k_group_strides),
  c.v_group_strides = c_strides(p.v_group_strides);
  return c;
}

flash_attention_buffers c_buffers(const Buffers& b) {
  flash_attention_buffers c;
  flash_attention_buffers_init(&c);
  c.q = b.q, c.k = b.k, c.v = b.v, c.out = b.out, c.lse = b.lse, c.bias = b.bias, c.mask = b.mask;
  c.alibi_slopes = b.alibi_slopes, c.sink = b.sink, c.cu_seqlens_q = b.cu_seqlens_q, c.cu_seqlens_kv = b.cu_seqlens_kv;
  c.seqused_q = b.seqused_q, c.seqused_kv = b.seqused_kv, c.key_lengths = b.key_lengths;
  c.left_padding = b.left_padding, c.page_table = b.page_table;
  c.hidden_rows = b.hidden_rows, c.block_mask = b.block_mask, c.k_scale = b.k_scale, c.v_scale = b.v_scale;
  c.q_scale = b.q_scale, c.key_list = b.key_list, c.key_counts = b.key_counts;
  c.max_logit = b.max_logit, c.key_mass = b.key_mass, c.entropy = b.entropy;
  c.dkey_mass = b.dkey_mass, c.dentropy = b.dentropy;
  c.bit_mask = b.bit_mask, c.bit_mask_offsets = b.bit_mask_offsets, c.sequence_windows = b.sequence_windows;
  c.k_group_scale = b.k_group_scale, c.v_group_scale = b.v_group_scale;
  c.k_group_zero = b.k_group_zero, c.v_group_zero = b.v_group_zero;
  c.dout = b.dout, c.dlse = b.dlse, c.dq = b.dq, c.dk = b.dk, c.dv = b.dv, c.dbias = b.dbias, c.dsink = b.dsink;
  return c;
}

/// The results of a case through the C++ or the C interface: those of backward where forward's are given.
Results run(const Case& c, const Inputs& in, bool through_c, const Results* forward_results = nullptr) {
  const auto memory = memory_of({});
  Tensors tensors(c, in, *memory);
  const bool gradients = forward_results != nullptr;
  if (gradients) tensors.set_forward(*forward_results);
  Buffers b = tensors.buffers();
  if (!gradients) b.dout = nullptr, b.dlse = nullptr, b.dq = b.dk = b.dv = b.dbias = nullptr, b.dsink = nullptr;
  Options options{.seed = c.dropout_seed, .offset = c.dropout_offset};
  const Pass pass = gradients ? Pass::backward : Pass::forward;
  options.workspace_bytes = workspace_bytes(c.problem, pass, options);
  if (options.workspace_bytes > 0) options.workspace = memory->allocate(options.workspace_bytes);
  if (!through_c) {
    (gradients ? backward : forward)(c.problem, b, options);
    return tensors.read(gradients);
  }
  const flash_attention_problem problem = c_problem(c.problem);
  const flash_attention_buffers buffers = c_buffers(b);
  flash_attention_options o;
  flash_attention_options_init(&o);
  o.seed = options.seed, o.offset = options.offset, o.workspace = options.workspace;
  o.workspace_bytes = options.workspace_bytes;
  std::size_t bytes = 0;
  EXPECT_EQ(flash_attention_workspace_bytes(&problem, static_cast<std::int32_t>(pass), &o, &bytes), FLASH_ATTENTION_OK);
  EXPECT_EQ(bytes, options.workspace_bytes);
  EXPECT_EQ((gradients ? flash_attention_backward : flash_attention_forward)(&problem, &buffers, &o), FLASH_ATTENTION_OK)
      << flash_attention_last_error();
  return tensors.read(gradients);
}

void expect_same_bits(const Case& c, bool gradients) {
  const Inputs in = draw_inputs(c);
#if defined(__SANITIZE_ADDRESS__)  // looks at memory: the same calls by the other door show it nothing new
  const Results done = run(c, in, true);
  if (gradients) run(c, in, true, &done);
  return;
#endif
  const Results cpp = run(c, in, false), through_c = run(c, in, true);
  const auto same = [](const std::vector<double>& a, const std::vector<double>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
  };
  EXPECT_TRUE(same(cpp.out, through_c.out) && same(cpp.lse, through_c.lse)) << c.name;
  EXPECT_TRUE(same(cpp.max_logit, through_c.max_logit) && same(cpp.key_mass, through_c.key_mass)) << c.name;
  EXPECT_TRUE(same(cpp.entropy, through_c.entropy)) << c.name;
  if (!gradients) return;
  const Results x = run(c, in, false, &cpp), y = run(c, in, true, &cpp);
  EXPECT_TRUE(same(x.dq, y.dq) && same(x.dk, y.dk) && same(x.dv, y.dv)) << c.name;
  EXPECT_TRUE(same(x.dbias, y.dbias) && same(x.dsink, y.dsink)) << c.name;
}

TEST(CApiFields, TheContractGivesTheSameBits) {
  for (const Case& c : contract_cases(Dtype::float32)) expect_same_bits(c, true);
  for (const Case& c : mask_cases(Dtype::float32)) expect_same_bits(c, true);
  for (const Case& c : some_of(statistics_cases(Dtype::float32), 8)) expect_same_bits(c, true);
  for (const Case& c : cache_cases(Dtype::bfloat16)) expect_same_bits(c, false);
  for (const Case& c : latent_cases(Dtype::bfloat16)) expect_same_bits(c, false);
  for (const Case& c : bit_cases(Dtype::bfloat16)) expect_same_bits(c, false);
  for (const Case& c : some_of(group_cases(Dtype::bfloat16), 4)) expect_same_bits(c, false);
}

TEST(CApiFields, SlopesOfEverySequence) {
  Case c;
  c.name = "slopes of every sequence";
  c.problem = {.batch = 3, .seq_q = 20, .seq_kv = 30, .heads_q = 2, .heads_kv = 2, .head_dim = 16};
  c.problem.alibi = true, c.problem.alibi_batch_stride = 2;
  expect_same_bits(c, true);
  Case shared = c;  // and the stride matters
  shared.problem.alibi_batch_stride = 0;
  EXPECT_NE(run(c, draw_inputs(c), true).out, run(shared, draw_inputs(shared), true).out);
}

}  // namespace
}  // namespace flash_attention::testing
