#include "program/row_terms.h"

#include <algorithm>

#include "program/stages.h"

namespace flash_attention::program {
namespace {

/// Adds the conditions that must all hold for a pair. One that depends only on the row or on the key is not divided.
void add_conjuncts(const std::vector<Node>& nodes, const std::vector<Stage>& stages, int root, std::vector<int>& found) {
  const Node& node = nodes[static_cast<std::size_t>(root)];
  if (node.op != Op::logical_and || node.type != Type::boolean || stages[static_cast<std::size_t>(root)] != Stage::pair) {
    if (std::find(found.begin(), found.end(), root) == found.end()) found.push_back(root);
    return;
  }
  add_conjuncts(nodes, stages, node.args[0], found);
  add_conjuncts(nodes, stages, node.args[1], found);
}

/// The values of the row's stage from which `root` follows, but for what follows from one of them.
std::vector<int> row_values(const std::vector<Node>& nodes, const std::vector<Stage>& stages, int root) {
  std::vector<int> found;
  std::vector<bool> wanted(nodes.size(), false);
  wanted[static_cast<std::size_t>(root)] = true;
  for (std::size_t n = nodes.size(); n-- > 0;) {
    if (!wanted[n]) continue;
    if (stages[n] == Stage::row) {
      found.push_back(static_cast<int>(n));
      continue;
    }
    for (const int arg : nodes[n].args) {
      if (arg >= 0) wanted[static_cast<std::size_t>(arg)] = true;
    }
  }
  return found;
}

}  // namespace

std::vector<RowTerm> row_terms(const std::vector<Node>& nodes, int root) {
  const std::vector<Stage> stages = stages_of(nodes);
  std::vector<int> conjuncts;
  add_conjuncts(nodes, stages, root, conjuncts);
  std::vector<RowTerm> terms;
  for (const int conjunct : conjuncts) {
    const std::vector<int> values = row_values(nodes, stages, conjunct);
    auto term = std::find_if(terms.begin(), terms.end(), [&](const RowTerm& t) { return t.row_values == values; });
    if (term == terms.end() && terms.size() == max_terms) {
      term = terms.end() - 1;
      for (const int value : values) {
        if (std::find(term->row_values.begin(), term->row_values.end(), value) == term->row_values.end())
          term->row_values.push_back(value);
      }
    } else if (term == terms.end()) {
      terms.push_back({{}, values});
      term = terms.end() - 1;
    }
    term->roots.push_back(conjunct);
  }
  return terms;
}

}  // namespace flash_attention::program
