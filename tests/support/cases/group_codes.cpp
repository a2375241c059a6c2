#include "support/cases/group_codes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "support/oracle/memory.h"
#include "support/oracle/narrow.h"
#include "support/oracle/rounding.h"

namespace flash_attention::testing {
namespace {

constexpr int code_keys = 256, code_heads = 16, code_dim = 64;

std::vector<std::byte> bytes_of(const std::vector<double>& values, Dtype dtype) {
  std::vector<std::byte> bytes(values.size() * size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float wide = static_cast<float>(values[i]);
    const std::uint16_t half = dtype == Dtype::float16 ? to_float16(values[i]) : to_bfloat16(values[i]);
    if (size_of(dtype) == 4) std::memcpy(&bytes[4 * i], &wide, 4);
    if (size_of(dtype) == 2) std::memcpy(&bytes[2 * i], &half, 2);
    if (size_of(dtype) == 1) bytes[i] = static_cast<std::byte>(static_cast<int>(values[i]));
  }
  return bytes;
}

double element(const std::vector<std::byte>& bytes, Dtype dtype, int i) {
  float wide;
  std::uint16_t half;
  if (dtype == Dtype::float32) return std::memcpy(&wide, &bytes[4 * static_cast<std::size_t>(i)], 4), wide;
  std::memcpy(&half, &bytes[2 * static_cast<std::size_t>(i)], 2);
  return dtype == Dtype::float16 ? from_float16(half) : from_bfloat16(half);
}

/// What code `code` of key `key` is worth.
double worth(Dtype codes, Dtype dtype, int key, int code, const std::vector<double>& scales,
             const std::vector<double>& zeros) {
  const auto group = static_cast<std::size_t>(key);
  if (codes == Dtype::int4) return from_group(codes, dtype, code, scales[group], zeros[group]);
  const bool clips = codes == Dtype::mxfp4 && dtype == Dtype::float16 && key != 255;
  const int scale = clips ? std::clamp(key, 103, 142) : key;
  return round_to(dtype, from_group(codes, dtype, code, from_scale(codes, static_cast<std::uint8_t>(scale)), 0));
}

}  // namespace

void check_all_codes(Dtype codes, Dtype dtype, const Target& target) {
  Problem p{.batch = code_keys,
            .seq_q = 1,
            .seq_kv = 1,
            .heads_q = code_heads,
            .heads_kv = 1,
            .head_dim = code_dim,
            .dtype = dtype};
  p.scale = 1.0f, p.kv_dtype = codes;
  const int group = static_cast<int>(columns_of_group(codes, 0)), groups = code_dim / group;
  const bool integers = codes == Dtype::int4;
  std::vector<double> q(code_keys * code_heads * code_dim), packed(code_keys * code_dim / 2), scales, zeros, of_key,
      zero_of_key;
  for (int i = 0; i < code_keys; ++i) {
    for (int h = 0; h < code_heads; ++h) q[static_cast<std::size_t>((i * code_heads + h) * code_dim + h)] = 1;
    for (int c = 0; c < code_dim; c += 2)
      packed[static_cast<std::size_t>((i * code_dim + c) / 2)] = c % 16 + 16 * (c % 16 + 1);
    of_key.push_back(integers ? round_to(dtype, i == 7 ? NAN : (i - 100) * 0.013) : i);
    zero_of_key.push_back(round_to(dtype, i == 9 ? NAN : 1.7 - 0.03 * i));
    scales.insert(scales.end(), static_cast<std::size_t>(groups), of_key.back());
    zeros.insert(zeros.end(), static_cast<std::size_t>(groups), zero_of_key.back());
  }
  const std::unique_ptr<Memory> memory = memory_of(target.device);
  const auto put = [&](const std::vector<double>& values, Dtype as) {
    const std::vector<std::byte> bytes = bytes_of(values, as);
    void* data = memory->allocate(bytes.size());
    memory->write(data, bytes.data(), bytes.size());
    return data;
  };
  Buffers b{.q = put(q, dtype), .k = put(packed, Dtype::int8), .v = put(packed, Dtype::int8)};
  b.k_group_scale = b.v_group_scale = put(scales, integers ? dtype : Dtype::int8);
  if (integers) b.k_group_zero = b.v_group_zero = put(zeros, dtype);
  std::vector<std::byte> out(q.size() * size_of(dtype)), lse(code_keys * code_heads * 4);
  b.out = memory->allocate(out.size()), b.lse = static_cast<float*>(memory->allocate(lse.size()));
  Options options{.device = target.device, .kernel = target.kernel};
  options.workspace_bytes = workspace_bytes(p, Pass::forward, options);
  options.workspace = memory->allocate(options.workspace_bytes);
  forward(p, b, options);
  memory->read(out.data(), b.out, out.size());
  memory->read(lse.data(), b.lse, lse.size());

  for (int i = 0; i < code_keys; ++i) {
    std::vector<double> number;
    bool finite = true, huge = false;
    for (int code = 0; code < 16; ++code) {
      number.push_back(worth(codes, dtype, i, code, of_key, zero_of_key));
      finite = finite && std::isfinite(number.back());
      huge = huge || std::fabs(number.back()) > 0x1p120;
    }
    if (finite && huge) continue;  // a score times log2(e) may leave float
    for (int h = 0; h < code_heads; ++h) {
      const double got = element(lse, Dtype::float32, i * code_heads + h);
      // A product of 0 with what is not finite is NaN, and so are the row's score and out.
      const double wanted = number[static_cast<std::size_t>(h)], allowed = 4e-6 * std::fabs(wanted) + 0x1p-100;
      EXPECT_TRUE(finite ? std::fabs(got - wanted) <= allowed : std::isnan(got))
          << "key " << i << ", code " << h << ": got " << got << ", want " << wanted;
      for (int c = 0; c < code_dim; ++c) {
        const double value = element(out, dtype, (i * code_heads + h) * code_dim + c),
                     want = number[static_cast<std::size_t>(c % 16)];
        ASSERT_TRUE(finite ? value == want : std::isnan(value))
            << "value " << i << ", column " << c << ": got " << value << ", want " << want;
      }
    }
  }
}

}  // namespace flash_attention::testing
