#include "plan/append.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "flash_attention/error.h"
#include "plan/kernel_config.h"

namespace flash_attention::plan {
namespace {

/// The most elements that can move together: every row, and every half of a rotated row, begins at a multiple of it.
int vector_of(const AppendProblem& p) {
  const auto fits = [](const Strides& s, int width) {
    return s.batch % width == 0 && s.seq % width == 0 && s.head % width == 0;
  };
  const bool vectors_of_cache = p.cache_group == 0;  // groups are stored by themselves
  for (int width = 8; width > 1; width /= 2) {
    const bool dims = p.head_dim % width == 0 && (p.in_rows || p.head_dim_v % width == 0);
    const std::int64_t rotated = p.rotary_interleaved ? p.rotary_dim : p.rotary_dim / 2;
    const int of_table = p.rotary_interleaved ? width / 2 : width;
    if (dims && rotated % width == 0 && p.rotary_stride % of_table == 0 && fits(p.q_strides, width) &&
        fits(p.q_out_strides, width) && fits(p.k_strides, width) && (!vectors_of_cache || fits(p.k_cache_strides, width)) &&
        (p.in_rows ? fits(p.dq_out_strides, width) && fits(p.dk_out_strides, width) && fits(p.dq_strides, width) &&
                         fits(p.dk_strides, width)
                   : fits(p.v_strides, width) && (!vectors_of_cache || fits(p.v_cache_strides, width)))) {
      return width;
    }
  }
  return 1;
}

abi::AppendConfig configure(const AppendProblem& p) {
  abi::AppendConfig config{.dtype = static_cast<abi::Type>(p.dtype),
                           .cache_dtype = static_cast<abi::Type>(*p.cache_dtype),
                           .rotary_dtype = static_cast<abi::Type>(p.rotary_dtype),
                           .norm_dtype = static_cast<abi::Type>(p.norm_dtype),
                           .head_dim = static_cast<int>(p.head_dim),
                           .head_dim_v = static_cast<int>(p.head_dim_v),
                           .rotary_dim = static_cast<int>(p.rotary_dim),
                           .vector = vector_of(p),
                           .interleaved = p.rotary_interleaved,
                           .q_norm = p.q_norm,
                           .k_norm = p.k_norm,
                           .plus_one = p.norm_plus_one,
                           .angles = p.angle_sections > 0,
                           .sections = p.angle_sections > 1,
                           .sections_interleaved = p.sections_interleaved,
                           .in_rows = p.in_rows,
                           .paged = p.page_size != 0,
                           .scales = p.scales != ScaleKind::none,
                           .token_scales = p.scales == ScaleKind::token,
                           .group = static_cast<int>(p.cache_group)};
  // A lane of a half-split pair holds two vectors.
  const std::int64_t pairs = p.rotary_interleaved ? 0 : p.rotary_dim / 2;
  const std::int64_t units = (p.head_dim - pairs) / config.vector;
  config.lanes = static_cast<int>(std::bit_ceil(static_cast<std::uint64_t>(std::clamp<std::int64_t>(units, 1, 32))));
  return config;
}

constexpr std::int64_t many_rows = 1 << 15;  // several times the warps of a GPU

}  // namespace

int heads_of_append_task(const AppendProblem& p) {
  const std::int64_t rows = query_tokens(p) * p.heads_q + 2 * new_tokens(p) * p.heads_kv;
  const int at_once = 32 / configure(p).lanes;
  return at_once * static_cast<int>(std::clamp<std::int64_t>(rows / (at_once * many_rows), 1, 8));
}

Launch lay_out_append(const AppendProblem& problem) {
  const abi::AppendConfig config = configure(problem);
  abi::AppendArgs rows{};
  rows.tokens_q = query_tokens(problem), rows.tokens_new = new_tokens(problem);
  rows.heads_q = static_cast<int>(problem.heads_q), rows.heads_kv = static_cast<int>(problem.heads_kv);
  rows.heads_of_task = heads_of_append_task(problem);
  const long long blocks = abi::append_blocks(config, rows);
  if (blocks > std::numeric_limits<int>::max()) {
    throw Error(ErrorCode::unsupported, "append: " + std::to_string(blocks) + " blocks of rows; a grid has up to 2^31 - 1");
  }
  return {.unit = "decode/append",
          .entry = "decode_append",
          .config = launch_config(config),
          .grid = {static_cast<int>(blocks), 1, 1},
          .block = abi::append_threads,
          .shared_bytes = abi::append_shared_bytes(config),
          .arguments = "AppendArgs"};
}

int append_gradient_blocks(const AppendProblem& p) {
  const std::int64_t rows = query_tokens(p) * p.heads_q + new_tokens(p) * p.heads_kv;
  return static_cast<int>(std::clamp<std::int64_t>((rows + 63) / 64, 1, abi::most_append_gradient_blocks));
}

std::vector<Launch> lay_out_append_gradients(const AppendProblem& problem, bool weights) {
  const Launch rows{.unit = "decode/append_gradient",
                    .entry = "decode_append_gradient",
                    .config = launch_config(configure(problem)),
                    .grid = {append_gradient_blocks(problem), 1, 1},
                    .block = abi::append_threads,
                    .shared_bytes = static_cast<int>(abi::append_threads / 32 * problem.head_dim * sizeof(float)),
                    .arguments = "AppendGradientArgs"};
  if (!weights) return {rows};
  Launch sums = rows;
  sums.entry = "decode_append_weights";
  sums.grid = {static_cast<int>((problem.head_dim + 31) / 32), 2, 1};
  sums.block = abi::append_weights_threads;
  sums.shared_bytes = abi::append_weights_threads * static_cast<int>(sizeof(float));
  return {rows, sums};
}

}  // namespace flash_attention::plan
