#pragma once

// Transposing a square of vectors, and summing across lanes, by butterflies: the stage with distance d exchanges between
// vectors v and v + d the lanes whose index has bit d set and not set.

namespace flash_attention::cpu {
namespace {

template <int... lane>
struct LaneList {};
template <int count, int... lane>
struct MakeLanes : MakeLanes<count - 1, count - 1, lane...> {};
template <int... lane>
struct MakeLanes<0, lane...> {
  using type = LaneList<lane...>;
};
using Lanes = MakeLanes<vector_lanes>::type;

/// Lanes without bit d from x, and those of y moved up by d.
template <int d, int... lane>
FLASH_ATTENTION_INLINE Vec lower_halves(Vec x, Vec y, LaneList<lane...>) {
  return __builtin_shufflevector(x, y, ((lane & d) == 0 ? lane : vector_lanes + lane - d)...);
}

/// Lanes with bit d of x moved down by d, and those of y.
template <int d, int... lane>
FLASH_ATTENTION_INLINE Vec upper_halves(Vec x, Vec y, LaneList<lane...>) {
  return __builtin_shufflevector(x, y, ((lane & d) == 0 ? lane + d : vector_lanes + lane)...);
}

template <int d = 1>
FLASH_ATTENTION_INLINE void transpose(Vec (&square)[vector_lanes]) {
  FLASH_ATTENTION_UNROLL
  for (int v = 0; v < vector_lanes; ++v) {
    if ((v & d) != 0) continue;
    const Vec x = square[v], y = square[v + d];
    square[v] = lower_halves<d>(x, y, Lanes{});
    square[v + d] = upper_halves<d>(x, y, Lanes{});
  }
  if constexpr (2 * d < vector_lanes) transpose<2 * d>(square);
}

/// Lanes without bit d of x, and those with it of y.
template <int d, int... lane>
FLASH_ATTENTION_INLINE Vec straight(Vec x, Vec y, LaneList<lane...>) {
  return __builtin_shufflevector(x, y, ((lane & d) == 0 ? lane : vector_lanes + lane)...);
}

/// What straight leaves out, each beside its partner: lanes with bit d of x moved down, and those without it of y moved up.
template <int d, int... lane>
FLASH_ATTENTION_INLINE Vec crossed(Vec x, Vec y, LaneList<lane...>) {
  return __builtin_shufflevector(x, y, ((lane & d) == 0 ? lane + d : vector_lanes + lane - d)...);
}

/// Lane v of the result is the sum of the lanes of square[v]. Overwrites the square. (A straight selection costs less than
/// a shuffle, so this is not a transpose with a sum.)
template <int d = 1>
FLASH_ATTENTION_INLINE Vec sum_each(Vec (&square)[vector_lanes]) {
  FLASH_ATTENTION_UNROLL
  for (int v = 0; v < vector_lanes; v += 2 * d) {
    square[v] = straight<d>(square[v], square[v + d], Lanes{}) + crossed<d>(square[v], square[v + d], Lanes{});
  }
  if constexpr (2 * d < vector_lanes) {
    return sum_each<2 * d>(square);
  } else {
    return square[0];
  }
}

/// The largest lane, and the sum of all lanes.
template <int d = vector_lanes / 2>
FLASH_ATTENTION_INLINE float largest_lane(Vec x) {
  x = max(x, upper_halves<d>(x, x, Lanes{}));
  if constexpr (d > 1) {
    return largest_lane<d / 2>(x);
  } else {
    return x[0];
  }
}

template <int d = vector_lanes / 2>
FLASH_ATTENTION_INLINE float sum_lanes(Vec x) {
  x = x + upper_halves<d>(x, x, Lanes{});
  if constexpr (d > 1) {
    return sum_lanes<d / 2>(x);
  } else {
    return x[0];
  }
}

}  // namespace
}  // namespace flash_attention::cpu
