#pragma once

#include "abi/args.h"
#include "abi/interval.h"
#include "ptx/convert.cuh"
#include "ptx/warp.cuh"
#include "tile/math.cuh"

// The building blocks of a program's source, which src/program/source.cpp writes before the kernel: operations, and
// ranges of the elements of tensors. docs/numerics.md defines the operations.

namespace flash_attention::tile {

/// The program of the compilation unit. The source specialises Program<true>; in a kernel without a program it does
/// nothing. Row and Key hold whatever depends only on the row or only on the key, so that a kernel computes it once for
/// many pairs.
template <bool present>
struct Program {
  static constexpr float largest = 0;  // a bound of the score, unless it is NaN
  struct Row {};
  struct Key {};
  struct SeenKeys {};  // ranges of tensors' elements in a tile of keys
  __device__ __forceinline__ Program(const abi::AttentionArgs&, int, int) {}
  __device__ __forceinline__ Row row(int, int = 0) const { return {}; }
  __device__ __forceinline__ Key key(int, int = 0) const { return {}; }
};

namespace program {

// Ints wrap around.
__device__ __forceinline__ int add(int x, int y) { return static_cast<int>(static_cast<unsigned>(x) + y); }
__device__ __forceinline__ int sub(int x, int y) { return static_cast<int>(static_cast<unsigned>(x) - y); }
__device__ __forceinline__ int mul(int x, int y) { return static_cast<int>(static_cast<unsigned>(x) * y); }
__device__ __forceinline__ int neg(int x) { return sub(0, x); }
__device__ __forceinline__ int abs(int x) { return x < 0 ? neg(x) : x; }
__device__ __forceinline__ int min(int x, int y) { return x < y ? x : y; }
__device__ __forceinline__ int max(int x, int y) { return x > y ? x : y; }
__device__ __forceinline__ int floordiv(int x, int y) {
  if (y == 0) return 0;
  if (y == -1) return neg(x);
  const int quotient = x / y;
  return quotient - (quotient * y != x && (x < 0) != (y < 0) ? 1 : 0);
}
__device__ __forceinline__ int mod(int x, int y) {
  if (y == 0 || y == -1) return 0;
  const int rest = x % y;
  return rest + (rest != 0 && (rest < 0) != (y < 0) ? y : 0);
}

__device__ __forceinline__ float add(float x, float y) { return x + y; }
__device__ __forceinline__ float sub(float x, float y) { return x - y; }
__device__ __forceinline__ float mul(float x, float y) { return x * y; }
/// The nearest float. A divisor outside of 2^-126 .. 2^126 counts as 0 or infinity. The compiler's own division
/// branches to a slow path for each score, and takes three times as long to compile.
__device__ __forceinline__ float div(float x, float y) {
  const float guess = ptx::reciprocal(y);
  const float refined = ptx::fma(guess, ptx::fma(-y, guess, 1.0f), guess);
  const float inverse = refined == refined ? refined : guess;  // for 0 and infinity
  const float quotient = x * inverse;
  const float better = ptx::fma(ptx::fma(-y, quotient, x), inverse, quotient);
  return better == better ? better : quotient;
}
/// The remainder of x, exactly: subtracts multiples of y by falling powers of 2.
__device__ __forceinline__ float fmod(float x, float y) {
  const float size = ptx::abs(y);
  float rest = ptx::abs(x), step = size;
  if (!(rest < infinity) || !(size > 0)) return __builtin_bit_cast(float, 0x7fffffff);
#pragma unroll 1
  while (step <= 0.5f * rest) step += step;
#pragma unroll 1
  for (; step >= size && rest >= size; step *= 0.5f) rest = rest >= step ? rest - step : rest;
  return __builtin_bit_cast(float, __builtin_bit_cast(int, rest) | (__builtin_bit_cast(int, x) & 0x80000000));
}
__device__ __forceinline__ float neg(float x) { return -x; }
__device__ __forceinline__ float abs(float x) { return ptx::abs(x); }
__device__ __forceinline__ float min(float x, float y) { return x < y || x != x ? x : y; }
__device__ __forceinline__ float max(float x, float y) { return x > y || x != x ? x : y; }
__device__ __forceinline__ float exp(float x) { return tile::exp(x); }
__device__ __forceinline__ float log(float x) { return tile::log(x); }
/// Near 0, where 1 - 2 / (1 + e^2x) would lose its bits, two terms of the series: few instructions, few registers.
__device__ __forceinline__ float tanh(float x) {
  const float square = x * x;
  const float near_zero = ptx::fma(x * square, ptx::fma(square, 2.0f / 15, -1.0f / 3), x);
  const float elsewhere = ptx::fma(-2.0f, ptx::reciprocal(1.0f + ptx::exp2(x * (2.0f * log2_e))), 1.0f);
  return square < 0.01f ? near_zero : elsewhere;
}
__device__ __forceinline__ float sigmoid(float x) { return ptx::reciprocal(1.0f + tile::exp(-x)); }
__device__ __forceinline__ float sqrt(float x) { return ptx::sqrt(x); }
__device__ __forceinline__ float sin(float x) { return ptx::sin(x); }
__device__ __forceinline__ float cos(float x) { return ptx::cos(x); }
__device__ __forceinline__ float floor(float x) { return ptx::floor(x); }
__device__ __forceinline__ float detach(float x) { return x; }

template <typename T>
__device__ __forceinline__ bool eq(T x, T y) {
  return x == y;
}
template <typename T>
__device__ __forceinline__ bool ne(T x, T y) {
  return x != y;
}
template <typename T>
__device__ __forceinline__ bool lt(T x, T y) {
  return x < y;
}
template <typename T>
__device__ __forceinline__ bool le(T x, T y) {
  return x <= y;
}
template <typename T>
__device__ __forceinline__ bool gt(T x, T y) {
  return x > y;
}
template <typename T>
__device__ __forceinline__ bool ge(T x, T y) {
  return x >= y;
}

__device__ __forceinline__ bool logical_and(bool x, bool y) { return x && y; }
__device__ __forceinline__ bool logical_or(bool x, bool y) { return x || y; }
__device__ __forceinline__ bool logical_xor(bool x, bool y) { return x != y; }
__device__ __forceinline__ bool logical_not(bool x) { return !x; }
__device__ __forceinline__ int logical_and(int x, int y) { return x & y; }
__device__ __forceinline__ int logical_or(int x, int y) { return x | y; }
__device__ __forceinline__ int logical_xor(int x, int y) { return x ^ y; }
__device__ __forceinline__ int logical_not(int x) { return ~x; }

template <typename T>
__device__ __forceinline__ T where(bool condition, T yes, T no) {
  return condition ? yes : no;
}

__device__ __forceinline__ float to_float(int x) { return static_cast<float>(x); }
__device__ __forceinline__ float to_float(bool x) { return x ? 1.0f : 0.0f; }
__device__ __forceinline__ int to_int(bool x) { return x ? 1 : 0; }
__device__ __forceinline__ int to_int(float x) {
  if (x >= 2147483648.0f) return 2147483647;
  if (x < -2147483648.0f) return -2147483647 - 1;
  return x == x ? static_cast<int>(x) : 0;
}

/// first + distance, below 2^24. It needs no conversion if the distance is a literal.
__device__ __forceinline__ float index_as_float(int first, int distance) {
  return static_cast<float>(first) + static_cast<float>(distance);
}

/// A negative index counts from the end. Every index is clamped to the tensor.
__device__ __forceinline__ int inside(int index, int size) {
  if (index < 0) index += size;
  return max(0, min(index, size - 1));
}

/// The place of an element in a tensor.
template <typename... Indices>
__device__ __forceinline__ int offset(const int* sizes, Indices... indices) {
  int place = 0, axis = 0;
  ((place = place * sizes[axis] + inside(indices, sizes[axis]), ++axis), ...);
  return place;
}

__device__ __forceinline__ float element_float32(const void* data, int place) {
  return static_cast<const float*>(data)[place];
}
__device__ __forceinline__ float element_float16(const void* data, int place) {
  return ptx::to_float(static_cast<const ptx::Element<abi::Type::float16>*>(data)[place]);
}
__device__ __forceinline__ float element_bfloat16(const void* data, int place) {
  return ptx::to_float(static_cast<const ptx::Element<abi::Type::bfloat16>*>(data)[place]);
}
__device__ __forceinline__ int element_int32(const void* data, int place) { return static_cast<const int*>(data)[place]; }
__device__ __forceinline__ int element_int64(const void* data, int place) {
  return static_cast<int>(static_cast<const long long*>(data)[place]);
}
__device__ __forceinline__ bool element_bool(const void* data, int place) {
  return static_cast<const unsigned char*>(data)[place] != 0;
}

// The range of a tensor's elements if its indices are in ranges. Only the last axis may be a range, of at most this
// many elements.
constexpr int max_elements = 1024;

struct Span {
  int place;
  int count;  // 0: unknown
};

template <typename... Ranges>
__device__ __forceinline__ Span span(const int* sizes, Ranges... ranges) {
  Span result{0, 1};
  int axis = 0;
  const auto add_axis = [&](abi::interval::Ints range) {
    const int size = sizes[axis++];
    const bool mixed = range.lo < 0 && range.hi >= 0;  // a negative index counts from the end
    const bool known = result.count == 1 && size > 0 && !mixed;
    const long long from = range.lo < 0 ? size : 0;
    const int lo = static_cast<int>(abi::interval::more(0ll, abi::interval::less(range.lo + from, size - 1ll)));
    const int hi = static_cast<int>(abi::interval::more(0ll, abi::interval::less(range.hi + from, size - 1ll)));
    result.place = result.place * size + lo;
    result.count = known ? hi - lo + 1 : 0;
  };
  (add_axis(ranges), ...);
  if (result.count > max_elements) result.count = 0;
  return result;
}

/// The smallest and the largest element of a span.
template <typename Get>
__device__ __forceinline__ abi::interval::Ints range_of_ints(const Span& span, Get get) {
  if (span.count == 0) return abi::interval::any_int();
  constexpr int at_once = 16;  // loads in flight
  int lo = 2147483647, hi = -lo - 1;
#pragma unroll 1
  for (int begin = 0; begin < span.count; begin += at_once) {
    int values[at_once];
#pragma unroll
    for (int n = 0; n < at_once; ++n) values[n] = get(span.place + min(begin + n, span.count - 1));
#pragma unroll
    for (const int value : values) lo = min(lo, value), hi = max(hi, value);
  }
  return {lo, hi};
}

/// The same, computed by eight lanes of a warp together for a span that they share. All lanes of the warp take part.
constexpr int range_lanes = 8;
template <typename Get>
__device__ __forceinline__ abi::interval::Ints range_of_ints_by_lanes(const Span& span, Get get) {
  constexpr int at_once = 8;  // loads in flight
  int lo = 2147483647, hi = -lo - 1;
#pragma unroll 1
  for (int begin = static_cast<int>(threadIdx.x) % range_lanes; begin < span.count; begin += range_lanes * at_once) {
    int values[at_once];
#pragma unroll
    for (int n = 0; n < at_once; ++n) values[n] = get(span.place + min(begin + range_lanes * n, span.count - 1));
#pragma unroll
    for (const int value : values) lo = min(lo, value), hi = max(hi, value);
  }
#pragma unroll
  for (int distance = range_lanes / 2; distance > 0; distance /= 2) {
    lo = min(lo, ptx::shuffle_xor(lo, distance));
    hi = max(hi, ptx::shuffle_xor(hi, distance));
  }
  return span.count == 0 ? abi::interval::any_int() : abi::interval::Ints{lo, hi};
}

constexpr abi::interval::Bools as_bools(const abi::interval::Ints& range) { return {range.hi > 0, range.lo <= 0}; }
template <typename Get>
__device__ __forceinline__ abi::interval::Bools range_of_bools(const Span& span, Get get) {
  return as_bools(range_of_ints(span, [&](int place) { return get(place) ? 1 : 0; }));
}
template <typename Get>
__device__ __forceinline__ abi::interval::Bools range_of_bools_by_lanes(const Span& span, Get get) {
  return as_bools(range_of_ints_by_lanes(span, [&](int place) { return get(place) ? 1 : 0; }));
}

/// Whether two values of rows have the same bits, so that everything computed from them is the same, too.
__device__ __forceinline__ bool same(int x, int y) { return x == y; }
__device__ __forceinline__ bool same(bool x, bool y) { return x == y; }
__device__ __forceinline__ bool same(float x, float y) { return __builtin_bit_cast(int, x) == __builtin_bit_cast(int, y); }

}  // namespace program
}  // namespace flash_attention::tile
