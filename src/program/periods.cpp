#include "program/periods.h"

namespace flash_attention::program {
namespace {

bool is_constant(const Node& node) {
  return node.type == Type::integer && (node.op == Op::literal || node.op == Op::scalar);
}

/// Whether a node counts steps of the index, and adds the lengths of the steps to `factors`.
bool counts(const std::vector<Node>& nodes, const Node& node, Op index, std::vector<Node>& factors) {
  if (node.op == index) return true;
  if (node.op != Op::floordiv && node.op != Op::mod) return false;
  const Node& by = nodes[static_cast<std::size_t>(node.args[1])];
  if (!is_constant(by)) return false;
  if (node.op == Op::floordiv) factors.push_back(by);
  return counts(nodes, nodes[static_cast<std::size_t>(node.args[0])], index, factors);
}

}  // namespace

std::vector<std::vector<Node>> periods(const std::vector<Node>& nodes, Op index) {
  std::vector<std::vector<Node>> found;
  for (const Node& node : nodes) {
    if (node.op != Op::mod) continue;
    const Node& by = nodes[static_cast<std::size_t>(node.args[1])];
    std::vector<Node> factors{by};
    if (is_constant(by) && counts(nodes, nodes[static_cast<std::size_t>(node.args[0])], index, factors)) {
      found.push_back(std::move(factors));
    }
  }
  return found;
}

}  // namespace flash_attention::program
