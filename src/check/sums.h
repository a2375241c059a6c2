#pragma once

#include <cstdint>
#include <vector>

#include "check/reference.h"

namespace flash_attention::check {

/// An element of dbias: a sum over the axes that the bias broadcasts.
struct BiasPlace {
  std::int64_t b, head, i;  // 0 on axes that are broadcast
  std::int64_t j;
  std::int64_t index;  // in dbias, which is dense
};

/// The elements to check: the first, the last, and others that `seed` chooses; none if a single sum is too much work.
std::vector<BiasPlace> some_biases(const Call& call, std::uint64_t seed);

/// One element of dbias, from the call's out, lse and dout.
Row bias_gradient(const Call& call, const BiasPlace& place);

/// The heads whose dsink is checked, chosen in the same way.
std::vector<std::int64_t> some_sinks(const Call& call, std::uint64_t seed);

Row sink_gradient(const Call& call, std::int64_t head);

}  // namespace flash_attention::check
