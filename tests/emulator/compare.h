#pragma once

#include <gtest/gtest.h>

#include <cmath>

#include "emulator/wrapper_case.h"

namespace flash_attention::testing {

/// The output of a case, bit for bit or as floats within its tolerance.
inline void expect_output(const WrapperCase& c, const Bytes& got) {
  ASSERT_EQ(got.size(), c.expected.size());
  if (c.tolerance == 0) {
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (got[i] == c.expected[i]) continue;
      std::uint32_t have = 0, want = 0;
      const std::size_t word = i / 4 * 4, bytes = std::min<std::size_t>(4, got.size() - word);
      std::memcpy(&have, got.data() + word, bytes);
      std::memcpy(&want, c.expected.data() + word, bytes);
      FAIL() << "byte " << i << ": word " << word / 4 << " is " << std::hex << have << ", not " << want << std::dec
             << " (as floats " << std::bit_cast<float>(have) << ", not " << std::bit_cast<float>(want) << ")";
    }
    return;
  }
  for (std::size_t i = 0; i < got.size(); i += 4) {
    float have, want;
    std::memcpy(&have, got.data() + i, 4);
    std::memcpy(&want, c.expected.data() + i, 4);
    ASSERT_LE(std::fabs(have - want), c.tolerance * std::fabs(want))
        << "float " << i / 4 << ": " << have << ", not " << want;
  }
}

}  // namespace flash_attention::testing
