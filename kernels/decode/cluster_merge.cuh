#pragma once

#include "decode/merge.cuh"
#include "ptx/bits.cuh"
#include "ptx/cluster.cuh"

// The end of an item that the blocks of a cluster share (config.item_blocks). Each block sends its part, in pieces, to the
// blocks that merge them. Only the result goes through global memory. Parts are merged in the order of the keys; the bits
// of the result are those of decode/merge.cuh.
//
//   at the start:  initialise the mbarriers;  arrive at the cluster barrier
//   at the end:    tell the other blocks that this one reads no tile any more, because parts are sent to the memory of the
//                  tiles (not needed if there is a stage that no block has used)
//                  when all have said so: send the pieces of the part to the shared memory of the blocks that merge them
//   each warp:     when all pieces have arrived, for its pieces: max and sum over all parts, a part a lane
//                  O = sum over parts;  O / sum -> global
//
// There is no cluster barrier at the end: with release semantics it would wait for all of the block's memory accesses.
// Instead each store reports its bytes to an mbarrier of the receiver, and a block ends when it has received and merged its
// pieces.

namespace flash_attention::decode {

template <ForwardConfig config>
struct ClusterMerge {
  using Rows = FinishRows<config>;
  using Row = typename Rows::Row;
  using Four = typename Rows::Four;
  using Pair = typename Rows::Pair;
  using Mailbox = typename Rows::Mailbox;
  static constexpr Features features = config.features;
  static constexpr int warps = Rows::warps;
  static constexpr bool repairs_rows = Rows::repairs_rows;

  static constexpr bool in_cluster = decode_has_clusters(config);
  static constexpr int blocks = tile::max(1, config.item_blocks);
  static_assert(!in_cluster || blocks <= 16);
  static constexpr int part_lanes = blocks <= 4   ? 4
                                    : blocks <= 8 ? 8
                                                  : 16;  // a lane has one part; lanes further on repeat them
  // A piece is 32 columns of a row. If a block merges several rows, a piece is a whole row, so that its statistics are
  // merged only once. A piece is also a whole row if rows may have to be repaired, because one warp repairs a whole
  // row.
  static constexpr int chunks = tile::ceil_div(config.head_dim_v, 32);
  static constexpr int row_pieces = repairs_rows || config.block_q >= 4 * blocks ? 1 : chunks;
  static constexpr int piece_columns = 32 * chunks / row_pieces;
  static constexpr int lane_columns =
      piece_columns % 128 == 0 ? 4 : 1;  // neighbouring columns that a lane merges at a time

  /// The layout of what a block receives, in the memory of its tiles: pieces of `parts` parts each, then their statistics.
  static constexpr int statistics_offset = 2 * (config.block_q * row_pieces + blocks) * piece_columns;  // in floats
  static constexpr int received_bytes = 4 * statistics_offset * (piece_columns + 2) / piece_columns;

  /// Which block merges a piece: the first blocks of the cluster, a power of two of them, take the pieces alternately.
  struct Share {
    int parts;  // the number of blocks that have a part: the first of the cluster
    int rank = static_cast<int>(blockIdx.x) % blocks;
    int shift = 31 - ptx::leading_zeros(static_cast<unsigned>(parts));

    __device__ __forceinline__ int owner_of(int piece) const { return piece & ((1 << shift) - 1); }
    __device__ __forceinline__ int slot_of(int piece, int part) const { return (piece >> shift) * parts + part; }
    __device__ __forceinline__ int pieces_of_block(int pieces) const {
      return rank >> shift == 0 ? (tile::max(0, pieces - rank) + (1 << shift) - 1) >> shift : 0;
    }
  };

  __device__ __forceinline__ static Share share_of(const Item<config>& item) {
    return Share{tile::min(blocks, item.end_tile - item.first_tile)};
  }

  /// Called at the start by the warps that have a part.
  __device__ __forceinline__ static void prepare(Mailbox& mailbox, const AttentionArgs& args, const Item<config>& item) {
    if (in_cluster && threadIdx.x == 0) {
      const int all_rows = tile::make_sequence<features>(args, item.batch_idx).rows_q * config.group;
      const int rows = tile::min(config.block_q, all_rows - item.row_tile * config.block_q);
      const Share share = share_of(item);
      ptx::mbarrier_init(mailbox.tiles_read, share.parts);
      ptx::mbarrier_init(mailbox.received, 1);
      ptx::mbarrier_init_fence();
      ptx::mbarrier_arrive_expect_tx(mailbox.received, share.pieces_of_block(rows * row_pieces) * share.parts *
                                                           static_cast<int>(4 * piece_columns + sizeof(Pair)));
    }
    arrive();
  }

  /// Tells the other blocks that this one has begun. Warps without a part do nothing else.
  __device__ __forceinline__ static void arrive() {
    if constexpr (in_cluster) {
      __syncwarp();  // lanes must arrive together (the emulator does not check: its cluster barrier counts threads)
      ptx::cluster_arrive_relaxed();
    }
  }

  /// Whether every block of the cluster has so few tiles that its last stage is never used. Then parts may be sent there at
  /// any time.
  __device__ __forceinline__ static bool has_free_stage(const Item<config>& item) {
    if constexpr (received_bytes > DecodeLayout(config).stage_bytes) return false;
    return item.end_tile - item.first_tile <= blocks * (config.num_stages - 1);
  }

  /// Called after a barrier of the block's warps, when none of them reads tiles any more. Returns when the other blocks
  /// have said the same.
  __device__ __forceinline__ static void announce(const Rows& out) {
    Mailbox& mailbox = out.storage.mailbox;
    if (has_free_stage(out.item)) return ptx::cluster_wait();  // all have begun, and their mbarriers are initialised
    if (out.warp == 0) {
      ptx::cluster_wait();  // all have begun, and their mbarriers are initialised
      if (out.lane < share_of(out.item).parts)
        ptx::cluster_mbarrier_arrive_read(ptx::cluster_address(&mailbox.tiles_read, static_cast<unsigned>(out.lane)));
    }
    ptx::cluster_mbarrier_wait(mailbox.tiles_read, 0);
  }

  /// Sends four columns of a row of this block's part; with the first ones of a piece, also the row's statistics.
  __device__ __forceinline__ static void send(const Rows& out, float* received, int row, int column, const Four& sum,
                                              const Pair& statistics) {
    const Share share = share_of(out.item);
    const int piece = row * row_pieces + (row_pieces == 1 ? 0 : column / 32), place = column % piece_columns;
    const int slot = share.slot_of(piece, share.rank);
    const auto owner = static_cast<unsigned>(share.owner_of(piece));
    const unsigned barrier = ptx::cluster_address(&out.storage.mailbox.received, owner),
                   to = ptx::cluster_address(received, owner);
    ptx::cluster_store_async(to + 4 * (slot * piece_columns + place), sum, barrier);
    if (place == 0) ptx::cluster_store_async(to + 4 * (statistics_offset + 2 * slot), statistics, barrier);
  }

  /// Writes a lane's columns of a row, if they exist; returns whether all are finite. Called by the whole warp.
  __device__ __forceinline__ static bool write_columns(const Rows& out, const Row& place, int column,
                                                       const ptx::Vector<float, lane_columns>& total, float factor) {
    if constexpr (lane_columns == 4) {
      return column >= config.head_dim_v || out.write_four(place, column, total, factor);
    } else {
      const float value = factor == 0 ? 0 : total[0] * factor, next = ptx::shuffle_xor(value, 1), check = value * 0;
      if (column < config.head_dim_v && out.lane % 2 == 0)
        ptx::store_global(reinterpret_cast<unsigned*>(out.output(place) + column), ptx::pack<features.dtype>(value, next));
      return check == check;
    }
  }

  /// Merges the pieces that this block has received.
  __device__ __forceinline__ static void merge_received(const Rows& out, const float* received) {
    ptx::path<"decode/sm90 merged in a cluster">();
    const Share share = share_of(out.item);
    const int pieces = out.num_rows() * row_pieces;
    int piece = share.rank + (out.warp << share.shift);
    if (share.rank >> share.shift != 0 || piece >= pieces) return;
    ptx::cluster_mbarrier_wait(out.storage.mailbox.received, 0);
    const unsigned from = ptx::shared_address(received);
#pragma unroll 1
    for (; piece < pieces; piece += warps << share.shift) {
      const int row = piece / row_pieces, slot = share.slot_of(piece, 0);
      Pair own{{-tile::infinity, 0}};  // statistics of this lane's part
      const int part = out.lane % part_lanes;
      if (part < share.parts) own = ptx::load_shared<Pair>(from + 4 * (statistics_offset + 2 * (slot + part)));
      float max = own[0];
#pragma unroll
      for (int step = 1; step < part_lanes; step *= 2) max = ptx::max(max, ptx::shuffle_xor(max, step));
      const float own_factor = ptx::exp2(own[0] - (max == -tile::infinity ? 0 : max));
      float sum = own[1] * own_factor;
#pragma unroll
      for (int step = 1; step < part_lanes; step *= 2) sum += ptx::shuffle_xor(sum, step);
      float lse;
      const Row place = out.row_of(row);
      const float factor = out.finish_row(place, max, sum, lse);
      if (piece % row_pieces == 0 && out.lane == 0) out.write_lse(place, lse);
      bool finite = true;
#pragma unroll 1
      for (int begin = lane_columns * out.lane; begin < piece_columns; begin += 32 * lane_columns) {
        using Columns = ptx::Vector<float, lane_columns>;
        Columns total{};
#pragma unroll
        for (int x = 0; x < blocks; ++x) {
          const float part_factor = ptx::shuffle(own_factor, x);
          if (x >= share.parts) continue;
          const auto value = ptx::load_shared<Columns>(from + 4 * ((slot + x) * piece_columns + begin));
#pragma unroll
          for (int c = 0; c < lane_columns; ++c) total[c] = ptx::fma(part_factor, value[c], total[c]);
        }
        finite = write_columns(out, place, piece % row_pieces * 32 + begin, total, factor) && finite;
      }
      if constexpr (repairs_rows) {
        if (ptx::any(!finite)) out.repair(place, lse);
      }
    }
  }
};

}  // namespace flash_attention::decode
