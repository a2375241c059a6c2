#pragma once

#include <cstdint>
#include <vector>

#include "check/call.h"

namespace flash_attention::check {

/// A row of queries, or of keys (then `head` is a key head).
struct Place {
  std::int64_t b, head, row;
  friend bool operator==(const Place&, const Place&) = default;
};

/// The cost of reading the places of one sequence and head, in multiplications.
constexpr double work_of_pair = 0x1p15;

/// Up to `most` numbers below count: the first, the last and others. If each is much work, there are fewer, or none.
std::vector<std::int64_t> some_of(std::int64_t count, std::uint64_t seed, double work_of_one, std::int64_t most);

std::vector<Place> some_queries(const Call& call, std::uint64_t seed);
std::vector<Place> some_keys(const Call& call, std::uint64_t seed);

}  // namespace flash_attention::check
