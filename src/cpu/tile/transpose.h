#pragma once

// Transposes a square of vectors, and sums across lanes, by butterflies. The stage with distance d exchanges lanes
// between vectors v and v + d: those whose index has bit d set, and those whose index has not.

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

/// Lanes without bit d of x, and those of y moved up by d.
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

/// Lanes without bit d of x, and those with bit d of y.
template <int d, int... lane>
FLASH_ATTENTION_INLINE Vec straight(Vec x, Vec y, LaneList<lane...>) {
  return __builtin_shufflevector(x, y, ((lane & d) == 0 ? lane : vector_lanes + lane)...);
}

/// The lanes that straight() leaves out, each next to its partner: lanes with bit d of x moved down, and those without
/// it of y moved up.
template <int d, int... lane>
FLASH_ATTENTION_INLINE Vec crossed(Vec x, Vec y, LaneList<lane...>) {
  return __builtin_shufflevector(x, y, ((lane & d) == 0 ? lane + d : vector_lanes + lane - d)...);
}

struct Sum {
  static FLASH_ATTENTION_INLINE Vec of(Vec x, Vec y) { return x + y; }
};
struct Largest {
  static FLASH_ATTENTION_INLINE Vec of(Vec x, Vec y) { return max(x, y); }
};

/// Lane v of the result is Sum or Largest of all lanes of rows[v]; the number of vectors is a power of two. With
/// `lanes` fewer than a vector has, it is computed for every run of that many lanes. Overwrites the vectors. (A
/// straight selection costs less than a shuffle, so this is not a transpose with a sum.)
template <class Over, int lanes = vector_lanes, int d = 1, int count>
FLASH_ATTENTION_INLINE Vec reduce_each(Vec (&rows)[count]) {
  if constexpr (d < count) {
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < count; v += 2 * d) {
      rows[v] = Over::of(straight<d>(rows[v], rows[v + d], Lanes{}), crossed<d>(rows[v], rows[v + d], Lanes{}));
    }
  } else {
    rows[0] = Over::of(rows[0], crossed<d>(rows[0], rows[0], Lanes{}));
  }
  if constexpr (2 * d < lanes) {
    return reduce_each<Over, lanes, 2 * d>(rows);
  } else {
    return rows[0];
  }
}

template <class Over>
FLASH_ATTENTION_INLINE float reduce(Vec x) {
  Vec one[1] = {x};
  return reduce_each<Over>(one)[0];
}
FLASH_ATTENTION_INLINE float largest_lane(Vec x) { return reduce<Largest>(x); }
FLASH_ATTENTION_INLINE float sum_lanes(Vec x) { return reduce<Sum>(x); }

}  // namespace
}  // namespace flash_attention::cpu
