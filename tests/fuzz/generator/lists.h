#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "fuzz/generator/factors.h"
#include "support/oracle/case.h"

namespace flash_attention::fuzz {

/// What lists of keys can differ in. They are no factors of factors.h: kernels that take lists take nothing else, and the
/// arrays of all others stay as they are.
enum ListFactor : int { list_kind, list_heads, list_counts, list_entries, list_block_q, list_block_kv, num_list_factors };

const std::vector<std::string_view>& levels_of(ListFactor factor);

/// A level of each.
using Lists = std::array<int, num_list_factors>;
bool is(const Lists& lists, ListFactor factor, std::string_view level);

/// Whether a problem with the row's levels can have such lists.
bool go_together(const Row& row, const Lists& lists);

/// A row and lists for it.
struct ListedRow {
  Row row;
  Lists lists;
};

/// The rows of a covering array with lists, so that each level of lists occurs with each level of every factor that can
/// have it, and with each other level of lists. `share` rows in a row have lists of one kind, which is part of a kernel's
/// configuration. Where the rows do not suffice, some of their configurations come again.
std::vector<ListedRow> with_lists(const std::vector<Row>& rows, int share, std::uint64_t seed);

/// Gives a case such lists; what the levels leave open is drawn from the seed.
void list_keys(testing::Case& c, const Lists& lists, std::uint64_t seed);

}  // namespace flash_attention::fuzz
