#include "program/source.h"

#include <bit>
#include <cstdint>

#include "program/periods.h"

namespace flash_attention::program {
namespace {

/// "v3".
std::string value(int node) { return "v" + std::to_string(node); }

std::string hexadecimal(std::uint32_t bits) {
  std::string text = "0x";
  for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[bits >> shift & 15];
  return text + "u";
}

std::string function_name(Op op) {
  switch (op) {
    case Op::logical_and:
      return "logical_and";
    case Op::logical_or:
      return "logical_or";
    case Op::logical_xor:
      return "logical_xor";
    case Op::logical_not:
      return "logical_not";
    case Op::to_float:
      return "to_float";
    case Op::to_int:
      return "to_int";
    default:
      return std::string(name_of(op));
  }
}

std::string arguments(const Node& node, const char* before = "") {
  std::string text = before;
  for (const int arg : node.args) {
    if (arg >= 0) text += (text.empty() ? "" : ", ") + value(arg);
  }
  return text;
}

std::string tensor(int index) { return "args.tensors[" + std::to_string(index) + "]"; }
std::string sizes(int index) { return "args.sizes[" + std::to_string(index) + "]"; }

std::string element(const Program& program, int index) {
  return "program::element_" + std::string(name_of(program.tensors[static_cast<std::size_t>(index)].element));
}

std::string literal(const Node& node) {
  if (node.type == Type::boolean) return node.integer != 0 ? "true" : "false";
  if (node.type == Type::real)
    return "__builtin_bit_cast(float, " + hexadecimal(std::bit_cast<std::uint32_t>(node.real)) + ")";
  return "static_cast<int>(" + hexadecimal(static_cast<std::uint32_t>(node.integer)) + ")";
}

/// A node as an expression of numbers.
std::string number(const Program& program, const Node& node) {
  switch (node.op) {
    case Op::score:
    case Op::b:
    case Op::h:
    case Op::i:
    case Op::j:
      return std::string(name_of(node.op));
    case Op::literal:
      return literal(node);
    case Op::scalar:
      return (node.type == Type::real ? "args.reals[" : "args.ints[") + std::to_string(node.index) + "]";
    case Op::offset:
      return "program::offset(" + arguments(node, sizes(node.index).c_str()) + ")";
    case Op::load: {
      const std::string place = "program::offset(" + arguments(node, sizes(node.index).c_str()) + ")";
      const std::string empty = "program::is_empty(" + arguments(node, sizes(node.index).c_str()) + ")";
      const std::string nothing = node.type == Type::real ? "0.0f" : node.type == Type::integer ? "0" : "false";
      return empty + " ? " + nothing + " : " + element(program, node.index) + "(" + tensor(node.index) + ", " + place + ")";
    }
    default:
      return "program::" + function_name(node.op) + "(" + arguments(node) + ")";
  }
}

/// A node as an expression of ranges.
std::string range(const Program& program, const Node& node) {
  const std::string interval = "abi::interval::";
  const auto unknown = [&] {
    return interval + (node.type == Type::real ? "any_real()" : node.type == Type::integer ? "any_int()" : "any_bool()");
  };
  switch (node.op) {
    case Op::b:
    case Op::h:
      return interval + "constant(" + std::string(name_of(node.op)) + ")";
    case Op::i:
      return interval + "Ints{i_begin, i_end - 1}";
    case Op::j:
      return interval + "Ints{j_begin, j_end - 1}";
    case Op::literal:
    case Op::scalar:
      return interval + "constant(" + number(program, node) + ")";
    case Op::load: {
      if (node.type == Type::real) return unknown();
      const std::string kind = node.type == Type::integer ? "ints" : "bools";
      return "program::range_of_" + kind + "(program::span(" + arguments(node, sizes(node.index).c_str()) +
             "), [&](int place) { return " + element(program, node.index) + "(" + tensor(node.index) + ", place); })";
    }
    case Op::score:
    case Op::offset:
    case Op::exp:
    case Op::log:
    case Op::tanh:
    case Op::sigmoid:
    case Op::sqrt:
    case Op::sin:
    case Op::cos:
    case Op::floor:
      return unknown();
    default:
      return interval + function_name(node.op) + "(" + arguments(node) + ")";
  }
}

/// The lines that compute `roots`, which become their numbers in them.
template <class Write>
std::string lines(const std::vector<Node>& all, std::vector<int>& roots, Write write) {
  const std::vector<Node> nodes = slice(all, roots);
  std::string text;
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    text += "    const auto " + value(static_cast<int>(n)) + " = " + write(nodes[n]) + ";\n";
  }
  return text;
}

constexpr const char* device = "  __device__ __forceinline__ ";

class Writer {
 public:
  Writer(const Program& program, std::uint32_t gradients) : program_(program), gradients_(gradients) {}

  std::string run() {
    std::string text =
        "#include \"tile/program.cuh\"\n\nnamespace flash_attention::tile {\n\ntemplate <>\nstruct Program<true> {\n";
    text += "  const abi::ProgramArgs& args;\n  int b, h;\n\n";
    text += std::string(device) + "Program(const abi::AttentionArgs& given, int batch_idx, int head_idx)\n";
    text += "      : args(given.program), b(batch_idx), h(head_idx) {}\n\n";
    if (program_.score >= 0) text += score() + slope() + derivatives();
    if (program_.visible >= 0) text += visible() + seen();
    return text + "};\n\n}  // namespace flash_attention::tile\n\n";
  }

 private:
  std::string numbers(const std::vector<Node>& nodes, std::vector<int>& roots) {
    return lines(nodes, roots, [&](const Node& node) { return number(program_, node); });
  }

  std::string score() {
    std::vector<int> roots{program_.score};
    std::string body = numbers(program_.nodes, roots);
    return std::string(device) + "float score(float score, int i, int j) const {\n" + body + "    return " +
           value(roots[0]) + ";\n  }\n";
  }

  std::string slope() {
    std::vector<Node> nodes = program_.nodes;
    int by = -1;
    for (std::size_t n = 0; n < nodes.size(); ++n) {
      if (nodes[n].op == Op::score) by = static_cast<int>(n);
    }
    const int derivative = by < 0 ? -1 : derive(nodes, program_.score, by);
    std::vector<int> roots{program_.score, derivative};
    std::string body = numbers(nodes, roots);
    return std::string(device) + "float score(float score, int i, int j, float& slope) const {\n" + body +
           "    slope *= " + (derivative < 0 ? "0.0f" : value(roots[1])) + ";\n    return " + value(roots[0]) + ";\n  }\n";
  }

  /// use(tensor, place, derivative) for each read that has a gradient.
  std::string derivatives() {
    std::vector<Node> nodes = program_.nodes;
    std::vector<int> roots, tensors;
    for (std::size_t n = 0; n < program_.nodes.size(); ++n) {
      const Node& node = program_.nodes[n];
      if (node.op != Op::load || (gradients_ >> node.index & 1u) == 0) continue;
      const int derivative = derive(nodes, program_.score, static_cast<int>(n));
      if (derivative < 0) continue;
      Node offset = node;
      offset.op = Op::offset;
      offset.type = Type::integer;
      nodes.push_back(offset);
      tensors.push_back(node.index);
      roots.push_back(static_cast<int>(nodes.size()) - 1);
      roots.push_back(derivative);
    }
    std::string body = numbers(nodes, roots);
    for (std::size_t n = 0; n < tensors.size(); ++n) {
      body +=
          "    use(" + std::to_string(tensors[n]) + ", " + value(roots[2 * n]) + ", " + value(roots[2 * n + 1]) + ");\n";
    }
    return "  template <typename Use>\n" + std::string(device) +
           "void derivatives(float score, int i, int j, Use use) const {\n" + body + "  }\n";
  }

  std::string visible() {
    std::vector<int> roots{program_.visible};
    std::string body = numbers(program_.nodes, roots);
    return std::string(device) + "bool visible(int i, int j) const {\n" + body + "    return " + value(roots[0]) +
           ";\n  }\n";
  }

  std::string seen() {
    std::vector<int> roots{program_.visible};
    std::string body = lines(program_.nodes, roots, [&](const Node& node) { return range(program_, node); });
    const std::string parameters = "(int i_begin, int i_end, int j_begin, int j_end) const {\n";
    const auto function = [&](const char* name) {
      return device + ("abi::interval::Bools " + (name + parameters)) + body + "    return " + value(roots[0]) + ";\n  }\n";
    };
    std::vector<int> root{program_.visible};
    const std::vector<Node> nodes = slice(program_.nodes, root);
    const std::string i = period(nodes, Op::i), j = period(nodes, Op::j);
    if (i.empty() && j.empty()) return function("seen");
    return function("seen_whole") + device + "abi::interval::Bools seen" + parameters +
           "    return abi::interval::in_pieces(i_begin, i_end, j_begin, j_end, " + (i.empty() ? "0" : i) + ", " +
           (j.empty() ? "0" : j) +
           ",\n        [&](int i, int i_last, int j, int j_last) { return seen_whole(i, i_last, j, j_last); });\n  }\n";
  }

  /// The common period of an index's remainders; empty: it has none.
  std::string period(const std::vector<Node>& nodes, Op index) const {
    std::string common;
    for (const std::vector<Node>& factors : periods(nodes, index)) {
      std::string product;
      for (const Node& factor : factors) {
        const std::string text = number(program_, factor);
        product = product.empty() ? text : "program::mul(" + product + ", " + text + ")";
      }
      common = "abi::interval::common_period(" + (common.empty() ? "0" : common) + ", " + product + ")";
    }
    return common;
  }

  const Program& program_;
  std::uint32_t gradients_;
};

}  // namespace

std::string cuda_source(const Program& program, std::uint32_t gradients) { return Writer(program, gradients).run(); }

}  // namespace flash_attention::program
