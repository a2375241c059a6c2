#pragma once

// Every field of Problem, once. The hash goes over this list, and the C interface copies by it: a new field is a line in
// problem.h, one in c_api.h and one here.

// clang-format off
/// X(name): the C struct has it under the same name. Y(name): the C struct has its parts.
#define FLASH_ATTENTION_PROBLEM_FIELDS(X, Y)                                                                       \
  X(batch) X(seq_q) X(seq_kv) X(heads_q) X(heads_kv) X(head_dim) X(head_dim_v) X(dtype) X(packed) X(total_q)       \
  X(total_kv)                                                                                                      \
  X(q_strides) X(k_strides) X(v_strides) X(out_strides) X(dout_strides) X(dq_strides) X(dk_strides) X(dv_strides)  \
  X(scale) X(softcap) X(bias) X(alibi) X(alibi_batch_stride)                                                       \
  X(causal) X(alignment) X(window_left) X(window_right) X(mask) X(key_lengths) X(seqused_q) X(seqused_kv)          \
  X(left_padding)                                                                                                  \
  X(page_size) X(num_pages) X(page_table_stride)                                                                   \
  X(sink) X(dropout_p) X(deterministic)                                                                            \
  Y(hidden_rows) Y(block_mask) X(program) X(program_sizes) X(program_gradients)                                    \
  X(invariant)                                                                                                     \
  X(kv_dtype) X(kv_scales) X(k_scale_strides) X(v_scale_strides)                                                   \
  X(latent)                                                                                                        \
  X(q_dtype) X(q_scales) X(q_scale_strides)                                                                        \
  X(attention_chunk)                                                                                               \
  X(precision)
// clang-format on
