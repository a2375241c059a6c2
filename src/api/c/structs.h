#pragma once

#include "flash_attention/append.h"
#include "flash_attention/attention.h"
#include "flash_attention/c_api.h"

namespace flash_attention::api {

// The structs of the C interface: their defaults, and their conversion to C++. A refusal names the argument.

/// Writes defaults to the first `size` bytes. A caller that was built against another header has a struct of another
/// size: nothing is written past its end.
void init_sized(flash_attention_problem* given, std::size_t size);
void init_sized(flash_attention_buffers* given, std::size_t size);
void init_sized(flash_attention_options* given, std::size_t size);
void init_sized(flash_attention_append_problem* given, std::size_t size);
void init_sized(flash_attention_append_buffers* given, std::size_t size);
void init_sized(flash_attention_append_gradients* given, std::size_t size);

Problem problem_of(const flash_attention_problem* given);
Buffers buffers_of(const flash_attention_buffers* given);
Options options_of(const flash_attention_options* given);
Pass pass_of(std::int32_t pass);
AppendProblem append_problem_of(const flash_attention_append_problem* given);
AppendBuffers append_buffers_of(const flash_attention_append_buffers* given);
AppendGradients append_gradients_of(const flash_attention_append_gradients* given);

}  // namespace flash_attention::api
