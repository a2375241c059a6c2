#include "support/contract.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>

#include "support/memory.h"
#include "support/oracle.h"
#include "support/rounding.h"
#include "support/tensors.h"

namespace flash_attention::testing {
namespace {

bool is_backward(Pass pass) { return pass == Pass::backward || pass == Pass::standard_backward; }

double worst_error(const std::vector<double>& got, const std::vector<double>& want) {
  double worst = 0;
  for (std::size_t x = 0; x < want.size(); ++x) {
    if (std::isfinite(want[x]) && std::isfinite(got[x])) worst = std::max(worst, std::fabs(got[x] - want[x]));
  }
  return worst;
}

void launch(const Case& c, const Target& target, Memory& memory, const Buffers& all) {
  Buffers b = all;
  Options options{.device = target.device, .seed = c.dropout_seed, .offset = c.dropout_offset, .kernel = target.kernel};
  options.workspace_bytes = workspace_bytes(c.problem, target.pass, options);
  if (options.workspace_bytes > 0) options.workspace = memory.allocate(options.workspace_bytes);
  if (options.workspace_bytes > 0) {  // nobody may rely on a clean workspace
    const std::vector<unsigned char> dirt(options.workspace_bytes, 0xff);
    memory.write(options.workspace, dirt.data(), dirt.size());
  }
  if (is_backward(target.pass)) {
    (target.pass == Pass::backward ? backward : standard_backward)(c.problem, b, options);
    return;
  }
  b.dout = nullptr;
  b.dlse = nullptr;
  b.dq = b.dk = b.dv = b.dbias = nullptr;
  b.dsink = nullptr;
  (target.pass == Pass::forward ? forward : standard_forward)(c.problem, b, options);
}

/// Why the named kernel does not take the case; empty where it does.
std::string rejection(const Case& c, const Target& target) {
  if (target.kernel.empty()) return "";
  try {
    make_plan(c.problem, target.pass, device_info(target.device), target.kernel);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::unsupported) return error.what();
    throw;
  }
  return "";
}

/// What a case is compared with.
struct Reference {
  Case c;
  bool backward;
  Inputs in;
  Results want, plain;
};

/// The same case comes up under several kernels and schedules: the last few are kept. One with gradients has the forward
/// results, too.
const Reference& reference_of(const Case& c, bool backward) {
  constexpr std::size_t kept = 8;
  static std::deque<Reference> references;
  for (const Reference& r : references) {
    if (r.c == c && r.backward >= backward) return r;
  }
  if (references.size() == kept) references.pop_back();
  Reference r{.c = c, .backward = backward, .in = draw_inputs(c), .want = {}, .plain = {}};
  r.want = oracle(c, r.in, backward), r.plain = oracle(c, r.in, backward, c.problem.dtype);
  return references.emplace_front(std::move(r));
}

Results forward_of(Results exact, Dtype dtype) {
  for (double& x : exact.out) x = round_to(dtype, x);
  return exact;
}

}  // namespace

void compare(const char* name, const std::vector<double>& got, const std::vector<double>& want,
             const std::vector<double>& plain, Dtype dtype) {
  ASSERT_EQ(got.size(), want.size()) << name;
  double largest = 0;
  for (double x : want)
    if (std::isfinite(x)) largest = std::max(largest, std::fabs(x));
  const double floor = epsilon(dtype) * (dtype == Dtype::float32 ? 32 : 0.5) * std::max(largest, 0.05);
  const double allowed = 2 * worst_error(plain, want) + floor;
  int shown = 0;
  for (std::size_t x = 0; x < want.size() && shown < 5; ++x) {
    const bool same_kind = std::isnan(want[x])      ? std::isnan(got[x])
                           : std::isfinite(want[x]) ? std::isfinite(got[x])
                                                    : got[x] == want[x];
    if (same_kind && (!std::isfinite(want[x]) || std::fabs(got[x] - want[x]) <= allowed)) continue;
    ++shown;
    ADD_FAILURE() << name << "[" << x << "]: got " << got[x] << ", want " << want[x] << ", allowed error " << allowed;
  }
}

void check(const Case& c, const Target& target) {
  if (const std::string reason = rejection(c, target); !reason.empty()) GTEST_SKIP() << reason;
  const bool backward = is_backward(target.pass);
  const Reference& reference = reference_of(c, backward);
  const Inputs& in = reference.in;
  const Results &want = reference.want, &plain = reference.plain;
  const std::unique_ptr<Memory> memory = memory_of(target.device);
  Tensors tensors(c, in, *memory);
  if (backward) tensors.set_forward(forward_of(want, c.problem.dtype));
  launch(c, target, *memory, tensors.buffers());
  const Results got = tensors.read(backward);
  EXPECT_EQ(tensors.written_gap(), "");
  if (!backward) {
    compare("out", got.out, want.out, plain.out, c.problem.dtype);
    compare("lse", got.lse, want.lse, want.lse, Dtype::float32);
    return;
  }
  compare("dq", got.dq, want.dq, plain.dq, c.problem.dtype);
  compare("dk", got.dk, want.dk, plain.dk, c.problem.dtype);
  compare("dv", got.dv, want.dv, plain.dv, c.problem.dtype);
  if (c.dbias) compare("dbias", got.dbias, want.dbias, plain.dbias, c.problem.bias.dtype);
  if (c.dsink) compare("dsink", got.dsink, want.dsink, plain.dsink, Dtype::float16);
}

void check_reproducible(const Case& c, const Target& target, const std::function<void(int)>& before_run) {
  if (const std::string reason = rejection(c, target); !reason.empty()) GTEST_SKIP() << reason;
  const bool backward = is_backward(target.pass);
  const Reference& reference = reference_of(c, backward);
  const Inputs& in = reference.in;
  const Results exact = forward_of(reference.want, c.problem.dtype);
  Results runs[2];
  for (int run = 0; run < 2; ++run) {
    const std::unique_ptr<Memory> memory = memory_of(target.device);
    Tensors tensors(c, in, *memory);
    if (backward) tensors.set_forward(exact);
    if (before_run) before_run(run);
    launch(c, target, *memory, tensors.buffers());
    runs[run] = tensors.read(backward);
  }
  const auto same = [](const std::vector<double>& a, const std::vector<double>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
  };
  EXPECT_TRUE(same(runs[0].out, runs[1].out) && same(runs[0].lse, runs[1].lse));
  EXPECT_TRUE(same(runs[0].dq, runs[1].dq) && same(runs[0].dk, runs[1].dk) && same(runs[0].dv, runs[1].dv));
  EXPECT_TRUE(same(runs[0].dbias, runs[1].dbias) && same(runs[0].dsink, runs[1].dsink));
}

}  // namespace flash_attention::testing
