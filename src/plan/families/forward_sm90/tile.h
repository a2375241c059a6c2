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

/// The number of options that touch every score. A program counts as two.
int count_score_options(const abi::Features& features);

/// Whether the keys of row tiles can be split: there are no options, lengths, masks or left edge, and more keys than
/// those at the diagonal.
bool splits_keys(const Request& request);

Sm90Tile choose_sm90_tile(const Request& request);

/// For a requested tile: as many stages as fit, at most `most_stages`; of the smaller stages of wide heads, at most nine.
abi::ForwardConfig asked_config(const Request& request, const TileSize& asked, int most_stages = 4);

}  // namespace flash_attention::plan
