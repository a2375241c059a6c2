#include "emulator/instructions/wgmma_product.h"

#include <cstring>

#include "emulator/instructions/convert.h"
#include "emulator/instructions/cut_products.h"
#include "emulator/machine/address.h"
#include "support/clones.h"

namespace flash_attention::emulator {
namespace {

constexpr int max_k = 32;

int element_bytes(MatrixType type) { return is_8_bit(type) ? 1 : 2; }
int k_extent(MatrixType type) { return 32 / element_bytes(type); }

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

  /// Address of the element (mn, k). An atom is 8 rows of the swizzle's span; without swizzle, 8 rows of 16 bytes. Elements
  /// of 8 bits have k contiguous and a swizzle.
  std::size_t address(std::size_t mn, std::size_t k, bool mn_major, int bytes) const {
    if (swizzle_bytes == 0) {
      const std::size_t inner = mn_major ? mn % 8 : k % 8, row = mn_major ? k % 8 : mn % 8;
      return start + mn / 8 * stride + k / 8 * leading + row * 16 + inner * 2;
    }
    const auto span = static_cast<std::size_t>(swizzle_bytes);
    if (!mn_major)
      return swizzle(start + mn / 8 * stride + mn % 8 * span + k * static_cast<std::size_t>(bytes), swizzle_bytes);
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
  const int bytes = element_bytes(type);
  if (bytes == 1 && (mn_major || descriptor.swizzle_bytes == 0))
    return "8-bit operands have k contiguous, and a swizzle here";
  for (int mn = 0; mn < extent; ++mn) {
    for (int k = 0; k < k_extent(type); ++k) {
      const std::size_t address =
          descriptor.address(static_cast<std::size_t>(mn), static_cast<std::size_t>(k), mn_major, bytes) - shared_window;
      if (address + static_cast<std::size_t>(bytes) > shared_bytes) {
        return "the descriptor reaches shared offset " + std::to_string(static_cast<std::int64_t>(address)) +
               ", outside the block's " + std::to_string(shared_bytes) + " bytes";
      }
      float& element = result[mn * mn_stride + k * k_stride];
      if (bytes == 1) {
        element = float_of_code(type, shared[address]);
        continue;
      }
      std::uint16_t bits;
      std::memcpy(&bits, shared + address, 2);
      element = float_of(type, bits);
    }
  }
  return {};
}

/// Tiles of 8 rows and 8 columns (n is a multiple of 8), whose sums stay in registers. The 16 products of an
/// instruction are added together, like those of mma.sync: on sm_90 both have the same bits.
FLASH_ATTENTION_CLONES void accumulate_rows(float* D, int stride, const float* A, const float* B, int all_rows, int n) {
  constexpr int rows = 8;
  using Columns = double __attribute__((vector_size(64)));
  for (int first_row = 0; first_row < all_rows; first_row += rows) {
    for (int column = 0; column < n; column += 8) {
      Columns sum[rows] = {}, b = {};
      for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < 8; ++j) sum[i][j] = D[(first_row + i) * stride + column + j];
      }
      for (int k = 0; k < 16; ++k) {
        for (int j = 0; j < 8; ++j) b[j] = B[k * n + column + j];
        for (int i = 0; i < rows; ++i) sum[i] += static_cast<double>(A[(first_row + i) * 16 + k]) * b;
      }
      for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < 8; ++j) D[(first_row + i) * stride + column + j] = static_cast<float>(sum[i][j]);
      }
    }
  }
}

/// A chunk of 16 bytes holds 8 neighbours along k, or along mn if that is the major axis.
void visit_chunks(const Descriptor& descriptor, MatrixType type, int extent, bool mn_major,
                  const std::function<void(std::size_t)>& visit) {
  const int bytes = element_bytes(type), mn_step = mn_major ? 8 : 1, k_step = mn_major ? 1 : 16 / bytes;
  for (int mn = 0; mn < extent; mn += mn_step) {
    for (int k = 0; k < k_extent(type); k += k_step) {
      visit(descriptor.address(static_cast<std::size_t>(mn), static_cast<std::size_t>(k), mn_major, bytes) - shared_window);
    }
  }
}

/// Reads A from the threads' registers. 8-bit elements are e4m3.
void read_registers(const Wgmma& op, float* A, int depth) {
  for (int t = 0; t < 128; ++t) {
    for (int r = 0; r < 4; ++r) {
      const unsigned held = op.a_registers[static_cast<std::size_t>(t * 4 + r)];
      float* row = A + (16 * (t / 32) + t % 32 / 4 + 8 * (r % 2)) * depth;
      if (is_8_bit(op.shape.type)) {
        for (int byte = 0; byte < 4; ++byte) {
          row[4 * (t % 4) + 16 * (r / 2) + byte] =
              float_of_code(MatrixType::e4m3, static_cast<std::uint8_t>(held >> 8 * byte));
        }
        continue;
      }
      float* at = row + 2 * (t % 4) + 8 * (r / 2);
      at[0] = float_of(op.shape.type, static_cast<std::uint16_t>(held));
      at[1] = float_of(op.shape.type, static_cast<std::uint16_t>(held >> 16));
    }
  }
}

}  // namespace

void accumulate(float* D, int stride, const float* A, const float* B, int rows, int n) {
  accumulate_rows(D, stride, A, B, rows, n);
}

void for_each_operand_chunk(const Wgmma& op, const std::function<void(std::size_t)>& visit) {
  const WgmmaOperand& shape = op.shape;
  if (op.a_registers.empty()) visit_chunks(Descriptor(shape.a_descriptor), shape.type, 64, shape.a_mn_major, visit);
  visit_chunks(Descriptor(shape.b_descriptor), shape.type, shape.n, shape.b_mn_major, visit);
}

std::string multiply(const Wgmma& op, const unsigned char* shared, std::size_t shared_bytes) {
  const WgmmaOperand& shape = op.shape;
  const int depth = k_extent(shape.type);
  float A[64 * max_k], B[max_k * 256];
  if (op.a_registers.empty()) {
    std::string wrong =
        gather(Descriptor(shape.a_descriptor), shape.type, 64, shape.a_mn_major, shared, shared_bytes, A, depth, 1);
    if (!wrong.empty()) return "A: " + wrong;
  } else {
    read_registers(op, A, depth);
  }
  std::string wrong =
      gather(Descriptor(shape.b_descriptor), shape.type, shape.n, shape.b_mn_major, shared, shared_bytes, B, 1, shape.n);
  if (!wrong.empty()) return "B: " + wrong;
  std::vector<float>& D = op.accumulator->values;
  if (!shape.accumulate) D.assign(D.size(), 0.0f);
  if (is_8_bit(shape.type)) {
    add_cut_products(D.data(), A, B, 64, shape.n);
  } else {
    accumulate_rows(D.data(), shape.n, A, B, 64, shape.n);
  }
  return {};
}

}  // namespace flash_attention::emulator
