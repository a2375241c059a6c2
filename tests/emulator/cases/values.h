#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace flash_attention::testing {

/// Small integers, different at each place: exact in every type, and so are sums of a few hundred products.
inline int small(int i) { return (i * 7 + i / 5 * 3 + i / 64) % 11 - 5; }

// 16-bit types by definition: the nearest value with that many mantissa bits, ties to even, by way of long arithmetic.
inline std::uint16_t bf16_bits(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return 0x7fff;
  const std::uint32_t low = bits & 0xffff, kept = bits >> 16;
  return static_cast<std::uint16_t>(kept + (low > 0x8000 || (low == 0x8000 && kept % 2 == 1) ? 1 : 0));
}

inline float bf16_value(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

inline double fp16_value(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double sign = bits >> 15 != 0 ? -1 : 1;
  if (exponent == 31) return mantissa != 0 ? std::nan("") : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

inline std::uint16_t fp16_bits(float value) {
  if (std::isnan(value)) return 0x7fff;
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude >= 65520) return sign | 0x7c00;
  const int exponent = std::max(magnitude > 0 ? std::ilogb(magnitude) : -14, -14);
  const double steps = std::nearbyint(std::ldexp(magnitude, 10 - exponent));  // 1024 to 2048, or less for subnormals
  return static_cast<std::uint16_t>(sign | static_cast<int>(steps + 1024.0 * (exponent + 14)));
}

inline std::vector<std::uint16_t> small_bits(bool fp16, int count, int salt = 0) {
  std::vector<std::uint16_t> bits(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    const auto value = static_cast<float>(small(i + salt));
    bits[static_cast<std::size_t>(i)] = fp16 ? fp16_bits(value) : bf16_bits(value);
  }
  return bits;
}

/// D[m][n] = sum over k of A[m][k] B[k][n] + C[m][n], in doubles. Tests are compiled without optimisation: the operands are
/// laid out once, k contiguous, and not asked for at every step.
inline std::vector<float> product(int m, int n, int k, auto a, auto b, auto c) {
  std::vector<double> A, B;
  for (int i = 0; i < m; ++i)
    for (int x = 0; x < k; ++x) A.push_back(a(i, x));
  for (int j = 0; j < n; ++j)
    for (int x = 0; x < k; ++x) B.push_back(b(x, j));
  std::vector<float> result;
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      const double *row = A.data() + static_cast<std::ptrdiff_t>(i) * k, *end = row + k;
      const double* column = B.data() + static_cast<std::ptrdiff_t>(j) * k;
      double sum = c(i, j);
      while (row != end) sum += *row++ * *column++;
      result.push_back(static_cast<float>(sum));
    }
  }
  return result;
}

}  // namespace flash_attention::testing
