#include "plan/request.h"

#include <array>
#include <charconv>

#include "flash_attention/error.h"
#include "plan/features.h"

namespace flash_attention::plan {
namespace {

/// Numbers with these marks before each, and nothing else.
template <std::size_t count>
std::optional<std::array<int, count>> numbers(std::string_view text, const std::array<std::string_view, count>& marks) {
  std::array<int, count> found{};
  for (std::size_t i = 0; i < count; ++i) {
    if (!text.starts_with(marks[i])) return std::nullopt;
    text.remove_prefix(marks[i].size());
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), found[i]);
    if (error != std::errc() || found[i] < 0) return std::nullopt;
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  }
  return text.empty() ? std::optional(found) : std::nullopt;
}

std::optional<BackwardPart> parse_part(std::string_view text) {
  using Kind = BackwardPart::Kind;
  if (const auto found = numbers<1>(text, {"rows:"})) return BackwardPart{Kind::rows, (*found)[0]};
  if (const auto found = numbers<1>(text, {"dq:"})) return BackwardPart{Kind::dq, (*found)[0]};
  const auto found = numbers<3>(text, {"block:", "+", "/"});
  if (!found) return std::nullopt;
  return BackwardPart{Kind::block, (*found)[0], (*found)[1], (*found)[2]};
}

}  // namespace

NamedKernel parse_kernel(std::string_view text) {
  const std::size_t mark = text.find('@');
  if (mark == std::string_view::npos) return {text, std::nullopt, std::nullopt};
  const std::string_view kernel = text.substr(0, mark), asked = text.substr(mark + 1);
  if (const auto part = parse_part(asked)) return {kernel, std::nullopt, part};
  const auto tile = numbers<2>(asked, {"", "x"});
  if (tile && (*tile)[0] > 0 && (*tile)[1] > 0) return {kernel, TileSize{(*tile)[0], (*tile)[1]}, std::nullopt};
  throw Error(ErrorCode::invalid_argument,
              "tile: got '" + std::string(asked) + "', allowed: queries and keys, such as 128x64");
}

Request make_request(const Problem& problem, const DeviceInfo& device) {
  return {problem, device, features_of(problem), program_traits(problem), std::nullopt, std::nullopt};
}

Refusal refuse_tile(const TileSize& tile, const std::string& reason) {
  return {"tile: got (" + std::to_string(tile.block_q) + ", " + std::to_string(tile.block_kv) + "), " + reason};
}

}  // namespace flash_attention::plan
