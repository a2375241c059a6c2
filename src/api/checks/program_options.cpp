#include "api/checks/program_options.h"

#include <optional>

#include "api/checks/pointers.h"
#include "program/lower/options.h"

namespace flash_attention::api {
namespace {

/// Whether the program's distance is that of ALiBi, |i + seq_kv - seq_q - j|, with a slope for each head.
bool is_alibi(const Problem& p, const program::OptionsOfProgram& taken) {
  if (p.alibi || p.packed || p.seqused_q || p.seqused_kv || taken.offset != p.seq_kv - p.seq_q) return false;
  const bool never_negative = taken.offset == 0 && p.window_right == 0;
  if (!taken.absolute && !never_negative) return false;
  const auto& sizes = p.program_sizes[static_cast<std::size_t>(taken.slopes)];
  return taken.by_batch ? sizes[0] >= p.batch && sizes[1] >= p.heads_q : sizes[0] >= p.heads_q;
}

}  // namespace

void take_options_of_program(Problem& p) {
  if (p.program.empty() || p.program_gradients != 0) return;
  const std::optional<program::OptionsOfProgram> taken = program::take_options(p.program);
  if (!taken || (taken->slopes >= 0 && !is_alibi(p, *taken))) return;
  // The cap is applied before bias and ALiBi, and a program after them.
  if (taken->softcap > 0 && (p.softcap != 0 || p.bias.present || p.alibi)) return;
  if (taken->softcap > 0) p.softcap = taken->softcap;
  if (taken->slopes >= 0) {
    p.alibi = true;
    p.alibi_batch_stride = taken->by_batch ? p.program_sizes[static_cast<std::size_t>(taken->slopes)][1] : 0;
  }
  p.program = taken->rest;
  if (p.program.empty()) p.program_sizes = {};
}

int slopes_of_program(const Problem& given, const Problem& normalised) {
  if (given.alibi || !normalised.alibi) return -1;
  return program::take_options(given.program)->slopes;
}

Buffers with_slopes(const Problem& p, const Buffers& buffers, int tensor) {
  check_pair("alibi_slopes", buffers.alibi_slopes, false, "alibi", 4, true);
  check_pointer("program_tensors", buffers.program_tensors, true, 1);
  Buffers result = buffers;
  result.alibi_slopes = static_cast<const float*>(buffers.program_tensors[tensor]);
  const bool has_slopes = p.batch != 0 || p.alibi_batch_stride == 0;
  check_pointer(("program tensor t" + std::to_string(tensor)).c_str(), result.alibi_slopes, has_slopes, 4);
  return result;
}

}  // namespace flash_attention::api
