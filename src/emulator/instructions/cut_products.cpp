#include "emulator/instructions/cut_products.h"

#include <bit>
#include <cstdint>

#include "support/clones.h"

namespace flash_attention::emulator {

FLASH_ATTENTION_CLONES void add_cut_products(float* D, const float* A, const float* B, int rows, int n) {
  constexpr int k_extent = 32;
  float largest[256], unit[256], inverse[256], sum[256];
  for (int i = 0; i < rows; ++i) {
    float* row = D + i * n;
    bool finite = true;
    for (int j = 0; j < n; ++j) largest[j] = __builtin_fabsf(row[j]), finite = finite && largest[j] < __builtin_inff();
    for (int k = 0; k < k_extent; ++k) {
      const float a = A[i * k_extent + k];
      const float* b = B + k * n;
      for (int j = 0; j < n; ++j) {
        const float size = __builtin_fabsf(a * b[j]);
        largest[j] = size > largest[j] ? size : largest[j];
        finite = finite && size < __builtin_inff();
      }
    }
    for (int j = 0; j < n; ++j) {
      std::uint32_t bits = std::bit_cast<std::uint32_t>(largest[j]) & 0x7f800000u;  // a power of two
      bits = bits < (20u << 23) ? 20u << 23 : bits;
      unit[j] = finite ? std::bit_cast<float>(bits) * 0x1p-13f : 1;
      inverse[j] = 1 / unit[j];
      sum[j] = finite ? __builtin_truncf(row[j] * inverse[j]) : row[j];
    }
    for (int k = 0; k < k_extent; ++k) {
      const float a = A[i * k_extent + k];
      const float* b = B + k * n;
      for (int j = 0; j < n; ++j) sum[j] += finite ? __builtin_truncf(a * b[j] * inverse[j]) : a * b[j];
    }
    for (int j = 0; j < n; ++j) row[j] = sum[j] * unit[j];
  }
}

}  // namespace flash_attention::emulator
