#include "cli/ladder/ladder_page.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "cli/output/format.h"
#include "cli/output/report.h"
#include "flash_attention/error.h"

namespace flash_attention::cli {
namespace {

constexpr std::string_view begin_mark = "<!-- ladder begin: written by flash-attention ladder --update -->\n";
constexpr std::string_view end_mark = "<!-- ladder end -->";

/// The rung that this one changes; null for the first.
const Rung* rung_before(const std::vector<Rung>& rungs, const Rung& rung) {
  if (rung.from.empty()) return nullptr;
  const auto found =
      std::find_if(rungs.begin(), rungs.end(), [&](const Rung& r) { return r.name.starts_with(rung.from + "_"); });
  return found == rungs.end() ? nullptr : &*found;
}

std::string ratio_cell(double now, double before) { return now == 0 || before == 0 ? "-" : format("%.2f x", now / before); }

}  // namespace

std::string speed_cell(double tflops) { return tflops == 0 ? "-" : format(tflops < 10 ? "%.2f" : "%.1f", tflops); }

std::string markdown_table(const std::vector<Rung>& rungs, const LadderResults& results) {
  std::string text =
      "| rung | the idea | new lines | full, TFLOP/s | causal, TFLOP/s | over the one before: full | causal |\n";
  text += "|---|---|---|---|---|---|---|\n";
  for (const Rung& rung : rungs) {
    if (!device_traits(rung.device).gpu_kernels) continue;
    const Rung* before = rung_before(rungs, rung);
    const Rung* slower = before;  // the last one before it that was measured
    while (slower && slower->pass == rung.pass && results.tflops(slower->kernel, false) == 0) {
      slower = rung_before(rungs, *slower);
    }
    if (slower && slower->pass != rung.pass) slower = nullptr;
    const double full = results.tflops(rung.kernel, false), causal = results.tflops(rung.kernel, true);
    const std::string page = rung.name.substr(0, rung.name.find('_'));
    const std::string folder = rung.pass == Pass::backward ? "../../docs/ladder/backward/" : "../../docs/ladder/";
    text += "| [" + rung.name + "](" + folder + page + ".md) | " + rung.idea + " | ";
    text += (before ? std::to_string(added_lines(before->source, rung.source)) : "-") + " | ";
    text += speed_cell(full) + " | " + speed_cell(causal) + " | ";
    text += ratio_cell(full, slower ? results.tflops(slower->kernel, false) : 0) + " | ";
    text += ratio_cell(causal, slower ? results.tflops(slower->kernel, true) : 0) + " |\n";
  }
  if (!results.device.empty()) {
    text +=
        "\n" + results.device +
        ", batch 4, 16 heads, 4096 x 4096, head_dim 128, bfloat16; 4 * batch * heads * seq^2 * head_dim operations, half "
        "of it causal.\n";
  }
  return text;
}

void update_pages(const std::filesystem::path& root, const std::filesystem::path& results_file,
                  const std::vector<Rung>& rungs, const LadderResults& results) {
  const std::filesystem::path page = root / "kernels/ladder/README.md";
  std::ifstream file(page);
  std::stringstream content;
  content << file.rdbuf();
  std::string text = content.str();
  const std::size_t begin = text.find(begin_mark), end = text.find(end_mark);
  if (begin == std::string::npos || end == std::string::npos || end < begin) {
    throw Error(ErrorCode::invalid_argument,
                "--update: '" + page.string() + "' has no place for the table, allowed: --root FOLDER of the source");
  }
  text.replace(begin, end - begin, std::string(begin_mark) + markdown_table(rungs, results));
  text.erase(text.find_last_not_of('\n') + 1);
  save(page.string(), text);
  const std::string draw = "python3 '" + (root / "bench/visualize_ladder.py").string() + "' '" + results_file.string() +
                           "' '" + (root / "docs/ladder/images").string() + "' > /dev/null";
  if (std::system(draw.c_str()) != 0)
    throw Error(ErrorCode::unavailable, "--update: the table is written, the plots are not; the command was: " + draw);
}

}  // namespace flash_attention::cli
