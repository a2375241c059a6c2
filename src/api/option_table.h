#pragma once

// One row for each option, and one for each other field of Problem. The hash of a problem and the copy from the C
// struct are generated from these rows. From the rows of options so are CallOptions, its readers for Python and for
// JAX's attributes, flash_attention.options.Options and the arguments of the torch ops. A new option is a row here, a
// field of Problem and a field of the C struct; tests/api/option_table_test.cpp switches on each row and checks that it
// is known everywhere.

// clang-format off
/// Arguments that callers give by name, in the order of the Python signature:
/// X(kind, name, default, the argument that a refusal names, what it expects, form, scores)
///
/// form: `same`: Problem and the C struct have a field of this name; `parts`: the C struct has its parts; `call`:
/// Problem has no field of this name. scores: the option's effect on scores. `touches`: Features::touches_scores();
/// `hides`: Features::hides_keys(); `nothing`.
#define FLASH_ATTENTION_NAMED_OPTIONS(X) /* the last of them: what attention() takes by this name, and passes on as it is */ \
  X(integer, attention_chunk, 0, "attention_chunk", "an int", same, hides)                                  \
  X(text, precision, "auto", "precision", "'auto', 'ieee', 'fast' or 'tf32'", same, nothing)                \
  X(optional_flag, invariant, std::nullopt, "invariant", "a bool or None", call, nothing) /* None: by default */ \
  X(flag, return_max_logit, false, "return_max_logit", "a bool", same, nothing)                             \
  X(flag, return_key_mass, false, "return_key_mass", "a bool", same, nothing)                               \
  X(flag, return_entropy, false, "return_entropy", "a bool", same, nothing)

#define FLASH_ATTENTION_CALL_OPTIONS(X)                                                                     \
  X(integer, max_seqlen_q, 0, "max_seqlen_q", "an int", call, nothing)                                      \
  X(integer, max_seqlen_kv, 0, "max_seqlen_kv", "an int", call, nothing)                                    \
  X(optional_number, scale, std::nullopt, "scale", "a number or None", same, nothing)                       \
  X(number, softcap, 0, "softcap", "a number", same, touches)                                               \
  X(flag, causal, false, "causal", "a bool", same, hides)                                                   \
  X(flag, top_left, false, "top_left", "a bool", call, nothing)                                             \
  X(integer, window_left, -1, "window", "ints or None", same, hides)                                        \
  X(integer, window_right, -1, "window", "ints or None", same, hides)                                       \
  X(number, dropout_p, 0, "dropout_p", "a number", same, touches)                                           \
  X(flag, deterministic, false, "deterministic", "a bool", same, nothing)                                   \
  X(flag, heads_first, false, "heads_first", "a bool", call, nothing) /* [batch, heads, seq, head_dim] */   \
  X(flag, standard, false, "standard", "a bool", call, nothing)       /* the textbook algorithm */          \
  X(text, kernel, "", "kernel", "a name", call, nothing)                                                    \
  X(integer, mask_block_q, 0, "block_mask", "sizes of blocks", call, nothing)                               \
  X(integer, mask_block_kv, 0, "block_mask", "sizes of blocks", call, nothing)                              \
  X(integer, list_block_q, 0, "key_block_size", "sizes of blocks", call, nothing)                           \
  X(integer, list_block_kv, 0, "key_block_size", "sizes of blocks", call, nothing)                          \
  FLASH_ATTENTION_NAMED_OPTIONS(X)

/// The other fields of Problem, which follow from tensors: X(name, form, scores)
#define FLASH_ATTENTION_OTHER_FIELDS(X)                                                                     \
  X(batch, same, nothing) X(seq_q, same, nothing) X(seq_kv, same, nothing)                                  \
  X(heads_q, same, nothing) X(heads_kv, same, nothing)                                                      \
  X(head_dim, same, nothing) X(head_dim_v, same, nothing) X(dtype, same, nothing)                           \
  X(packed, same, nothing) X(total_q, same, nothing) X(total_kv, same, nothing)                             \
  X(q_strides, same, nothing) X(k_strides, same, nothing) X(v_strides, same, nothing)                       \
  X(out_strides, same, nothing) X(dout_strides, same, nothing)                                              \
  X(dq_strides, same, nothing) X(dk_strides, same, nothing) X(dv_strides, same, nothing)                    \
  X(bias, same, touches) X(alibi, same, touches) X(alibi_batch_stride, same, nothing)                       \
  X(alignment, same, nothing)                                                                               \
  X(mask, same, hides) X(hidden_rows, parts, hides) X(block_mask, parts, hides)                             \
  X(key_lengths, same, nothing) X(seqused_q, same, nothing) X(seqused_kv, same, nothing)                    \
  X(left_padding, same, hides)                                                                              \
  X(page_size, same, nothing) X(num_pages, same, nothing) X(page_table_stride, same, nothing)               \
  X(sink, same, nothing)                                                                                    \
  X(program, same, hides) X(program_sizes, same, nothing) X(program_gradients, same, nothing)               \
  X(invariant, same, nothing)                                                                               \
  X(kv_dtype, same, nothing) X(kv_scales, same, nothing)                                                    \
  X(k_scale_strides, same, nothing) X(v_scale_strides, same, nothing)                                       \
  X(latent, same, nothing)                                                                                  \
  X(q_dtype, same, nothing) X(q_scales, same, nothing) X(q_scale_strides, same, nothing)                    \
  X(key_list, parts, hides)                                                                                 \
  X(bit_mask, parts, hides) X(sequence_windows, same, hides)                                                \
  X(kv_group, same, nothing) X(k_group_strides, same, nothing) X(v_group_strides, same, nothing)
// clang-format on
