#include "cli/ladder/rung.h"

#include <algorithm>

#include "flash_attention/error.h"
#include "jit/embedded.h"

namespace flash_attention::cli {
namespace {

constexpr std::string_view prefix = "ladder/";

std::string source_of(const std::string& embedded_name) {
  for (const jit::EmbeddedFile& file : jit::embedded_files()) {
    if (file.name == embedded_name) return std::string(file.text);
  }
  throw Error(ErrorCode::internal, "the ladder's " + embedded_name + " is not embedded");
}

/// Whether the rung refuses 16-bit tensors on a device that has its instructions: then it is a rung for 8 bits.
bool is_narrow(const KernelSummary& kernel) {
  if (!device_traits(kernel.device).gpu_kernels) return false;
  const DeviceInfo hopper{.device = {.kind = DeviceKind::cuda}, .arch = 90, .num_sms = 132, .shared_bytes = 227 << 10};
  try {
    make_plan({.seq_q = 128, .seq_kv = 128, .head_dim = 64, .dtype = Dtype::bfloat16}, kernel.pass, hopper, kernel.name);
    return false;
  } catch (const Error&) {
    return true;
  }
}

/// The rest of the line that begins with the mark, without leading blanks.
std::string line_after(std::string_view text, std::string_view mark) {
  const std::size_t at = text.find(mark);
  if (at == std::string_view::npos) return "";
  std::string_view line = text.substr(at + mark.size());
  line = line.substr(0, line.find('\n'));
  line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
  return std::string(line);
}

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

}  // namespace

bool is_rung(std::string_view kernel) { return kernel.starts_with(prefix); }

std::vector<Rung> rungs() {
  std::vector<Rung> all;
  for (const KernelSummary& kernel : kernels()) {
    if (!is_rung(kernel.name)) continue;
    const bool on_cpu = !device_traits(kernel.device).gpu_kernels;
    const std::string folder = kernel.pass == Pass::backward ? "ladder/backward/" : "ladder/";
    const std::string name = folder + kernel.name.substr(prefix.size()) + (on_cpu ? ".h" : ".cu");
    Rung rung;
    rung.kernel = kernel.name;
    rung.name = kernel.name.substr(prefix.size());
    rung.pass = kernel.pass;
    rung.device = kernel.device;
    rung.narrow = is_narrow(kernel);
    rung.file = (on_cpu ? "src/cpu/" : "kernels/") + name;
    rung.source = source_of(name);
    rung.idea = line_after(rung.source, "// The idea:");
    const std::string from = line_after(rung.source, "// From ");
    rung.from = from.substr(0, from.find(':'));
    all.push_back(std::move(rung));
  }
  return all;
}

std::vector<Rung> rungs_named(const std::vector<std::string>& words) {
  std::vector<Rung> all = rungs(), chosen;
  if (words.empty()) return all;
  std::string names;
  for (const Rung& rung : all) names += (names.empty() ? "" : ", ") + rung.name;
  for (const std::string& word : words) {
    const auto found = std::find_if(all.begin(), all.end(), [&](const Rung& rung) { return rung.name.starts_with(word); });
    if (found == all.end()) throw Error(ErrorCode::invalid_argument, "ladder: got '" + word + "', allowed: " + names);
    chosen.push_back(*found);
  }
  return chosen;
}

std::vector<DiffLine> diff(std::string_view from, std::string_view to) {
  const std::vector<std::string_view> a = lines_of(from), b = lines_of(to);
  // common[i][j]: the longest common subsequence of a[i..] and b[j..].
  std::vector<std::vector<int>> common(a.size() + 1, std::vector<int>(b.size() + 1, 0));
  for (std::size_t i = a.size(); i-- > 0;) {
    for (std::size_t j = b.size(); j-- > 0;) {
      common[i][j] = a[i] == b[j] ? common[i + 1][j + 1] + 1 : std::max(common[i + 1][j], common[i][j + 1]);
    }
  }
  std::vector<DiffLine> lines;
  for (std::size_t i = 0, j = 0; i < a.size() || j < b.size();) {
    if (i < a.size() && j < b.size() && a[i] == b[j]) {
      lines.push_back({' ', a[i++]});
      ++j;
    } else if (j == b.size() || (i < a.size() && common[i + 1][j] >= common[i][j + 1])) {
      lines.push_back({'-', a[i++]});
    } else {
      lines.push_back({'+', b[j++]});
    }
  }
  return lines;
}

int added_lines(std::string_view from, std::string_view to) {
  const std::vector<DiffLine> lines = diff(from, to);
  return static_cast<int>(std::count_if(lines.begin(), lines.end(), [](const DiffLine& line) { return line.mark == '+'; }));
}

}  // namespace flash_attention::cli
