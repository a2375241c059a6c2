#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace flash_attention::plan {

/// Queries and keys of a tile.
struct TileSize {
  int block_q = 0;
  int block_kv = 0;
};

/// What Options::kernel asks for: "NAME", "NAME@QxKV" or "@QxKV", a tile of Q queries and KV keys for an experiment.
struct Request {
  std::string_view kernel;  // empty: the planner's choice
  std::optional<TileSize> tile;
};

/// Throws Error(invalid_argument) for a tile that is none.
Request parse_request(std::string_view text);

}  // namespace flash_attention::plan
