#include "emulator/instructions/tensor_map.h"

#include <cstring>
#include <string>

#include "flash_attention/error.h"

namespace flash_attention::emulator {
namespace {

constexpr std::uint32_t magic = 0x544d4150;

void require(bool holds, const launch::TensorMapSpec& spec, const std::string& what) {
  if (!holds) throw Error(ErrorCode::internal, "tensor map " + std::to_string(spec.slot) + ": " + what);
}

}  // namespace

std::size_t TensorMapFields::box_bytes() const {
  std::size_t bytes = element_bytes;
  for (int i = 0; i < rank; ++i) bytes *= box[i];
  return bytes;
}

abi::TensorMap encode(const launch::TensorMapSpec& spec) {
  require(spec.rank >= 1 && spec.rank <= 5, spec, "the rank is " + std::to_string(spec.rank) + "; allowed are 1 to 5");
  require(reinterpret_cast<std::uintptr_t>(spec.data) % 16 == 0, spec, "the address is not a multiple of 16");
  TensorMapFields fields{};
  fields.magic = magic;
  fields.rank = static_cast<std::uint8_t>(spec.rank);
  fields.element_bytes = static_cast<std::uint8_t>(size_of(spec.dtype));
  fields.swizzle_bytes = static_cast<std::uint8_t>(spec.swizzle_bytes);
  fields.data = static_cast<unsigned char*>(const_cast<void*>(spec.data));
  for (int i = 0; i < spec.rank; ++i) {
    require(spec.sizes[i] >= 1 && spec.sizes[i] <= (std::uint64_t{1} << 32), spec, "size " + std::to_string(spec.sizes[i]));
    require(spec.box[i] >= 1 && spec.box[i] <= 256, spec,
            "a box of " + std::to_string(spec.box[i]) + "; allowed are 1 to 256");
    fields.sizes[i] = spec.sizes[i];
    fields.box[i] = spec.box[i];
  }
  for (int i = 0; i + 1 < spec.rank; ++i) {
    require(spec.strides_bytes[i] % 16 == 0 && spec.strides_bytes[i] < (std::uint64_t{1} << 40), spec,
            "a stride of " + std::to_string(spec.strides_bytes[i]) + " bytes; allowed are multiples of 16 below 2^40");
    fields.strides[i] = spec.strides_bytes[i];
  }
  const std::size_t inner = fields.box[0] * std::size_t{fields.element_bytes};
  require(inner % 16 == 0, spec, "the inner box is " + std::to_string(inner) + " bytes; allowed are multiples of 16");
  require(spec.swizzle_bytes == 0 || inner <= static_cast<std::size_t>(spec.swizzle_bytes), spec,
          "the inner box of " + std::to_string(inner) + " bytes is wider than the swizzle");
  abi::TensorMap map{};
  std::memcpy(&map, &fields, sizeof fields);
  return map;
}

bool decode(const void* map, TensorMapFields& fields) {
  std::memcpy(&fields, map, sizeof fields);
  return fields.magic == magic;
}

}  // namespace flash_attention::emulator
