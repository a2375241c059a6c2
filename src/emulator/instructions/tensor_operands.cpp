#include <bit>
#include <cstring>

#include "emulator/instructions/convert.h"
#include "emulator/instructions/tensor_product.h"
#include "emulator/instructions/wgmma_product.h"
#include "emulator/machine/address.h"

// The operands of tcgen05.mma: descriptors decoded by the tables of the PTX ISA, and not by what kernels/ptx/tcgen05.cuh
// writes into them.

namespace flash_attention::emulator {
namespace {

constexpr int product_rows = 128, product_depth = 16;  // of A

unsigned field(unsigned long long bits, int first, int count) {
  return static_cast<unsigned>(bits >> first & ((1ull << count) - 1));
}

/// A shared-memory matrix descriptor (9.7.16.4.1).
struct MatrixDescriptor {
  std::size_t start, leading, stride;
  unsigned version, base_offset, leading_mode, layout;

  explicit MatrixDescriptor(unsigned long long bits)
      : start(std::size_t{field(bits, 0, 14)} * 16),
        leading(std::size_t{field(bits, 16, 14)} * 16),
        stride(std::size_t{field(bits, 32, 14)} * 16),
        version(field(bits, 46, 2)),
        base_offset(field(bits, 49, 3)),
        leading_mode(field(bits, 52, 1)),
        layout(field(bits, 61, 3)) {}

  /// Bytes of a swizzled row; 0: no swizzle.
  std::size_t span() const { return layout == 2 ? 128 : layout == 4 ? 64 : layout == 6 ? 32 : 0; }

  std::string reject(bool mn_major) const {
    if (version != 1) return "the descriptor has version " + std::to_string(version) + ", not 1 (is it one of wgmma?)";
    if (base_offset != 0 || leading_mode != 0) return "the emulator knows no base offset and no other leading mode";
    if (layout != 0 && span() == 0)
      return "the descriptor has layout " + std::to_string(layout) + ", which it does not know";
    const std::size_t pattern = span() * 8;
    if (mn_major && pattern != 0 && start % pattern != 0) {
      return "the descriptor's start is not a multiple of its swizzle pattern of " + std::to_string(pattern) + " bytes";
    }
    return {};
  }

  /// Shared address of the 16-bit element (mn, k). 8 rows of a span are an atom, which is swizzled; without a swizzle 8
  /// rows of 16 bytes.
  std::size_t address(std::size_t mn, std::size_t k, bool mn_major) const {
    const std::size_t bytes = span();
    if (bytes == 0) {
      const std::size_t row = mn_major ? k % 8 : mn % 8, column = mn_major ? mn % 8 : k % 8;
      return start + mn / 8 * stride + k / 8 * leading + row * 16 + column * 2;
    }
    if (!mn_major) return swizzle(start + mn / 8 * stride + mn % 8 * bytes + k * 2, static_cast<int>(bytes));
    const std::size_t width = bytes / 2;  // elements of a row
    return swizzle(start + mn / width * leading + k / 8 * stride + k % 8 * bytes + mn % width * 2, static_cast<int>(bytes));
  }
};

std::string gather(unsigned long long bits, MatrixType type, int extent, bool mn_major, const unsigned char* shared,
                   std::size_t shared_bytes, float* result, int mn_stride, int k_stride) {
  const MatrixDescriptor descriptor(bits);
  if (std::string wrong = descriptor.reject(mn_major); !wrong.empty()) return wrong;
  for (int mn = 0; mn < extent; ++mn) {
    for (int k = 0; k < product_depth; ++k) {
      const std::size_t at =
          descriptor.address(static_cast<std::size_t>(mn), static_cast<std::size_t>(k), mn_major) - shared_window;
      if (at + 2 > shared_bytes) {
        return "the descriptor reaches shared offset " + std::to_string(static_cast<std::int64_t>(at)) +
               ", outside the block's " + std::to_string(shared_bytes) + " bytes";
      }
      std::uint16_t value;
      std::memcpy(&value, shared + at, 2);
      result[mn * mn_stride + k * k_stride] = float_of(type, value);
    }
  }
  return {};
}

/// A from tensor memory: two elements in a column, the first in the low half.
void gather_columns(unsigned address, MatrixType type, const TensorMemory& tensor, float* A) {
  const TensorPlace place(address);
  for (unsigned row = 0; row < product_rows; ++row) {
    for (unsigned pair = 0; pair < product_depth / 2; ++pair) {
      const std::uint32_t bits = tensor.cells[row * TensorMemory::columns + place.column + pair];
      A[row * product_depth + 2 * pair] = float_of(type, static_cast<std::uint16_t>(bits));
      A[row * product_depth + 2 * pair + 1] = float_of(type, static_cast<std::uint16_t>(bits >> 16));
    }
  }
}

/// A chunk of 16 bytes holds 8 neighbours along k, or along mn if that is contiguous.
void visit_chunks(unsigned long long bits, int extent, bool mn_major, const std::function<void(std::size_t)>& visit) {
  const MatrixDescriptor descriptor(bits);
  for (int mn = 0; mn < extent; mn += mn_major ? 8 : 1) {
    for (int k = 0; k < product_depth; k += mn_major ? 1 : 8)
      visit(descriptor.address(static_cast<std::size_t>(mn), static_cast<std::size_t>(k), mn_major) - shared_window);
  }
}

}  // namespace

ProductShape::ProductShape(unsigned descriptor)
    : m(static_cast<int>(field(descriptor, 24, 5)) * 16),
      n(static_cast<int>(field(descriptor, 17, 6)) * 8),
      a_mn_major(field(descriptor, 15, 1) != 0),
      b_mn_major(field(descriptor, 16, 1) != 0),
      type(field(descriptor, 7, 3) == 1 ? MatrixType::bfloat16 : MatrixType::float16),
      bits(descriptor) {}

std::string ProductShape::reject() const {
  if (field(bits, 4, 2) != 1) return "the emulator adds products in fp32 alone";
  if (field(bits, 7, 3) != field(bits, 10, 3) || field(bits, 7, 3) > 1)
    return "the emulator knows A and B of one type, fp16 or bf16";
  if (field(bits, 0, 4) != 0 || field(bits, 6, 1) != 0 || field(bits, 13, 2) != 0 || field(bits, 23, 1) != 0 ||
      field(bits, 29, 3) != 0)
    return "the shape has bits that the emulator does not know: sparsity, negation or a reserved field";
  if (m != product_rows) return "M is " + std::to_string(m) + "; the emulator knows 128";
  if (n < 16 || n > 256 || n % 16 != 0) return "N is " + std::to_string(n) + "; allowed are multiples of 16 up to 256";
  return {};
}

std::string multiply(const TensorProductOperand& operand, TensorMemory& tensor, const unsigned char* shared,
                     std::size_t shared_bytes) {
  const ProductShape shape(operand.shape);
  float A[product_rows * product_depth], B[product_depth * 256];
  std::string wrong;
  if (operand.a_in_tensor_memory) {
    if (shape.a_mn_major) return "A in tensor memory has k contiguous";
    gather_columns(operand.a_address, shape.type, tensor, A);
  } else {
    wrong =
        gather(operand.a_descriptor, shape.type, product_rows, shape.a_mn_major, shared, shared_bytes, A, product_depth, 1);
    if (!wrong.empty()) return "A: " + wrong;
  }
  wrong = gather(operand.b_descriptor, shape.type, shape.n, shape.b_mn_major, shared, shared_bytes, B, 1, shape.n);
  if (!wrong.empty()) return "B: " + wrong;
  float* const D = tensor.row(0) + TensorPlace(operand.D).column;
  if (!operand.accumulate) {
    for (int i = 0; i < product_rows; ++i) std::fill_n(D + i * static_cast<int>(TensorMemory::columns), shape.n, 0.0f);
  }
  accumulate(D, static_cast<int>(TensorMemory::columns), A, B, product_rows, shape.n);
  return {};
}

void for_each_operand_chunk(const TensorProductOperand& operand, const ProductShape& shape,
                            const std::function<void(std::size_t)>& visit) {
  if (!operand.a_in_tensor_memory) visit_chunks(operand.a_descriptor, product_rows, shape.a_mn_major, visit);
  visit_chunks(operand.b_descriptor, shape.n, shape.b_mn_major, visit);
}

}  // namespace flash_attention::emulator
