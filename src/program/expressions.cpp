#include "program/expressions.h"

#include <bit>

namespace flash_attention::program {

std::string value(int node) { return "v" + std::to_string(node); }

std::string hexadecimal(std::uint32_t bits) {
  std::string text = "0x";
  for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[bits >> shift & 15];
  return text + "u";
}

namespace {

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

/// The arguments of a node by name(number), behind `before`.
std::string arguments(const Node& node, const NodeName& name, const std::string& before = "") {
  std::string text = before;
  for (const int arg : node.args) {
    if (arg >= 0) text += (text.empty() ? "" : ", ") + name(arg);
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

}  // namespace

std::string number(const Program& program, const Node& node, const NodeName& name) {
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
      return "program::offset(" + arguments(node, name, sizes(node.index)) + ")";
    case Op::load:
      return element(program, node.index) + "(" + tensor(node.index) + ", program::offset(" +
             arguments(node, name, sizes(node.index)) + "))";
    default:
      return "program::" + function_name(node.op) + "(" + arguments(node, name) + ")";
  }
}

std::string range(const Program& program, const Node& node, bool by_lanes) {
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
      return interval + "constant(" + number(program, node, value) + ")";
    case Op::load: {
      if (node.type == Type::real) return unknown();
      const std::string kind = std::string(node.type == Type::integer ? "ints" : "bools") + (by_lanes ? "_by_lanes" : "");
      return "program::range_of_" + kind + "(program::span(" + arguments(node, value, sizes(node.index)) +
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
    case Op::detach:
    case Op::slope:
    case Op::fmod:
      return unknown();
    default:
      return interval + function_name(node.op) + "(" + arguments(node, value) + ")";
  }
}

}  // namespace flash_attention::program
