#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "plan/tuned.h"
#include "tuning/tuned_file.h"

namespace flash_attention::tuning {

/// What is known of each place: what came with the library, what the folder beside the compiled kernels has, and what this
/// process found out. Safe for any number of threads and processes.
std::shared_ptr<const plan::Tuned> known(const DeviceInfo& device, const std::string& driver);

/// The same without the choices where FLASH_ATTENTION_TUNED is off.
std::shared_ptr<const plan::Tuned> known_to_planner(const DeviceInfo& device, const std::string& driver);

/// Adds to it, and keeps it on disk; returns where, or an empty path where nothing is kept (the log says why).
std::filesystem::path remember(const DeviceInfo& device, const std::string& driver,
                               const std::vector<plan::Tuned::Entry>& entries, const std::vector<plan::Verdict>& verdicts);

/// A verdict for other processes alone, and one of those that is no more.
void keep_on_disk(const DeviceInfo& device, const std::string& driver, const plan::Verdict& verdict);
void take_from_disk(const DeviceInfo& device, const std::string& driver, std::string_view kernel, Pass pass);

/// Changes whenever something was added: plans that were made before are of another time.
std::uint64_t epoch();

/// Where what is known of a place is kept, below a cache folder.
std::filesystem::path file_of(const std::filesystem::path& cache, const Place& place);

/// The content of the file, if there is one and it is of this place. A damaged file is reported and not used.
TunedFile load(const std::filesystem::path& path, const Place& place);

/// Adds to a file's content: a later choice or verdict replaces an earlier one of the same problem or kernel.
void merge(TunedFile& file, const std::vector<plan::Tuned::Entry>& entries, const std::vector<plan::Verdict>& verdicts);

}  // namespace flash_attention::tuning
