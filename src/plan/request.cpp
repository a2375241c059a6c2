#include "plan/request.h"

#include "flash_attention/error.h"
#include "plan/features.h"

namespace flash_attention::plan {
namespace {

std::string describe(const TileSize& tile) {
  return "tile: got (" + std::to_string(tile.block_q) + ", " + std::to_string(tile.block_kv) + "), ";
}

}  // namespace

Request make_request(const Problem& problem, const DeviceInfo& device, std::optional<TileSize> tile,
                     std::optional<BackwardPart> part) {
  if (tile && (tile->block_q <= 0 || tile->block_kv <= 0)) {
    throw Error(ErrorCode::invalid_argument, describe(*tile) + "allowed: queries and keys, such as (128, 64)");
  }
  if (part && (part->rows < 0 || part->first < 0 || part->number < 0)) {
    throw Error(ErrorCode::invalid_argument, "part: got negative rows, first row or number, allowed: 0 and more");
  }
  return {problem, device, features_of(problem), program_traits(problem), tile, part};
}

Refusal refuse_tile(const TileSize& tile, const std::string& reason) { return {describe(tile) + reason}; }

}  // namespace flash_attention::plan
