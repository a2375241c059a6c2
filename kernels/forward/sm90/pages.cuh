#pragma once

// K and V out of pages by TMA. A box is `page_rows` keys, as many as never cross the end of a page: the largest number that
// divides the page and the block of keys. Its last coordinate is the page, which the table gives.

#include "forward/sm90/shape.cuh"
#include "ptx/tma.cuh"
#include "tile/score.cuh"

namespace flash_attention::forward_sm90 {

template <ForwardConfig config>
struct PagedBlock {
  using S = Shape<config>;
  static constexpr int rows = config.page_rows, boxes = S::block_kv / rows;
  // K and V have the same pages: they are looked up once, if there are registers for them.
  static constexpr bool holds_pages = boxes <= (S::load_registers < 40 ? 4 : 8);
  // A box begins where the swizzle does: at a multiple of 8 rows of 128 bytes.
  static_assert(rows % 8 == 0 && S::block_kv % rows == 0);

  const AttentionArgs& args;
  const int* entry;  // of the first box
  int row;           // of its page
  int kv_head;
  int first, end;  // the boxes of which a query of the tile sees some key
  int pages[holds_pages ? boxes : 1];

  __device__ __forceinline__ PagedBlock(const AttentionArgs& arguments, const Tile& tile, int block)
      : args(arguments), kv_head(tile.head_idx / arguments.group) {
    const tile::Score<config.features> score(args, tile.sequence, tile.head_idx);
    const tile::KeyRange seen = score.keys_of_any(tile.q_begin, tile.q_begin + config.block_q);
    const int kv_begin = block * S::block_kv, page = kv_begin / args.page_size;
    entry = args.page_table + tile.sequence.batch_idx * args.page_table_stride + page;
    row = kv_begin - page * args.page_size;
    first = (seen.begin - kv_begin) / rows;  // rounded towards 0 where it is negative
    end = tile::ceil_div(seen.end - kv_begin, rows);
    if constexpr (holds_pages) {
      for_boxes([&](int box, int /*row*/, const int* its_entry) { pages[box] = page_of(box, its_entry); });
    }
  }

  /// All boxes of a block of K or V; `chunks` of 64 columns, S::block_kv rows each.
  template <int chunks>
  __device__ __forceinline__ void load(typename S::Element* to, const TensorMap& map, ptx::Mbarrier& full) const {
    for_boxes([&](int box, int its_row, const int* its_entry) {
      const int page = holds_pages ? pages[box] : page_of(box, its_entry);
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        ptx::tma_load_4d(to + (c * S::block_kv + box * rows) * chunk_dim, map, full, c * chunk_dim, its_row, kv_head, page);
      }
    });
  }

 private:
  /// A box of which no query sees a key has no page, its entry of the table may be anything: TMA fills what is outside of
  /// the tensor with zeros.
  __device__ __forceinline__ int page_of(int box, const int* its_entry) const {
    return box >= first && box < end ? *its_entry : -1;
  }

  template <typename Visit>
  __device__ __forceinline__ void for_boxes(const Visit& visit) const {
    int its_row = row;
    const int* its_entry = entry;
#pragma unroll(holds_pages ? boxes : 2)
    for (int box = 0; box < boxes; ++box) {
      visit(box, its_row, its_entry);
      its_row += rows;
      const bool next = its_row >= args.page_size;
      its_entry += next ? 1 : 0;
      its_row = next ? 0 : its_row;
    }
  }
};

}  // namespace flash_attention::forward_sm90
