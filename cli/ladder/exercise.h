#pragma once

#include <filesystem>
#include <string>

namespace flash_attention::cli {

/// Writes a copy of the kernels with a bug in the rung to the folder, and says what to look for. Refuses a folder that is
/// there: it may hold somebody's work.
int begin_exercise(const std::string& word, const std::filesystem::path& folder);

/// Builds the rung as it is in the folder, runs it in the emulator on inputs that show the bug, in several orders of
/// threads, and says whether it is repaired. If not, prints the first call that is wrong.
int check_exercise(const std::string& word, const std::filesystem::path& folder);

/// The folder of an exercise if none is named: "exercise_03".
std::string exercise_folder(const std::string& word);

}  // namespace flash_attention::cli
