#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "emulator/machine/tensor_memory.h"

namespace flash_attention::emulator {

/// An instruction descriptor of tcgen05.mma.kind::f16 (PTX ISA 9.7.16.4.2), decoded.
struct ProductShape {
  int m, n;
  bool a_mn_major, b_mn_major;
  MatrixType type;
  unsigned bits;

  explicit ProductShape(unsigned descriptor);
  std::string reject() const;  ///< what is wrong, or what the emulator does not know; empty if nothing
};

/// D (+)= A B with the operands as memory holds them at this moment. Returns what is wrong with a descriptor, or nothing.
std::string multiply(const TensorProductOperand& operand, TensorMemory& tensor, const unsigned char* shared,
                     std::size_t shared_bytes);

/// Calls visit(shared offset) for each 16 bytes of shared memory that the product reads.
void for_each_operand_chunk(const TensorProductOperand& operand, const ProductShape& shape,
                            const std::function<void(std::size_t)>& visit);

}  // namespace flash_attention::emulator
