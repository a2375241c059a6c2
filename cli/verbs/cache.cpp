#include <cstdio>

#include "cli/output/format.h"
#include "cli/output/json.h"
#include "cli/output/terminal.h"
#include "cli/verb.h"
#include "flash_attention/runtime.h"

namespace flash_attention::cli {
namespace {

int size(bool as_json) {
  std::int64_t total = 0, kernels = 0;
  for (const CacheEntry& entry : cache_entries()) total += entry.bytes, ++kernels;
  if (as_json) {
    Json json = Json::object();
    std::puts(json.add("directory", cache_directory()).add("bytes", total).add("kernels", kernels).text().c_str());
  } else {
    std::printf("%s\n", format_bytes(static_cast<double>(total)).c_str());
  }
  return ok;
}

int list(bool as_json, bool must_be_intact) {
  const std::vector<CacheEntry> entries = cache_entries();
  Json files = Json::array();
  Table table({"state", "bytes", "kernel"});
  std::int64_t total = 0;
  bool intact = true;
  for (const CacheEntry& entry : entries) {
    Json file = Json::object();
    files.push(
        file.add("path", entry.path).add("kernel", entry.kernel).add("bytes", entry.bytes).add("intact", entry.intact));
    table.add({entry.intact ? "intact" : "DAMAGED", std::to_string(entry.bytes), entry.kernel});
    total += entry.bytes;
    intact = intact && entry.intact;
  }
  if (as_json) {
    Json json = Json::object();
    std::puts(json.add("directory", cache_directory())
                  .add("bytes", total)
                  .add("intact", intact)
                  .add("files", files)
                  .text()
                  .c_str());
  } else {
    if (!entries.empty()) std::fputs(table.text().c_str(), stdout);
    std::printf("%zu kernels, %s in %s\n", entries.size(), format_bytes(static_cast<double>(total)).c_str(),
                cache_directory().c_str());
  }
  return must_be_intact && !intact ? check_failed : ok;
}

int cache(const Arguments& arguments) {
  const std::string what = arguments.words().empty() ? "list" : arguments.words().front();
  const bool as_json = arguments.on("json");
  if (what == "list") return list(as_json, false);
  if (what == "size") return size(as_json);
  if (what == "verify") return list(as_json, true);
  if (what == "clear") {
    const std::int64_t bytes = clear_cache();
    if (as_json) {
      std::puts(Json::object().add("freed_bytes", bytes).text().c_str());
    } else {
      std::printf("freed %s in %s\n", format_bytes(static_cast<double>(bytes)).c_str(), cache_directory().c_str());
    }
    return ok;
  }
  if (what == "path") {
    std::puts(cache_directory().c_str());
    return ok;
  }
  throw Error(ErrorCode::invalid_argument, "cache: got '" + what + "', allowed: list, size, verify, clear, path");
}

}  // namespace

const Verb cache_verb{
    "cache",
    "the compiled kernels on disk: list, size, verify, clear, path",
    "GPU kernels are compiled on first use and kept on disk. A damaged file is noticed and compiled again when it is\n"
    "used, so clearing is never needed; `verify` exits with 1 if a file is damaged.\n"
    "\n"
    "Examples:\n"
    "  flash-attention cache\n"
    "  flash-attention cache verify\n"
    "  flash-attention cache clear\n",
    1,
    {{"json", "", "print JSON"}},
    cache};

}  // namespace flash_attention::cli
