#include <algorithm>
#include <limits>
#include <random>

#include "support/oracle/case.h"

namespace flash_attention::testing {
namespace {

constexpr std::int32_t everything = std::numeric_limits<std::int32_t>::max();

bool flat_keys(const Problem& p) { return p.packed && p.page_size == 0; }
std::int64_t hidden_heads(const Problem& p) { return p.hidden_rows.head_stride != 0 ? p.heads_kv : 1; }
std::int64_t blocks(std::int64_t rows, std::int64_t block) { return (rows + block - 1) / block; }

/// Where the bounds of key j begin in Inputs::hidden_rows.
std::int64_t hidden_index(const Case& c, const Shape& shape, std::int64_t b, std::int64_t kv_head, std::int64_t j) {
  const Problem& p = c.problem;
  const std::int64_t head = p.hidden_rows.head_stride != 0 ? kv_head : 0;
  if (flat_keys(p)) return (head * shape.rows_kv + shape.sequences[b].first_kv + j) * p.hidden_rows.bounds;
  const std::int64_t entry = p.hidden_rows.batch_stride != 0 ? b : 0;
  return ((entry * hidden_heads(p) + head) * shape.seq_kv + j) * p.hidden_rows.bounds;
}

/// Key j is in a document: hidden from the rows after it, and with four bounds from those before it.
void draw_document(std::int64_t document, std::int64_t rows, std::int64_t keys, std::int64_t j, int bounds,
                   std::int32_t* to) {
  const std::int64_t begin = j / document * document, end = std::min(begin + document, keys);
  const auto row = [&](std::int64_t key) {
    return static_cast<std::int32_t>(key * rows / std::max<std::int64_t>(keys, 1));
  };
  to[0] = row(end);
  if (bounds >= 2) to[1] = everything;
  if (bounds == 4) to[2] = -5, to[3] = row(begin);
}

void draw_random(std::mt19937_64& random, std::int64_t rows, int bounds, std::int32_t* to) {
  const auto place = [&] { return static_cast<std::int32_t>(random() % (rows + 40)) - 20; };
  for (int n = 0; n < bounds; ++n) to[n] = place();
  if (bounds == 1) to[0] = std::max(to[0], static_cast<std::int32_t>(rows / 3));
  if (bounds > 1 && random() % 8 == 0) to[0] = 0, to[1] = everything;               // hidden from all
  if (bounds > 1 && random() % 8 == 0) to[1] = to[0] - 1;                           // from none
  if (bounds == 4 && random() % 2 == 0) to[2] = std::max(to[2], 0), to[3] = to[2];  // the second is empty
}

}  // namespace

bool hidden_by_rows(const Case& c, const Shape& shape, const Inputs& in, std::int64_t b, std::int64_t h, std::int64_t i,
                    std::int64_t j) {
  const int bounds = c.problem.hidden_rows.bounds;
  if (bounds == 0) return false;
  const std::int32_t* r = &in.hidden_rows[hidden_index(c, shape, b, h / shape.group, j)];
  return check::hidden_by(r, bounds, i);
}

bool hidden_by_blocks(const Case& c, const Inputs& in, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  const BlockMask& m = c.problem.block_mask;
  if (m.block_q == 0) return false;
  return in.block_mask[b * m.batch_stride + h * m.head_stride + i / m.block_q * m.q_stride + j / m.block_kv] == 0;
}

bool hidden_by_bits(const Case& c, const Shape& shape, const Inputs& in, std::int64_t b, std::int64_t i, std::int64_t j) {
  const BitMask& mask = c.problem.bit_mask;
  if (mask.kind == BitMaskKind::none) return false;
  const Shape::Sequence& s = shape.sequences[b];
  check::Bits bits{true, in.bit_mask.data() + s.first_q * mask.row_bytes, s.alloc_q * mask.row_bytes};
  if (mask.offsets) {
    const std::int64_t begin = in.bit_mask_offsets[b], end = in.bit_mask_offsets[b + 1];
    bits = {end > begin, in.bit_mask.data() + begin, end - begin};
  }
  return !check::shown_by(mask, bits, s.extent(), i, j);
}

void draw_bits(const Case& c, const Shape& shape, std::uint64_t seed, Inputs& in) {
  const BitMask& mask = c.problem.bit_mask;
  if (mask.kind == BitMaskKind::none) return;
  std::mt19937_64 random(seed + 29);
  const auto draw = [&](std::int64_t rows, std::int64_t row_bits, std::int64_t bytes) {
    const std::size_t first = in.bit_mask.size();
    in.bit_mask.resize(first + static_cast<std::size_t>(bytes));
    for (std::int64_t bit = 0; bit < 8 * bytes; ++bit) {
      const bool blind = row_bits > 0 && bit / row_bits % 7 == 3 && bit / row_bits < rows;
      const bool shown = !blind && random() % 4 != 0;
      in.bit_mask[first + static_cast<std::size_t>(bit / 8)] |= static_cast<std::uint8_t>(shown) << bit % 8;
    }
  };
  if (!mask.offsets) return draw(shape.rows_q, 8 * mask.row_bytes, shape.rows_q * mask.row_bytes);
  in.bit_mask.resize(random() % 3, 0xff);  // before the first sequence's
  in.bit_mask_offsets.push_back(static_cast<std::int32_t>(in.bit_mask.size()));
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    const Shape::Sequence& s = shape.sequences[b];
    const bool keys = mask.kind == BitMaskKind::keys;
    const std::int64_t row_bits = keys ? s.len_kv : 8 * mask.row_bytes;
    std::int64_t bytes = keys ? (s.len_q * s.len_kv + 7) / 8 : s.alloc_q * mask.row_bytes;
    if (random() % 4 == 0) bytes = 0;
    if (random() % 4 == 0) bytes = bytes * 7 / 8;
    draw(s.len_q, row_bits, bytes);
    in.bit_mask_offsets.push_back(static_cast<std::int32_t>(in.bit_mask.size()));
  }
}

std::int64_t times_listed(const Case& c, const Shape& shape, const Inputs& in, std::int64_t b, std::int64_t h,
                          std::int64_t i, std::int64_t j) {
  const KeyList& list = c.problem.key_list;
  if (list.kind == KeyListKind::none) return 1;
  const std::int64_t head = list.heads == 1 ? 0 : list.heads == shape.heads_kv ? h / shape.group : h;
  const std::int64_t row =
      c.problem.packed ? shape.sequences[b].first_q + i : b * blocks(shape.seq_q, list.block_q) + i / list.block_q;
  const std::int64_t at = row * list.heads + head;
  const std::int64_t count = list.counts ? std::clamp<std::int64_t>(in.key_counts[at], 0, list.entries) : list.entries;
  return check::listed(list, in.key_list.data() + at * list.entries, count, j);
}

void draw_lists(const Case& c, const Shape& shape, std::uint64_t seed, Inputs& in) {
  const KeyList& list = c.problem.key_list;
  if (list.kind == KeyListKind::none) return;
  std::mt19937_64 random(seed + 23);
  const std::int64_t rows =
      c.problem.packed ? shape.rows_q : shape.batch * blocks(shape.seq_q, list.block_q), lists = rows * list.heads;
  const std::int64_t units = std::max<std::int64_t>(blocks(shape.seq_kv, list.block_kv), 1);
  constexpr std::int32_t far[] = {-1, -7, std::numeric_limits<std::int32_t>::min(), everything};
  for (std::int64_t at = 0; at < lists; ++at) {
    const bool empty = random() % 16 == 0;
    const auto first = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(units));
    for (std::int64_t e = 0; e < list.entries; ++e) {
      // Some are neighbours, some anywhere, some stand before, and some are no keys.
      const std::uint64_t kind = random() % 8;
      std::int64_t entry = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(units));
      if (kind < 3) entry = (first + e) % units;
      if (kind == 3 && e > 0) entry = in.key_list[in.key_list.size() - 1 - random() % static_cast<std::uint64_t>(e)];
      if (kind == 4) entry = random() % 2 == 0 ? far[random() % 4] : units + static_cast<std::int64_t>(random() % 3);
      in.key_list.push_back(static_cast<std::int32_t>(empty ? -1 : entry));
    }
    if (!list.counts) continue;
    const auto some = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(list.entries + 1));
    const std::int64_t many = std::max(some, 3 * list.entries / 4);
    in.key_counts.push_back(static_cast<std::int32_t>(random() % 8 == 0 ? some : random() % 8 == 0 ? list.entries + 9 : many));
    if (random() % 16 == 0) in.key_counts.back() = -3;
  }
}

void draw_masks(const Case& c, const Shape& shape, std::uint64_t seed, Inputs& in) {
  const Problem& p = c.problem;
  std::mt19937_64 random(seed + 17);
  if (const int bounds = p.hidden_rows.bounds; bounds != 0) {
    const std::int64_t entries = flat_keys(p) || p.hidden_rows.batch_stride == 0 ? 1 : p.batch;
    const std::int64_t keys = flat_keys(p) ? shape.rows_kv : shape.seq_kv;
    in.hidden_rows.resize(std::max<std::int64_t>(entries * hidden_heads(p) * keys * bounds, 0));
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      const Shape::Sequence& s = shape.sequences[b];
      for (std::int64_t head = 0; head < hidden_heads(p); ++head) {
        for (std::int64_t j = 0; j < s.alloc_kv; ++j) {
          std::int32_t* to = &in.hidden_rows[hidden_index(c, shape, b, head, j)];
          if (c.document != 0) {
            draw_document(c.document + 3 * head, s.alloc_q, s.alloc_kv, j, bounds, to);
          } else {
            draw_random(random, s.alloc_q, bounds, to);
          }
        }
      }
    }
  }
  if (p.mask.present && p.mask.q_stride != 0 && p.hidden_rows.bounds == 0 && c.document != 0) {
    const std::int64_t rows = shape.seq_q, keys = shape.seq_kv;
    for (std::size_t x = 0; x < in.mask.size(); ++x) {
      const std::int64_t j = static_cast<std::int64_t>(x) % keys, i = static_cast<std::int64_t>(x) / keys % rows;
      in.mask[x] = i * keys / rows / c.document == j / c.document ? 1 : 0;
    }
  }
  if (const BlockMask& m = p.block_mask; m.block_q != 0) {
    const std::int64_t rows = blocks(shape.seq_q, m.block_q), columns = blocks(shape.seq_kv, m.block_kv);
    in.block_mask.resize((m.batch_stride != 0 ? p.batch : 1) * (m.head_stride != 0 ? p.heads_q : 1) *
                         (m.q_stride != 0 ? rows : 1) * columns);
    const std::uint64_t one_hidden_of = columns > 2 ? 3 : 7;  // of so few, most problems should see one
    for (std::uint8_t& byte : in.block_mask)
      byte = random() % one_hidden_of == 0 ? 0 : static_cast<std::uint8_t>(1 + random() % 255);
  }
}

void make_masks_dense(Problem& p) {
  const bool flat = flat_keys(p);
  const std::int64_t keys = (flat ? p.total_kv : p.seq_kv) * p.hidden_rows.bounds;
  if (p.hidden_rows.batch_stride != 0) p.hidden_rows.batch_stride = hidden_heads(p) * keys;
  if (p.hidden_rows.head_stride != 0) p.hidden_rows.head_stride = keys;
  BlockMask& m = p.block_mask;
  if (m.block_q == 0) return;
  const std::int64_t rows = blocks(p.seq_q, m.block_q), columns = blocks(p.seq_kv, m.block_kv);
  if (m.batch_stride != 0) m.batch_stride = (m.head_stride != 0 ? p.heads_q : 1) * rows * columns;
  if (m.head_stride != 0) m.head_stride = rows * columns;
  m.q_stride = columns;
}

}  // namespace flash_attention::testing
