#include "jit/pack.h"

#include <charconv>
#include <map>
#include <mutex>

#include "support/log.h"
#include "support/lzma.h"

namespace flash_attention::jit {
namespace {

constexpr std::size_t max_content_bytes = std::size_t{1} << 28;

/// The files that the first lines of a pack name; nothing if these are not such lines.
std::optional<std::vector<Pack::File>> files_of(std::string_view content) {
  std::vector<Pack::File> files;
  std::vector<std::size_t> sizes;
  for (;;) {
    const std::size_t end = content.find('\n');
    if (end == std::string_view::npos) return std::nullopt;
    const std::string_view line = content.substr(0, end);
    content.remove_prefix(end + 1);
    if (line.empty()) break;
    const std::size_t space = line.find(' ');
    if (space == std::string_view::npos) return std::nullopt;
    std::size_t bytes = 0;
    const auto [last, error] = std::from_chars(line.data() + space + 1, line.data() + line.size(), bytes);
    if (error != std::errc() || last != line.data() + line.size()) return std::nullopt;
    files.push_back({std::string(line.substr(0, space)), {}});
    sizes.push_back(bytes);
  }
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (sizes[i] > content.size()) return std::nullopt;
    files[i].bytes = content.substr(0, sizes[i]);
    content.remove_prefix(sizes[i]);
  }
  if (!content.empty()) return std::nullopt;
  return files;
}

/// The packs of this process. Never destroyed: a background thread may still look while the process ends.
struct Packs {
  std::mutex mutex;
  std::map<std::filesystem::path, std::shared_ptr<const Pack>> known;
};
Packs& packs() {
  static Packs& process = *new Packs;
  return process;
}

}  // namespace

std::shared_ptr<const Pack> Pack::read(const std::filesystem::path& path, const support::Trust& trust) {
  const auto [bytes, refused] = support::read_trusted_file(path, trust);
  if (!refused.empty()) support::log("flash_attention: not loaded: " + refused);
  if (!bytes) return nullptr;
  auto pack = std::make_shared<Pack>();
  if (auto content = support::decompress_lzma(*bytes, max_content_bytes)) {
    pack->content_ = std::move(*content);
    if (auto files = files_of(pack->content_)) {
      pack->files_ = std::move(*files);
      return pack;
    }
  }
  support::log("flash_attention: the kernels in " + path.string() + " are damaged; they are compiled");
  return nullptr;
}

std::shared_ptr<const Pack> Pack::open(const std::filesystem::path& path, const support::Trust& trust) {
  const std::lock_guard lock(packs().mutex);
  const auto [place, is_new] = packs().known.try_emplace(path);
  if (is_new) place->second = read(path, trust);
  return place->second;
}

}  // namespace flash_attention::jit
