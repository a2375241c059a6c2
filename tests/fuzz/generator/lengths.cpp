#include "fuzz/generator/lengths.h"

#include <algorithm>

#include "support/oracle/pages.h"

namespace flash_attention::fuzz {
namespace {

using testing::Case;

std::int64_t length_of(std::string_view level, const Sizes& sizes, Dice& dice) {
  if (level == "few") return dice.between(2, 9);
  if (level == "prime") return dice.one_of<std::int64_t>({13, 67, 97, 131});
  if (level == "edge") return dice.one_of<std::int64_t>({63, 64, 65, 127, 128, 129, 191, 192, 193});
  if (level == "long") return dice.between(sizes.longest * 3 / 4, sizes.longest);
  return std::stoll(std::string(level));
}

/// A length up to the longest: often all, none or one.
std::int64_t any_length(std::int64_t longest, Dice& dice) {
  const std::int64_t any = dice.between(0, longest);
  return std::min(dice.one_of<std::int64_t>({any, any, longest, longest, longest / 2, 1, 0}), longest);
}

/// What is missing at one end of the sequence that is served: nothing, or a little.
std::int64_t little_of(std::int64_t longest, Dice& dice) {
  return dice.one_of<std::int64_t>({0, 0, longest > 1 ? 1 : 0, dice.between(0, longest / 8)});
}

/// Draws lengths. `served` is the sequence that has nearly all; -1: none.
struct Lengths {
  std::int64_t served;
  Dice& dice;

  std::vector<std::int32_t> up_to(std::int64_t count, std::int64_t longest) {
    std::vector<std::int32_t> lengths;
    for (std::int64_t b = 0; b < count; ++b) lengths.push_back(static_cast<std::int32_t>(length(b, longest)));
    return lengths;
  }
  std::int64_t length(std::int64_t b, std::int64_t longest) {
    return b == served ? longest - little_of(longest, dice) : any_length(longest, dice);
  }
  std::int64_t padding(std::int64_t b, std::int64_t longest) {
    return b == served ? little_of(longest, dice) : any_length(longest, dice);
  }

  /// What each sequence uses, or leaves out, of what it has.
  template <class Part>
  std::vector<std::int32_t> of(const Case& c, const std::vector<std::int32_t>& ends, std::int64_t longest, Part part) {
    std::vector<std::int32_t> used;
    for (std::int64_t b = 0; b < c.problem.batch; ++b)
      used.push_back(static_cast<std::int32_t>((this->*part)(b, ends.empty() ? longest : ends[b + 1] - ends[b])));
    return used;
  }
};

void pack(Case& c, const Row& row, Lengths& draw) {
  Problem& p = c.problem;
  const std::string_view bound = row.level(bounds);
  const auto end_to_end = [&](std::int64_t& longest, std::int64_t& total) {
    std::vector<std::int32_t> lengths = draw.up_to(p.batch, longest);
    const std::int64_t whole =
        draw.served >= 0 ? draw.served : draw.dice.between(0, std::max<std::int64_t>(p.batch, 1) - 1);
    if (p.batch > 0) lengths[whole] = static_cast<std::int32_t>(longest);
    std::vector<std::int32_t> ends{0};
    for (const std::int32_t length : lengths) ends.push_back(ends.back() + length);
    total = ends.back() + (row.is(tail, "some") ? draw.dice.between(1, 70) : 0);
    if (bound == "loose") longest += 5;
    if (bound == "none") longest = 0;
    return ends;
  };
  p.packed = true;
  c.cu_seqlens_q = end_to_end(p.seq_q, p.total_q);
  if (row.is(paged, "off")) c.cu_seqlens_kv = end_to_end(p.seq_kv, p.total_kv);
}

std::int64_t rows_of_page(std::string_view level, std::int64_t max_keys, Dice& dice) {
  if (level == "few") return dice.between(2, 9);
  if (level == "whole") return std::max<std::int64_t>(max_keys, 1);
  return std::stoll(std::string(level));
}

void put_in_pages(Case& c, const Row& row, Lengths& draw) {
  Problem& p = c.problem;
  std::vector<std::int32_t> lengths(p.batch, static_cast<std::int32_t>(p.seq_kv));
  if (row.is(paged, "used")) lengths = draw.up_to(p.batch, p.seq_kv);
  testing::put_in_pages(c, rows_of_page(row.level(page_size), p.seq_kv, draw.dice), std::move(lengths));
  p.seqused_kv = row.is(paged, "used");
  if (!p.seqused_kv) c.seqused_kv.clear();
}

}  // namespace

void set_sizes(Case& c, const Row& row, const Sizes& sizes, Dice& dice) {
  Problem& p = c.problem;
  const bool many = row.is(batch, "many");
  p.batch = many ? dice.between(33, 40) : std::stoll(std::string(row.level(batch)));
  const std::int64_t per_key_head = std::stoll(std::string(row.level(group)));
  p.heads_kv = per_key_head >= 8 ? dice.one_of<std::int64_t>({1, 1, 2}) : dice.one_of<std::int64_t>({1, 2, 2});
  p.heads_q = p.heads_kv * per_key_head;
  p.seq_q = length_of(row.level(queries), sizes, dice);
  p.seq_kv = length_of(row.level(keys), sizes, dice);
  // Equal lengths, the most common problem of all, are too rare by themselves.
  if (row[queries] == row[keys] && dice.between(0, 1) == 1) p.seq_kv = p.seq_q;
  const auto products = [&] {
    return static_cast<double>(p.batch * p.heads_q * p.seq_q) * static_cast<double>(p.seq_kv * p.head_dim);
  };
  const bool fewer = row.level(inputs).starts_with("nan") && sizes.max_nan_products < sizes.max_products;
  const double most = fewer ? sizes.max_nan_products : sizes.max_products;
  while (products() > most && std::max(p.seq_q, p.seq_kv) > (fewer ? 100 : 200))
    (p.seq_q > p.seq_kv ? p.seq_q : p.seq_kv) -= 10;
}

void set_lengths(Case& c, const Row& row, Dice& dice) {
  Problem& p = c.problem;
  const bool serves = p.batch > 0 && dice.between(0, 15) != 0;
  Lengths draw{serves ? dice.between(0, p.batch - 1) : -1, dice};
  if (row.is(packed, "on")) pack(c, row, draw);
  if (!row.is(paged, "off")) put_in_pages(c, row, draw);
  p.seqused_q = row.is(seqused_q, "on");
  p.seqused_kv = row.is(seqused_kv, "on");
  p.key_lengths = row.is(key_lengths, "on");
  p.left_padding = row.is(left_padding, "on");
  if (p.seqused_q) c.seqused_q = draw.of(c, c.cu_seqlens_q, p.seq_q, &Lengths::length);
  if (p.seqused_kv && p.page_size == 0) c.seqused_kv = draw.of(c, c.cu_seqlens_kv, p.seq_kv, &Lengths::length);
  if (p.key_lengths) c.key_lengths = draw.of(c, c.cu_seqlens_kv, p.seq_kv, &Lengths::length);
  if (p.left_padding) c.left_padding = draw.of(c, c.cu_seqlens_kv, p.seq_kv, &Lengths::padding);
}

}  // namespace flash_attention::fuzz
