#include <charconv>
#include <cmath>
#include <map>
#include <optional>

#include "flash_attention/error.h"
#include "program/names.h"
#include "program/program.h"

namespace flash_attention::program {
namespace {

using Words = std::vector<std::string_view>;

Words words_of(std::string_view line) {
  Words words;
  while (true) {
    const std::size_t begin = line.find_first_not_of(' ');
    if (begin == std::string_view::npos) return words;
    line.remove_prefix(begin);
    const std::size_t end = std::min(line.find(' '), line.size());
    words.push_back(line.substr(0, end));
    line.remove_prefix(end);
  }
}

template <class Number>
std::optional<Number> number_of(std::string_view word) {
  Number value{};
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size()) return std::nullopt;
  return value;
}

class Parser {
 public:
  Program run(std::string_view text) {
    while (!text.empty()) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      ++line_;
      if (const Words words = words_of(text.substr(0, end)); !words.empty()) statement(words);
      text.remove_prefix(std::min(end + 1, text.size()));
    }
    if (program_.score < 0 && program_.visible < 0) {
      ++line_;
      refuse("the text ends without a result; a program has a line 'score = ...', 'visible = ...' or both");
    }
    return std::move(program_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorCode::invalid_argument, "program: line " + std::to_string(line_) + ": " + what);
  }

  void statement(const Words& words) {
    if (words.size() < 3 || words[1] != "=") {
      refuse("got '" + std::string(words[0]) + " ...'; expected 'name = operation arguments'");
    }
    const std::string_view name = words[0], what = words[2];
    if (name == "score" || name == "visible") return result(words);
    if (names_.contains(name)) refuse("'" + std::string(name) + "' has a value already");
    if (what == "tensor") return tensor(words);
    if (what == "scalar") return scalar(words);
    Node node = what == "load" ? load(words) : operation(words);
    names_[name] = add(node);
  }

  void declare(const Words& words, char letter, std::size_t count, int most, std::size_t size, const char* form) {
    const std::string name = letter + std::to_string(count);
    if (words.size() != size || words[0] != name) refuse("expected '" + name + " = " + form + "'");
    if (count >= static_cast<std::size_t>(most)) {
      refuse("at most " + std::to_string(most) + " can be captured");
    }
  }

  void tensor(const Words& words) {
    declare(words, 't', program_.tensors.size(), max_tensors, 5, "tensor dtype rank");
    const auto element = element_of(words[3]);
    if (!element) {
      refuse("a captured tensor of dtype '" + std::string(words[3]) +
             "'; allowed are float32, float16, bfloat16, int32, int64 and bool");
    }
    const auto rank = number_of<int>(words[4]);
    if (!rank || *rank < 0 || *rank > max_rank) {
      refuse("a captured tensor of rank " + std::string(words[4]) + "; allowed are 0 to " + std::to_string(max_rank));
    }
    program_.tensors.push_back({*element, *rank});
  }

  void scalar(const Words& words) {
    declare(words, 's', program_.scalars.size(), max_scalars, 4, "scalar type");
    if (words[3] != "float" && words[3] != "int") {
      refuse("a scalar of type '" + std::string(words[3]) + "'; allowed are int and float");
    }
    program_.scalars.push_back(words[3] == "int" ? Type::integer : Type::real);
  }

  Node load(const Words& words) {
    const auto index = words.size() > 3 && words[3].starts_with('t') ? number_of<int>(words[3].substr(1)) : std::nullopt;
    if (!index || *index < 0 || *index >= static_cast<int>(program_.tensors.size())) {
      refuse("load needs a tensor that a line before declares: 't0 = tensor dtype rank'");
    }
    const TensorDeclaration& declared = program_.tensors[static_cast<std::size_t>(*index)];
    if (static_cast<int>(words.size()) - 4 != declared.rank) {
      refuse("tensor t" + std::to_string(*index) + " has " + std::to_string(declared.rank) + " axes and is read with " +
             std::to_string(words.size() - 4) + " indices");
    }
    const Type type = is_real(declared.element)              ? Type::real
                      : declared.element == Element::boolean ? Type::boolean
                                                             : Type::integer;
    Node node{.op = Op::load, .type = type, .index = *index};
    for (std::size_t axis = 0; axis + 4 < words.size(); ++axis) {
      node.args[axis] = value(words[axis + 4]);
      if (type_of(node.args[axis]) != Type::integer) refuse("an index must be an int");
    }
    return node;
  }

  Node operation(const Words& words) {
    const auto op = operation_of(words[2]);
    if (!op) refuse("no operation '" + std::string(words[2]) + "'; allowed are " + operation_names());
    Node node{.op = *op, .type = Type::real};
    const int count = num_args(*op);
    if (static_cast<int>(words.size()) - 3 != count) {
      refuse("'" + std::string(words[2]) + "' takes " + std::to_string(count) + " arguments, not " +
             std::to_string(words.size() - 3));
    }
    for (int n = 0; n < count; ++n) node.args[static_cast<std::size_t>(n)] = value(words[static_cast<std::size_t>(n) + 3]);
    node.type = result_type(*op, node.args);
    has_slopes_ = has_slopes_ || *op == Op::slope;
    return node;
  }

  Type type_of(int node) const { return program_.nodes[static_cast<std::size_t>(node)].type; }

  Type result_type(Op op, const std::array<int, 4>& args) const {
    const Type first = type_of(args[0]);
    const auto need = [&](bool good, const char* allowed) {
      if (good) return;
      std::string got;
      for (int n = 0; n < num_args(op); ++n) {
        got += (n == 0 ? "" : ", ") + std::string(name_of(type_of(args[static_cast<std::size_t>(n)])));
      }
      refuse("'" + std::string(name_of(op)) + "' of (" + got + "); allowed are " + allowed);
    };
    const bool same = num_args(op) < 2 || first == type_of(args[1]);
    switch (op) {
      case Op::add:
      case Op::sub:
      case Op::mul:
      case Op::neg:
      case Op::abs:
      case Op::min:
      case Op::max:
        need(same && first != Type::boolean, "ints or floats, not mixed");
        return first;
      case Op::floordiv:
      case Op::mod:
        need(same && first == Type::integer, "ints");
        return Type::integer;
      case Op::eq:
      case Op::ne:
      case Op::lt:
      case Op::le:
      case Op::gt:
      case Op::ge:
        need(same && first != Type::boolean, "ints or floats, not mixed");
        return Type::boolean;
      case Op::logical_and:
      case Op::logical_or:
      case Op::logical_xor:
      case Op::logical_not:
        need(same && first != Type::real, "bools or ints, not mixed");
        return first;
      case Op::where:
        need(first == Type::boolean && type_of(args[1]) == type_of(args[2]), "a bool and two values of one type");
        return type_of(args[1]);
      case Op::to_float:
        need(first != Type::real, "an int or a bool");
        return Type::real;
      case Op::to_int:
        need(first != Type::integer, "a float or a bool");
        return Type::integer;
      case Op::slope:
        need(same && first == Type::real && type_of(args[2]) == Type::real, "floats");
        return Type::real;
      default:
        need(same && first == Type::real, "floats");
        return Type::real;
    }
  }

  int add(Node node) {
    if (program_.nodes.size() >= max_values) refuse("more than " + std::to_string(max_values) + " values");
    node.line = line_;
    program_.nodes.push_back(node);
    return static_cast<int>(program_.nodes.size()) - 1;
  }

  /// The node of a word: a name, an index, a scalar or a literal. Leaves are made once.
  int value(std::string_view word) {
    if (const auto known = names_.find(word); known != names_.end()) return known->second;
    return names_[word] = add(leaf(word));
  }

  Node leaf(std::string_view word) {
    if (const auto index = index_of(word)) {
      return {.op = *index, .type = *index == Op::score ? Type::real : Type::integer};
    }
    if (word == "true" || word == "false") return {.op = Op::literal, .type = Type::boolean, .integer = word == "true"};
    if (const auto integer = number_of<std::int32_t>(word)) {
      return {.op = Op::literal, .type = Type::integer, .integer = *integer};
    }
    if (const auto real = number_of<float>(word)) return {.op = Op::literal, .type = Type::real, .real = *real};
    const auto scalar = word.starts_with('s') ? number_of<int>(word.substr(1)) : std::nullopt;
    if (scalar && *scalar >= 0 && *scalar < static_cast<int>(program_.scalars.size())) {
      return {.op = Op::scalar, .type = program_.scalars[static_cast<std::size_t>(*scalar)], .index = *scalar};
    }
    refuse("'" + std::string(word) + "' is no value: a name of a line before, score, b, h, i, j, a scalar or a number");
  }

  void result(const Words& words) {
    int& root = words[0] == "score" ? program_.score : program_.visible;
    if (words.size() != 3) refuse("expected '" + std::string(words[0]) + " = value'");
    if (root >= 0) refuse("a second result '" + std::string(words[0]) + "'");
    root = value(words[2]);
    const Type wanted = words[0] == "score" ? Type::real : Type::boolean;
    if (type_of(root) != wanted) {
      refuse("the result '" + std::string(words[0]) + "' is of type " + std::string(name_of(type_of(root))) +
             "; expected is " + std::string(name_of(wanted)));
    }
    if (wanted == Type::real) return;
    std::vector<Node> mask = program_.nodes;
    std::vector<int> roots{root};
    keep_values(mask, roots);  // a mask has no derivative
    mask = slice(mask, roots);
    for (const Node& node : mask) {
      if (node.op == Op::score) refuse("'visible' depends on the score; it may depend on b, h, i, j and what is captured");
      program_.visible_by_head = program_.visible_by_head || node.op == Op::h;
      program_.visible_by_batch = program_.visible_by_batch || node.op == Op::b;
    }
    if (!has_slopes_) return;
    const int before = static_cast<int>(program_.nodes.size());  // the score may need the same values with their slopes
    for (Node& node : mask) {
      for (int& arg : node.args) arg = arg < 0 ? -1 : arg + before;
    }
    program_.nodes.insert(program_.nodes.end(), mask.begin(), mask.end());
    root = roots[0] + before;
  }

  Program program_;
  std::map<std::string_view, int> names_;
  int line_ = 0;
  bool has_slopes_ = false;
};

}  // namespace

Program parse(std::string_view text) { return Parser().run(text); }

void keep_values(std::vector<Node>& nodes, std::vector<int>& roots) {
  std::vector<int> moved(nodes.size());
  const auto value_of = [&](int n) { return n < 0 ? -1 : moved[static_cast<std::size_t>(n)]; };
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    for (int& arg : nodes[n].args) arg = value_of(arg);
    moved[n] = nodes[n].op == Op::slope ? nodes[n].args[0] : static_cast<int>(n);
  }
  for (int& root : roots) root = value_of(root);
}

std::vector<Node> slice(const std::vector<Node>& nodes, std::vector<int>& roots) {
  std::vector<bool> needed(nodes.size(), false);
  for (const int root : roots) {
    if (root >= 0) needed[static_cast<std::size_t>(root)] = true;
  }
  for (std::size_t n = nodes.size(); n-- > 0;) {
    if (!needed[n]) continue;
    for (const int arg : nodes[n].args) {
      if (arg >= 0) needed[static_cast<std::size_t>(arg)] = true;
    }
  }
  std::vector<int> moved(nodes.size(), -1);
  std::vector<Node> kept;
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    if (!needed[n]) continue;
    moved[n] = static_cast<int>(kept.size());
    kept.push_back(nodes[n]);
    for (int& arg : kept.back().args) arg = arg < 0 ? -1 : moved[static_cast<std::size_t>(arg)];
  }
  for (int& root : roots) root = root < 0 ? -1 : moved[static_cast<std::size_t>(root)];
  return kept;
}

}  // namespace flash_attention::program
