#pragma once

// The facts of backward about a block of query rows, and the gradient of a tile of scores. docs/numerics.md has the
// formulas.

#include "cpu/prefill/key_mass.h"
#include "cpu/tile/dropout.h"
#include "cpu/tile/hidden.h"

namespace flash_attention::cpu {
namespace {

/// The terms of each row of a block, from the forward pass.
struct RowTerms {
  alignas(64) float lse[block_q];    // in units of log2(e); +inf for a row that sees nothing: P is 0
  alignas(64) float delta[block_q];  // dot(dO, O) - dlse, the gradient through the softmax's normalisation
  alignas(64) float dentropy[block_q];  // only if the entropy has a gradient

  void load_terms(const Call& call, const RowBlock& block) {
    with_element(call.dtype, [&](auto type) {
      using T = decltype(type);
      for (int lane = 0; lane < block.rows; ++lane) {
        const auto* dO = reinterpret_cast<const typename T::Stored*>(block.row(call, call.dout, lane));
        const auto* O = reinterpret_cast<const typename T::Stored*>(block.row(call, call.out, lane));
        Vec sum{};
        for (int c = 0; c < call.head_dim_v; c += vector_lanes) {
          sum += load_some<T>(dO + c, call.head_dim_v - c) * load_some<T>(O + c, call.head_dim_v - c);
        }
        delta[lane] = sum_lanes(sum);
      }
    });
    for (int lane = 0; lane < block.rows; ++lane) {
      const std::int64_t row = block.row_idx(call, lane);
      if (call.dlse != nullptr) delta[lane] -= call.dlse[row];
      constexpr float lowest = -1e7f;  // below it a float has no room for the sum next to the maximum: docs/numerics.md
      lse[lane] = block.unused[lane] || call.lse[row] < lowest ? infinity : call.lse[row] * log2_e;
      if (call.dkey_mass != nullptr || call.dentropy != nullptr) add_statistics(call, block, lane, row);
    }
    for (int lane = block.rows; lane < block.lanes(); ++lane) {
      lse[lane] = lse[lane - 1], delta[lane] = delta[lane - 1], dentropy[lane] = dentropy[lane - 1];
    }
  }

  /// Adds to delta the terms of gradients of key masses and of the entropy: the sum of p times the gradient of p.
  void add_statistics(const Call& call, const RowBlock& block, int lane, std::int64_t row) {
    dentropy[lane] = 0;
    if (lse[lane] == infinity) return;
    if (call.dkey_mass != nullptr) delta[lane] += region<const float>(call, plan::CpuRegion::mass_terms)[row];
    if (call.dentropy == nullptr) return;
    const float of_sink = call.sink == nullptr ? 0 : exp2_one(call.sink[block.head[lane]] * log2_e - lse[lane]);
    dentropy[lane] = call.dentropy[row];
    delta[lane] += dentropy[lane] * (call.entropy[row] - (1 - of_sink));
  }
};

/// For a vector of scores: P with dropout, and the gradient of the score before the soft cap.
struct ScoreGradient {
  Vec p, ds;

  /// kept: dropout's factors, otherwise 1.
  FLASH_ATTENTION_INLINE ScoreGradient(Vec s, Vec dp, Vec kept, Vec lse, Vec delta) {
    const Vec probability = exp2(s - lse);
    dp = select(kept == 0.0f, Vec{}, dp * kept);  // V may be NaN if it was dropped
    // dP of a hidden score may be NaN, and so may the lse of a row whose query is NaN.
    p = select((s == -infinity) | (kept == 0.0f), Vec{}, probability * kept);
    ds = select(s == -infinity, Vec{}, probability * (dp - delta));
  }
};

/// Turns the gradient of the capped score into that of the raw score. The derivative of a hidden score may be NaN.
FLASH_ATTENTION_INLINE Vec through_softcap(Vec ds, Vec derivative) { return select(ds == 0.0f, ds, ds * derivative); }

/// A block's rows in lanes.
struct GradientRows : RowTerms {
  alignas(64) float Qt[max_head_dim * block_q];   // query_factor * Q^T
  alignas(64) float dOt[max_head_dim * block_q];  // dO^T

  void load_rows(const Call& call, const RowBlock& block) {
    gather_rows(call, block, call.q, call.head_dim, query_factor(call), Qt);
    gather_rows(call, block, call.dout, call.head_dim_v, 1, dOt);
    load_terms(call, block);
  }
};

/// A tile's scores and their gradients, each [keys][lanes].
struct GradientTile {
  alignas(64) float P[block_kv * block_q];           // first S, then P with dropout
  alignas(64) float dS[block_kv * block_q];          // first dP, then dS before softcap
  alignas(64) float derivative[block_kv * block_q];  // of softcap
  alignas(64) float keep[block_kv * block_q];        // of dropout
  alignas(64) float slope[block_kv * block_q];       // of the program
  alignas(64) float statistics[block_kv * block_q];  // terms of dS from the gradients of statistics

  /// P * (dkey_mass - dentropy (ln P + 1)) from S. Dropout has no effect on it.
  void differentiate_statistics(const Call& call, const RowBlock& block, const Tile& tile, const RowTerms& rows) {
    for (int i = 0; i < tile.count * block.lanes(); i += vector_lanes) store(statistics + i, Vec{});
    if (call.dkey_mass != nullptr) {
      const auto row_of = [&](int lane) {
        return call.dkey_mass + mass_place(call, block.sequence, block.batch, block.head[lane]);
      };
      for_each_score<Float32>(block, tile, row_of, [&](int key, int v, Vec gradient) {
        store(statistics + (key * block.vectors + v) * vector_lanes, gradient);
      });
    }
    for (int key = 0; key < tile.count; ++key) {
      for (int v = 0; v < block.lanes(); v += vector_lanes) {
        const int i = key * block.lanes() + v;
        const Vec s = load(P + i), log_p = s - load(rows.lse + v), p = exp2(log_p);
        Vec gradient = load(statistics + i);
        if (call.dentropy != nullptr) gradient -= load(rows.dentropy + v) * (log_p * ln_2 + 1.0f);
        store(statistics + i, select((s == -infinity) | (p == 0.0f), Vec{}, p * gradient));
      }
    }
  }

  /// P = 2^(S - lse); dS = P * (dP - delta) before the program; P and dP multiplied by dropout's factors.
  void compute(const Call& call, const RowBlock& block, const Tile& tile, const GradientRows& rows, FloatRows K,
               FloatRows V, NextTile* next = nullptr) {
    compute_after_program(call, block, tile, rows, K, V, next, {.slope = slope});
    if (!call.has_score_program()) return;
    for (int i = 0; i < tile.count * block.lanes(); i += vector_lanes) {
      store(dS + i, cpu::through_softcap(load(dS + i), load(slope + i)));
    }
  }

  /// The same, with the gradient of the score from the program.
  void compute_after_program(const Call& call, const RowBlock& block, const Tile& tile, const GradientRows& rows,
                             FloatRows K, FloatRows V, NextTile* next, ProgramTerms terms) {
    const int lanes = block.lanes();
    score_tile(call, block, tile, K, rows.Qt, P, {.first = derivative}, next, terms);
    const int step = diagonal_step(tile);
    for (int key = 0; key < tile.count; key += step)
      multiply_keys(block, tile, key, smaller(tile.count - key, step), V, rows.dOt, call.head_dim_v, dS);
    if (call.dropout) dropout_factors(call, block, tile, keep);
    const bool with_statistics = call.dkey_mass != nullptr || call.dentropy != nullptr;
    if (with_statistics) differentiate_statistics(call, block, tile, rows);
    for (int key = 0; key < tile.count; ++key) {
      for (int v = 0; v < lanes; v += vector_lanes) {
        const int i = key * lanes + v;
        const Vec kept = call.dropout ? load(keep + i) : splat(1.0f);
        const ScoreGradient gradient(load(P + i), load(dS + i), kept, load(rows.lse + v), load(rows.delta + v));
        store(P + i, gradient.p);
        store(dS + i, gradient.ds);
      }
    }
    if (!with_statistics) return;
    for (int i = 0; i < tile.count * lanes; i += vector_lanes) store(dS + i, load(dS + i) + load(statistics + i));
  }

  /// Turns the gradients of the capped scores into those of the raw scores.
  void through_softcap(const Call& call, int size) {
    if (call.softcap == 0) return;
    for (int i = 0; i < size; i += vector_lanes) {
      store(dS + i, cpu::through_softcap(load(dS + i), load(derivative + i)));
    }
  }
};

}  // namespace
}  // namespace flash_attention::cpu
