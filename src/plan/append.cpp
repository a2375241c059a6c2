#include "plan/append.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "flash_attention/error.h"
#include "plan/arguments.h"
#include "plan/views.h"

namespace flash_attention::plan {
namespace {

/// The most elements that move together: every row, and every half of a turned one, begins at a multiple of them.
int vector_of(const AppendProblem& p) {
  const auto fits = [](const Strides& s, int width) {
    return s.batch % width == 0 && s.seq % width == 0 && s.head % width == 0;
  };
  for (int width = 8; width > 1; width /= 2) {
    const bool dims = p.head_dim % width == 0 && p.head_dim_v % width == 0;
    const std::int64_t turned = p.rotary_interleaved ? p.rotary_dim : p.rotary_dim / 2;
    const int of_table = p.rotary_interleaved ? width / 2 : width;
    if (dims && turned % width == 0 && p.rotary_stride % of_table == 0 && fits(p.q_strides, width) &&
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

abi::AppendArgs make_arguments(const AppendProblem& p, const AppendBuffers& b) {
  abi::AppendArgs args{};
  args.Q = view(b.q, p.q_strides);
  args.Q_out = view(b.q_out, p.q_out_strides);
  args.K = view(b.k, p.k_strides);
  args.V = view(b.v, p.v_strides);
  args.K_cache = view(b.k_cache, p.k_cache_strides);
  args.V_cache = view(b.v_cache, p.v_cache_strides);
  args.K_scale = scale_view(b.k_scale, p.k_scale_strides);
  args.V_scale = scale_view(b.v_scale, p.v_scale_strides);
  args.cos = b.cos;
  args.sin = b.sin;
  args.rotary_stride = p.rotary_stride;
  args.lengths = b.lengths;
  args.rotary_offsets = b.rotary_offsets;
  args.cu_seqlens_new = b.cu_seqlens_new;
  args.cu_seqlens_q = b.cu_seqlens_q;
  args.sequences = b.sequences;
  args.positions = b.positions;
  args.page_table = b.page_table;
  args.page_table_stride = p.page_table_stride;
  args.rows_q = query_tokens(p) * p.heads_q;
  args.rows_keys = new_tokens(p) * p.heads_kv;
  args.rows_values = args.rows_keys;
  args.page_size = static_cast<int>(p.page_size);
  args.num_pages = static_cast<int>(p.num_pages);
  args.capacity = static_cast<int>(p.capacity);
  args.batch = static_cast<int>(p.batch);
  args.seq_q = static_cast<int>(p.seq_q);
  args.seq_new = static_cast<int>(p.seq_new);
  args.heads_q = static_cast<int>(p.heads_q);
  args.heads_kv = static_cast<int>(p.heads_kv);
  args.head_dim = static_cast<int>(p.head_dim);
  args.head_dim_v = static_cast<int>(p.head_dim_v);
  args.rotary_dim = static_cast<int>(p.rotary_dim);
  args.rotary_positions = static_cast<int>(p.rotary_positions);
  args.one_query = p.rotary_one_query ? 1 : 0;
  return args;
}

Launch lay_out_append(const AppendProblem& problem) {
  const abi::AppendConfig config = configure(problem);
  const long long blocks = abi::append_blocks(config, make_arguments(problem, {}));
  if (blocks > std::numeric_limits<int>::max()) {
    throw Error(ErrorCode::unsupported, "append: " + std::to_string(blocks) + " blocks of rows; a grid has up to 2^31 - 1");
  }
  return {.unit = "decode/append",
          .entry = "decode_append",
          .config = to_source(config),
          .grid = {static_cast<int>(blocks), 1, 1},
          .block = abi::append_threads,
          .arguments = "AppendArgs"};
}

}  // namespace flash_attention::plan
