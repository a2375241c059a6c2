#include "cpu/append.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/threads/parallel.h"
#include "plan/append.h"
#include "support/groups.h"
#include "support/narrow.h"

// append on the CPU: a token an item, a row of a head at a time, in float.

namespace flash_attention::cpu {
namespace {

/// Reads elements of any type as float.
void read(Dtype dtype, const void* from, std::int64_t begin, std::int64_t count, float* to) {
  if (dtype == Dtype::float32) {
    std::copy_n(static_cast<const float*>(from) + begin, count, to);
    return;
  }
  const auto* bits = static_cast<const std::uint16_t*>(from) + begin;
  for (std::int64_t i = 0; i < count; ++i)
    to[i] = dtype == Dtype::float16 ? support::float_of_fp16(bits[i]) : support::float_of_bf16(bits[i]);
}

template <class T, class Round>
void write_as(void* to, std::int64_t begin, std::int64_t count, const float* from, Round round) {
  auto* elements = static_cast<T*>(to) + begin;
  for (std::int64_t i = 0; i < count; ++i) elements[i] = static_cast<T>(round(from[i]));
}

void write(Dtype dtype, void* to, std::int64_t begin, std::int64_t count, const float* from) {
  switch (dtype) {
    case Dtype::float32:
      std::copy_n(from, count, static_cast<float*>(to) + begin);
      return;
    case Dtype::float16:
      return write_as<std::uint16_t>(to, begin, count, from, support::fp16_of_float);
    case Dtype::bfloat16:
      return write_as<std::uint16_t>(to, begin, count, from, support::bf16_of_float);
    case Dtype::float8_e4m3:
      return write_as<std::uint8_t>(to, begin, count, from, support::e4m3_of_float);
    case Dtype::float8_e5m2:
      return write_as<std::uint8_t>(to, begin, count, from, support::e5m2_of_float);
    case Dtype::int8:
      return write_as<std::int8_t>(to, begin, count, from, support::int8_of_float);
    case Dtype::nvfp4:  // Worker::write_groups
    case Dtype::mxfp4:
    case Dtype::int4:
      return;
  }
}

float largest_code(Dtype dtype) {
  if (dtype == Dtype::float8_e4m3) return support::largest_e4m3;
  return dtype == Dtype::float8_e5m2 ? support::largest_e5m2 : support::largest_int8;
}

std::int64_t at(const Strides& s, std::int64_t batch, std::int64_t row, std::int64_t head) {
  return batch * s.batch + row * s.seq + head * s.head;
}

/// cos and sin of one position, and whether pairs are neighbours.
struct Angle {
  const float* cos;
  const float* sin;
  std::int64_t pairs;
  bool interleaved;

  /// `back`: the direction of gradients.
  void rotate(float* x, bool back = false) const {
    for (std::int64_t p = 0; p < pairs; ++p) {
      float &first = x[interleaved ? 2 * p : p], &second = x[interleaved ? 2 * p + 1 : p + pairs];
      const float a = first, b = second, s = back ? -sin[p] : sin[p];
      first = a * cos[p] - b * s;
      second = a * s + b * cos[p];
    }
  }
};

/// The norm of a row: its weights, 1 if there are none.
struct Norm {
  bool exists;
  float weights[plan::append_head_dim];

  Norm(const AppendProblem& p, bool wanted, const void* given) : exists(wanted) {
    if (!wanted) return;
    if (given == nullptr) {
      std::fill_n(weights, p.head_dim, 1.0f);
      return;
    }
    read(p.norm_dtype, given, 0, p.head_dim, weights);
    if (p.norm_plus_one) std::for_each_n(weights, p.head_dim, [](float& w) { w += 1; });
  }

  static float inverse_rms(const AppendProblem& p, const float* x) {
    float squares = 0;
    for (std::int64_t d = 0; d < p.head_dim; ++d) squares += x[d] * x[d];
    return 1 / std::sqrt(squares / static_cast<float>(p.head_dim) + p.norm_eps);
  }

  void apply(const AppendProblem& p, float* x) const {
    if (!exists) return;
    const float inverse = inverse_rms(p, x);
    for (std::int64_t d = 0; d < p.head_dim; ++d) x[d] = x[d] * inverse * weights[d];
  }

  /// Turns the gradient of the result, in place, into that of x; adds that of the weights.
  void gradient(const AppendProblem& p, float* x, float* gradient, float* sums) const {
    if (!exists) return;
    const float inverse = inverse_rms(p, x);
    float mean = 0;
    for (std::int64_t d = 0; d < p.head_dim; ++d) {
      x[d] *= inverse;
      sums[d] += gradient[d] * x[d];
      gradient[d] *= weights[d];
      mean += gradient[d] * x[d];
    }
    mean /= static_cast<float>(p.head_dim);
    for (std::int64_t d = 0; d < p.head_dim; ++d) gradient[d] = (gradient[d] - x[d] * mean) * inverse;
  }
};

struct Worker {
  const AppendProblem& p;
  const AppendBuffers& b;
  std::int64_t queries = plan::query_tokens(p), rows = plan::new_tokens(p);
  Norm q_norm{p, p.q_norm, b.q_norm_weight}, k_norm{p, p.k_norm, b.k_norm_weight};

  struct Token {
    std::int64_t sequence, batch, row, position, angle;
  };

  Token token_of(std::int64_t idx, const std::int32_t* starts, std::int64_t seq, bool same_angle) const {
    if (p.placed) return {b.sequences[idx], 0, idx, b.positions[idx], b.positions[idx]};
    Token token{.sequence = 0, .batch = 0, .row = idx, .position = 0, .angle = 0};
    std::int64_t step = idx;
    if (starts != nullptr) {
      token.sequence = std::upper_bound(starts, starts + p.batch + 1, idx) - starts - 1;
      if (token.sequence < 0 || token.sequence >= p.batch)
        return {.sequence = -1, .batch = 0, .row = idx, .position = 0, .angle = 0};
      step -= starts[token.sequence];
    } else {
      token.sequence = token.batch = idx / seq;
      token.row = step = idx % seq;
    }
    const std::int64_t length = b.lengths != nullptr ? b.lengths[token.sequence] : 0;
    token.position = length + step;
    token.angle = (b.rotary_offsets != nullptr ? b.rotary_offsets[token.sequence] : length) + (same_angle ? 0 : step);
    return token;
  }

  /// The section whose angle a pair has.
  std::int64_t section_of(std::int64_t pair) const {
    if (p.sections_interleaved) {
      const std::int64_t section = pair % p.angle_sections;
      return pair < p.angle_sections * p.rotary_sections[section] ? section : 0;
    }
    std::int64_t section = 0;
    for (std::int64_t end = p.rotary_sections[0]; section + 1 < p.angle_sections && pair >= end;)
      end += p.rotary_sections[++section];
    return section;
  }

  std::int64_t row_of_table(std::int64_t position) const {
    return std::clamp<std::int64_t>(position, 0, p.rotary_positions - 1) * p.rotary_stride;
  }

  /// The angle of token `idx` of `tokens`.
  Angle angle_of(const Token& token, std::int64_t idx, std::int64_t tokens, float* tables) const {
    const std::int64_t pairs = p.rotary_dim / 2;
    if (p.angle_sections > 1) {
      for (std::int64_t pair = 0; pair < pairs; ++pair) {
        const std::int64_t row = row_of_table(b.angle_positions[section_of(pair) * tokens + idx]);
        read(p.rotary_dtype, b.cos, row + pair, 1, tables + pair);
        read(p.rotary_dtype, b.sin, row + pair, 1, tables + pairs + pair);
      }
    } else if (pairs > 0) {
      const std::int64_t row = row_of_table(p.angle_sections == 1 ? b.angle_positions[idx] : token.angle);
      read(p.rotary_dtype, b.cos, row, pairs, tables);
      read(p.rotary_dtype, b.sin, row, pairs, tables + pairs);
    }
    return {tables, tables + pairs, pairs, p.rotary_interleaved};
  }

  void query(std::int64_t idx, float* tables, float* row) const {
    const Token token = token_of(idx, b.cu_seqlens_q, p.seq_q, p.rotary_one_query);
    if (token.sequence < 0) {
      if (p.in_rows) clear(idx, p.heads_q, b.q_out, p.q_out_strides, row);
      return;
    }
    const Angle angle = angle_of(token, idx, queries, tables);
    for (std::int64_t head = 0; head < p.heads_q; ++head) {
      read(p.dtype, b.q, at(p.q_strides, token.batch, token.row, head), p.head_dim, row);
      q_norm.apply(p, row);
      angle.rotate(row);
      write(p.dtype, b.q_out, at(p.q_out_strides, token.batch, token.row, head), p.head_dim, row);
    }
  }

  /// Clears a row that belongs to no sequence; needed if every row must be written.
  void clear(std::int64_t idx, std::int64_t heads, void* to, const Strides& strides, float* row) const {
    std::fill_n(row, p.head_dim, 0.0f);
    for (std::int64_t head = 0; head < heads; ++head) write(p.dtype, to, at(strides, 0, idx, head), p.head_dim, row);
  }

  /// The factor of the row's codes: from a given scale, or from one that is computed here and written.
  float inverse_scale(float* scales, const Strides& strides, const Token& token, std::int64_t page, std::int64_t slot,
                      std::int64_t head, const float* row, std::int64_t dim) const {
    if (p.scales == ScaleKind::none) return 1;
    if (p.scales != ScaleKind::token) return 1 / scales[at(strides, token.sequence, 0, head)];
    float most = 0x1p-100f;
    for (std::int64_t i = 0; i < dim; ++i) most = std::fmax(most, std::fabs(row[i]));
    most = std::min(most, std::numeric_limits<float>::max());
    const float scale = most / largest_code(*p.cache_dtype);
    scales[at(strides, page, slot, head)] = scale;
    return 1 / scale;
  }

  /// A row of a cache of 4 bits, with the scales and zeros of its groups.
  void write_groups(const float* row, std::int64_t dim, void* cache, std::int64_t begin, void* scales, void* zeros,
                    std::int64_t first_group, const float* tensor_scale) const {
    auto* const codes = static_cast<std::uint8_t*>(cache) + begin;
    for (std::int64_t group = 0; group < dim / p.cache_group; ++group) {
      support::quantise_group(*p.cache_dtype, p.dtype, row + group * p.cache_group, p.cache_group,
                              p.scales == ScaleKind::none ? 1 : *tensor_scale, codes + group * p.cache_group / 2, scales,
                              zeros, first_group + group);
    }
  }

  void cache(std::int64_t idx, float* tables, float* row) const {
    const Token token = token_of(idx, b.cu_seqlens_new, p.seq_new, false);
    if (token.sequence < 0) {
      if (p.in_rows) clear(idx, p.heads_kv, b.k_cache, p.k_cache_strides, row);
      return;
    }
    std::int64_t page = token.sequence, slot = token.position;
    if (p.in_rows) page = token.batch, slot = token.row;
    if (p.page_size != 0) {
      page = b.page_table[token.sequence * p.page_table_stride + token.position / p.page_size];
      slot = token.position % p.page_size;
    }
    const Angle angle = angle_of(token, idx, rows, tables);
    for (std::int64_t head = 0; head < p.heads_kv; ++head) {
      read(p.dtype, b.k, at(p.k_strides, token.batch, token.row, head), p.head_dim, row);
      k_norm.apply(p, row);
      angle.rotate(row);
      if (p.cache_group != 0) {
        write_groups(row, p.head_dim, b.k_cache, at(p.k_cache_strides, page, slot, head), b.k_group_scale, b.k_group_zero,
                     at(p.k_group_strides, page, slot, head), b.k_scale);
        read(p.dtype, b.v, at(p.v_strides, token.batch, token.row, head), p.head_dim_v, row);
        write_groups(row, p.head_dim_v, b.v_cache, at(p.v_cache_strides, page, slot, head), b.v_group_scale, b.v_group_zero,
                     at(p.v_group_strides, page, slot, head), b.v_scale);
        continue;
      }
      const float k_factor = inverse_scale(b.k_scale, p.k_scale_strides, token, page, slot, head, row, p.head_dim);
      if (k_factor != 1) std::for_each_n(row, p.head_dim, [=](float& x) { x *= k_factor; });
      write(*p.cache_dtype, b.k_cache, at(p.k_cache_strides, page, slot, head), p.head_dim, row);
      if (p.in_rows) continue;

      read(p.dtype, b.v, at(p.v_strides, token.batch, token.row, head), p.head_dim_v, row);
      const float v_factor = inverse_scale(b.v_scale, p.v_scale_strides, token, page, slot, head, row, p.head_dim_v);
      if (v_factor != 1) std::for_each_n(row, p.head_dim_v, [=](float& x) { x *= v_factor; });
      write(*p.cache_dtype, b.v_cache, at(p.v_cache_strides, page, slot, head), p.head_dim_v, row);
    }
  }

  void operator()(std::int64_t item) const {
    float tables[plan::append_head_dim], row[plan::append_head_dim];
    if (item < queries) {
      query(item, tables, row);
    } else {
      cache(item - queries, tables, row);
    }
  }
};

/// Gradients: part `i` has every `parts`-th token, and separate sums of the weights' gradients.
struct GradientWorker {
  const Worker& forward;
  const AppendGradients& g;
  std::int64_t parts;

  void rows(std::int64_t part, bool of_q, float* sums) const {
    const AppendProblem& p = forward.p;
    const AppendBuffers& b = forward.b;
    const Norm& norm = of_q ? forward.q_norm : forward.k_norm;
    const std::int64_t tokens = of_q ? forward.queries : forward.rows, heads = of_q ? p.heads_q : p.heads_kv;
    const Strides& in = of_q ? p.q_strides : p.k_strides;
    const Strides& to = of_q ? p.dq_strides : p.dk_strides;
    const Strides& out = of_q ? p.dq_out_strides : p.dk_out_strides;
    float tables[plan::append_head_dim], x[plan::append_head_dim], row[plan::append_head_dim];
    for (std::int64_t idx = part; idx < tokens; idx += parts) {
      const Worker::Token token = forward.token_of(idx, of_q ? b.cu_seqlens_q : b.cu_seqlens_new,
                                                   of_q ? p.seq_q : p.seq_new, of_q && p.rotary_one_query);
      if (token.sequence < 0) {
        forward.clear(idx, heads, of_q ? g.dq : g.dk, to, row);
        continue;
      }
      const Angle angle = forward.angle_of(token, idx, tokens, tables);
      for (std::int64_t head = 0; head < heads; ++head) {
        read(p.dtype, of_q ? g.dq_out : g.dk_out, at(out, token.batch, token.row, head), p.head_dim, row);
        angle.rotate(row, true);
        if (norm.exists) read(p.dtype, of_q ? b.q : b.k, at(in, token.batch, token.row, head), p.head_dim, x);
        norm.gradient(p, x, row, sums);
        write(p.dtype, of_q ? g.dq : g.dk, at(to, token.batch, token.row, head), p.head_dim, row);
      }
    }
  }

  float* sums_of(std::int64_t part, bool of_q) const {
    return static_cast<float*>(g.workspace) + ((of_q ? 0 : parts) + part) * forward.p.head_dim;
  }

  void operator()(std::int64_t part) const {
    float unwanted[plan::append_head_dim];
    for (const bool of_q : {true, false}) {
      float* sums = (of_q ? g.dq_norm_weight : g.dk_norm_weight) != nullptr ? sums_of(part, of_q) : unwanted;
      std::fill_n(sums, forward.p.head_dim, 0.0f);
      rows(part, of_q, sums);
    }
  }
};

}  // namespace

void append_backward(const AppendProblem& problem, const AppendBuffers& buffers, const AppendGradients& gradients) {
  const Worker forward{problem, buffers};
  const GradientWorker worker{forward, gradients, plan::append_gradient_blocks(problem)};
  const double elements =
      static_cast<double>((forward.queries * problem.heads_q + forward.rows * problem.heads_kv) * problem.head_dim);
  const Sharing sharing(32 * elements);
  parallel_for(
      worker.parts, !sharing.is_worth_it(),
      [](void* context, std::int64_t part) { (*static_cast<const GradientWorker*>(context))(part); },
      const_cast<GradientWorker*>(&worker));
  for (const bool of_q : {true, false}) {
    float* to = of_q ? gradients.dq_norm_weight : gradients.dk_norm_weight;
    for (std::int64_t d = 0; to != nullptr && d < problem.head_dim; ++d) {
      double sum = 0;
      for (std::int64_t part = 0; part < worker.parts; ++part) sum += worker.sums_of(part, of_q)[d];
      to[d] = static_cast<float>(sum);
    }
  }
}

void append(const AppendProblem& problem, const AppendBuffers& buffers) {
  Worker worker{problem, buffers};
  const double elements = static_cast<double>(worker.queries * problem.heads_q * problem.head_dim) +
                          static_cast<double>(worker.rows * problem.heads_kv * (problem.head_dim + problem.head_dim_v));
  const Sharing sharing(16 * elements);  // to read, convert and write an element takes the time of this many products
  parallel_for(
      worker.queries + worker.rows, !sharing.is_worth_it(),
      [](void* context, std::int64_t item) { (*static_cast<const Worker*>(context))(item); }, &worker);
}

}  // namespace flash_attention::cpu
