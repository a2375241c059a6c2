#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace flash_attention::support {

/// What a file in the .lzma format (LZMA_alone, `xz --format=lzma`) holds; nothing where it is damaged or would be larger
/// than `limit` bytes. Not every damage is seen: who needs that keeps a hash of the content.
std::optional<std::string> decompress_lzma(std::string_view bytes, std::size_t limit);

}  // namespace flash_attention::support
