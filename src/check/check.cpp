#include "check/check.h"

#include <cmath>
#include <limits>
#include <sstream>

#include "check/reference.h"
#include "check/sample.h"
#include "check/sums.h"
#include "flash_attention/error.h"

namespace flash_attention::check {
namespace {

/// The context of a message about a row that differs.
struct Context {
  const Call& call;
  Pass pass;
  std::string_view kernel;
};

[[noreturn]] void differs(const Context& context, const std::string& where, double got, double expected, double allowed) {
  std::ostringstream text;
  text.precision(9);
  text << "FLASH_ATTENTION_CHECK: " << context.kernel << " differs from fp64 in " << where << ": got " << got
       << ", expected " << expected << ", allowed is a difference of " << allowed << "; " << to_string(context.pass)
       << " of " << to_string(context.call.problem);
  throw Error(ErrorCode::internal, text.str());
}

/// If fp64 itself has no finite number (NaN in a visible input, an overflow) there is nothing to compare with. The
/// exception is lse = -inf of a row without keys.
bool agrees(double got, double expected, double allowed, Dtype dtype) {
  if (std::isinf(expected) && expected < 0) return got == expected;
  if (!std::isfinite(expected)) return true;
  const double largest = dtype == Dtype::float16 ? 65504 : std::numeric_limits<float>::max();
  if (std::fabs(expected) + allowed > largest) return true;
  return std::fabs(got - expected) <= allowed;  // false for NaN
}

void compare(const Context& context, const char* tensor, const Place& place, const char* row,
             const std::vector<double>& got, const Row& wanted, Dtype dtype) {
  for (std::size_t d = 0; d < got.size(); ++d) {
    if (agrees(got[d], wanted.values[d], wanted.allowed[d], dtype)) continue;
    std::ostringstream where;
    where << tensor << "[batch " << place.b << ", " << row << ' ' << place.row << ", head " << place.head << ", column "
          << d << ']';
    differs(context, where.str(), got[d], wanted.values[d], wanted.allowed[d]);
  }
}

void check_queries(const Context& context, std::uint64_t seed) {
  const Call& call = context.call;
  const Problem& p = call.problem;
  for (const Place& place : some_queries(call, seed)) {
    const auto& [b, head, i] = place;
    const QueryResults wanted = query_results(call, b, head, i);
    const auto out = call.read_row(call.queries(call.buffers.out, p.out_strides, p.head_dim_v, b, head), i);
    compare(context, "out", place, "query", out, wanted.out, p.dtype);
    if (call.buffers.lse == nullptr) continue;
    const auto lse = call.read_row(call.statistics(call.buffers.lse, b, head), i);
    compare(context, "lse", place, "query", lse, wanted.lse, Dtype::float32);
  }
}

void check_gradients(const Context& context, std::uint64_t seed) {
  const Call& call = context.call;
  const Problem& p = call.problem;
  for (const Place& place : some_queries(call, seed)) {
    const auto& [b, head, i] = place;
    const auto dq = call.read_row(call.queries(call.buffers.dq, p.dq_strides, p.head_dim, b, head), i);
    compare(context, "dq", place, "query", dq, query_gradient(call, b, head, i), p.dtype);
  }
  for (const Place& place : some_keys(call, seed)) {
    const auto& [b, head, j] = place;
    const KeyGradients wanted = key_gradients(call, b, head, j);
    const auto dk = call.read_keys(call.buffers.dk, p.dk_strides, p.head_dim, b, head, j, j + 1);
    const auto dv = call.read_keys(call.buffers.dv, p.dv_strides, p.head_dim_v, b, head, j, j + 1);
    compare(context, "dk", place, "key", dk, wanted.dk, p.dtype);
    compare(context, "dv", place, "key", dv, wanted.dv, p.dtype);
  }
}

/// Checks sums over rows, which no single row shows.
void check_sums(const Context& context, std::uint64_t seed) {
  const Call& call = context.call;
  const auto compare_one = [&](const std::string& where, const Rows& tensor, std::int64_t index, const Row& wanted) {
    const double got = call.read_row(tensor, index)[0];
    if (!agrees(got, wanted.values[0], wanted.allowed[0], tensor.dtype))
      differs(context, where, got, wanted.values[0], wanted.allowed[0]);
  };
  if (call.buffers.dbias != nullptr) {
    const Rows tensor{call.buffers.dbias, call.problem.bias.dtype, 1, 1};
    for (const BiasPlace& place : some_biases(call, seed)) {
      std::ostringstream where;
      where << "dbias[batch " << place.b << ", head " << place.head << ", query " << place.i << ", key " << place.j << ']';
      compare_one(where.str(), tensor, place.index, bias_gradient(call, place));
    }
  }
  if (call.buffers.dsink != nullptr) {
    const Rows tensor{call.buffers.dsink, Dtype::float32, 1, 1};
    for (const std::int64_t head : some_sinks(call, seed))
      compare_one("dsink[" + std::to_string(head) + "]", tensor, head, sink_gradient(call, head));
  }
}

}  // namespace

void check(const Call& call, Pass pass, std::string_view kernel, std::uint64_t seed) {
  if (pass == Pass::tangent || pass == Pass::second) return;
  const Context context{call, pass, kernel};
  if (pass == Pass::forward || pass == Pass::standard_forward) {
    check_queries(context, seed);
  } else {
    check_gradients(context, seed);
    check_sums(context, seed);
  }
}

}  // namespace flash_attention::check
