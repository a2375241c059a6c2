#pragma once

// Which pairs of a tested block are visible, a bit a pair, if masks choose the blocks. Of the producer warpgroup three
// warps have nothing to load. They follow the tiles and their lists and make the words of a block while the warpgroups
// attend to the one before:
//
//     for each tile, for each block of its list that the masks cut, for each warpgroup:
//       a lane has block_kv / 32 keys, and asks the masks for one row after another; a vote makes the words of a row,
//       which lane n keeps of row n
//       wait until the warpgroup has read its words; store
//
// What a mask knows of a key is read or computed once for 64 rows, and of a row once for a tile. Edges of windows and
// lengths are not asked here: they are a shift for the warpgroups (hide_pairs.cuh), and blocks that nothing else cuts have
// no words.

#include "forward/sm90/block_list.cuh"
#include "ptx/memory.cuh"
#include "ptx/path.cuh"
#include "ptx/warp.cuh"

namespace flash_attention::forward_sm90 {

template <ForwardConfig config>
struct MaskWriter {
  using S = Shape<config>;
  using Words = MaskWords<S::block_kv>;
  using Program = tile::Program<config.features.mask_program>;
  static constexpr Features features = config.features;
  static constexpr int keys = S::block_kv / 32;                             // of a lane, one after another
  static constexpr int rows_of_warp = tile::ceil_div(wg_rows, mask_warps);  // of each warpgroup
  // A program takes its time to compile, and a block mask registers.
  static constexpr int unrolled = features.mask_program || features.block_mask ? 2 : rows_of_warp;
  static constexpr bool loads_ahead = features.mask && unrolled == rows_of_warp;  // the bytes of all rows

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  const int warp;  // of the three
  const int lane;
  unsigned num_written = 0;  // blocks

  /// All tiles of all attempts.
  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (unsigned n = 0;; ++n) {
      const PipelineState<S::q_stages> q(n);
      ptx::mbarrier_wait(shared.Q_full[q.stage][0], q.phase);  // the next tile is known
      const Tile tile = shared.tiles[n % tile_stages];
      __syncwarp();  // all lanes have read it
      if (lane == 0) ptx::mbarrier_arrive(shared.Q_empty[q.stage][0]);
      if (tile.work == Work::none) {
        ptx::mbarrier_wait(shared.Q_empty[q.stage][0], q.phase);  // all tiles of the attempt are done and marked
        if (shared.last_attempt <= static_cast<int>(tile.attempt)) return;
      } else if (!tile.sees_nothing()) {
        write_tile(tile);
      }
    }
  }

 private:
  /// What the masks know of this lane's keys of a block, and where its bytes are.
  struct Keys {
    int hidden[keys][features.hidden_bounds == 0 ? 1 : features.hidden_bounds];
    typename Program::Key known[keys];
    int column[keys];  // of the block mask
    const unsigned char* bytes;
    int last;      // the last key that may be read, from the first of the lane on
    bool aligned;  // bytes may be read together
  };
  /// The same of a row.
  struct Row {
    typename Program::Row known;
    int block;  // of the block mask
  };

  __device__ __forceinline__ void write_tile(const Tile& tile) {
    const tile::MaskData<features> data(args, tile.sequence, tile.head_idx);
    const int last_row = tile.sequence.len_q - 1;
    Row own[S::warpgroups];  // row number `lane` of this warp's
#pragma unroll
    for (int w = 0; w < S::warpgroups; ++w) {
      const int i = tile::min(first_row(tile, w) + lane, last_row);
      if constexpr (features.mask_program) own[w].known = data.program.row(i);
      if constexpr (features.block_mask) own[w].block = i / data.block_q;
    }
    BlockList<config> list(args, tile);
    int block = list.seek(tile.first);
#pragma unroll 1
    while (block >= 0) {
      if (list.describe(block, Attempt::fixed_max).masked()) {
        ptx::path<"forward/sm90 words of a mask">();
        const Keys known = keys_at(tile, data, block * S::block_kv);
#pragma unroll 1
        for (int w = 0; w < S::warpgroups; ++w) write_words(tile, data, known, w == 0 ? own[0] : own[S::warpgroups - 1], w);
        ++num_written;
      }
      block = list.after(block);
    }
  }

  __device__ __forceinline__ int first_row(const Tile& tile, int w) const {
    return tile.q_begin + w * wg_rows + warp * rows_of_warp;
  }

  __device__ __forceinline__ Keys keys_at(const Tile& tile, const tile::MaskData<features>& data, int kv_begin) const {
    const int first = kv_begin + lane * keys, last = tile.sequence.visible_kv - 1;
    Keys result;
#pragma unroll
    for (int k = 0; k < keys; ++k) {
      const int j = tile::min(first + k, last);
      if constexpr (features.mask_program) result.known[k] = data.program.key(j);
      if constexpr (features.block_mask) result.column[k] = j / data.block_kv;
#pragma unroll
      for (int b = 0; b < features.hidden_bounds; ++b) result.hidden[k][b] = data.rows[j * features.hidden_bounds + b];
    }
    if constexpr (features.mask) {
      const auto* const mask = static_cast<const unsigned char*>(args.mask.data);
      result.bytes =
          mask + tile.sequence.batch_idx * args.mask.batch_stride + tile.head_idx * args.mask.head_stride + first;
      result.last = last - first;
      const auto place = reinterpret_cast<unsigned long long>(result.bytes);
      result.aligned = kv_begin + S::block_kv <= tile.sequence.visible_kv &&
                       (place | static_cast<unsigned long long>(args.mask.q_stride)) % keys == 0;
    }
    return result;
  }

  /// The bytes of a lane's keys in a row; 0 is hidden.
  template <bool aligned>
  __device__ __forceinline__ unsigned bytes_at(const Keys& known, int i) const {
    const unsigned char* const row = known.bytes + i * args.mask.q_stride;
    if constexpr (aligned && keys == 4) return ptx::load_global(reinterpret_cast<const unsigned*>(row));
    if constexpr (aligned && keys == 2) return ptx::load_global(reinterpret_cast<const unsigned short*>(row));
    unsigned result = 0;
#pragma unroll
    for (int k = 0; k < keys; ++k) result |= static_cast<unsigned>(row[tile::min(k, known.last)]) << 8 * k;
    return result;
  }

  /// Which of 32 rows from `first` on a key is hidden from: a bit a row.
  __device__ __forceinline__ static unsigned rows_hidden(const int* bounds, int first) {
    const auto before = [&](int which) {  // a bound
      const int row = tile::max(bounds[which], first) - first;
      return row >= 32 ? 0xffffffffu : (1u << row) - 1;
    };
    unsigned result = ~before(0);
    if constexpr (features.hidden_bounds > 1) result &= before(1);
    if constexpr (features.hidden_bounds == 4) result |= ~before(2) & before(3);
    return result;
  }

  /// Whether row n of those that the warp takes sees the lane's key number k, as far as the masks say. `hidden_rows` are
  /// those of the key, `bytes` those of the row.
  __device__ __forceinline__ bool sees(const tile::MaskData<features>& data, const Keys& known, int k, int n,
                                       unsigned hidden_rows, const Row& row, unsigned bytes) const {
    bool hidden = false;
    if constexpr (features.hidden_bounds != 0) hidden = (hidden_rows >> n & 1) != 0;
    if constexpr (features.block_mask) hidden |= data.blocks[row.block * data.blocks_stride + known.column[k]] == 0;
    if constexpr (features.mask) hidden |= (bytes >> 8 * k & 255u) == 0;
    if constexpr (features.mask_program) hidden |= !data.program.visible(row.known, known.known[k]);
    return !hidden;
  }

  template <bool aligned>
  __device__ __forceinline__ Words words_of(const tile::MaskData<features>& data, const Keys& known, const Row& own,
                                            int first, int last_row) const {
    unsigned bytes[loads_ahead ? rows_of_warp : 1];
    if constexpr (loads_ahead) {
#pragma unroll
      for (int n = 0; n < rows_of_warp; ++n) bytes[n] = bytes_at<aligned>(known, tile::min(first + n, last_row));
    }
    unsigned hidden_rows[keys] = {};
#pragma unroll
    for (int k = 0; k < keys; ++k) {
      if constexpr (features.hidden_bounds != 0) hidden_rows[k] = rows_hidden(known.hidden[k], first);
    }
    Words result{};
#pragma unroll unrolled
    for (int n = 0; n < rows_of_warp; ++n) {
      Row row{};
      if constexpr (features.mask_program) row.known = tile::known_by(own.known, n);
      if constexpr (features.block_mask) row.block = ptx::shuffle(own.block, n);
      unsigned here = 0;
      if constexpr (features.mask)
        here = loads_ahead ? bytes[loads_ahead ? n : 0] : bytes_at<aligned>(known, tile::min(first + n, last_row));
#pragma unroll
      for (int k = 0; k < keys; ++k) {
        const unsigned word = ptx::ballot(sees(data, known, k, n, hidden_rows[k], row, here));
        result[k] = lane == n ? word : result[k];
      }
    }
    return result;
  }

  __device__ __forceinline__ void write_words(const Tile& tile, const tile::MaskData<features>& data, const Keys& known,
                                              const Row& own, int w) const {
    const int first = first_row(tile, w), last_row = tile.sequence.len_q - 1;
    const Words words = features.mask && !known.aligned ? words_of<false>(data, known, own, first, last_row)
                                                        : words_of<true>(data, known, own, first, last_row);
    ptx::mbarrier_wait(shared.mask.empty[w], (num_written & 1) ^ 1);  // the warpgroup has read those of the block before
    const int row = warp * rows_of_warp + lane;
    if (lane < rows_of_warp && row < wg_rows) shared.mask.words[w][row] = words;
    __syncwarp();  // those of all rows
    if (lane == 0) ptx::mbarrier_arrive(shared.mask.full[w]);
  }
};

}  // namespace flash_attention::forward_sm90
