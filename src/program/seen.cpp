#include "program/seen.h"

#include <algorithm>

#include "abi/tile_map.h"
#include "program/expressions.h"
#include "program/periods.h"
#include "program/stages.h"

namespace flash_attention::program {
namespace {

constexpr const char* member_function = "  __device__ __forceinline__ ";

/// Reads of ints and bools by the key alone, as many as are kept.
std::vector<int> key_reads(const std::vector<Node>& nodes) {
  const std::vector<Stage> stages = stages_of(nodes);
  std::vector<int> found;
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    if (nodes[n].op == Op::load && nodes[n].type != Type::real && stages[n] == Stage::key &&
        found.size() < abi::max_seen_keys)
      found.push_back(static_cast<int>(n));
  }
  return found;
}

/// The common period of an index's remainders; empty: it has none.
std::string period(const Program& program, const std::vector<Node>& nodes, Op index) {
  std::string common;
  for (const std::vector<Node>& factors : periods(nodes, index)) {
    std::string product;
    for (const Node& factor : factors) {
      const std::string text = number(program, factor, value);
      product = product.empty() ? text : "program::mul(" + product + ", " + text + ")";
    }
    common = "abi::interval::common_period(" + (common.empty() ? "0" : common) + ", " + product + ")";
  }
  return common;
}

}  // namespace

std::string seen_source(const Program& program) {
  std::vector<int> root{program.visible};
  const std::vector<Node> nodes = slice(program.nodes, root);
  const std::string i = period(program, nodes, Op::i), j = period(program, nodes, Op::j);
  const bool in_pieces = !i.empty() || !j.empty();
  const std::vector<int> kept = in_pieces ? std::vector<int>{} : key_reads(nodes);
  std::string members, stores, body, key_body;
  for (const int n : kept) {
    const bool integer = nodes[static_cast<std::size_t>(n)].type == Type::integer;
    members += std::string("    abi::interval::") + (integer ? "Ints " : "Bools ") + value(n) + ";\n";
    stores += (stores.empty() ? "" : ", ") + value(n);
  }
  const std::vector<Stage> stages = stages_of(nodes);
  for (int n = 0; n < static_cast<int>(nodes.size()); ++n) {
    const Stage stage = stages[static_cast<std::size_t>(n)];
    const bool is_kept = std::find(kept.begin(), kept.end(), n) != kept.end();
    const Node& node = nodes[static_cast<std::size_t>(n)];
    const std::string name = "    const auto " + value(n) + " = ";
    if (!kept.empty() && n <= kept.back() && (stage == Stage::key || stage == Stage::head))
      key_body += name + range(program, node, true) + ";\n";
    body += name + (is_kept ? "keys." + value(n) : range(program, node)) + ";\n";
  }
  const std::string struct_text = "  struct SeenKeys {\n" + members + "  };\n" + member_function +
                                  "SeenKeys seen_keys(int j_begin, int j_end) const {\n" + key_body + "    return {" +
                                  stores + "};\n  }\n";
  const std::string parameters = "(int i_begin, int i_end, int j_begin, int j_end";
  const std::string result = std::string(member_function) + "abi::interval::Bools ";
  const std::string value_text = body + "    return " + value(root[0]) + ";\n  }\n";
  if (!in_pieces) return struct_text + result + "seen" + parameters + ", const SeenKeys& keys) const {\n" + value_text;
  return struct_text + result + "seen_whole" + parameters + ") const {\n" + value_text + result + "seen" + parameters +
         ", const SeenKeys&) const {\n    return abi::interval::in_pieces(i_begin, i_end, j_begin, j_end, " +
         (i.empty() ? "0" : i) + ", " + (j.empty() ? "0" : j) +
         ",\n        [&](int i, int i_last, int j, int j_last) { return seen_whole(i, i_last, j, j_last); });\n  }\n";
}

}  // namespace flash_attention::program
