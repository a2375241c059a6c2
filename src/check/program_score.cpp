#include "check/program_score.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "support/half.h"

namespace flash_attention::check {
namespace {

using program::Element;
using program::Node;
using program::Op;
using program::Type;

constexpr double unit = 0x1p-23;            // of a float
constexpr double function_error = 0x1p-21;  // of tanh, sin and the like, for results up to 1
constexpr std::int64_t elements_at_once = 4096;

ProgramValue of_integer(std::int64_t value, bool open) {
  return {.integer = static_cast<std::int32_t>(static_cast<std::uint32_t>(value)), .open = open};  // it wraps around
}

ProgramValue of_bool(bool value, bool open) { return {.integer = value ? 1 : 0, .open = open}; }

/// A float result of an operation. `error` is due to its arguments' errors.
ProgramValue of_real(double value, double error) {
  if (std::isnan(error)) error = INFINITY;
  return {.real = value, .error = error + unit * (std::isfinite(value) ? std::fabs(value) : 0)};
}

bool compare(Op op, double a, double b) {
  switch (op) {
    case Op::eq:
      return a == b;
    case Op::ne:
      return a != b;
    case Op::lt:
      return a < b;
    case Op::le:
      return a <= b;
    case Op::gt:
      return a > b;
    default:
      return a >= b;
  }
}

ProgramValue comparison(Op op, const ProgramValue& a, const ProgramValue& b, bool real) {
  if (!real) return of_bool(compare(op, a.integer, b.integer), a.open || b.open);
  const double reach = a.error + b.error;
  return of_bool(compare(op, a.real, b.real), reach > 0 && std::fabs(a.real - b.real) <= reach);
}

ProgramValue of_integers(Op op, const ProgramValue& a, const ProgramValue& b) {
  const std::int64_t x = a.integer, y = b.integer;
  const bool open = a.open || b.open;
  const std::int64_t remainder = y == 0 ? 0 : (x % y + y) % y;
  switch (op) {
    case Op::add:
      return of_integer(x + y, open);
    case Op::sub:
      return of_integer(x - y, open);
    case Op::mul:
      return of_integer(x * y, open);
    case Op::floordiv:
      return of_integer(y == 0 ? 0 : (x - remainder) / y, open);
    case Op::mod:
      return of_integer(remainder, open);
    case Op::neg:
      return of_integer(-x, open);
    case Op::abs:
      return of_integer(std::abs(x), open);
    case Op::min:
      return of_integer(std::min(x, y), open);
    case Op::max:
      return of_integer(std::max(x, y), open);
    case Op::logical_and:
      return of_integer(x & y, open);
    case Op::logical_or:
      return of_integer(x | y, open);
    case Op::logical_xor:
      return of_integer(x ^ y, open);
    default:  // logical_not
      return of_integer(~x, open);
  }
}

/// NaN if one of them is NaN.
double chosen(Op op, double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return NAN;
  return op == Op::min ? std::min(a, b) : std::max(a, b);
}

ProgramValue of_reals(Op op, const ProgramValue& x, const ProgramValue& y) {
  const double a = x.real, b = y.real, ea = x.error, eb = y.error;
  switch (op) {
    case Op::add:
      return of_real(a + b, ea + eb);
    case Op::sub:
      return of_real(a - b, ea + eb);
    case Op::mul:
      return of_real(a * b, std::fabs(a) * eb + std::fabs(b) * ea + ea * eb);
    case Op::div:
      return of_real(a / b, std::fabs(b) > eb ? (ea + std::fabs(a / b) * eb) / (std::fabs(b) - eb) : INFINITY);
    case Op::neg:
      return {.real = -a, .error = ea};
    case Op::abs:
      return {.real = std::fabs(a), .error = ea};
    case Op::min:
    case Op::max:
      return {.real = chosen(op, a, b), .error = std::max(ea, eb)};
    case Op::exp:
      return of_real(std::exp(a), std::exp(a) * (std::expm1(ea) + unit * std::fabs(a)));
    case Op::log:
      return of_real(std::log(a), a > ea ? ea / (a - ea) + unit : INFINITY);
    case Op::tanh:
      return of_real(std::tanh(a), std::min(ea, 2.0) + function_error);
    case Op::sigmoid:
      return of_real(1 / (1 + std::exp(-a)), std::min(ea, 1.0) + function_error);
    case Op::sqrt:
      return of_real(std::sqrt(a), a > ea ? ea / std::sqrt(a) : std::sqrt(ea + std::fabs(a)));
    case Op::sin:
      return of_real(std::sin(a), std::min(ea, 2.0) + function_error);
    case Op::cos:
      return of_real(std::cos(a), std::min(ea, 2.0) + function_error);
    case Op::fmod: {
      const double whole = std::trunc(a / b), moved = ea + std::fabs(whole) * eb;
      const double reach = std::fabs(b) > eb ? moved / (std::fabs(b) - eb) : INFINITY;
      const bool jumps = std::trunc(a / b - reach) != whole || std::trunc(a / b + reach) != whole;
      return of_real(std::fmod(a, b), jumps ? std::fabs(b) : moved);
    }
    case Op::detach:
    case Op::slope:
      return x;
    default:  // floor
      return {.real = std::floor(a), .error = std::floor(a + ea) - std::floor(a - ea)};
  }
}

ProgramValue to_integer(const ProgramValue& x) {
  const auto nearest = [](double real) {
    if (std::isnan(real)) return 0.0;
    constexpr double least = std::numeric_limits<std::int32_t>::min(), most = std::numeric_limits<std::int32_t>::max();
    return std::clamp(std::trunc(real), least, most);
  };
  const bool open = nearest(x.real - x.error) != nearest(x.real + x.error);
  return of_integer(static_cast<std::int64_t>(nearest(x.real)), open);
}

ProgramValue where(const ProgramValue& condition, const ProgramValue& yes, const ProgramValue& no, Type type) {
  ProgramValue result = condition.integer != 0 ? yes : no;
  if (!condition.open) return result;
  if (type != Type::real) {
    result.open |= yes.integer != no.integer || yes.open || no.open;
  } else if (yes.real != no.real) {
    result.error = std::fabs(yes.real - no.real) + std::max(yes.error, no.error);
  }
  return result;
}

ProgramValue element_of(Element element, const char* data, std::int64_t index) {
  const char* at = data + index * program::size_of(element);
  const auto read = [&]<class T>(T value) {
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  switch (element) {
    case Element::float32:
      return {.real = read(float{})};
    case Element::float16:
      return {.real = support::float_of_fp16(read(std::uint16_t{}))};
    case Element::bfloat16:
      return {.real = support::float_of_bf16(read(std::uint16_t{}))};
    case Element::int32:
      return {.integer = read(std::int32_t{})};
    case Element::int64:
      return of_integer(read(std::int64_t{}), false);
    case Element::boolean:
      return {.integer = *at != 0 ? 1 : 0};
  }
  return {};
}

}  // namespace

ProgramScore::ProgramScore(const Call& call)
    : call_(call), program_(program::parse(call.problem.program)), nodes_(program_.nodes) {
  if (program_.score >= 0) {
    const auto old = std::find_if(nodes_.begin(), nodes_.end(), [](const Node& node) { return node.op == Op::score; });
    if (old != nodes_.end()) slope_ = program::derive(nodes_, program_.score, static_cast<int>(old - nodes_.begin()));
  }
  values_.resize(nodes_.size());
}

ProgramValue ProgramScore::load(const Node& node) const {
  const auto tensor = static_cast<std::size_t>(node.index);
  const program::TensorDeclaration& declared = program_.tensors[tensor];
  std::int64_t index = 0, count = 1;
  bool open = false;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(declared.rank); ++axis) {
    const std::int64_t size = call_.problem.program_sizes[tensor][axis];
    const ProgramValue& along = values_[static_cast<std::size_t>(node.args[axis])];
    const std::int64_t place = along.integer < 0 ? along.integer + size : along.integer;
    index = index * size + std::clamp<std::int64_t>(place, 0, size - 1);
    count *= size;
    open |= along.open;
  }
  const std::int64_t first = index / elements_at_once * elements_at_once;
  std::vector<ProgramValue>& block = elements_[{node.index, first}];
  if (block.empty()) {
    const std::int64_t last = std::min(first + elements_at_once, count), size = program::size_of(declared.element);
    const char* tensor_data = static_cast<const char*>(call_.buffers.program_tensors[tensor]);
    std::vector<char> scratch;
    const char* data = call_.fetch(tensor_data + first * size, static_cast<std::size_t>((last - first) * size), scratch);
    for (std::int64_t n = 0; n < last - first; ++n) block.push_back(element_of(declared.element, data, n));
  }
  ProgramValue value = block[static_cast<std::size_t>(index - first)];
  value.open = open;
  if (open) value.error = INFINITY;
  return value;
}

ProgramValue ProgramScore::value_of(const Node& node, const Pair& pair, const ProgramValue& score) const {
  const auto arg = [&](int n) -> const ProgramValue& {
    static const ProgramValue none;
    return node.args[static_cast<std::size_t>(n)] < 0
               ? none
               : values_[static_cast<std::size_t>(node.args[static_cast<std::size_t>(n)])];
  };
  const Type type_of_arg = node.args[0] < 0 ? node.type : nodes_[static_cast<std::size_t>(node.args[0])].type;
  switch (node.op) {
    case Op::score:
      return score;
    case Op::b:
      return of_integer(pair.b, false);
    case Op::h:
      return of_integer(pair.head, false);
    case Op::i:
      return of_integer(pair.i, false);
    case Op::j:
      return of_integer(pair.j, false);
    case Op::literal:
      return {.real = node.real, .integer = node.integer};
    case Op::scalar: {
      const double given = call_.buffers.program_scalars[node.index];
      if (node.type == Type::real) return {.real = static_cast<float>(given)};
      return of_integer(static_cast<std::int64_t>(given), false);
    }
    case Op::load:
      return load(node);
    case Op::eq:
    case Op::ne:
    case Op::lt:
    case Op::le:
    case Op::gt:
    case Op::ge:
      return comparison(node.op, arg(0), arg(1), type_of_arg == Type::real);
    case Op::where:
      return where(arg(0), arg(1), arg(2), node.type);
    case Op::to_float: {
      const ProgramValue& x = arg(0);
      return x.open ? ProgramValue{.real = double(x.integer), .error = INFINITY} : of_real(x.integer, 0);
    }
    case Op::to_int:
      return type_of_arg == Type::real ? to_integer(arg(0)) : arg(0);
    case Op::logical_not:
      if (node.type == Type::boolean) return of_bool(arg(0).integer == 0, arg(0).open);
      return of_integers(node.op, arg(0), arg(1));
    default:
      return node.type == Type::real ? of_reals(node.op, arg(0), arg(1)) : of_integers(node.op, arg(0), arg(1));
  }
}

ProgramScore::Result ProgramScore::at(const Pair& pair, double score, double error) const {
  const ProgramValue old{.real = score, .error = error};
  for (std::size_t n = 0; n < nodes_.size(); ++n) values_[n] = value_of(nodes_[n], pair, old);
  Result result{.score = old, .slope = {.real = 1}};
  bool open = false;
  if (program_.visible >= 0) {
    const ProgramValue& visible = values_[static_cast<std::size_t>(program_.visible)];
    result.visible = visible.integer != 0 || visible.open;
    open = visible.open;
  }
  if (program_.score >= 0) {
    result.score = values_[static_cast<std::size_t>(program_.score)];
    result.slope = slope_ < 0 ? ProgramValue{} : values_[static_cast<std::size_t>(slope_)];
    open |= std::isinf(result.score.error);
    if (!open && std::isinf(result.score.real) && result.score.real < 0) result.visible = false;
  }
  if (open) result.score.real = NAN;
  return result;
}

}  // namespace flash_attention::check
