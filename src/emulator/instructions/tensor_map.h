#pragma once

#include <cstddef>
#include <cstdint>

#include "abi/args.h"
#include "launch/tensor_maps.h"

namespace flash_attention::emulator {

/// The emulator's own form of a TMA descriptor, in the 128 bytes that the kernel receives.
struct TensorMapFields {
  std::uint32_t magic;
  std::uint8_t rank;
  std::uint8_t element_bytes;
  std::uint8_t swizzle_bytes;
  std::uint8_t unused;
  unsigned char* data;
  std::uint64_t sizes[5];    // elements, innermost first
  std::uint64_t strides[4];  // bytes
  std::uint32_t box[5];

  std::size_t box_bytes() const;
};
static_assert(sizeof(TensorMapFields) <= sizeof(abi::TensorMap));

/// Refuses what cuTensorMapEncodeTiled would refuse. Throws Error(internal).
abi::TensorMap encode(const launch::TensorMapSpec& spec);

/// The fields of an encoded map; false if the bytes are not one.
bool decode(const void* map, TensorMapFields& fields);

}  // namespace flash_attention::emulator
