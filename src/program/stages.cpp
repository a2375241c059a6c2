#include "program/stages.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace flash_attention::program {
namespace {

constexpr double no_bound = std::numeric_limits<double>::infinity();

/// value(node, of) for each node, of(n) being that of its argument n.
template <class Value>
std::vector<double> values(const std::vector<Node>& nodes, Value value) {
  std::vector<double> found(nodes.size());
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    found[n] = value(nodes[n], [&](std::size_t arg) { return found[static_cast<std::size_t>(nodes[n].args[arg])]; });
  }
  return found;
}

/// The largest magnitudes of the ints that in_floats can take; no_bound for others.
std::vector<double> largest_counts(const std::vector<Node>& nodes, double longest) {
  return values(nodes, [&](const Node& node, auto of) {
    if (node.type != Type::integer) return no_bound;
    switch (node.op) {
      case Op::i:
      case Op::j:
        return longest;
      case Op::literal:
        return std::abs(static_cast<double>(node.integer));
      case Op::add:
      case Op::sub:
        return of(0) + of(1);
      case Op::neg:
      case Op::abs:
        return of(0);
      default:
        return no_bound;
    }
  });
}

class InFloats {
 public:
  explicit InFloats(const std::vector<Node>& nodes) : nodes_(nodes), moved_(nodes.size(), -1), real_(nodes.size(), -1) {}

  std::vector<Node> run(double longest) {
    constexpr double exact = 1 << 24;
    const std::vector<Stage> stages = stages_of(nodes_);
    const std::vector<double> counts = largest_counts(nodes_, longest);
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      const Node& node = nodes_[n];
      const bool converts = node.op == Op::to_float && stages[n] == Stage::pair;
      if (converts && counts[static_cast<std::size_t>(node.args[0])] <= exact) {
        moved_[n] = real(node.args[0]);
      } else {
        moved_[n] = add(node, moved_);
      }
    }
    return std::move(result_);
  }

  int moved(int n) const { return n < 0 ? -1 : moved_[static_cast<std::size_t>(n)]; }

 private:
  int add(Node node, const std::vector<int>& numbers) {
    for (int& arg : node.args) arg = arg < 0 ? -1 : numbers[static_cast<std::size_t>(arg)];
    result_.push_back(node);
    return static_cast<int>(result_.size()) - 1;
  }

  int real(int n) {
    int& made = real_[static_cast<std::size_t>(n)];
    if (made >= 0) return made;
    Node node = nodes_[static_cast<std::size_t>(n)];
    node.type = Type::real;
    if (node.op == Op::i || node.op == Op::j) {
      const Node conversion{.op = Op::to_float, .type = Type::real, .args = {n, -1, -1, -1}, .line = node.line};
      return made = add(conversion, moved_);
    }
    if (node.op == Op::literal) node.real = static_cast<float>(node.integer);
    for (const int arg : node.args) {
      if (arg >= 0) real(arg);
    }
    return made = add(node, real_);
  }

  const std::vector<Node>& nodes_;
  std::vector<int> moved_, real_;  // the number of a node, and of the float that an int is
  std::vector<Node> result_;
};

double largest_of(const Node& node, auto of) {
  if (node.type == Type::integer) return 0x1p31;
  if (node.type == Type::boolean) return 1;
  switch (node.op) {
    case Op::literal:
      return std::abs(static_cast<double>(node.real));
    case Op::tanh:
    case Op::sigmoid:
    case Op::sin:
    case Op::cos:
      return 1;
    case Op::neg:
    case Op::abs:
    case Op::floor:
    case Op::detach:
    case Op::slope:
    case Op::fmod:
    case Op::to_float:
      return of(0);
    case Op::sqrt:
      return std::max(1.0, of(0));
    case Op::min:
    case Op::max:
      return std::max(of(0), of(1));
    case Op::where:
      return std::max(of(1), of(2));
    case Op::add:
    case Op::sub:
      return of(0) + of(1);
    case Op::mul:
      return of(0) == 0 || of(1) == 0 ? no_bound : of(0) * of(1);  // 0 times infinity
    default:
      return no_bound;
  }
}

}  // namespace

std::vector<Stage> stages_of(const std::vector<Node>& nodes) {
  std::vector<Stage> stages(nodes.size(), Stage::head);
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    const Op op = nodes[n].op;
    Stage stage = op == Op::score ? Stage::pair : op == Op::i ? Stage::row : op == Op::j ? Stage::key : Stage::head;
    for (const int arg : nodes[n].args) {
      if (arg < 0) continue;
      const Stage before = stages[static_cast<std::size_t>(arg)];
      if (before == Stage::head || before == stage) continue;
      stage = stage == Stage::head ? before : Stage::pair;
    }
    stages[n] = stage;
  }
  return stages;
}

std::vector<Node> in_floats(const std::vector<Node>& nodes, std::int64_t longest, std::vector<int>& roots) {
  InFloats writer(nodes);
  std::vector<Node> result = writer.run(static_cast<double>(longest));
  for (int& root : roots) root = writer.moved(root);
  return result;
}

float largest_magnitude(const std::vector<Node>& nodes, int node) {
  const std::vector<double> found = values(nodes, [](const Node& n, auto of) { return largest_of(n, of); });
  const double rounded = found[static_cast<std::size_t>(node)] * 1.001;  // each operation rounds
  return rounded <= 1e38 ? static_cast<float>(rounded) : std::numeric_limits<float>::infinity();
}

}  // namespace flash_attention::program
