#pragma once

// The rows of K or V of a tile for decode.h: in place, in a run for each page, or copied together.

#include "cpu/decode/decode_products.h"
#include "cpu/tile/hidden.h"
#include "cpu/tile/narrow.h"

namespace flash_attention::cpu {
namespace {

/// visit(first, row, count) for the keys of a tile that are one stride apart.
template <class Visit>
FLASH_ATTENTION_INLINE void for_runs_in_memory(const Call& call, const RowBlock& block, const Tile& tile,
                                               const TensorView& tensor, Visit visit) {
  for (int first = 0; first < tile.count;) {
    const std::int64_t j = tile.begin + first, together = block.keys_together(call, j);
    const int count = static_cast<int>(smaller<std::int64_t>(tile.count - first, together));
    visit(first, block.key_row(call, tensor, j), count);
    first += count;
  }
}

/// Converts rows of codes to rows of T, one after another.
template <class T>
inline KeyRows<T> converted_rows(const Call& call, const RowBlock& block, const Tile& tile, const TensorView& tensor,
                                 int columns, float* buffer) {
  auto* converted = reinterpret_cast<typename T::Stored*>(buffer);
  if (call.kv_group != 0) {
    for (int key = 0; key < tile.count; ++key)
      convert_key<T>(call, block, tensor, tile.begin + key, columns, converted + key * columns);
    return {converted, columns};
  }
  for_runs_in_memory(call, block, tile, tensor, [&](int first, const char* row, int count) {
    const auto* codes = reinterpret_cast<const std::uint8_t*>(row);
    auto* to = converted + first * columns;
    if constexpr (only_bfloat16) {
      if (columns % 32 == 0) {
        return codes_to_bfloat16(call.kv_dtype, codes, tensor.seq_stride, count, columns, to);
      }
    }
    for (int key = 0; key < count; ++key)
      convert_codes<T>(call.kv_dtype, codes + key * tensor.seq_stride, columns, to + key * columns);
  });
  return {converted, columns};
}

/// Calls visit(first, rows, count) for the rows of a tile: all of them, or those of each page if it has a multiple of
/// 16 keys. Rows of smaller pages are copied together.
template <class T, class Visit>
FLASH_ATTENTION_INLINE void for_key_runs(const Call& call, const RowBlock& block, const Tile& tile,
                                         const TensorView& tensor, int columns, float* buffer, Visit visit) {
  using Stored = typename T::Stored;
  if constexpr (sizeof(Stored) > 1) {
    if (is_narrow(call.kv_dtype)) {
      return visit(0, converted_rows<T>(call, block, tile, tensor, columns, buffer), tile.count);
    }
  }
  auto* copy = reinterpret_cast<Stored*>(buffer);
  const bool together = block.keys_together(call, tile.begin) >= tile.count;
  const bool copies = !together && call.page_size % 16 != 0;
  for_runs_in_memory(call, block, tile, tensor, [&](int first, const char* row, int count) {
    const auto* rows = reinterpret_cast<const Stored*>(row);
    if (!copies) return visit(first, KeyRows<T>{rows, tensor.seq_stride}, count);
    for (int key = 0; key < count; ++key)
      __builtin_memcpy(copy + (first + key) * columns, rows + key * tensor.seq_stride, columns * sizeof(Stored));
  });
  if (copies) visit(0, KeyRows<T>{copy, columns}, tile.count);
}

}  // namespace
}  // namespace flash_attention::cpu
