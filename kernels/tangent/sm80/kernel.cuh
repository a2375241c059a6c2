#pragma once

// Forward mode with mma.sync and cp.async: out, lse and their tangents in one pass; sm_80 and up, 16-bit types, heads of up
// to 128 columns.
//
// A thread block processes block_q queries of one head, 16 a warp. It visits the KV blocks from the last to the first. K, V
// and their tangents have two stages, so that those of the next KV block arrive while this one is computed; an iteration
// has one barrier. A warp's registers hold S and S., O and A, and the queries if they have at most 32 registers. A dot after
// a name means its tangent:
//
//   Q, Q. -> shared memory (-> registers if they fit)
//   for each KV block:
//     wait for it; start the next one
//     S = Q K^T, S. = Q. K^T + Q K.^T              a fragment of K serves two products    multiply_keys
//     P = softmax step, W = P (S. - center)        tile/softmax.cuh                 exponentiate
//     O = O * rescale + P V                        a fragment of V serves two products    add_values
//     A = A * rescale + W V + P V.
//   out = O / sum,  lse. = center + sum of W / sum,  O. = A / sum - (lse. - center) out   finish
//
// W is rounded to 16 bits. If S. is large, rounding P S. would lose the difference S. - lse., so the center is subtracted
// first. The center is the estimate of lse. from the time when the maximum of a row of the warp last grew. Sums that are
// relative to the old center are then moved to the new one.

#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/path.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "tangent/repair.cuh"
#include "tile/copy.cuh"
#include "tile/mma.cuh"
#include "tile/softmax.cuh"
#include "tile/swizzle.cuh"
#include "tile/tail.cuh"
#include "tile/workspace.cuh"

namespace flash_attention {

using namespace abi;

/// `warpgroups`: products are wgmma's (tangent/sm90), whose accumulators and A operands are laid out alike.
template <ForwardConfig config, bool warpgroups = false>
struct TangentSm80 {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  static constexpr int head_dim = config.head_dim, head_dim_v = config.head_dim_v;
  static constexpr int block_q = config.block_q, block_kv = config.block_kv, threads = 32 * config.num_warps;
  static constexpr int num_stages = warpgroups ? config.num_stages : 2;
  static constexpr int columns_of_a_tile = warpgroups ? 64 : 16;
  static constexpr int dim = tile::round_up(head_dim, columns_of_a_tile);
  static constexpr int dim_v = tile::round_up(head_dim_v, columns_of_a_tile);
  static constexpr int q_steps = dim / 16, kv_steps = block_kv / 16;
  static constexpr bool Q_in_registers = q_steps <= 4;
  // If nothing is hidden or dropped, a NaN in V belongs to every row; P S. of bfloat16 has the range of floats.
  static constexpr bool repairs_rows = tile::Visibility<features>::hides || features.dropout || type == Type::float16;
  using Element = ptx::Element<type>;
  using Rows = tile::Rows<const Element>;
  using QTile = tile::SwizzledTile<block_q, dim>;
  using OTile = tile::SwizzledTile<block_q, dim_v>;
  using KTile = tile::SwizzledTile<block_kv, dim>;
  using VTile = tile::SwizzledTile<block_kv, dim_v>;
  using Scores = float[1][block_kv / 8][4];
  using Output = float[1][dim_v / 8][4];
  using Operand = unsigned[kv_steps][4];
  static_assert(block_q == 16 * config.num_warps && block_kv % 16 == 0);

  struct Stage {
    KTile K, K_tangent;
    VTile V, V_tangent;
  };
  struct SharedStorage {
    union {
      QTile Q;
      OTile O;  // replaces Q: a warp writes only rows whose queries it alone has read
    };
    union {
      QTile Q_tangent;
      OTile O_tangent;
    };
    Stage stages[num_stages];
  };

  const AttentionArgs& args;
  SharedStorage& storage;
  const tile::Sequence& sequence;  // tangent/sm90: in shared memory, where it takes no registers
  const int head_idx, q_begin;
  const int thread = threadIdx.x, lane = threadIdx.x % 32;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const tile::LanePlace place{lane};
  const tile::Score<features> score;
  const tile::Tangents<features> tangents;
  const unsigned Q_smem = ptx::shared_address(&storage.Q), Q_tangent_smem = ptx::shared_address(&storage.Q_tangent);

  unsigned Q[Q_in_registers ? q_steps : 1][4], Q_tangent[Q_in_registers ? q_steps : 1][4];
  Output O{}, A{};
  tile::RowState rows;
  float center[2] = {0, 0};
  float moment[2] = {0, 0};  // this lane's part of the sum of W

  __device__ __forceinline__ TangentSm80(const AttentionArgs& arguments, SharedStorage& shared, const tile::Sequence& s,
                                         int head, int first_query)
      : args(arguments),
        storage(shared),
        sequence(s),
        head_idx(head),
        q_begin(first_query),
        score(arguments, s, head),
        tangents(arguments, s, head) {}

  /// The next tile to visit: the last one up to tile_idx with a pair that the masks show; else tiles.begin - 1.
  __device__ __forceinline__ int tile_below(int tile_idx, const tile::TileRange& tiles,
                                            tile::VisibleTiles& visible_tiles) const {
    if constexpr (!tile::Visibility<features>::skips_tiles) return tile_idx;
    return visible_tiles.previous(tile_idx, tiles.begin, [&](int other) {
      return other >= tiles.begin && other < tiles.end &&
             !score.sight.template masks_hide<block_q, block_kv>(q_begin, other * block_kv);
    });
  }

  template <int copying, int width, class Tile>
  __device__ __forceinline__ static void copy(Tile& to, const Rows& from, int its_thread) {
    tile::copy_tile_async<copying, width, Tile>(ptx::shared_address(&to), from, its_thread);
  }
  __device__ __forceinline__ Rows keys(const TensorView& view, int kv_begin) const {
    Rows result = tile::key_rows<const Element, features>(view, sequence, head_idx / args.group);
    result.count = sequence.visible_kv;
    return result.from(kv_begin);
  }
  // `copying` threads, of which its_thread is one, start copies of these rows and of their tangents.
  template <int copying>
  __device__ __forceinline__ void load_queries(int its_thread) const {
    copy<copying, head_dim>(storage.Q, tile::query_rows<const Element, features>(args.Q, sequence, head_idx).from(q_begin),
                            its_thread);
    if (tangents.has_Q) copy<copying, head_dim>(storage.Q_tangent, tangents.Q.from(q_begin), its_thread);
  }
  template <int copying>
  __device__ __forceinline__ void load_keys(Stage& stage, int kv_begin, int its_thread) const {
    copy<copying, head_dim>(stage.K, keys(args.K, kv_begin), its_thread);
    if (tangents.has_K) copy<copying, head_dim>(stage.K_tangent, tangents.K.from(kv_begin), its_thread);
  }
  template <int copying>
  __device__ __forceinline__ void load_values(Stage& stage, int kv_begin, int its_thread) const {
    copy<copying, head_dim_v>(stage.V, keys(args.V, kv_begin), its_thread);
    if (tangents.has_V) copy<copying, head_dim_v>(stage.V_tangent, tangents.V.from(kv_begin), its_thread);
  }
  __device__ __forceinline__ void load_stage(Stage& stage, int kv_begin) const {
    load_keys<threads>(stage, kv_begin, thread);
    load_values<threads>(stage, kv_begin, thread);
    ptx::copy_async_commit();
  }

  __device__ __forceinline__ void read_queries(unsigned (&fragment)[4], unsigned address, int step) const {
    ptx::ldmatrix_x4(fragment, QTile::step(tile::a_address<QTile>(address, warp_row, lane), 2 * step));
  }
  __device__ __forceinline__ void queries_of(unsigned (&fragment)[4], int step) const {
    if constexpr (Q_in_registers) {
#pragma unroll
      for (int e = 0; e < 4; ++e) fragment[e] = Q[step][e];
    } else {
      read_queries(fragment, Q_smem, step);
    }
  }
  __device__ __forceinline__ void query_tangents_of(unsigned (&fragment)[4], int step) const {
    if constexpr (Q_in_registers) {
#pragma unroll
      for (int e = 0; e < 4; ++e) fragment[e] = Q_tangent[step][e];
    } else {
      read_queries(fragment, Q_tangent_smem, step);
    }
  }
  __device__ __forceinline__ void keep_queries() {
#pragma unroll
    for (int step = 0; step < q_steps; ++step) {
      read_queries(Q[step], Q_smem, step);
      if (tangents.has_Q) read_queries(Q_tangent[step], Q_tangent_smem, step);
    }
  }

  /// S = Q K^T, and S. = Q. K^T if there is a Q.
  template <bool has_Q>
  __device__ __forceinline__ void multiply_both(Scores& S, Scores& S_tangent, unsigned K_smem) const {
    const unsigned address = tile::b_transposed_address<KTile>(K_smem, 0, ptx::hide_from_compiler(lane));
#pragma unroll
    for (int step = 0; step < q_steps; ++step) {
      unsigned of_Q[4], of_tangent[4];
      queries_of(of_Q, step);
      if constexpr (has_Q) query_tangents_of(of_tangent, step);
#pragma unroll
      for (int n = 0; n < block_kv / 16; ++n) {
        unsigned B[4];
        ptx::ldmatrix_x4(B, KTile::step(address, 2 * step) + n * 16 * 128);
        tile::mma_pair<type>(S[0][2 * n], S[0][2 * n + 1], of_Q, B);
        if constexpr (has_Q) tile::mma_pair<type>(S_tangent[0][2 * n], S_tangent[0][2 * n + 1], of_tangent, B);
      }
    }
  }
  __device__ __forceinline__ void multiply_keys(Scores& S, Scores& S_tangent, const Stage& stage) const {
    if (tangents.has_Q) {
      multiply_both<true>(S, S_tangent, ptx::shared_address(&stage.K));
    } else {
      multiply_both<false>(S, S_tangent, ptx::shared_address(&stage.K));
    }
    if (!tangents.has_K) return;
    const unsigned address =
        tile::b_transposed_address<KTile>(ptx::shared_address(&stage.K_tangent), 0, ptx::hide_from_compiler(lane));
    tile::multiply<type, q_steps>(
        S_tangent, [&](unsigned(&of_Q)[4], int, int step) { queries_of(of_Q, step); },
        [&](unsigned(&B)[4], int n, int step) { ptx::ldmatrix_x4(B, KTile::step(address, 2 * step) + n * 16 * 128); });
  }

  /// Turns dot products into scores and their tangents, -inf and 0 if hidden, in the units of the scores.
  template <bool some_hidden>
  __device__ __forceinline__ void score_tile(Scores& S, Scores& S_tangent, int kv_begin) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = q_begin + warp_row + place.row + 8 * half;
      const tile::KeyRange range = score.sight.keys_of(i);
      // Even if no score is hidden, rows past the last query may be in the tile. They read the last row's bias and are not
      // stored.
      const int existing = some_hidden ? i : tile::min(i, score.sight.len_q - 1);
#pragma unroll
      for (int n = 0; n < block_kv / 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          const int j = kv_begin + 8 * n + place.column + e % 2;
          if (some_hidden && !score.sight.visible(range, i, j)) {
            S[0][n][e] = -tile::infinity, S_tangent[0][n][e] = 0;
          } else if constexpr (!tile::Score<features>::linear) {
            const tile::ScoreTangent pair = tangents.of(score, S[0][n][e], S_tangent[0][n][e], existing, j);
            S[0][n][e] = pair.score, S_tangent[0][n][e] = pair.tangent;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void modify(Scores& S, Scores& S_tangent, int kv_begin) const {
    if (!score.sight.template all_visible<block_q, block_kv>(q_begin, kv_begin)) {
      ptx::path<warpgroups ? "tangent/sm90 edge tile" : "tangent/sm80 edge tile">();
      score_tile<true>(S, S_tangent, kv_begin);
    } else if constexpr (!tile::Score<features>::linear) {
      ptx::path<warpgroups ? "tangent/sm90 inner tile with options" : "tangent/sm80 inner tile with options">();
      score_tile<false>(S, S_tangent, kv_begin);
    }
  }

  __device__ __forceinline__ static float sum_of_row(float part) {
    return tile::reduce_quad(part, [](float a, float b) { return a + b; });
  }

  /// Maxima that rise by less are kept, so sums move in few tiles. P is up to 2^slack then.
  static constexpr int slack = 4;

  /// S becomes P, and S. becomes W, relative to the center so far. Returns whether the maximum of a row of the warp has
  /// risen: move() follows.
  __device__ __forceinline__ bool exponentiate(Scores& S, Scores& S_tangent, float (&rescale)[2]) {
    const float scale = score.unit_scale();
    rows.template update<0, features.bias || features.score_program, slack>(S[0], scale * tile::log2_e, rescale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float added = 0;
#pragma unroll
      for (int n = 0; n < block_kv / 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          S_tangent[0][n][e] = S[0][n][e] * ptx::fma(S_tangent[0][n][e], scale, -center[half]);
          added += S_tangent[0][n][e];
        }
      }
      moment[half] = ptx::fma(moment[half], rescale[half], added);
    }
    return ptx::any(rescale[0] != 1 || rescale[1] != 1);
  }

  /// Moves W, the moments, O and A to the new maxima and to a new center, the estimate of lse. from the keys so far.
  __device__ __forceinline__ void move(const Scores& P, Scores& W, const float (&rescale)[2]) {
    float step[2];  // change of the center
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = rows.total(half), of_row = sum_of_row(moment[half]);
      step[half] = total > 0 ? of_row / total : 0;
      moment[half] = ptx::fma(-step[half], rows.sum[half], moment[half]);
      center[half] += step[half];
    }
#pragma unroll
    for (int n = 0; n < block_kv / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) W[0][n][e] = ptx::fma(-step[e / 2], P[0][n][e], W[0][n][e]);
    }
#pragma unroll
    for (int n = 0; n < dim_v / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        O[0][n][e] *= rescale[e / 2];
        A[0][n][e] = ptx::fma(A[0][n][e], rescale[e / 2], -step[e / 2] * O[0][n][e]);
      }
    }
  }

  /// Sets dropped weights to 0. The factor 1 / (1 - p) is applied at the end.
  __device__ __forceinline__ void drop_tile(Scores& P, Scores& W, int kv_begin) const {
    const tile::Dropout dropout(args, sequence.batch_idx, head_idx);
    const unsigned row = tile::Dropout::row_counter(q_begin + warp_row + place.row);
#pragma unroll
    for (int n = 0; n < block_kv / 16; ++n) {
      const tile::DropoutWords random = dropout.words(row, tile::Dropout::column_counter(kv_begin + 16 * n + place.column));
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (random.at(e / 2 % 2, e / 4, e % 2) >= dropout.threshold) continue;
        P[0][2 * n + e / 4][e % 4] = W[0][2 * n + e / 4][e % 4] = 0;
      }
    }
  }

  /// O += P V and A += W V, then A += P V.
  __device__ __forceinline__ void add_values(const Scores& P, const Scores& W, const Stage& stage) {
    Operand of_P;
#pragma unroll
    for (int step = 0; step < kv_steps; ++step) tile::pack_a<type>(of_P[step], P[0][2 * step], P[0][2 * step + 1]);
    const unsigned V_address =
        tile::b_address<VTile>(ptx::shared_address(&stage.V), 0, ptx::hide_from_compiler(lane));
#pragma unroll
    for (int step = 0; step < kv_steps; ++step) {
      unsigned of_W[4];
      tile::pack_a<type>(of_W, W[0][2 * step], W[0][2 * step + 1]);
#pragma unroll
      for (int n = 0; n < dim_v / 16; ++n) {
        unsigned B[4];
        ptx::ldmatrix_x4_trans(B, VTile::step(V_address, 2 * n) + step * 16 * 128);
        tile::mma_pair<type>(O[0][2 * n], O[0][2 * n + 1], of_P[step], B);
        tile::mma_pair<type>(A[0][2 * n], A[0][2 * n + 1], of_W, B);
      }
    }
    if (!tangents.has_V) return;
    const unsigned address =
        tile::b_address<VTile>(ptx::shared_address(&stage.V_tangent), 0, ptx::hide_from_compiler(lane));
#pragma unroll
    for (int step = 0; step < kv_steps; ++step) {
#pragma unroll
      for (int n = 0; n < dim_v / 16; ++n) {
        unsigned B[4];
        ptx::ldmatrix_x4_trans(B, VTile::step(address, 2 * n) + step * 16 * 128);
        tile::mma_pair<type>(A[0][2 * n], A[0][2 * n + 1], of_P[step], B);
      }
    }
  }

  __device__ __forceinline__ void attend(const tile::TileRange& tiles) {
    tile::VisibleTiles visible_tiles;
    int tile_idx = tile_below(tiles.end - 1, tiles, visible_tiles), stage_idx = 0;
    if (tile_idx < tiles.begin) return;  // the masks hide all tiles
    load_queries<threads>(thread);
    load_stage(storage.stages[0], tile_idx * block_kv);
    if constexpr (Q_in_registers) {
      ptx::copy_async_wait<0>();
      __syncthreads();  // Q has landed: cp.async waits only for a thread's own copies
      keep_queries();
    }
#pragma unroll 1
    while (tile_idx >= tiles.begin) {
      const int kv_begin = tile_idx * block_kv, next_idx = tile_below(tile_idx - 1, tiles, visible_tiles);
      Stage& stage = storage.stages[stage_idx];
      stage_idx ^= 1;
      ptx::copy_async_wait<0>();
      __syncthreads();  // this stage has landed, and every warp is done with the other one
      if (next_idx >= tiles.begin) load_stage(storage.stages[stage_idx], next_idx * block_kv);
      Scores S{}, S_tangent{};
      multiply_keys(S, S_tangent, stage);
      modify(S, S_tangent, kv_begin);
      float rescale[2];
      if (exponentiate(S, S_tangent, rescale)) move(S, S_tangent, rescale);
      if constexpr (features.dropout) drop_tile(S, S_tangent, kv_begin);
      add_values(S, S_tangent, stage);
      tile_idx = next_idx;
    }
  }

  /// Writes lse and lse., and O and O. through the warp's own rows of shared memory. `second`: writes each row's statistics
  /// for second derivatives instead of lse and O.
  template <bool second = false>
  __device__ __forceinline__ void finish() {
    const float scale_log2 = score.unit_scale() * tile::log2_e;
    float sink = -tile::infinity, sink_tangent = 0;
    if constexpr (features.sink) {
      sink = args.sink[head_idx];
      if (args.sink_tangent != nullptr) sink_tangent = args.sink_tangent[head_idx];
    }
    float lse[2], mu[2], check = 0;  // becomes NaN if a result is not finite
    if constexpr (warpgroups) {
      ptx::barrier_sync(1 + warp_row / 64, 128);  // a warpgroup reads the queries of all its rows, which the results replace
    } else {
      __syncwarp();  // all lanes have read the queries, which the results replace
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + place.row + 8 * half, i = q_begin + row;
      const bool used = i < sequence.len_q;
      float factor = rows.finish(half, scale_log2, used ? sink : -tile::infinity, lse[half]);
      // From the center to lse.: the share of the keys, and of the sink, which has the rest of the probability.
      const float keys = rows.total(half) * factor;
      float above = sum_of_row(moment[half]) * factor + center[half] * (keys - 1), lse_tangent = above + center[half];
      if (factor == 0) above = lse_tangent = 0;
      if (features.sink && used && lse[half] != -tile::infinity) {
        const float of_sink = tile::exp(sink - lse[half]) * sink_tangent;
        above += of_sink, lse_tangent += of_sink;
      }
      if constexpr (features.dropout) factor *= args.keep_scale;
      if (!used) factor = 0, lse[half] = -tile::infinity, lse_tangent = 0;
      if (place.column == 0 && i < sequence.rows_q) {
        const long long statistics = tile::statistics_offset<features>(args, sequence, head_idx) + i;
        if (!second && args.lse != nullptr) args.lse[statistics] = lse[half];
        if (args.lse_tangent != nullptr) args.lse_tangent[statistics] = lse_tangent;
      }
      mu[half] = lse_tangent;
      float of_out = 0, of_tangent = 0;
#pragma unroll
      for (int n = 0; n < dim_v / 8; ++n) {
        float out[2], tangent[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          out[e] = factor == 0 ? 0 : O[0][n][2 * half + e] * factor;
          tangent[e] = factor == 0 ? 0 : ptx::fma(A[0][n][2 * half + e], factor, -above * out[e]);
          if constexpr (repairs_rows) check = ptx::fma(tangent[e], 0, ptx::fma(out[e], 0, check));
          if constexpr (second) {
            const float gradient = dO_at(i, 8 * n + place.column + e);
            of_out = ptx::fma(gradient, out[e], of_out), of_tangent = ptx::fma(gradient, tangent[e], of_tangent);
          }
        }
        const unsigned offset = OTile::offset(row, n) + 2 * place.column;
        ptx::store_shared(Q_smem + offset, ptx::pack<type>(out[0], out[1]));
        ptx::store_shared(Q_tangent_smem + offset, ptx::pack<type>(tangent[0], tangent[1]));
      }
      if constexpr (second) write_row(i, mu[half], sum_of_row(of_out), sum_of_row(of_tangent), place.column == 0);
    }
    __syncwarp();  // all have written the warp's rows
    if (repairs_rows && ptx::any(check != check)) repair<second>(lse, mu);
    const auto to = [&](const TensorView& view) {
      return tile::query_rows<Element, features>(view, sequence, head_idx).from(q_begin);
    };
    if constexpr (!second) tile::store_tile<32, head_dim_v, 16, OTile>(Q_smem, warp_row, to(args.O), lane);
    if (args.O_tangent == nullptr) return;
    tile::store_tile<32, head_dim_v, 16, OTile>(Q_tangent_smem, warp_row, to(tile::tangent_view(args.O, args.O_tangent)),
                                                lane);
  }

  /// An element of dO; 0 without dO.
  __device__ __forceinline__ float dO_at(int i, int column) const {
    if (i >= sequence.len_q || column >= head_dim_v) return 0;
    return ptx::to_float(tile::query_rows<const Element, features>(args.dO, sequence, head_idx).row(i)[column]);
  }
  /// delta, lse. and R of query i, from dot(dO, O) and dot(dO, O.).
  __device__ __forceinline__ void write_row(int i, float lse_tangent, float of_out, float of_tangent, bool writes) const {
    if (!writes || i >= sequence.len_q) return;
    const long long row = tile::statistics_offset<features>(args, sequence, head_idx) + i;
    const float delta = of_out - (args.dlse != nullptr ? args.dlse[row] : 0);
    tile::workspace<float>(args, BackwardRegion::delta)[row] = delta;
    tile::workspace<float>(args, SecondRegion::lse_tangent)[row] = lse_tangent;
    tile::workspace<float>(args, SecondRegion::rest)[row] = of_tangent - lse_tangent * delta;
  }

  /// Computes the warp's rows again, over visible pairs only.
  template <bool second>
  __device__ __forceinline__ void repair(const float (&lse)[2], const float (&mu)[2]) const {
    ptx::path<warpgroups ? "tangent/sm90 repaired row" : "tangent/sm80 repaired row">();
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
      const float row_lse = ptx::shuffle(r < 8 ? lse[0] : lse[1], r % 8 * 4);
      const int i = q_begin + warp_row + r;
      if (i >= sequence.len_q) continue;
      const auto row = repaired_tangent<config>(args, sequence, head_idx, i, row_lse);
      if constexpr (second) {
        const auto* dO = tile::query_rows<const Element, features>(args.dO, sequence, head_idx).row(i);
        write_row(i, ptx::shuffle(r < 8 ? mu[0] : mu[1], r % 8 * 4), row.O.dot(dO, lane), row.O_tangent.dot(dO, lane),
                  lane == 0);
      }
      row.O.template store<type, OTile>(Q_smem, warp_row + r, lane);
      row.O_tangent.template store<type, OTile>(Q_tangent_smem, warp_row + r, lane);
    }
    __syncwarp();  // the rows have been replaced
  }
};

/// Calls use(sequence, head_idx, q_begin) with the queries of this thread block, if there are any.
template <ForwardConfig config, class Use>
__device__ __forceinline__ void with_tangent_block(const AttentionArgs& args, const Use& use) {
  const int num_tiles = tile::ceil_div(args.seq_q, config.block_q);
  const auto block = tile::query_block(tile::by_work<config.features>(blockIdx.x, gridDim.x, num_tiles, args.seq_kv),
                                       num_tiles, args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int q_begin = block.tile_idx * config.block_q;
  if (q_begin < sequence.rows_q) use(sequence, block.head_idx, q_begin);
}

/// The work of one thread block. `second`: for second derivatives.
template <ForwardConfig config, bool second>
__device__ __forceinline__ void tangent_sm80_block(const AttentionArgs& args,
                                                   typename TangentSm80<config>::SharedStorage& storage) {
  with_tangent_block<config>(args, [&](const tile::Sequence& sequence, int head_idx, int q_begin) {
    TangentSm80<config> kernel(args, storage, sequence, head_idx, q_begin);
    const auto tiles = kernel.score.sight.template key_tiles<config.block_q, config.block_kv>(q_begin);
    if (tiles.begin < tiles.end) kernel.attend(tiles);
    kernel.template finish<second>();
  });
}

template <ForwardConfig config>
__device__ __forceinline__ void tangent_sm80(const AttentionArgs& args) {
  using Kernel = TangentSm80<config>;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  tile::clear_output_tail<config>(args, threadIdx.x, Kernel::threads);
  tile::clear_tangent_tail<config>(args, threadIdx.x, Kernel::threads);
  tangent_sm80_block<config, false>(args, storage);
}

}  // namespace flash_attention
