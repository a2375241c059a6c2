#include "program/classes.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "program/periods.h"
#include "support/half.h"

namespace flash_attention::program {
namespace {

namespace interval = abi::interval;

constexpr std::int64_t max_elements = 1024;  // that are looked at for one load of one tile

template <class T>
T element_at(const void* data, std::int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return value;
}

float real_at(const void* data, Element element, std::int64_t index) {
  if (element == Element::float32) return element_at<float>(data, index);
  const auto bits = element_at<std::uint16_t>(data, index);
  return element == Element::float16 ? support::float_of_fp16(bits) : support::float_of_bf16(bits);
}

/// The range of some elements, each read as T, by four chains that do not wait for each other.
template <class T>
Range ints_in(const void* data, std::int64_t place, std::int64_t count) {
  constexpr int chains = 4;
  std::int32_t lo[chains], hi[chains];
  std::fill_n(lo, chains, std::numeric_limits<std::int32_t>::max());
  std::fill_n(hi, chains, std::numeric_limits<std::int32_t>::min());
  const auto look = [&](int chain, std::int64_t n) {
    const auto value = static_cast<std::int32_t>(element_at<T>(data, place + n));
    lo[chain] = std::min(lo[chain], value);
    hi[chain] = std::max(hi[chain], value);
  };
  std::int64_t n = 0;
  for (; n + chains <= count; n += chains) {
    for (int chain = 0; chain < chains; ++chain) look(chain, n + chain);
  }
  for (; n < count; ++n) look(0, n);
  return {.ints = {*std::min_element(lo, lo + chains), *std::max_element(hi, hi + chains)}};
}

Range bools_in(const void* data, std::int64_t place, std::int64_t count) {
  const auto [lo, hi] = ints_in<std::uint8_t>(data, place, count).ints;
  const interval::Bools bools{hi != 0, lo == 0};
  return {.ints = interval::to_int(bools), .bools = bools};
}

Range reals_in(const void* data, Element element, std::int64_t place, std::int64_t count) {
  interval::Reals range{interval::unbounded, -interval::unbounded, false};
  for (std::int64_t n = place; n < place + count; ++n)
    range = interval::either(range, interval::constant(real_at(data, element, n)));
  return {.reals = range};
}

Range unknown() { return {interval::any_int(), interval::any_real(), interval::any_bool()}; }

template <class Ints, class Reals>
Range either(Type type, const Range& x, const Range& y, Ints ints, Reals reals) {
  Range range;
  if (type == Type::real) {
    range.reals = reals(x.reals, y.reals);
  } else {
    range.ints = ints(x.ints, y.ints);
  }
  return range;
}

template <class Compare>
Range compare(Type type, const Range& x, const Range& y, Compare comparison) {
  return {.bools = type == Type::real ? comparison(x.reals, y.reals) : comparison(x.ints, y.ints)};
}

template <class Logic>
Range logic(Type type, const Range& x, const Range& y, Logic operation) {
  if (type == Type::boolean) return {.bools = operation(x.bools, y.bools)};
  return {.ints = operation(x.ints, y.ints)};
}

#define BOTH(name) [](auto a, auto b) { return interval::name(a, b); }

Range apply(const Node& node, Type type, const Range& x, const Range& y, const Range& z) {
  switch (node.op) {
    case Op::add:
      return either(type, x, y, BOTH(add), BOTH(add));
    case Op::sub:
      return either(type, x, y, BOTH(sub), BOTH(sub));
    case Op::mul:
      return either(type, x, y, BOTH(mul), BOTH(mul));
    case Op::min:
      return either(type, x, y, BOTH(min), BOTH(min));
    case Op::max:
      return either(type, x, y, BOTH(max), BOTH(max));
    case Op::div:
      return {.reals = interval::div(x.reals, y.reals)};
    case Op::floordiv:
      return {.ints = interval::floordiv(x.ints, y.ints)};
    case Op::mod:
      return {.ints = interval::mod(x.ints, y.ints)};
    case Op::neg:
      return {interval::neg(x.ints), interval::neg(x.reals)};
    case Op::abs:
      return {interval::abs(x.ints), interval::abs(x.reals)};
    case Op::eq:
      return compare(type, x, y, BOTH(eq));
    case Op::ne:
      return compare(type, x, y, BOTH(ne));
    case Op::lt:
      return compare(type, x, y, BOTH(lt));
    case Op::le:
      return compare(type, x, y, BOTH(le));
    case Op::gt:
      return compare(type, x, y, BOTH(gt));
    case Op::ge:
      return compare(type, x, y, BOTH(ge));
    case Op::logical_and:
      return logic(type, x, y, BOTH(logical_and));
    case Op::logical_or:
      return logic(type, x, y, BOTH(logical_or));
    case Op::logical_xor:
      return logic(type, x, y, BOTH(logical_xor));
    case Op::logical_not:
      return {.ints = interval::logical_not(x.ints), .bools = interval::logical_not(x.bools)};
    case Op::where:
      return {interval::where(x.bools, y.ints, z.ints), interval::where(x.bools, y.reals, z.reals),
              interval::where(x.bools, y.bools, z.bools)};
    case Op::to_float:
      return {.reals = type == Type::boolean ? interval::to_float(x.bools) : interval::to_float(x.ints)};
    case Op::to_int:
      return {.ints = type == Type::boolean ? interval::to_int(x.bools) : interval::to_int(x.reals)};
    default:
      return unknown();
  }
}

#undef BOTH

Range indices(std::int64_t begin, std::int64_t end) { return {.ints = {begin, std::max(begin, end - 1)}}; }

}  // namespace

Classes::Classes(std::vector<Node> nodes, std::vector<TensorDeclaration> declarations, std::vector<HostTensor> tensors,
                 std::vector<float> scalars)
    : nodes_(std::move(nodes)),
      declarations_(std::move(declarations)),
      tensors_(std::move(tensors)),
      scalars_(std::move(scalars)),
      i_period_(period(Op::i)),
      j_period_(period(Op::j)) {}

int Classes::period(Op index) const {
  int common = 0;
  for (const std::vector<Node>& factors : periods(nodes_, index)) {
    std::int64_t product = 1;
    for (const Node& factor : factors) {
      const auto which = static_cast<std::size_t>(factor.index);
      const std::int64_t value = factor.op == Op::literal   ? factor.integer
                                 : which >= scalars_.size() ? 0
                                                            : std::bit_cast<std::int32_t>(scalars_[which]);
      product = std::clamp<std::int64_t>(value, 0, interval::largest) * product;
      if (product > interval::largest) product = 0;
    }
    common = interval::common_period(common, static_cast<int>(product));
  }
  return common;
}

Range Classes::load(const Node& node, const std::vector<Range>& ranges) const {
  const auto which = static_cast<std::size_t>(node.index);
  if (which >= tensors_.size() || tensors_[which].data == nullptr) return unknown();
  const HostTensor& tensor = tensors_[which];
  const auto [element, rank] = declarations_[which];
  std::int64_t place = 0, count = 1;
  for (int axis = 0; axis < rank; ++axis) {
    const std::int64_t size = tensor.sizes[static_cast<std::size_t>(axis)];
    auto [lo, hi] = ranges[static_cast<std::size_t>(node.args[static_cast<std::size_t>(axis)])].ints;
    if (size == 0 || count > 1) return unknown();  // only the last axis may span
    if (lo < 0 && hi >= 0) return unknown();       // a negative index counts from the end
    if (lo < 0) lo += size, hi += size;
    lo = std::clamp<std::int64_t>(lo, 0, size - 1);
    hi = std::clamp<std::int64_t>(hi, 0, size - 1);
    place = place * size + lo;
    count = hi - lo + 1;
  }
  if (count > max_elements) return unknown();
  if (is_real(element)) return reals_in(tensor.data, element, place, count);
  if (element == Element::int32) return ints_in<std::int32_t>(tensor.data, place, count);
  if (element == Element::int64) return ints_in<std::int64_t>(tensor.data, place, count);
  return bools_in(tensor.data, place, count);
}

void Classes::ranges(const Area& area, std::vector<Range>& into) const {
  into.resize(nodes_.size());
  for (std::size_t n = 0; n < nodes_.size(); ++n) {
    const Node& node = nodes_[n];
    const auto arg = [&](std::size_t idx) {
      return node.args[idx] < 0 ? Range{} : into[static_cast<std::size_t>(node.args[idx])];
    };
    switch (node.op) {
      case Op::score:
        into[n] = unknown();
        break;
      case Op::b:
        into[n] = indices(area.b_begin, area.b_end);
        break;
      case Op::h:
        into[n] = indices(area.h_begin, area.h_end);
        break;
      case Op::i:
        into[n] = indices(area.i_begin, area.i_end);
        break;
      case Op::j:
        into[n] = indices(area.j_begin, area.j_end);
        break;
      case Op::literal:
        into[n] = {interval::constant(node.integer), interval::constant(node.real), interval::constant(node.integer != 0)};
        break;
      case Op::scalar: {
        const auto which = static_cast<std::size_t>(node.index);
        if (which >= scalars_.size()) {
          into[n] = unknown();
        } else if (node.type == Type::real) {
          into[n] = {.reals = interval::constant(scalars_[which])};
        } else {
          into[n] = {.ints = interval::constant(std::bit_cast<std::int32_t>(scalars_[which]))};
        }
        break;
      }
      case Op::load:
        into[n] = load(node, into);
        break;
      default:
        into[n] = apply(node, nodes_[static_cast<std::size_t>(node.args[0])].type, arg(0), arg(1), arg(2));
    }
  }
}

interval::Bools Classes::of(int node, const Area& area) const {
  thread_local std::vector<Range> into;
  const auto seen = [&](int i_begin, int i_end, int j_begin, int j_end) {
    ranges({area.b_begin, area.b_end, area.h_begin, area.h_end, i_begin, i_end, j_begin, j_end}, into);
    return into[static_cast<std::size_t>(node)].bools;
  };
  const auto index = [](std::int64_t value) { return static_cast<int>(value); };
  return interval::in_pieces(index(area.i_begin), index(area.i_end), index(area.j_begin), index(area.j_end), i_period_,
                             j_period_, seen);
}

}  // namespace flash_attention::program
