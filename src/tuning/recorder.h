#pragma once

#include <filesystem>

#include "flash_attention/problem.h"

namespace flash_attention::tuning {

/// Adds a call to a file of problems, one JSON object a line, unless this process has already done so. If it cannot be
/// written, that is reported once; the call itself goes on.
void record(const std::filesystem::path& file, const Problem& problem, Pass pass);

}  // namespace flash_attention::tuning
