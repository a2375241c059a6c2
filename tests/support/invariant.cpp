#include "support/invariant.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>

#include "emulator/host/seed.h"
#include "support/oracle/memory.h"
#include "support/oracle/rounding.h"

namespace flash_attention::testing {
namespace {

/// A pure function of where an element belongs: about normal, with some large scores.
float element_at(int tensor, int sequence, std::int64_t head, std::int64_t position, std::int64_t column) {
  std::uint64_t x = static_cast<std::uint64_t>(tensor) * 0x9E3779B97F4A7C15ull + static_cast<std::uint64_t>(sequence);
  for (const std::int64_t part : {head, position, column}) {
    x = (x ^ static_cast<std::uint64_t>(part) ^ x >> 31) * 0xBF58476D1CE4E5B9ull;
  }
  x ^= x >> 29;
  float sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<float>(x >> 16 * i & 0xffff) / 65536.0f - 0.5f;
  return 1.7f * sum;
}

/// Elements of a type; NaN where none was set.
class ElementArray {
 public:
  ElementArray(Dtype dtype, std::int64_t count)
      : dtype_(dtype), bytes_(static_cast<std::size_t>(count) * size_of(dtype), '\xff') {}
  void set(std::int64_t index, float value) {
    const std::uint32_t word = dtype_ == Dtype::float32    ? std::bit_cast<std::uint32_t>(value)
                               : dtype_ == Dtype::bfloat16 ? to_bfloat16(value)
                               : dtype_ == Dtype::float16  ? to_float16(value)
                                                           : code_of(value);
    const std::size_t size = size_of(dtype_);
    std::memcpy(bytes_.data() + static_cast<std::size_t>(index) * size, &word, size);
  }
  const std::vector<char>& bytes() const { return bytes_; }

 private:
  /// A finite code of 8 bits that follows from the value: which one does not matter.
  std::uint32_t code_of(float value) const {
    const auto number = static_cast<std::uint32_t>(static_cast<std::int32_t>(value * 4096.0f));
    return dtype_ == Dtype::int8 ? number & 0xff : (number & 0x80) | (number & 0xff) % 0x48;
  }

  Dtype dtype_;
  std::vector<char> bytes_;
};

template <class T>
T* place_in(Memory& memory, const std::vector<T>& values) {
  const std::size_t bytes = std::max<std::size_t>(values.size() * sizeof(T), 1);
  void* to = memory.allocate(bytes);
  if (!values.empty()) memory.write(to, values.data(), values.size() * sizeof(T));
  return static_cast<T*>(to);
}

/// Sizes and tables of the call.
struct AskedLayout {
  Problem problem;
  std::vector<std::int32_t> starts_q{0}, starts_kv{0}, used_q, used_kv, table;

  AskedLayout(const Problem& options, const Asked& asked) : problem(options) {
    problem.batch = static_cast<std::int64_t>(asked.parts.size());
    for (const Asked::Part& part : asked.parts) {
      problem.seq_q = std::max(problem.seq_q, part.queries), problem.seq_kv = std::max(problem.seq_kv, part.keys);
      starts_q.push_back(starts_q.back() + static_cast<std::int32_t>(part.queries));
      starts_kv.push_back(starts_kv.back() + static_cast<std::int32_t>(part.keys));
      used_q.push_back(static_cast<std::int32_t>(part.queries));
      used_kv.push_back(static_cast<std::int32_t>(part.keys));
    }
    problem.seq_kv = std::max(problem.seq_kv, asked.capacity);
    if (asked.packed) problem.packed = true, problem.total_q = starts_q.back(), problem.total_kv = starts_kv.back();
    if (!asked.packed) problem.seqused_q = true;
    if (!asked.packed || asked.page_size > 0) problem.seqused_kv = true;
    if (asked.page_size > 0) put_in_pages(asked.page_size);
  }

  std::int64_t pages_each() const { return (problem.seq_kv + problem.page_size - 1) / problem.page_size; }
  void put_in_pages(std::int64_t page_size) {
    problem.page_size = page_size, problem.total_kv = 0;
    problem.page_table_stride = pages_each(), problem.num_pages = problem.batch * pages_each() + 3;
    const std::int64_t modulus = problem.num_pages % 7 == 0 ? problem.num_pages - 1 : problem.num_pages;
    for (std::int64_t i = 0; i < problem.batch * pages_each(); ++i) {
      table.push_back(static_cast<std::int32_t>((i * 7 + 3) % modulus));  // no page twice: 7 does not divide the modulus
    }
  }

  /// Row of the tensor of keys, counted in rows of all heads.
  std::int64_t key_row(std::size_t b, std::int64_t j) const {
    if (problem.page_size > 0) {
      const std::int64_t entry = static_cast<std::int64_t>(b) * pages_each() + j / problem.page_size;
      return table[static_cast<std::size_t>(entry)] * problem.page_size + j % problem.page_size;
    }
    return problem.packed ? starts_kv[b] + j : static_cast<std::int64_t>(b) * problem.seq_kv + j;
  }
  std::int64_t key_rows() const {
    if (problem.page_size > 0) return problem.num_pages * problem.page_size;
    return problem.packed ? problem.total_kv : problem.batch * problem.seq_kv;
  }
  std::int64_t query_row(std::size_t b, std::int64_t i) const {
    return problem.packed ? starts_q[b] + i : static_cast<std::int64_t>(b) * problem.seq_q + i;
  }
  std::int64_t query_rows() const { return problem.packed ? problem.total_q : problem.batch * problem.seq_q; }
  std::int64_t lse_at(std::size_t b, std::int64_t head, std::int64_t i) const {
    if (problem.packed) return head * problem.total_q + starts_q[b] + i;
    return (static_cast<std::int64_t>(b) * problem.heads_q + head) * problem.seq_q + i;
  }
};

}  // namespace

Problem invariant_problem(Dtype dtype) {
  Problem p{.heads_q = 4, .heads_kv = 2, .head_dim = 64, .dtype = dtype};
  p.head_dim_v = 64, p.causal = true, p.scale = 0.4f, p.invariant = true;
  return p;
}

RowBits rows_of(const Problem& options, const Asked& asked, Device device) {
  const AskedLayout layout(options, asked);
  const Problem& p = layout.problem;
  const auto memory = memory_of(device);
  const Dtype kv_dtype = p.kv_dtype.value_or(p.dtype);
  const std::int64_t key_columns = p.head_dim - (p.latent ? p.head_dim_v : 0);
  ElementArray q(p.dtype, layout.query_rows() * p.heads_q * p.head_dim),
      k(kv_dtype, layout.key_rows() * p.heads_kv * key_columns), v(kv_dtype, layout.key_rows() * p.heads_kv * p.head_dim_v);
  std::vector<float> k_scale, v_scale;
  if (p.kv_scales == ScaleKind::token) k_scale.resize(static_cast<std::size_t>(layout.key_rows() * p.heads_kv), 9.0f);
  if (p.kv_scales == ScaleKind::head) k_scale.resize(static_cast<std::size_t>(p.batch * p.heads_kv), 9.0f);
  v_scale = k_scale;
  for (std::size_t b = 0; b < asked.parts.size(); ++b) {
    const Asked::Part& part = asked.parts[b];
    for (std::int64_t i = 0; i < part.queries; ++i) {
      for (std::int64_t x = 0; x < p.heads_q * p.head_dim; ++x) {
        const std::int64_t position = part.keys - part.queries + i;
        q.set(layout.query_row(b, i) * p.heads_q * p.head_dim + x,
              element_at(0, part.sequence, x / p.head_dim, position, x % p.head_dim));
      }
    }
    for (std::int64_t j = 0; j < part.keys; ++j) {
      for (std::int64_t head = 0; head < p.heads_kv; ++head) {
        const std::int64_t row = layout.key_row(b, j) * p.heads_kv + head;
        for (std::int64_t c = 0; c < key_columns; ++c)
          k.set(row * key_columns + c, element_at(1, part.sequence, head, j, c));
        if (!k_scale.empty()) {
          const bool of_token = p.kv_scales == ScaleKind::token;
          const auto place = static_cast<std::size_t>(of_token ? row : static_cast<std::int64_t>(b) * p.heads_kv + head);
          k_scale[place] = 0.02f + 0.004f * element_at(3, part.sequence, head, of_token ? j : 0, 0);
          v_scale[place] = 0.02f + 0.004f * element_at(4, part.sequence, head, of_token ? j : 0, 0);
        }
        for (std::int64_t c = 0; c < p.head_dim_v; ++c)
          v.set(row * p.head_dim_v + c, element_at(2, part.sequence, head, j, c));
      }
    }
  }
  const std::size_t size = size_of(p.dtype);
  std::vector<char> out(static_cast<std::size_t>(layout.query_rows() * p.heads_q * p.head_dim_v) * size);
  std::vector<float> lse(static_cast<std::size_t>(layout.query_rows() * p.heads_q));
  std::vector<float> sink(static_cast<std::size_t>(p.heads_q));
  for (std::size_t h = 0; h < sink.size(); ++h) sink[h] = 0.3f * static_cast<float>(h);
  Buffers buffers{.q = place_in(*memory, q.bytes()), .k = place_in(*memory, k.bytes()), .v = place_in(*memory, v.bytes())};
  buffers.out = place_in(*memory, out), buffers.lse = place_in(*memory, lse);
  if (p.sink) buffers.sink = place_in(*memory, sink);
  if (!k_scale.empty()) buffers.k_scale = place_in(*memory, k_scale), buffers.v_scale = place_in(*memory, v_scale);
  if (p.packed) buffers.cu_seqlens_q = place_in(*memory, layout.starts_q);
  if (p.packed && p.page_size == 0) buffers.cu_seqlens_kv = place_in(*memory, layout.starts_kv);
  if (p.seqused_q) buffers.seqused_q = place_in(*memory, layout.used_q);
  if (p.seqused_kv) buffers.seqused_kv = place_in(*memory, layout.used_kv);
  if (p.page_size > 0) buffers.page_table = place_in(*memory, layout.table);
  device.emulated_arch = device.kind == DeviceKind::emulator ? asked.arch : 0;
  emulator::set_num_sms(asked.num_sms);
  Options run{.device = device, .kernel = asked.kernel};
  run.workspace_bytes = workspace_bytes(p, Pass::forward, run);
  if (run.workspace_bytes > 0) run.workspace = memory->allocate(run.workspace_bytes);
  forward(p, buffers, run);
  emulator::set_num_sms(0);
  memory->read(out.data(), buffers.out, out.size());
  memory->read(lse.data(), buffers.lse, lse.size() * 4);

  RowBits rows;
  for (std::size_t b = 0; b < asked.parts.size(); ++b) {
    const Asked::Part& part = asked.parts[b];
    for (std::int64_t i = 0; i < part.queries; ++i) {
      for (std::int64_t h = 0; h < p.heads_q; ++h) {
        std::vector<std::uint32_t> bits(static_cast<std::size_t>(p.head_dim_v) + 1);
        const std::int64_t first = (layout.query_row(b, i) * p.heads_q + h) * p.head_dim_v;
        for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
          std::memcpy(&bits[static_cast<std::size_t>(c)], out.data() + static_cast<std::size_t>(first + c) * size, size);
        }
        std::memcpy(&bits.back(), &lse[static_cast<std::size_t>(layout.lse_at(b, h, i))], 4);
        const std::int64_t position = part.keys - part.queries + i;
        rows.emplace_back(std::to_string(part.sequence) + "/" + std::to_string(position) + "/" + std::to_string(h), bits);
      }
    }
  }
  return rows;
}

std::vector<Asked> ways_to_ask(std::int64_t keys) {
  return {
      {.name = "prefill", .parts = {{0, keys, 21}}, .num_sms = 3},
      {.name = "prefill on a larger GPU", .parts = {{0, keys, 21}}, .num_sms = 108},
      {.name = "prefill by decode", .parts = {{0, keys, 21}}, .num_sms = 3, .kernel = "decode/sm80"},
      {.name = "chunk", .parts = {{0, std::max(keys - 100, keys / 2), 70}}, .num_sms = 2, .kernel = "forward/sm90"},
      {.name = "chunks beside others",
       .parts = {{0, keys - 9, 131}, {1, 200, 64}, {2, 0, 1}},
       .num_sms = 3,
       .kernel = "forward/sm90"},
      {.name = "packed chunks",
       .parts = {{1, 90, 77}, {0, keys, 40}, {2, 50, 0}, {0, keys - 30, 30}},
       .packed = true,
       .num_sms = 2,
       .kernel = "forward/sm90"},
      {.name = "chunk over pages",
       .parts = {{1, 100, 30}, {0, keys, 30}},
       .page_size = 16,
       .num_sms = 2,
       .kernel = "forward/sm90"},
      {.name = "one query", .parts = {{0, keys, 1}}, .num_sms = 108},
      {.name = "one query on one SM", .parts = {{0, keys, 1}}, .num_sms = 1},
      {.name = "one before the last, decoded", .parts = {{0, keys - 1, 1}}, .num_sms = 5},
      {.name = "capacity", .parts = {{0, keys, 2}}, .capacity = 2 * keys + 77, .num_sms = 7},
      {.name = "with others", .parts = {{1, 70, 5}, {0, keys, 3}, {2, 300, 1}, {3, 0, 1}}, .num_sms = 4},
      {.name = "with others, last", .parts = {{2, keys + 40, 9}, {1, 513, 1}, {0, keys - 4, 2}}, .num_sms = 9},
      {.name = "pages", .parts = {{0, keys, 4}, {1, 100, 4}}, .page_size = 16, .num_sms = 6},
      {.name = "odd pages and capacity",
       .parts = {{1, 9, 1}, {0, keys, 1}},
       .capacity = keys + 200,
       .page_size = 7,
       .num_sms = 11},
      {.name = "packed", .parts = {{1, 33, 2}, {0, keys, 17}, {2, 5, 0}}, .packed = true, .num_sms = 5},
      {.name = "packed over pages",
       .parts = {{0, keys - 7, 3}, {0, keys, 2}},
       .page_size = 64,
       .packed = true,
       .num_sms = 10},
  };
}

void expect_invariant(const Problem& options, std::int64_t keys, Device device) {
  std::map<std::string, std::pair<std::string, std::vector<std::uint32_t>>> known;
  int compared = 0;
  for (Asked asked : ways_to_ask(keys)) {
    // forward/portable takes all of float32, cpu/prefill all of a CPU, decode/ all of caches of 8 bits and latent keys.
    const bool wide_keys = !options.latent && options.kv_dtype.value_or(options.dtype) == options.dtype;
    if (options.dtype == Dtype::float32 || device.kind == DeviceKind::cpu || !wide_keys) asked.kernel.clear();
    for (const auto& [row, bits] : rows_of(options, asked, device)) {
      const auto [place, added] = known.try_emplace(row, asked.name, bits);
      if (added) continue;
      ++compared;
      EXPECT_EQ(place->second.second, bits) << "row " << row << " of \"" << asked.name << "\" and of \""
                                            << place->second.first << "\": " << to_string(options);
    }
  }
  EXPECT_GT(compared, 60);
}

}  // namespace flash_attention::testing
