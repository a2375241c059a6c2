#pragma once

#include <cstdint>
#include <optional>
#include <string>

// What a call is besides its tensors: one line for an option, in the order in which Python gives them. From this list come
// the struct below, how it is read from Python and from JAX's attributes, flash_attention.options.Options, and the
// arguments of the torch ops.

/// X(kind, name, default, the argument that a refusal names, what it expects)
#define FLASH_ATTENTION_CALL_OPTIONS(X)                                                    \
  X(integer, max_seqlen_q, 0, "max_seqlen_q", "an int")                                    \
  X(integer, max_seqlen_kv, 0, "max_seqlen_kv", "an int")                                  \
  X(optional_number, scale, std::nullopt, "scale", "a number or None")                     \
  X(number, softcap, 0, "softcap", "a number")                                             \
  X(flag, causal, false, "causal", "a bool")                                               \
  X(flag, top_left, false, "top_left", "a bool")                                           \
  X(integer, window_left, -1, "window", "ints or None")                                    \
  X(integer, window_right, -1, "window", "ints or None")                                   \
  X(number, dropout_p, 0, "dropout_p", "a number")                                         \
  X(flag, deterministic, false, "deterministic", "a bool")                                 \
  X(flag, heads_first, false, "heads_first", "a bool") /* [batch, heads, seq, head_dim] */ \
  X(flag, standard, false, "standard", "a bool")       /* the textbook algorithm */        \
  X(text, kernel, "", "kernel", "a name")                                                  \
  X(integer, mask_block_q, 0, "block_mask", "sizes of blocks")                             \
  X(integer, mask_block_kv, 0, "block_mask", "sizes of blocks")                            \
  X(integer, attention_chunk, 0, "attention_chunk", "an int")                              \
  X(text, precision, "auto", "precision", "'auto', 'ieee', 'fast' or 'tf32'")

namespace flash_attention::python {

namespace option_kind {
using integer = std::int64_t;
using number = float;
using optional_number = std::optional<float>;
using flag = bool;
using text = std::string;
}  // namespace option_kind

struct CallOptions {
#define FLASH_ATTENTION_MEMBER(kind, name, default_value, ...) option_kind::kind name = default_value;
  FLASH_ATTENTION_CALL_OPTIONS(FLASH_ATTENTION_MEMBER)
#undef FLASH_ATTENTION_MEMBER

  bool operator==(const CallOptions&) const = default;
};

}  // namespace flash_attention::python
