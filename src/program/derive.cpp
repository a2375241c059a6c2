#include "program/program.h"

// The derivative of a value by another, as nodes. It goes through the nodes in order (forward mode), so it is as long as
// the program times a small factor; what is 0 leaves no node behind.

namespace flash_attention::program {
namespace {

constexpr int zero = -1, one = -2;

class Derivation {
 public:
  Derivation(std::vector<Node>& nodes, int by) : nodes_(nodes), by_(by), slopes_(nodes.size(), zero) {}

  /// The derivative of the nodes up to `of`, which is returned as a node.
  int run(int of) {
    for (int n = 0; n <= of; ++n) {
      const Node node = nodes_[static_cast<std::size_t>(n)];  // a copy: the vector grows
      if (n == by_) {
        slopes_[static_cast<std::size_t>(n)] = one;
      } else if (node.type == Type::real) {
        slopes_[static_cast<std::size_t>(n)] = slope_of(node, n);
      }
    }
    const int slope = slopes_[static_cast<std::size_t>(of)];
    return slope == one ? number(1) : slope;
  }

 private:
  int slope_of(const Node& node, int self) {
    const int x = node.args[0], y = node.args[1];
    const auto slope = [&](int arg) { return arg < 0 ? zero : slopes_[static_cast<std::size_t>(arg)]; };
    const int dx = slope(x), dy = slope(y);
    switch (node.op) {
      case Op::add:
        return sum(dx, dy);
      case Op::sub:
        return sum(dx, negative(dy));
      case Op::mul:
        return sum(times(dx, y), times(dy, x));
      case Op::div:  // (dx - self * dy) / y
        return over(sum(dx, negative(times(dy, self))), y);
      case Op::fmod:  // x less y times a whole number, which has no slope
        return sum(dx, negative(times(dy, dy == zero ? x : truncated(real(Op::div, x, y)))));
      case Op::neg:
        return negative(dx);
      case Op::abs:
        return times(dx, sign(x));
      case Op::min:
        return sum(times(dx, share(dx, Op::gt, x, y)), times(dy, share(dy, Op::gt, y, x)));
      case Op::max:
        return sum(times(dx, share(dx, Op::lt, x, y)), times(dy, share(dy, Op::lt, y, x)));
      case Op::exp:
        return times(dx, self);
      case Op::log:
        return over(dx, x);
      case Op::tanh:
        return dx == zero ? zero : times(dx, real(Op::sub, number(1), real(Op::mul, self, self)));
      case Op::sigmoid:
        return dx == zero ? zero : times(dx, real(Op::mul, self, real(Op::sub, number(1), self)));
      case Op::sqrt:
        return dx == zero ? zero : over(dx, real(Op::mul, number(2), self));
      case Op::sin:
        return dx == zero ? zero : times(dx, real(Op::cos, x));
      case Op::cos:
        return dx == zero ? zero : times(dx, real(Op::neg, real(Op::sin, x)));
      case Op::where: {
        const int yes = slope(node.args[1]), no = slope(node.args[2]);
        if (yes == zero && no == zero) return zero;
        return add({.op = Op::where, .type = Type::real, .args = {x, value(yes), value(no), -1}});
      }
      case Op::slope:
        return sum(dx, times(dy, node.args[2]));
      default:  // leaves, detach; floor, conversions: steps, whose slope is 0 wherever they have one
        return zero;
    }
  }

  int add(const Node& node) {
    nodes_.push_back(node);
    return static_cast<int>(nodes_.size()) - 1;
  }
  int number(float real) { return add({.op = Op::literal, .type = Type::real, .real = real}); }
  int value(int slope) { return slope == zero ? number(0) : slope == one ? number(1) : slope; }
  int real(Op op, int x, int y = -1) { return add({.op = op, .type = Type::real, .args = {x, y, -1, -1}}); }

  int sum(int x, int y) {
    if (x == zero) return y;
    return y == zero ? x : real(Op::add, value(x), value(y));
  }
  int negative(int x) { return x == zero ? zero : real(Op::neg, value(x)); }
  int times(int slope, int factor) {
    if (slope == zero) return zero;
    return slope == one ? factor : real(Op::mul, slope, factor);
  }
  int over(int slope, int divisor) { return slope == zero ? zero : real(Op::div, value(slope), divisor); }

  int choose(Op comparison, int x, int y, int yes, int no) {
    const int condition = add({.op = comparison, .type = Type::boolean, .args = {x, y, -1, -1}});
    return add({.op = Op::where, .type = Type::real, .args = {condition, yes, no, -1}});
  }
  int sign(int x) { return choose(Op::gt, x, number(0), number(1), choose(Op::lt, x, number(0), number(-1), number(0))); }
  /// The share of the first argument of min or max: none, half if both are equal, else all (also beside NaN, as in torch).
  int share(int slope, Op loses, int x, int y) {
    if (slope == zero) return zero;
    return choose(loses, x, y, number(0), choose(Op::eq, x, y, number(0.5f), number(1)));
  }
  int truncated(int x) {
    const int up = real(Op::neg, real(Op::floor, real(Op::neg, x)));
    return choose(Op::lt, x, number(0), up, real(Op::floor, x));
  }

  std::vector<Node>& nodes_;
  int by_;
  std::vector<int> slopes_;  // of each node: a node, zero or one
};

}  // namespace

int derive(std::vector<Node>& nodes, int of, int by) { return Derivation(nodes, by).run(of); }

}  // namespace flash_attention::program
