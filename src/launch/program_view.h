#pragma once

// A program in the form of the CPU's interpreter: plain data. docs/numerics.md defines each operation.

#include <cstdint>

#include "program/op.h"

namespace flash_attention::cpu {

constexpr int program_slots = 160;                              // values at the same time: 1 KB each with AVX-512
constexpr int program_keys = 16;                                // keys that an instruction processes
constexpr int program_results = 2 * program::max_tensors + 16;  // the most results of one code

struct Instruction {
  program::Op op;
  program::Type type;      // of the result
  program::Type arg_type;  // of the first argument
  std::uint8_t varying;    // bit n: argument n differs from key to key
  std::int16_t to;         // slot
  std::int16_t args[4];    // slots
  std::int16_t index;      // of the tensor or the scalar
  bool uniform;            // the same for all rows
  std::int32_t integer;    // a literal
  float real;
};

/// Instructions in order. The first `num_fixed` depend only on the row and run once for all keys.
struct Code {
  const Instruction* instructions = nullptr;  // null: there is no such code
  int num_fixed = 0, count = 0;
  int num_results = 0;
  std::int16_t results[program_results] = {};  // slots
  std::uint64_t varying = 0;                   // bit n: result n differs from key to key
};

struct ProgramTensor {
  const void* data = nullptr;
  program::Element element = program::Element::float32;
  int rank = 0;
  std::int32_t sizes[program::max_rank] = {};
};

/// The class of a tile under a mask program.
enum class ProgramTile : std::uint8_t { hidden, edge, open };

/// Rows [i_begin, i_end) of the heads [h_begin, h_end) and the keys [j_begin, j_end).
struct ProgramArea {
  std::int64_t b, h_begin, h_end, i_begin, i_end, j_begin, j_end;
};

/// Rows of one batch entry, a lane each.
struct ProgramRows {
  std::int64_t batch;
  const std::int32_t *heads, *queries;  // of each lane
  int lanes;                            // whole vectors
};

/// The values of a program's tile that backward keeps, each [key][lane]. Either may be null.
struct ProgramTerms {
  float* slope = nullptr;   // the derivative of the new score by the old one
  float* before = nullptr;  // the old scores
};

struct ProgramView;

/// The interpreter of an instruction set. Kernels of other instruction sets with the same vectors call it, too.
struct ProgramRunner {
  /// Clears bit j % 32 of bits[j / 32 * stride + lane] if a lane does not see key begin + j, for j below `keys`.
  void (*hide)(const ProgramView& program, const ProgramRows& rows, std::int64_t begin, int keys, std::uint32_t* bits,
               int stride);
  /// Applies the program to S [keys][lanes], in units of log2(e).
  void (*change)(const ProgramView& program, const ProgramRows& rows, std::int64_t begin, int keys, float* S,
                 ProgramTerms terms);
};

struct ProgramView {
  Code visible;    // one result
  Code score;      // the new score
  Code slope;      // the new score and its derivative; backward
  Code gradients;  // for each load that has a gradient, the derivative and the place of the element; backward
  int gradient_tensors[program_results / 2] = {};
  std::int64_t* gradient_sums[program::max_tensors] = {};  // null: no gradient is wanted
  float* gradient_limits = nullptr;                        // [max_tensors]: the largest term of each, so far
  float* tensor_gradients[program::max_tensors] = {};
  std::int64_t gradient_counts[program::max_tensors] = {};  // elements
  ProgramTensor tensors[program::max_tensors];
  float scalars[program::max_scalars] = {};  // or the bits of an int

  ProgramRunner runner = {};
  const void* classes = nullptr;
  ProgramTile (*classify)(const void* classes, const ProgramArea& area) = nullptr;
};

}  // namespace flash_attention::cpu
