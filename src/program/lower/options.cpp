#include "program/lower/options.h"

#include <cmath>
#include <limits>
#include <vector>

#include "program/lower/linear.h"
#include "program/lower/lines.h"
#include "program/program.h"

namespace flash_attention::program {
namespace {

/// sign * (i + offset - j), or sign * |i + offset - j|.
struct Distance {
  int sign;
  bool absolute;
  std::int64_t offset;
};

/// A slope times a distance.
struct Term {
  int sign = 1;
  int slope = -1;  // the node that loads it
  std::optional<Distance> distance;
};

class Reader {
 public:
  explicit Reader(const Program& program) : program_(program), linears_(linears_of(program.nodes)) {}

  std::optional<OptionsOfProgram> read() const {
    OptionsOfProgram found;
    if (is_capped(program_.score, found)) return found.softcap > 0 ? std::optional(found) : std::nullopt;
    const Node& sum = node(program_.score);
    if (sum.op != Op::add && sum.op != Op::sub) return std::nullopt;
    for (const int base : {0, 1}) {
      if (base == 1 && sum.op == Op::sub) break;  // less the score
      found = {};
      Term term;
      term.sign = sum.op == Op::sub ? -1 : 1;
      if (is_capped(arg(sum, base), found) && multiply(arg(sum, 1 - base), term) && is_alibi(term, found)) return found;
    }
    return std::nullopt;
  }

 private:
  const Node& node(int n) const { return program_.nodes[static_cast<std::size_t>(n)]; }
  static int arg(const Node& node, int which) { return node.args[static_cast<std::size_t>(which)]; }

  /// The score, or a soft cap of it: cap * tanh(score / cap).
  bool is_capped(int n, OptionsOfProgram& found) const {
    if (node(n).op == Op::score) return true;
    if (node(n).op != Op::mul) return false;
    for (const int which : {0, 1}) {
      const Node &cap = node(arg(node(n), which)), &tanh = node(arg(node(n), 1 - which));
      if (cap.op != Op::literal || tanh.op != Op::tanh) continue;
      // The option divides by the cap: 1 / cap is finite.
      if (!std::isfinite(cap.real) || cap.real < std::numeric_limits<float>::min()) return false;
      if (!is_part(node(arg(tanh, 0)), cap.real)) return false;
      found.softcap = cap.real;
      return true;
    }
    return false;
  }

  /// score / cap, or score times the float next to 1 / cap.
  bool is_part(const Node& part, float cap) const {
    const auto is_score = [&](int which) { return node(arg(part, which)).op == Op::score; };
    const auto is_literal = [&](int which, float value) {
      const Node& literal = node(arg(part, which));
      return literal.op == Op::literal && literal.real == value;
    };
    if (part.op == Op::div) return is_score(0) && is_literal(1, cap);
    return part.op == Op::mul && ((is_score(0) && is_literal(1, 1.0f / cap)) || (is_score(1) && is_literal(0, 1.0f / cap)));
  }

  std::optional<Distance> distance_of(int n) const {
    const Node& value = node(n);
    if (const auto& line = linears_[static_cast<std::size_t>(n)]; line) {
      if (line->of_i * line->of_j != -1) return std::nullopt;
      const auto sign = static_cast<int>(line->of_i);
      return Distance{sign, false, sign * line->constant};
    }
    if (value.op != Op::abs && value.op != Op::neg && value.op != Op::to_float) return std::nullopt;
    std::optional<Distance> inner = distance_of(arg(value, 0));
    if (!inner) return std::nullopt;
    if (value.op == Op::abs) return Distance{1, true, inner->offset};
    if (value.op == Op::neg) inner->sign = -inner->sign;
    return inner;
  }

  /// Takes a factor in: a slope and a distance, once each, and signs.
  bool multiply(int n, Term& term) const {
    const Node& factor = node(n);
    if (const std::optional<Distance> distance = distance_of(n)) {
      if (term.distance) return false;
      term.distance = distance;
      return true;
    }
    if (factor.op == Op::load) {
      if (term.slope >= 0) return false;
      term.slope = n;
      return true;
    }
    if (factor.op == Op::neg) term.sign = -term.sign;
    if (factor.op == Op::neg) return multiply(arg(factor, 0), term);
    return factor.op == Op::mul && multiply(arg(factor, 0), term) && multiply(arg(factor, 1), term);
  }

  /// Whether a term takes slope[h] or slope[b, h] off for each key of distance.
  bool is_alibi(const Term& term, OptionsOfProgram& found) const {
    if (term.slope < 0 || !term.distance || term.sign * term.distance->sign != -1) return false;
    const Node& slope = node(term.slope);
    const TensorDeclaration& tensor = program_.tensors[static_cast<std::size_t>(slope.index)];
    if (tensor.element != Element::float32 || tensor.rank < 1 || tensor.rank > 2) return false;
    if (node(arg(slope, tensor.rank - 1)).op != Op::h || (tensor.rank == 2 && node(arg(slope, 0)).op != Op::b))
      return false;
    found.slopes = slope.index;
    found.by_batch = tensor.rank == 2;
    found.absolute = term.distance->absolute;
    found.offset = term.distance->offset;
    return true;
  }

  const Program& program_;
  const Linears linears_;
};

}  // namespace

std::optional<OptionsOfProgram> take_options(std::string_view text) {
  const std::shared_ptr<const Program> known = parsed(text);
  const Program& program = *known;
  if (program.score < 0) return std::nullopt;
  std::optional<OptionsOfProgram> taken = Reader(program).read();
  if (taken && program.visible >= 0) taken->rest = without(text, "score");
  return taken;
}

}  // namespace flash_attention::program
