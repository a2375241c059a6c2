#include "plan/request.h"

#include <charconv>

#include "flash_attention/error.h"

namespace flash_attention::plan {

Request parse_request(std::string_view text) {
  const std::size_t mark = text.find('@');
  if (mark == std::string_view::npos) return {text, std::nullopt};
  const char* const end = text.data() + text.size();
  TileSize tile;
  const auto [middle, first] = std::from_chars(text.data() + mark + 1, end, tile.block_q);
  if (first == std::errc() && middle != end && *middle == 'x') {
    const auto [last, second] = std::from_chars(middle + 1, end, tile.block_kv);
    if (second == std::errc() && last == end && tile.block_q > 0 && tile.block_kv > 0) return {text.substr(0, mark), tile};
  }
  throw Error(ErrorCode::invalid_argument,
              "tile: got '" + std::string(text.substr(mark + 1)) + "', allowed: queries and keys, such as 128x64");
}

}  // namespace flash_attention::plan
