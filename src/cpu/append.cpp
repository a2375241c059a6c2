#include "cpu/append.h"

#include <algorithm>
#include <limits>

#include "cpu/threads/parallel.h"
#include "plan/append.h"
#include "support/narrow.h"

// append on the CPU: a token an item, a row of a head at a time, in float.

namespace flash_attention::cpu {
namespace {

/// Elements of any type as float.
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

  void rotate(float* x) const {
    for (std::int64_t p = 0; p < pairs; ++p) {
      float &first = x[interleaved ? 2 * p : p], &second = x[interleaved ? 2 * p + 1 : p + pairs];
      const float a = first, b = second;
      first = a * cos[p] - b * sin[p];
      second = a * sin[p] + b * cos[p];
    }
  }
};

struct Worker {
  const AppendProblem& p;
  const AppendBuffers& b;
  std::int64_t queries = plan::query_tokens(p), rows = plan::new_tokens(p);

  struct Token {
    std::int64_t sequence, batch, row, position, angle;
  };

  Token token_of(std::int64_t idx, const std::int32_t* starts, std::int64_t seq, bool same_angle) const {
    if (p.placed) return {b.sequences[idx], 0, idx, b.positions[idx], b.positions[idx]};
    Token token{.sequence = 0, .batch = 0, .row = idx, .position = 0, .angle = 0};
    std::int64_t step = idx;
    if (starts != nullptr) {
      token.sequence = std::upper_bound(starts, starts + p.batch + 1, idx) - starts - 1;
      if (token.sequence >= p.batch) return {.sequence = -1, .batch = 0, .row = 0, .position = 0, .angle = 0};
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

  Angle angle_of(std::int64_t position, float* tables) const {
    const std::int64_t pairs = p.rotary_dim / 2;
    if (pairs > 0) {
      const std::int64_t nearest = std::clamp<std::int64_t>(position, 0, p.rotary_positions - 1);
      read(p.rotary_dtype, b.cos, nearest * p.rotary_stride, pairs, tables);
      read(p.rotary_dtype, b.sin, nearest * p.rotary_stride, pairs, tables + pairs);
    }
    return {tables, tables + pairs, pairs, p.rotary_interleaved};
  }

  void query(std::int64_t idx, float* tables, float* row) const {
    const Token token = token_of(idx, b.cu_seqlens_q, p.seq_q, p.rotary_one_query);
    if (token.sequence < 0) return;
    const Angle angle = angle_of(token.angle, tables);
    for (std::int64_t head = 0; head < p.heads_q; ++head) {
      read(p.dtype, b.q, at(p.q_strides, token.batch, token.row, head), p.head_dim, row);
      angle.rotate(row);
      write(p.dtype, b.q_out, at(p.q_out_strides, token.batch, token.row, head), p.head_dim, row);
    }
  }

  /// The factor of the row's codes: of the scales that are given, or of one that is made here and written.
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

  void cache(std::int64_t idx, float* tables, float* row) const {
    const Token token = token_of(idx, b.cu_seqlens_new, p.seq_new, false);
    if (token.sequence < 0) return;
    std::int64_t page = token.sequence, slot = token.position;
    if (p.page_size != 0) {
      page = b.page_table[token.sequence * p.page_table_stride + token.position / p.page_size];
      slot = token.position % p.page_size;
    }
    const Angle angle = angle_of(token.angle, tables);
    for (std::int64_t head = 0; head < p.heads_kv; ++head) {
      read(p.dtype, b.k, at(p.k_strides, token.batch, token.row, head), p.head_dim, row);
      angle.rotate(row);
      const float k_factor = inverse_scale(b.k_scale, p.k_scale_strides, token, page, slot, head, row, p.head_dim);
      if (k_factor != 1) std::for_each_n(row, p.head_dim, [=](float& x) { x *= k_factor; });
      write(*p.cache_dtype, b.k_cache, at(p.k_cache_strides, page, slot, head), p.head_dim, row);

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

}  // namespace

void append(const AppendProblem& problem, const AppendBuffers& buffers) {
  Worker worker{problem, buffers};
  const double elements = static_cast<double>(worker.queries * problem.heads_q * problem.head_dim) +
                          static_cast<double>(worker.rows * problem.heads_kv * (problem.head_dim + problem.head_dim_v));
  const Sharing sharing(16 * elements);  // an element is read, converted and written: as many products take the time
  parallel_for(
      worker.queries + worker.rows, !sharing.is_worth_it(),
      [](void* context, std::int64_t item) { (*static_cast<const Worker*>(context))(item); }, &worker);
}

}  // namespace flash_attention::cpu
