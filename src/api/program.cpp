#include "api/program.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "api/checks/refuse.h"
#include "flash_attention/error.h"
#include "program/classes.h"
#include "program/program.h"
#include "program/sizes.h"

namespace flash_attention::api {
namespace {

using program::Node;
using program::Program;

std::string tensor_name(int n) { return "program tensor t" + std::to_string(n); }

void check_tensor(const Problem& p, const Program& parsed, int n) {
  const auto which = static_cast<std::size_t>(n);
  const bool declared = which < parsed.tensors.size();
  const int rank = declared ? parsed.tensors[which].rank : 0;
  double count = 1;
  for (int axis = 0; axis < program::max_rank; ++axis) {
    const std::int64_t size = p.program_sizes[which][static_cast<std::size_t>(axis)];
    if (axis >= rank && size != 0) {
      refuse(
          tensor_name(n) + " size " + std::to_string(axis), std::to_string(size),
          declared ? "the program says that it has " + std::to_string(rank) + " axes" : "the program has no such tensor");
    }
    if (axis < rank && size < 0) refuse(tensor_name(n), std::to_string(size), "sizes are 0 and up");
    if (axis < rank) count *= static_cast<double>(size);
  }
  if (count > std::numeric_limits<std::int32_t>::max()) {
    refuse(tensor_name(n), std::to_string(static_cast<std::int64_t>(count)) + " elements", "at most 2^31 - 1 are allowed");
  }
  if ((p.program_gradients >> n & 1u) == 0) return;
  const bool has_gradient = declared && program::is_real(parsed.tensors[which].element);
  if (!has_gradient) refuse("program_gradients", "bit " + std::to_string(n), "only tensors of floats have gradients");
}

/// Bits: which of b, h, i, j a node depends on; -1 if it depends on the contents of a tensor or a scalar.
int depends_on(const std::vector<Node>& nodes, int root) {
  std::vector<int> roots{root};
  int bits = 0;
  for (const Node& node : program::slice(nodes, roots)) {
    if (node.op == program::Op::load || node.op == program::Op::scalar || node.op == program::Op::score) return -1;
    for (int n = 0; n < 4; ++n) {
      const program::Op ops[] = {program::Op::b, program::Op::h, program::Op::i, program::Op::j};
      if (node.op == ops[n]) bits |= 1 << n;
    }
  }
  return bits;
}

/// The smallest and the largest index that really occur, or nothing if it would take too long to find them.
struct Extremes {
  bool known = false;
  std::int64_t lo = 0, hi = 0;
};

Extremes extremes(const Problem& p, const std::vector<Node>& nodes, int root) {
  constexpr double max_scores = 1 << 14;
  const int bits = depends_on(nodes, root);
  const std::int64_t sizes[4] = {p.batch, p.heads_q, p.seq_q, p.seq_kv};
  std::int64_t counts[4];
  double total = 1;
  for (int n = 0; n < 4; ++n) {
    counts[n] = (bits >> n & 1) != 0 ? sizes[n] : 1;
    total *= static_cast<double>(counts[n]);
  }
  if (bits < 0 || total > max_scores) return {};
  std::vector<int> roots{root};
  const program::Classes classes(program::slice(nodes, roots), {}, {}, {});
  std::vector<program::Range> ranges;
  Extremes found{true, std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()};
  for (std::int64_t b = 0; b < counts[0]; ++b) {
    for (std::int64_t h = 0; h < counts[1]; ++h) {
      for (std::int64_t i = 0; i < counts[2]; ++i) {
        for (std::int64_t j = 0; j < counts[3]; ++j) {
          classes.ranges({b, b + 1, h, h + 1, i, i + 1, j, j + 1}, ranges);
          const auto& value = ranges[static_cast<std::size_t>(roots[0])].ints;
          if (value.lo != value.hi) return {};
          found.lo = std::min<std::int64_t>(found.lo, value.lo);
          found.hi = std::max<std::int64_t>(found.hi, value.hi);
        }
      }
    }
  }
  return found;
}

/// Refuses an index that leaves its axis: for every score if only its range is known, otherwise for one that really
/// occurs.
void check_indices(const Problem& p, const Program& parsed) {
  if (std::min({p.batch, p.heads_q, p.seq_q, p.seq_kv}) == 0) return;
  const program::Classes classes(parsed.nodes, {}, {}, {});
  std::vector<program::Range> ranges;
  classes.ranges({0, p.batch, 0, p.heads_q, 0, p.seq_q, 0, p.seq_kv}, ranges);
  for (const Node& node : parsed.nodes) {
    if (node.op != program::Op::load) continue;
    const auto which = static_cast<std::size_t>(node.index);
    for (int axis = 0; axis < parsed.tensors[which].rank; ++axis) {
      const std::int64_t size = p.program_sizes[which][static_cast<std::size_t>(axis)];
      const int index = node.args[static_cast<std::size_t>(axis)];
      const auto& range = ranges[static_cast<std::size_t>(index)].ints;
      if (range.lo >= -size && range.hi < size) continue;
      Extremes occur{range.lo >= size || range.hi < -size, range.lo, range.hi};
      if (!occur.known) occur = extremes(p, parsed.nodes, index);
      if (!occur.known || (occur.lo >= -size && occur.hi < size)) continue;
      throw Error(ErrorCode::invalid_argument,
                  "program: line " + std::to_string(node.line) + ": index " + std::to_string(axis) + " of t" +
                      std::to_string(node.index) + " runs from " + std::to_string(occur.lo) + " to " +
                      std::to_string(occur.hi) + "; allowed are " + std::to_string(-size) + " to " +
                      std::to_string(size - 1) + ", and that axis has " + std::to_string(size) + " elements");
    }
  }
}

}  // namespace

void check_program(Problem& p, Pass pass) {
  if (pass != Pass::backward) p.program_gradients = 0;
  if (p.program.empty()) {
    require(p.program_gradients == 0, "program_gradients", std::int64_t{p.program_gradients}, "there is no program");
    require(p.program_sizes == decltype(p.program_sizes){}, "program_sizes", std::int64_t{1}, "there is no program");
    return;
  }
  const auto known = program::parsed(p.program);
  const Program& parsed = *known;
  for (int n = 0; n < program::max_tensors; ++n) check_tensor(p, parsed, n);
  require(p.program_gradients >> program::max_tensors == 0, "program_gradients", std::int64_t{p.program_gradients},
          "there are at most 8 tensors");
  require(p.program_gradients == 0 || parsed.score >= 0, "program_gradients", std::int64_t{p.program_gradients},
          "a program without a score has no gradients: which keys are visible has no derivative");
  check_indices(p, parsed);
}

void check_program_pointers(const Problem& p, Pass pass, const Buffers& b) {
  if (p.program.empty()) return;
  const auto known = program::parsed(p.program);
  const Program& parsed = *known;
  const auto check_pointer = [&](const std::string& name, const void* pointer, bool needed, std::int64_t alignment) {
    if (needed && pointer == nullptr) refuse(name, "null", "the program needs it");
    if (reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(alignment) != 0) {
      refuse(name, "a misaligned pointer", "it must be aligned to " + std::to_string(alignment) + " bytes");
    }
  };
  check_pointer("program_tensors", b.program_tensors, !parsed.tensors.empty(), 1);
  check_pointer("program_scalars", b.program_scalars, !parsed.scalars.empty(), 8);
  check_pointer("program_gradients", b.program_gradients, pass == Pass::backward && p.program_gradients != 0, 1);
  for (int n = 0; n < static_cast<int>(parsed.tensors.size()); ++n) {
    const bool some = program::num_elements(p, parsed, n) > 0;
    check_pointer(tensor_name(n), b.program_tensors[n], some,
                  program::size_of(parsed.tensors[static_cast<std::size_t>(n)].element));
    if (pass != Pass::backward || (p.program_gradients >> n & 1u) == 0) continue;
    check_pointer("the gradient of " + tensor_name(n), b.program_gradients[n], some, 4);
  }
  for (std::size_t n = 0; n < parsed.scalars.size(); ++n) {
    const double value = b.program_scalars[n];
    if (parsed.scalars[n] == program::Type::real) continue;
    const bool fits = value == std::floor(value) && value >= -0x1p31 && value < 0x1p31;
    if (!fits) refuse("program scalar s" + std::to_string(n), std::to_string(value), "allowed are ints of 32 bits");
  }
}

std::string described_program(const Problem& p) {
  if (p.program.empty()) return {};
  std::string text = "program:\n  ";
  for (const char c : p.program) {
    text += c;
    if (c == '\n') text += "  ";
  }
  return text + "\n";
}

}  // namespace flash_attention::api
