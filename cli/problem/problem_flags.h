#pragma once

#include <vector>

#include "cli/problem/arguments.h"
#include "flash_attention/attention.h"

namespace flash_attention::cli {

/// The flags that describe a problem and choose its device; shared by run, bench, plan and compile.
std::vector<Flag> problem_flags();

/// K and V of the problem in pages; 0: as they are. As many pages as the keys need.
void put_in_pages(Problem& problem, std::int64_t page_size);

Problem problem_from(const Arguments& arguments);
Dtype dtype_from(std::string_view text);

/// What a caller wants instead of the planner's choice: Options::kernel and Options::tile.
struct KernelChoice {
  std::string name{};
  std::optional<TileSize> tile{};
};

/// --backward, --tangent or --second; forward without.
Pass pass_from(const Arguments& arguments);

/// --kernel NAME or NAME@QxKV, or the same text given in its place, and --tile Q,KV.
KernelChoice kernel_from(const Arguments& arguments);
KernelChoice kernel_from(const Arguments& arguments, std::string_view text);

/// --device and --arch; "best" where neither is given.
Device device_from(const Arguments& arguments);

/// "80", "sm_80" or "sm_90a" as a number.
int arch_from(std::string_view text);

/// "batch 1, heads 8 (kv 2), 1024 x 1024, head_dim 64, float32, causal": the problem in a line for people.
std::string describe(const Problem& problem);

std::vector<Flag> operator+(std::vector<Flag> a, const std::vector<Flag>& b);

}  // namespace flash_attention::cli
