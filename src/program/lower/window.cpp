#include "program/lower/window.h"

#include <algorithm>
#include <vector>

#include "program/lower/linear.h"
#include "program/lower/lines.h"
#include "program/program.h"

namespace flash_attention::program {
namespace {

/// `positive` >= 0 as a bound on i - j. Nothing if it is no such bound, or if it hides the diagonal.
struct Bound {
  bool is_right;
  std::int64_t keys;
};
std::optional<Bound> bound_of(const Linear& positive) {
  if (positive.of_i * positive.of_j != -1 || positive.constant < 0) return std::nullopt;
  return Bound{positive.of_i == 1, positive.constant};
}

/// Adds a comparison to the window if it bounds i - j, or the distance of i and j; otherwise returns false.
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

}  // namespace

std::optional<WindowOfProgram> take_window(std::string_view text) {
  const std::shared_ptr<const Program> known_text = parsed(text);
  const Program& program = *known_text;
  if (program.visible < 0) return std::nullopt;
  const Linears known = linears_of(program.nodes);
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
  window.rest = without(text, "visible") + "\n";
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
