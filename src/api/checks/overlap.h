#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "flash_attention/problem.h"

namespace flash_attention::api {

/// The memory of a strided tensor. A null pointer or an empty axis occupies nothing.
struct Extent {
  const char* name;
  const char* data;
  std::int64_t element_bytes;
  std::array<std::int64_t, 4> sizes;
  std::array<std::int64_t, 4> strides;  // elements
};

struct ByteRange {
  std::intptr_t first, last;  // last is one past the end
};

/// Whether some element of one is also an element of the other. Exact for tensors that interleave in one buffer with
/// the same strides, of any sign (q, k and v of one packed projection). Tensors whose ranges cross in any other way
/// count as overlapping.
bool overlaps(const Extent& a, const Extent& b);

/// Refuses an output whose own elements share memory, since they would be written twice.
void refuse_self_overlap(const char* argument, const Strides& strides, std::int64_t batch, std::int64_t seq,
                         std::int64_t heads, std::int64_t dim);

/// The memory that a call writes and reads. Every call checks it. Most arguments are null and hardly any two are close,
/// so each range is computed once, and a null pointer costs one comparison.
class Memory {
 public:
  /// all outputs come before the first input
  void output(const Extent& extent) { add(extent), num_outputs_ = count_; }
  void input(const Extent& extent) { add(extent); }

  /// Refuses outputs that share memory with an input or with another output.
  void refuse_overlap() const;

 private:
  void add(const Extent& extent);

  std::size_t count_ = 0, num_outputs_ = 0;
  std::array<ByteRange, 48> ranges_;  // outputs, then inputs
  std::array<Extent, 48> extents_;
};

void refuse_overlap(std::initializer_list<Extent> outputs, std::initializer_list<Extent> inputs);

}  // namespace flash_attention::api
