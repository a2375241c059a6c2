#pragma once

/// CUDA's float4. A copy is one access of 16 bytes, as on a GPU. By default the host's compiler would make four.
struct alignas(16) float4 {
  using Bits [[gnu::vector_size(16), gnu::may_alias]] = float;

  float x, y, z, w;

  float4() = default;
  float4(float x, float y, float z, float w) : x(x), y(y), z(z), w(w) {}
  [[gnu::always_inline]] float4(const float4& other) { *this = other; }
  [[gnu::always_inline]] float4& operator=(const float4& other) {
    *reinterpret_cast<Bits*>(this) = *reinterpret_cast<const Bits*>(&other);
    return *this;
  }
};

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
