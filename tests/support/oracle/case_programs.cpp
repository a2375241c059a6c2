#include "support/oracle/case_programs.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace flash_attention::testing {
namespace {

constexpr std::int64_t period = 7;  // of what the squashed score reads

std::string_view text_of(CaseProgram program) {
  switch (program) {
    case CaseProgram::none:
      return "";
    case CaseProgram::distance:
      return "t0 = tensor float32 1\ns0 = scalar float\n"
             "d = sub i j\na = abs d\nf = float a\nw = load t0 h\nm = mul f w\nn = mul m s0\nr = sub score n\nscore = r\n";
    case CaseProgram::squashed:
      return "t0 = tensor float32 1\ns0 = scalar float\n"
             "u = mul score 0.25\nv = tanh u\nx = mul v s0\nk = add i j\nm = mod k 7\ne = load t0 m\nr = add x e\n"
             "score = r\n";
    case CaseProgram::dilated:
      return "s0 = scalar int\nd = sub i j\nm = mod d s0\nv = ne m 1\nvisible = v\n";
    case CaseProgram::documents:
      return "t0 = tensor int32 2\nx = load t0 b i\ny = load t0 b j\nv = eq x y\nvisible = v\n";
    case CaseProgram::both:
      return "t0 = tensor float32 1\ns0 = scalar float\n"
             "u = mul score 0.25\nv = tanh u\nx = mul v s0\nk = add i j\nm = mod k 7\ne = load t0 m\nr = add x e\n"
             "d = sub i j\ng = add d h\nc = mod g 3\nw = ne c 1\nscore = r\nvisible = w\n";
    case CaseProgram::hides:
      return "t0 = tensor float32 1\n"
             "k = add i j\nm = mod k 4\nv = ne m 2\ne = load t0 h\nx = mul score 0.5\ny = add x e\nr = where v y -inf\n"
             "score = r\n";
  }
  return "";
}

/// Rounded down, as Python's.
std::int64_t modulo(std::int64_t x, std::int64_t y) { return (x % y + y) % y; }

bool reads_heads(CaseProgram program) { return program == CaseProgram::distance || program == CaseProgram::hides; }
std::int64_t num_reals(const Case& c) {
  if (c.program == CaseProgram::squashed || c.program == CaseProgram::both) return period;
  return reads_heads(c.program) ? c.problem.heads_q : 0;
}
std::int64_t positions(const Shape& shape) { return std::max<std::int64_t>({shape.seq_q, shape.seq_kv, 1}); }

}  // namespace

void describe_program(Case& c) {
  if (c.program == CaseProgram::none) return;
  Problem& p = c.problem;
  const Shape shape(c);
  p.program = text_of(c.program);
  if (c.program == CaseProgram::documents)
    p.program_sizes[0] = {std::max<std::int64_t>(p.batch, 1), positions(shape), 0, 0};
  if (num_reals(c) > 0) p.program_sizes[0] = {num_reals(c), 0, 0, 0};
  p.program_gradients = c.dprogram ? 1 : 0;
}

void draw_program(const Case& c, const Shape& shape, Inputs& in) {
  std::mt19937_64 random(c.seed + 29);
  std::normal_distribution<double> normal;
  for (std::int64_t n = 0; n < num_reals(c); ++n) {
    const double drawn = c.program == CaseProgram::distance ? std::fabs(normal(random)) * 0.1 : normal(random);
    in.program_reals.push_back(static_cast<float>(drawn));
  }
  if (c.program == CaseProgram::documents) {
    const std::int64_t length = 1 + static_cast<std::int64_t>(random() % 90);
    for (std::int64_t b = 0; b < std::max<std::int64_t>(c.problem.batch, 1); ++b) {
      for (std::int64_t n = 0; n < positions(shape); ++n)  // the first document comes again as the fourth
        in.program_ints.push_back(static_cast<std::int32_t>((n / length + b) % 3));
    }
  }
  if (c.program == CaseProgram::dilated) in.program_scalars = {static_cast<double>(2 + random() % 3)};
  if (c.program == CaseProgram::distance) in.program_scalars = {0.5};
  if (c.program == CaseProgram::squashed || c.program == CaseProgram::both) in.program_scalars = {3};
}

bool program_shows(const Case& c, const Inputs& in, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  switch (c.program) {
    case CaseProgram::dilated:
      return modulo(i - j, static_cast<std::int64_t>(in.program_scalars[0])) != 1;
    case CaseProgram::documents: {
      const std::int64_t row = b * c.problem.program_sizes[0][1];
      return in.program_ints[row + i] == in.program_ints[row + j];
    }
    case CaseProgram::both:
      return modulo(i - j + h, 3) != 1;
    case CaseProgram::hides:
      return modulo(i + j, 4) != 2;
    default:
      return true;
  }
}

ProgramScore program_score(const Case& c, const Inputs& in, double score, std::int64_t h, std::int64_t i, std::int64_t j,
                           bool in_float) {
  switch (c.program) {
    case CaseProgram::distance: {
      const double far = static_cast<double>(std::abs(i - j)) * in.program_scalars[0];
      return {score - far * in.program_reals[h], 1, -far, h};
    }
    case CaseProgram::squashed:
    case CaseProgram::both: {
      const std::int64_t element = (i + j) % period;
      const double tanh = std::tanh(score * 0.25), bent = in_float ? static_cast<float>(tanh) : tanh;
      const double size = in.program_scalars[0];
      return {size * bent + in.program_reals[element], size * 0.25 * (1 - bent * bent), 1, element};
    }
    case CaseProgram::hides:
      return {score * 0.5 + in.program_reals[h], 0.5, 1, h};
    default:
      return {score};
  }
}

}  // namespace flash_attention::testing
