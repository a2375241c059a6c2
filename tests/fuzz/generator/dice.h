#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>

namespace flash_attention::fuzz {

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed) {}

  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(high - low + 1));
  }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[random_() % values.size()];
  }
  std::uint64_t word() { return random_(); }

 private:
  std::mt19937_64 random_;
};

}  // namespace flash_attention::fuzz
