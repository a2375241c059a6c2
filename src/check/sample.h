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

std::vector<Place> some_queries(const Call& call, std::uint64_t turn);
std::vector<Place> some_keys(const Call& call, std::uint64_t turn);

}  // namespace flash_attention::check
