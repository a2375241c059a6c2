#include "program/lower/linear.h"

#include <cstdlib>

namespace flash_attention::program {
namespace {

constexpr std::int64_t largest_constant = 1 << 20;  // of a constant: far from where ints go round

std::optional<Linear> linear(const Node& node, const Linears& before) {
  if (node.type != Type::integer) return std::nullopt;
  if (node.op == Op::i) return Linear{1, 0, 0};
  if (node.op == Op::j) return Linear{0, 1, 0};
  if (node.op == Op::literal) return Linear{0, 0, node.integer};
  if (node.op != Op::add && node.op != Op::sub && node.op != Op::neg) return std::nullopt;
  const auto of = [&](int arg) { return before[static_cast<std::size_t>(arg)]; };
  const auto x = node.op == Op::neg ? std::optional(Linear{0, 0, 0}) : of(node.args[0]);
  const auto y = of(node.args[node.op == Op::neg ? 0 : 1]);
  if (!x || !y) return std::nullopt;
  const std::int64_t sign = node.op == Op::add ? 1 : -1;
  const Linear sum{x->of_i + sign * y->of_i, x->of_j + sign * y->of_j, x->constant + sign * y->constant};
  if (std::abs(sum.of_i) > 1 || std::abs(sum.of_j) > 1 || std::abs(sum.constant) > largest_constant) return std::nullopt;
  return sum;
}

}  // namespace

Linears linears_of(const std::vector<Node>& nodes) {
  Linears found;
  for (const Node& node : nodes) found.push_back(linear(node, found));
  return found;
}

}  // namespace flash_attention::program
