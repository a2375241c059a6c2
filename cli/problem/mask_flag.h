#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "flash_attention/problem.h"

namespace flash_attention::cli {

/// A mask that a flag can name: --mask documents:512.
struct MaskFlag {
  std::string_view kind;
  std::vector<std::int64_t> numbers;

  /// The same as Problem::program.
  std::string program() const;
  std::string to_text() const;  ///< as the flag takes it
  bool shows(std::int64_t i, std::int64_t j) const;
};

/// From "kind:number,number"; refuses unknown kinds.
MaskFlag mask_from(std::string_view text);

/// The mask whose program a problem has; nothing if it has another program, or none.
std::optional<MaskFlag> mask_of(const Problem& problem);

/// Which part of the pairs that window, causal and chunks leave a mask shows, counted on at most 512 queries.
double visible_share(const Problem& problem);

}  // namespace flash_attention::cli
