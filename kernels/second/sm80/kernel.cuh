#pragma once

// Second derivatives with mma.sync and cp.async: bfloat16, heads of up to 128 columns, sm_80 and up, the same bits in every
// run. second/portable.cuh has the formulas; a dot after a name means its tangent.
//
// The first launch is the loop of tangent/sm80. It stores delta, lse. and R of each row. The other two launches are one
// kernel: a thread block owns rows, 16 a warp, and loops over columns, which have two stages. For dK and dV rows are keys
// and columns queries, for dQ the other way round. So the accumulators of S, S., dP and dP. have the rows of the results,
// and the weights made from them are A operands unchanged:
//
//   rows: keys                                          rows: queries
//     for each query head of the group, each tile of        for each tile of keys:
//     queries:
//       wait for Q, Q., dO, lse, delta, lse., R               wait for K, K., V, V.
//       S^T  = K Q^T, S.^T = K. Q^T + K Q.^T                  S  = Q K^T, S. = Q. K^T + Q K.^T       multiply
//       dP^T = V dO^T, dP.^T = V. dO^T                        dP = dO V^T, dP. = dO V.^T
//       W, dS, dS.                                            dS, dS.                                differentiate
//       dV += W^T dO                                          dQ += dS K + dS. K.                    add
//       dK += dS^T Q + dS.^T Q.
//
// If some pairs of a tile are hidden, NaN and Inf in the columns' tiles become 0 before the weighted sums: a visible pair
// with such a value has a NaN weight already. Only dO is in no weight of dV, so the weights of its bad rows are set to NaN.

#include "backward/dbias.cuh"
#include "backward/delta.cuh"
#include "tangent/sm80/kernel.cuh"

namespace flash_attention {

/// `warpgroups`: products are wgmma's (second/sm90), whose accumulators and A operands are laid out alike.
template <BackwardConfig config, bool of_keys, bool warpgroups = false>
struct SecondSm80 {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  static constexpr int head_dim = config.head_dim, head_dim_v = config.head_dim_v;
  static constexpr int block_q = config.block_q, block_kv = config.block_kv, threads = 32 * config.num_warps;
  static constexpr int rows = of_keys ? block_kv : block_q, columns = of_keys ? block_q : block_kv;
  static constexpr int columns_of_a_tile = warpgroups ? 64 : 16, num_stages = warpgroups ? config.num_stages : 2;
  static constexpr int dim = tile::round_up(head_dim, columns_of_a_tile);
  static constexpr int dim_v = tile::round_up(head_dim_v, columns_of_a_tile);
  static constexpr int steps = dim / 16, steps_v = dim_v / 16;
  static constexpr bool hides = tile::Visibility<features>::hides;
  using Element = ptx::Element<type>;
  using Rows = tile::Rows<const Element>;
  using Tile = float[1][columns / 8][4];
  using Operand = unsigned[columns / 16][4];
  static_assert(rows == 16 * config.num_warps && columns % 16 == 0 && columns <= 64 && config.num_warps >= 3);

  template <int count>
  struct Queries {
    tile::SwizzledTile<count, dim> X, X_tangent;  // Q and Q.
    tile::SwizzledTile<count, dim_v> Y;           // dO
    float lse[count], delta[count], lse_tangent[count], rest[count];
  };
  template <int count>
  struct Keys {
    tile::SwizzledTile<count, dim> X, X_tangent;    // K and K.
    tile::SwizzledTile<count, dim_v> Y, Y_tangent;  // V and V.
  };
  template <bool keys, int count>
  struct Side {
    using Of = Queries<count>;
  };
  template <int count>
  struct Side<true, count> {
    using Of = Keys<count>;
  };
  using RowSide = typename Side<of_keys, rows>::Of;
  using ColumnSide = typename Side<!of_keys, columns>::Of;
  struct SharedStorage {
    RowSide row;
    ColumnSide stages[num_stages];
    int unsound[columns];  // of queries in columns: some of dO is not finite
  };

  /// A query head and the tile of columns that the loop has reached.
  struct Step {
    int head_idx;
    int tile_idx;
  };

  const AttentionArgs& args;
  SharedStorage& storage;
  const tile::Sequence& sequence;  // second/sm90: in shared memory, where it takes no registers
  const int first_head, end_head, row_begin;
  const int thread = threadIdx.x, lane = threadIdx.x % 32;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const tile::LanePlace place{lane};
  const bool has_Q, has_K, has_V;
  float dX[1][dim / 8][4]{};  // dK or dQ
  float dV[1][of_keys ? dim_v / 8 : 2][4]{};

  __device__ __forceinline__ SecondSm80(const AttentionArgs& arguments, SharedStorage& shared, const tile::Sequence& s,
                                        int begin_head, int heads, int begin)
      : args(arguments),
        storage(shared),
        sequence(s),
        first_head(begin_head),
        end_head(begin_head + heads),
        row_begin(begin),
        has_Q(arguments.Q_tangent != nullptr),
        has_K(arguments.K_tangent != nullptr),
        has_V(arguments.V_tangent != nullptr) {}

  __device__ __forceinline__ bool has_row_tangent() const { return of_keys ? has_K : has_Q; }
  __device__ __forceinline__ bool has_column_tangent() const { return of_keys ? has_Q : has_K; }
  __device__ __forceinline__ tile::Score<features> score_of(const Step& step) const {
    return tile::Score<features>(args, sequence, step.head_idx);
  }
  __device__ __forceinline__ int q_begin(const Step& step) const { return of_keys ? step.tile_idx * block_q : row_begin; }
  __device__ __forceinline__ int kv_begin(const Step& step) const { return of_keys ? row_begin : step.tile_idx * block_kv; }

  /// The tiles of columns that share visible pairs with the rows: the same for all heads, before masks.
  __device__ __forceinline__ tile::TileRange tiles() const {
    const tile::Visibility<features> sight(args, sequence, first_head);
    if constexpr (of_keys) return sight.template query_tiles<block_q, block_kv>(row_begin);
    return sight.template key_tiles<block_q, block_kv>(row_begin);
  }
  /// The first step from this one on with a pair that the masks show; its head is end_head if there is none.
  __device__ __forceinline__ Step seek(Step step, const tile::TileRange& range) const {
    if (range.begin >= range.end) return {end_head, 0};
    while (step.head_idx < end_head) {
      if (step.tile_idx >= range.end) {
        step = {step.head_idx + 1, range.begin};
      } else if (tile::Visibility<features>(args, sequence, step.head_idx)
                     .template masks_hide<block_q, block_kv>(q_begin(step), kv_begin(step))) {
        ++step.tile_idx;
      } else {
        break;
      }
    }
    return step;
  }

  // Loads -------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ Rows queries(const TensorView& view, int head_idx, int begin) const {
    Rows result = tile::query_rows<const Element, features>(view, sequence, head_idx);
    result.count = sequence.len_q;
    return result.from(begin);
  }
  __device__ __forceinline__ Rows keys(const TensorView& view, int head_idx, int begin) const {
    Rows result = tile::key_rows<const Element, features>(view, sequence, head_idx / args.group);
    result.count = sequence.visible_kv;
    return result.from(begin);
  }
  // `copying` threads, of which its_thread is one, start the copies.
  template <int copying, int width, class To>
  __device__ __forceinline__ static void copy(To& to, const Rows& from, int its_thread) {
    tile::copy_tile_async<copying, width, To>(ptx::shared_address(&to), from, its_thread);
  }
  template <int copying, int count>
  __device__ __forceinline__ void load(Queries<count>& to, int head_idx, int begin, int its_thread) const {
    copy<copying, head_dim>(to.X, queries(args.Q, head_idx, begin), its_thread);
    if (has_Q)
      copy<copying, head_dim>(to.X_tangent, queries(tile::tangent_view(args.Q, args.Q_tangent), head_idx, begin), its_thread);
    copy<copying, head_dim_v>(to.Y, queries(args.dO, head_idx, begin), its_thread);
    const long long statistics = tile::statistics_offset<features>(args, sequence, head_idx) + begin;
    const auto copy_floats = [&](float(&floats)[count], const float* from) {
      for (int r = its_thread; r < count; r += copying)
        ptx::copy_async_small<4>(ptx::shared_address(&floats[r]), from + statistics + r,
                                 begin + r < sequence.len_q ? 4 : 0);
    };
    copy_floats(to.lse, args.lse);
    copy_floats(to.delta, tile::workspace<const float>(args, BackwardRegion::delta));
    copy_floats(to.lse_tangent, tile::workspace<const float>(args, SecondRegion::lse_tangent));
    copy_floats(to.rest, tile::workspace<const float>(args, SecondRegion::rest));
  }
  template <int copying, int count>
  __device__ __forceinline__ void load(Keys<count>& to, int head_idx, int begin, int its_thread) const {
    copy<copying, head_dim>(to.X, keys(args.K, head_idx, begin), its_thread);
    if (has_K)
      copy<copying, head_dim>(to.X_tangent, keys(tile::tangent_view(args.K, args.K_tangent), head_idx, begin), its_thread);
    copy<copying, head_dim_v>(to.Y, keys(args.V, head_idx, begin), its_thread);
    if (has_V)
      copy<copying, head_dim_v>(to.Y_tangent, keys(tile::tangent_view(args.V, args.V_tangent), head_idx, begin), its_thread);
  }
  template <int copying>
  __device__ __forceinline__ void load_columns(ColumnSide& to, const Step& step, int its_thread) const {
    load<copying>(to, step.head_idx, step.tile_idx * columns, its_thread);
    ptx::copy_async_commit();
  }

  // Products ----------------------------------------------------------------------------------------------------------

  /// C += A B^T, and C_other += A_other B^T if there are such rows: a fragment of B serves both.
  template <bool both, class A, class B>
  __device__ __forceinline__ void add_dots(Tile& C, Tile& C_other, const A& of_rows, const A& of_others,
                                           const B& of_columns) const {
    constexpr int product_steps = A::columns / 16;
    const int hidden_lane = ptx::hide_from_compiler(lane);
    const unsigned A_address = tile::a_address<A>(ptx::shared_address(&of_rows), warp_row, hidden_lane);
    const unsigned other_address = tile::a_address<A>(ptx::shared_address(&of_others), warp_row, hidden_lane);
    const unsigned B_address = tile::b_transposed_address<B>(ptx::shared_address(&of_columns), 0, hidden_lane);
#pragma unroll
    for (int step = 0; step < product_steps; ++step) {
      unsigned first[4], second[4];
      ptx::ldmatrix_x4(first, A::step(A_address, 2 * step));
      if constexpr (both) ptx::ldmatrix_x4(second, A::step(other_address, 2 * step));
#pragma unroll
      for (int n = 0; n < columns / 16; ++n) {
        unsigned fragment[4];
        ptx::ldmatrix_x4(fragment, B::step(B_address, 2 * step) + n * 16 * 128);
        tile::mma_pair<type>(C[0][2 * n], C[0][2 * n + 1], first, fragment);
        if constexpr (both) tile::mma_pair<type>(C_other[0][2 * n], C_other[0][2 * n + 1], second, fragment);
      }
    }
  }
  template <class A, class B>
  __device__ __forceinline__ void add_pair(Tile& C, Tile& C_other, const A& of_rows, const A& of_others, const B& of_columns,
                                           bool both) const {
    if (both) {
      add_dots<true>(C, C_other, of_rows, of_others, of_columns);
    } else {
      add_dots<false>(C, C_other, of_rows, of_others, of_columns);
    }
  }

  __device__ __forceinline__ void multiply(Tile& S, Tile& S_tangent, Tile& dP, Tile& dP_tangent,
                                           const ColumnSide& column) const {
    const RowSide& row = storage.row;
    add_pair(S, S_tangent, row.X, row.X_tangent, column.X, has_row_tangent());
    if (has_column_tangent()) add_dots<false>(S_tangent, S, row.X, row.X, column.X_tangent);
    if constexpr (of_keys) {
      add_pair(dP, dP_tangent, row.Y, row.Y_tangent, column.Y, has_V);
    } else {
      add_dots<false>(dP, dP_tangent, row.Y, row.Y, column.Y);
      if (has_V) add_dots<false>(dP_tangent, dP, row.Y, row.Y, column.Y_tangent);
    }
  }

  /// C += weights B.
  template <class B, int blocks>
  __device__ __forceinline__ void add(float (&C)[1][blocks][4], const Operand& weights, const B& of_columns) const {
    const unsigned address =
        tile::b_address<B>(ptx::shared_address(&of_columns), 0, ptx::hide_from_compiler(lane));
    tile::multiply<type, columns / 16>(
        C, [&](unsigned(&A)[4], int, int step) {
#pragma unroll
          for (int e = 0; e < 4; ++e) A[e] = weights[step][e];
        },
        [&](unsigned(&fragment)[4], int n, int step) {
          ptx::ldmatrix_x4_trans(fragment, B::step(address, 2 * n) + step * 16 * 128);
        });
  }

  // Scores ------------------------------------------------------------------------------------------------------------

  /// Sets NaN and Inf of a tile to 0; a lane checks a row. Returns whether there were any.
  template <class B>
  __device__ __forceinline__ static bool clear_nonfinite(B& of_columns, int row) {
    bool some = false;
#pragma unroll 1
    for (int chunk = 0; chunk < B::columns / 8; ++chunk) {
      const unsigned address = ptx::shared_address(&of_columns) + B::offset(row, chunk);
      auto words = ptx::load_shared<ptx::Vector<unsigned, 4>>(address);
      bool found = false;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if ((words[w] & 0x7f80u) == 0x7f80u) words[w] &= 0xffff0000u, found = true;
        if ((words[w] & 0x7f800000u) == 0x7f800000u) words[w] &= 0xffffu, found = true;
      }
      if (found) ptx::store_shared(address, words);
      some = some || found;
    }
    return some;
  }
  /// The same for all tensors that are summed with weights; a warp for each tensor.
  __device__ __forceinline__ void clear_nonfinite(ColumnSide& column) {
    const int warp = thread / 32;
    for (int row = lane; row < columns; row += 32) {
      if (warp == 0) clear_nonfinite(column.X, row);
      if (warp == 1 && has_column_tangent()) clear_nonfinite(column.X_tangent, row);
      if constexpr (of_keys) {
        if (warp == 2) storage.unsound[row] = clear_nonfinite(column.Y, row);
      }
    }
  }

  /// Turns products into weights: S becomes W, dP becomes dS, dP. becomes dS.
  template <bool some_hidden>
  __device__ __forceinline__ void differentiate(Tile& S, Tile& S_tangent, Tile& dP, Tile& dP_tangent,
                                                const ColumnSide& column, const Step& at) const {
    const tile::Score<features> score = score_of(at);
    const tile::Tangents<features> tangents(args, sequence, at.head_idx);
    const float unit = score.unit_scale() * tile::log2_e;
#pragma unroll
    for (int n = 0; n < columns / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = warp_row + place.row + 8 * (e / 2), of_columns = 8 * n + place.column + e % 2;
        const int query = of_keys ? of_columns : row, key = of_keys ? row : of_columns;
        const int i = q_begin(at) + query, j = kv_begin(at) + key;
        const auto& statistics = [&]() -> const auto& {
          if constexpr (of_keys) return column;
          if constexpr (!of_keys) return storage.row;
        }();
        const float delta = statistics.delta[query], lse_tangent = statistics.lse_tangent[query];
        // If lse is -inf, so was every visible score: the row has no probabilities.
        const float lse = statistics.lse[query], minus_lse = lse < tile::lowest_lse ? -tile::infinity : -lse * tile::log2_e;
        const float rest = ptx::fma(lse_tangent, delta, statistics.rest[query]);
        float &W = S[0][n][e], &dS = dP[0][n][e], &dS_tangent = dP_tangent[0][n][e];
        if (some_hidden && !score.sight.visible(i, j)) {
          W = dS = dS_tangent = 0;
          continue;
        }
        tile::ScoreTangent s{};
        if constexpr (tile::Score<features>::linear) {
          s.score = S[0][n][e], s.tangent = ptx::fma(S_tangent[0][n][e], score.scale, -lse_tangent);
        } else {
          s = tangents.of(score, S[0][n][e], S_tangent[0][n][e], i, j);
          s.tangent -= lse_tangent;
        }
        const float p = ptx::exp2(ptx::fma(s.score, unit, minus_lse)), above = dP[0][n][e] - delta;
        const float of_score = p * ptx::fma(s.tangent, above, dS_tangent - rest);
        W = p * s.tangent;
        dS_tangent = p * above;
        dS = of_score;
        if constexpr (features.softcap) {
          dS = of_score * s.of_cap + dS_tangent * s.curvature * s.raw;
          dS_tangent *= s.of_cap;
        }
        if constexpr (some_hidden && hides && of_keys) {
          if (storage.unsound[query] != 0) W = tile::nan;
        }
      }
    }
  }

  __device__ __forceinline__ static void pack(Operand& to, const Tile& from) {
#pragma unroll
    for (int step = 0; step < columns / 16; ++step) tile::pack_a<type>(to[step], from[0][2 * step], from[0][2 * step + 1]);
  }

  // The loop ----------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void visit(const Step& at, ColumnSide& column) {
    Tile S{}, S_tangent{}, dP{}, dP_tangent{};
    multiply(S, S_tangent, dP, dP_tangent, column);
    const tile::Score<features> score = score_of(at);
    const bool some_hidden = q_begin(at) + block_q > score.sight.len_q ||
                             !score.sight.template all_visible<block_q, block_kv>(q_begin(at), kv_begin(at));
    if (some_hidden) {
      ptx::path<"second/sm80 edge tile">();
      if constexpr (hides) {
        __syncthreads();  // every warp has multiplied: values that are not finite may be replaced
        clear_nonfinite(column);
        __syncthreads();  // they have been replaced
      }
      differentiate<true>(S, S_tangent, dP, dP_tangent, column, at);
    } else {
      ptx::path<"second/sm80 inner tile">();
      differentiate<false>(S, S_tangent, dP, dP_tangent, column, at);
    }
    Operand weights;
    if constexpr (of_keys) {
      pack(weights, S);
      add(dV, weights, column.Y);
    }
    pack(weights, dP);
    add(dX, weights, column.X);
    if (!has_column_tangent()) return;
    pack(weights, dP_tangent);
    add(dX, weights, column.X_tangent);
  }

  __device__ __forceinline__ void attend() {
    const tile::TileRange range = tiles();
    Step at = seek({first_head, range.begin}, range);
    if (at.head_idx == end_head) return;
    load<threads>(storage.row, first_head, row_begin, thread);
    load_columns<threads>(storage.stages[0], at, thread);
    int stage_idx = 0;
#pragma unroll 1
    while (at.head_idx < end_head) {
      const Step next = seek({at.head_idx, at.tile_idx + 1}, range);
      ColumnSide& column = storage.stages[stage_idx];
      stage_idx ^= 1;
      ptx::copy_async_wait<0>();
      __syncthreads();  // this stage has landed, and every warp is done with the other one
      if (next.head_idx < end_head) load_columns<threads>(storage.stages[stage_idx], next, thread);
      visit(at, column);
      at = next;
    }
  }

  /// Stores results through the warp's own rows of a tile. Rows without a visible pair are 0, whatever is in their sums.
  template <int width, class To, int blocks>
  __device__ __forceinline__ void store(To& through, const float (&sums)[1][blocks][4], float factor,
                                        const tile::Rows<Element>& to) const {
    const unsigned address = ptx::shared_address(&through);
    const int used = (of_keys ? sequence.visible_kv : sequence.len_q) - row_begin;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + place.row + 8 * half;
#pragma unroll
      for (int n = 0; n < blocks; ++n) {
        const float first = row < used ? sums[0][n][2 * half] * factor : 0;
        const float second = row < used ? sums[0][n][2 * half + 1] * factor : 0;
        ptx::store_shared(address + To::offset(row, n) + 2 * place.column, ptx::pack<type>(first, second));
      }
    }
    __syncwarp();  // all have written the warp's rows
    tile::store_tile<32, width, 16, To>(address, warp_row, to.from(row_begin), lane);
  }
  __device__ __forceinline__ void finish() {
    if constexpr (warpgroups) {
      ptx::barrier_sync(1 + warp_row / 64, 128);  // a warpgroup reads all its rows, over which the sums are written
    } else {
      __syncwarp();  // all lanes have read the rows, over which the sums are written
    }
    if constexpr (of_keys) {
      const int kv_head_idx = first_head / args.group;
      store<head_dim>(storage.row.X, dX, args.scale, tile::key_rows<Element, features>(args.dK, sequence, kv_head_idx));
      store<head_dim_v>(storage.row.Y, dV, 1, tile::key_rows<Element, features>(args.dV, sequence, kv_head_idx));
    } else {
      store<head_dim>(storage.row.X, dX, args.scale, tile::query_rows<Element, features>(args.dQ, sequence, first_head));
    }
  }
};

/// Writes each row's statistics for the other launches, and O. and lse. if they are wanted. Clears rows of no sequence.
template <ForwardConfig config>
__device__ __forceinline__ void second_sm80_rows(const AttentionArgs& args) {
  using Kernel = TangentSm80<config>;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  tile::clear_tangent_tail<config>(args, threadIdx.x, Kernel::threads);
  tile::clear_gradient_tails<config>(args, threadIdx.x, Kernel::threads);
  if (args.seq_q == 0) return;
  tangent_sm80_block<config, true>(args, storage);
}

template <BackwardConfig config>
__device__ __forceinline__ void second_sm80_dkv(const AttentionArgs& args) {
  using Kernel = SecondSm80<config, true>;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  const auto block = tile::key_block(blockIdx.x, tile::ceil_div(args.seq_kv, config.block_kv), args.heads_kv);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int kv_begin = block.tile_idx * config.block_kv;
  if (kv_begin >= sequence.rows_kv) return;
  Kernel kernel(args, storage, sequence, block.head_idx * args.group, args.group, kv_begin);
  kernel.attend();
  kernel.finish();
}

template <BackwardConfig config>
__device__ __forceinline__ void second_sm80_dq(const AttentionArgs& args) {
  using Kernel = SecondSm80<config, false>;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, config.block_q), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int q_begin = block.tile_idx * config.block_q;
  if (q_begin >= sequence.rows_q) return;
  Kernel kernel(args, storage, sequence, block.head_idx, 1, q_begin);
  kernel.attend();
  kernel.finish();
}

}  // namespace flash_attention
