#include "support/append_check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>

#include "support/oracle/memory.h"
#include "support/oracle/narrow.h"

namespace flash_attention::testing {
namespace {

/// Numbers of a type, as bytes and as doubles.
struct Array {
  Dtype dtype;
  std::vector<std::uint8_t> bytes;

  Array(Dtype type, std::int64_t count) : dtype(type), bytes(static_cast<std::size_t>(count) * size_of(type)) {}
  void set(std::int64_t i, double value) {
    if (dtype == Dtype::float32) {
      const auto x = static_cast<float>(value);
      std::memcpy(&bytes[i * 4], &x, 4);
    } else if (size_of(dtype) == 1) {
      bytes[i] = to_code(dtype, value);
    } else {
      const std::uint16_t x = dtype == Dtype::float16 ? to_float16(value) : to_bfloat16(value);
      std::memcpy(&bytes[i * 2], &x, 2);
    }
  }
  double get(std::int64_t i) const {
    if (dtype == Dtype::float32) {
      float x;
      std::memcpy(&x, &bytes[i * 4], 4);
      return x;
    }
    if (size_of(dtype) == 1) return from_code(dtype, bytes[i]);
    std::uint16_t x;
    std::memcpy(&x, &bytes[i * 2], 2);
    return dtype == Dtype::float16 ? from_float16(x) : from_bfloat16(x);
  }
  std::int64_t size() const { return static_cast<std::int64_t>(bytes.size() / size_of(dtype)); }
};

struct Place {
  bool exists = false;
  std::int64_t sequence = 0, batch = 0, row = 0, position = 0, angle = 0;
};

class Check {
 public:
  Check(const AppendCase& c, Device device) : c_(c), p_(c.problem), device_(device), memory_(memory_of(device)) {
    if (p_.head_dim_v == 0) p_.head_dim_v = p_.head_dim;
    if (!p_.cache_dtype) p_.cache_dtype = p_.dtype;
    tokens_q_ = p_.packed_q || p_.placed ? p_.total_q : p_.batch * p_.seq_q;
    tokens_ = p_.packed_new || p_.placed ? p_.total_new : p_.batch * p_.seq_new;
    pages_ = p_.page_size ? p_.num_pages : p_.batch;
    rows_ = p_.page_size ? p_.page_size : p_.capacity;
    if (p_.in_rows) pages_ = 1, rows_ = tokens_;
    gap_ = p_.q_strides.seq == Strides::dense ? 0 : p_.q_strides.seq - p_.heads_q * p_.head_dim;
  }

  void run() {
    std::mt19937_64 random(std::hash<std::string>{}(c_.name));
    std::normal_distribution<double> normal;
    const auto draw = [&](Dtype dtype, std::int64_t count) {
      Array array(dtype, count);
      for (std::int64_t i = 0; i < count; ++i) array.set(i, 2 * normal(random));
      return array;
    };
    const std::int64_t cache_heads = pages_ * rows_ * p_.heads_kv;
    Array q = draw(p_.dtype, tokens_q_ * (p_.heads_q * p_.head_dim + gap_));
    Array k = draw(p_.dtype, tokens_ * p_.heads_kv * p_.head_dim),
          v = draw(p_.dtype, tokens_ * p_.heads_kv * p_.head_dim_v);
    Array k_cache = draw(*p_.cache_dtype, cache_heads * p_.head_dim);
    Array v_cache = draw(*p_.cache_dtype, cache_heads * p_.head_dim_v);
    Array cos = draw(p_.rotary_dtype, p_.rotary_positions * p_.rotary_dim / 2), sin = cos;
    for (std::int64_t i = 0; i < cos.size(); ++i) {
      const double angle = normal(random);
      cos.set(i, std::cos(angle)), sin.set(i, std::sin(angle));
    }
    const std::int64_t scales = p_.scales == ScaleKind::tensor  ? 1
                                : p_.scales == ScaleKind::head  ? p_.batch * p_.heads_kv
                                : p_.scales == ScaleKind::token ? cache_heads
                                                                : 0;
    Array k_scale(Dtype::float32, scales), v_scale = k_scale;
    for (std::int64_t i = 0; i < scales; ++i) k_scale.set(i, 0.01 + 0.1 * std::fabs(normal(random)));
    for (std::int64_t i = 0; i < scales; ++i) v_scale.set(i, 0.01 + 0.1 * std::fabs(normal(random)));

    Array q_weight = draw(p_.norm_dtype, p_.q_norm ? p_.head_dim : 0);
    Array k_weight = draw(p_.norm_dtype, p_.k_norm ? p_.head_dim : 0);
    q_factors_ = factors(q_weight, p_.q_norm), k_factors_ = factors(k_weight, p_.k_norm);

    AppendBuffers b;
    const auto put = [&](const Array& array) {
      void* data = memory_->allocate(array.bytes.size());
      memory_->write(data, array.bytes.data(), array.bytes.size());
      return data;
    };
    const auto list = [&](const std::vector<std::int32_t>& values) -> const std::int32_t* {
      if (values.empty()) return nullptr;
      void* data = memory_->allocate(values.size() * 4);
      memory_->write(data, values.data(), values.size() * 4);
      return static_cast<const std::int32_t*>(data);
    };
    Array q_out = q;
    void* q_data = put(q);
    b.q = q_data, b.q_out = c_.in_place ? q_data : put(q);
    b.k = put(k), b.k_cache = put(k_cache);
    if (!p_.in_rows) b.v = put(v), b.v_cache = put(v_cache);
    if (p_.q_norm && c_.weights) b.q_norm_weight = put(q_weight);
    if (p_.k_norm && c_.weights) b.k_norm_weight = put(k_weight);
    b.angle_positions = list(c_.angle_positions);
    if (p_.rotary_dim) b.cos = put(cos), b.sin = put(sin);
    if (scales) b.k_scale = static_cast<float*>(put(k_scale)), b.v_scale = static_cast<float*>(put(v_scale));
    b.lengths = list(c_.lengths), b.rotary_offsets = list(c_.rotary_offsets), b.page_table = list(c_.page_table);
    b.cu_seqlens_new = list(c_.cu_seqlens_new), b.cu_seqlens_q = list(c_.cu_seqlens_q);
    b.sequences = list(c_.sequences), b.positions = list(c_.positions);
    append(c_.problem, b, {.device = device_});
    const auto fetch = [&](Array& array, const void* data) { memory_->read(array.bytes.data(), data, array.bytes.size()); };
    Array new_k = k_cache, new_v = v_cache, new_k_scale = k_scale, new_v_scale = v_scale;
    fetch(q_out, b.q_out), fetch(new_k, b.k_cache);
    if (!p_.in_rows) fetch(new_v, b.v_cache);
    if (scales) fetch(new_k_scale, b.k_scale), fetch(new_v_scale, b.v_scale);

    for (std::int64_t token = 0; token < tokens_q_; ++token) {
      const Place place = place_of(token, c_.cu_seqlens_q, p_.seq_q, p_.rotary_one_query);
      for (std::int64_t head = 0; place.exists && head < p_.heads_q; ++head) {
        const std::int64_t first = token * (p_.heads_q * p_.head_dim + gap_) + head * p_.head_dim;
        const std::vector<double> want = prepared(q, first, q_factors_, p_.q_norm, cos, sin, place.angle, token, tokens_q_);
        for (std::int64_t d = 0; d < p_.head_dim; ++d) {
          ASSERT_NEAR(q_out.get(first + d), want[d], tolerance(p_.dtype, want[d])) << "query token " << token << ", " << d;
        }
      }
    }
    Array want_k = k_cache, want_v = v_cache;  // where nothing is written, to the bit
    std::vector<bool> written(static_cast<std::size_t>(cache_heads));
    for (std::int64_t token = 0; token < tokens_; ++token) {
      const Place place = place_of(token, c_.cu_seqlens_new, p_.seq_new, false);
      std::int64_t page = place.sequence, row = place.position;
      if (p_.in_rows) {
        for (std::int64_t d = 0; !place.exists && d < p_.heads_kv * p_.head_dim; ++d)
          ASSERT_EQ(new_k.get(token * p_.heads_kv * p_.head_dim + d), 0) << "a row of no sequence";
        page = 0, row = token;
      } else if (row < 0 || row >= p_.capacity) {
        continue;
      }
      if (!place.exists) continue;
      if (p_.page_size) {
        page = c_.page_table[place.sequence * p_.page_table_stride + row / p_.page_size], row %= p_.page_size;
        if (page < 0 || page >= p_.num_pages) continue;
      }
      for (std::int64_t head = 0; head < p_.heads_kv; ++head) {
        const std::int64_t slot = (page * rows_ + row) * p_.heads_kv + head, source = token * p_.heads_kv + head;
        written[static_cast<std::size_t>(slot)] = true;
        const std::vector<double> key =
            prepared(k, source * p_.head_dim, k_factors_, p_.k_norm, cos, sin, place.angle, token, tokens_);
        compare_row("key", key, new_k, slot, scale_of(k_scale, new_k_scale, place.sequence, head, slot, key));
        if (p_.in_rows) continue;
        std::vector<double> value;
        for (std::int64_t d = 0; d < p_.head_dim_v; ++d) value.push_back(v.get(source * p_.head_dim_v + d));
        compare_row("value", value, new_v, slot, scale_of(v_scale, new_v_scale, place.sequence, head, slot, value));
      }
    }
    if (p_.in_rows) return check_gradients(b, q, k, cos, sin, draw, put, fetch);
    for (std::int64_t slot = 0; slot < cache_heads; ++slot) {
      if (written[static_cast<std::size_t>(slot)]) continue;
      const auto same = [slot](const Array& a, const Array& b2, std::int64_t width) {
        const std::size_t size = static_cast<std::size_t>(width) * size_of(a.dtype),
                          at = static_cast<std::size_t>(slot) * size;
        return std::memcmp(&a.bytes[at], &b2.bytes[at], size) == 0;
      };
      ASSERT_TRUE(same(k_cache, new_k, p_.head_dim) && same(v_cache, new_v, p_.head_dim_v)) << "slot " << slot;
      if (p_.scales == ScaleKind::token) {
        ASSERT_TRUE(same(k_scale, new_k_scale, 1)) << "scale of slot " << slot;
      }
    }
    if (p_.scales != ScaleKind::token) {
      EXPECT_EQ(k_scale.bytes, new_k_scale.bytes);
    }
  }

 private:
  Place place_of(std::int64_t token, const std::vector<std::int32_t>& starts, std::int64_t seq, bool same_angle) const {
    if (p_.placed) {
      const bool exists = c_.sequences[token] >= 0 && c_.sequences[token] < p_.batch;
      return {exists, c_.sequences[token], 0, token, c_.positions[token], c_.positions[token]};
    }
    Place place{true, 0, 0, token, 0, 0};
    std::int64_t step = token;
    if (!starts.empty()) {
      while (place.sequence < p_.batch && token >= starts[place.sequence + 1]) ++place.sequence;
      if (place.sequence == p_.batch) return {};
      step -= starts[place.sequence];
    } else {
      place.sequence = place.batch = token / seq, place.row = step = token % seq;
    }
    const std::int64_t length = c_.lengths.empty() ? 0 : c_.lengths[place.sequence];
    place.position = length + step;
    place.angle = (c_.rotary_offsets.empty() ? length : c_.rotary_offsets[place.sequence]) + (same_angle ? 0 : step);
    return place;
  }

  std::vector<double> factors(const Array& weights, bool norm) const {
    std::vector<double> found(static_cast<std::size_t>(norm ? p_.head_dim : 0), 1);
    for (std::size_t d = 0; c_.weights && d < found.size(); ++d)
      found[d] = weights.get(static_cast<std::int64_t>(d)) + (p_.norm_plus_one ? 1 : 0);
    return found;
  }

  /// The row of cos and sin that a pair of a token has.
  std::int64_t table_row(std::int64_t pair, std::int64_t angle, std::int64_t token, std::int64_t tokens) const {
    if (p_.angle_sections > 0) {
      std::int64_t section = 0;
      if (p_.sections_interleaved) {
        section = pair % p_.angle_sections;
        if (pair >= p_.rotary_sections[section] * p_.angle_sections) section = 0;
      } else if (p_.angle_sections > 1) {
        for (std::int64_t left = pair - p_.rotary_sections[0]; left >= 0;) left -= p_.rotary_sections[++section];
      }
      angle = c_.angle_positions[section * tokens + token];
    }
    return std::max<std::int64_t>(0, std::min(angle, p_.rotary_positions - 1));
  }

  double rms(const std::vector<double>& x) const {
    double squares = 0;
    for (const double value : x) squares += value * value;
    return std::sqrt(squares / static_cast<double>(p_.head_dim) + p_.norm_eps);
  }

  std::vector<double> prepared(const Array& from, std::int64_t first, const std::vector<double>& weights, bool norm,
                               const Array& cos, const Array& sin, std::int64_t angle, std::int64_t token,
                               std::int64_t tokens) const {
    std::vector<double> x;
    for (std::int64_t d = 0; d < p_.head_dim; ++d) x.push_back(from.get(first + d));
    if (norm) {
      const double of_row = rms(x);
      for (std::int64_t d = 0; d < p_.head_dim; ++d) x[d] *= weights[d] / of_row;
    }
    const std::int64_t pairs = p_.rotary_dim / 2;
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
      const std::int64_t row = table_row(pair, angle, token, tokens);
      double& a = x[p_.rotary_interleaved ? 2 * pair : pair];
      double& b = x[p_.rotary_interleaved ? 2 * pair + 1 : pair + pairs];
      const double c = cos.get(row * pairs + pair), s = sin.get(row * pairs + pair), first_of_pair = a;
      a = first_of_pair * c - b * s;
      b = first_of_pair * s + b * c;
    }
    return x;
  }

  /// Gradients by the Jacobian of a row, written out: y[d] = f[d] x[d] / r, and the turn of each pair.
  template <class Draw, class Put, class Fetch>
  void check_gradients(const AppendBuffers& b, const Array& q, const Array& k, const Array& cos, const Array& sin,
                       const Draw& draw, const Put& put, const Fetch& fetch) {
    Array dq_out = draw(p_.dtype, q.size()), dk_out = draw(p_.dtype, k.size()), dq = draw(p_.dtype, q.size()),
          dk = draw(p_.dtype, k.size());
    Array dq_weight(Dtype::float32, p_.head_dim), dk_weight = dq_weight;
    AppendGradients g{.dq_out = put(dq_out), .dk_out = put(dk_out)};
    void *dq_data = put(dq), *dk_data = put(dk);
    g.dq = dq_data, g.dk = dk_data;
    if (p_.q_norm) g.dq_norm_weight = static_cast<float*>(put(dq_weight));
    if (p_.k_norm) g.dk_norm_weight = static_cast<float*>(put(dk_weight));
    g.workspace = memory_->allocate(append_backward_workspace(c_.problem));
    std::vector<std::vector<std::uint8_t>> bits;
    for (int time = 0; time < 2; ++time) {
      append_backward(c_.problem, b, g, {.device = device_});
      fetch(dq, g.dq), fetch(dk, g.dk);
      if (p_.q_norm) fetch(dq_weight, g.dq_norm_weight);
      if (p_.k_norm) fetch(dk_weight, g.dk_norm_weight);
      for (const Array* array : {&dq, &dk, &dq_weight, &dk_weight}) bits.push_back(array->bytes);
    }
    for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(bits[i], bits[i + 4]) << "the second time, " << i;
    compare_gradients("q", q, dq_out, dq, dq_weight, c_.cu_seqlens_q, p_.seq_q, tokens_q_, p_.heads_q,
                      p_.heads_q * p_.head_dim + gap_, p_.rotary_one_query, p_.q_norm, q_factors_, cos, sin);
    compare_gradients("k", k, dk_out, dk, dk_weight, c_.cu_seqlens_new, p_.seq_new, tokens_, p_.heads_kv,
                      p_.heads_kv * p_.head_dim, false, p_.k_norm, k_factors_, cos, sin);
  }

  void compare_gradients(const char* what, const Array& from, const Array& dout, const Array& got, const Array& got_weight,
                         const std::vector<std::int32_t>& starts, std::int64_t seq, std::int64_t tokens, std::int64_t heads,
                         std::int64_t stride, bool same_angle, bool norm, const std::vector<double>& weights,
                         const Array& cos, const Array& sin) const {
    const std::int64_t dim = p_.head_dim, pairs = p_.rotary_dim / 2;
    std::vector<double> weight_sums(static_cast<std::size_t>(dim)), magnitudes(static_cast<std::size_t>(dim));
    for (std::int64_t token = 0; token < tokens; ++token) {
      const Place place = place_of(token, starts, seq, same_angle);
      for (std::int64_t head = 0; head < heads; ++head) {
        const std::int64_t first = token * stride + head * dim;
        std::vector<double> x, g;
        for (std::int64_t d = 0; d < dim; ++d) x.push_back(from.get(first + d)), g.push_back(dout.get(first + d));
        for (std::int64_t pair = 0; place.exists && pair < pairs; ++pair) {
          const std::int64_t row = table_row(pair, place.angle, token, tokens);
          double& a = g[p_.rotary_interleaved ? 2 * pair : pair];
          double& b2 = g[p_.rotary_interleaved ? 2 * pair + 1 : pair + pairs];
          const double c = cos.get(row * pairs + pair), s = sin.get(row * pairs + pair), of_first = a;
          a = of_first * c + b2 * s;
          b2 = b2 * c - of_first * s;
        }
        const double r = rms(x);
        for (std::int64_t d = 0; d < dim; ++d) {
          double want = norm ? 0 : g[d], size = std::fabs(want);
          for (std::int64_t other = 0; norm && other < dim; ++other) {
            const double jacobian = (other == d ? 1 / r : 0) - x[other] * x[d] / (static_cast<double>(dim) * r * r * r);
            want += g[other] * weights[other] * jacobian;
            size += std::fabs(g[other] * weights[other] * jacobian);
          }
          if (!place.exists) want = size = 0;
          ASSERT_NEAR(got.get(first + d), want, tolerance(p_.dtype, want) + 0x1p-20 * size)
              << "d" << what << ", token " << token << ", head " << head << ", " << d;
          if (norm && place.exists) weight_sums[d] += g[d] * x[d] / r, magnitudes[d] += std::fabs(g[d] * x[d] / r);
        }
      }
    }
    for (std::int64_t d = 0; norm && d < dim; ++d)
      ASSERT_NEAR(got_weight.get(d), weight_sums[d], 1e-5 * magnitudes[d] + 1e-6) << "weight of " << what << ", " << d;
  }

  static double tolerance(Dtype dtype, double value) {
    return (0.5 * epsilon(dtype) + 0x1p-22) * (std::fabs(value) + (dtype == Dtype::float16 ? 0x1p-14 : 0)) + 0x1p-20;
  }

  double scale_of(const Array& given, const Array& got, std::int64_t sequence, std::int64_t head, std::int64_t slot,
                  const std::vector<double>& row) const {
    if (p_.scales == ScaleKind::none) return 1;
    if (p_.scales == ScaleKind::tensor) return given.get(0);
    if (p_.scales == ScaleKind::head) return given.get(sequence * p_.heads_kv + head);
    double most = 0x1p-100;
    for (const double x : row) most = std::fmax(most, std::fabs(x));
    const double want = most / largest_code(*p_.cache_dtype), scale = got.get(slot);
    EXPECT_NEAR(scale, want, 1e-6 * want);
    return scale;
  }

  void compare_row(const char* what, const std::vector<double>& want, const Array& got, std::int64_t slot, double scale) {
    const auto width = static_cast<std::int64_t>(want.size());
    for (std::int64_t d = 0; d < width; ++d) {
      const double x = got.get(slot * width + d);
      if (size_of(got.dtype) > 1) {
        ASSERT_NEAR(x, want[d], tolerance(got.dtype, want[d])) << what << ", slot " << slot << ", " << d;
        continue;
      }
      // The code of a number as near to the exact one as float32 arithmetic is.
      const double exact = want[d] / scale, slack = 1e-5 * std::fabs(exact) + 1e-6;
      const double low = from_code(got.dtype, to_code(got.dtype, exact - slack));
      const double high = from_code(got.dtype, to_code(got.dtype, exact + slack));
      ASSERT_TRUE(x >= low && x <= high) << what << ", slot " << slot << ", " << d << ": " << x << " for " << exact;
    }
  }

  const AppendCase& c_;
  AppendProblem p_;
  Device device_;
  std::unique_ptr<Memory> memory_;
  std::vector<double> q_factors_, k_factors_;
  std::int64_t tokens_q_, tokens_, pages_, rows_, gap_;
};

}  // namespace

std::vector<AppendCase> append_cases() {
  std::vector<AppendCase> cases;
  const auto add = [&](const char* name, const std::function<void(AppendCase&, AppendProblem&)>& change) {
    AppendCase c;
    c.name = name;
    c.problem = {
        .batch = 3, .seq_new = 3, .seq_q = 4, .heads_q = 6, .heads_kv = 2, .head_dim = 64, .dtype = Dtype::bfloat16};
    c.problem.capacity = 20, c.problem.rotary_positions = 32;
    c.lengths = {0, 17, 5};
    change(c, c.problem);
    cases.push_back(c);
  };
  const auto in_pages = [](AppendCase& c, std::int64_t page_size) {
    AppendProblem& p = c.problem;
    p.page_size = page_size, p.page_table_stride = (20 + page_size - 1) / page_size + 1,
    p.num_pages = 3 * p.page_table_stride;
    for (std::int64_t i = 0; i < p.batch * p.page_table_stride; ++i) {
      const bool used = i % p.page_table_stride * page_size < 20;
      c.page_table.push_back(static_cast<std::int32_t>(used ? i * 13 % p.num_pages : -1 - i));
    }
  };
  add("plain", [](AppendCase&, AppendProblem&) {});
  add("half_split", [](AppendCase&, AppendProblem& p) { p.rotary_dim = 64; });
  add("interleaved", [](AppendCase&, AppendProblem& p) { p.rotary_dim = 64, p.rotary_interleaved = true; });
  add("partial", [&](AppendCase& c, AppendProblem& p) { p.rotary_dim = 32, in_pages(c, 4); });
  add("partial_interleaved", [&](AppendCase& c, AppendProblem& p) {
    p.rotary_dim = 16, p.rotary_interleaved = true, p.rotary_dtype = Dtype::bfloat16, in_pages(c, 7);
  });
  add("halves_of_three", [](AppendCase&, AppendProblem& p) { p.rotary_dim = 6, p.dtype = Dtype::float16; });
  add("halves_of_six", [](AppendCase&, AppendProblem& p) { p.rotary_dim = 12, p.rotary_dtype = Dtype::float16; });
  add("odd_head_dim", [](AppendCase&, AppendProblem& p) {
    p.head_dim = 27, p.head_dim_v = 33, p.rotary_dim = 10, p.rotary_interleaved = true, p.dtype = Dtype::float32;
  });
  add("float32", [](AppendCase&, AppendProblem& p) {
    p.dtype = Dtype::float32, p.head_dim = 128, p.head_dim_v = 40, p.rotary_dim = 64;
  });
  add("float32_to_bfloat16",
      [](AppendCase&, AppendProblem& p) { p.dtype = Dtype::float32, p.cache_dtype = Dtype::bfloat16, p.rotary_dim = 64; });
  add("wide",
      [&](AppendCase& c, AppendProblem& p) { p.head_dim = 576, p.head_dim_v = 512, p.rotary_dim = 64, in_pages(c, 1); });
  add("in_place", [](AppendCase& c, AppendProblem& p) { p.rotary_dim = 48, c.in_place = true; });
  add("packed", [&](AppendCase& c, AppendProblem& p) {
    p.packed_new = p.packed_q = true, p.total_new = 9, p.total_q = 11, p.rotary_dim = 64, in_pages(c, 16);
    c.cu_seqlens_new = {0, 5, 5, 8}, c.cu_seqlens_q = {0, 0, 7, 11};  // the last new row belongs to nobody
  });
  add("placed", [&](AppendCase& c, AppendProblem& p) {
    p.placed = true, p.total_new = p.total_q = 5, p.rotary_dim = 64, in_pages(c, 16), c.lengths.clear();
    c.sequences = {2, 0, 1, 0, 0}, c.positions = {19, 3, 0, 4, 1};
  });
  add("angles_of_their_own", [](AppendCase& c, AppendProblem& p) {
    p.rotary_dim = 64, p.rotary_offsets = true, p.rotary_one_query = true, c.rotary_offsets = {28, 0, 7};
  });
  add("only_queries", [](AppendCase&, AppendProblem& p) { p.seq_new = 0, p.rotary_dim = 64; });
  add("only_keys", [](AppendCase&, AppendProblem& p) { p.seq_q = 0, p.rotary_dim = 64; });
  add("gaps", [](AppendCase&, AppendProblem& p) {
    p.q_strides = p.q_out_strides = {4 * (6 * 64 + 4), 6 * 64 + 4, 64}, p.rotary_dim = 64;
  });
  for (const Dtype dtype : {Dtype::float8_e4m3, Dtype::float8_e5m2, Dtype::int8}) {
    for (const ScaleKind kind : {ScaleKind::none, ScaleKind::tensor, ScaleKind::head, ScaleKind::token}) {
      const std::string name = std::string(to_string(dtype)) + "_" + std::string(to_string(kind));
      add(name.c_str(), [&](AppendCase& c, AppendProblem& p) {
        p.cache_dtype = dtype, p.scales = kind, p.rotary_dim = 64, p.rotary_interleaved = kind == ScaleKind::head;
        if (kind == ScaleKind::token) p.head_dim_v = 40, p.head_dim = 72;  // rows that do not fill their lanes
        if (kind != ScaleKind::tensor) in_pages(c, 8);
      });
    }
  }
  add("norms", [&](AppendCase& c, AppendProblem& p) {
    p.q_norm = p.k_norm = true, p.rotary_dim = 64, p.norm_dtype = Dtype::bfloat16, in_pages(c, 8);
  });
  add("norms_quantised", [&](AppendCase& c, AppendProblem& p) {
    p.q_norm = p.k_norm = p.norm_plus_one = true, p.rotary_dim = 32, p.cache_dtype = Dtype::float8_e4m3;
    p.scales = ScaleKind::token, p.norm_eps = 0.5f, in_pages(c, 16);
  });
  add("norm_of_q_without_weights", [](AppendCase& c, AppendProblem& p) { p.q_norm = true, c.weights = false; });
  add("norm_of_k_of_odd_rows", [](AppendCase&, AppendProblem& p) {
    p.k_norm = true, p.head_dim = 27, p.head_dim_v = 33, p.rotary_dim = 10, p.norm_dtype = Dtype::float16;
  });
  add("sections", [&](AppendCase& c, AppendProblem& p) {
    p.rotary_dim = 64, p.angle_sections = 3, p.rotary_sections = {8, 12, 12}, p.k_norm = true, p.seq_q = 3, in_pages(c, 4);
    for (int i = 0; i < 27; ++i) c.angle_positions.push_back(i * 7 % 32);
  });
  add("sections_interleaved", [&](AppendCase& c, AppendProblem& p) {
    p.rotary_dim = 48, p.angle_sections = 3, p.rotary_sections = {10, 8, 6}, p.sections_interleaved = true, p.seq_q = 3;
    for (int i = 0; i < 27; ++i) c.angle_positions.push_back(i * 11 % 32);
    p.rotary_interleaved = true;
  });
  add("positions_of_angles", [&](AppendCase& c, AppendProblem& p) {
    p.rotary_dim = 64, p.angle_sections = 1, p.seq_q = 0, c.angle_positions = {31, 0, 5, 7, 7, 7, 30, 1, 2};
  });
  add("without_room", [&](AppendCase& c, AppendProblem& p) {
    p.rotary_dim = 64, p.cache_dtype = Dtype::int8, p.scales = ScaleKind::token, p.head_dim = 40, p.head_dim_v = 16;
    p.rotary_dim = 40, c.without_room = true, in_pages(c, 4);
    c.lengths = {18, -2, 0x7fffffff}, c.page_table[4] = 1000;
  });
  return cases;
}

std::vector<AppendCase> append_gradient_cases() {
  std::vector<AppendCase> cases;
  const auto add = [&](const char* name, const std::function<void(AppendCase&, AppendProblem&)>& change) {
    AppendCase c;
    c.name = name;
    c.problem = {
        .batch = 3, .seq_new = 5, .seq_q = 5, .heads_q = 6, .heads_kv = 2, .head_dim = 64, .dtype = Dtype::bfloat16};
    c.problem.rotary_positions = 32, c.problem.in_rows = true;
    c.problem.q_norm = c.problem.k_norm = true, c.problem.rotary_dim = 64;
    change(c, c.problem);
    cases.push_back(c);
  };
  add("norms_and_angles", [](AppendCase&, AppendProblem&) {});
  add("only_angles", [](AppendCase&, AppendProblem& p) { p.q_norm = p.k_norm = false, p.rotary_interleaved = true; });
  add("only_norms", [](AppendCase&, AppendProblem& p) { p.rotary_dim = 0, p.dtype = Dtype::float32; });
  add("norm_of_q", [](AppendCase&, AppendProblem& p) { p.k_norm = false, p.rotary_dim = 24, p.dtype = Dtype::float16; });
  add("norm_of_k_alone", [](AppendCase& c, AppendProblem& p) { p.q_norm = false, p.seq_q = 0, c.weights = false; });
  add("plus_one", [](AppendCase&, AppendProblem& p) {
    p.norm_plus_one = true, p.head_dim = 27, p.rotary_dim = 10, p.norm_dtype = Dtype::bfloat16, p.norm_eps = 0.25f;
  });
  add("many_rows", [](AppendCase&, AppendProblem& p) {
    p.batch = 2, p.seq_q = p.seq_new = 23, p.heads_q = 7, p.heads_kv = 5, p.head_dim = 128, p.rotary_dim = 128;
    p.rotary_interleaved = true, p.dtype = Dtype::float32;
  });
  add("wide", [](AppendCase&, AppendProblem& p) { p.head_dim = 576, p.rotary_dim = 64; });
  add("packed", [](AppendCase& c, AppendProblem& p) {
    p.packed_new = p.packed_q = true, p.total_new = 9, p.total_q = 11, p.rotary_offsets = true, p.dtype = Dtype::float32;
    c.cu_seqlens_new = {0, 5, 5, 8}, c.cu_seqlens_q = {0, 0, 7, 9}, c.rotary_offsets = {3, 25, 0};
  });
  add("sections", [](AppendCase& c, AppendProblem& p) {
    p.angle_sections = 3, p.rotary_sections = {8, 12, 12}, p.rotary_dtype = Dtype::bfloat16;
    for (int i = 0; i < 45; ++i) c.angle_positions.push_back(i * 7 % 32);
  });
  add("gaps", [](AppendCase&, AppendProblem& p) {
    p.q_strides = p.q_out_strides = p.dq_strides = p.dq_out_strides = {5 * (6 * 64 + 8), 6 * 64 + 8, 64};
  });
  return cases;
}

void check_append(const AppendCase& c, Device device) { Check(c, device).run(); }
void check_append_gradients(const AppendCase& c, Device device) { Check(c, device).run(); }

}  // namespace flash_attention::testing
