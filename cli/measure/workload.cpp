#include "cli/measure/workload.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cli/measure/element.h"

namespace flash_attention::cli {
namespace {

std::uint64_t next_random(std::uint64_t& state) {  // splitmix64
  std::uint64_t x = state += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// The sum of four uniform words is close to normal; one random number makes one element, so large inputs stay cheap.
float next_normal(std::uint64_t& state) {
  const std::uint64_t x = next_random(state);
  const std::int64_t sum =
      static_cast<std::int64_t>((x & 0xffff) + ((x >> 16) & 0xffff) + ((x >> 32) & 0xffff) + (x >> 48));
  constexpr float deviation = 65536.0f * 0.57735027f;  // of the sum: sqrt(4 / 12) * 2^16
  return static_cast<float>(sum - 2 * 65535) / deviation;
}

Array random_array(Device device, Dtype dtype, std::int64_t count, std::uint64_t seed) {
  Array array(device, static_cast<std::size_t>(count) * size_of(dtype));
  for (std::int64_t i = 0; i < count; ++i) store(array.host(), dtype, i, next_normal(seed));
  array.upload();
  return array;
}

/// The same in 8 bits: the code of the nearest number, from a table of numbers close to each other.
Array random_codes(Device device, Dtype dtype, std::int64_t count, std::uint64_t seed) {
  constexpr int steps = 4096;
  constexpr float reach = 3.5f;
  std::vector<std::uint8_t> codes(steps);
  for (int step = 0; step < steps; ++step) {
    const float x = (static_cast<float>(step) / steps * 2 - 1) * reach;
    float distance = INFINITY;
    for (int code = 0; code < 256; ++code) {
      const float here = std::fabs(from_code(dtype, static_cast<std::uint8_t>(code)) - x);
      if (here < distance) distance = here, codes[static_cast<std::size_t>(step)] = static_cast<std::uint8_t>(code);
    }
  }
  Array array(device, static_cast<std::size_t>(count));
  auto* to = static_cast<std::uint8_t*>(array.host());
  for (std::int64_t i = 0; i < count; ++i) {
    const float place = (next_normal(seed) / reach + 1) / 2 * steps;
    to[i] = codes[static_cast<std::size_t>(std::clamp(place, 0.0f, steps - 1.0f))];
  }
  array.upload();
  return array;
}

/// Two codes of 4 bits in a byte.
Array random_bytes(Device device, std::int64_t count, std::uint64_t seed) {
  Array array(device, static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i)
    static_cast<std::uint8_t*>(array.host())[i] = static_cast<std::uint8_t>(next_random(seed) >> 56);
  array.upload();
  return array;
}

/// Scales of groups with which such codes are numbers of about one.
Array scales_of_groups(Device device, const Problem& problem, std::int64_t count, std::uint64_t seed) {
  const bool integers = problem.kv_dtype == Dtype::int4;
  Array array(device, static_cast<std::size_t>(count) * (integers ? size_of(problem.dtype) : 1));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto part = static_cast<int>(next_random(seed) >> 62);
    if (integers) {
      store(array.host(), problem.dtype, i, 0.15f + 0.05f * static_cast<float>(part));
    } else {
      static_cast<std::uint8_t*>(array.host())[i] =
          static_cast<std::uint8_t>(problem.kv_dtype == Dtype::nvfp4 ? 0x28 + part : 124 + part % 2);
    }
  }
  array.upload();
  return array;
}

Array equal_zeros(Device device, const Problem& problem, std::int64_t count) {
  Array array(device, static_cast<std::size_t>(count) * size_of(problem.dtype));
  for (std::int64_t i = 0; i < count; ++i) store(array.host(), problem.dtype, i, -1.625f);
  array.upload();
  return array;
}

/// Between 1 and 2.
Array random_scales(Device device, std::int64_t count, std::uint64_t seed) {
  Array array(device, static_cast<std::size_t>(count) * sizeof(float));
  for (std::int64_t i = 0; i < count; ++i)
    static_cast<float*>(array.host())[i] = 1 + static_cast<float>(next_random(seed) >> 40) * 0x1p-24f;
  array.upload();
  return array;
}

/// Every page once, in no order.
Array shuffled_pages(Device device, std::int64_t count, std::uint64_t seed) {
  Array array(device, static_cast<std::size_t>(count) * sizeof(std::int32_t));
  auto* pages = static_cast<std::int32_t*>(array.host());
  for (std::int64_t i = 0; i < count; ++i) {
    const auto other = static_cast<std::int64_t>(next_random(seed) % static_cast<std::uint64_t>(i + 1));
    pages[i] = pages[other];
    pages[other] = static_cast<std::int32_t>(i);
  }
  array.upload();
  return array;
}

Array equal_lengths(Device device, std::int64_t count, std::int64_t length) {
  Array array(device, static_cast<std::size_t>(count) * sizeof(std::int32_t));
  std::fill_n(static_cast<std::int32_t*>(array.host()), count, static_cast<std::int32_t>(length));
  array.upload();
  return array;
}

/// How many blocks of keys (or keys) the queries of a list may see, by the causal diagonal.
std::int64_t seen_units(const Problem& p, std::int64_t row) {
  const KeyList& list = p.key_list;
  const std::int64_t last = std::min((row + 1) * list.block_q, p.seq_q) - 1;
  const std::int64_t diagonal = p.alignment == Alignment::top_left ? last : last + p.seq_kv - p.seq_q;
  const std::int64_t keys = p.causal ? std::clamp<std::int64_t>(diagonal + 1, 0, p.seq_kv) : p.seq_kv;
  return (keys + list.block_kv - 1) / list.block_kv;
}

/// A list for each sequence, block of queries and head: different entries of those that the queries may see, followed by -1
/// if there are not so many. Causal lists of blocks begin with the last visible block, which holds the queries themselves.
Array random_lists(Device device, const Problem& p, std::uint64_t seed) {
  const KeyList& list = p.key_list;
  const std::int64_t rows = (p.seq_q + list.block_q - 1) / list.block_q;
  Array array(device, static_cast<std::size_t>(p.batch * rows * list.heads * list.entries) * sizeof(std::int32_t));
  auto* entry = static_cast<std::int32_t*>(array.host());
  std::vector<std::int64_t> drawn_for(static_cast<std::size_t>(std::max<std::int64_t>(p.seq_kv, 1)), -1);
  for (std::int64_t number = 0; number < p.batch * rows * list.heads; ++number) {
    const std::int64_t units = seen_units(p, number / list.heads % rows);
    const bool own = p.causal && list.kind == KeyListKind::blocks && units > 0 && list.entries > 0;
    const std::int64_t others = units - own, wanted = list.entries - own, count = std::min(wanted, others);
    if (own) *entry++ = static_cast<std::int32_t>(units - 1);
    for (std::int64_t last = others - count; last < others; ++last) {  // Floyd's: each set of `count` is as likely
      auto drawn = static_cast<std::int64_t>(next_random(seed) % static_cast<std::uint64_t>(last + 1));
      if (drawn_for[static_cast<std::size_t>(drawn)] == number) drawn = last;
      drawn_for[static_cast<std::size_t>(drawn)] = number;
      *entry++ = static_cast<std::int32_t>(drawn);
    }
    entry = std::fill_n(entry, wanted - count, -1);
  }
  array.upload();
  return array;
}

}  // namespace

Buffers Workload::buffers() const {
  Buffers buffers;
  buffers.q = q.device();
  buffers.k = k.device();
  buffers.v = v.device();
  buffers.out = out.device();
  buffers.lse = static_cast<float*>(lse.device());
  buffers.page_table = static_cast<const std::int32_t*>(page_table.device());
  buffers.seqused_kv = static_cast<const std::int32_t*>(seqused_kv.device());
  buffers.key_list = static_cast<const std::int32_t*>(key_list.device());
  buffers.k_scale = static_cast<const float*>(k_scale.device());
  buffers.v_scale = static_cast<const float*>(v_scale.device());
  buffers.k_group_scale = k_groups.device();
  buffers.v_group_scale = v_groups.device();
  buffers.k_group_zero = k_zeros.device();
  buffers.v_group_zero = v_zeros.device();
  buffers.q_scale = static_cast<const float*>(q_scale.device());
  buffers.alibi_slopes = static_cast<const float*>(alibi_slopes.device());
  buffers.dout = dout.device();
  buffers.dq = dq.device();
  buffers.dk = dk.device();
  buffers.dv = dv.device();
  return buffers;
}

std::vector<const Array*> Workload::arrays() const {
  return {&q,        &k,    &v,  &out, &lse, &alibi_slopes, &q_scale,  &k_scale,  &v_scale, &page_table, &seqused_kv,
          &key_list, &dout, &dq, &dk,  &dv,  &out_tangent,  &k_groups, &v_groups, &k_zeros, &v_zeros};
}

Workload make_workload(const Problem& problem, const Options& options, bool with_backward) {
  Workload work;
  work.problem = problem;
  work.options = options;
  const Device device = options.device;
  const Dtype dtype = problem.dtype;
  const std::int64_t q_rows = problem.batch * problem.seq_q * problem.heads_q;
  const bool pages = problem.page_size != 0;
  const std::int64_t kv_rows =
      (pages ? problem.num_pages * problem.page_size : problem.batch * problem.seq_kv) * problem.heads_kv;
  const std::int64_t dim_v = problem.head_dim_v != 0 ? problem.head_dim_v : problem.head_dim;
  const auto bytes = [&](std::int64_t count) { return static_cast<std::size_t>(count) * size_of(dtype); };

  work.q = problem.q_dtype ? random_codes(device, *problem.q_dtype, q_rows * problem.head_dim, 1)
                           : random_array(device, dtype, q_rows * problem.head_dim, 1);
  const bool groups = problem.kv_dtype && has_groups(*problem.kv_dtype);
  const auto keys = [&](std::int64_t count, std::uint64_t seed) {
    if (groups) return random_bytes(device, count / 2, seed);
    return problem.kv_dtype ? random_codes(device, *problem.kv_dtype, count, seed)
                            : random_array(device, dtype, count, seed);
  };
  work.k = keys(kv_rows * problem.head_dim, 2);
  work.v = keys(kv_rows * dim_v, 3);
  if (groups) {
    const std::int64_t group = columns_of_group(*problem.kv_dtype, problem.kv_group);
    const std::int64_t of_k = kv_rows * problem.head_dim / group, of_v = kv_rows * dim_v / group;
    work.k_groups = scales_of_groups(device, problem, of_k, 10);
    work.v_groups = scales_of_groups(device, problem, of_v, 11);
    if (problem.kv_dtype == Dtype::int4) {
      work.k_zeros = equal_zeros(device, problem, of_k);
      work.v_zeros = equal_zeros(device, problem, of_v);
    }
  }
  if (problem.kv_scales != ScaleKind::none) {
    const std::int64_t count = problem.kv_scales == ScaleKind::tensor ? 1
                               : problem.kv_scales == ScaleKind::head ? problem.batch * problem.heads_kv
                                                                      : kv_rows;
    work.k_scale = random_scales(device, count, 6);
    work.v_scale = random_scales(device, count, 7);
  }
  if (problem.q_scales != ScaleKind::none) {
    work.q_scale = random_scales(device, problem.q_scales == ScaleKind::tensor ? 1 : problem.batch * problem.heads_kv, 8);
  }
  work.out = Array(device, bytes(q_rows * dim_v));
  work.lse = Array(device, static_cast<std::size_t>(q_rows) * sizeof(float));
  if (pages) work.page_table = shuffled_pages(device, problem.num_pages, 5);
  if (problem.seqused_kv) work.seqused_kv = equal_lengths(device, problem.batch, problem.seq_kv);
  if (problem.key_list.kind != KeyListKind::none) work.key_list = random_lists(device, problem, 9);
  if (problem.alibi) {
    work.alibi_slopes = Array(device, static_cast<std::size_t>(problem.heads_q) * sizeof(float));
    for (std::int64_t h = 0; h < problem.heads_q; ++h) {
      const double exponent = -8.0 * static_cast<double>(h + 1) / static_cast<double>(problem.heads_q);
      static_cast<float*>(work.alibi_slopes.host())[h] = static_cast<float>(std::exp2(exponent));
    }
    work.alibi_slopes.upload();
  }
  if (with_backward) {
    work.dout = random_array(device, dtype, q_rows * dim_v, 4);
    work.dq = Array(device, work.q.bytes());
    work.dk = Array(device, work.k.bytes());
    work.dv = Array(device, work.v.bytes());
  }
  return work;
}

namespace {

/// Each tensor is its own tangent.
Buffers with_tangents(const Workload& workload) {
  Buffers buffers = workload.buffers();
  buffers.q_tangent = buffers.q, buffers.k_tangent = buffers.k, buffers.v_tangent = buffers.v;
  buffers.out_tangent = workload.out_tangent.device();
  return buffers;
}

}  // namespace

void call(const Workload& workload, Pass pass) {
  const Buffers buffers = workload.buffers();
  switch (pass) {
    case Pass::forward:
      return forward(workload.problem, buffers, workload.options);
    case Pass::backward:
      return backward(workload.problem, buffers, workload.options);
    case Pass::standard_forward:
      return standard_forward(workload.problem, buffers, workload.options);
    case Pass::standard_backward:
      return standard_backward(workload.problem, buffers, workload.options);
    case Pass::tangent:
      return tangent(workload.problem, with_tangents(workload), workload.options);
    case Pass::second:
      return second(workload.problem, with_tangents(workload), workload.options);
  }
}

std::shared_ptr<void> attach_workspace(Workload& workload, Pass pass) {
  workload.options.workspace_bytes = workspace_bytes(workload.problem, pass, workload.options);
  std::shared_ptr<void> block = device_block(workload.options.device, workload.options.workspace_bytes);
  workload.options.workspace = block.get();
  return block;
}

}  // namespace flash_attention::cli
