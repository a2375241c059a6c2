// Where things are, asked of the building blocks that the kernels themselves use. tools/draw_lessons.py draws the answers.

#include <cstdio>

// After the standard headers, which the macros of the prelude would change.
// clang-format off
#include "prelude.h"
#include "ladder/parts/half_tile.cuh"
#include "tile/mma.cuh"
#include "tile/visibility.cuh"
#include "tile/sequence.cuh"
// clang-format on

using namespace flash_attention;
using namespace flash_attention::abi;

int main() {
  emulator::Arithmetic arithmetic{};  // the wrappers count there
  emulator::ThreadView view{};
  view.arithmetic = &arithmetic, emulator::thread = &view;
  // The places of a lane's elements in an accumulator of 16 x 16: lane, element, row, column.
  for (int lane = 0; lane < 32; ++lane) {
    const tile::LanePlace place(lane);
    for (int n = 0; n < 2; ++n) {
      for (int e = 0; e < 4; ++e)
        std::printf("accumulator %d %d %d %d\n", lane, 4 * n + e, place.row + 8 * (e / 2), 8 * n + place.column + e % 2);
    }
  }
  // Which register of the A operand has which two of them: a value that is its own number, packed and looked for.
  const float even[4] = {1, 2, 3, 4}, odd[4] = {5, 6, 7, 8};
  unsigned A[4];
  tile::pack_a<Type::float16>(A, even, odd);
  for (int r = 0; r < 4; ++r) {
    for (int half = 0; half < 2; ++half) {
      const auto bits = static_cast<unsigned short>(A[r] >> 16 * half);
      std::printf("operand %d %d\n", r, static_cast<int>(static_cast<float>(__builtin_bit_cast(_Float16, bits))) - 1);
    }
  }
  // Where chunk `chunk` of 16 bytes of a row is, in bytes from the start, in rows that follow each other and in permuted
  // ones.
  using Plain = PlainTile<64, 128>;
  using Swizzled = tile::SwizzledTile<64, 128>;
  for (int row = 0; row < 8; ++row) {
    for (int chunk = 0; chunk < 8; ++chunk)
      std::printf("chunk %d %d %u %u\n", row, chunk, Plain::offset(row, chunk), Swizzled::offset(row, chunk));
  }
  // Which tiles of keys a tile of queries visits under a causal mask, and which of them need no mask.
  constexpr Features causal{.dtype = Type::float16, .window_right = true};
  constexpr int block = 64, tiles = 8;
  AttentionArgs args{};
  args.batch = args.heads_q = args.heads_kv = args.group = 1, args.scale = 1;
  args.seq_q = args.seq_kv = args.total_q = args.total_kv = block * tiles;
  const tile::Sequence sequence = tile::make_sequence<causal>(args, 0);
  const tile::Visibility<causal> sight(args, sequence, 0);
  for (int q = 0; q < tiles; ++q) {
    const tile::TileRange range = sight.key_tiles<block, block>(q * block);
    for (int k = 0; k < tiles; ++k) {
      const bool visited = k >= range.begin && k < range.end;
      const bool whole = visited && sight.all_visible<block, block>(q * block, k * block);
      std::printf("tile %d %d %s\n", q, k, !visited ? "skipped" : whole ? "whole" : "masked");
    }
  }
}
