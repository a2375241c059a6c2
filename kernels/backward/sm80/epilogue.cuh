#pragma once

#include "backward/repair.cuh"
#include "backward/sm80/shape.cuh"
#include "ptx/path.cuh"

// The epilogue of backward/sm80: dK and dV -> shared -> global, 16 bytes per lane; keys that 0 * NaN has reached again.

namespace flash_attention {

/// The work tile of a thread block: dK and dV of block_kv keys of one key head, and the shared memory of the kernel.
template <BackwardConfig config>
struct BackwardSm80Epilogue : BackwardSm80Shape<config> {
  using Shape = BackwardSm80Shape<config>;
  using Shape::type, Shape::features, Shape::block_q, Shape::block_kv, Shape::threads, Shape::dim, Shape::dim_v;
  using typename Shape::Element, typename Shape::KTile, typename Shape::VTile, typename Shape::PTile;

  using Score = tile::Score<features>;

  // How the warps divide the products of dK and dV: rows x columns of warps.
  static constexpr int key_m = Shape::warps_kv, key_n = config.num_warps / key_m;
  static constexpr int dK_pairs = tile::ceil_div(dim / 16, key_n), dV_pairs = tile::ceil_div(dim_v / 16, key_n);

  struct SharedStorage {
    KTile K;                                          // then dK
    VTile V;                                          // then dV
    typename Shape::Stage stages[config.num_stages];  // one or two
    PTile P;
    PTile dS;
    SharedFlag repair;  // something in dK or dV is not finite
  };

  const AttentionArgs& args;
  SharedStorage& storage;
  const tile::Sequence sequence;
  const int kv_head_idx, kv_begin;
  const tile::TileRange tiles;  // of the queries that see some of the keys
  const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const tile::LanePlace place{lane};
  const unsigned K_smem = ptx::shared_address(&storage.K), V_smem = ptx::shared_address(&storage.V);
  float dK[2][2 * dK_pairs][4]{};
  float dV[2][2 * dV_pairs][4]{};

  __device__ __forceinline__ BackwardSm80Epilogue(const AttentionArgs& arguments, SharedStorage& shared,
                                                  const tile::Sequence& s, int kv_head, int first_key)
      : args(arguments),
        storage(shared),
        sequence(s),
        kv_head_idx(kv_head),
        kv_begin(first_key),
        tiles(Score(arguments, s, kv_head * arguments.group).template query_tiles<block_q, block_kv>(first_key)) {}

  __device__ __forceinline__ void finish() const {
    if (thread == 0) storage.repair.set(false);
    __syncthreads();  // every warp is done with K and V, and the flag is down
    const bool K_fails = put<KTile, dK_pairs>(dK, K_smem, args.scale, dim / 16);
    const bool V_fails = put<VTile, dV_pairs>(dV, V_smem, features.dropout ? args.keep_scale : 1, dim_v / 16);
    if (Shape::repairs_rows && (K_fails || V_fails)) storage.repair.set(true);
    __syncthreads();  // dK, dV and the flag are in shared memory
    const auto dK_rows = tile::key_rows<Element, features>(args.dK, sequence, kv_head_idx).from(kv_begin);
    const auto dV_rows = tile::key_rows<Element, features>(args.dV, sequence, kv_head_idx).from(kv_begin);
    tile::store_tile<threads, config.head_dim, block_kv, KTile>(K_smem, 0, dK_rows, thread);
    tile::store_tile<threads, config.head_dim_v, block_kv, VTile>(V_smem, 0, dV_rows, thread);
    if constexpr (Shape::repairs_rows) {
      if (storage.repair.up()) {
        ptx::path<Shape::split ? "backward/tf32 repaired keys" : "backward/sm80 repaired keys">();
        __syncthreads();  // the stores above come before those of the repair
        for (int j = kv_begin + warp; j < tile::min(kv_begin + block_kv, sequence.visible_kv); j += config.num_warps) {
          repair_key<config>(args, sequence, kv_head_idx, j,
                             [&](int head_idx) { return delta_like_lse<config>(args, sequence, head_idx); });
        }
      }
    }
  }

 private:
  /// The warp's part of dK or dV into shared memory, where K or V was; true if something in it is not finite.
  template <typename Tile, int pairs, int blocks>
  __device__ __forceinline__ bool put(const float (&C)[2][blocks][4], unsigned tile_address, float factor,
                                      int total_pairs) const {
    const int row = warp / key_n * 32, first = warp % key_n * pairs;
    // Keys that no query sees are 0: the zeros of their P and dS have been multiplied by all queries of a tile.
    constexpr bool some_unseen = features.key_lengths || features.seqused_kv;
    const auto unseen = [&](int r) { return some_unseen && kv_begin + r >= sequence.visible_kv; };
    float check = 0;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < blocks; ++n) {
        if (first + n / 2 >= total_pairs) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float a = C[m][n][2 * half] * factor, b = C[m][n][2 * half + 1] * factor;
          if (unseen(row + 16 * m + place.row + 8 * half)) a = b = 0;
          check = ptx::fma(a, 0, ptx::fma(b, 0, check));
          Shape::template put_pair<Tile>(tile_address, row + 16 * m + place.row + 8 * half, 2 * first + n, place, a, b);
        }
      }
    }
    return check != check;
  }
};

}  // namespace flash_attention
