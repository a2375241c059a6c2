#include "cpu/program_code.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <numeric>
#include <tuple>

#include "flash_attention/error.h"
#include "program/sizes.h"

namespace flash_attention::cpu {
namespace {

using program::Node;
using program::Op;

/// The same nodes without duplicates. Nodes that were made from the first `num_given` (derivatives) come as soon as
/// their arguments are there, not after all of them, so that few values are live at the same time.
std::vector<Node> in_order(const std::vector<Node>& nodes, std::size_t num_given, std::vector<int>& roots) {
  std::vector<int> after(nodes.size(), 0), order(nodes.size()), moved(nodes.size());
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    if (n < num_given) after[n] = static_cast<int>(n);
    for (const int arg : nodes[n].args) {
      if (arg >= 0) after[n] = std::max(after[n], after[static_cast<std::size_t>(arg)]);
    }
  }
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int x, int y) { return after[static_cast<std::size_t>(x)] < after[static_cast<std::size_t>(y)]; });
  std::vector<Node> result;
  std::map<std::tuple<Op, program::Type, std::array<int, 4>, int, std::int32_t, std::uint32_t>, int> known;
  for (const int n : order) {
    Node node = nodes[static_cast<std::size_t>(n)];
    for (int& arg : node.args) arg = arg < 0 ? -1 : moved[static_cast<std::size_t>(arg)];
    const auto [entry, is_new] = known.try_emplace(
        {node.op, node.type, node.args, node.index, node.integer, std::bit_cast<std::uint32_t>(node.real)},
        static_cast<int>(result.size()));
    if (is_new) result.push_back(node);
    moved[static_cast<std::size_t>(n)] = entry->second;
  }
  for (int& root : roots) root = root < 0 ? -1 : moved[static_cast<std::size_t>(root)];
  return result;
}

/// The slot of each node's value. A slot is free after the last use, unless the value is the same for all keys and used
/// for each of them.
class Slots {
 public:
  Slots(const std::vector<Node>& nodes, const std::vector<int>& roots, const std::vector<bool>& varying)
      : last_use_(nodes.size(), -1) {
    for (std::size_t n = 0; n < nodes.size(); ++n) {
      for (const int arg : nodes[n].args) {
        if (arg >= 0) last_use_[static_cast<std::size_t>(arg)] = static_cast<int>(n);
      }
    }
    for (const int root : roots) {
      if (root >= 0) last_use_[static_cast<std::size_t>(root)] = static_cast<int>(nodes.size());
    }
    std::vector<bool> kept(nodes.size(), false);
    for (std::size_t n = 0; n < nodes.size(); ++n) {
      for (const int arg : nodes[n].args) {
        if (arg >= 0 && varying[n] && !varying[static_cast<std::size_t>(arg)]) kept[static_cast<std::size_t>(arg)] = true;
      }
    }
    slots_.resize(nodes.size(), -1);
    for (const bool fixed : {true, false}) {
      for (std::size_t n = 0; n < nodes.size(); ++n) {
        if (varying[n] == fixed) continue;
        slots_[n] = take();
        for (std::size_t arg = 0; arg < n; ++arg) {
          if (varying[arg] != fixed && !kept[arg] && last_use_[arg] == static_cast<int>(n)) free_.push_back(slots_[arg]);
        }
      }
    }
    if (next_ > program_slots) {
      throw Error(ErrorCode::unsupported, "program: it needs " + std::to_string(next_) + " values at once; the CPU keeps " +
                                              std::to_string(program_slots));
    }
  }
  std::int16_t operator[](int node) const {
    return static_cast<std::int16_t>(node < 0 ? 0 : slots_[static_cast<std::size_t>(node)]);
  }

 private:
  int take() {
    if (free_.empty()) return next_++;
    const int slot = free_.back();
    free_.pop_back();
    return slot;
  }
  std::vector<int> last_use_, slots_, free_;
  int next_ = 0;
};

}  // namespace

Code CompiledProgram::compile(std::vector<Node> all, std::vector<int> roots) {
  program::keep_values(all, roots);
  const std::vector<Node> ordered = in_order(all, program_.nodes.size(), roots);
  const std::vector<Node> nodes = program::slice(ordered, roots);
  std::vector<bool> varying(nodes.size(), false), uniform(nodes.size(), true);
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    varying[n] = nodes[n].op == Op::j || nodes[n].op == Op::score;
    uniform[n] = nodes[n].op != Op::i && nodes[n].op != Op::h && nodes[n].op != Op::score;
    for (const int arg : nodes[n].args) {
      if (arg < 0) continue;
      varying[n] = varying[n] || varying[static_cast<std::size_t>(arg)];
      uniform[n] = uniform[n] && uniform[static_cast<std::size_t>(arg)];
    }
  }
  const Slots slots(nodes, roots, varying);
  const auto varies = [&](int node) { return node >= 0 && varying[static_cast<std::size_t>(node)]; };
  auto& instructions = *codes_.emplace_back(std::make_unique<std::vector<Instruction>>());
  Code code;
  for (const bool fixed : {true, false}) {
    for (std::size_t n = 0; n < nodes.size(); ++n) {
      if (varying[n] == fixed) continue;
      const Node& node = nodes[n];
      Instruction step{.op = node.op,
                       .type = node.type,
                       .arg_type = node.args[0] < 0 ? node.type : nodes[static_cast<std::size_t>(node.args[0])].type,
                       .varying = 0,
                       .to = slots[static_cast<int>(n)],
                       .args = {},
                       .index = static_cast<std::int16_t>(node.index),
                       .uniform = uniform[n],
                       .integer = node.type == program::Type::boolean ? -node.integer : node.integer,
                       .real = node.real};
      for (std::size_t arg = 0; arg < 4; ++arg) {
        step.args[arg] = slots[node.args[arg]];
        if (varies(node.args[arg])) step.varying = static_cast<std::uint8_t>(step.varying | 1u << arg);
      }
      instructions.push_back(step);
    }
    if (fixed) code.num_fixed = static_cast<int>(instructions.size());
  }
  code.instructions = instructions.data();
  code.count = static_cast<int>(instructions.size());
  code.num_results = static_cast<int>(roots.size());
  for (std::size_t n = 0; n < roots.size(); ++n) {
    code.results[n] = slots[roots[n]];
    if (varies(roots[n])) code.varying |= std::uint64_t{1} << n;
  }
  return code;
}

CompiledProgram::CompiledProgram(const Problem& problem, Pass pass, const ProgramRunner& runner)
    : known_(program::parsed(problem.program)), program_(*known_) {
  view_.runner = runner;
  for (std::size_t n = 0; n < program_.tensors.size(); ++n) {
    ProgramTensor& tensor = view_.tensors[n];
    tensor.element = program_.tensors[n].element;
    tensor.rank = program_.tensors[n].rank;
    for (std::size_t axis = 0; axis < static_cast<std::size_t>(tensor.rank); ++axis)
      tensor.sizes[axis] = static_cast<std::int32_t>(problem.program_sizes[n][axis]);
  }
  if (program_.visible >= 0) {
    view_.visible = compile(program_.nodes, {program_.visible});
    std::vector<int> roots{program_.visible};
    mask_nodes_ = program::slice(program_.nodes, roots);
    visible_ = roots[0];
  }
  if (program_.score < 0) return;
  view_.score = compile(program_.nodes, {program_.score});
  if (pass == Pass::backward || pass == Pass::tangent) compile_gradients(problem);
}

void CompiledProgram::compile_gradients(const Problem& problem) {
  std::vector<Node> nodes = program_.nodes;
  int score = -1;
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    if (nodes[n].op == Op::score) score = static_cast<int>(n);
  }
  int slope = score < 0 ? -1 : program::derive(nodes, program_.score, score);
  if (slope < 0) {
    nodes.push_back({.op = Op::literal, .type = program::Type::real});
    slope = static_cast<int>(nodes.size()) - 1;
  }
  view_.slope = compile(nodes, {program_.score, slope});

  sums_ = program::gradient_layout(problem, program_);
  if (sums_.bytes == 0) return;
  for (int n = 0; n < program::max_tensors; ++n) {
    if (sums_.offsets[n] >= 0) view_.gradient_counts[n] = program::num_elements(problem, program_, n);
  }
  std::vector<int> roots;
  for (std::size_t n = 0; n < program_.nodes.size(); ++n) {
    const Node node = program_.nodes[n];
    if (node.op != Op::load || (problem.program_gradients >> node.index & 1u) == 0) continue;
    if (view_.gradient_counts[node.index] == 0) continue;
    const int derivative = program::derive(nodes, program_.score, static_cast<int>(n));
    if (derivative < 0) continue;
    if (roots.size() + 2 > program_results) {
      throw Error(ErrorCode::unsupported,
                  "program: gradients of more than " + std::to_string(program_results / 2) + " reads of captured tensors");
    }
    view_.gradient_tensors[roots.size() / 2] = node.index;
    Node offset = node;
    offset.op = Op::offset;
    offset.type = program::Type::integer;
    nodes.push_back(offset);
    roots.push_back(derivative);
    roots.push_back(static_cast<int>(nodes.size()) - 1);
  }
  if (!roots.empty()) view_.gradients = compile(nodes, roots);
}

ProgramCall::ProgramCall(const CompiledProgram& compiled, const Buffers& buffers, char* workspace) : view_(compiled.view_) {
  const program::Program& program = compiled.program_;
  std::vector<program::HostTensor> tensors(program.tensors.size());
  for (std::size_t n = 0; n < tensors.size(); ++n) {
    ProgramTensor& tensor = view_.tensors[n];
    tensors[n].data = tensor.data = buffers.program_tensors[n];
    for (std::size_t axis = 0; axis < static_cast<std::size_t>(tensor.rank); ++axis)
      tensors[n].sizes[axis] = tensor.sizes[axis];
  }
  for (std::size_t n = 0; n < program.scalars.size(); ++n) {
    const double given = buffers.program_scalars[n];
    view_.scalars[n] = program.scalars[n] == program::Type::real ? static_cast<float>(given)
                                                                 : std::bit_cast<float>(static_cast<std::int32_t>(given));
  }
  if (program.visible >= 0) {
    visible_ = compiled.visible_;
    classes_.emplace(compiled.mask_nodes_, program.tensors, std::move(tensors),
                     std::vector<float>(view_.scalars, view_.scalars + program.scalars.size()));
    view_.classes = this;
    view_.classify = [](const void* self, const ProgramArea& area) {
      const auto& call = *static_cast<const ProgramCall*>(self);
      const auto seen = call.classes_->of(call.visible_, {area.b, area.b + 1, area.h_begin, area.h_end, area.i_begin,
                                                          area.i_end, area.j_begin, area.j_end});
      return !seen.can_be_true ? ProgramTile::hidden : seen.can_be_false ? ProgramTile::edge : ProgramTile::open;
    };
  }
  const program::GradientLayout& sums = compiled.sums_;
  if (sums.bytes == 0) return;
  std::memset(workspace, 0, static_cast<std::size_t>(sums.bytes));
  view_.gradient_limits = reinterpret_cast<float*>(workspace);
  for (int n = 0; n < program::max_tensors; ++n) {
    if (sums.offsets[n] < 0) continue;
    view_.gradient_sums[n] = reinterpret_cast<std::int64_t*>(workspace + sums.offsets[n]);
    view_.tensor_gradients[n] = buffers.program_gradients[n];
  }
}

}  // namespace flash_attention::cpu
