#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace flash_attention::plan {

/// Queries and keys of a tile.
struct TileSize {
  int block_q = 0;
  int block_kv = 0;
};

/// A backward pass that is done block by block, with one sum of dQ over all blocks in the workspace that they share:
///
///     "@rows:R"        statistics of R rows, and their sums of dQ = 0
///     "@block:R+F/N"   dK and dV of one block, whose queries are rows F, F + 1, ... of the R, and its share of dQ; N is
///     the
///                      block's number, since blocks may run at once
///     "@dq:R"          dQ of the R rows, of which the problem has all
struct BackwardPart {
  enum class Kind : std::uint8_t { rows, block, dq } kind = Kind::rows;
  int rows = 0;
  int first = 0;
  int number = 0;
};

/// What Options::kernel asks for: "NAME", "NAME@QxKV" or "@QxKV", a tile of Q queries and KV keys for an experiment, or a
/// part of a backward pass.
struct Request {
  std::string_view kernel;  // empty: the planner's choice
  std::optional<TileSize> tile;
  std::optional<BackwardPart> part;
};

/// Throws Error(invalid_argument) for a tile or part that is none.
Request parse_request(std::string_view text);

}  // namespace flash_attention::plan
