#include "support/oracle/case.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "support/oracle/case_programs.h"
#include "support/oracle/rounding.h"

namespace flash_attention::testing {
namespace {

std::int64_t longest_q(const Problem& p) { return p.packed && p.seq_q == 0 ? p.total_q : p.seq_q; }
std::int64_t longest_kv(const Problem& p) { return packs_keys(p) && p.seq_kv == 0 ? p.total_kv : p.seq_kv; }

}  // namespace

bool packs_keys(const Problem& problem) { return problem.packed && problem.page_size == 0; }

Shape::Shape(const Case& c) {
  const Problem& p = c.problem;
  batch = p.batch;
  heads_q = p.heads_q;
  heads_kv = p.heads_kv;
  group = heads_q / heads_kv;
  dim = p.head_dim;
  dim_v = p.head_dim_v ? p.head_dim_v : p.head_dim;
  rows_q = p.packed ? p.total_q : p.batch * p.seq_q;
  const bool packed_kv = packs_keys(p);
  rows_kv = packed_kv ? p.total_kv : p.batch * p.seq_kv;
  seq_q = longest_q(p);
  seq_kv = longest_kv(p);
  for (std::int64_t b = 0; b < batch; ++b) {
    Sequence s;
    s.first_q = p.packed ? c.cu_seqlens_q[b] : b * p.seq_q;
    s.first_kv = packed_kv ? c.cu_seqlens_kv[b] : b * p.seq_kv;
    s.alloc_q = p.packed ? c.cu_seqlens_q[b + 1] - c.cu_seqlens_q[b] : p.seq_q;
    s.alloc_kv = packed_kv ? c.cu_seqlens_kv[b + 1] - c.cu_seqlens_kv[b] : p.seq_kv;
    s.len_q = p.seqused_q ? c.seqused_q[b] : s.alloc_q;
    s.len_kv = p.seqused_kv ? c.seqused_kv[b] : s.alloc_kv;
    s.visible_kv = p.key_lengths ? std::min<std::int64_t>(s.len_kv, c.key_lengths[b]) : s.len_kv;
    s.padding_kv = p.left_padding ? c.left_padding[b] : 0;
    if (p.sequence_windows) s.window_left = c.sequence_windows[2 * b], s.window_right = c.sequence_windows[2 * b + 1];
    sequences.push_back(s);
  }
}

bool Shape::visible(const Problem& p, const Sequence& s, std::int64_t i, std::int64_t j) const {
  return check::visible(p, s.extent(), i, j);
}

std::int64_t score_index(const Case& c, const ScoreTensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
                         std::int64_t j) {
  const Problem& p = c.problem;
  const std::int64_t heads = t.head_stride ? p.heads_q : 1, rows = t.q_stride ? longest_q(p) : 1;
  return (((t.batch_stride ? b : 0) * heads + (t.head_stride ? h : 0)) * rows + (t.q_stride ? i : 0)) * longest_kv(p) + j;
}

std::int64_t score_elements(const Case& c, const ScoreTensor& t) {
  const Problem& p = c.problem;
  return (t.batch_stride ? p.batch : 1) * (t.head_stride ? p.heads_q : 1) * (t.q_stride ? longest_q(p) : 1) * longest_kv(p);
}

std::int64_t mass_index(const Case& c, const Shape& shape, std::int64_t b, std::int64_t h, std::int64_t j) {
  if (packs_keys(c.problem)) return h * shape.rows_kv + shape.sequences[b].first_kv + j;
  return (b * shape.heads_q + h) * shape.seq_kv + j;
}
std::int64_t mass_elements(const Case&, const Shape& shape) { return shape.heads_q * shape.rows_kv; }

std::int64_t lse_index(const Case& c, const Shape& shape, std::int64_t b, std::int64_t h, std::int64_t i) {
  return c.problem.packed ? h * shape.rows_q + shape.sequences[b].first_q + i : (b * shape.heads_q + h) * shape.seq_q + i;
}

namespace {

/// What no query sees must not matter, whatever it holds.
void poison_unseen(const Case& c, const Shape& shape, Inputs& in) {
  const Problem& p = c.problem;
  std::vector<bool> key_seen(shape.rows_kv), query_used(shape.rows_q);
  const auto masked = [&](std::int64_t b, std::int64_t i, std::int64_t j) {
    const bool program = c.program != CaseProgram::none;
    const bool lists = p.key_list.kind != KeyListKind::none;
    if (hidden_by_bits(c, shape, in, b, i, j)) return true;
    if (!p.mask.present && p.hidden_rows.bounds == 0 && p.block_mask.block_q == 0 && !program && !lists) return false;
    for (std::int64_t h = 0; h < shape.heads_q; ++h) {
      const bool shown = !p.mask.present || in.mask[score_index(c, p.mask, b, h, i, j)] != 0;
      if (shown && program_shows(c, in, b, h, i, j) && !hidden_by_rows(c, shape, in, b, h, i, j) &&
          !hidden_by_blocks(c, in, b, h, i, j) && times_listed(c, shape, in, b, h, i, j) > 0)
        return false;
    }
    return true;
  };
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    const Shape::Sequence& s = shape.sequences[b];
    for (std::int64_t i = 0; i < s.len_q; ++i) {
      query_used[s.first_q + i] = true;
      for (std::int64_t j = 0; j < s.visible_kv; ++j) {
        if (!key_seen[s.first_kv + j] && shape.visible(p, s, i, j) && !masked(b, i, j)) key_seen[s.first_kv + j] = true;
      }
    }
  }
  const auto poison = [](std::vector<double>& values, std::int64_t row, std::int64_t width) {
    for (std::int64_t x = 0; x < width; ++x) values[row * width + x] = (row + x) % 3 == 0 ? INFINITY : NAN;
  };
  const auto shared = [&](const Strides& strides) { return !p.packed && p.page_size == 0 && strides.batch == 0; };
  for (std::int64_t row = 0; row < shape.rows_kv; ++row) {
    bool seen_by_any = false;  // where the batch shares its keys
    for (std::int64_t other = row % shape.seq_kv; other < shape.rows_kv; other += shape.seq_kv)
      seen_by_any = seen_by_any || key_seen[other];
    const auto poison_key = [&](std::vector<double>& values, const Strides& strides, std::int64_t width) {
      if (!key_seen[row] && (!shared(strides) || !seen_by_any))
        poison(values, shared(strides) ? row % shape.seq_kv : row, width);
    };
    poison_key(in.k, p.k_strides, shape.heads_kv * shape.dim);
    poison_key(in.v, p.v_strides, shape.heads_kv * shape.dim_v);
  }
  for (std::int64_t row = 0; row < shape.rows_q; ++row) {
    if (query_used[row]) continue;
    poison(in.q, row, shape.heads_q * shape.dim);
    poison(in.dout, row, shape.heads_q * shape.dim_v);
  }
}

/// The part of a key along which the scores are shaped: position j of a sequence with `length` keys.
double lead_of(Draw draw, std::int64_t j, std::int64_t length) {
  switch (draw) {
    case Draw::large:
      return 120;
    case Draw::peaked:
      return j % 16 == 5 ? 25 : 0;
    case Draw::growing:
      return 1.5 * static_cast<double>(j);
    case Draw::falling:
      return 1.5 * static_cast<double>(length - 1 - j);
    case Draw::spike:
      return j + 2 == length ? 110 : 0;
    default:
      return 0;
  }
}

/// Along the first coordinate of Q and K lies the part that shapes the scores.
void shape_scores(const Case& c, const Shape& shape, Inputs& in) {
  const Problem& p = c.problem;
  const double scale = p.scale ? *p.scale : 1 / std::sqrt(static_cast<double>(shape.dim));
  const double root = scale == 0 ? 1 : 1 / scale;
  const std::int64_t column = p.latent ? shape.dim_v : 0;  // the first that is a key's alone
  for (std::int64_t row = 0; row < shape.rows_q; ++row) {
    for (std::int64_t h = 0; h < shape.heads_q; ++h)
      in.q[(row * shape.heads_q + h) * shape.dim + column] = round_to(p.dtype, row % 2 && c.draw == Draw::large ? -4 : 4);
  }
  for (const Shape::Sequence& s : shape.sequences) {
    for (std::int64_t j = 0; j < s.alloc_kv; ++j) {
      const double lead = lead_of(c.draw, j, s.alloc_kv) * root / 4;
      for (std::int64_t h = 0; h < shape.heads_kv; ++h)
        in.k[((s.first_kv + j) * shape.heads_kv + h) * shape.dim + column] = round_to(p.dtype, lead);
    }
  }
}

/// Values that are not just numbers of about one.
void shape_values(const Case& c, const Shape& shape, Inputs& in) {
  const Dtype dtype = c.problem.dtype;
  if (c.draw == Draw::ties) {
    for (std::size_t x = 0; x < in.q.size(); ++x) in.q[x] = x % shape.dim % 2 == 0 ? 0.5 : -1;
    for (std::size_t x = 0; x < in.k.size(); ++x)
      in.k[x] = (x / shape.dim % 3 == 0 ? 1 : -1) * (x % shape.dim % 2 == 0 ? 0.25 : 0);
  }
  if (c.draw == Draw::denormal) {
    const double small = dtype == Dtype::float16 ? 0x1p-18 : 0x1p-130;
    for (std::vector<double>* values : {&in.q, &in.k})
      for (double& x : *values) x = round_to(dtype, x * small);
    for (std::vector<double>* values : {&in.v, &in.dout})
      for (std::size_t x = 0; x < values->size(); x += 2) (*values)[x] = round_to(dtype, (*values)[x] * small);
  }
  if (c.draw == Draw::huge) {  // exact dot products, the largest of equal ones late, of either sign
    std::fill(in.q.begin(), in.q.end(), 0);
    std::fill(in.k.begin(), in.k.end(), 0);
    const std::int64_t column = c.problem.latent ? shape.dim_v : 0;
    for (std::int64_t x = 0; x < static_cast<std::int64_t>(in.q.size()); x += shape.dim) {
      const std::int64_t row = x / shape.dim;
      in.q[x + column] = std::ldexp((row / 16 % 2 == 0 ? 1 : -1) * (1 + static_cast<double>(row % 4) / 4), row % 16);
    }
    const double largest = dtype == Dtype::float16 || c.problem.kv_dtype ? 0x1p15 : 0x1p45;
    for (std::int64_t x = 0; x < static_cast<std::int64_t>(in.k.size()); x += shape.dim) {
      const std::int64_t row = x / shape.dim;
      in.k[x + column] = (row % 2 == 0 ? largest : -largest) * (row % 46 > 43 ? 1.75 : row % 5 == 0 ? 1.5 : 1.25);
    }
  }
  if (c.draw == Draw::zeros) {
    for (std::vector<double>* values : {&in.q, &in.k}) std::fill(values->begin(), values->end(), -0.0);
    for (std::vector<double>* values : {&in.v, &in.dout})
      for (std::size_t x = 0; x < values->size(); x += 2) (*values)[x] = -0.0;
  }
}

/// Elements that a stride of 0 makes one: the first is all of them.
void share_elements(const Problem& p, std::vector<double>& values, const Strides& strides, std::int64_t batch,
                    std::int64_t heads, std::int64_t dim) {
  const auto count = static_cast<std::int64_t>(values.size());
  if (!p.packed && p.page_size == 0 && strides.batch == 0 && batch > 0) {
    const std::int64_t size = count / batch;
    for (std::int64_t x = size; x < count; ++x) values[x] = values[x % size];
  }
  if (strides.head == 0) {
    for (std::int64_t x = 0; x < count; ++x) values[x] = values[x / (heads * dim) * (heads * dim) + x % dim];
  }
}

/// Keys that begin with their values.
void begin_with_values(const Shape& shape, Inputs& in) {
  for (std::int64_t row = 0; row < shape.rows_kv * shape.heads_kv; ++row) {
    std::copy_n(&in.v[row * shape.dim_v], shape.dim_v, &in.k[row * shape.dim]);
  }
}

/// Flattened: the linker would take the standard library's functions from a test, which is compiled without optimisation.
[[gnu::flatten]] void draw_normal(std::mt19937_64& random, std::normal_distribution<double>& normal,
                                  std::vector<double>& values) {
  for (double& x : values) x = normal(random);
}

}  // namespace

Inputs draw_inputs(const Case& c) {
  const Problem& p = c.problem;
  const Shape shape(c);
  std::mt19937_64 random(c.seed);
  std::normal_distribution<double> normal;
  const auto draw = [&](std::int64_t count, Dtype dtype, double spread = 1) {
    std::vector<double> values(count);
    draw_normal(random, normal, values);
    for (double& x : values) x = round_to(dtype, spread * x);
    return values;
  };
  Inputs in;
  in.q = draw(shape.rows_q * shape.heads_q * shape.dim, p.dtype);
  in.k = draw(shape.rows_kv * shape.heads_kv * shape.dim, p.dtype);
  in.v = draw(shape.rows_kv * shape.heads_kv * shape.dim_v, p.dtype);
  in.dout = draw(shape.rows_q * shape.heads_q * shape.dim_v, p.dtype);
  if (c.dlse) in.dlse = draw(shape.rows_q * shape.heads_q, Dtype::float32);
  if (p.return_entropy) in.dentropy = draw(shape.rows_q * shape.heads_q, Dtype::float32);
  if (p.return_key_mass) in.dkey_mass = draw(mass_elements(c, shape), Dtype::float32);
  if (p.bias.present) in.bias = draw(score_elements(c, p.bias), p.bias.dtype);
  for (std::int64_t x = 0; c.lowest_bias && x < static_cast<std::int64_t>(in.bias.size()); ++x) {
    const std::int64_t i = x / shape.seq_kv % shape.seq_q, j = x % shape.seq_kv;
    if (i % 8 == 1 || (i % 8 == 4 && j % 3 != 0)) in.bias[x] = std::numeric_limits<float>::lowest();
  }
  for (std::int64_t x = 0; c.infinite_bias && x < static_cast<std::int64_t>(in.bias.size()); ++x) {
    const std::int64_t i = x / shape.seq_kv % std::max<std::int64_t>(shape.seq_q, 1), j = x % shape.seq_kv;
    if (i % 8 == 1 || (i % 8 == 2 && j < 70) || (i % 8 == 3 && j >= 60) || (i % 8 == 4 && j % 3 != 0))
      in.bias[x] = -INFINITY;
  }
  if (p.alibi) {
    in.alibi_slopes = draw((p.alibi_batch_stride ? shape.batch : 1) * shape.heads_q, Dtype::float32);
    for (double& slope : in.alibi_slopes)
      slope = static_cast<float>(c.strong_slopes ? std::fabs(slope) * 4 + 0.5 : std::fabs(slope) * 0.1);
  }
  if (p.sink) in.sink = draw(shape.heads_q, Dtype::float32, c.strong_sink ? 40 : 2);
  if (p.sink && c.strong_sink) in.sink[0] = 200;  // leaves nothing of the keys that a float could hold
  for (std::size_t h = 0; c.infinite_sink && h < in.sink.size(); h += 2) in.sink[h] = -INFINITY;
  if (p.mask.present) {
    in.mask.resize(score_elements(c, p.mask));
    for (std::size_t x = 0; x < in.mask.size(); ++x) {
      const bool hidden_row = (x / shape.seq_kv) % 7 == 3;    // some rows see nothing
      constexpr std::uint8_t visible[] = {1, 2, 0x80, 0xff};  // any byte but 0
      const std::uint64_t drawn = random();
      in.mask[x] = hidden_row || drawn % 4 == 0 ? 0 : visible[drawn / 4 % 4];
    }
  }

  draw_masks(c, shape, c.seed, in);
  draw_bits(c, shape, c.seed, in);
  draw_lists(c, shape, c.seed, in);
  draw_program(c, shape, in);

  const bool shapes_scores = c.draw == Draw::large || c.draw == Draw::peaked || c.draw == Draw::growing ||
                             c.draw == Draw::spike || c.draw == Draw::falling;
  if (shapes_scores) shape_scores(c, shape, in);
  shape_values(c, shape, in);
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    if (c.nan_sequence >= 0 && b != c.nan_sequence) continue;
    const Shape::Sequence& s = shape.sequences[b];
    const auto plant = [&](std::vector<double>& values, std::int64_t j, std::int64_t width) {
      if (j >= 0 && j < s.alloc_kv) std::fill_n(&values[(s.first_kv + j) * width], width, NAN);
    };
    const auto plant_query = [&](std::vector<double>& values, std::int64_t i, std::int64_t width) {
      if (i >= 0 && i < s.alloc_q) std::fill_n(&values[(s.first_q + i) * width], width, NAN);
    };
    plant_query(in.q, c.nan_query, shape.heads_q * shape.dim);
    plant_query(in.dout, c.nan_dout, shape.heads_q * shape.dim_v);
    plant(in.k, c.nan_key, shape.heads_kv * shape.dim);
    plant(in.v, c.nan_value, shape.heads_kv * shape.dim_v);
  }
  poison_unseen(c, shape, in);
  share_elements(p, in.k, p.k_strides, shape.batch, shape.heads_kv, shape.dim);
  share_elements(p, in.v, p.v_strides, shape.batch, shape.heads_kv, shape.dim_v);
  make_narrow(c, shape, in);
  if (p.latent || c.values_begin_keys) begin_with_values(shape, in);
  return in;
}

}  // namespace flash_attention::testing
