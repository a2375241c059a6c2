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

Sm90Tile choose_sm90_tile(const Request& request);

}  // namespace flash_attention::plan
