#pragma once

#include <bit>
#include <cstdint>

#include "emulator/runtime/interface.h"
#include "support/half.h"
#include "support/narrow.h"

namespace flash_attention::emulator {

using support::float_of_bf16;
using support::float_of_fp16;

inline float float_of(MatrixType type, std::uint16_t bits) {
  return type == MatrixType::float16 ? float_of_fp16(bits) : float_of_bf16(bits);
}

constexpr bool is_8_bit(MatrixType type) { return type == MatrixType::e4m3 || type == MatrixType::e5m2; }

inline float float_of_code(MatrixType type, std::uint8_t code) {
  return type == MatrixType::e4m3 ? support::float_of_e4m3(code) : support::float_of_e5m2(code);
}

/// The tensor cores read 10 mantissa bits of a tf32 operand.
inline float float_of_tf32(std::uint32_t bits) { return std::bit_cast<float>(bits & 0xffffe000u); }

}  // namespace flash_attention::emulator
