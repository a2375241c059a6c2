#include "emulator/instructions/matrix_ops.h"

#include <cstring>
#include <string>

#include "emulator/checks/access_counts.h"
#include "emulator/instructions/convert.h"
#include "emulator/instructions/cut_products.h"
#include "emulator/machine/address.h"
#include "emulator/runtime/interface.h"
#include "support/clones.h"

namespace flash_attention::emulator {
namespace {

template <MatrixType type>
float low(unsigned pair) {
  return float_of(type, static_cast<std::uint16_t>(pair));
}
template <MatrixType type>
float high(unsigned pair) {
  return float_of(type, static_cast<std::uint16_t>(pair >> 16));
}

template <typename Operand, typename Same>
const Operand& uniform(void* const* operands, Same same) {
  const auto& first = *static_cast<const Operand*>(operands[0]);
  for (int lane = 1; lane < 32; ++lane) {
    if (!same(first, *static_cast<const Operand*>(operands[lane]))) {
      Scheduler::current().fail("the lanes execute different forms of the instruction");
    }
  }
  return first;
}

/// Calls move(tile, row, place of the row's 16 bytes, the thread that named it), and counts the rounds over the banks.
template <typename Move>
void for_each_row(void* const* operands, int tiles, Move move) {
  const std::vector<Thread*>& lanes = Scheduler::current().running().warp->lanes;
  for (int tile = 0; tile < tiles; ++tile) {
    unsigned addresses[8];
    for (int row = 0; row < 8; ++row) {
      addresses[row] = static_cast<const MatrixMoveOperand*>(operands[tile * 8 + row])->row;
      move(tile, row, locate(addresses[row], 16, 16), *lanes[static_cast<std::size_t>(tile * 8 + row)]);
    }
    count_shared_wavefronts(addresses, 8, 16, tile == 0);
  }
}

const MatrixMoveOperand& uniform_move(void* const* operands) {
  return uniform<MatrixMoveOperand>(operands, [](const MatrixMoveOperand& x, const MatrixMoveOperand& y) {
    return x.count == y.count && x.transposed == y.transposed;
  });
}

/// The two elements that lane `lane` holds of an 8 x 8 tile.
void positions(int lane, bool transposed, int (&rows)[2], int (&columns)[2]) {
  for (int e = 0; e < 2; ++e) {
    const int g = lane / 4, t = 2 * (lane % 4) + e;
    rows[e] = transposed ? t : g;
    columns[e] = transposed ? g : t;
  }
}

/// D += A B. The products of one instruction are added at once, as tensor cores do from sm_90 on: their order does not
/// matter.
FLASH_ATTENTION_CLONES void multiply_add(float (&D)[16][8], const float (&A)[16][16], const float (&B)[16][8], int k) {
  using Columns = double __attribute__((vector_size(64)));
  Columns b[16];
  for (int x = 0; x < k; ++x) {
    for (int j = 0; j < 8; ++j) b[x][j] = B[x][j];
  }
  for (int i = 0; i < 16; ++i) {
    Columns sum;
    for (int j = 0; j < 8; ++j) sum[j] = D[i][j];
    for (int x = 0; x < k; ++x) sum += static_cast<double>(A[i][x]) * b[x];
    for (int j = 0; j < 8; ++j) D[i][j] = static_cast<float>(sum[j]);
  }
}

template <MatrixType type>
void multiply(void* const* operands) {
  constexpr int k = type == MatrixType::tf32 ? 8 : 16;
  float A[16][16], B[16][8], D[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& operand = *static_cast<const MultiplyOperand*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; ++r) {
      const int row = g + 8 * (r % 2);
      if constexpr (type == MatrixType::tf32) {
        A[row][t + 4 * (r / 2)] = float_of_tf32(operand.A[r]);
      } else {
        A[row][2 * t + 8 * (r / 2)] = low<type>(operand.A[r]);
        A[row][2 * t + 8 * (r / 2) + 1] = high<type>(operand.A[r]);
      }
      D[g + 8 * (r / 2)][2 * t + r % 2] = operand.D[r];
    }
    for (int r = 0; r < 2; ++r) {
      if constexpr (type == MatrixType::tf32) {
        B[t + 4 * r][g] = float_of_tf32(operand.B[r]);
      } else {
        B[2 * t + 8 * r][g] = low<type>(operand.B[r]);
        B[2 * t + 8 * r + 1][g] = high<type>(operand.B[r]);
      }
    }
  }
  multiply_add(D, A, B, k);
  for (int lane = 0; lane < 32; ++lane) {
    const auto& operand = *static_cast<const MultiplyOperand*>(operands[lane]);
    for (int r = 0; r < 4; ++r) operand.D[r] = D[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2];
  }
  Scheduler::current().counters().mma_flops += static_cast<std::uint64_t>(2 * 16 * 8 * k);
}

/// The same of 8-bit elements: a register holds four neighbours along k, of which there are 32.
void multiply_codes(void* const* operands) {
  constexpr int k = 32;
  float A[16 * k], B[k * 8], D[16 * 8];
  const auto each_element = [&](const auto& visit) {  // of D
    for (int lane = 0; lane < 32; ++lane) {
      const auto& operand = *static_cast<const MultiplyOperand*>(operands[lane]);
      for (int r = 0; r < 4; ++r) visit(operand.D[r], D[(lane / 4 + 8 * (r / 2)) * 8 + 2 * (lane % 4) + r % 2]);
    }
  };
  for (int lane = 0; lane < 32; ++lane) {
    const auto& operand = *static_cast<const MultiplyOperand*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int byte = 0; byte < 4; ++byte) {
      for (int r = 0; r < 4; ++r) {
        A[(g + 8 * (r % 2)) * k + 4 * t + 16 * (r / 2) + byte] =
            float_of_code(operand.a_type, static_cast<std::uint8_t>(operand.A[r] >> 8 * byte));
      }
      for (int r = 0; r < 2; ++r) {
        B[(4 * t + 16 * r + byte) * 8 + g] =
            float_of_code(operand.type, static_cast<std::uint8_t>(operand.B[r] >> 8 * byte));
      }
    }
  }
  each_element([](float& of_lane, float& of_tile) { of_tile = of_lane; });
  add_cut_products(D, A, B, 16, 8);
  each_element([](float& of_lane, float& of_tile) { of_lane = of_tile; });
  Scheduler::current().counters().mma_flops += static_cast<std::uint64_t>(2 * 16 * 8 * k);
}

}  // namespace

void ldmatrix(void* const* operands) {
  Races& races = Scheduler::current().races();
  const MatrixMoveOperand& form = uniform_move(operands);
  std::uint16_t tiles[4][8][8];
  for_each_row(operands, form.count, [&](int tile, int row, const SharedPlace& place, const Thread& thread) {
    races.read(thread, place, 16);
    std::memcpy(tiles[tile][row], place.generic(), 16);
  });
  for (int lane = 0; lane < 32; ++lane) {
    int rows[2], columns[2];
    positions(lane, form.transposed, rows, columns);
    unsigned* registers = static_cast<const MatrixMoveOperand*>(operands[lane])->tiles;
    for (int tile = 0; tile < form.count; ++tile) {
      registers[tile] = tiles[tile][rows[0]][columns[0]] | static_cast<unsigned>(tiles[tile][rows[1]][columns[1]]) << 16;
    }
  }
}

void stmatrix(void* const* operands) {
  Races& races = Scheduler::current().races();
  const MatrixMoveOperand& form = uniform_move(operands);
  std::uint16_t tiles[4][8][8];
  for (int lane = 0; lane < 32; ++lane) {
    int rows[2], columns[2];
    positions(lane, form.transposed, rows, columns);
    const unsigned* registers = static_cast<const MatrixMoveOperand*>(operands[lane])->tiles;
    for (int tile = 0; tile < form.count; ++tile) {
      tiles[tile][rows[0]][columns[0]] = static_cast<std::uint16_t>(registers[tile]);
      tiles[tile][rows[1]][columns[1]] = static_cast<std::uint16_t>(registers[tile] >> 16);
    }
  }
  for_each_row(operands, form.count, [&](int tile, int row, const SharedPlace& place, const Thread& thread) {
    races.write(thread, place, 16);
    std::memcpy(place.generic(), tiles[tile][row], 16);
  });
}

void mma(void* const* operands) {
  const auto same = [](const auto& x, const auto& y) { return x.type == y.type && x.a_type == y.a_type; };
  switch (uniform<MultiplyOperand>(operands, same).type) {
    case MatrixType::tf32:
      return multiply<MatrixType::tf32>(operands);
    case MatrixType::float16:
      return multiply<MatrixType::float16>(operands);
    case MatrixType::e4m3:
    case MatrixType::e5m2:
      return multiply_codes(operands);
    default:
      return multiply<MatrixType::bfloat16>(operands);
  }
}

}  // namespace flash_attention::emulator
