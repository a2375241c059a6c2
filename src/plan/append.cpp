#include "plan/append.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "flash_attention/error.h"
#include "plan/kernel_config.h"

namespace flash_attention::plan {
namespace {

/// The most elements that move together: every row, and every half of a rotated one, begins at a multiple of them.
int vector_of(const AppendProblem& p) {
  const auto fits = [](const Strides& s, int width) {
    return s.batch % width == 0 && s.seq % width == 0 && s.head % width == 0;
  };
  for (int width = 8; width > 1; width /= 2) {
    const bool dims = p.head_dim % width == 0 && p.head_dim_v % width == 0;
    const std::int64_t rotated = p.rotary_interleaved ? p.rotary_dim : p.rotary_dim / 2;
    const int of_table = p.rotary_interleaved ? width / 2 : width;
    if (dims && rotated % width == 0 && p.rotary_stride % of_table == 0 && fits(p.q_strides, width) &&
        fits(p.q_out_strides, width) && fits(p.k_strides, width) && fits(p.v_strides, width) &&
        fits(p.k_cache_strides, width) && fits(p.v_cache_strides, width)) {
      return width;
    }
  }
  return 1;
}

abi::AppendConfig configure(const AppendProblem& p) {
  abi::AppendConfig config{.dtype = static_cast<abi::Type>(p.dtype),
                           .cache_dtype = static_cast<abi::Type>(*p.cache_dtype),
                           .rotary_dtype = static_cast<abi::Type>(p.rotary_dtype),
                           .vector = vector_of(p),
                           .rotary = p.rotary_dim > 0,
                           .interleaved = p.rotary_interleaved,
                           .paged = p.page_size != 0,
                           .scales = p.scales != ScaleKind::none,
                           .token_scales = p.scales == ScaleKind::token};
  const std::int64_t units = std::max(p.head_dim, p.head_dim_v) / config.vector;
  config.lanes = static_cast<int>(std::bit_ceil(static_cast<std::uint64_t>(std::clamp<std::int64_t>(units, 1, 32))));
  return config;
}

}  // namespace

Launch lay_out_append(const AppendProblem& problem) {
  const abi::AppendConfig config = configure(problem);
  abi::AppendArgs rows{};
  rows.rows_q = query_tokens(problem) * problem.heads_q;
  rows.rows_keys = rows.rows_values = new_tokens(problem) * problem.heads_kv;
  const long long blocks = abi::append_blocks(config, rows);
  if (blocks > std::numeric_limits<int>::max()) {
    throw Error(ErrorCode::unsupported, "append: " + std::to_string(blocks) + " blocks of rows; a grid has up to 2^31 - 1");
  }
  return {.unit = "decode/append",
          .entry = "decode_append",
          .config = launch_config(config),
          .grid = {static_cast<int>(blocks), 1, 1},
          .block = abi::append_threads,
          .arguments = "AppendArgs"};
}

}  // namespace flash_attention::plan
