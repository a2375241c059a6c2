#include "jit/store.h"

#include <sys/stat.h>

#include <algorithm>
#include <system_error>

#include "jit/entry.h"
#include "jit/file_names.h"
#include "jit/pack.h"
#include "support/files.h"
#include "support/log.h"
#include "support/sha256.h"

namespace flash_attention::jit {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

constexpr auto lock_name = "lock";
constexpr std::size_t whole_digest = 64;
constexpr auto abandoned_after = 10min;  // a temporary this old belongs to a process that was killed

struct File {
  fs::path path;
  std::int64_t bytes = 0;
  fs::file_time_type used;
};

/// The files that this library has written.
std::vector<File> files_in(const fs::path& folder) {
  std::vector<File> files;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code gone;  // another process may remove files at the same time
    if (!is_ours(it->path()) || !fs::is_regular_file(it->symlink_status(gone))) continue;
    File file{it->path(), static_cast<std::int64_t>(it->file_size(gone)), it->last_write_time(gone)};
    if (!gone) files.push_back(std::move(file));
  }
  return files;
}

}  // namespace

Store::Store(fs::path folder, Access access, std::int64_t limit_bytes, support::Trust trust)
    : folder_(std::move(folder)), access_(access), limit_bytes_(limit_bytes), trust_(trust) {
  if (access_ == Access::read_write) {
    problem_ =
        limit_bytes_ == 0 ? "FLASH_ATTENTION_CACHE_LIMIT is 0" : support::prepare_private_folder(folder_).value_or("");
    return;
  }
  std::error_code error;
  problem_ = fs::is_directory(folder_, error) ? support::why_untrusted(folder_, trust_).value_or("")
                                              : "no folder " + folder_.string();
}

std::optional<Artifact> Store::verified(std::string_view bytes, const fs::path& path, const Recipe& recipe) const {
  const std::optional<Entry> entry = decode(bytes);
  if (!entry || entry->content != digest(recipe.content, whole_digest) ||
      (!recipe.compiler.empty() && entry->compiler != recipe.compiler)) {
    support::log("flash_attention: the cached kernel " + path.string() + " is damaged; it is compiled again");
    return std::nullopt;
  }
  return Artifact{entry->payload, entry->notes, path, false, access_ == Access::read_only};
}

std::optional<Artifact> Store::load(const fs::path& path, const Recipe& recipe) const {
  const auto [bytes, refused] = support::read_trusted_file(path, trust_);
  if (!refused.empty()) support::log("flash_attention: not loaded: " + refused);
  if (!bytes) return std::nullopt;
  std::error_code error;
  auto artifact = verified(*bytes, path, recipe);
  if (access_ == Access::read_write && artifact)
    fs::last_write_time(path, fs::file_time_type::clock::now(), error);  // a use counts as a change
  if (access_ == Access::read_write && !artifact) fs::remove(path, error);
  return artifact;
}

std::optional<Artifact> Store::find(const Recipe& recipe) const {
  if (!problem_.empty()) return std::nullopt;
  // Kernels made ahead of time are correct whatever compiler made them. If there is no compiler here, so is any
  // product.
  if (access_ == Access::read_write && !recipe.compiler.empty()) return load(folder_ / file_name(recipe), recipe);
  Recipe any = recipe;
  any.compiler.clear();
  const auto is_wanted = [start = name_beginning(recipe), ending = "." + recipe.kind](const std::string& name) {
    return name.starts_with(start) && name.ends_with(ending);
  };
  for (const File& file : files_in(folder_)) {
    if (!is_wanted(file.path.filename().string())) continue;
    if (auto artifact = load(file.path, any)) return artifact;
  }
  return access_ == Access::read_only ? find_packed(any, is_wanted) : std::nullopt;
}

std::optional<Artifact> Store::find_packed(const Recipe& recipe,
                                           const std::function<bool(const std::string&)>& is_wanted) const {
  const fs::path path = folder_ / (recipe.stem + std::string(pack_ending));
  const auto pack = Pack::open(path, trust_);
  if (!pack) return std::nullopt;
  for (const Pack::File& file : pack->files()) {
    if (!is_wanted(file.name)) continue;
    if (auto artifact = verified(file.bytes, path, recipe)) return artifact;
  }
  return std::nullopt;
}

fs::path Store::keep(const Recipe& recipe, const Product& product) const {
  if (!problem_.empty() || access_ == Access::read_only) return {};
  const fs::path path = folder_ / file_name(recipe);
  fs::path source_path = path;
  source_path.replace_extension(".cu");
  auto failure = support::write_file_atomically(source_path, product.source);
  if (!failure) {
    failure = support::write_file_atomically(
        path, encode({recipe.name, digest(recipe.content, whole_digest), recipe.compiler, product.notes, product.payload}));
  }
  if (failure) {
    support::log("flash_attention: the compiled kernel is not kept: " + *failure);
    std::error_code error;
    if (!fs::exists(path, error)) fs::remove(source_path, error);
    return {};
  }
  make_room();
  std::error_code error;
  return fs::exists(path, error) ? path : fs::path{};
}

void Store::make_room() const {
  std::vector<File> files = files_in(folder_);
  std::ranges::sort(files, {}, &File::used);
  std::int64_t total = 0;
  for (const File& file : files) total += file.bytes;
  const auto now = fs::file_time_type::clock::now();
  for (const File& file : files) {
    std::error_code error;
    if (support::is_temporary(file.path)) {
      if (now - file.used > abandoned_after && fs::remove(file.path, error)) total -= file.bytes;
    } else if (total > limit_bytes_ && is_product(file.path)) {
      fs::path source_path = file.path;
      source_path.replace_extension(".cu");
      const auto source_bytes = fs::file_size(source_path, error);
      if (!error && fs::remove(source_path, error)) total -= static_cast<std::int64_t>(source_bytes);
      if (fs::remove(file.path, error)) total -= file.bytes;
    }
  }
}

std::optional<support::FileLock> Store::lock(const Recipe& recipe, std::chrono::milliseconds patience) const {
  if (!problem_.empty() || access_ == Access::read_only) return std::nullopt;
  std::uint64_t slot = 0;
  for (const std::uint8_t byte : support::sha256(file_name(recipe))) slot = slot << 8 | byte;
  return support::FileLock::acquire(folder_ / lock_name, slot, patience);
}

std::vector<CacheEntry> Store::entries() const {
  std::vector<CacheEntry> entries;
  if (!problem_.empty()) return entries;
  for (const File& file : files_in(folder_)) {
    if (!is_product(file.path)) continue;
    const auto bytes = support::read_file(file.path);
    const auto entry = bytes ? decode(*bytes) : std::nullopt;
    entries.push_back({file.path.string(), entry ? entry->name : file.path.stem().string(), file.bytes, entry.has_value()});
  }
  if (access_ == Access::read_only) add_packed(entries);
  std::ranges::sort(entries, {}, &CacheEntry::path);
  return entries;
}

void Store::add_packed(std::vector<CacheEntry>& entries) const {
  std::error_code error;
  for (fs::directory_iterator it(folder_, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() != pack_ending) continue;
    const auto pack = Pack::open(it->path(), trust_);
    if (!pack) {
      entries.push_back({it->path().string(), it->path().stem().string(), 0, false});
      continue;
    }
    for (const Pack::File& file : pack->files()) {
      const auto entry = decode(file.bytes);
      entries.push_back({it->path().string(), entry ? entry->name : file.name, static_cast<std::int64_t>(file.bytes.size()),
                         entry.has_value()});
    }
  }
}

std::int64_t Store::clear() const {
  std::int64_t freed = 0;
  if (!problem_.empty() || access_ == Access::read_only) return freed;
  for (const File& file : files_in(folder_)) {
    std::error_code error;
    if (fs::remove(file.path, error)) freed += file.bytes;
  }
  return freed;
}

}  // namespace flash_attention::jit
