#pragma once

#include <filesystem>
#include <vector>

#include "cli/ladder/ladder_results.h"
#include "cli/ladder/rung.h"

namespace flash_attention::cli {

/// "12.3", "0.45"; "-" for nothing measured.
std::string speed_cell(double tflops);

/// The table of kernels/ladder/README.md: rung, idea, lines that are new, TFLOP/s, times the rung before.
std::string markdown_table(const std::vector<Rung>& rungs, const LadderResults& results);

/// Puts the table between the marks of the page below `root`, and has bench/visualize_ladder.py draw the plots into
/// docs/ladder/images from `results_file`. Throws Error(invalid_argument) if there is no such page.
void update_pages(const std::filesystem::path& root, const std::filesystem::path& results_file,
                  const std::vector<Rung>& rungs, const LadderResults& results);

}  // namespace flash_attention::cli
