"""Mistakes of meaning in src/jit and src/support: what is trusted, what is ours, what makes a kernel another one."""

from .plant import Plant

STORE = "jit_test Store.*"
SEARCH = "jit_test NvrtcSearch.*"
FILES = "support_room_test Files.*"

PLANTS = (
    Plant(
        "without HOME the user's packages are below the working folder",
        "src/jit/nvrtc/nvrtc_search.cpp",
        "    if (!prefix.is_absolute()) continue;\n",
        "    if (prefix.empty()) continue;\n",
        SEARCH,
        survives="add_folder() and add_file() refuse what has no full path, too (the plants below)",
    ),
    Plant(
        "a relative library is opened",
        "src/jit/nvrtc/nvrtc_search.cpp",
        "if (library.is_absolute() || !library.has_parent_path()) {",
        "if (!library.empty()) {",
        SEARCH,
    ),
    Plant(
        "a relative folder is searched",
        "src/jit/nvrtc/nvrtc_search.cpp",
        '    if (!folder.is_absolute()) return add_miss(origin, folder.string() + " is not a full path");\n',
        "",
        SEARCH,
        survives="add_file() refuses what has no full path, too (the plant above)",
    ),
    Plant(
        "a relative HOME is taken",
        "src/support/settings.cpp",
        "return found.is_absolute() ? found : std::filesystem::path{};",
        "return found;",
        "support_room_test Settings.*",
    ),
    Plant(
        "a failed search for NVRTC is remembered",
        "src/jit/nvrtc/nvrtc.cpp",
        "  const auto* compiler = new Nvrtc(nvrtc_places(support::settings(), surroundings()));",
        "  static const auto places = nvrtc_places(support::settings(), surroundings());\n"
        "  const auto* compiler = new Nvrtc(places);",
        "jit_test Nvrtc.*",
    ),
    Plant(
        "clear removes every .so, .ptx and .cubin",
        "src/jit/file_names.cpp",
        "&& ends_with_hashes(path.stem().string());",
        "&& (ends_with_hashes(path.stem().string()) || true);",
        STORE,
    ),
    Plant(
        "hashes are not looked at digit by digit",
        "src/jit/file_names.cpp",
        "return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');",
        "return c != '.';",
        STORE,
    ),
    Plant(
        "anything that failed is ours",
        "src/jit/file_names.cpp",
        "  if (arch == std::string_view::npos || arch == 0) return false;\n",
        "  if (arch == std::string_view::npos || arch == 0) return true;\n",
        STORE,
    ),
    Plant(
        "anything temporary is ours",
        "src/jit/file_names.cpp",
        "  return is_named_by_us(name, true) || ",
        "  return support::is_temporary(path) || is_named_by_us(name, true) || ",
        STORE,
    ),
    Plant(
        "links are followed when a cached kernel is read",
        "src/support/files.cpp",
        "O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK",
        "O_RDONLY | O_CLOEXEC | O_NONBLOCK",
        FILES,
    ),
    Plant(
        "a file that others can write to is code",
        "src/support/files.cpp",
        "if ((status.st_mode & (S_IWGRP | S_IWOTH) & ~allowed) != 0) {",
        "if ((status.st_mode & S_IWGRP & ~allowed) != 0) {",
        FILES,
    ),
    Plant(
        "another user's link is followed",
        "src/support/files.cpp",
        "  if (S_ISLNK(link.st_mode) && link.st_uid != ::geteuid() && link.st_uid != 0) {\n",
        "  if (S_ISLNK(link.st_mode) && link.st_uid == 1) {\n",
        FILES,
    ),
    Plant(
        "a folder above that all can write to does not matter",
        "src/support/files.cpp",
        "  if (auto reason = why_replaceable(std::filesystem::absolute(folder, error))) return reason;\n",
        "  (void)why_replaceable(std::filesystem::absolute(folder, error));\n",
        FILES,
    ),
    Plant(
        "the cache's folder can be read by all",
        "src/support/files.cpp",
        "::mkdir(folder.c_str(), 0700)",
        "::mkdir(folder.c_str(), 0755)",
        FILES,
    ),
    Plant(
        "the compiler is not part of a kernel's name",
        "src/jit/file_names.cpp",
        'digest(recipe.compiler, compiler_digits) + "." + recipe.kind',
        'digest("", compiler_digits) + "." + recipe.kind',
        STORE,
    ),
    Plant(
        "a kernel's content is not compared",
        "src/jit/store.cpp",
        "!entry || entry->content != digest(recipe.content, whole_digest) ||",
        "!entry ||",
        STORE,
    ),
    Plant(
        "a pack with bytes behind its last file is taken",
        "src/jit/pack.cpp",
        "  if (!content.empty()) return std::nullopt;\n",
        "",
        "jit_test Pack.*",
    ),
    Plant(
        "a damaged file is taken",
        "src/jit/entry.cpp",
        "|| trailer.hash != support::sha256(body)) {",
        ") {",
        STORE,
    ),
    Plant(
        "the most recently used go first",
        "src/jit/store.cpp",
        "std::ranges::sort(files, {}, &File::used);",
        "std::ranges::sort(files, std::greater<>(), &File::used);",
        STORE,
    ),
    Plant(
        "options of NVRTC do not make another kernel",
        "src/jit/compiler.cpp",
        "  for (const std::string& option : options) recipe.content += '\\0' + option;\n",
        "",
        "jit_test *Pipeline*.*",
    ),
    Plant(
        "an included file does not make another kernel",
        "src/jit/compiler.cpp",
        "  for (const SourceFile& source : sources) recipe.content += '\\0' + source.name + '\\0' + source.text;\n",
        "",
        "jit_test *Pipeline*.*",
    ),
    Plant(
        "a kernel's key lacks its threads",
        "src/jit/kernel_key.cpp",
        "arch, launch.block, launch.min_blocks_per_sm, false,",
        "arch, 256, launch.min_blocks_per_sm, false,",
        "jit_test KernelKey.*",
    ),
)
