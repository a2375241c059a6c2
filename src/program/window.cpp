#include "program/window.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "program/program.h"

namespace flash_attention::program {
namespace {

/// of_i * i + of_j * j + constant.
struct Linear {
  std::int64_t of_i, of_j, constant;
};

constexpr std::int64_t largest_constant = 1 << 20;  // of a constant: far from where ints go round

using Linears = std::vector<std::optional<Linear>>;

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

Linears linears(const std::vector<Node>& nodes) {
  Linears found;
  for (const Node& node : nodes) found.push_back(linear(node, found));
  return found;
}

/// The bound on i - j that `positive` >= 0 is, or nothing where it is none that has the diagonal.
struct Bound {
  bool is_right;
  std::int64_t keys;
};
std::optional<Bound> bound_of(const Linear& positive) {
  if (positive.of_i * positive.of_j != -1 || positive.constant < 0) return std::nullopt;
  return Bound{positive.of_i == 1, positive.constant};
}

/// Takes a comparison in where it bounds i - j, or the distance of i and j; false where it does not.
bool take(const std::vector<Node>& nodes, const Node& node, const Linears& known, WindowOfProgram& window) {
  const bool upwards = node.op == Op::ge || node.op == Op::gt;
  if (!upwards && node.op != Op::le && node.op != Op::lt) return false;
  const int less = node.args[upwards ? 1 : 0];
  const auto of = [&](int arg) { return known[static_cast<std::size_t>(arg)]; };
  const Node& less_node = nodes[static_cast<std::size_t>(less)];
  const bool is_distance = less_node.op == Op::abs && less_node.type == Type::integer;
  const auto more = of(node.args[upwards ? 0 : 1]), smaller = is_distance ? of(less_node.args[0]) : of(less);
  if (!more || !smaller) return false;
  std::vector<std::optional<Bound>> bounds;
  for (const std::int64_t sign : {-1, 1}) {  // more - smaller, and of a distance more + smaller
    if (sign == 1 && !is_distance) continue;
    const std::int64_t slack = more->constant + sign * smaller->constant - (node.op == Op::gt || node.op == Op::lt ? 1 : 0);
    bounds.push_back(bound_of({more->of_i + sign * smaller->of_i, more->of_j + sign * smaller->of_j, slack}));
    if (!bounds.back()) return false;
  }
  for (const std::optional<Bound>& bound : bounds) {
    std::int64_t& taken = bound->is_right ? window.right : window.left;
    taken = taken < 0 || bound->keys < taken ? bound->keys : taken;
  }
  return true;
}

/// The terms of a conjunction, each once.
std::vector<int> terms_of(const std::vector<Node>& nodes, int root) {
  std::vector<bool> needed(nodes.size(), false);
  needed[static_cast<std::size_t>(root)] = true;
  std::vector<int> terms;
  for (int n = root; n >= 0; --n) {
    const Node& node = nodes[static_cast<std::size_t>(n)];
    if (!needed[static_cast<std::size_t>(n)]) continue;
    if (node.op != Op::logical_and) {
      terms.push_back(n);
      continue;
    }
    for (const int arg : {node.args[0], node.args[1]}) needed[static_cast<std::size_t>(arg)] = true;
  }
  return terms;
}

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

/// The first word.
std::string_view name_of_line(std::string_view line) {
  const std::size_t begin = std::min(line.find_first_not_of(" \t"), line.size());
  return line.substr(begin, line.find_first_of(" \t=", begin) - begin);
}

}  // namespace

std::optional<WindowOfProgram> take_window(std::string_view text) {
  const Program program = parse(text);
  if (program.visible < 0) return std::nullopt;
  const Linears known = linears(program.nodes);
  const std::vector<int> terms = terms_of(program.nodes, program.visible);
  std::vector<int> kept;
  WindowOfProgram window;
  for (const int term : terms) {
    if (!take(program.nodes, program.nodes[static_cast<std::size_t>(term)], known, window)) kept.push_back(term);
  }
  if (kept.size() == terms.size() || program.nodes.size() + kept.size() > max_values) return std::nullopt;
  // A captured tensor needs a program that knows it, to be given a gradient.
  const bool captures = !program.tensors.empty() || !program.scalars.empty();
  if (kept.empty() && program.score < 0) return captures ? std::nullopt : std::optional(window);
  const std::vector<std::string_view> lines = lines_of(text);
  for (const std::string_view line : lines) {
    if (name_of_line(line) != "visible") window.rest += std::string(line) + "\n";
  }
  std::string all;
  for (const int term : kept) {
    const Node& node = program.nodes[static_cast<std::size_t>(term)];
    if (num_args(node.op) == 0 && node.op != Op::load) return std::nullopt;  // it has no line
    const std::string name(name_of_line(lines[static_cast<std::size_t>(node.line) - 1]));
    const std::string both = "without_window" + std::to_string(term);
    if (!all.empty()) window.rest += both + " = and " + all + " " + name + "\n";
    all = all.empty() ? name : both;
  }
  if (!kept.empty()) window.rest += "visible = " + all + "\n";
  window.rest.pop_back();
  return window;
}

}  // namespace flash_attention::program
