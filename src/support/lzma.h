#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace flash_attention::support {

/// The content of a file in the .lzma format (LZMA_alone, `xz --format=lzma`); nothing if it is damaged or would exceed
/// `limit` bytes. Not every damage is detected: if that matters, keep a hash of the content.
std::optional<std::string> decompress_lzma(std::string_view bytes, std::size_t limit);

}  // namespace flash_attention::support
