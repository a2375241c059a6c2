#include <cstring>

#include "emulator/checks/access_counts.h"
#include "emulator/instructions/convert.h"
#include "emulator/instructions/matrix_ops.h"
#include "emulator/machine/address.h"
#include "emulator/runtime/interface.h"

// The hardware does not document how it spreads a wmma fragment. Here lane l holds elements 8 l to 8 l + 7 of the 16 x
// 16 matrix in row order, 16-bit operands as pairs in the first four registers.
namespace flash_attention::emulator {
namespace {

const WmmaMoveOperand& uniform_wmma_move(void* const* operands) {
  const auto& first = *static_cast<const WmmaMoveOperand*>(operands[0]);
  for (int lane = 1; lane < 32; ++lane) {
    const auto& other = *static_cast<const WmmaMoveOperand*>(operands[lane]);
    if (other.tile != first.tile || other.stride != first.stride || other.column_major != first.column_major) {
      Scheduler::current().fail("the lanes name different tiles");
    }
  }
  return first;
}

// The rounds over the banks are those of the code that compilers generate from sm_80 on.

/// ldmatrix of four 8 x 8 tiles.
void count_load(const WmmaMoveOperand& form) {
  for (int tile = 0; tile < 4; ++tile) {
    unsigned addresses[8];
    for (int row = 0; row < 8; ++row) {
      addresses[row] = form.tile + static_cast<unsigned>(((tile % 2 * 8 + row) * form.stride + tile / 2 * 8) * 2);
    }
    count_shared_wavefronts(addresses, 8, 16, tile == 0);
  }
}

/// Four stores of 8 bytes a lane, each of 8 rows and 8 columns.
void count_store(const WmmaMoveOperand& form) {
  for (int tile = 0; tile < 4; ++tile) {
    unsigned addresses[32];
    for (int lane = 0; lane < 32; ++lane) {
      const int row = tile % 2 * 8 + lane / 4, column = tile / 2 * 8 + lane % 4 * 2;
      addresses[lane] = form.tile + static_cast<unsigned>((row * form.stride + column) * 4);
    }
    count_shared_wavefronts(addresses, 32, 8, true);
  }
}

float element(const MultiplyOperand& operand, const unsigned* registers, int i) {
  const auto bits = static_cast<std::uint16_t>(registers[i / 2] >> (16 * (i % 2)));
  return float_of(operand.type, bits);
}

}  // namespace

void wmma_load(void* const* operands) {
  const WmmaMoveOperand& form = uniform_wmma_move(operands);
  if (form.stride % 8 != 0) Scheduler::current().fail("the stride is not a multiple of 8 elements");
  count_load(form);
  Scheduler& scheduler = Scheduler::current();
  for (int row = 0; row < 16; ++row) {
    const SharedPlace line = locate(form.tile + static_cast<unsigned>(row * form.stride * 2), 32, 16);
    scheduler.races().read(*scheduler.running().warp->lanes[static_cast<std::size_t>(row)], line, 32);
    for (int column = 0; column < 16; ++column) {
      const int index = form.column_major ? column * form.stride + row : row * form.stride + column;
      const SharedPlace place = locate(form.tile, static_cast<std::size_t>(index + 1) * 2, 32);
      std::uint16_t bits;
      std::memcpy(&bits, place.generic() + index * 2, 2);
      const int i = row * 16 + column;
      auto* registers = static_cast<unsigned char*>(static_cast<WmmaMoveOperand*>(operands[i / 8])->registers);
      std::memcpy(registers + i % 8 * 2, &bits, 2);
    }
  }
}

void wmma_store(void* const* operands) {
  const WmmaMoveOperand& form = uniform_wmma_move(operands);
  if (form.stride % 4 != 0) Scheduler::current().fail("the stride is not a multiple of 4 floats");
  count_store(form);
  Scheduler& scheduler = Scheduler::current();
  for (int i = 0; i < 256; ++i) {
    const int index = i / 16 * form.stride + i % 16;
    const SharedPlace place = locate(form.tile, static_cast<std::size_t>(index + 1) * 4, 32);
    scheduler.races().write(*scheduler.running().warp->lanes[static_cast<std::size_t>(i / 8)],
                            {place.block, place.offset + static_cast<std::size_t>(index) * 4}, 4);
    const auto* registers = static_cast<const unsigned char*>(static_cast<WmmaMoveOperand*>(operands[i / 8])->registers);
    std::memcpy(place.generic() + index * 4, registers + i % 8 * 4, 4);
  }
}

void wmma_multiply(void* const* operands) {
  float A[16][16], B[16][16], D[16][16];
  for (int i = 0; i < 256; ++i) {
    const auto& operand = *static_cast<const MultiplyOperand*>(operands[i / 8]);
    A[i / 16][i % 16] = element(operand, operand.A, i % 8);
    B[i / 16][i % 16] = element(operand, operand.B, i % 8);
    D[i / 16][i % 16] = operand.D[i % 8];
  }
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < 16; ++k) {
      for (int j = 0; j < 16; ++j) D[i][j] += A[i][k] * B[k][j];
    }
  }
  for (int i = 0; i < 256; ++i) static_cast<const MultiplyOperand*>(operands[i / 8])->D[i % 8] = D[i / 16][i % 16];
  Scheduler::current().counters().mma_flops += 2 * 16 * 16 * 16;
}

}  // namespace flash_attention::emulator
