#include "plan/families/decode/items.h"

#include <algorithm>

#include "abi/decode.h"
#include "plan/workspace.h"
#include "support/ceil_div.h"

namespace flash_attention::plan {
namespace {

/// An even number, so that parts begin at multiples of 16 bytes.
int part_rows(const Problem& problem, const abi::ForwardConfig& config) {
  if (config.split_tiles == 0) return config.block_q;
  return static_cast<int>(std::min<std::int64_t>(config.block_q, ceil_div(decode_rows(problem), 2) * 2));
}

/// The number of parts of each of the two items that a block shares with others.
std::int64_t parts_of_item(const Problem& problem, const abi::ForwardConfig& config, std::int64_t blocks) {
  if (config.split_tiles == 0) return 1;
  const auto share = static_cast<std::int64_t>(decode_tiles(problem, config)) / blocks + 1;
  return std::max<std::int64_t>(
      std::min<std::int64_t>(share / config.split_tiles + 2, abi::decode_splits(config, problem.seq_kv)), 1);
}

}  // namespace

std::int64_t decode_rows(const Problem& problem) { return problem.heads_q / problem.heads_kv * problem.seq_q; }

std::int64_t keys_of_item(const Problem& problem, const abi::Features& features) {
  return features.key_list ? problem.key_list.entries * problem.key_list.block_kv : problem.seq_kv;
}

std::int64_t rows_of_item(const Problem& problem, const abi::Features& features) {
  return features.key_list ? problem.heads_q / problem.heads_kv : decode_rows(problem);
}

std::int64_t tiles_of_item(const Problem& problem, const abi::ForwardConfig& config) {
  return std::max<std::int64_t>(1, ceil_div(keys_of_item(problem, config.features), config.block_kv));
}

std::int64_t items_of(const Problem& problem, const abi::ForwardConfig& config) {
  const std::int64_t group = problem.heads_q / problem.heads_kv;
  const std::int64_t tiles = config.features.key_list ? problem.seq_q * ceil_div(group, config.block_q)
                                                      : ceil_div(decode_rows(problem), config.block_q);
  return problem.batch * problem.heads_kv * tiles;
}

double decode_tiles(const Problem& problem, const abi::ForwardConfig& config) {
  return static_cast<double>(tiles_of_item(problem, config)) * static_cast<double>(items_of(problem, config));
}

std::int64_t reserve_decode_parts(const Problem& problem, const abi::ForwardConfig& config, std::int64_t most, Plan& plan) {
  const auto blocks = static_cast<std::int64_t>(std::min<double>(decode_tiles(problem, config), static_cast<double>(most)));
  plan.num_splits = static_cast<int>(std::max<std::int64_t>(blocks, 1));
  if (blocks == 0) return 0;
  // decode/merge.cuh. None of it has to be initialised before the launch.
  using Region = abi::DecodeRegion;
  reserve(plan, Region::arrivals, blocks * 8);
  const std::int64_t part_bytes = abi::decode_part_bytes(config, part_rows(problem, config));
  const std::int64_t block_bytes = 2 * parts_of_item(problem, config, blocks) * part_bytes;
  reserve(plan, Region::parts, blocks * block_bytes);
  offset_of(plan, Region::second_part) = offset_of(plan, Region::parts) + part_bytes;
  offset_of(plan, Region::second_block) = offset_of(plan, Region::parts) + block_bytes;
  return blocks;
}

}  // namespace flash_attention::plan
