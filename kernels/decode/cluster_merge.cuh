#pragma once

#include "decode/merge.cuh"
#include "ptx/bits.cuh"
#include "ptx/cluster.cuh"

// The end of an item that the blocks of a cluster share (config.item_blocks): each sends its part, by pieces, to the blocks
// that merge them, in the order of the keys. Nothing goes through memory but the result. The sums are those of
// decode/merge.cuh, bit for bit.
//
//   at the start:  mbarriers are initialised;  arrive at the cluster barrier
//   at the end:    tell the others that no tile of this block is read any more (parts come where tiles were, if there is
//                  no stage that none came to);  when all have said so: pieces of the part -> the shared memory of who
//                  merges them, counted there
//   each warp:     for its pieces, when all are there: max, sum of all parts, a part per lane;  O = sum over parts
//                  O / sum -> global
//
// No barrier of the cluster is waited for at the end, and nothing is released to it, which would wait for all of memory:
// the stores count themselves, and a block that has what is meant for it may end.

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
  static constexpr int part_lanes = blocks <= 4 ? 4 : blocks <= 8 ? 8 : 16;  // a part per lane, and again the same
  // A piece is 32 columns of a row. Where a block merges several rows it is a row, whose statistics are then merged once;
  // so is a row that may have to be repaired, which belongs to one warp.
  static constexpr int chunks = tile::ceil_div(config.head_dim_v, 32);
  static constexpr int row_pieces = repairs_rows || config.block_q >= 4 * blocks ? 1 : chunks;
  static constexpr int piece_columns = 32 * chunks / row_pieces;
  static constexpr int lane_columns = piece_columns % 128 == 0 ? 4 : 1;  // neighbours, that a lane merges at a time

  /// What a block is sent, where its tiles were: pieces of `parts` parts each, then their statistics.
  static constexpr int statistics_offset = 2 * (config.block_q * row_pieces + blocks) * piece_columns;  // in floats
  static constexpr int received_bytes = 4 * statistics_offset * (piece_columns + 2) / piece_columns;

  /// Who merges a piece: so many blocks, a power of two, take them in turn.
  struct Share {
    int parts;  // of the first blocks of the cluster
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

  /// At the start, by the warps that have a part.
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

  /// The others know that this warp's block has begun. That is all for those that have no part.
  __device__ __forceinline__ static void arrive() {
    if constexpr (in_cluster) {
      __syncwarp();  // lanes arrive together; not found by the emulator: its cluster barrier takes each thread
      ptx::cluster_arrive_relaxed();
    }
  }

  /// Whether no block of the cluster has so many tiles that it uses its last stage: parts may come there at any time.
  __device__ __forceinline__ static bool has_free_stage(const Item<config>& item) {
    if constexpr (received_bytes > DecodeLayout(config).stage_bytes) return false;
    return item.end_tile - item.first_tile <= blocks * (config.num_stages - 1);
  }

  /// After a barrier of the block's warps: none of them reads its tiles any more.
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

  /// Four columns of a row of this block's part, and the row's statistics with the first of a piece.
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

  /// A lane's columns of a row, if they exist; whether all are finite. By the whole warp.
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

  /// The pieces that this block has been sent.
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
      Pair own{{-tile::infinity, 0}};  // of this lane's part
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
