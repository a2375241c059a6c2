#include "check/call.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "check/program_score.h"
#include "support/groups.h"
#include "support/half.h"
#include "support/narrow.h"

namespace flash_attention::check {
namespace {

double load(const char* data, Dtype dtype, std::int64_t index) {
  if (dtype == Dtype::float32) {
    float value;
    std::memcpy(&value, data + 4 * index, 4);
    return value;
  }
  if (size_of(dtype) == 1) {
    const auto code = static_cast<std::uint8_t>(data[index]);
    if (has_groups(dtype)) return code;  // two codes of 4 bits, or the scale of a group
    if (dtype == Dtype::int8) return static_cast<std::int8_t>(code);
    return dtype == Dtype::float8_e4m3 ? support::float_of_e4m3(code) : support::float_of_e5m2(code);
  }
  std::uint16_t bits;
  std::memcpy(&bits, data + 2 * index, 2);
  return dtype == Dtype::float16 ? support::float_of_fp16(bits) : support::float_of_bf16(bits);
}

const char* at(const void* data, std::int64_t elements, std::int64_t element_bytes) {
  return static_cast<const char*>(data) + elements * element_bytes;
}

}  // namespace

Call::Call(const Problem& p, const Buffers& b, const Options& o, Fetch fetch)
    : problem(p), buffers(b), options(o), fetch_(std::move(fetch)) {}

Call::~Call() = default;

const ProgramScore* Call::program() const {
  if (!problem.program.empty() && program_ == nullptr) program_ = std::make_unique<ProgramScore>(*this);
  return program_.get();
}

std::int64_t Call::length(const std::int32_t* lengths, std::int64_t b, std::int64_t otherwise) const {
  if (lengths == nullptr) return otherwise;
  std::int32_t value;
  std::memcpy(&value, fetch_(lengths + b, sizeof(value), scratch_), sizeof(value));
  return value;
}

float Call::number(const float* numbers, std::int64_t index) const {
  float value;
  std::memcpy(&value, fetch_(numbers + index, sizeof(value), scratch_), sizeof(value));
  return value;
}

Sequence Call::sequence(std::int64_t b) const {
  const Problem& p = problem;
  Sequence s;
  s.first_q = length(buffers.cu_seqlens_q, b, 0);
  s.first_kv = length(buffers.cu_seqlens_kv, b, 0);
  s.rows_q = p.packed ? length(buffers.cu_seqlens_q, b + 1, 0) - s.first_q : p.seq_q;
  s.rows_kv = buffers.cu_seqlens_kv != nullptr ? length(buffers.cu_seqlens_kv, b + 1, 0) - s.first_kv : p.seq_kv;
  s.len_q = std::clamp<std::int64_t>(length(buffers.seqused_q, b, s.rows_q), 0, s.rows_q);
  s.len_kv = std::clamp<std::int64_t>(length(buffers.seqused_kv, b, s.rows_kv), 0, s.rows_kv);
  s.first_key = std::max<std::int64_t>(length(buffers.left_padding, b, 0), 0);
  s.end_key = std::min(s.len_kv, length(buffers.key_lengths, b, s.len_kv));
  s.window_left = length(buffers.sequence_windows, 2 * b, -1);
  s.window_right = length(buffers.sequence_windows, 2 * b + 1, -1);
  return s;
}

std::vector<double> Call::read(const Rows& rows, std::int64_t begin, std::int64_t end) const {
  std::vector<double> values;
  if (begin >= end || rows.width == 0) return values;
  values.reserve(static_cast<std::size_t>((end - begin) * rows.width));
  constexpr std::int64_t max_bytes = 64 << 20;  // rows that are further apart are fetched one by one
  const auto element = static_cast<std::int64_t>(size_of(rows.dtype));
  const std::int64_t reach = std::max<std::int64_t>(std::abs(rows.stride) * element, 1);
  const std::int64_t block = std::clamp<std::int64_t>(max_bytes / reach, 1, end - begin);
  for (std::int64_t first = begin; first < end; first += block) {
    const std::int64_t last = std::min(first + block, end) - 1;
    const std::int64_t lowest = rows.stride < 0 ? last : first;
    const std::int64_t bytes = (last - first) * std::abs(rows.stride) * element + rows.width * element;
    const char* data = fetch_(at(rows.base, lowest * rows.stride, element), static_cast<std::size_t>(bytes), scratch_);
    for (std::int64_t j = first; j <= last; ++j) {
      for (std::int64_t d = 0; d < rows.width; ++d) {
        values.push_back(load(data, rows.dtype, (j - lowest) * rows.stride + d));
      }
    }
  }
  return values;
}

std::vector<double> Call::read_codes(const void* tensor, const Strides& strides, std::int64_t width, std::int64_t b,
                                     std::int64_t kv_head, std::int64_t begin, std::int64_t end) const {
  const bool bytes = problem.kv_group != 0 && problem.kv_dtype != Dtype::int4;
  const bool keys = tensor == buffers.k || tensor == buffers.v ||
                    (bytes && (tensor == buffers.k_group_scale || tensor == buffers.v_group_scale));
  const Dtype dtype = keys ? problem.kv_dtype.value_or(problem.dtype) : problem.dtype;
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  const auto rows_from = [&](std::int64_t offset) {
    return Rows{at(tensor, offset + kv_head * strides.head, element), dtype, strides.seq, width};
  };
  if (problem.page_size == 0) {
    const std::int64_t first = sequence(b).first_kv;
    return read(rows_from((problem.packed ? 0 : b * strides.batch) + first * strides.seq), begin, end);
  }
  std::vector<double> values;
  while (begin < end) {
    const std::int64_t page = begin / problem.page_size, first = page * problem.page_size;
    const std::int64_t last = std::min(end, first + problem.page_size);
    const std::int64_t entry = length(buffers.page_table, b * problem.page_table_stride + page, 0);
    const std::int64_t place = std::clamp<std::int64_t>(entry, 0, problem.num_pages - 1);
    const std::vector<double> part = read(rows_from(place * strides.batch), begin - first, last - first);
    values.insert(values.end(), part.begin(), part.end());
    begin = last;
  }
  return values;
}

std::vector<double> Call::read_groups(bool of_k, std::int64_t width, std::int64_t b, std::int64_t kv_head,
                                      std::int64_t begin, std::int64_t end) const {
  const Problem& p = problem;
  const Dtype format = *p.kv_dtype;
  const Strides& strides = of_k ? p.k_group_strides : p.v_group_strides;
  const std::int64_t groups = width / p.kv_group;
  const auto numbers = [&](const void* tensor) { return read_codes(tensor, strides, groups, b, kv_head, begin, end); };
  const std::vector<double> codes =
      read_codes(of_k ? buffers.k : buffers.v, of_k ? p.k_strides : p.v_strides, width / 2, b, kv_head, begin, end);
  const std::vector<double> scales = numbers(of_k ? buffers.k_group_scale : buffers.v_group_scale);
  std::vector<double> zeros;
  if (format == Dtype::int4) zeros = numbers(of_k ? buffers.k_group_zero : buffers.v_group_zero);
  std::vector<double> values(2 * codes.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t group = i / static_cast<std::size_t>(p.kv_group);
    const double code = support::float_of_code(format, static_cast<unsigned>(codes[i / 2]) >> i % 2 * 4 & 15u);
    if (format == Dtype::int4) {
      values[i] = support::rounded_to(p.dtype, static_cast<float>(code * scales[group] + zeros[group]));
    } else if (format == Dtype::nvfp4) {
      values[i] = code * double{support::float_of_e4m3(static_cast<std::uint8_t>(scales[group]))};
    } else {
      const int byte = static_cast<int>(scales[group]);
      const int counted =
          byte == 255 ? 255 : std::clamp(byte, support::least_e8m0(p.dtype), support::largest_e8m0(p.dtype));
      values[i] = support::rounded_to(
          p.dtype, static_cast<float>(code * double{support::float_of_e8m0(static_cast<unsigned>(counted))}));
    }
  }
  return values;
}

std::vector<double> Call::read_keys(const void* tensor, const Strides& strides, std::int64_t width, std::int64_t b,
                                    std::int64_t kv_head, std::int64_t begin, std::int64_t end) const {
  const Problem& p = problem;
  const bool of_k = tensor == buffers.k, grouped = p.kv_group != 0 && (of_k || tensor == buffers.v);
  std::vector<double> values = grouped ? read_groups(of_k, width, b, kv_head, begin, end)
                                       : read_codes(tensor, strides, width, b, kv_head, begin, end);
  if (p.kv_scales == ScaleKind::none || (!of_k && tensor != buffers.v)) return values;
  const Strides& s = of_k ? p.k_scale_strides : p.v_scale_strides;
  for (std::int64_t j = begin; j < end; ++j) {
    std::int64_t entry = p.packed && p.page_size == 0 && p.kv_scales == ScaleKind::token ? 0 : b, row = 0;
    if (p.kv_scales == ScaleKind::token) row = sequence(b).first_kv + j;
    if (p.kv_scales == ScaleKind::token && p.page_size != 0) {
      entry = std::clamp<std::int64_t>(length(buffers.page_table, b * p.page_table_stride + j / p.page_size, 0), 0,
                                       p.num_pages - 1);
      row = j % p.page_size;
    }
    const double scale = number(of_k ? buffers.k_scale : buffers.v_scale, entry * s.batch + row * s.seq + kv_head * s.head);
    for (std::int64_t d = 0; d < width; ++d) values[static_cast<std::size_t>((j - begin) * width + d)] *= scale;
  }
  return values;
}

std::vector<double> Call::read_whole_keys(std::int64_t b, std::int64_t kv_head, std::int64_t begin,
                                          std::int64_t end) const {
  const Problem& p = problem;
  if (!p.latent) return read_keys(buffers.k, p.k_strides, p.head_dim, b, kv_head, begin, end);
  const std::int64_t own_columns = p.head_dim - p.head_dim_v;
  const auto values = read_keys(buffers.v, p.v_strides, p.head_dim_v, b, kv_head, begin, end);
  const auto own = read_keys(buffers.k, p.k_strides, own_columns, b, kv_head, begin, end);
  std::vector<double> keys;
  keys.reserve(values.size() + own.size());
  for (std::int64_t row = 0; row < end - begin; ++row) {
    keys.insert(keys.end(), values.begin() + row * p.head_dim_v, values.begin() + (row + 1) * p.head_dim_v);
    keys.insert(keys.end(), own.begin() + row * own_columns, own.begin() + (row + 1) * own_columns);
  }
  return keys;
}

Rows Call::queries(const void* tensor, const Strides& strides, std::int64_t width, std::int64_t b,
                   std::int64_t head) const {
  const std::int64_t offset =
      (problem.packed ? sequence(b).first_q * strides.seq : b * strides.batch) + head * strides.head;
  const Dtype dtype = tensor == buffers.q ? problem.q_dtype.value_or(problem.dtype) : problem.dtype;
  return {at(tensor, offset, static_cast<std::int64_t>(size_of(dtype))), dtype, strides.seq, width};
}

Rows Call::statistics(const float* tensor, std::int64_t b, std::int64_t head) const {
  const Problem& p = problem;
  const std::int64_t offset = p.packed ? head * p.total_q + sequence(b).first_q : (b * p.heads_q + head) * p.seq_q;
  return {tensor + offset, Dtype::float32, 1, 1};
}

Rows Call::biases(std::int64_t b, std::int64_t head, std::int64_t j, std::int64_t width) const {
  const ScoreTensor& t = problem.bias;
  const std::int64_t offset = b * t.batch_stride + head * t.head_stride + j;
  return {at(buffers.bias, offset, static_cast<std::int64_t>(size_of(t.dtype))), t.dtype, t.q_stride, width};
}

double Call::q_scale(std::int64_t b, std::int64_t head) const {
  const Strides& s = problem.q_scale_strides;
  return buffers.q_scale == nullptr ? 1 : double{number(buffers.q_scale, b * s.batch + kv_head(head) * s.head)};
}

double Call::slope(std::int64_t b, std::int64_t head) const {
  return problem.alibi ? double{number(buffers.alibi_slopes, b * problem.alibi_batch_stride + head)} : 0;
}

double Call::sink(std::int64_t head) const { return problem.sink ? double{number(buffers.sink, head)} : -INFINITY; }

double Call::kept(std::int64_t b, std::int64_t head, std::int64_t i, std::int64_t j) const {
  return kept_factor(problem, options.seed, options.offset, b, head, i, j);
}

}  // namespace flash_attention::check
