#include "support/cases/programs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "support/oracle/rounding.h"

namespace flash_attention::testing {
namespace {

using program::Node;
using program::Op;
using program::Type;

/// Writes lines and keeps the names of what can be used, by type.
class Writer {
 public:
  explicit Writer(unsigned seed) : random_(seed) {}

  std::string text = "t0 = tensor float32 1\nt1 = tensor int32 2\ns0 = scalar int\ns1 = scalar float\n";

  int draw(int count) { return static_cast<int>(random_() % static_cast<unsigned>(count)); }

  template <class... Words>
  std::string line(std::vector<std::string>& into, Words... words) {
    const std::string name = "v" + std::to_string(count_++);
    text += name + " =";
    ((text += " " + std::string(words)), ...);
    text += "\n";
    into.push_back(name);
    return name;
  }

  std::string pick(const std::vector<std::string>& from) {
    return from[static_cast<std::size_t>(draw(static_cast<int>(from.size())))];
  }

  /// Inside of an axis, or anywhere, in a way that nobody can know before.
  std::string index(const std::string& x, int size) {
    std::vector<std::string> unused;
    return draw(2) == 0 ? line(unused, "mod", x, std::to_string(size)) : line(unused, "add", x, "s0");
  }

  void add_int() {
    const std::string x = pick(ints), y = pick(ints);
    const char* const two[] = {"add", "sub", "min", "max"};
    switch (draw(9)) {
      case 0:
        line(ints, "mul", x, std::to_string(draw(7) - 3));
        break;
      case 1:
        line(ints, "floordiv", x, std::to_string(draw(9) - 3));
        break;
      case 2:
        line(ints, "mod", x, draw(2) == 0 ? y : std::to_string(draw(12) - 3));
        break;
      case 3:
        line(ints, "abs", x);
        break;
      case 4:
        line(ints, "load", "t1", index(x, 3), index(y, 17));
        break;
      case 5:
        line(ints, "where", bools.empty() ? "true" : pick(bools), x, y);
        break;
      case 6:
        line(ints, "neg", x);
        break;
      default:
        line(ints, two[draw(4)], x, y);
    }
  }

  void add_bool() {
    const char* const comparisons[] = {"eq", "ne", "lt", "le", "gt", "ge"};
    const char* const logic[] = {"and", "or", "xor"};
    if (bools.size() < 2 || draw(3) != 0) {
      line(bools, comparisons[draw(6)], pick(ints), pick(ints));
    } else if (draw(4) == 0) {
      line(bools, "not", pick(bools));
    } else {
      line(bools, logic[draw(3)], pick(bools), pick(bools));
    }
  }

  /// Of about the size of 1.
  void add_real() {
    const std::string x = pick(reals), y = pick(reals);
    switch (draw(11)) {
      case 0:
        line(reals, "tanh", x);
        break;
      case 1:
        line(reals, "sigmoid", x);
        break;
      case 2:
        line(reals, "load", "t0", index(pick(ints), 11));
        break;
      case 3: {
        std::vector<std::string> unused;
        const std::string whole = line(unused, "mod", pick(ints), "7");
        line(reals, "mul", line(unused, "float", whole), "0.25");
        break;
      }
      case 4:
        line(reals, "where", bools.empty() ? "false" : pick(bools), x, y);
        break;
      case 5: {
        std::vector<std::string> unused;
        line(reals, "div", x, line(unused, "add", "1.5", line(unused, "abs", y)));
        break;
      }
      case 6: {
        std::vector<std::string> unused;
        line(reals, "exp", line(unused, "neg", line(unused, "abs", x)));
        break;
      }
      case 7: {
        std::vector<std::string> unused;
        line(reals, draw(2) == 0 ? "sqrt" : "log", line(unused, "add", "1.5", line(unused, "abs", x)));
        break;
      }
      case 8:
        line(reals, draw(2) == 0 ? "sin" : "cos", x);
        break;
      case 9:
        line(reals, "detach", x);
        break;
      default: {
        std::vector<std::string> unused;
        const char* const two[] = {"add", "sub", "mul", "min", "max"};
        line(reals, "tanh", line(unused, two[draw(5)], x, y));
      }
    }
  }

  std::vector<std::string> ints{"b", "h", "i", "j", "s0", "i", "j", "3"};
  std::vector<std::string> reals{"s1", "0.5", "score"};
  std::vector<std::string> bools;

 private:
  std::mt19937 random_;
  int count_ = 0;
};

std::int64_t floor_quotient(std::int64_t x, std::int64_t y) {
  return y == 0 ? 0 : static_cast<std::int64_t>(std::floor(static_cast<double>(x) / static_cast<double>(y)));
}

struct Data {
  std::vector<float> q, k, v, dout, dlse;
};

Data make_data(const Problem& p, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) {
      value = normal(random);
      value = static_cast<float>(round_to(p.dtype, value));
    }
    return values;
  };
  const std::int64_t rows = p.batch * p.seq_q * p.heads_q, keys = p.batch * p.seq_kv * p.heads_kv;
  return {fill(rows * p.head_dim), fill(keys * p.head_dim), fill(keys * p.head_dim), fill(rows * p.head_dim), fill(rows)};
}

std::vector<double> widened(const std::vector<float>& values) { return {values.begin(), values.end()}; }

}  // namespace

RandomProgram::RandomProgram(unsigned seed, bool with_score, bool with_mask) {
  Writer writer(seed);
  if (!with_score) writer.reals.pop_back();
  for (int n = 0; n < 14; ++n) {
    const int what = writer.draw(3);
    what == 0 ? writer.add_int() : what == 1 ? writer.add_bool() : writer.add_real();
  }
  writer.add_bool();
  if (with_score) {
    std::vector<std::string> unused;
    const std::string bent = writer.line(unused, "add", writer.pick(writer.reals), writer.reals.back());
    writer.text += "score = " + writer.line(unused, "add", writer.line(unused, "mul", "score", "0.5"), bent) + "\n";
  }
  if (with_mask) writer.text += "visible = " + writer.bools.back() + "\n";
  text = writer.text;
  parsed = program::parse(text);
  for (int n = 0; n < 11; ++n) reals.push_back(0.3f * static_cast<float>(writer.draw(13) - 6));
  for (int n = 0; n < 3 * 17; ++n) ints.push_back(writer.draw(9) - 2);
  scalars = {static_cast<double>(writer.draw(40) - 5), 0.25 * (writer.draw(9) - 4)};
}

RandomProgram::RandomProgram(const std::string& given) : text(given), parsed(program::parse(given)) {
  for (int n = 0; n < 11; ++n) reals.push_back(0.25f / static_cast<float>(n + 1));
}

void RandomProgram::describe(Problem& problem) const {
  problem.program = text;
  if (parsed.tensors.empty()) return;
  problem.program_sizes[0] = {11, 0, 0, 0};
  if (parsed.tensors.size() > 1) problem.program_sizes[1] = {3, 17, 0, 0};
  problem.program_gradients = parsed.score >= 0 && with_gradient ? 1 : 0;
}

double RandomProgram::value(int node, double old, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
  const Node& n = parsed.nodes[static_cast<std::size_t>(node)];
  double x[3] = {};
  for (std::size_t a = 0; a < 3; ++a) {
    if (n.args[a] >= 0) x[a] = value(n.args[a], old, b, h, i, j);
  }
  const auto whole = [&](std::size_t a) { return static_cast<std::int64_t>(x[a]); };
  const auto index = [&](std::size_t axis, std::int64_t size) {
    const std::int64_t at = whole(axis) < 0 ? whole(axis) + size : whole(axis);
    return std::clamp<std::int64_t>(at, 0, size - 1);
  };
  switch (n.op) {
    case Op::score:
      return old;
    case Op::b:
      return static_cast<double>(b);
    case Op::h:
      return static_cast<double>(h);
    case Op::i:
      return static_cast<double>(i);
    case Op::j:
      return static_cast<double>(j);
    case Op::literal:
      return n.type == Type::real ? static_cast<double>(n.real) : n.integer;
    case Op::scalar:
      return scalars[static_cast<std::size_t>(n.index)];
    case Op::load:
      if (n.index == 0) return reals[static_cast<std::size_t>(index(0, 11))];
      return ints[static_cast<std::size_t>(index(0, 3) * 17 + index(1, 17))];
    case Op::add:
      return x[0] + x[1];
    case Op::sub:
      return x[0] - x[1];
    case Op::mul:
      return x[0] * x[1];
    case Op::div:
      return x[0] / x[1];
    case Op::floordiv:
      return static_cast<double>(floor_quotient(whole(0), whole(1)));
    case Op::mod:
      return whole(1) == 0 ? 0 : static_cast<double>(whole(0) - floor_quotient(whole(0), whole(1)) * whole(1));
    case Op::neg:
      return -x[0];
    case Op::abs:
      return std::fabs(x[0]);
    case Op::min:
      return std::min(x[0], x[1]);
    case Op::max:
      return std::max(x[0], x[1]);
    case Op::exp:
      return std::exp(x[0]);
    case Op::log:
      return std::log(x[0]);
    case Op::tanh:
      return std::tanh(x[0]);
    case Op::sigmoid:
      return 1 / (1 + std::exp(-x[0]));
    case Op::sqrt:
      return std::sqrt(x[0]);
    case Op::sin:
      return std::sin(x[0]);
    case Op::cos:
      return std::cos(x[0]);
    case Op::floor:
      return std::floor(x[0]);
    case Op::fmod:
      return std::fmod(x[0], x[1]);
    case Op::slope:
      return x[0];
    case Op::detach:
      return still == nullptr ? x[0] : still->value(n.args[0], still_score, b, h, i, j);
    case Op::eq:
      return x[0] == x[1];
    case Op::ne:
      return x[0] != x[1];
    case Op::lt:
      return x[0] < x[1];
    case Op::le:
      return x[0] <= x[1];
    case Op::gt:
      return x[0] > x[1];
    case Op::ge:
      return x[0] >= x[1];
    case Op::logical_and:
      return x[0] != 0 && x[1] != 0;
    case Op::logical_or:
      return x[0] != 0 || x[1] != 0;
    case Op::logical_xor:
      return (x[0] != 0) != (x[1] != 0);
    case Op::logical_not:
      return x[0] == 0;
    case Op::where:
      return x[0] != 0 ? x[1] : x[2];
    case Op::to_float:
      return x[0];
    case Op::to_int:
      return std::trunc(x[0]);
    case Op::offset:
      break;
  }
  return 0;
}

double RandomProgram::score(double old, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
  return parsed.score < 0 ? old : value(parsed.score, old, b, h, i, j);
}

bool RandomProgram::visible(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
  return parsed.visible < 0 || value(parsed.visible, 0, b, h, i, j) != 0;
}

ProgramResults run_program(const Problem& problem, const RandomProgram& random, const Options& options, unsigned seed,
                           const KernelPair& kernels) {
  Data data = make_data(problem, seed);
  const std::int64_t key_row = problem.heads_kv * problem.head_dim;
  for (std::int64_t n = 0; kernels.poison > 0 && n < static_cast<std::int64_t>(data.k.size()); ++n) {
    if (n / key_row % problem.seq_kv % kernels.poison != 0) continue;
    data.k[static_cast<std::size_t>(n)] = std::numeric_limits<float>::quiet_NaN();
    data.v[static_cast<std::size_t>(n)] = std::numeric_limits<float>::infinity();
  }
  const bool narrow = problem.dtype != Dtype::float32, half = problem.dtype == Dtype::float16;
  const auto stored = [&](const std::vector<float>& values) {
    std::vector<float> memory(values.size() + 4);  // 16 bits an element take half of it
    if (!narrow) return std::copy(values.begin(), values.end(), memory.begin()), memory;
    auto* to = reinterpret_cast<std::uint16_t*>(memory.data());
    for (std::size_t n = 0; n < values.size(); ++n) to[n] = half ? to_float16(values[n]) : to_bfloat16(values[n]);
    return memory;
  };
  const auto loaded = [&](const std::vector<float>& memory) {
    std::vector<double> values(memory.size() - 4);
    const auto* from = reinterpret_cast<const std::uint16_t*>(memory.data());
    for (std::size_t n = 0; n < values.size(); ++n) {
      values[n] = half ? from_float16(from[n]) : narrow ? from_bfloat16(from[n]) : memory[n];
    }
    return values;
  };
  std::vector<float> q = stored(data.q), k = stored(data.k), v = stored(data.v), dout = stored(data.dout);
  std::vector<float> out(q.size()), dq(q.size()), dk(k.size()), dv(v.size());
  std::vector<float> lse(data.dlse.size()), dlse = data.dlse, dreals(random.reals.size());
  const std::vector<const void*> captured = random.pointers();
  float* const gradients[] = {dreals.data(), nullptr};
  Buffers buffers{.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data(), .lse = lse.data()};
  buffers.program_tensors = captured.data();
  buffers.program_scalars = random.scalars.data();
  Problem described = problem;
  random.describe(described);
  const auto run = [&](Pass pass) {
    if (kernels.call) return kernels.call(described, pass, buffers);
    Options with = options;
    with.kernel = pass == Pass::forward ? kernels.forward : kernels.backward;
    const std::size_t bytes = workspace_bytes(described, pass, with);
    std::vector<char> memory(bytes + 256);
    with.workspace = memory.data() + (256 - reinterpret_cast<std::uintptr_t>(memory.data()) % 256);
    with.workspace_bytes = bytes;
    pass == Pass::forward ? forward(described, buffers, with) : backward(described, buffers, with);
  };
  run(Pass::forward);
  for (std::size_t row = 0; row < lse.size(); ++row) {
    if (std::isinf(lse[row])) dlse[row] = 0;
  }
  buffers.dout = dout.data(), buffers.dlse = dlse.data();
  buffers.dq = dq.data(), buffers.dk = dk.data(), buffers.dv = dv.data();
  buffers.program_gradients = gradients;
  run(Pass::backward);
  return {loaded(out), widened(lse), loaded(dq), loaded(dk), loaded(dv), widened(dreals)};
}

ProgramResults exact_program(const Problem& p, const RandomProgram& random, unsigned seed) {
  const Data data = make_data(p, seed);
  const std::int64_t d = p.head_dim, group = p.heads_q / p.heads_kv;
  ProgramResults r;
  for (auto* sums : {&r.out, &r.dq}) sums->assign(data.q.size(), 0);
  for (auto* sums : {&r.dk, &r.dv}) sums->assign(data.k.size(), 0);
  r.lse.assign(data.dlse.size(), 0);
  r.dreals.assign(random.reals.size(), 0);
  const double scale = 1 / std::sqrt(static_cast<double>(d));
  const auto keys = static_cast<std::size_t>(p.seq_kv);
  std::vector<double> old(keys), weight(keys);
  RandomProgram moved = random;
  moved.still = &random;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      for (std::int64_t i = 0; i < p.seq_q; ++i) {
        const std::int64_t row = ((b * p.seq_q + i) * p.heads_q + h) * d;
        const auto key_row = [&](std::int64_t j) { return ((b * p.seq_kv + j) * p.heads_kv + h / group) * d; };
        const float *const q = data.q.data() + row, *const dout = data.dout.data() + row;
        double *const out = r.out.data() + row, *const dq = r.dq.data() + row;
        double sum = 0, largest = -std::numeric_limits<double>::infinity();
        for (std::int64_t j = 0; j < p.seq_kv; ++j) {
          const bool shown = random.visible(b, h, i, j) && (!p.causal || j <= i + p.seq_kv - p.seq_q);
          weight[static_cast<std::size_t>(j)] = -std::numeric_limits<double>::infinity();
          if (!shown) continue;
          const float* const k = data.k.data() + key_row(j);
          double dot = 0;
          for (std::int64_t c = 0; c < d; ++c) dot += double{q[c]} * k[c];
          old[static_cast<std::size_t>(j)] = scale * dot;
          weight[static_cast<std::size_t>(j)] = random.score(scale * dot, b, h, i, j);
          largest = std::max(largest, weight[static_cast<std::size_t>(j)]);
        }
        for (double& w : weight) sum += w = std::isinf(w) && w < 0 ? 0 : std::exp(w - largest);
        const std::int64_t line = (b * p.heads_q + h) * p.seq_q + i;
        r.lse[static_cast<std::size_t>(line)] = largest + std::log(sum);
        if (sum == 0) continue;
        double delta = -double{data.dlse[static_cast<std::size_t>(line)]};
        std::vector<double> dp(keys);
        for (std::int64_t j = 0; j < p.seq_kv; ++j) {
          double& w = weight[static_cast<std::size_t>(j)];
          if (w == 0) continue;
          w /= sum;
          const float* const v = data.v.data() + key_row(j);
          double* const dv = r.dv.data() + key_row(j);
          double dot = 0;
          for (std::int64_t c = 0; c < d; ++c) {
            out[c] += w * v[c];
            dv[c] += w * dout[c];
            dot += double{dout[c]} * v[c];
          }
          dp[static_cast<std::size_t>(j)] = dot;
          delta += w * dot;
        }
        for (std::int64_t j = 0; j < p.seq_kv; ++j) {
          const double ds = weight[static_cast<std::size_t>(j)] * (dp[static_cast<std::size_t>(j)] - delta);
          if (ds == 0) continue;
          constexpr double step = 1e-6;  // differences, not the derivative under test
          const double s = old[static_cast<std::size_t>(j)];
          moved.still_score = s;
          const double slope = (moved.score(s + step, b, h, i, j) - moved.score(s - step, b, h, i, j)) / (2 * step);
          const float* const k = data.k.data() + key_row(j);
          double* const dk = r.dk.data() + key_row(j);
          for (std::int64_t c = 0; c < d; ++c) {
            dq[c] += scale * ds * slope * k[c];
            dk[c] += scale * ds * slope * q[c];
          }
          for (std::size_t n = 0; n < moved.reals.size() && p.seq_q <= 40; ++n) {
            const float kept = moved.reals[n];
            moved.reals[n] = kept + 0x1p-10f;
            const double up = moved.score(s, b, h, i, j);
            moved.reals[n] = kept - 0x1p-10f;
            r.dreals[n] += ds * (up - moved.score(s, b, h, i, j)) / 0x1p-9;
            moved.reals[n] = kept;
          }
        }
      }
    }
  }
  return r;
}

double difference(const std::vector<double>& got, const std::vector<double>& expected) {
  double most = 0, size = 1;
  for (std::size_t n = 0; n < expected.size(); ++n) {
    if (std::isinf(expected[n]) && expected[n] == got[n]) continue;
    const double apart = std::fabs(got[n] - expected[n]);
    most = apart <= most ? most : apart;
    size = std::max(size, std::isinf(expected[n]) ? 0 : std::fabs(expected[n]));
    if (std::isnan(apart)) return apart;
  }
  return most / size;
}

}  // namespace flash_attention::testing
