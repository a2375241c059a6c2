#pragma once

#include <cstdlib>
#include <string_view>

namespace flash_attention::testing {

/// Whether the long tail runs, too: more seeds, every compile configuration (`make test ALL=1`). The default run must find
/// every kind of bug without it; the tail finds the rare ones of a kind.
inline bool with_long_tail() {
  const char* value = std::getenv("FLASH_ATTENTION_TEST_ALL");
  return value != nullptr && std::string_view(value) == "1";
}

}  // namespace flash_attention::testing
