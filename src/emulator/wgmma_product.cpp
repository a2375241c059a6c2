#include "emulator/wgmma_product.h"

#include <cstring>

#include "emulator/address.h"
#include "emulator/convert.h"

// Not under the thread sanitizer: the resolver of the clones runs before its runtime is there.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define FLASH_ATTENTION_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define FLASH_ATTENTION_CLONES
#endif

namespace flash_attention::emulator {
namespace {

constexpr int k_extent = 16;

/// A shared-memory matrix descriptor (PTX ISA 9.7.15.5.1.2.2).
struct Descriptor {
  std::size_t start, leading, stride;
  int swizzle_bytes;

  explicit Descriptor(unsigned long long bits)
      : start((bits & 0x3fff) << 4),
        leading((bits >> 16 & 0x3fff) << 4),
        stride((bits >> 32 & 0x3fff) << 4),
        swizzle_bytes(bits >> 62 == 0   ? 0
                      : bits >> 62 == 1 ? 128
                      : bits >> 62 == 2 ? 64
                                        : 32) {}

  /// Address of the 16-bit element (mn, k). An atom is 8 rows of the swizzle's span; without swizzle, 8 rows of 16 bytes.
  std::size_t address(std::size_t mn, std::size_t k, bool mn_major) const {
    if (swizzle_bytes == 0) {
      const std::size_t inner = mn_major ? mn % 8 : k % 8, row = mn_major ? k % 8 : mn % 8;
      return start + mn / 8 * stride + k / 8 * leading + row * 16 + inner * 2;
    }
    const auto span = static_cast<std::size_t>(swizzle_bytes);
    if (!mn_major) return swizzle(start + mn / 8 * stride + mn % 8 * span + k * 2, swizzle_bytes);
    const std::size_t per_row = span / 2;
    return swizzle(start + mn / per_row * leading + k / 8 * stride + k % 8 * span + mn % per_row * 2, swizzle_bytes);
  }
};

/// The operand as a [k][extent] or [extent][k] matrix of floats, by strides of the result.
std::string gather(const Descriptor& descriptor, MatrixType type, int extent, bool mn_major, const unsigned char* shared,
                   std::size_t shared_bytes, float* result, int mn_stride, int k_stride) {
  const std::size_t pattern = descriptor.swizzle_bytes == 0 ? 16 : static_cast<std::size_t>(descriptor.swizzle_bytes) * 8;
  if (mn_major && descriptor.swizzle_bytes != 0 && descriptor.start % pattern != 0) {
    return "the descriptor's start, shared offset " + std::to_string(descriptor.start - shared_window) +
           ", is not a multiple of its swizzle pattern of " + std::to_string(pattern) + " bytes";
  }
  for (int mn = 0; mn < extent; ++mn) {
    for (int k = 0; k < k_extent; ++k) {
      const std::size_t address =
          descriptor.address(static_cast<std::size_t>(mn), static_cast<std::size_t>(k), mn_major) - shared_window;
      if (address + 2 > shared_bytes) {
        return "the descriptor reaches shared offset " + std::to_string(static_cast<std::int64_t>(address)) +
               ", outside the block's " + std::to_string(shared_bytes) + " bytes";
      }
      std::uint16_t bits;
      std::memcpy(&bits, shared + address, 2);
      result[mn * mn_stride + k * k_stride] = float_of(type, bits);
    }
  }
  return {};
}

FLASH_ATTENTION_CLONES void accumulate(float* D, const float* A, const float* B, int n) {
  for (int i = 0; i < 64; ++i) {
    float* row = D + i * n;
    for (int k = 0; k < k_extent; ++k) {
      const float a = A[i * k_extent + k];
      const float* b = B + k * n;
      for (int j = 0; j < n; ++j) row[j] += a * b[j];
    }
  }
}

/// A chunk of 16 bytes holds 8 neighbours along k, or along mn where that is the major one.
void visit_chunks(const Descriptor& descriptor, int extent, bool mn_major, const std::function<void(std::size_t)>& visit) {
  const int mn_step = mn_major ? 8 : 1, k_step = mn_major ? 1 : 8;
  for (int mn = 0; mn < extent; mn += mn_step) {
    for (int k = 0; k < k_extent; k += k_step) {
      visit(descriptor.address(static_cast<std::size_t>(mn), static_cast<std::size_t>(k), mn_major) - shared_window);
    }
  }
}

}  // namespace

void for_each_operand_chunk(const Wgmma& op, const std::function<void(std::size_t)>& visit) {
  const WgmmaOperand& shape = op.shape;
  if (op.a_registers.empty()) visit_chunks(Descriptor(shape.a_descriptor), 64, shape.a_mn_major, visit);
  visit_chunks(Descriptor(shape.b_descriptor), shape.n, shape.b_mn_major, visit);
}

std::string multiply(const Wgmma& op, const unsigned char* shared, std::size_t shared_bytes) {
  const WgmmaOperand& shape = op.shape;
  float A[64 * k_extent], B[k_extent * 256];
  if (op.a_registers.empty()) {
    std::string wrong =
        gather(Descriptor(shape.a_descriptor), shape.type, 64, shape.a_mn_major, shared, shared_bytes, A, k_extent, 1);
    if (!wrong.empty()) return "A: " + wrong;
  } else {
    for (int t = 0; t < 128; ++t) {
      for (int r = 0; r < 4; ++r) {
        const unsigned pair = op.a_registers[static_cast<std::size_t>(t * 4 + r)];
        float* at = A + (16 * (t / 32) + t % 32 / 4 + 8 * (r % 2)) * k_extent + 2 * (t % 4) + 8 * (r / 2);
        at[0] = float_of(shape.type, static_cast<std::uint16_t>(pair));
        at[1] = float_of(shape.type, static_cast<std::uint16_t>(pair >> 16));
      }
    }
  }
  std::string wrong =
      gather(Descriptor(shape.b_descriptor), shape.type, shape.n, shape.b_mn_major, shared, shared_bytes, B, 1, shape.n);
  if (!wrong.empty()) return "B: " + wrong;
  std::vector<float>& D = op.accumulator->values;
  if (!shape.accumulate) D.assign(D.size(), 0.0f);
  accumulate(D.data(), A, B, shape.n);
  return {};
}

}  // namespace flash_attention::emulator
