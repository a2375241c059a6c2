#pragma once

#include <cstddef>
#include <cstdint>

namespace flash_attention::fuzz {

/// Decisions taken from a fuzzer's input, one after the other; zeros where it ends.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  std::uint8_t byte() { return position_ < size_ ? data_[position_++] : 0; }
  bool flip() { return (byte() & 1) != 0; }
  bool rarely() { return byte() < 32; }      // one in eight
  bool very_rarely() { return byte() < 6; }  // one in forty
  std::int64_t below(std::int64_t count) { return (byte() * 256 + byte()) % count; }
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }

  std::int64_t word() {
    std::uint64_t value = 0;
    for (int n = 0; n < 8; ++n) value = value << 8 | byte();
    return static_cast<std::int64_t>(value);
  }

  /// Mostly small numbers, sometimes the ones that break arithmetic.
  std::int64_t wild() {
    switch (byte() % 8) {
      case 0:
        return -1;
      case 1:
        return 0;
      case 2:
        return std::int64_t{1} << (byte() % 63);
      case 3:
        return word();
      case 4:
        return -word() / 2;
      default:
        return byte();
    }
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t position_ = 0;
};

}  // namespace flash_attention::fuzz
