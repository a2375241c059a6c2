#include <cstdio>
#include <filesystem>

#include "cli/verb.h"
#include "cli/verbs/process.h"
#include "flash_attention/error.h"

namespace flash_attention::cli {
namespace {

/// The page is drawn by the Python package; this finds it and hands over.
int report(const Arguments& arguments) {
  if (arguments.words().empty()) {
    throw Error(ErrorCode::invalid_argument, "report: got no file; name the JSON files of benchmarks");
  }
  for (const std::string& file : arguments.words()) {
    std::error_code error;
    if (!std::filesystem::exists(file, error)) throw Error(ErrorCode::invalid_argument, "report: there is no file " + file);
  }
  const std::string python = find_program("python3");
  if (python.empty()) {
    throw Error(ErrorCode::unavailable, "report: there is no python3 on the PATH, and the page is drawn by Python");
  }
  if (run_program({python, "-c", "import flash_attention.report"}).code != 0) {
    throw Error(ErrorCode::unavailable,
                "report: " + python +
                    " does not find the flash_attention package; `pip install .` in "
                    "the repository puts it there, and bench/visualize_results.py needs no installation");
  }
  std::vector<std::string> words = {python, "-m", "flash_attention", "report"};
  for (const std::string& word : arguments.words()) words.push_back(word);
  for (const Flag& flag : report_verb.flags) {
    if (!arguments.given(flag.name)) continue;
    words.push_back("--" + std::string(flag.name));
    if (!flag.value.empty()) words.push_back(arguments.text(flag.name));
  }
  const Finished finished = run_program(words);
  std::fputs(finished.output.c_str(), finished.code == 0 ? stdout : stderr);
  return finished.code;
}

}  // namespace

const Verb report_verb{"report",
                       "a page with charts and tables from the JSON files of benchmarks",
                       "Writes one HTML file that needs no network: speed by length, memory, speed-up, roofline, accuracy. "
                       "The page is drawn by\n"
                       "the Python package, so python3 with flash_attention must be installed (`pip install .`).\n"
                       "\n"
                       "Examples:\n"
                       "  flash-attention report bench/results/h200/*.json --output report.html\n"
                       "  flash-attention report build/bench/speed.json --images plots/ --readme README.md\n",
                       64,
                       {{"output", "FILE", "the page"},
                        {"images", "FOLDER", "also every chart as SVG and PNG"},
                        {"headline", "FILE", "also the picture of README.md, as SVG and PNG"},
                        {"readme", "FILE", "replace the tables between its markers"},
                        {"force", "", "overwrite"}},
                       report};

}  // namespace flash_attention::cli
