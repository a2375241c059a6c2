#pragma once

// The element types of tensors. Each is a type that loads and stores a vector of elements as float, and defines how the
// product of multiply.h reads one.

#include "cpu/call.h"

namespace flash_attention::cpu {
namespace {

/// A product whose left side is float.
struct FloatProduct {
  using Left = float;
  static FLASH_ATTENTION_INLINE Vec multiply_add(Vec sum, Vec a, Vec b) { return fma(a, b, sum); }
};

struct Float32 : FloatProduct {
  using Stored = float;
  static FLASH_ATTENTION_INLINE Vec to_float(Vec x) { return x; }
  static FLASH_ATTENTION_INLINE Vec from_float(Vec x) { return x; }
  static FLASH_ATTENTION_INLINE Vec load(const Stored* from) { return cpu::load(from); }
};

struct Float16 : FloatProduct {
  using Stored = std::uint16_t;
  static FLASH_ATTENTION_INLINE Vec to_float(Short x) { return float16_to_float(x); }
  static FLASH_ATTENTION_INLINE Short from_float(Vec x) { return float_to_float16(x); }
  static FLASH_ATTENTION_INLINE Vec load(const Stored* from) { return to_float(cpu::load(from)); }
};

struct Bfloat16 : FloatProduct {
  using Stored = std::uint16_t;
  static FLASH_ATTENTION_INLINE Vec to_float(Short x) { return bfloat16_to_float(x); }
  static FLASH_ATTENTION_INLINE Short from_float(Vec x) { return float_to_bfloat16(x); }
  static FLASH_ATTENTION_INLINE Vec load(const Stored* from) { return to_float(cpu::load(from)); }
};

/// Calls use(T{}) with the type of a bias's elements.
template <class Use>
FLASH_ATTENTION_INLINE void with_any_element(Dtype element, Use use) {
  switch (element) {
    case Dtype::float32:
      return use(Float32{});
    case Dtype::float16:
      return use(Float16{});
    case Dtype::bfloat16:
      return use(Bfloat16{});
    default:  // bytes, and the codes of narrow.h
      return;
  }
}

/// Calls use(T{}) with the type of a tensor's elements. In an object for one type it is that type.
template <class Use>
FLASH_ATTENTION_INLINE void with_element(Dtype element, Use use) {
  if constexpr (only_bfloat16) {
    use(Bfloat16{});
  } else {
    with_any_element(element, use);
  }
}

/// Codes of 8 or 4 bits.
constexpr bool is_narrow(Dtype element) { return element > Dtype::bfloat16; }
constexpr int bytes_of(Dtype element) {
  return element == Dtype::float32 ? 4 : is_narrow(element) ? 1 : 2;
}

/// The first `count` elements, then 0; a whole vector if count is large enough.
template <class T>
FLASH_ATTENTION_INLINE Vec load_some(const typename T::Stored* from, int count) {
  return count >= vector_lanes ? T::load(from) : T::to_float(load_first(from, count));
}

template <class T>
FLASH_ATTENTION_INLINE void store_some(typename T::Stored* to, Vec x, int count) {
  if (count >= vector_lanes) {
    store(to, T::from_float(x));
  } else {
    store_first(to, T::from_float(x), count);
  }
}

}  // namespace
}  // namespace flash_attention::cpu
