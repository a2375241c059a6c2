#include "fuzz/generator/lists.h"

#include <algorithm>

#include "fuzz/generator/dice.h"
#include "fuzz/generator/sight.h"

namespace flash_attention::fuzz {
namespace {

const std::vector<std::string_view> list_levels[num_list_factors] = {
    {"keys", "blocks"},
    {"one", "key_heads", "query_heads"},
    {"off", "on"},
    {"none", "one", "few", "tile", "many"},
    {"unused", "one", "few", "tile"},
    {"unused", "one", "few", "tile", "wide"},
};

/// All lists that there are.
std::vector<Lists> all_lists() {
  std::vector<Lists> all{Lists{}};
  for (int factor = 0; factor < num_list_factors; ++factor) {
    std::vector<Lists> longer;
    for (Lists lists : all) {
      for (int level = 0; level < static_cast<int>(list_levels[factor].size()); ++level) {
        lists[factor] = level;
        longer.push_back(lists);
      }
    }
    all = std::move(longer);
  }
  std::erase_if(all, [](const Lists& lists) {
    const bool blocks = is(lists, list_kind, "blocks");
    return is(lists, list_block_q, "unused") == blocks || is(lists, list_block_kv, "unused") == blocks ||
           (!blocks && is(lists, list_heads, "query_heads"));
  });
  return all;
}

/// The pairs of levels that no row has yet, of which one is of lists. All levels of factors are numbered in one line, and
/// those of lists again in another, so that a pair is a cell of a table.
class MissingLists {
 public:
  MissingLists(const std::vector<Row>& rows, const std::vector<Lists>& all) {
    for (int f = 0; f < num_factors; ++f) {
      first_[f] = width_;
      width_ += static_cast<int>(levels_of(static_cast<Factor>(f)).size());
    }
    for (int f = 0; f < num_list_factors; ++f) {
      first_list_[f] = count_;
      count_ += static_cast<int>(list_levels[f].size());
    }
    beside_.resize(static_cast<std::size_t>(count_) * width_);
    among_.resize(static_cast<std::size_t>(count_) * count_);
    for (const Row& row : rows) {
      std::vector<char> possible(count_);
      for (const Lists& lists : all) {
        if (!go_together(row, lists)) continue;
        for (int a = 0; a < num_list_factors; ++a) {
          possible[first_list_[a] + lists[a]] = 1;
          for (int b = a + 1; b < num_list_factors && !is_blank(row); ++b) set(among_[among(lists, a, b)], 1);
        }
      }
      for (int level = 0; level < count_; ++level)
        if (possible[level])
          for (const int place : places_of(row)) set(beside_[level * width_ + place], 1);
    }
  }

  bool any() const { return left_ > 0; }

  /// How many pairs the row has with each level of lists.
  std::vector<int> gains(const Row& row) const {
    std::vector<int> gains(count_);
    for (int level = 0; level < count_; ++level)
      for (const int place : places_of(row)) gains[level] += beside_[level * width_ + place];
    return gains;
  }
  int gain(const std::vector<int>& gains, const Row& row, const Lists& lists) const {
    int pairs = 0;
    for (int a = 0; a < num_list_factors; ++a) {
      pairs += gains[first_list_[a] + lists[a]];
      for (int b = a + 1; b < num_list_factors && !is_blank(row); ++b) pairs += among_[among(lists, a, b)];
    }
    return pairs;
  }

  void take(const Row& row, const Lists& lists) {
    for (int a = 0; a < num_list_factors; ++a) {
      for (const int place : places_of(row)) set(beside_[(first_list_[a] + lists[a]) * width_ + place], 0);
      for (int b = a + 1; b < num_list_factors && !is_blank(row); ++b) set(among_[among(lists, a, b)], 0);
    }
  }

 private:
  void set(char& pair, char missing) {
    left_ += missing - pair;
    pair = missing;
  }
  std::size_t among(const Lists& lists, int a, int b) const {
    return static_cast<std::size_t>(first_list_[a] + lists[a]) * count_ + first_list_[b] + lists[b];
  }
  /// The row's levels; of a row that sees nothing only those that are about it.
  std::vector<int> places_of(const Row& row) const {
    std::vector<int> places;
    const bool blank = is_blank(row);
    for (int f = 0; f < num_factors; ++f)
      if (!blank || is_blank(f, row[f])) places.push_back(first_[f] + row[f]);
    return places;
  }

  int first_[num_factors] = {}, first_list_[num_list_factors] = {}, width_ = 0, count_ = 0;
  std::vector<char> beside_, among_;
  std::int64_t left_ = 0;
};

}  // namespace

const std::vector<std::string_view>& levels_of(ListFactor factor) { return list_levels[factor]; }

bool is(const Lists& lists, ListFactor factor, std::string_view level) {
  return list_levels[factor][lists[factor]] == level;
}

bool go_together(const Row& row, const Lists& lists) {
  if (row.is(packed, "on") && (is(lists, list_block_q, "few") || is(lists, list_block_q, "tile"))) return false;
  return !row.is(group, "1") || !is(lists, list_heads, "query_heads");  // the same as key_heads
}

std::vector<ListedRow> with_lists(const std::vector<Row>& rows, int share, std::uint64_t seed) {
  const std::vector<Lists> all = all_lists();
  MissingLists missing(rows, all);
  Dice dice(seed);
  const auto best = [&](const Row& row, int kind) {
    const std::vector<int> gains = missing.gains(row);
    std::pair<int, Lists> found{-1, {}};
    std::uint64_t ticket = 0;
    for (const Lists& lists : all) {
      if (lists[list_kind] != kind || !go_together(row, lists)) continue;
      const int gain = missing.gain(gains, row, lists);
      const std::uint64_t drawn = dice.word();
      if (gain > found.first || (gain == found.first && drawn > ticket)) found = {gain, lists}, ticket = drawn;
    }
    return found;
  };
  std::vector<ListedRow> listed;
  for (bool first = true; first || missing.any(); first = false) {
    for (std::size_t begin = 0; begin < rows.size(); begin += share) {
      const std::size_t end = std::min(begin + share, rows.size());
      int gains[2] = {0, 0};
      for (std::size_t n = begin; n < end; ++n)
        for (int kind = 0; kind < 2; ++kind) gains[kind] += best(rows[n], kind).first;
      if (!first && gains[0] + gains[1] == 0) continue;
      const int kind = gains[1] > gains[0];
      for (std::size_t n = begin; n < end; ++n) {
        listed.push_back({rows[n], best(rows[n], kind).second});
        missing.take(rows[n], listed.back().lists);
      }
    }
  }
  return listed;
}

void list_keys(testing::Case& c, const Lists& lists, std::uint64_t seed) {
  Dice dice(seed);
  Problem& p = c.problem;
  KeyList& list = p.key_list;
  const bool blocks = is(lists, list_kind, "blocks");
  list.kind = blocks ? KeyListKind::blocks : KeyListKind::keys;
  list.heads = is(lists, list_heads, "one") ? 1 : is(lists, list_heads, "key_heads") ? p.heads_kv : p.heads_q;
  list.counts = is(lists, list_counts, "on");
  const std::int64_t few = blocks ? dice.between(2, 5) : dice.between(2, 20);
  const std::int64_t tile = blocks ? dice.between(6, 12) : dice.one_of<std::int64_t>({63, 64, 65});
  const std::int64_t many = blocks ? dice.between(13, 40) : dice.one_of<std::int64_t>({100, 200, dice.between(66, 260)});
  const std::int64_t entries[] = {0, 1, few, tile, many};
  list.entries = entries[lists[list_entries]];
  const std::int64_t queries[] = {1, 1, dice.between(2, 20), 64};
  const std::int64_t keys[] = {1, 1, dice.between(2, 15), dice.one_of<std::int64_t>({16, 64, dice.between(17, 40)}), 128};
  list.block_q = queries[lists[list_block_q]];
  list.block_kv = keys[lists[list_block_kv]];
  c.name += " lists";
  for (int factor = 0; factor < num_list_factors; ++factor)
    if (lists[factor] != 0) c.name += " " + std::string(list_levels[factor][lists[factor]]);
}

}  // namespace flash_attention::fuzz
