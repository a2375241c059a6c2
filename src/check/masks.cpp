#include <algorithm>
#include <cstring>

#include "check/call.h"

namespace flash_attention::check {

bool Call::has_masks() const {
  return problem.mask.present || problem.hidden_rows.bounds != 0 || problem.block_mask.block_q != 0 ||
         problem.bit_mask.kind != BitMaskKind::none;
}

std::vector<char> Call::mask(std::int64_t b, std::int64_t head, std::int64_t begin, std::int64_t end, std::int64_t j,
                             std::int64_t width) const {
  const ScoreTensor& t = problem.mask;
  std::vector<char> shown;
  if (width <= 0) return shown;
  if (!t.present) shown.assign(static_cast<std::size_t>((end - begin) * width), 1);
  for (std::int64_t i = begin; t.present && i < end; ++i) {
    const char* row = fetch_(buffers.mask + b * t.batch_stride + head * t.head_stride + i * t.q_stride + j,
                             static_cast<std::size_t>(width), scratch_);
    shown.insert(shown.end(), row, row + width);
  }
  if (problem.hidden_rows.bounds != 0) hide_rows(b, head, begin, end, j, width, shown);
  if (problem.block_mask.block_q != 0) hide_blocks(b, head, begin, end, j, width, shown);
  if (problem.bit_mask.kind != BitMaskKind::none) hide_bits(b, begin, end, j, width, shown);
  return shown;
}

void Call::hide_bits(std::int64_t b, std::int64_t begin, std::int64_t end, std::int64_t j, std::int64_t width,
                     std::vector<char>& shown) const {
  const BitMask& mask = problem.bit_mask;
  const Sequence s = sequence(b);
  std::int64_t first = (problem.packed ? s.first_q : b * problem.seq_q) * mask.row_bytes, bytes = s.rows_q * mask.row_bytes;
  if (mask.offsets) {
    first = length(buffers.bit_mask_offsets, b, 0);
    bytes = length(buffers.bit_mask_offsets, b + 1, 0) - first;
  }
  std::vector<std::uint8_t> part(static_cast<std::size_t>(std::max<std::int64_t>(bytes, 0)));
  if (!part.empty()) std::memcpy(part.data(), fetch_(buffers.bit_mask + first, part.size(), scratch_), part.size());
  const Bits bits{!mask.offsets || bytes > 0, part.data(), bytes};
  for (std::int64_t i = begin; i < end; ++i) {
    for (std::int64_t n = 0; n < width; ++n) {
      if (!shown_by(mask, bits, s, i, j + n)) shown[static_cast<std::size_t>((i - begin) * width + n)] = 0;
    }
  }
}

std::vector<std::int64_t> Call::listed(std::int64_t b, std::int64_t head, std::int64_t begin, std::int64_t end,
                                       std::int64_t j, std::int64_t width) const {
  const KeyList& list = problem.key_list;
  std::vector<std::int64_t> times(static_cast<std::size_t>(std::max<std::int64_t>((end - begin) * width, 0)), 1);
  if (list.kind == KeyListKind::none) return times;
  const std::int64_t list_head = list.heads == 1 ? 0 : list.heads == problem.heads_kv ? kv_head(head) : head;
  const std::int64_t rows = (problem.seq_q + list.block_q - 1) / list.block_q;
  std::vector<std::int32_t> entries(static_cast<std::size_t>(list.entries));
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t row = problem.packed ? sequence(b).first_q + i : b * rows + i / list.block_q;
    const std::int64_t at = row * list.heads + list_head;
    std::int64_t count = list.entries;
    if (list.counts) {
      std::int32_t given = 0;
      std::memcpy(&given, fetch_(buffers.key_counts + at, sizeof given, scratch_), sizeof given);
      count = std::clamp<std::int64_t>(given, 0, list.entries);
    }
    if (!entries.empty()) {
      const std::size_t bytes = entries.size() * sizeof(std::int32_t);
      std::memcpy(entries.data(), fetch_(buffers.key_list + at * list.entries, bytes, scratch_), bytes);
    }
    for (std::int64_t n = 0; n < width; ++n) {
      times[static_cast<std::size_t>((i - begin) * width + n)] = check::listed(list, entries.data(), count, j + n);
    }
  }
  return times;
}

void Call::hide_rows(std::int64_t b, std::int64_t head, std::int64_t begin, std::int64_t end, std::int64_t j,
                     std::int64_t width, std::vector<char>& shown) const {
  const HiddenRows& hidden = problem.hidden_rows;
  const std::int64_t key = sequence(b).first_kv + j;
  std::vector<std::int32_t> bounds(static_cast<std::size_t>(width * hidden.bounds));
  const std::int32_t* from = buffers.hidden_rows + b * hidden.batch_stride + kv_head(head) * hidden.head_stride;
  std::memcpy(bounds.data(), fetch_(from + key * hidden.bounds, bounds.size() * sizeof(std::int32_t), scratch_),
              bounds.size() * sizeof(std::int32_t));
  for (std::int64_t n = 0; n < width; ++n) {
    const std::int32_t* r = &bounds[static_cast<std::size_t>(n * hidden.bounds)];
    for (std::int64_t i = begin; i < end; ++i) {
      if (hidden_by(r, hidden.bounds, i)) shown[static_cast<std::size_t>((i - begin) * width + n)] = 0;
    }
  }
}

void Call::hide_blocks(std::int64_t b, std::int64_t head, std::int64_t begin, std::int64_t end, std::int64_t j,
                       std::int64_t width, std::vector<char>& shown) const {
  const BlockMask& blocks = problem.block_mask;
  const std::int64_t first = j / blocks.block_kv, last = (j + width - 1) / blocks.block_kv;
  for (std::int64_t i = begin; i < end; ++i) {
    const char* row = fetch_(buffers.block_mask + b * blocks.batch_stride + head * blocks.head_stride +
                                 i / blocks.block_q * blocks.q_stride + first,
                             static_cast<std::size_t>(last - first + 1), scratch_);
    for (std::int64_t n = 0; n < width; ++n) {
      if (row[(j + n) / blocks.block_kv - first] == 0) shown[static_cast<std::size_t>((i - begin) * width + n)] = 0;
    }
  }
}

}  // namespace flash_attention::check
