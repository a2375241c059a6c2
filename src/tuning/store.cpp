#include "tuning/store.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <optional>

#include "flash_attention/error.h"
#include "support/file_lock.h"
#include "support/files.h"
#include "support/log.h"
#include "support/settings.h"
#include "support/sha256.h"
#include "tuning/shipped.h"

namespace flash_attention::tuning {
namespace {

using namespace std::chrono_literals;

std::string text_of(const Place& place) {
  return place.kind + '\n' + place.name + '\n' + std::to_string(place.arch) + '\n' + std::to_string(place.num_sms) + '\n' +
         place.isa + '\n' + std::to_string(place.threads) + '\n' + place.driver + '\n' + place.library;
}

struct Known {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const plan::Tuned>> places;
};

/// Never destroyed, and never locked in a child of fork(), like the cache of plans.
Known& all() {
  static Known& instance = *new Known;
  return instance;
}
const int fork_safe = pthread_atfork([] { all().mutex.lock(); }, [] { all().mutex.unlock(); },
                                     [] { new (&all().mutex) std::mutex; });

std::atomic<std::uint64_t> changes{0};

/// The choices for this place that are committed in the repository.
TunedFile shipped_for(const Place& place) {
  TunedFile found{.place = place, .entries = {}, .verdicts = {}};
  for (const std::string_view text : shipped_files()) {
    TunedFile file = parse_tuned(text, "a tuned file of the library");
    file.place.driver = place.driver;
    if (file.place == place) found.entries = std::move(file.entries);
  }
  return found;
}

std::shared_ptr<const plan::Tuned> read_known(const DeviceInfo& device, const Place& place) {
  TunedFile file = shipped_for(place);
  const TunedFile kept = load(file_of(support::settings().cache_dir, place), place);
  const bool tests_again = support::settings().qualify == support::Qualify::always;
  merge(file, kept.entries, tests_again ? std::vector<plan::Verdict>{} : kept.verdicts);
  if (file.entries.empty() && file.verdicts.empty()) return nullptr;
  return std::make_shared<const plan::Tuned>(device, file.entries, file.verdicts);
}

/// The folder, or nothing, with a report why there is none.
std::optional<std::filesystem::path> folder_to_write() {
  const support::Settings& settings = support::settings();
  const std::filesystem::path folder = settings.cache_dir / "tuned";
  std::optional<std::string> problem;
  if (settings.cache_limit_bytes == 0) {
    problem = "FLASH_ATTENTION_CACHE_LIMIT is 0";
  } else {
    problem = support::prepare_private_folder(settings.cache_dir);
    if (!problem) problem = support::prepare_private_folder(folder);
  }
  if (!problem) return folder;
  support::log("flash_attention: what was measured is not kept on disk: " + *problem);
  return std::nullopt;
}

/// Changes the file of a place. Returns its path if that was possible.
std::filesystem::path change_file(const Place& place, const std::function<void(TunedFile&)>& change) {
  const auto folder = folder_to_write();
  if (!folder) return {};
  const auto lock = support::FileLock::acquire(*folder / "lock", 0, 10s);  // another process may add to the same file
  const std::filesystem::path path = file_of(support::settings().cache_dir, place);
  TunedFile file = load(path, place);
  change(file);
  if (const auto failure = support::write_file_atomically(path, to_text(file))) {
    support::log("flash_attention: what was measured is not kept on disk: " + *failure);
    return {};
  }
  return path;
}

}  // namespace

std::filesystem::path file_of(const std::filesystem::path& cache, const Place& place) {
  std::string name;
  for (const char c : place.name.substr(0, 40)) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    name += plain ? c : '_';
  }
  const std::string hash = support::to_hex(support::sha256(text_of(place)));
  return cache / "tuned" / (name + "-" + hash.substr(0, 16) + ".json");
}

TunedFile load(const std::filesystem::path& path, const Place& place) {
  const TunedFile none{.place = place, .entries = {}, .verdicts = {}};
  const support::TrustedFile file = support::read_trusted_file(path);
  if (!file.refused.empty()) support::log("flash_attention: tuned choices are not used: " + file.refused);
  if (!file.bytes) return none;
  try {
    TunedFile found = parse_tuned(*file.bytes, path.string());
    require_place(found, place, path.string());
    return found;
  } catch (const Error& error) {
    support::log("flash_attention: tuned choices are not used: " + std::string(error.what()));
    return none;
  }
}

void merge(TunedFile& file, const std::vector<plan::Tuned::Entry>& entries, const std::vector<plan::Verdict>& verdicts) {
  for (const plan::Tuned::Entry& entry : entries) {
    const auto same = [&](const plan::Tuned::Entry& one) { return one.pass == entry.pass && one.problem == entry.problem; };
    const auto found = std::ranges::find_if(file.entries, same);
    if (found == file.entries.end()) {
      file.entries.push_back(entry);
    } else {
      *found = entry;
    }
  }
  for (const plan::Verdict& verdict : verdicts) {
    std::erase_if(file.verdicts,
                  [&](const plan::Verdict& one) { return one.kernel == verdict.kernel && one.pass == verdict.pass; });
    file.verdicts.push_back(verdict);
  }
}

std::shared_ptr<const plan::Tuned> known(const DeviceInfo& device, const std::string& driver) {
  const Place place = place_of(device, driver);
  const std::string key = text_of(place);
  const std::lock_guard lock(all().mutex);
  if (const auto found = all().places.find(key); found != all().places.end()) return found->second;
  return all().places[key] = read_known(device, place);
}

std::shared_ptr<const plan::Tuned> known_to_planner(const DeviceInfo& device, const std::string& driver) {
  auto all_of_it = known(device, driver);
  if (all_of_it == nullptr || support::settings().tuned) return all_of_it;
  return std::make_shared<const plan::Tuned>(device, std::vector<plan::Tuned::Entry>{}, all_of_it->verdicts());
}

std::filesystem::path remember(const DeviceInfo& device, const std::string& driver,
                               const std::vector<plan::Tuned::Entry>& entries, const std::vector<plan::Verdict>& verdicts) {
  const Place place = place_of(device, driver);
  const std::shared_ptr<const plan::Tuned> before = known(device, driver);
  TunedFile file{.place = place, .entries = {}, .verdicts = {}};
  if (before) file.entries = before->entries(), file.verdicts = before->verdicts();
  merge(file, entries, verdicts);
  {
    const std::lock_guard lock(all().mutex);
    all().places[text_of(place)] = std::make_shared<const plan::Tuned>(device, file.entries, file.verdicts);
  }
  changes.fetch_add(1, std::memory_order_relaxed);
  return change_file(place, [&](TunedFile& kept) { merge(kept, entries, verdicts); });
}

void keep_on_disk(const DeviceInfo& device, const std::string& driver, const plan::Verdict& verdict) {
  change_file(place_of(device, driver), [&](TunedFile& kept) { merge(kept, {}, {verdict}); });
}

void take_from_disk(const DeviceInfo& device, const std::string& driver, std::string_view kernel, Pass pass) {
  change_file(place_of(device, driver), [&](TunedFile& kept) {
    std::erase_if(kept.verdicts, [&](const plan::Verdict& one) { return one.kernel == kernel && one.pass == pass; });
  });
}

std::uint64_t epoch() { return changes.load(std::memory_order_relaxed); }

}  // namespace flash_attention::tuning
