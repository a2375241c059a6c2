#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "plan/tuned.h"
#include "tuning/tuned_file.h"

namespace flash_attention::tuning {

/// The choices and verdicts for each place: those that came with the library, those in the folder beside the compiled
/// kernels, and those of this process. Safe for any number of threads and processes.
std::shared_ptr<const plan::Tuned> known(const DeviceInfo& device, const std::string& driver);

/// The same, without the choices if FLASH_ATTENTION_TUNED is off.
std::shared_ptr<const plan::Tuned> known_to_planner(const DeviceInfo& device, const std::string& driver);

/// Adds choices and verdicts, and keeps them on disk. Returns the path, or an empty one if nothing is kept (the log
/// says why).
std::filesystem::path remember(const DeviceInfo& device, const std::string& driver,
                               const std::vector<plan::Tuned::Entry>& entries, const std::vector<plan::Verdict>& verdicts);

/// Writes a verdict for other processes only; or removes one.
void keep_on_disk(const DeviceInfo& device, const std::string& driver, const plan::Verdict& verdict);
void take_from_disk(const DeviceInfo& device, const std::string& driver, std::string_view kernel, Pass pass);

/// Changes with every addition: plans of an earlier epoch are out of date.
std::uint64_t epoch();

/// The file of a place, below a cache folder.
std::filesystem::path file_of(const std::filesystem::path& cache, const Place& place);

/// The content of the file, if it exists and belongs to this place. A damaged file is reported and not used.
TunedFile load(const std::filesystem::path& path, const Place& place);

/// Adds to a file's content: a later choice or verdict replaces an earlier one of the same problem or kernel.
void merge(TunedFile& file, const std::vector<plan::Tuned::Entry>& entries, const std::vector<plan::Verdict>& verdicts);

}  // namespace flash_attention::tuning
