#pragma once

#include "forward/sm80_paged_copy.cuh"
#include "tile/copy.cuh"

// Tiles of K and V for forward/sm80 by cp.async, from rows one stride apart or out of pages, into the one buffer that each
// has: K of a tile, its V, K of the next.

namespace flash_attention::sm80 {

/// The tile that begins at key kv_begin comes first. Only that one may miss rows at its end.
template <typename Kernel, bool paged>
struct KeyCopies {
  using Element = const typename Kernel::Element;

  const Kernel& kernel;
  tile::TileCopy<Kernel::threads, Kernel::head_dim, typename Kernel::KTile, Element> K;
  tile::TileCopy<Kernel::threads, Kernel::head_dim_v, typename Kernel::VTile, Element> V;

  __device__ __forceinline__ KeyCopies(const Kernel& attends, int kv_begin)
      : kernel(attends),
        K(attends.keys(attends.args.K).from(kv_begin), attends.thread),
        V(attends.keys(attends.args.V).from(kv_begin), attends.thread) {}

  template <bool some_missing>
  __device__ __forceinline__ void load_K() const {
    K.template start<some_missing>(kernel.K_smem, kernel.thread);
    ptx::copy_async_commit();
  }
  /// V of the tile whose K came last; the next tile is `distance` keys further on, at key `next`.
  __device__ __forceinline__ void load_V(int distance, int /*next*/) {
    V.template start<true>(kernel.V_smem, kernel.thread);
    ptx::copy_async_commit();
    V.move(distance);
  }
  __device__ __forceinline__ void move_K(int distance) { K.move(distance); }
};

template <typename Kernel>
struct KeyCopies<Kernel, true> {
  using Element = const typename Kernel::Element;

  const Kernel& kernel;
  PagedPlaces<Kernel::threads, Kernel::block_kv> places;

  __device__ __forceinline__ KeyCopies(const Kernel& attends, int kv_begin) : kernel(attends) { look_up(kv_begin); }

  template <bool some_missing>
  __device__ __forceinline__ void load_K() const {
    places.template copy<Kernel::head_dim, typename Kernel::KTile, Element>(kernel.K_smem, kernel.args.K, kv_head());
    ptx::copy_async_commit();
  }
  /// K of the next tile has the same places as its V: they are looked up here, under Q K^T.
  __device__ __forceinline__ void load_V(int /*distance*/, int next) {
    places.template copy<Kernel::head_dim_v, typename Kernel::VTile, Element>(kernel.V_smem, kernel.args.V, kv_head());
    ptx::copy_async_commit();
    look_up(next);
  }
  __device__ __forceinline__ void move_K(int /*distance*/) {}

 private:
  __device__ __forceinline__ void look_up(int kv_begin) {
    // Tiles end where the last query's keys do: of the last one's rows all that exist have pages.
    const tile::KeyRange seen{kernel.score.keys_of(kernel.q_begin).begin, kernel.score.visible_kv};
    places.look_up(kernel.args, kernel.sequence.batch_idx, seen, kv_begin);
  }
  __device__ __forceinline__ int kv_head() const { return kernel.head_idx / kernel.args.group; }
};

}  // namespace flash_attention::sm80
