// LZMA: a stream of bits, each with a probability that depends on the bits before it (a range coder). The bits decode
// to single bytes, and to copies of earlier bytes.
#include "support/lzma.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace flash_attention::support {
namespace {

using Probability = std::uint16_t;  // that a bit is 0, in 2048ths
constexpr Probability even = 1024;
constexpr std::size_t header_bytes = 13;  // properties, size of the dictionary, size of the content
constexpr std::uint64_t unknown_size = ~std::uint64_t{0};

class RangeDecoder {
 public:
  explicit RangeDecoder(std::string_view bytes) : bytes_(bytes) {
    next();  // always 0
    for (int i = 0; i < 4; ++i) code_ = code_ << 8 | next();
  }

  unsigned bit(Probability& probability) {
    const std::uint32_t bound = (range_ >> 11) * probability;
    const bool one = code_ >= bound;
    if (one) {
      code_ -= bound, range_ -= bound;
      probability = static_cast<Probability>(probability - (probability >> 5));
    } else {
      range_ = bound;
      probability = static_cast<Probability>(probability + ((2048 - probability) >> 5));
    }
    normalise();
    return one;
  }

  /// Reads `count` bits that are 0 or 1 with equal probability.
  std::uint32_t direct(int count) {
    std::uint32_t result = 0;
    for (; count > 0; --count) {
      range_ >>= 1;
      const bool one = code_ >= range_;
      if (one) code_ -= range_;
      result = result << 1 | one;
      normalise();
    }
    return result;
  }

  /// Reads a number of `count` bits, the highest first. Each bit's probability depends on the bits before it.
  unsigned tree(Probability* probabilities, int count) {
    unsigned node = 1;
    for (int i = 0; i < count; ++i) node = node << 1 | bit(probabilities[node]);
    return node - (1u << count);
  }

  /// The same, the lowest first.
  unsigned reverse_tree(Probability* probabilities, int count) {
    unsigned node = 1, result = 0;
    for (int i = 0; i < count; ++i) {
      const unsigned next = bit(probabilities[node]);
      node = node << 1 | next;
      result |= next << i;
    }
    return result;
  }

  bool overrun() const { return overrun_; }

 private:
  void normalise() {
    if (range_ < 1u << 24) range_ <<= 8, code_ = code_ << 8 | next();
  }
  std::uint32_t next() {
    if (place_ < bytes_.size()) return static_cast<unsigned char>(bytes_[place_++]);
    overrun_ = true;
    return 0;
  }

  std::string_view bytes_;
  std::size_t place_ = 0;
  std::uint32_t range_ = 0xFFFFFFFF, code_ = 0;
  bool overrun_ = false;
};

template <std::size_t size>
struct Probabilities : std::array<Probability, size> {
  Probabilities() { this->fill(even); }
};

/// The length of a copy, 2 or more.
struct Lengths {
  Probabilities<2> choice;
  std::array<Probabilities<8>, 16> low, middle;
  Probabilities<256> high;

  unsigned decode(RangeDecoder& range, unsigned aligned) {
    if (range.bit(choice[0]) == 0) return 2 + range.tree(low[aligned].data(), 3);
    if (range.bit(choice[1]) == 0) return 10 + range.tree(middle[aligned].data(), 3);
    return 18 + range.tree(high.data(), 8);
  }
};

class Decoder {
 public:
  Decoder(std::string_view stream, unsigned literal_context, unsigned literal_place, unsigned place_bits)
      : range_(stream),
        literal_context_(literal_context),
        literal_mask_((1u << literal_place) - 1),
        place_mask_((1u << place_bits) - 1),
        literals_(std::size_t{0x300} << (literal_context + literal_place), even) {}

  /// Decodes up to `size` bytes, or up to the end mark if the size is unknown. Returns false if the data is wrong.
  bool decode(std::string& out, std::uint64_t size, std::size_t limit) {
    while (out.size() != size) {
      if (range_.overrun() || out.size() > limit) return false;
      const unsigned aligned = out.size() & place_mask_;
      if (range_.bit(is_match_[state_][aligned]) == 0) {
        add_literal(out);
        continue;
      }
      if (range_.bit(is_repeated_[state_]) == 0) {
        const unsigned length = lengths_.decode(range_, aligned);
        const std::uint32_t distance = new_distance(length);
        if (distance == 0xFFFFFFFF) return size == unknown_size && !range_.overrun();  // the mark of the end
        distances_ = {distance, distances_[0], distances_[1], distances_[2]};
        state_ = state_ < 7 ? 7 : 10;
        if (!copy(out, length, size)) return false;
      } else if (!repeat(out, aligned, size)) {
        return false;
      }
    }
    return !range_.overrun();
  }

 private:
  void add_literal(std::string& out) {
    const unsigned before = out.empty() ? 0 : static_cast<unsigned char>(out.back());
    const std::size_t context = ((out.size() & literal_mask_) << literal_context_) + (before >> (8 - literal_context_));
    Probability* const probabilities = literals_.data() + 0x300 * context;
    unsigned symbol = 1;
    // after a copy, the byte that would have been copied next helps to predict this one
    if (state_ >= 7 && distances_[0] < out.size()) {
      unsigned other = static_cast<unsigned char>(out[out.size() - distances_[0] - 1]);
      while (symbol < 0x100) {
        const unsigned other_bit = other >> 7 & 1;
        other <<= 1;
        const unsigned bit = range_.bit(probabilities[((1 + other_bit) << 8) + symbol]);
        symbol = symbol << 1 | bit;
        if (bit != other_bit) break;
      }
    }
    while (symbol < 0x100) symbol = symbol << 1 | range_.bit(probabilities[symbol]);
    out.push_back(static_cast<char>(symbol & 0xFF));
    state_ = state_ < 4 ? 0 : state_ < 10 ? state_ - 3 : state_ - 6;
  }

  std::uint32_t new_distance(unsigned length) {
    const unsigned slot = range_.tree(slots_[std::min(length - 2, 3u)].data(), 6);
    if (slot < 4) return slot;
    const int bits = static_cast<int>(slot / 2) - 1;
    const std::uint32_t base = (2 | (slot & 1)) << bits;
    if (slot < 14) return base + range_.reverse_tree(middle_distances_.data() + base - slot, bits);
    const std::uint32_t high = range_.direct(bits - 4) << 4;
    return base + high + range_.reverse_tree(low_distances_.data(), 4);
  }

  /// A copy from one of the last four distances.
  bool repeat(std::string& out, unsigned aligned, std::uint64_t size) {
    if (range_.bit(is_first_[state_]) == 0) {
      if (range_.bit(is_long_[state_][aligned]) == 0) {
        state_ = state_ < 7 ? 9 : 11;
        return copy(out, 1, size);
      }
    } else {
      const unsigned which = range_.bit(is_second_[state_]) == 0 ? 1 : 2 + range_.bit(is_third_[state_]);
      std::rotate(distances_.begin(), distances_.begin() + which, distances_.begin() + which + 1);
    }
    state_ = state_ < 7 ? 8 : 11;
    return copy(out, repeated_lengths_.decode(range_, aligned), size);
  }

  bool copy(std::string& out, unsigned length, std::uint64_t size) {
    const std::size_t distance = std::size_t{distances_[0]} + 1;
    if (distance > out.size() || length > size - out.size()) return false;
    const std::size_t from = out.size() - distance;
    if (distance >= length) {
      out.append(out, from, length);
    } else {  // it copies bytes that it has just written
      for (std::size_t i = 0; i < length; ++i) out.push_back(out[from + i]);
    }
    return true;
  }

  RangeDecoder range_;
  unsigned literal_context_, literal_mask_, place_mask_;
  unsigned state_ = 0;  // the kinds of the last few symbols: bytes, copies, copies from an earlier distance
  std::array<std::uint32_t, 4> distances_{};
  std::vector<Probability> literals_;
  std::array<Probabilities<16>, 12> is_match_, is_long_;
  Probabilities<12> is_repeated_, is_first_, is_second_, is_third_;
  std::array<Probabilities<64>, 4> slots_;
  Probabilities<115> middle_distances_;
  Probabilities<16> low_distances_;
  Lengths lengths_, repeated_lengths_;
};

}  // namespace

std::optional<std::string> decompress_lzma(std::string_view bytes, std::size_t limit) {
  if (bytes.size() < header_bytes + 5) return std::nullopt;
  const auto byte = [&](std::size_t i) { return std::uint64_t{static_cast<unsigned char>(bytes[i])}; };
  const unsigned properties = static_cast<unsigned>(byte(0));  // (place bits * 5 + literal place) * 9 + literal context
  if (properties >= 9 * 5 * 5) return std::nullopt;
  std::uint64_t size = 0;
  for (std::size_t i = 0; i < 8; ++i) size |= byte(5 + i) << 8 * i;
  if (size != unknown_size && size > limit) return std::nullopt;
  std::string out;
  if (size != unknown_size) out.reserve(size);
  Decoder decoder(bytes.substr(header_bytes), properties % 9, properties / 9 % 5, properties / 45);
  return decoder.decode(out, size, limit) ? std::optional(std::move(out)) : std::nullopt;
}

}  // namespace flash_attention::support
