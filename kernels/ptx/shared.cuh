#pragma once

// The shared memory of a block, and its addresses in PTX.

namespace flash_attention::ptx {

/// The block's dynamic shared memory as one struct; sizeof(Storage) is the launch's shared size.
template <typename Storage>
__device__ __forceinline__ Storage& shared_storage() {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  return *reinterpret_cast<Storage*>(shared_bytes);
}

/// A pointer into shared memory as the 32-bit address that instructions take (PTX ISA 9.7.9.20, cvta).
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

}  // namespace flash_attention::ptx
