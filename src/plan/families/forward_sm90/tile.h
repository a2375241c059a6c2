#pragma once

#include "plan/kernel_table.h"

// The tiles of forward/sm90, up to head dimensions of 256.

namespace flash_attention::plan {

struct Sm90Tile {
  int block_q;
  int block_kv;
  int num_stages = 2;
  int num_splits = 1;  // of the keys of a row tile
};

/// How many options touch every score; a program counts as two.
int count_score_options(const abi::Features& features);

/// Whether the keys of row tiles can be split: no options, lengths, masks or left edge, and enough keys for more than the
/// diagonal.
bool splits_keys(const Request& request);

Sm90Tile choose_sm90_tile(const Request& request);

}  // namespace flash_attention::plan
