#include "check/sample.h"

#include <algorithm>

namespace flash_attention::check {
namespace {

constexpr double max_work = 0x1p29;  // multiplications, a second or two

/// splitmix64.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

std::int64_t draw(std::uint64_t seed, std::uint64_t which, std::int64_t count) {
  return static_cast<std::int64_t>(mix(mix(seed) + which) % static_cast<std::uint64_t>(count));
}

/// Rows of the first and the last head and of two others: of each head the first and the last row and two others.
template <class RowsOf>
std::vector<Place> spread(std::int64_t batch, std::int64_t heads, std::uint64_t seed, double work_of_row, std::int64_t most,
                          RowsOf rows_of) {
  std::vector<Place> places;
  const std::int64_t pairs = batch * heads;
  if (pairs == 0) return places;
  const auto affordable = static_cast<std::int64_t>(max_work / std::max(work_of_row, 1.0));
  const std::int64_t wanted = std::clamp<std::int64_t>(affordable, 2, most);
  const std::int64_t chosen[] = {0, pairs - 1, draw(seed, 0, pairs), draw(seed, 1, pairs)};
  for (std::uint64_t n = 0; n < 16; ++n) {
    const std::int64_t pair = chosen[n % 4], b = pair / heads, rows = rows_of(b);
    if (rows == 0) continue;
    const std::uint64_t kind = n / 4 % 4;
    const bool first = (kind + n) % 4 == 0, last = (kind + n) % 4 == 1;
    const Place place{b, pair % heads, first ? 0 : last ? rows - 1 : draw(seed, 2 + n, rows)};
    if (std::find(places.begin(), places.end(), place) == places.end()) places.push_back(place);
    if (static_cast<std::int64_t>(places.size()) == wanted) break;
  }
  return places;
}

}  // namespace

std::vector<std::int64_t> some_of(std::int64_t count, std::uint64_t seed, double work_of_one, std::int64_t most) {
  std::vector<std::int64_t> chosen;
  if (count == 0) return chosen;
  const auto affordable = static_cast<std::int64_t>(std::min(max_work / std::max(work_of_one, 1.0), 1e9));
  const std::int64_t wanted = std::min({affordable, most, count});
  for (std::uint64_t n = 0; static_cast<std::int64_t>(n) < wanted; ++n) {
    const std::int64_t number = n == 0 ? 0 : n == 1 ? count - 1 : draw(seed, 32 + n, count);
    if (std::find(chosen.begin(), chosen.end(), number) == chosen.end()) chosen.push_back(number);
  }
  return chosen;
}

std::vector<Place> some_queries(const Call& call, std::uint64_t seed) {
  const Problem& p = call.problem;
  const double work = static_cast<double>(p.seq_kv) * static_cast<double>(2 * p.head_dim + 2 * p.head_dim_v);
  return spread(p.batch, p.heads_q, seed, work, 16, [&](std::int64_t b) { return call.sequence(b).rows_q; });
}

std::vector<Place> some_keys(const Call& call, std::uint64_t seed) {
  const Problem& p = call.problem;
  const double work = static_cast<double>(p.seq_q) * static_cast<double>(p.heads_q / p.heads_kv) *
                      static_cast<double>(2 * p.head_dim + 4 * p.head_dim_v);
  return spread(p.batch, p.heads_kv, seed, work, 6, [&](std::int64_t b) { return call.sequence(b).rows_kv; });
}

}  // namespace flash_attention::check
