#pragma once

// The places of tensor maps in AttentionArgs::maps. The planner describes the maps (src/plan/tensor_maps.h), a launch
// fills in addresses, and the kernel reads them by these names. Plain data: no includes, the same on host and device.

namespace flash_attention::abi {

/// Each map is [head_dim, rows, heads, batch] with boxes of 64 columns (128 bytes). With pages the maps of K and V are
/// [head_dim, page_size, heads, pages]. V of wide heads is [64, rows, head_dim / 64, heads, batch] if possible. The
/// bias is [seq_kv, seq_q, heads or 1, batch or 1] with boxes of 64 queries and 64 keys, or all keys of a block. If the
/// heads of a query are stacked, Q and O are [head_dim, group, heads_kv, rows, batch] with boxes of 64 rows of the stack.
namespace forward_sm90_maps {
enum Map : int { map_Q = 0, map_K = 1, map_V = 2, map_O = 3, map_bias = 4 };
}

/// Q and K in boxes of 128 columns, V^T of v_chunk keys and all columns, O of 64 columns.
namespace forward_sm90_fp8_maps {
enum Map : int { map_Q = 0, map_K = 1, map_V = 2, map_O = 3, map_bias = 4 };
}

/// Each map is [head_dim, rows, heads, batch] with boxes of 64 rows of 64 columns (128 bytes). Heads wider than 256
/// have additional maps with boxes of few rows: all columns if they are whole chunks of 64, otherwise 64. The map of
/// biases is [seq_kv, seq_q, heads or 1, batch or 1], in boxes of 64 queries and 64 keys.
namespace backward_sm90_maps {
enum Map : int {
  map_Q = 0,
  map_K = 1,
  map_V = 2,
  map_dO = 3,
  map_rows_of_Q = 4,
  map_rows_of_K = 5,
  map_rows_of_dO = 6,
  map_bias = 7
};
}

/// Rows of sequences, or of pages. Elements of 8 bits are counted in pairs.
namespace decode_sm90_maps {
enum Map : int { decode_map_K = 0, decode_map_V = 1 };
}

/// The values are [64, rows, 8, heads, batch or pages] in boxes of 4 panels of a KV block. The key's own columns are
/// [64, rows, heads, batch or pages].
namespace mla_maps {
enum Map : int { map_values = 0, map_own = 1 };
}

}  // namespace flash_attention::abi
