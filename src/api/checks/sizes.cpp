#include "api/checks/sizes.h"

#include <cmath>
#include <limits>
#include <string>

#include "api/checks/refuse.h"

namespace flash_attention::api {

constexpr std::int64_t max_size = std::numeric_limits<std::int32_t>::max();

void check_size(const char* argument, std::int64_t got, std::int64_t smallest) {
  if (got >= smallest && got <= max_size) return;
  refuse(argument, std::to_string(got), "allowed are " + std::to_string(smallest) + " to " + std::to_string(max_size));
}

void check_reach(const char* argument, std::int64_t stride, std::int64_t size) {
  const bool good = std::abs(static_cast<double>(stride)) * static_cast<double>(size) <= 0x1p58;
  require(good, argument, stride, "offsets must stay below 2^58 elements");
}

Strides resolve(const char* argument, const Strides& given, const RowAxes& rows, std::int64_t heads, std::int64_t dim) {
  Strides s = given;
  const std::int64_t seq = rows.seq;
  if (s.head == Strides::dense) s.head = dim;
  if (s.seq == Strides::dense) s.seq = heads * dim;
  check_reach(argument, s.head, heads);
  check_reach(argument, s.seq, seq);
  if (rows.packed) {
    s.batch = 0;
  } else if (s.batch == Strides::dense) {
    check_reach(argument, heads * dim, seq);
    s.batch = seq * heads * dim;
  }
  check_reach(argument, s.batch, rows.batch);
  return s;
}

}  // namespace flash_attention::api
