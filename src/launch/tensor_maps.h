#pragma once

#include <array>

#include "flash_attention/attention.h"

namespace flash_attention::launch {

/// The tensor map for AttentionArgs::maps[slot]. The driver or the emulator encodes it.
struct TensorMapSpec {
  int slot = 0;
  const void* data = nullptr;
  Dtype dtype = Dtype::bfloat16;
  int rank = 0;
  std::uint64_t sizes[5] = {};          // elements, innermost first
  std::uint64_t strides_bytes[4] = {};  // of dimensions 1..rank-1
  std::uint32_t box[5] = {};
  int swizzle_bytes = 128;  // 0, 32, 64 or 128

  friend bool operator==(const TensorMapSpec&, const TensorMapSpec&) = default;
};

/// The maps of one call. They allocate nothing, because they are made for every launch.
struct TensorMaps {
  std::array<TensorMapSpec, 8> specs{};
  std::size_t count = 0;

  void add(const TensorMapSpec& spec) { specs[count++] = spec; }
  const TensorMapSpec* begin() const { return specs.data(); }
  const TensorMapSpec* end() const { return specs.data() + count; }
};

/// Plan::maps with the addresses of this call.
TensorMaps tensor_maps(const Plan& plan, const Buffers& buffers, const void* workspace);

}  // namespace flash_attention::launch
