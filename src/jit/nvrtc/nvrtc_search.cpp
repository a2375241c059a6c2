#include "jit/nvrtc/nvrtc_search.h"

#include <link.h>

#include <algorithm>

namespace flash_attention::jit {
namespace {

namespace fs = std::filesystem;

constexpr const char* library_names[] = {"libnvrtc.so.13", "libnvrtc.so.12"};

bool is_nvrtc(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.starts_with("libnvrtc") && name.find(".so") != std::string::npos &&
         name.find("builtins") == std::string::npos && name.find(".alt.") == std::string::npos;
}

std::vector<fs::path> subfolders(const fs::path& folder, const std::string& beginning) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().starts_with(beginning)) found.push_back(it->path());
  }
  std::ranges::sort(found, std::greater<>());  // the newest version first
  return found;
}

class Places {
 public:
  /// Nothing is ever loaded from below the working folder, which anybody may write. A library has a full path, or a
  /// plain name, which the loader searches in its own folders.
  void add_file(const std::string& origin, const fs::path& library) {
    if (library.is_absolute() || !library.has_parent_path()) {
      places_.push_back({origin, library, ""});
    } else {
      add_miss(origin, library.string() + " is not a full path");
    }
  }
  void add_miss(const std::string& origin, const std::string& reason) { places_.push_back({origin, {}, reason}); }

  /// The libraries in the folder, or a note that there are none.
  void add_folder(const std::string& origin, const fs::path& folder) {
    if (!folder.is_absolute()) return add_miss(origin, folder.string() + " is not a full path");
    bool found = false;
    for (const char* name : library_names) {
      std::error_code error;
      if (!fs::exists(folder / name, error)) continue;
      add_file(origin, folder / name);
      found = true;
    }
    if (!found) add_miss(origin, "no libnvrtc.so.13 or libnvrtc.so.12 in " + folder.string());
  }

  std::vector<NvrtcPlace> take() { return std::move(places_); }

 private:
  std::vector<NvrtcPlace> places_;
};

/// Folders with Python packages: those from which the process has loaded libraries, then those of the environment's
/// Pythons.
std::vector<fs::path> python_folders(const support::Settings& settings, const Surroundings& around) {
  std::vector<fs::path> folders;
  const auto add = [&](const fs::path& folder) {
    if (std::ranges::find(folders, folder) == folders.end()) folders.push_back(folder);
  };
  for (const fs::path& library : around.loaded_libraries) {
    if (!library.is_absolute()) continue;
    for (fs::path folder = library.parent_path(); folder.has_relative_path(); folder = folder.parent_path()) {
      if (folder.filename() == "site-packages" || folder.filename() == "dist-packages") add(folder);
    }
  }
  const fs::path of_user = settings.home.empty() ? fs::path{} : settings.home / ".local";
  const fs::path prefixes[] = {settings.virtual_env, around.executable.parent_path().parent_path(), of_user,
                               around.usr_local};
  for (const fs::path& prefix : prefixes) {
    if (!prefix.is_absolute()) continue;
    for (const fs::path& python : subfolders(prefix / "lib", "python3")) {
      for (const char* name : {"site-packages", "dist-packages"}) {
        std::error_code error;
        if (fs::is_directory(python / name, error)) add(python / name);
      }
    }
  }
  return folders;
}

}  // namespace

Surroundings surroundings() {
  Surroundings around;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* out) {
        const fs::path path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        if (path.has_parent_path()) static_cast<std::vector<fs::path>*>(out)->push_back(path);
        return 0;
      },
      &around.loaded_libraries);
  std::error_code error;
  around.executable = fs::read_symlink("/proc/self/exe", error);
  return around;
}

std::vector<NvrtcPlace> nvrtc_places(const support::Settings& settings, const Surroundings& around) {
  Places places;
  if (!settings.nvrtc.empty()) {
    std::error_code error;
    if (settings.nvrtc.is_absolute() && fs::is_directory(settings.nvrtc, error)) {
      places.add_folder("FLASH_ATTENTION_NVRTC", settings.nvrtc);
    } else {
      places.add_file("FLASH_ATTENTION_NVRTC", settings.nvrtc);
    }
    return places.take();
  }
  bool loaded = false;
  for (const fs::path& library : around.loaded_libraries) {
    if (!is_nvrtc(library)) continue;
    places.add_file("loaded already", library);
    loaded = true;
  }
  if (!loaded) places.add_miss("loaded already", "this process has no NVRTC");

  const auto pythons = python_folders(settings, around);
  for (const fs::path& packages : pythons) {
    for (const char* wheel : {"nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"})
      places.add_folder("Python wheel", packages / wheel);
  }
  if (pythons.empty()) places.add_miss("Python wheel", "no folder of Python packages is known");

  if (settings.conda_prefix.empty()) {
    places.add_miss("conda", "CONDA_PREFIX is not set");
  } else {
    places.add_folder("conda", settings.conda_prefix / "lib");
    places.add_folder("conda", settings.conda_prefix / "targets/x86_64-linux/lib");
  }
  if (settings.cuda_home.empty()) {
    places.add_miss("CUDA_HOME", "not set");
  } else {
    places.add_folder("CUDA_HOME", settings.cuda_home / "lib64");
  }
  for (const char* name : library_names) places.add_file("loader", name);
  const auto toolkits = subfolders(around.usr_local, "cuda");
  for (const fs::path& toolkit : toolkits) places.add_folder("toolkit", toolkit / "lib64");
  if (toolkits.empty()) places.add_miss("toolkit", "no " + (around.usr_local / "cuda*").string());
  return places.take();
}

}  // namespace flash_attention::jit
