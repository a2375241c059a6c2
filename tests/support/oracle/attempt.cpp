#include "support/oracle/attempt.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "support/oracle/memory.h"
#include "support/oracle/rounding.h"
#include "support/oracle/tensors.h"

namespace flash_attention::testing {
namespace {

constexpr int max_lines = 5;

double worst_error(const std::vector<double>& got, const std::vector<double>& want) {
  double worst = 0;
  for (std::size_t x = 0; x < want.size(); ++x) {
    if (std::isfinite(want[x]) && std::isfinite(got[x])) worst = std::max(worst, std::fabs(got[x] - want[x]));
  }
  return worst;
}

Dtype coarser(Dtype a, Dtype b) { return epsilon(a) > epsilon(b) ? a : b; }

/// Memory that nobody has cleaned.
void* dirty(Memory& memory, std::size_t bytes) {
  if (bytes == 0) return nullptr;
  void* const data = memory.allocate(bytes);
  const std::vector<unsigned char> dirt(bytes, 0xff);
  memory.write(data, dirt.data(), dirt.size());
  return data;
}

void launch(const Case& c, const Target& target, Memory& memory, const Buffers& all) {
  Buffers b = all;
  Options options{.device = target.device,
                  .seed = c.dropout_seed,
                  .offset = c.dropout_offset,
                  .kernel = target.kernel,
                  .tile = target.tile};
  if (target.prepared) {
    const std::size_t bytes = mask_preparation(c.problem, target.pass, b, options).bytes;
    options.prepared_mask = prepare_mask(c.problem, target.pass, b, dirty(memory, bytes), bytes, options);
  }
  options.workspace_bytes = workspace_bytes(c.problem, target.pass, options);
  options.workspace = dirty(memory, options.workspace_bytes);  // nobody may rely on a clean one
  if (is_backward(target.pass)) {
    (target.pass == Pass::backward ? backward : standard_backward)(c.problem, b, options);
    return;
  }
  b.dout = nullptr;
  b.dlse = nullptr;
  b.dq = b.dk = b.dv = b.dbias = nullptr;
  b.dsink = nullptr;
  b.program_gradients = nullptr;
  (target.pass == Pass::forward ? forward : standard_forward)(c.problem, b, options);
}

Results rounded_out(Results exact, Dtype dtype) {
  for (double& x : exact.out) x = round_to(dtype, x);
  return exact;
}

}  // namespace

double largest_of(const std::vector<double>& values) {
  double largest = 0;
  for (const double x : values) {
    if (std::isfinite(x)) largest = std::max(largest, std::fabs(x));
  }
  return largest;
}

bool is_backward(Pass pass) { return pass == Pass::backward || pass == Pass::standard_backward; }

std::string rejection(const Case& c, const Target& target) {
  if (target.kernel.empty()) return "";
  try {
    make_plan(c.problem, target.pass, device_info(target.device), target.kernel, target.tile);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::unsupported) return error.what();
    throw;
  }
  return "";
}

bool rounds_products(const Case& c, const Target& target) {
  if (!c.problem.q_dtype || is_backward(target.pass)) return false;
  try {
    return make_plan(c.problem, target.pass, device_info(target.device), target.kernel, target.tile).kernel.ends_with("_fp8");
  } catch (const Error&) {  // the call itself will say it
    return false;
  }
}

Expected expect(const Case& c, bool backward) {
  Expected expected;
  expected.inputs = draw_inputs(c);
  expected.want = oracle(c, expected.inputs, backward);
  expected.plain = oracle(c, expected.inputs, backward, c.problem.dtype);
  return expected;
}

Outcome attempt(const Case& c, const Target& target, const Expected& expected) {
  const bool backward = is_backward(target.pass);
  const std::unique_ptr<Memory> memory = memory_of(target.device);
  Tensors tensors(c, expected.inputs, *memory);
  if (backward) tensors.set_forward(rounded_out(expected.want, c.problem.dtype));
  launch(c, target, *memory, tensors.buffers());
  return {tensors.read(backward), tensors.written_gap()};
}

std::vector<std::string> differences(const char* name, const std::vector<double>& got, const std::vector<double>& want,
                                     const std::vector<double>& plain, Dtype dtype, double slack, double more) {
  const auto line = [name](const auto&... parts) {
    std::ostringstream text;
    text << name;
    (text << ... << parts);
    return text.str();
  };
  if (got.size() != want.size()) return {line(": got ", got.size(), " elements, want ", want.size())};
  double largest = 0;
  for (double x : want)
    if (std::isfinite(x)) largest = std::max(largest, std::fabs(x));
  const double floor = epsilon(dtype) * (dtype == Dtype::float32 ? 32 : 0.5) * std::max(largest, 0.05);
  const double allowed = slack * (2 * worst_error(plain, want) + floor) + more;
  std::vector<std::string> lines;
  for (std::size_t x = 0; x < want.size() && lines.size() < max_lines; ++x) {
    const bool same_kind = std::isnan(want[x])      ? std::isnan(got[x])
                           : std::isfinite(want[x]) ? std::isfinite(got[x])
                                                    : got[x] == want[x];
    if (same_kind && (!std::isfinite(want[x]) || std::fabs(got[x] - want[x]) <= allowed)) continue;
    lines.push_back(line("[", x, "]: got ", got[x], ", want ", want[x], ", allowed error ", allowed));
  }
  return lines;
}

std::vector<std::string> differences(const Case& c, Pass pass, const Outcome& outcome, const Expected& expected,
                                     double slack) {
  const Results &got = outcome.results, &want = expected.want, &plain = expected.plain;
  std::vector<std::string> lines;
  const auto add = [&](const char* name, const std::vector<double> Results::*part, Dtype dtype, const Results& yardstick,
                       double more = 0) {
    for (std::string& line : differences(name, got.*part, want.*part, yardstick.*part, dtype, slack, more))
      lines.push_back(std::move(line));
  };
  if (!outcome.written_gap.empty()) lines.push_back("written between the elements of " + outcome.written_gap);
  if (!is_backward(pass)) {
    add("out", &Results::out, c.problem.dtype, plain);
    add("lse", &Results::lse, c.narrow_products ? Dtype::float16 : Dtype::float32, plain);
    add("max_logit", &Results::max_logit, Dtype::float32, plain);
    // Probabilities made from lse are right to |lse| 2^-24 each.
    const double of_lse = 0x1p-23 * largest_of(want.lse) * largest_of(want.key_mass);
    add("key_mass", &Results::key_mass, Dtype::float32, plain, of_lse);
    add("entropy", &Results::entropy, Dtype::float32, plain);
    return lines;
  }
  add("dq", &Results::dq, c.problem.dtype, plain);
  add("dk", &Results::dk, c.problem.dtype, plain, slack > 1 ? 4 * plain.dk_spread : 0);  // few chances to be wrong, too
  add("dv", &Results::dv, c.problem.dtype, plain);
  // A float bias takes gradients from an out that was rounded to the problem's type.
  const Dtype of_dbias = slack > 1 ? coarser(c.problem.dtype, c.problem.bias.dtype) : c.problem.bias.dtype;
  const double luck = slack > 1 ? 4 * plain.dbias_spread : 0;  // a dbias of few elements has few chances to be wrong
  if (c.dbias) add("dbias", &Results::dbias, of_dbias, plain, luck);
  const double of_program = slack > 1 ? 4 * plain.dprogram_spread : 0;
  if (c.dprogram) add("dprogram", &Results::dprogram, c.problem.dtype, plain, of_program);
  if (c.dsink) add("dsink", &Results::dsink, Dtype::float16, plain);
  return lines;
}

std::string first_changed(const Results& a, const Results& b) {
  const std::pair<const char*, std::vector<double> Results::*> parts[] = {
      {"out", &Results::out},           {"lse", &Results::lse},         {"dq", &Results::dq},
      {"dk", &Results::dk},             {"dv", &Results::dv},           {"dbias", &Results::dbias},
      {"dsink", &Results::dsink},       {"dprogram", &Results::dprogram}, {"max_logit", &Results::max_logit},
      {"key_mass", &Results::key_mass}, {"entropy", &Results::entropy},
      {"out_tangent", &Results::out_tangent}, {"lse_tangent", &Results::lse_tangent}};
  for (const auto& [name, part] : parts) {
    const std::vector<double>&x = a.*part, &y = b.*part;
    if (x.size() != y.size()) return name;
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (std::memcmp(&x[i], &y[i], sizeof(double)) != 0) return std::string(name) + "[" + std::to_string(i) + "]";
    }
  }
  return "";
}

}  // namespace flash_attention::testing
