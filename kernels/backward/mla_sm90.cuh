#pragma once

#include "abi/mla.h"
#include "ptx/async.cuh"
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/matrix_store.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/path.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"
#include "tile/descriptor.cuh"
#include "tile/key_list.cuh"
#include "tile/mma.cuh"
#include "tile/score.cuh"
#include "tile/swizzle.cuh"
#include "tile/workspace.cuh"

// Backward over lists of keys of 512 to 576 columns, with values of 512, sm_90: wgmma. All heads of a query share the list.
//
// A block has 64 rows (heads) of one query. Q and dO stay in shared memory, beside one tile of 64 listed keys. If V is the
// beginning of K, as in latent attention, the tile of K is that of V, too; otherwise V is loaded first, then K in its place.
// delta comes from backward/delta.cuh.
//
//   producer, for each 64 entries of the list:      gather the rows of K (V) into shared memory
//   warpgroup 0:                                    S = Q K^T;   P = exp(S - lse) -> shared
//   warpgroup 1:                                    dP = dO V^T; wait for P; dS = P (dP - delta) -> shared
//   both, each half of the columns:                 dQ += dS K;  the tile may be filled again
//                                                   for each 64 columns: dV or dK = P^T dO or dS^T Q -> added to global sums
//   in the end:                                     dQ -> global
//
// Many queries add to the same keys, in any order: the sums are floats in the workspace. A launch before sets them to zero,
// one after makes dK and dV of them.

namespace flash_attention {

using namespace abi;

namespace mla_backward {

constexpr int wg_threads = 128;
constexpr int rows = mla_block_q;  // and keys of a tile
constexpr int value_columns = mla_head_dim_v, value_panels = value_columns / 64;
constexpr int key_columns = mla_columns;
constexpr int warps_of_producer = 4;

// Named barriers. Each has all threads of both consumer warpgroups, which reach it at different places of the program.
constexpr int barrier_P = 1;     // P is ready
constexpr int barrier_dS = 2;    // dS is ready
constexpr int barrier_free = 3;  // no product reads P any more
constexpr int barrier_own = 4;   // the consumers, in the beginning

using KeyTile = tile::SwizzledTile<rows, key_columns>;
using ValueTile = tile::SwizzledTile<rows, value_columns>;
using ScoreTile = tile::SwizzledTile<rows, rows>;
constexpr int panel = KeyTile::panel_bytes;

struct SharedStorage {
  KeyTile Q;
  ValueTile dO;
  KeyTile K;
  ScoreTile P;
  ScoreTile dS;
  ptx::Mbarrier full[2];  // V, or K if it is V, too; K
  ptx::Mbarrier empty[2];
  int key[2][rows];  // of two tiles; -1: no key
  float lse[rows];
  float delta[rows];
};

using Descriptor = tile::Descriptor<true, true>;

/// Sums of dK and dV: [batch][key head][key][column].
struct KeySums {
  float* dK;
  float* dV;

  __device__ __forceinline__ KeySums(const AttentionArgs& args, int head_dim, long long row) {
    dK = tile::workspace<float>(args, BackwardMlaRegion::dK) + row * head_dim;
    dV = tile::workspace<float>(args, BackwardMlaRegion::dV) + row * value_columns;
  }
};

template <BackwardConfig config>
struct Task {
  static constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;
  tile::ListTask list;
  int kv_head_idx;
  tile::KeyListView keys;
  tile::Rows<const Element> K, V;
  bool same;  // V is the beginning of K

  __device__ __forceinline__ explicit Task(const AttentionArgs& args)
      : list(tile::list_task<features>(args)),
        kv_head_idx(list.rows.first_head / args.group),
        keys(args, list.sequence, false, list.list_row, list.list_head),
        K(tile::key_rows<const Element, features>(args.K, list.sequence, kv_head_idx)),
        V(tile::key_rows<const Element, features>(args.V, list.sequence, kv_head_idx)),
        same(K.data == V.data && K.stride == V.stride) {}
  __device__ __forceinline__ int tiles() const { return tile::ceil_div(keys.count, rows); }
};

/// Copies a row of `columns` elements to a tile, 16 bytes a lane; those up to `all` become zero.
template <int columns, int all, class Tile, typename Element>
__device__ __forceinline__ void copy_row(const Tile& to, int row, const Element* from, bool exists, const Element* valid) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int chunk = lane; chunk < all / 8; chunk += 32) {
    const bool reads = exists && 8 * chunk < columns;
    ptx::copy_async(ptx::shared_address(to.bytes) + Tile::offset(row, chunk), reads ? from + 8 * chunk : valid,
                    reads ? 16 : 0);
  }
}

template <BackwardConfig config>
struct Producer {
  using Element = typename Task<config>::Element;
  const AttentionArgs& args;
  SharedStorage& shared;
  const Task<config>& task;
  int lane = threadIdx.x % 32;
  int warp = ptx::shuffle(static_cast<int>(threadIdx.x) / 32 % 4, 0);

  /// This warp copies 16 rows, eight lanes 128 bytes of a row at a time.
  template <int columns, int all>
  __device__ __forceinline__ void copy(const tile::Rows<const Element>& from, int key) const {
    const int chunk = lane % 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * warp + 4 * i + lane / 8, own = ptx::shuffle(key, 4 * i + lane / 8);
      const Element* begin = from.data + (own < 0 ? 0 : own * from.stride) + 8 * chunk;
      const unsigned to = ptx::shared_address(shared.K.bytes) + KeyTile::offset(row, chunk);
#pragma unroll
      for (int p = 0; p < all / 64; ++p) {
        const bool reads = own >= 0 && 64 * p + 8 * chunk < columns;
        ptx::copy_async(to + p * panel, reads ? begin + 64 * p : from.data, reads ? 16 : 0);
      }
    }
    ptx::copy_async_commit();
  }
  __device__ __forceinline__ void signal(int which) const {
    ptx::copy_async_wait<0>();
    ptx::fence_async_shared();  // orders the copies before the products' reads
    __syncwarp();               // every lane's copies have landed
    if (lane == 0) ptx::mbarrier_arrive(shared.full[which]);
  }
  __device__ __forceinline__ int find(int tile_idx) const {
    const int place = tile_idx * rows + 16 * warp + lane % 16;
    return place < task.keys.count ? task.keys.template entry<false>(place, task.list.sequence.visible_kv) : -1;
  }

  __device__ __forceinline__ void run() const {
    const int tiles = task.tiles();
    int key = tiles > 0 ? find(0) : -1;
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      ptx::mbarrier_wait(shared.empty[1], n % 2 ^ 1);
      if (lane < 16) shared.key[n % 2][16 * warp + lane] = key;
      if (task.same) {
        copy<config.head_dim, key_columns>(task.K, key);
      } else {
        copy<value_columns, value_columns>(task.V, key);
        signal(0);
        ptx::mbarrier_wait(shared.empty[0], n % 2);  // this tile's V has been read
        copy<config.head_dim, key_columns>(task.K, key);
      }
      const int next = n + 1 < tiles ? find(n + 1) : -1;
      if (task.same) signal(0);
      signal(1);
      key = next;
    }
  }
};

template <BackwardConfig config, int warpgroup>
struct Consumer {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  using Element = typename Task<config>::Element;
  static constexpr int panels = warpgroup == 0 ? 5 : 4;  // of dQ
  static constexpr int first_panel = warpgroup == 0 ? 0 : 5;
  using Scores = float[rows / 8][4];

  const AttentionArgs& args;
  SharedStorage& shared;
  const Task<config>& task;
  float dQ[panels][rows / 2];

  __device__ __forceinline__ Consumer(const AttentionArgs& arguments, SharedStorage& storage, const Task<config>& own)
      : args(arguments), shared(storage), task(own) {
#pragma unroll
    for (auto& part : dQ) {
#pragma unroll
      for (float& value : part) value = 0;
    }
  }

  struct Place {
    int lane, warp, row, column;
    __device__ __forceinline__ Place() {
      const int thread = ptx::hide_from_compiler(static_cast<int>(threadIdx.x));
      lane = thread % 32, warp = thread / 32 % 4;
      row = 16 * warp + lane / 4, column = lane % 4 * 2;
    }
  };
  __device__ __forceinline__ static Descriptor describe(const void* tile) {
    return Descriptor(ptx::wgmma_descriptor(static_cast<const unsigned char*>(tile) + 16 * Place().lane, panel, 1024));
  }

  /// S = A B^T over `panels_of_k` panels of columns.
  template <int panels_of_k>
  __device__ __forceinline__ void multiply(Scores& S, const void* left, const void* right) const {
    auto& flat = reinterpret_cast<float(&)[rows / 2]>(S);
    const Descriptor A = describe(left), B = describe(right);
    ptx::wgmma_fence();  // ordinary instructions have used these registers
#pragma unroll
    for (int step = 0; step < panels_of_k * 4; ++step) {
      const int at = step / 4 * panel + step % 4 * 32;
      ptx::wgmma_ss<type, rows, ptx::Major::k, ptx::Major::k>(flat, A.at(at), B.at(at), step != 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(flat);
  }

  /// Writes a tile of P or dS in 16 bits.
  __device__ __forceinline__ void store(const Scores& S, ScoreTile& to) const {
    const Place place;
    const int part = place.lane / 8, row = 16 * place.warp + part % 2 * 8 + place.lane % 8;
#pragma unroll
    for (int step = 0; step < rows / 16; ++step) {
      unsigned A[4];
      tile::pack_a<type>(A, S[2 * step], S[2 * step + 1]);
      ptx::stmatrix_x4(to.bytes + ScoreTile::offset(row, 2 * step + part / 2), A[0], A[1], A[2], A[3]);
    }
    ptx::fence_async_shared();  // orders it before the products' reads
  }

  __device__ __forceinline__ void make_P(Scores& S, int n) const {
    const Place place;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float lse = shared.lse[place.row + 8 * half];
#pragma unroll
      for (int b = 0; b < rows / 8; ++b) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          const bool shown = shared.key[n % 2][8 * b + place.column + e % 2] >= 0 && lse >= tile::lowest_lse;
          S[b][e] = shown ? ptx::exp2(ptx::fma(S[b][e], args.scale, -lse) * tile::log2_e) : 0.0f;
        }
      }
    }
  }

  /// dS from dP and P in shared memory. Where P is exactly 0 the pair may be hidden, and dP may be anything.
  __device__ __forceinline__ void make_dS(Scores& dP) const {
    const Place place;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.row + 8 * half;
      const float delta = shared.delta[row];
#pragma unroll
      for (int b = 0; b < rows / 8; ++b) {
        const unsigned pair = ptx::load_shared<unsigned>(ptx::shared_address(shared.P.bytes) + ScoreTile::offset(row, b) +
                                                         static_cast<unsigned>(2 * place.column));
        const float low = ptx::unpack_low<type>(pair), high = ptx::unpack_high<type>(pair);
        dP[b][2 * half] = low == 0 ? 0.0f : low * (dP[b][2 * half] - delta);
        dP[b][2 * half + 1] = high == 0 ? 0.0f : high * (dP[b][2 * half + 1] - delta);
      }
    }
  }

  __device__ __forceinline__ void add_dQ() {
    const Descriptor A = describe(shared.dS.bytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int p = 0; p < panels; ++p) {
      const Descriptor B = describe(shared.K.bytes + (first_panel + p) * panel);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::wgmma_ss<type, rows, ptx::Major::k, ptx::Major::mn>(dQ[p], A.at(step * 32), B.at(step * 16 * 128), true);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (auto& part : dQ) ptx::wgmma_pin(part);
  }

  /// Adds 64 keys x 64 columns to the sums: weights^T * right, where the weights are P or dS.
  __device__ __forceinline__ void add_to_keys(const ScoreTile& weights, const unsigned char* right, float* sums, int width,
                                              int column_begin, int n) const {
    float C[rows / 2];
    const Descriptor A = describe(weights.bytes), B = describe(right);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::wgmma_ss<type, rows, ptx::Major::mn, ptx::Major::mn>(C, A.at(step * 16 * 128), B.at(step * 16 * 128), step != 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(C);
    // Two neighbouring lanes have four columns of two rows; each gets four columns of one.
    const Place place;
    const bool odd = place.lane % 2 != 0;
    const int key = shared.key[n % 2][place.row + (odd ? 8 : 0)];
    float* to = sums + static_cast<long long>(key) * width + column_begin + place.lane % 4 / 2 * 4;
#pragma unroll
    for (int b = 0; b < rows / 8; ++b) {
      const float first = odd ? C[4 * b + 2] : C[4 * b], second = odd ? C[4 * b + 3] : C[4 * b + 1];
      const float third = ptx::shuffle_xor(odd ? C[4 * b] : C[4 * b + 2], 1);
      const float fourth = ptx::shuffle_xor(odd ? C[4 * b + 1] : C[4 * b + 3], 1);
      const bool exists = key >= 0 && column_begin + 8 * b + place.lane % 4 / 2 * 4 < width;
      const ptx::Vector<float, 4> four = odd ? ptx::Vector<float, 4>{{third, fourth, first, second}}
                                             : ptx::Vector<float, 4>{{first, second, third, fourth}};
      if (exists) ptx::reduce_add(to + 8 * b, four);
    }
  }

  __device__ __forceinline__ void load_rows() const {
    const tile::ListRows& own = task.list.rows;
    const auto Q = tile::stacked_rows<const Element, features>(args.Q, task.list.sequence, own);
    const auto dO = tile::stacked_rows<const Element, features>(args.dO, task.list.sequence, own);
    const auto* delta = tile::workspace<const float>(args, BackwardRegion::delta);
    const int warp = threadIdx.x / 32;
#pragma unroll 1
    for (int r = warp; r < rows; r += 2 * wg_threads / 32) {
      const bool exists = r < own.count;
      copy_row<config.head_dim, key_columns>(shared.Q, r, Q.row(exists ? r : 0), exists, Q.data);
      copy_row<value_columns, value_columns>(shared.dO, r, dO.row(exists ? r : 0), exists, dO.data);
    }
    ptx::copy_async_commit();
    if (threadIdx.x < rows) {
      const int r = threadIdx.x;
      const bool exists = r < own.count;
      const long long at = exists ? tile::statistics_offset<features>(args, task.list.sequence, own.head(r)) + own.query(r) : 0;
      shared.lse[r] = exists ? args.lse[at] : -tile::infinity;
      shared.delta[r] = exists ? delta[at] : 0;
    }
    ptx::copy_async_wait<0>();
    ptx::fence_async_shared();
    ptx::barrier_sync_apart(barrier_own, 2 * wg_threads);  // Q, dO and the statistics are ready
  }

  __device__ __forceinline__ void run() {
    load_rows();
    const int tiles = task.tiles();
    const Place place;
    const KeySums sums(args, config.head_dim,
                       (static_cast<long long>(task.list.sequence.batch_idx) * args.heads_kv + task.kv_head_idx) *
                           args.seq_kv);
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      Scores S;
      if constexpr (warpgroup == 0) {
        ptx::mbarrier_wait(shared.full[1], n % 2);
        multiply<(config.head_dim + 63) / 64>(S, shared.Q.bytes, shared.K.bytes);
        make_P(S, n);
        if (n > 0) ptx::barrier_sync(barrier_free, 2 * wg_threads);  // the other warpgroup has read the last P
        store(S, shared.P);
        __syncwarp();  // bar.arrive needs the lanes of a warp together
        ptx::barrier_arrive(barrier_P, 2 * wg_threads);
      } else {
        ptx::mbarrier_wait(shared.full[0], n % 2);
        multiply<value_panels>(S, shared.dO.bytes, shared.K.bytes);
        if (place.lane == 0) ptx::mbarrier_arrive(shared.empty[0]);
        ptx::barrier_sync(barrier_P, 2 * wg_threads);
        make_dS(S);
        store(S, shared.dS);
        ptx::mbarrier_wait(shared.full[1], n % 2);  // if K came after V
      }
      ptx::barrier_sync_apart(barrier_dS, 2 * wg_threads);
      add_dQ();
      if (place.lane == 0) ptx::mbarrier_arrive(shared.empty[1]);
      if constexpr (warpgroup == 0) {
#pragma unroll 1
        for (int p = 0; p < value_panels; ++p)
          add_to_keys(shared.P, shared.dO.bytes + p * panel, sums.dV, value_columns, 64 * p, n);
      } else {
#pragma unroll 1
        for (int p = 0; p < (config.head_dim + 63) / 64; ++p)
          add_to_keys(shared.dS, shared.Q.bytes + p * panel, sums.dK, config.head_dim, 64 * p, n);
        if (n + 1 < tiles) ptx::barrier_arrive(barrier_free, 2 * wg_threads);
      }
    }
    write_dQ();
  }

  __device__ __forceinline__ void write_dQ() const {
    const tile::ListRows& own = task.list.rows;
    const auto to = tile::stacked_rows<Element, features>(args.dQ, task.list.sequence, own);
    const Place place;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = place.row + 8 * half;
      if (r >= own.count) continue;
      Element* row = to.row(r);
#pragma unroll
      for (int p = 0; p < panels; ++p) {
#pragma unroll
        for (int b = 0; b < rows / 8; ++b) {
          const int column = 64 * (first_panel + p) + 8 * b + place.column;
          if (column >= config.head_dim) continue;
          ptx::store_global(reinterpret_cast<unsigned*>(row + column),
                            ptx::pack<type>(dQ[p][4 * b + 2 * half] * args.scale, dQ[p][4 * b + 2 * half + 1] * args.scale));
        }
      }
    }
  }
};

}  // namespace mla_backward

template <BackwardConfig config>
__device__ __forceinline__ void backward_mla_sm90(const AttentionArgs& args) {
  using namespace mla_backward;
  static_assert(sizeof(SharedStorage) <= mla_backward_shared_bytes, "the planner reserves what SharedStorage needs");
  static_assert(config.head_dim >= value_columns && config.head_dim <= key_columns && config.head_dim_v == value_columns);
  auto& shared = ptx::shared_storage<SharedStorage>();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(shared.full[0], warps_of_producer);
    ptx::mbarrier_init(shared.full[1], warps_of_producer);
    ptx::mbarrier_init(shared.empty[0], wg_threads / 32);      // warpgroup 1 reads V
    ptx::mbarrier_init(shared.empty[1], 2 * wg_threads / 32);  // both read K
    ptx::mbarrier_init_fence();
  }
  const Task<config> task(args);
  __syncthreads();  // all threads see the barriers
  if (task.list.rows.count <= 0) return;
  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // the compiler knows: uniform
  if (warpgroup == 2) {
    ptx::registers_decrease<56>();
    Producer<config>{args, shared, task}.run();
  } else if (warpgroup == 0) {
    ptx::registers_increase<224>();
    Consumer<config, 0>(args, shared, task).run();
  } else {
    ptx::registers_increase<224>();
    Consumer<config, 1>(args, shared, task).run();
  }
}

/// Sets the sums to zero; a block takes 64 keys of a key head.
template <BackwardConfig config>
__device__ __forceinline__ void backward_mla_clear(const AttentionArgs& args) {
  using namespace mla_backward;
  const long long first = static_cast<long long>(blockIdx.x) * rows;
  const long long all = static_cast<long long>(args.batch) * args.heads_kv * args.seq_kv;
  const int count = static_cast<int>(all - first < rows ? all - first : rows);
  const KeySums sums(args, config.head_dim, first);
  using Four = ptx::Vector<float, 4>;
  constexpr int step = 4 * tile::product_threads;
  for (int i = threadIdx.x * 4; i < count * config.head_dim; i += step) ptx::store_global(reinterpret_cast<Four*>(sums.dK + i), Four{});
  for (int i = threadIdx.x * 4; i < count * value_columns; i += step) ptx::store_global(reinterpret_cast<Four*>(sums.dV + i), Four{});
}

/// dK and dV from the sums; a warp takes a key of a key head at a time.
template <BackwardConfig config>
__device__ __forceinline__ void backward_mla_finish(const AttentionArgs& args) {
  using namespace mla_backward;
  constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const long long all = static_cast<long long>(args.batch) * args.heads_kv * args.seq_kv;
#pragma unroll 1
  for (int r = warp; r < rows; r += tile::product_threads / 32) {
    const long long row = static_cast<long long>(blockIdx.x) * rows + r;
    if (row >= all) return;
    const int head = static_cast<int>(row / args.seq_kv), j = static_cast<int>(row % args.seq_kv);
    const tile::Sequence sequence = tile::make_sequence<features>(args, head / args.heads_kv);
    const KeySums sums(args, config.head_dim, row);
    auto* dK = tile::key_rows<Element, features>(args.dK, sequence, head % args.heads_kv).row(j);
    auto* dV = tile::key_rows<Element, features>(args.dV, sequence, head % args.heads_kv).row(j);
    for (int column = 2 * lane; column < config.head_dim; column += 64) {
      ptx::store_global(reinterpret_cast<unsigned*>(dK + column),
                        ptx::pack<features.dtype>(sums.dK[column] * args.scale, sums.dK[column + 1] * args.scale));
    }
    for (int column = 2 * lane; column < value_columns; column += 64) {
      ptx::store_global(reinterpret_cast<unsigned*>(dV + column),
                        ptx::pack<features.dtype>(sums.dV[column], sums.dV[column + 1]));
    }
  }
}

}  // namespace flash_attention
