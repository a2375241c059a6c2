#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "support/oracle/attempt.h"

namespace flash_attention::fuzz {

/// Mistakes that a kernel could make, as the oracle would make them: a problem that cannot tell the result from the right
/// one would not find such a kernel.
enum class Mistake { none, half_scale, edge, last_tile, head, dropout, lse, dq };
constexpr const char* mistake_names[] = {"none", "half_scale", "edge", "last_tile", "head", "dropout", "lse", "dq"};

/// Sequences that end earlier.
template <class Keys>
testing::Case with_fewer_keys(testing::Case c, Keys keys_of) {
  const testing::Shape shape(c);
  c.problem.key_lengths = true;
  c.key_lengths.clear();
  for (const testing::Shape::Sequence& s : shape.sequences)
    c.key_lengths.push_back(static_cast<std::int32_t>(std::max<std::int64_t>(keys_of(s.visible_kv), 0)));
  return c;
}

/// An edge of the window is one key too far; without a window, the last key is missed.
inline testing::Case with_edge_moved(testing::Case c) {
  Problem& p = c.problem;
  if (p.causal)
    p.causal = false, p.window_right = 1;
  else if (p.window_right >= 0)
    ++p.window_right;
  else if (p.window_left >= 0)
    ++p.window_left;
  else
    return with_fewer_keys(c, [](std::int64_t keys) { return keys - 1; });
  return c;
}

inline testing::Case with_mistake(testing::Case c, Mistake mistake) {
  Problem& p = c.problem;
  if (mistake == Mistake::half_scale) p.scale = 0.5f * p.scale.value_or(1 / std::sqrt(static_cast<float>(p.head_dim)));
  if (mistake == Mistake::edge) return with_edge_moved(c);
  if (mistake == Mistake::last_tile) return with_fewer_keys(c, [](std::int64_t keys) { return (keys - 1) / 64 * 64; });
  if (mistake == Mistake::dropout) ++c.dropout_offset;
  return c;
}

/// The last query head takes the keys of the first head.
inline testing::Inputs with_wrong_head(const testing::Case& c, testing::Inputs in) {
  const Problem& p = c.problem;
  const auto copy = [&](std::vector<double>& values, std::int64_t dim) {
    const std::int64_t row = p.heads_kv * dim;
    for (std::size_t x = 0; x + row <= values.size(); x += row) std::copy_n(&values[x], dim, &values[x + row - dim]);
  };
  copy(in.k, p.head_dim);
  return in;
}

/// Whether the problem tells the mistake from the right result.
inline bool finds(const testing::Case& c, Pass pass, Mistake mistake, const testing::Expected& expected) {
  const bool backward = testing::is_backward(pass);
  testing::Results results = expected.plain;
  if (mistake == Mistake::lse) {
    for (double& x : results.lse) x += 0.01;
  } else if (mistake == Mistake::dq) {
    for (double& x : results.dq) x *= 1.1;
  } else {
    const testing::Inputs& in = expected.inputs;
    results = testing::oracle(with_mistake(c, mistake), mistake == Mistake::head ? with_wrong_head(c, in) : in, backward,
                              c.problem.dtype);
  }
  return !testing::differences(c, pass, {results, ""}, expected, testing::random_slack).empty();
}

}  // namespace flash_attention::fuzz
