#include "launch/tensor_maps.h"

#include <algorithm>

namespace flash_attention::launch {
namespace {

const void* address_of(const MapLayout& layout, const Buffers& b, const void* workspace) {
  switch (layout.source) {
    case MapSource::q:
      return b.q;
    case MapSource::k:
      return b.k;
    case MapSource::v:
      return b.v;
    case MapSource::out:
      return b.out;
    case MapSource::dout:
      return b.dout;
    case MapSource::bias:
      return b.bias;
    case MapSource::workspace:
      break;
  }
  return static_cast<const char*>(workspace) + layout.offset;
}

}  // namespace

TensorMaps tensor_maps(const Plan& plan, const Buffers& buffers, const void* workspace) {
  TensorMaps maps;
  for (const MapLayout& layout : plan.maps) {
    const void* const data = address_of(layout, buffers, workspace);
    // The kernel tests the address in the same way.
    if (layout.only_if_aligned && reinterpret_cast<std::uintptr_t>(data) % 16 != 0) continue;
    TensorMapSpec spec{.slot = layout.slot, .data = data, .dtype = layout.dtype, .rank = layout.rank};
    std::ranges::copy(layout.sizes, spec.sizes);
    std::ranges::copy(layout.strides_bytes, spec.strides_bytes);
    std::ranges::copy(layout.box, spec.box);
    spec.swizzle_bytes = layout.swizzle_bytes;
    maps.add(spec);
  }
  return maps;
}

}  // namespace flash_attention::launch
