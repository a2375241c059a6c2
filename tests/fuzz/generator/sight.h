#pragma once

#include "fuzz/generator/factors.h"

namespace flash_attention::fuzz {

/// Whether the level alone takes away what a mistake would show in: no row, no key, or scores that are all the same.
bool is_blank(int factor, int level);

/// Whether the level leaves less to see: scores that are cut off, or of which one outweighs all others. Two of them in one
/// problem may leave nothing.
bool is_dull(int factor, int level);

/// Whether the level hides keys from queries.
bool hides_keys(int factor, int level);

/// Whether a level of the row is blank.
bool is_blank(const Row& row);

/// How many levels of the row are dull, or hide keys; open factors are not and do not.
int num_dull(const Row& row);
int num_hiding(const Row& row);

/// From so many on, what each of them hides is drawn so that they leave something to see together.
constexpr int many_hiding = 3;

}  // namespace flash_attention::fuzz
