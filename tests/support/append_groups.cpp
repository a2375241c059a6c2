#include "support/append_groups.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "flash_attention/append.h"
#include "support/oracle/memory.h"
#include "support/oracle/narrow.h"
#include "support/oracle/rounding.h"

namespace flash_attention::testing {
namespace {

/// The call: 3 sequences with some rows each, 5 new ones, pages of 4 in no order.
class AppendGroups {
 public:
  AppendGroups(Device device, Dtype codes, Dtype dtype, int group, bool rotates)
      : memory_(memory_of(device)), codes_(codes), dtype_(dtype), group_(group) {
    p_ = {.batch = 3, .seq_new = 5, .heads_kv = 2, .head_dim = 128, .head_dim_v = group == 128 ? 128 : 64, .dtype = dtype};
    p_.cache_dtype = codes, p_.cache_group = group, p_.page_size = 4, p_.num_pages = 13, p_.page_table_stride = 4;
    if (codes == Dtype::nvfp4) p_.scales = ScaleKind::tensor;
    if (rotates) p_.rotary_dim = 128, p_.rotary_positions = 20, p_.k_norm = true;
    options_ = {.device = device};
  }

  void run() {
    const std::vector<double> k = draw(p_.head_dim), v = draw(p_.head_dim_v);
    b_.k = put(k, dtype_), b_.v = put(v, dtype_);
    std::vector<double> cos, sin;
    for (int i = 0; i < 20 * 64; ++i) cos.push_back(std::cos(0.37 * i)), sin.push_back(std::sin(0.37 * i));
    if (p_.rotary_dim > 0) b_.cos = put(cos, Dtype::float32), b_.sin = put(sin, Dtype::float32);
    for (double* table : {cos.data(), sin.data()})
      for (int i = 0; i < 20 * 64; ++i) table[i] = static_cast<float>(table[i]);
    b_.lengths = integers(lengths_), b_.page_table = integers(table_);
    Side keys(*this, k, p_.head_dim, 0.25f, b_.k_cache, b_.k_group_scale, b_.k_group_zero, b_.k_scale);
    Side values(*this, v, p_.head_dim_v, 3.0f, b_.v_cache, b_.v_group_scale, b_.v_group_zero, b_.v_scale);
    append(p_, b_, options_);
    keys.check("key", p_.k_norm, cos, sin);
    values.check("value", false, {}, {});
  }

 private:
  static constexpr int row_slots = 13 * 4;
  const std::vector<std::int32_t> lengths_{0, 6, 11}, table_{3, 7, 99, 99, 1, 0, 9, 99, 5, 12, 11, 2};

  /// K or V.
  struct Side {
    Side(AppendGroups& call, const std::vector<double>& rows, std::int64_t columns, float tensor_scale, void*& codes,
         void*& group_scale, void*& group_zero, float*& scale_of_all)
        : of(call), x(rows), dim(columns), scale(call.p_.scales == ScaleKind::none ? 1 : tensor_scale) {
      const std::size_t slots = row_slots * 2, numbers = slots * static_cast<std::size_t>(dim / of.group_);
      codes = cache = of.fill(slots * static_cast<std::size_t>(dim / 2));
      group_scale = scales = of.fill(numbers * of.scale_bytes());
      if (of.codes_ == Dtype::int4) group_zero = zeros = of.fill(numbers * of.scale_bytes());
      if (of.p_.scales != ScaleKind::none) scale_of_all = static_cast<float*>(of.put({tensor_scale}, Dtype::float32));
      cache_bytes = slots * static_cast<std::size_t>(dim / 2), scale_count = numbers;
    }

    void check(const char* name, bool turns, const std::vector<double>& cos, const std::vector<double>& sin) const {
      std::vector<std::uint8_t> bytes(cache_bytes), stored(scale_count * of.scale_bytes()), stored_zeros(stored.size());
      of.memory_->read(bytes.data(), cache, bytes.size());
      of.memory_->read(stored.data(), scales, stored.size());
      if (zeros != nullptr) of.memory_->read(stored_zeros.data(), zeros, stored_zeros.size());
      std::vector<bool> written(row_slots, false);
      for (int token = 0; token < 15; ++token) {
        const int position = of.lengths_[static_cast<std::size_t>(token / 5)] + token % 5;
        const int slot = of.table_[static_cast<std::size_t>(token / 5 * 4 + position / 4)] * 4 + position % 4;
        written[static_cast<std::size_t>(slot)] = true;
        for (int head = 0; head < 2; ++head) {
          std::vector<double> row(x.begin() + (token * 2 + head) * dim, x.begin() + (token * 2 + head + 1) * dim);
          if (turns) turn(row, position, cos, sin);
          for (std::int64_t g = 0; g < dim / of.group_; ++g) {
            SCOPED_TRACE(std::string(name) + " " + std::to_string(token) + ", head " + std::to_string(head) + ", group " +
                         std::to_string(g));
            const std::int64_t at = (slot * 2 + head) * (dim / of.group_) + g;
            check_group(&row[static_cast<std::size_t>(g * of.group_)],
                        &bytes[static_cast<std::size_t>((slot * 2 + head) * dim / 2 + g * of.group_ / 2)],
                        number(stored, at), zeros != nullptr ? number(stored_zeros, at) : 0, turns ? 3e-6 : 3e-7);
          }
        }
      }
      for (int slot = 0; slot < row_slots; ++slot) {
        if (written[static_cast<std::size_t>(slot)]) continue;
        const auto first = bytes.begin() + slot * dim;
        EXPECT_TRUE(std::all_of(first, first + dim, [](std::uint8_t byte) { return byte == 0xa5; })) << "slot " << slot;
      }
    }

    static void turn(std::vector<double>& row, int position, const std::vector<double>& cos,
                     const std::vector<double>& sin) {
      double squares = 0;
      for (const double value : row) squares += value * value;
      for (double& value : row) value /= std::sqrt(squares / 128 + 1e-6);
      for (std::size_t p = 0; p < 64; ++p) {
        const double c = cos[static_cast<std::size_t>(position) * 64 + p],
                     s = sin[static_cast<std::size_t>(position) * 64 + p];
        const double a = row[p], b = row[p + 64];
        row[p] = a * c - b * s, row[p + 64] = a * s + b * c;
      }
    }

    /// The number of a scale or zero as it is stored: of fp4 its byte.
    double number(const std::vector<std::uint8_t>& stored, std::int64_t i) const {
      if (of.codes_ != Dtype::int4) return stored[static_cast<std::size_t>(i)];
      if (of.dtype_ == Dtype::float32) {
        float value;
        return std::memcpy(&value, &stored[static_cast<std::size_t>(4 * i)], 4), value;
      }
      std::uint16_t bits;
      std::memcpy(&bits, &stored[static_cast<std::size_t>(2 * i)], 2);
      return of.dtype_ == Dtype::float16 ? from_float16(bits) : from_bfloat16(bits);
    }

    /// `error`: of the elements, relative, as they are when they are quantised.
    void check_group(const double* values, const std::uint8_t* bytes, double stored, double zero, double error) const {
      const bool integers = of.codes_ == Dtype::int4;
      const double* end = values + of.group_;
      double step = integers ? stored : from_scale(of.codes_, static_cast<std::uint8_t>(stored)) * scale;
      if (std::any_of(values, end, [](double value) { return std::isnan(value); })) {
        EXPECT_TRUE(std::isnan(integers ? zero : step));
        EXPECT_TRUE(std::all_of(bytes, bytes + of.group_ / 2, [](std::uint8_t byte) { return byte == 0; }));
        return;
      }
      const double finite = of.dtype_ == Dtype::float16    ? 65504
                            : of.dtype_ == Dtype::bfloat16 ? 0x1.fep127
                                                           : 0x1.fffffep127;
      double low = INFINITY, high = -INFINITY, most = 0;
      for (const double* x0 = values; x0 != end; ++x0) {
        const double clipped = integers ? std::clamp(*x0, -finite, finite) : *x0;
        low = std::min(low, clipped), high = std::max(high, clipped), most = std::max(most, std::fabs(*x0));
      }
      if (integers) {
        EXPECT_NEAR(zero, round_to(of.dtype_, low), 2 * epsilon(of.dtype_) * std::fabs(low) + error * most);
        EXPECT_NEAR(step, high / 15 - zero / 15, 2 * epsilon(of.dtype_) * (high - zero) / 15 + error * most + 0x1p-24);
      } else if (of.codes_ == Dtype::nvfp4) {
        const double wanted = std::min(std::max(most / (6 * scale), 0x1p-9), 448.0);
        const auto nearest = [&](double value) {
          return from_code(Dtype::float8_e4m3, to_code(Dtype::float8_e4m3, value));
        };
        const double got = step / scale;
        EXPECT_TRUE(got == nearest(wanted) || got == nearest(wanted * (1 + error)) || got == nearest(wanted * (1 - error)))
            << got << ", want " << wanted;
      } else {
        const bool half = of.dtype_ == Dtype::float16;
        const int least = half ? 103 : 27, largest = half ? 142 : 254, byte = static_cast<int>(stored);
        EXPECT_TRUE(byte == largest || std::isinf(most) || most <= 6 * step * (1 + error)) << byte;
        EXPECT_TRUE(byte == least || most > 3 * step * (1 - error)) << byte;
        EXPECT_TRUE(byte >= least && byte <= largest) << byte;
      }
      for (int c = 0; c < of.group_; ++c) {
        const int code = bytes[c / 2] >> c % 2 * 4 & 15;
        if (step == 0) {
          EXPECT_EQ(code, 0);
          continue;
        }
        const double wanted = ((integers ? std::clamp(values[c], -finite, finite) : values[c]) - zero) / step;
        const double nearest = from_nibble(of.codes_, to_nibble(of.codes_, wanted));
        const double off = std::fabs(from_nibble(of.codes_, code) - wanted);
        EXPECT_LE(off, std::fabs(nearest - wanted) + 8 * error * (std::fabs(wanted) + std::fabs(zero / step)) + 1e-9)
            << "column " << c << ": code " << code << " of " << values[c];
      }
    }

    AppendGroups& of;
    const std::vector<double>& x;
    std::int64_t dim;
    double scale;
    void *cache = nullptr, *scales = nullptr, *zeros = nullptr;
    std::size_t cache_bytes = 0, scale_count = 0;
  };

  std::size_t scale_bytes() const { return codes_ == Dtype::int4 ? size_of(dtype_) : 1; }

  std::vector<double> draw(std::int64_t dim) {
    std::normal_distribution<double> normal;
    std::vector<double> values(static_cast<std::size_t>(15 * 2 * dim));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::size_t g = i / static_cast<std::size_t>(group_);
      const double size = std::exp2(static_cast<double>(g % 9) * 2 - 9);
      values[i] = round_to(dtype_, normal(random_) * size);
      if (p_.k_norm) continue;
      if (g % 11 == 3) values[i] = g % 2 == 0 ? 0 : -0.0;
      if (g % 13 == 5) values[i] = std::fabs(values[i]);
      if (g % 17 == 2 && i % 16 == 7) values[i] = NAN;
      if (g % 19 == 4 && i % 16 == 9) values[i] = -INFINITY;
    }
    return values;
  }

  void* put(const std::vector<double>& values, Dtype as) {
    std::vector<std::byte> bytes(values.size() * size_of(as));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto wide = static_cast<float>(values[i]);
      const std::uint16_t half = as == Dtype::float16 ? to_float16(values[i]) : to_bfloat16(values[i]);
      if (size_of(as) == 4) std::memcpy(&bytes[4 * i], &wide, 4);
      if (size_of(as) == 2) std::memcpy(&bytes[2 * i], &half, 2);
    }
    void* data = memory_->allocate(bytes.size());
    memory_->write(data, bytes.data(), bytes.size());
    return data;
  }

  const std::int32_t* integers(const std::vector<std::int32_t>& values) {
    void* data = memory_->allocate(values.size() * 4);
    memory_->write(data, values.data(), values.size() * 4);
    return static_cast<const std::int32_t*>(data);
  }

  void* fill(std::size_t bytes) {
    const std::vector<std::uint8_t> marks(bytes, 0xa5);
    void* data = memory_->allocate(bytes);
    memory_->write(data, marks.data(), bytes);
    return data;
  }

  std::unique_ptr<Memory> memory_;
  Dtype codes_, dtype_;
  int group_;
  AppendProblem p_;
  AppendBuffers b_;
  Options options_;
  std::mt19937_64 random_{7};
};

}  // namespace

void check_append_groups(Device device, Dtype codes, Dtype dtype, int group, bool rotates) {
  AppendGroups(device, codes, dtype, group, rotates).run();
}

}  // namespace flash_attention::testing
