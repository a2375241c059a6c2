#pragma once

// The operations of a program. Enumerations alone: the objects of an instruction set see this file, too.

#include <cstdint>

namespace flash_attention::program {

enum class Type : std::uint8_t { boolean, integer, real };

enum class Op : std::uint8_t {
  // leaves
  score,
  b,
  h,
  i,
  j,
  literal,
  scalar,
  load,    // an element of a captured tensor
  offset,  // the place of that element: not in the text, backward makes it
  // arithmetic
  add,
  sub,
  mul,
  div,
  floordiv,
  mod,
  fmod,
  neg,
  abs,
  min,
  max,
  exp,
  log,
  tanh,
  sigmoid,
  sqrt,
  sin,
  cos,
  floor,
  detach,  // the value itself, whose derivative is 0
  slope,   // the first argument; its derivative is that plus the third times the derivative of the second
  // comparison and logic
  eq,
  ne,
  lt,
  le,
  gt,
  ge,
  logical_and,
  logical_or,
  logical_xor,
  logical_not,
  where,
  to_float,
  to_int,
};

enum class Element : std::uint8_t { float32, float16, bfloat16, int32, int64, boolean };

constexpr int max_tensors = 8, max_rank = 4, max_scalars = 16, max_values = 1024;

}  // namespace flash_attention::program
