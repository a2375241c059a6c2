#include "program/names.h"

#include <array>
#include <utility>

namespace flash_attention::program {
namespace {

struct Entry {
  std::string_view name;
  Op op;
  int num_args;
};

constexpr std::array table{
    Entry{"score", Op::score, 0},
    Entry{"b", Op::b, 0},
    Entry{"h", Op::h, 0},
    Entry{"i", Op::i, 0},
    Entry{"j", Op::j, 0},
    Entry{"literal", Op::literal, 0},
    Entry{"scalar", Op::scalar, 0},
    Entry{"load", Op::load, max_rank},
    Entry{"offset", Op::offset, max_rank},
    Entry{"add", Op::add, 2},
    Entry{"sub", Op::sub, 2},
    Entry{"mul", Op::mul, 2},
    Entry{"div", Op::div, 2},
    Entry{"floordiv", Op::floordiv, 2},
    Entry{"mod", Op::mod, 2},
    Entry{"fmod", Op::fmod, 2},
    Entry{"neg", Op::neg, 1},
    Entry{"abs", Op::abs, 1},
    Entry{"min", Op::min, 2},
    Entry{"max", Op::max, 2},
    Entry{"exp", Op::exp, 1},
    Entry{"log", Op::log, 1},
    Entry{"tanh", Op::tanh, 1},
    Entry{"sigmoid", Op::sigmoid, 1},
    Entry{"sqrt", Op::sqrt, 1},
    Entry{"sin", Op::sin, 1},
    Entry{"cos", Op::cos, 1},
    Entry{"floor", Op::floor, 1},
    Entry{"detach", Op::detach, 1},
    Entry{"slope", Op::slope, 3},
    Entry{"eq", Op::eq, 2},
    Entry{"ne", Op::ne, 2},
    Entry{"lt", Op::lt, 2},
    Entry{"le", Op::le, 2},
    Entry{"gt", Op::gt, 2},
    Entry{"ge", Op::ge, 2},
    Entry{"and", Op::logical_and, 2},
    Entry{"or", Op::logical_or, 2},
    Entry{"xor", Op::logical_xor, 2},
    Entry{"not", Op::logical_not, 1},
    Entry{"where", Op::where, 3},
    Entry{"float", Op::to_float, 1},
    Entry{"int", Op::to_int, 1},
};

constexpr bool in_order() {
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (static_cast<std::size_t>(table[i].op) != i) return false;
  }
  return true;
}
static_assert(in_order());

constexpr std::array<std::string_view, 6> elements{"float32", "float16", "bfloat16", "int32", "int64", "bool"};

}  // namespace

std::optional<Op> operation_of(std::string_view name) {
  for (const Entry& entry : table) {
    if (entry.name == name && entry.op >= Op::add) return entry.op;
  }
  return std::nullopt;
}

std::optional<Op> index_of(std::string_view name) {
  for (const Op op : {Op::score, Op::b, Op::h, Op::i, Op::j}) {
    if (name_of(op) == name) return op;
  }
  return std::nullopt;
}

std::optional<Element> element_of(std::string_view name) {
  for (std::size_t i = 0; i < elements.size(); ++i) {
    if (elements[i] == name) return static_cast<Element>(i);
  }
  return std::nullopt;
}

std::string operation_names() {
  std::string names = "load";
  for (const Entry& entry : table) {
    if (entry.op >= Op::add) names += ", " + std::string(entry.name);
  }
  return names;
}

int num_args(Op op) { return table[static_cast<std::size_t>(op)].num_args; }
std::string_view name_of(Op op) { return table[static_cast<std::size_t>(op)].name; }
std::string_view name_of(Element element) { return elements[static_cast<std::size_t>(element)]; }

std::string_view name_of(Type type) { return type == Type::boolean ? "bool" : type == Type::integer ? "int" : "float"; }

std::int64_t size_of(Element element) {
  switch (element) {
    case Element::int64:
      return 8;
    case Element::float16:
    case Element::bfloat16:
      return 2;
    case Element::boolean:
      return 1;
    case Element::float32:
    case Element::int32:
      break;
  }
  return 4;
}

bool is_real(Element element) { return element <= Element::bfloat16; }

}  // namespace flash_attention::program
